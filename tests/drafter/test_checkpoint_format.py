import json
from pathlib import Path

import pytest
import torch
from golden_rows import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_mp.config import UserError
from dflash_mp.drafter.checkpoint_format import load_drafter, save_drafter
from dflash_mp.drafter.model import DFlashDraftModel


@pytest.fixture
def folder(drafter: DFlashDraftModel, tmp_path: Path) -> Path:
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    return tmp_path


def rewrite(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def test_saved_tensors_are_those_of_the_golden_checkpoint(folder: Path):
    ours, golden = (load_file(f / "model.safetensors") for f in (folder, GOLDEN / "draft"))
    assert ours.keys() == golden.keys()
    for key, tensor in golden.items():
        assert torch.equal(ours[key], tensor.float())
    written = {path.name for path in folder.iterdir()}
    assert written == {"config.json", "model.safetensors"}


def test_the_default_export_is_bf16_and_loads_back(drafter: DFlashDraftModel, tmp_path: Path):
    save_drafter(drafter, tmp_path / "new")
    assert {t.dtype for t in load_file(tmp_path / "new" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = load_drafter(tmp_path / "new", torch.bfloat16, attention="eager")
    assert loaded.attention == "eager"
    assert loaded.fc.weight.dtype == torch.bfloat16
    # The golden weights are exact in bf16.
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.float(), drafter.state_dict()[key])


def test_a_checkpoint_in_several_files(folder: Path, drafter: DFlashDraftModel):
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for name, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_drafter(folder).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in drafter.state_dict().items())
    (folder / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"names b\.safetensors, which is missing"):
        load_drafter(folder)


def drop(state: dict[str, Tensor]) -> None:
    del state["fc.weight"]


def add(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = torch.zeros(4, 4)


def reshape(state: dict[str, Tensor]) -> None:
    state["fc.weight"] = state["fc.weight"][:, :64].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, r"1 tensors are missing, first \['fc.weight'\]"),
        (add, r"1 tensors do not belong to it, first \['lm_head.weight'\]"),
        (reshape, r"fc.weight has shape \[64, 64\], but its config asks for \[64, 128\]"),
    ],
)
def test_mismatches_are_named(folder: Path, change, message: str):
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        load_drafter(folder)


def test_damaged_files(folder: Path, tmp_path: Path):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (len(whole) - 100, 5):
        weights.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file"):
            load_drafter(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_drafter(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        load_drafter(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_drafter(folder)


def test_neither_a_folder_nor_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="not a folder or reachable hub repository"):
        load_drafter(tmp_path / "missing")
