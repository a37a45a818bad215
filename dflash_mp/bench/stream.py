"""What the stream costs on this machine.

    python -m dflash_mp.bench.stream full

Stages sleep instead of computing, so that they do not fight for cores; bytes, processes, store and
edges are real; everything is measured with gloo and with shared memory. Forms: quick (to see that
it works) and full (4 minutes).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflash_mp.bench import stream_rank
from dflash_mp.bench.machine import RESULTS, write_result

MIB = 2**20
FRAME = 6 * MIB
"""A frame of the default run's size: 1024 tokens, five tapped layers of 576, bf16."""
EDGES = ("gloo", "shm")
WINDOWS = (1, 2, 3, 4)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TARGETS = (1, 2, 4, 8)


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.stream",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", nargs="?", default="full", choices=("quick", "full"))
    parser.add_argument("result", type=Path, nargs="?", help="default: results/stream-<form>.json")
    parsed = parser.parse_args(arguments)
    form = parsed.form
    found: dict[str, list[dict[str, Any]]] = {"windows": [], "sizes": [], "targets": []}
    for edge in EDGES:
        if form == "quick":
            found["windows"] += windows(edge, (1, 1), (0.01, 0.01), MIB, frames=16, slots=(3,))
            found["sizes"] += sizes(edge, (1,))
        else:
            found["windows"] += windows(edge, (2, 1), (0.1, 0.05), FRAME, frames=100)
            found["windows"] += windows(edge, (5, 3), (0.25, 0.15), FRAME, frames=60)
            found["sizes"] += sizes(edge, SIZES)
            found["targets"] += targets(edge, TARGETS)
    write_result(parsed.result or RESULTS / f"stream-{form}.json", {"form": form, **found})


def windows(
    edge: str,
    ranks: tuple[int, int],
    pauses: tuple[float, float],
    nbytes: int,
    frames: int,
    slots: tuple[int, ...] = WINDOWS,
) -> list[dict[str, Any]]:
    """Efficiency for each W: the stream's rate by that of the slower side alone.

    Args:
        edge: what carries the frames, as ``wire.edge`` names it.
        ranks: target and drafter processes.
        pauses: seconds of a frame in a target and in a drafter.
        nbytes: of a frame.
        frames: of each drafter.
        slots: the W to try.
    """
    trials = [
        {
            "kind": "stages",
            "slots": w,
            "target_s": pauses[0],
            "drafter_s": pauses[1],
            "nbytes": nbytes,
            "frames": frames,
        }
        for w in slots
    ]
    (targets, drafters), rows = ranks, []
    for trial in run(edge, targets, drafters, trials):
        found = trial.pop("ranks")
        alone = [
            sum(rank["alone"] for rank in found if rank["role"] == role)
            for role in ("target", "drafter")
        ]
        rate = sum(rank.get("rate", 0.0) for rank in found)
        rows.append(
            trial
            | {
                "edge": edge,
                "targets": targets,
                "drafters": drafters,
                "alone_frames_per_s": [round(value, 2) for value in alone],
                "frames_per_s": round(rate, 2),
                "efficiency": round(rate / min(alone), 4),
            }
        )
        say(
            f"{edge}, {targets}+{drafters} processes, W = {trial['slots']}: {rate:.2f} frames/s, "
            f"targets alone {alone[0]:.2f}, drafters alone {alone[1]:.2f}: "
            f"efficiency {rate / min(alone):.3f}"
        )
    return rows


def sizes(edge: str, mebibytes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Cost by size of a frame, between one target and one drafter that do nothing else."""
    trials: list[dict[str, Any]] = []
    for size in mebibytes:
        frames = max(24, 256 // size)
        trials.append({"kind": "edge", "nbytes": size * MIB, "frames": max(6, frames // 4)})
        trials.append(flood(size * MIB, frames))
    found = run(edge, 1, 1, trials)
    rows = []
    for raw, stream in zip(found[::2], found[1::2], strict=True):
        ends = raw["ranks"]
        row = {
            "edge": edge,
            "nbytes": raw["nbytes"],
            "edge_gb_per_s": round(min(end["bytes_per_s"] for end in ends) / 1e9, 3),
            "memcpy_gb_per_s": round(
                statistics.mean(end["copied_bytes_per_s"] for end in ends) / 1e9, 3
            ),
            **cost(stream),
        }
        rows.append(row)
        say(
            f"{edge}, frames of {raw['nbytes'] / MIB:.0f} MiB: edge {row['edge_gb_per_s']} GB/s, "
            f"memcpy {row['memcpy_gb_per_s']} GB/s, stream {row['stream_gb_per_s']} GB/s, "
            f"{row['cpu_s_per_gb']} CPU-s a GB"
        )
    return rows


def targets(edge: str, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Cost by number of targets that serve one drafter, none of which does anything else."""
    rows = []
    for count in counts:
        (stream,) = run(edge, count, 1, [flood(FRAME, 100)])
        row = {"edge": edge, "targets": count, "nbytes": FRAME, **cost(stream)}
        rows.append(row)
        say(
            f"{edge}, {count} targets: stream {row['stream_gb_per_s']} GB/s, "
            f"{row['cpu_s_per_gb']} CPU-s a GB"
        )
    return rows


def flood(nbytes: int, frames: int) -> dict[str, Any]:
    """A trial without sleeping."""
    return {
        "kind": "stages",
        "slots": 3,
        "target_s": 0,
        "drafter_s": 0,
        "nbytes": nbytes,
        "frames": frames,
    }


def cost(stream: dict[str, Any]) -> dict[str, float]:
    """Bytes per second of a trial, and CPU seconds of all its processes per 10**9 bytes."""
    nbytes, ranks = stream["nbytes"], stream["ranks"]
    rate = sum(rank.get("rate", 0.0) for rank in ranks)
    cpu = sum(rank["cpu_s"] for rank in ranks)
    return {
        "stream_gb_per_s": round(rate * nbytes / 1e9, 3),
        "cpu_s_per_gb": round(cpu / (stream["frames"] * nbytes / 1e9), 3),
    }


def run(
    edge: str, targets: int, drafters: int, trials: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """All trials in one set of processes; each comes back with ``ranks``, what every rank found."""
    with tempfile.TemporaryDirectory() as name:
        setting, results = Path(name) / "trials.json", Path(name) / "results.json"
        asked = {"edge": edge, "targets": targets, "drafters": drafters, "trials": trials}
        setting.write_text(json.dumps(asked))
        subprocess.run(
            [
                *(sys.executable, "-m", "launch.spawn", "--nproc", str(targets + drafters)),
                *("--script", stream_rank.__file__, setting, results),
            ],
            check=True,
        )
        found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def say(line: str) -> None:
    """One line on the terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
