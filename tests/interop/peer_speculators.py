"""speculators loads both layouts and reproduces hidden states with its own training forward."""

import sys
from pathlib import Path

import torch
from peer_checks import cases, report, report_hidden
from speculators import SpeculatorModel, SpeculatorModelConfig

PEER = "speculators 0.9.0"


def main(workdir: Path) -> None:
    for folder, case, tensors in cases(workdir):
        for layout in ("export", "speculators"):
            model = load(folder / layout, case["target"])
            own = {key: value for key, value in model.state_dict().items() if "verifier" not in key}
            missing = [key for key in case["tensors"] if key not in own]
            bad = [key for key, value in own.items() if not torch.isfinite(value.float()).all()]
            report(
                PEER, case, f"loads {layout}", not missing and not bad,
                f"{len(case['tensors'])} tensors" if not missing + bad else str(missing + bad),
            )  # fmt: skip
            if case["sliding"]:
                # Its window is that of the anchor for all slots of a block: another model.
                continue
            hidden = train_forward(model, tensors)
            report_hidden(PEER, case, f"hidden states of {layout}", hidden, tensors["hidden"])


def load(folder: Path, target: str):
    model = SpeculatorModel.from_pretrained(str(folder), verifier=target)
    config = SpeculatorModelConfig.from_dict(model.config.to_dict())
    # The default is flex attention, which does not run on this CPU.
    config.transformer_layer_config._attn_implementation = "sdpa"
    rebuilt = type(model)(config)
    rebuilt.load_state_dict(model.state_dict())
    # As it was loaded, the target's embedding is rounded to bf16; ours is not.
    rebuilt.float().load_verifier_weights()
    return rebuilt.eval()


@torch.no_grad()
def train_forward(model, tensors: dict) -> torch.Tensor:
    """``[A, B, H]``: exactly the anchors are supervised, so it draws all of them in order."""
    anchors, ids = tensors["anchors"], tensors["input_ids"]
    loss_mask = torch.zeros_like(ids)
    loss_mask[anchors] = 1
    width = tensors["hidden"].shape[-1]
    hidden = model._backbone_forward(
        tensors["hidden_states"][None],
        ids[None],
        loss_mask[None],
        torch.zeros(1, len(ids), width),
        torch.zeros_like(ids)[None],
        max_anchors=len(anchors),
    )[0]
    return hidden.view(tensors["hidden"].shape)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
