"""The gradient of many blocks with the activations of a few.

Blocks meet only in the weights and in the context's keys and values. So they go through forward
and backward in slices, one after the other, and gradients are added up: the same sums as in one
pass, nothing is computed twice, and the activations of one slice exist at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Share = Callable[[], list[Tensor]]
"""Computes what all slices read."""

Run = Callable[[slice, list[Tensor]], tuple[Tensor, Tensor]]
"""``(slice, shared) -> (scalar loss with its graph, counts)``."""


def sum_over_slices(
    share: Share, run: Run, slices: Sequence[slice], parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Sums of ``run``'s loss and counts over ``slices``.

    The gradient of ``parameters``, all of them, is made here and only scaled in the backward.
    """
    loss, counts = _SumOverSlices.apply(share, run, slices, *parameters)
    return loss, counts


class _SumOverSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, share: Share, run: Run, slices: Sequence[slice], *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradients: list[Tensor | None] = [None] * len(parameters)
        losses, counts = [], []
        with torch.enable_grad():
            shared = share()
            leaves = [tensor.detach().requires_grad_() for tensor in shared]
            by_shared: list[Tensor | None] = [None] * len(leaves)
            for part in slices:
                loss, counted = run(part, leaves)
                found = _gradients([loss], [*parameters, *leaves])
                _add(gradients, found[: len(parameters)])
                _add(by_shared, found[len(parameters) :])
                losses.append(loss.detach())
                counts.append(counted)
            made = [(t, g) for t, g in zip(shared, by_shared, strict=True) if g is not None]
            if made:
                tensors, factors = zip(*made, strict=True)
                _add(gradients, _gradients(tensors, parameters, factors))
        ctx.gradients = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(parameters, gradients, strict=True)
        ]
        total = torch.stack(counts).sum(dim=0)
        ctx.mark_non_differentiable(total)
        return torch.stack(losses).sum(), total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Nothing else may hold them, so that they become .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, *(gradient.mul_(factor) for gradient in gradients)


def _gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    factors: Sequence[Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of ``outputs`` by ``inputs``, None where there is no path."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, inputs, factors, allow_unused=True)


def _add(totals: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Add ``found`` to ``totals`` in place."""
    for i, gradient in enumerate(found):
        total = totals[i]
        if total is None:
            totals[i] = gradient
        elif gradient is not None:
            total.add_(gradient)
