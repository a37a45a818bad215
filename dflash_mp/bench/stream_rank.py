"""One rank of ``bench.stream``: sleeps where it would compute, and moves real bytes.

Started by ``launch.spawn --script``; arguments: a JSON file with the trials, and one for results.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash_mp.cast import (
    TARGET,
    Cast,
    LauncherStore,
    launcher_store,
    loopback,
    place_from_environment,
)
from dflash_mp.config import TopologyConfig
from dflash_mp.wire.connect import open_edges
from dflash_mp.wire.edge import Edge
from dflash_mp.wire.frame import Layout
from dflash_mp.wire.plan import Plan
from dflash_mp.wire.receiver import Receiver
from dflash_mp.wire.stream import Sender

TIMEOUT = timedelta(seconds=120)
TOKENS = 1024
ENDS = 4
"""Frames of a drafter, beyond the W of its ring, that count as fill, and as drain."""


def main(trials_path: Path, results_path: Path) -> None:
    """Run all trials with the same edges; the first drafter writes what all ranks found."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    setting = json.loads(trials_path.read_text())
    mine = place_from_environment(TopologyConfig(setting["targets"], setting["drafters"], False))
    launcher = launcher_store("bench")
    store = launcher.this_attempt()
    cast = Cast(mine, torch.device("cpu"), store, launcher)
    room = max(trial.get("slots", 1) * layout(trial).nbytes for trial in setting["trials"])
    edges = open_edges(cast, setting["edge"], room, TIMEOUT)
    found = []
    for number, trial in enumerate(setting["trials"]):
        inside = dist.PrefixStore(f"trial/{number}", store)
        cast = Cast(mine, torch.device("cpu"), inside, LauncherStore(inside, 0))
        kind = {"stages": stages, "edge": raw_edge}[trial["kind"]]
        inside.set(f"found/{mine.rank}", json.dumps(kind(cast, edges, trial)))
        if mine.is_main:
            ranks = [json.loads(inside.get(f"found/{rank}")) for rank in range(mine.world_size)]
            found.append(trial | {"ranks": ranks})
        meet(cast, "end")
    for edge in edges.values():
        edge.close()
    if mine.is_main:
        results_path.write_text(json.dumps(found))
    launcher.this_attempt().set(f"bye/{mine.rank}", "")


def layout(trial: dict[str, Any]) -> Layout:
    """Frames whose hidden states have the trial's size."""
    return Layout(TOKENS, 1, trial["nbytes"] // (2 * TOKENS), 0, torch.bfloat16)


def meet(cast: Cast, where: str) -> None:
    """Wait until every rank has come here."""
    cast.store.set(f"{where}/{cast.place.rank}", "")
    cast.store.wait([f"{where}/{rank}" for rank in range(cast.place.world_size)], TIMEOUT)


def stages(cast: Cast, edges: dict[int, Edge], trial: dict[str, Any]) -> dict[str, Any]:
    """A stream whose stages sleep ``target_s`` and ``drafter_s`` a frame.

    Returns:
        ``role``; ``alone``, frames per second of the stage by itself, if it sleeps; for drafters
        ``rate``, frames per second between fill and drain; ``cpu_s`` of this process in the stream.
    """
    is_target = cast.place.role == TARGET
    pause = trial["target_s" if is_target else "drafter_s"]
    found: dict[str, Any] = {"role": cast.place.role}
    if pause:
        meet(cast, "alone")
        found["alone"] = alone(pause)
    drafters = cast.place.drafters
    plan = Plan(
        heldout=0, training=trial["frames"] * drafters, per_step=drafters, drafters=drafters
    )
    end = Sender if is_target else Receiver
    stream: Any = end(cast, plan, layout(trial), trial["slots"], edges, TIMEOUT)
    meet(cast, "stream")
    before = time.process_time()
    if is_target:
        for frame in stream.claims():
            time.sleep(pause)
            stream.submit(stream.slot(), frame)
        stream.finish()
    else:
        times = []
        for _ in stream:
            time.sleep(pause)
            times.append(time.perf_counter())
        skipped = trial["slots"] + ENDS
        inner = times[skipped:-skipped]
        found["rate"] = (len(inner) - 1) / (inner[-1] - inner[0])
    return found | {"cpu_s": time.process_time() - before}


def alone(pause: float) -> float:
    """Frames per second of a stage that only sleeps, with the sleeps as long as they really are."""
    count = max(10, round(1.0 / pause))
    start = time.perf_counter()
    for _ in range(count):
        time.sleep(pause)
    return count / (time.perf_counter() - start)


def raw_edge(cast: Cast, edges: dict[int, Edge], trial: dict[str, Any]) -> dict[str, Any]:
    """``frames`` payloads over the first edge, without announcements, credits and checksums.

    Returns:
        ``role``; ``bytes_per_s`` of the edge; ``copied_bytes_per_s`` of a copy in memory.
    """
    place = cast.place
    meet(cast, "edge")
    (payload,) = edges[0].buffers(trial["nbytes"], 1)
    copy = torch.ones_like(payload)
    is_target = place.role == TARGET
    move = edges[0].put if is_target else edges[0].land
    move(payload)
    rates = {}
    for name, work in (("bytes_per_s", move), ("copied_bytes_per_s", copy.copy_)):
        start = time.perf_counter()
        for _ in range(trial["frames"]):
            work(payload)
        rates[name] = trial["frames"] * trial["nbytes"] / (time.perf_counter() - start)
        meet(cast, name)
    return {"role": place.role, **rates}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
