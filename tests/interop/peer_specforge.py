"""SpecForge loads the export and reproduces hidden states under its own training mask."""

import sys
from pathlib import Path

import torch
from peer_checks import cases, report_hidden, report_loading
from specforge.algorithms.common.dflash_family_model import create_dflash_sdpa_mask
from specforge.modeling.auto import AutoDraftModel

PEER = "specforge 0.2.0"


def main(workdir: Path) -> None:
    for folder, case, tensors in cases(workdir):
        model, info = AutoDraftModel.from_pretrained(
            folder / "export",
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
        report_loading(PEER, case, info)
        hidden = train_forward(model.eval(), tensors)
        report_hidden(PEER, case, "hidden states", hidden, tensors["hidden"])


@torch.no_grad()
def train_forward(model, tensors: dict) -> torch.Tensor:
    """All blocks in one row, as its trainer runs them: ``[A, B, H]``."""
    anchors, noise = tensors["anchors"], tensors["noise"]
    blocks, size = noise.shape[:2]
    context = tensors["hidden_states"].shape[0]

    def mask(sliding_window):
        return create_dflash_sdpa_mask(
            anchors[None],
            torch.ones(1, blocks, dtype=torch.bool),
            context,
            size,
            torch.device("cpu"),
            sliding_window=sliding_window,
        )

    masks = {"full_attention": mask(None)}
    if model.sliding_window is not None:
        masks["sliding_attention"] = mask(model.sliding_window)
    positions = torch.cat(
        [torch.arange(context), (anchors[:, None] + torch.arange(size)).flatten()]
    )
    hidden = model(
        position_ids=positions[None],
        noise_embedding=noise.flatten(0, 1)[None],
        target_hidden=tensors["hidden_states"][None],
        attention_mask=masks,
    )
    return hidden.view(noise.shape)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
