"""Our drafter step against the peers', on this machine.

    python -m dflash_mp.bench.step short

Forward and backward of one micro-batch, each implementation in a process and environment of its
own, taking turns: same weights, rows and anchors, one thread, CPU seconds. Forms: quick (this
project only, a tiny drafter, to see that it works), short (fp32 at 128 anchors, a quarter of an
hour on an idle core), full (all cases, fp32 and bf16, over an hour) and recompute (this project
only, fp32 at 128 anchors, without and with drafter.activation_checkpointing).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash_mp.bench.machine import RESULTS, write_result
from dflash_mp.bench.peer_environments import PEERS, ROOT, make_environment
from dflash_mp.bench.step_case import CASES, Case, Shape, make_tensors, useful_flops, write_models

OURS = "dflash_mp"
OUR_WORKER = (sys.executable, "dflash_mp.bench.step_ours")
TINY = Shape(hidden=32, heads=4, shared_heads=2, intermediate=64, vocabulary=300)
QUICK = (Case(8, "ragged", 192, (48, 6)),)
SHORT = tuple(case for case in CASES if case.anchors == 128)
ROUNDS = 3
FORMS = ("quick", "short", "full", "recompute")


def main(arguments: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("form", nargs="?", default="short", choices=FORMS)
    parser.add_argument("result", type=Path, nargs="?", help="default: results/step-<form>.json")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    form = parsed.form
    if form == "quick":
        found = run(TINY, QUICK, ("float32",), {OURS: OUR_WORKER})
    elif form == "recompute":
        both = {OURS: OUR_WORKER, f"{OURS}, recomputing": (*OUR_WORKER, "recompute")}
        found = run(Shape(), SHORT, ("float32",), both)
    elif form == "short":
        found = run(Shape(), SHORT, ("float32",), everybody())
    else:
        found = run(Shape(), CASES, ("float32", "bfloat16"), everybody())
    write_result(parsed.result or RESULTS / f"step-{form}.json", {"form": form, **found})


Workers = dict[str, tuple[str, ...]]
"""By name: an interpreter, the module it runs, and that one's further arguments."""


def everybody() -> Workers:
    """This project and the peers, whose environments are made where there are none."""
    workers: Workers = {OURS: OUR_WORKER}
    for peer in PEERS:
        python = make_environment(peer)
        workers[peer.release] = (str(python), f"dflash_mp.bench.peers.{peer.name}_step")
    return workers


def run(
    shape: Shape, cases: tuple[Case, ...], dtypes: tuple[str, ...], workers: Workers
) -> dict[str, Any]:
    """Measure all cases in all dtypes; one entry of ``rows`` per case, dtype, implementation."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_models(folder, shape)
        head = load_file(folder / "target" / "model.safetensors")["lm_head.weight"]
        ask = {
            who: stack.enter_context(worker(python, module, folder, *rest))
            for who, (python, module, *rest) in workers.items()
        }
        rows = []
        for case in cases:
            tensors = make_tensors(case, shape, head)
            save_file(tensors, folder / f"{case.name}.safetensors")
            flops = useful_flops(case, shape, tensors)
            for dtype in dtypes:
                rows += take_turns(ask, case, dtype, (flops, shape))
    return {"rows": rows}


Ask = Callable[..., dict[str, Any]]
"""``ask(**request) -> answer`` of one worker."""


@contextmanager
def worker(python: str, module: str, folder: Path, *rest: str) -> Iterator[Ask]:
    """A process that runs ``module``, with arguments; ends with the context."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [python, "-m", module, folder, *rest], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    requests, answers = process.stdin, process.stdout
    assert requests is not None
    assert answers is not None

    def answer() -> dict[str, Any]:
        for line in answers:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"{module} ended with code {process.wait()}, see above")

    def ask(**request: object) -> dict[str, Any]:
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        return answer()

    answer()
    try:
        yield ask
    finally:
        requests.close()
        process.wait()


def take_turns(
    ask: dict[str, Ask], case: Case, dtype: str, work: tuple[float, Shape]
) -> list[dict[str, Any]]:
    """``ROUNDS`` rounds in which every implementation makes one step, after one that warms up.

    None warms up at 512 anchors, where a round takes minutes and a first step is like any other.
    """
    flops, shape = work
    # The two shapes that most of the work is in: a chunk through the head, and the MLP.
    shapes = [[512, shape.hidden, shape.vocabulary], [4096, shape.hidden, shape.intermediate]]
    request = {"case": case.name, "dtype": dtype}
    seconds: dict[str, list[float]] = {who: [] for who in ask}
    rates = []
    warm_ups = 0 if case.anchors == 512 else 1
    for turn in range(warm_ups + ROUNDS):
        for who in ask:
            found = ask[who](**request, memory=False)
            if turn >= warm_ups:
                seconds[who].append(found["cpu_s"])
        if turn >= warm_ups:
            rates.append(ask[OURS](product=dtype, shapes=shapes)["flops_per_s"])
    rows = []
    for who in ask:
        found = ask[who](**request, memory=True)
        rows.append(
            {
                "who": who,
                "anchors": case.anchors,
                "supervision": case.supervision,
                "dtype": dtype,
                "cpu_s": [round(value, 3) for value in seconds[who]],
                "loss": found["loss"],
                "grad_norm": found["grad_norm"],
                "peak_mib": round(found["peak_bytes"] / 2**20),
                "useful_gflop": round(flops / 1e9, 1),
                "product_gflop_per_s": round(statistics.median(rates) / 1e9, 1),
            }
        )
        say(rows[-1], statistics.median(seconds[OURS]))
    return rows


def say(row: dict[str, Any], ours: float) -> None:
    """One line on the terminal."""
    median = statistics.median(row["cpu_s"])
    rate = row["useful_gflop"] / median
    sys.stdout.write(
        f"{row['anchors']:4} {row['supervision']:6} {row['dtype']:8} {row['who']:18} "
        f"{median:8.2f} CPU-s ({min(row['cpu_s']):.2f}-{max(row['cpu_s']):.2f}) "
        f"{median / ours:5.2f}x  {rate:6.1f} GFLOP/s "
        f"({rate / row['product_gflop_per_s']:4.0%} of a product)  {row['peak_mib']:6} MiB  "
        f"loss {row['loss']:.5f}  gradient {row['grad_norm']:.4f}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
