"""Golden models, inputs and outputs."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden_rows import BLOCK, GOLDEN, MASK, ROW
from safetensors.torch import load_file
from torch import Tensor

from dflash_mp.drafter.anchors import Blocks, make_blocks
from dflash_mp.drafter.checkpoint_format import load_drafter, read_drafter_config
from dflash_mp.drafter.frozen_head import FrozenHead, load_frozen_head
from dflash_mp.drafter.hf_config import read_config
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.features import FeatureBatch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def inputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


@pytest.fixture(scope="session")
def outputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "outputs.safetensors")


@pytest.fixture(scope="session")
def runs() -> dict[str, Any]:
    """``runs["specforge"]["main.sdpa.gamma7.0"]["loss"]`` and so on."""
    everything = json.loads((GOLDEN / "outputs.json").read_text())
    return {peer: value["runs"] for peer, value in everything.items() if "runs" in value}


@pytest.fixture(scope="session")
def head() -> FrozenHead:
    return load_frozen_head(str(GOLDEN / "target"), torch.float32)


@pytest.fixture
def drafter() -> DFlashDraftModel:
    return load_drafter(GOLDEN / "draft")


@pytest.fixture
def sliding_drafter(drafter: DFlashDraftModel) -> Callable[..., DFlashDraftModel]:
    """The golden drafter with layer types [sliding, full]."""

    def make(window: int, **changes: Any) -> DFlashDraftModel:
        raw = read_drafter_config(str(GOLDEN / "draft"))
        raw |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": window,
            "use_sliding_window": True,
            **changes,
        }
        model = DFlashDraftModel(read_config(raw))
        model.load_state_dict(drafter.state_dict())
        return model

    return make


@pytest.fixture
def golden_row(inputs: dict[str, Tensor]) -> Callable[[str, int], tuple[FeatureBatch, Blocks]]:
    """One row of a golden case as a batch of one document, and its blocks."""

    def make(case: str, row: int) -> tuple[FeatureBatch, Blocks]:
        batch = FeatureBatch(
            number=0,
            input_ids=inputs["main.input_ids"][row].int(),
            position_ids=torch.arange(ROW, dtype=torch.int32),
            document_ids=torch.zeros(ROW, dtype=torch.int32),
            loss_mask=inputs["main.loss_mask"][row].to(torch.uint8),
            hidden_states=inputs["main.hidden_states"][row].float(),
            final_hidden=inputs["main.verifier_last"][row].float(),
        )
        anchors, keep = inputs[f"{case}.anchors"][row], inputs[f"{case}.keep"][row]
        return batch, make_blocks(batch, anchors, keep, BLOCK, MASK)

    return make
