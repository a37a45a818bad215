"""This project's step as a benchmark worker.

``python -m dflash_mp.bench.step_ours <folder>``, with ``recompute`` behind it to do so.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

from dflash_mp.bench.step_case import BLOCK_SIZE, GAMMA, MASK_TOKEN
from dflash_mp.bench.step_worker import Step, serve
from dflash_mp.config import LossConfig
from dflash_mp.drafter.anchors import make_blocks
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.frozen_head import load_frozen_head
from dflash_mp.drafter.step import blocks_loss
from dflash_mp.features import FeatureBatch
from dflash_mp.heap import keep_freed_memory


def main(folder: Path, recompute: bool = False) -> None:
    """Load the drafter and the frozen ends, then serve; as a rank of a training does."""
    keep_freed_memory()
    model = load_drafter(folder / "drafter", torch.float32).train()
    model.recompute = recompute
    # In the dtype of the products.
    exact = load_frozen_head(str(folder / "target"), torch.float32)
    low = load_frozen_head(str(folder / "target"), torch.bfloat16)
    loss = LossConfig("ce", "data", True, GAMMA, 0.5, 512)

    def prepare(case: dict[str, Tensor]) -> Step:
        batch = packed(case)
        length = case["input_ids"].shape[1]
        first = length * torch.arange(len(case["anchors"]))[:, None]
        # As the sampler leaves them: ascending, padding at the end.
        anchors = torch.where(case["keep"], case["anchors"] + first, batch.input_ids.numel() - 1)
        anchors = anchors.flatten().sort().values
        valid = anchors < batch.input_ids.numel() - 1

        def step() -> Tensor:
            blocks = make_blocks(batch, anchors, valid, BLOCK_SIZE, MASK_TOKEN)
            head = low if torch.is_autocast_enabled("cpu") else exact
            out = blocks_loss(model, head, batch, blocks, loss)
            return out.loss / out.counts[1]

        return step

    serve(folder, model, prepare)


def packed(case: dict[str, Tensor]) -> FeatureBatch:
    """All rows of a case as the documents of one packed row."""
    rows, length = case["input_ids"].shape
    return FeatureBatch(
        number=0,
        input_ids=case["input_ids"].flatten().int(),
        position_ids=torch.arange(length, dtype=torch.int32).repeat(rows),
        document_ids=torch.arange(rows, dtype=torch.int32).repeat_interleave(length),
        loss_mask=case["loss_mask"].flatten().to(torch.uint8),
        hidden_states=case["hidden_states"].flatten(0, 1),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), recompute=sys.argv[2:] == ["recompute"])
