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
        # Before any activation, so that these, which stay, leave no holes where those were.
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        losses, counts = [], []
        with torch.enable_grad():
            shared = share()
            leaves = [tensor.detach().requires_grad_() for tensor in shared]
            by_shared = [torch.zeros_like(leaf) for leaf in leaves]
            for part in slices:
                # Views: torch's module tracker cannot have leaves as inputs in autograd.grad.
                loss, counted = run(part, [leaf.view_as(leaf) for leaf in leaves])
                found = _gradients([loss], [*parameters, *leaves])
                _add([*gradients, *by_shared], found)
                losses.append(loss.detach())
                counts.append(counted)
                del loss, found
            _add(gradients, _gradients(shared, parameters, by_shared))
        ctx.gradients = gradients
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


def _add(totals: Sequence[Tensor], found: Sequence[Tensor | None]) -> None:
    """Add ``found`` to ``totals`` in place."""
    for total, gradient in zip(totals, found, strict=True):
        if gradient is not None:
            total.add_(gradient)
