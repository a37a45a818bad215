"""SpecForge 0.2.0's own training model, with the case's anchors instead of drawn ones."""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.auto import AutoDraftModel
from torch import Tensor, nn

from dflash_mp.bench.step_worker import Step, serve

GAMMA = 7.0


def main(folder: Path) -> None:
    """Load the drafter and the frozen ends, then serve."""
    model = AutoDraftModel.from_pretrained(
        folder / "drafter", dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    frozen = load_file(folder / "target" / "model.safetensors")
    vocabulary, hidden = frozen["lm_head.weight"].shape
    head = nn.Linear(hidden, vocabulary, bias=False)
    head.weight = nn.Parameter(frozen["lm_head.weight"], requires_grad=False)
    trainer = OnlineDFlashModel(
        model,
        head,
        nn.Embedding.from_pretrained(frozen["model.embed_tokens.weight"]),
        model.mask_token_id,
        model.block_size,
        attention_backend="sdpa",
        loss_decay_gamma=GAMMA,
    )

    def prepare(case: dict[str, Tensor]) -> Step:
        def given(*_: object) -> tuple[Tensor, Tensor]:
            return case["anchors"], case["keep"]

        trainer._sample_anchor_positions = given
        loss_mask = case["loss_mask"].float()
        return lambda: trainer(case["input_ids"], case["hidden_states"], loss_mask)[0]

    serve(folder, model, prepare)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
