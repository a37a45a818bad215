"""speculators 0.9.0's own training forward, with the case's anchors instead of drawn ones."""

import sys
from pathlib import Path

import speculators.models.dflash.core as core
import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.losses import resolve_loss_config
from torch import Tensor

from dflash_mp.bench.step_worker import Step, serve

GAMMA = 7.0


def main(folder: Path) -> None:
    """Load the drafter and the frozen ends, then serve."""
    loaded = SpeculatorModel.from_pretrained(
        str(folder / "speculators"), verifier=str(folder / "target")
    )
    config = SpeculatorModelConfig.from_dict(loaded.config.to_dict())
    # The default is flex attention, whose backward does not run on a CPU.
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    # As it was loaded, the target's part is rounded to bf16.
    model.float().load_verifier_weights()
    model.train()
    # Its fused losses are Triton kernels.
    objective = resolve_loss_config("ce", "eager")

    def prepare(case: dict[str, Tensor]) -> Step:
        rows, length = case["input_ids"].shape
        first = length * torch.arange(rows)[:, None]
        kept = (case["anchors"] + first)[case["keep"]]
        anchors = torch.zeros(case["keep"].numel(), dtype=torch.int64)
        anchors[: len(kept)] = kept
        valid = torch.arange(len(anchors)) < len(kept)
        core.select_anchors = lambda *_: (anchors, valid)
        ids, loss_mask = case["input_ids"].view(1, -1), case["loss_mask"].view(1, -1)
        scale = normaliser(loss_mask[0], kept, model.block_size)
        hidden, final = case["hidden_states"].flatten(0, 1), case["final_hidden"].flatten(0, 1)
        documents = torch.arange(rows).repeat_interleave(length)[None]
        positions = torch.arange(length).repeat(rows)[None]

        def step() -> Tensor:
            loss = model(
                hidden[None],
                ids,
                loss_mask,
                final[None],
                documents,
                positions,
                loss_config=objective,
                gamma=GAMMA,
                max_anchors=len(anchors),
            )[1]
            return loss * scale

        return step

    serve(folder, model, prepare)


def normaliser(loss_mask: Tensor, anchors: Tensor, block_size: int) -> float:
    """It divides by the number of labels, the others by the sum of their weights: the quotient."""
    slot = torch.arange(1, block_size)
    in_loss = loss_mask[(anchors[:, None] + slot).clamp(max=len(loss_mask) - 1)]  # [A, 15]
    return float(in_loss.sum() / (in_loss * torch.exp(-(slot - 1) / GAMMA)).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
