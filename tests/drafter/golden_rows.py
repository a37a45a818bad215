"""Where the golden values are, their shapes, and packing them."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dflash_mp.features import FeatureBatch

GOLDEN = Path(__file__).parents[1] / "golden"
MASK, BLOCK, ROW = 511, 8, 40


def concatenate(first: FeatureBatch, second: FeatureBatch, padding: int = 0) -> FeatureBatch:
    """Two one-document rows and ``padding`` empty slots in one packed row."""

    def join(name: str, fill: int = 0) -> Tensor:
        a, b = getattr(first, name), getattr(second, name)
        return torch.cat([a, b, a.new_full((padding, *a.shape[1:]), fill)])

    numbers = torch.cat([first.document_ids, second.document_ids + 1])
    return replace(
        first,
        input_ids=join("input_ids"),
        position_ids=join("position_ids"),
        document_ids=torch.cat([numbers, numbers.new_full((padding,), -1)]),
        loss_mask=join("loss_mask"),
        hidden_states=join("hidden_states"),
        final_hidden=join("final_hidden"),
    )
