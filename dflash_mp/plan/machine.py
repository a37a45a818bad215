"""The speed of one rank: stated in ``conf/gpu``, or measured here for a CPU."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dflash_mp.plan.settings import GpuConfig
from dflash_mp.plan.work import (
    ATTENTION_PRODUCTS,
    ATTENTION_PRODUCTS_LEARNING,
    PASSES_LEARNING,
    Work,
)

MEASURE_S = 0.3
PEAK_MEASURE_S = 0.05
PRODUCT_ROWS = 512
ATTENTION_KEYS = 512
REUSED_ELEMENTS = 1 << 22
FRESH_ELEMENTS = 1 << 24

PEAKS = {
    "NVIDIA A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA B200": (2250e12, 80e12),
}
"""FLOP/s in bfloat16 (dense) and in float32 without TF32, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Speed:
    """How fast a rank of one role works."""

    products: float
    """FLOP/s of matrix products in the role's number type."""

    attention: float
    """FLOP/s of attention kernels."""

    traffic: float
    """Bytes/s of elementwise operations that write new tensors."""

    stream: float
    """Bytes/s of those that do not."""

    efficiency: float
    """Share of the time in which anything is done."""

    def seconds(self, work: Work) -> float:
        """How long ``work`` takes."""
        busy = work.flops / self.products + work.attention / self.attention
        moved = work.bytes / self.traffic + work.in_place / self.stream
        return (busy + moved) / self.efficiency


@dataclass(frozen=True)
class Machine:
    """A node's ranks: speeds by role, memory of a rank in bytes, links in bytes/s."""

    target: Speed
    drafter: Speed
    memory: float
    link: float
    """Of frames between two ranks of a node."""

    exchange: float
    """Of gradients between two drafters of a node."""

    host: float
    network: float


@dataclass(frozen=True)
class Sample:
    """What a role's speed is measured on, where the configuration does not state it."""

    dtype: torch.dtype
    hidden: int
    inner: int
    head_size: int
    learns: bool
    """Whether there is a backward."""


def make_machine(gpu: GpuConfig, ranks: int, target: Sample, drafter: Sample) -> Machine:
    """``gpu``, with what it leaves open measured on this processor by one thread.

    Args:
        gpu: the device.
        ranks: processes that share this machine's memory.
        target: sizes of a target's work.
        drafter: of a drafter's.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Machine(
            target=make_speed(gpu, target),
            drafter=make_speed(gpu, drafter),
            memory=machine_memory() / ranks if gpu.memory_gb is None else gpu.memory_gb * 1e9,
            link=gpu.link_gb_s * 1e9,
            exchange=gpu.exchange_gb_s * 1e9,
            host=gpu.host_gb_s * 1e9,
            network=gpu.network_gb_s * 1e9,
        )
    finally:
        torch.set_num_threads(threads)


def make_speed(gpu: GpuConfig, sample: Sample) -> Speed:
    """The stated or measured speed of one role."""
    low = sample.dtype == torch.bfloat16
    stated = gpu.bfloat16_tflops if low else gpu.float32_tflops
    products = product_rate(sample) if stated is None else stated * 1e12
    share = gpu.attention_share
    return Speed(
        products=products,
        attention=attention_rate(sample) if share is None else share * products,
        traffic=traffic_rate(sample) if gpu.memory_gb_s is None else gpu.memory_gb_s * 1e9,
        stream=stream_rate() if gpu.memory_gb_s is None else gpu.memory_gb_s * 1e9,
        efficiency=gpu.efficiency,
    )


def peak_rate(device: torch.device, dtype: torch.dtype, hidden: int, inner: int) -> float | None:
    """The most FLOP/s that a rank could make: what MFU is a share of.

    A GPU's is stated in its data sheet; None for one that is not in ``PEAKS``. A CPU's is that of
    plain products of the model's sizes, measured here in a moment, for all threads of this process.
    """
    if device.type == "cuda":
        stated = PEAKS.get(torch.cuda.get_device_name(device))
        return None if stated is None else stated[dtype == torch.float32]
    sample = Sample(dtype, hidden, inner, head_size=1, learns=False)
    return product_rate(sample, PEAK_MEASURE_S) * torch.get_num_threads()


def product_rate(sample: Sample, measure_s: float = MEASURE_S) -> float:
    """FLOP/s of an MLP's two products, ``[512, hidden]`` to ``[512, inner]`` and back."""
    rows = torch.randn(PRODUCT_ROWS, sample.hidden).to(sample.dtype)
    up, down = torch.randn(2, sample.inner * sample.hidden).to(sample.dtype)
    up, down = up.view(sample.inner, sample.hidden), down.view(sample.hidden, sample.inner)
    tensors = [tensor.requires_grad_(sample.learns) for tensor in (rows, up, down)]

    def multiply() -> None:
        out = F.linear(F.linear(rows, up), down)
        if sample.learns:
            torch.autograd.grad(out, tensors, out.detach())

    products = PASSES_LEARNING if sample.learns else 1
    return products * 2.0 * 2 * PRODUCT_ROWS * up.numel() / fastest(multiply, measure_s)


def attention_rate(sample: Sample) -> float:
    """FLOP/s of masked attention with as many queries as keys."""
    shape = (1, 2, ATTENTION_KEYS, sample.head_size)
    query, key, value = (
        torch.randn(shape).to(sample.dtype).requires_grad_(sample.learns) for _ in range(3)
    )
    mask = torch.ones(ATTENTION_KEYS, ATTENTION_KEYS, dtype=torch.bool).tril()

    def attend() -> None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        if sample.learns:
            torch.autograd.grad(out, (query, key, value), out.detach())

    products = ATTENTION_PRODUCTS_LEARNING if sample.learns else ATTENTION_PRODUCTS
    return products * 2.0 * ATTENTION_KEYS * query.numel() / fastest(attend)


def traffic_rate(sample: Sample) -> float:
    """Bytes/s of a product of two tensors, the result in memory that the allocator provides.

    What a backward needs later is never written where something was just before. For tensors of
    this size memory comes from the system, page by page, which stands for it. A forward that keeps
    nothing reuses its memory.
    """
    elements = FRESH_ELEMENTS if sample.learns else REUSED_ELEMENTS
    one, other = torch.ones(elements), torch.ones(elements)
    return 3 * one.nbytes / fastest(lambda: one * other)


def stream_rate() -> float:
    """Bytes/s of an addition in place, as an optimizer makes them."""
    one, other = torch.ones(FRESH_ELEMENTS), torch.ones(FRESH_ELEMENTS)
    return 3 * one.nbytes / fastest(lambda: one.add_(other))


def fastest(work: Callable[[], object], measure_s: float = MEASURE_S) -> float:
    """CPU seconds of the fastest of the runs that fit into ``measure_s``, at least three."""
    work()
    times: list[float] = []
    while len(times) < 3 or sum(times) < measure_s:
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return min(times)


def machine_memory() -> float:
    """Bytes of memory of this machine."""
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
