"""The model of z-lab's dflash 0.1.0 with a plain loss: the package has no trainer of its own.

All blocks in one forward under a dense mask, all slots through the head, one cross-entropy.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file
from torch import Tensor

from dflash_mp.bench.step_worker import Step, serve

GAMMA = 7.0


def main(folder: Path) -> None:
    """Load the drafter and the frozen ends, then serve."""
    model = DFlashDraftModel.from_pretrained(
        folder / "drafter", dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    frozen = load_file(folder / "target" / "model.safetensors")
    embedding, head = frozen["model.embed_tokens.weight"], frozen["lm_head.weight"]

    def prepare(case: dict[str, Tensor]) -> Step:
        def step() -> Tensor:
            anchors, keep = case["anchors"], case["keep"]
            rows, length = case["input_ids"].shape
            slot = torch.arange(model.block_size)
            index = (anchors[:, :, None] + slot).clamp(max=length - 1).flatten(1)  # [B, N * 16]
            labels = case["input_ids"].gather(1, index)
            ids = torch.full((*anchors.shape, len(slot)), model.mask_token_id)
            ids[:, :, 0] = case["input_ids"].gather(1, anchors)
            hidden = model(
                position_ids=torch.cat(
                    [
                        torch.arange(length).expand(rows, -1),
                        (anchors[:, :, None] + slot).flatten(1),
                    ],
                    dim=1,
                ),
                noise_embedding=F.embedding(ids.flatten(1), embedding),
                target_hidden=case["hidden_states"],
                attention_mask=dense_mask(anchors, keep, length, model.block_size),
            )
            weights = torch.exp(-(slot - 1) / GAMMA) * (slot > 0)
            weights = (weights * keep[:, :, None]).flatten(1)
            weights = weights * case["loss_mask"].gather(1, index)
            ce = F.cross_entropy(
                F.linear(hidden, head).flatten(0, 1), labels.flatten(), reduction="none"
            )
            return (ce * weights.flatten()).sum() / weights.sum()

        return step

    serve(folder, model, prepare)


def dense_mask(anchors: Tensor, keep: Tensor, length: int, block_size: int) -> Tensor:
    """``[B, 1, N * 16, S + N * 16]`` bool."""
    anchor = anchors.repeat_interleave(block_size, dim=1)[:, :, None]
    context = torch.arange(length) < anchor
    block = torch.arange(anchors.shape[1]).repeat_interleave(block_size)
    own = (block[:, None] == block).expand(len(anchors), -1, -1)
    valid = keep.repeat_interleave(block_size, dim=1)[:, :, None]
    return (torch.cat([context, own], dim=2) & valid)[:, None]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
