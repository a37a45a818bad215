"""The process around one implementation's step: takes requests, measures, answers.

Runs in the peers' environments, too: needs torch and safetensors only. One JSON line in, one out.
"""

import ctypes
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

Step = Callable[[], Tensor]
"""The forward of one micro-batch; returns the loss with its graph."""

Prepare = Callable[[dict[str, Tensor]], Step]
"""Puts a case's tensors into the form that an implementation's data loader gives them."""


def serve(folder: Path, model: nn.Module, prepare: Prepare) -> None:
    """Answer requests until the input ends.

    Requests: ``{case, dtype, memory}`` for a step, ``{product: dtype, shapes}`` for plain matrix
    products.
    """
    steps: dict[str, Step] = {}
    answer(ready=torch.__version__)
    for line in sys.stdin:
        request = json.loads(line)
        if "product" in request:
            answer(flops_per_s=product_rate(request["product"], request["shapes"]))
            continue
        name = request["case"]
        if name not in steps:
            steps = {name: prepare(load_file(folder / f"{name}.safetensors"))}
        answer(**measure(model, steps[name], request["dtype"], request["memory"]))


def answer(**found: object) -> None:
    """One line that the parent can tell from what libraries print."""
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()


def measure(model: nn.Module, step: Step, dtype: str, memory: bool) -> dict[str, float]:
    """One forward and backward: CPU seconds of this process, loss, norm of the gradient.

    With ``memory`` also ``peak_bytes``, resident memory above that before the step, gradients
    included. Giving memory back first costs time, so such a step is not to be timed.
    """
    model.zero_grad(set_to_none=True)
    before = give_back() if memory else 0
    start = time.process_time()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        loss = step()
    loss.backward()
    found = {"cpu_s": time.process_time() - start, "loss": float(loss.detach())}
    if memory:
        found["peak_bytes"] = status("VmHWM") - before
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(float(gradient.double().square().sum()) for gradient in gradients)
    return found | {"grad_norm": math.sqrt(squares)}


def give_back() -> int:
    """Return unused heap to the system and start a new peak; gives the bytes still in use."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(field: str) -> int:
    """Bytes of one line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def product_rate(dtype: str, shapes: list[list[int]]) -> float:
    """Floating-point operations per CPU second of plain products, equally many of each shape.

    Args:
        dtype: of both factors.
        shapes: ``[rows, inner, columns]`` each.
    """
    kind = getattr(torch, dtype)
    seconds = 0.0
    for rows, inner, columns in shapes:
        left, right = torch.ones(rows, inner, dtype=kind), torch.ones(columns, inner, dtype=kind)
        torch.nn.functional.linear(left, right)
        done, start = 0, time.process_time()
        while time.process_time() - start < 0.5:
            torch.nn.functional.linear(left, right)
            done += 2 * rows * inner * columns
        seconds += (time.process_time() - start) / done
    return len(shapes) / seconds
