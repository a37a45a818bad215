"""The speed of one rank: stated in ``conf/gpu``, or measured here for a CPU."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_mp.plan.settings import GpuConfig
from dflash_mp.plan.work import Work

MEASURE_S = 0.4
PRODUCT_ROWS = 512
TRAFFIC_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Machine:
    """A rank's device and links, in FLOP/s, bytes/s and bytes."""

    float32: float
    bfloat16: float
    traffic: float
    """Bytes/s of elementwise operations, reads and writes together."""

    memory: float
    link: float
    host: float
    network: float
    efficiency: float

    def seconds(self, work: Work, dtype: torch.dtype) -> float:
        """How long ``work`` takes with matrix products in ``dtype``."""
        rate = self.bfloat16 if dtype == torch.bfloat16 else self.float32
        return (work.flops / rate + work.bytes / self.traffic) / self.efficiency


def make_machine(gpu: GpuConfig, ranks: int, width: int, inner: int) -> Machine:
    """``gpu``, with what it leaves open measured on this processor by one thread.

    Args:
        gpu: the device.
        ranks: processes that share this machine's memory.
        width: hidden size of the products that are measured.
        inner: their other size.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Machine(
            float32=stated(gpu.float32_tflops, 1e12) or product_rate(torch.float32, width, inner),
            bfloat16=stated(gpu.bfloat16_tflops, 1e12)
            or product_rate(torch.bfloat16, width, inner),
            traffic=stated(gpu.memory_gb_s, 1e9) or traffic_rate(),
            memory=stated(gpu.memory_gb, 1e9) or machine_memory() / ranks,
            link=gpu.link_gb_s * 1e9,
            host=gpu.host_gb_s * 1e9,
            network=gpu.network_gb_s * 1e9,
            efficiency=gpu.efficiency,
        )
    finally:
        torch.set_num_threads(threads)


def stated(value: float | None, unit: float) -> float | None:
    """``value`` in the base unit, if there is one."""
    return None if value is None else value * unit


def product_rate(dtype: torch.dtype, width: int, inner: int) -> float:
    """FLOP/s of ``[512, width] @ [width, inner]`` and back, as in an MLP."""
    rows = torch.randn(PRODUCT_ROWS, width).to(dtype)
    up, down = torch.randn(inner, width).to(dtype), torch.randn(width, inner).to(dtype)
    seconds = fastest(lambda: F.linear(F.linear(rows, up), down))
    return 2.0 * 2 * PRODUCT_ROWS * width * inner / seconds


def traffic_rate() -> float:
    """Bytes/s that go through an addition of two float32 tensors of 16 MiB."""
    one, other = torch.ones(TRAFFIC_ELEMENTS), torch.ones(TRAFFIC_ELEMENTS)
    out = torch.empty_like(one)
    return 3 * one.nbytes / fastest(lambda: torch.add(one, other, out=out))


def fastest(work: Callable[[], object]) -> float:
    """CPU seconds of the fastest of the runs that fit into ``MEASURE_S``, at least three."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < MEASURE_S:
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def machine_memory() -> float:
    """Bytes of memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
