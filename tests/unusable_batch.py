"""``dflash_mp.train`` with micro-batches that cannot be used: ``$UNUSABLE`` says why.

``features``: those of ``UNUSABLE`` are not finite, on the target. ``loss``: their loss is not, on
the drafter. ``diverged``: no loss is. The tiny held-out set has fewer micro-batches, so these are
ones of training.
"""

import os
from collections import defaultdict
from dataclasses import replace

import torch

from dflash_mp import train
from dflash_mp.roles import step
from dflash_mp.target.model import FeatureExtractor

UNUSABLE = {4: float("nan"), 7: float("inf")}
"""With two drafters and four micro-batches in a step: the first of one, the last of the other."""

if __name__ == "__main__":
    fill, loss = FeatureExtractor.fill, step.batch_loss
    kind = os.environ["UNUSABLE"]
    factors = UNUSABLE if kind == "loss" else defaultdict(lambda: torch.nan)

    def bad_features(self: FeatureExtractor, frame: object, tokens: int) -> None:
        fill(self, frame, tokens)
        if frame.number in UNUSABLE:
            frame.hidden_states[0, 0] = UNUSABLE[frame.number]

    def bad_loss(model: object, head: object, batch: object, *rest: object) -> object:
        out = loss(model, head, batch, *rest)
        return replace(out, loss=out.loss * factors[batch.number]) if bad(batch) else out

    def bad(batch: object) -> bool:
        return kind == "diverged" or batch.number in UNUSABLE

    if kind == "features":
        FeatureExtractor.fill = bad_features
    else:
        step.batch_loss = bad_loss
    train.main()
