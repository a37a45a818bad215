"""``dflash_mp.train`` with micro-batch 3 unusable: ``$UNUSABLE`` is ``features`` or ``loss``.

The tiny held-out set has fewer micro-batches, so this is one of training.
"""

import os
from dataclasses import replace

import torch

from dflash_mp import train
from dflash_mp.roles import step
from dflash_mp.target.model import FeatureExtractor

UNUSABLE = 3

if __name__ == "__main__":
    fill, loss = FeatureExtractor.fill, step.batch_loss

    def bad_features(self: FeatureExtractor, frame: object) -> None:
        fill(self, frame)
        if frame.number == UNUSABLE:
            frame.hidden_states[0, 0] = torch.nan

    def bad_loss(model: object, head: object, batch: object, *rest: object) -> object:
        out = loss(model, head, batch, *rest)
        return replace(out, loss=out.loss * torch.nan) if batch.number == UNUSABLE else out

    if os.environ["UNUSABLE"] == "features":
        FeatureExtractor.fill = bad_features
    else:
        step.batch_loss = bad_loss
    train.main()
