"""The export folder: complete, true to the trained weights, and found out when tampered with."""

import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file, save_file

from dflash_mp.config import UserError, config_dir, to_config
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.export import ExportConfig, export
from dflash_mp.export_folder import add_facts, check_export, compare, probe, write_export
from dflash_mp.speculate import DecodeSettings, speculative_decode
from golden_models import (
    GOLDEN,
    drafter_for,
    golden_drafter,
    golden_head,
    golden_prompts,
    golden_target,
    target_folder,
)

FACTS = {"target": "tiny", "conversations": 12, "steps": 112}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_export(tmp_path / "export", golden_drafter(), FACTS, golden_head())
    return tmp_path / "export"


def configure(*overrides: str) -> ExportConfig:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        return to_config(compose("export", list(overrides)), ExportConfig)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        section = config if key in config else config["dflash_config"]
        section[key] = value
    path.write_text(json.dumps(config))


def test_export_decodes_like_the_reference(folder):
    reference = json.loads((GOLDEN / "outputs.json").read_text())["accept_zlab_pypi"]
    exported = load_drafter(folder).eval()
    for index in (0, 2):
        decoded = speculative_decode(
            golden_target(), exported, golden_head(), golden_prompts()[index], DecodeSettings(40)
        )
        assert decoded.committed == reference[f"seen{index}"]["acc"]


def test_weights_are_bf16_and_nothing_else_is_in_the_file(folder):
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors.keys() == load_file(GOLDEN / "draft_trained" / "model.safetensors").keys()
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "parity.json",
    ]


def test_parity_tells_what_rounding_to_bf16_changed(tmp_path):
    model = drafter_for(golden_target(), block_size=8, mask_token_id=511)
    parity = write_export(tmp_path / "export", model, FACTS, golden_head())
    against = parity["against_training_model"]
    rounded = load_drafter(tmp_path / "export")
    weight = golden_head().weight.double()
    before, after = (probe(one).double() @ weight.T for one in (model, rounded))
    assert against["max_logit_difference"] == pytest.approx(
        float((before - after).abs().max()), rel=1e-2
    )
    assert 0 < against["max_logit_difference"] < 0.05 * against["max_logit"]
    assert check_export(tmp_path / "export")["probe"].startswith("hidden states within")


def test_comparison_without_a_head_stops_at_hidden_states():
    hidden = torch.zeros(4, 64)
    moved = hidden.clone()
    moved[2, 5] = -0.25
    assert compare(hidden, moved, None) == {"max_hidden_difference": 0.25}


def test_card_and_parity_tell_the_facts_and_take_later_ones(folder):
    card = (folder / "README.md").read_text()
    assert "DFlash drafter for tiny" in card
    assert "training conversations: 12" in card
    assert "7 speculative tokens" in card
    assert "acceptance length, really decoded" not in card
    add_facts(folder, {"acceptance_length": 2.5714, "prompts": 6})
    assert (
        "really decoded, pooled over target forwards: 2.571" in (folder / "README.md").read_text()
    )
    parity = json.loads((folder / "parity.json").read_text())
    assert parity["facts"] == FACTS | {"acceptance_length": 2.5714, "prompts": 6}
    assert check_export(folder).keys() == {"tensors", "weights", "config", "probe"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": 5}, r"config.json has mask_token_id=5, parity.json 511"),
        ({"target_layer_ids": [1, 2]}, r"target_layer_ids=\[1, 2\]"),
        ({"rms_norm_eps": 0.1}, "hidden states of the probe differ"),
        ({"hidden_size": 32}, "has shape"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "tensors are missing"),
    ],
)
def test_changed_config_is_found(folder, change, message):
    edit_config(folder, **change)
    with pytest.raises(UserError, match=message):
        check_export(folder)


def test_changed_rope_base_is_found(folder):
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10000.0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="hidden states of the probe differ"):
        check_export(folder)


def test_changed_weights_are_found(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"][3] += 1
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"SHA-256 of model.safetensors is .* were changed"):
        check_export(folder)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model.safetensors"):
        check_export(folder)


def test_command_exports_checks_and_refuses(folder, tmp_path, capsys):
    target = target_folder(tmp_path / "target")
    named = ["target=smollm2", f"target.name={target}"]
    again = tmp_path / "again"
    export(configure(f"checkpoint.path={folder}", f"output={again}", *named), tmp_path)
    assert "max_logit_difference 0" in capsys.readouterr().out
    parity = json.loads((again / "parity.json").read_text())
    # What is known about the source comes along.
    assert parity["facts"] == FACTS | {"target": str(target), "target_revision": None}
    export(configure(f"check={again}"), tmp_path)
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == 4
    assert "steps 112" in shown
    with pytest.raises(UserError, match="exists already"):
        export(configure(f"checkpoint.path={folder}", f"output={again}"), tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        export(configure(f"check={tmp_path / 'nothing'}"), tmp_path)


def test_speculators_layout_counts_layers_from_the_embedding(folder, tmp_path):
    target = target_folder(tmp_path / "target")
    output = tmp_path / "speculators"
    arguments = [f"checkpoint.path={folder}", f"output={output}", "format=speculators"]
    export(configure(*arguments, "target=smollm2", f"target.name={target}"), tmp_path)
    config = json.loads((output / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["Qwen3ForCausalLM"],
    }
    methods = config["speculators_config"]["proposal_methods"]
    assert [method["speculative_tokens"] for method in methods] == [7]
    assert config["transformer_layer_config"]["rope_theta"] == 1e6
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, output))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "either checkpoint=.* or check="),
        (["checkpoint.path=a", "check=b"], "either checkpoint=.* or check="),
        (["checkpoint.path=a"], "output: name the folder"),
        (["checkpoint.path=a", "output=b", "format=gguf"], "format=gguf: must be one of"),
        (["checkpoint.path=a", "output=b", "format=speculators"], "add target="),
    ],
)
def test_contradicting_arguments_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        configure(*overrides)
