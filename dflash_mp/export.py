"""Write a drafter for others to use, or check such a folder.

    python -m dflash_mp.export checkpoint=outputs/my_run/export output=my_drafter
    python -m dflash_mp.export check=my_drafter

checkpoint=...         a checkpoint of a run, an export folder or a hub name
format=hf              hf: for z-lab/dflash, SGLang, vLLM and SpecForge
                       speculators: for vllm-project/speculators; needs target=...
output=...             folder to write; it must not exist
target=...             the model it drafts for: also compares the logits of both versions
check=...              compare an export with its parity.json instead; writes nothing
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.acceptance import check_pair
from dflash_mp.command import run_command
from dflash_mp.config import TargetConfig, one_of, require
from dflash_mp.drafter.checkpoint_format import load_drafter
from dflash_mp.drafter.frozen_head import load_frozen_head
from dflash_mp.drafter_source import DrafterSource, spell_path
from dflash_mp.export_folder import PARITY, check_export, read_parity, write_export
from dflash_mp.speculators_format import write_speculators
from dflash_mp.target.model import load_config, resolve

FORMATS = ("hf", "speculators")


@dataclass
class ExportConfig:
    """The root of ``conf/export.yaml``."""

    target: TargetConfig | None = None
    checkpoint: DrafterSource = MISSING
    format: str = MISSING
    output: str | None = MISSING
    check: str | None = MISSING

    def __post_init__(self) -> None:
        one_of("format", self.format, FORMATS)
        require(
            (self.check is None) != (self.checkpoint.path is None),
            "name either checkpoint=<what to export> or check=<export folder>",
        )
        require(
            self.check is not None or self.output is not None, "output: name the folder to write"
        )
        require(
            self.format != "speculators" or self.target is not None or self.check is not None,
            "format=speculators names the target in the folder: add target=<...>",
        )


def export(config: ExportConfig, _: Path) -> None:
    """Do what ``config`` asks for and say what was done.

    Raises ``UserError`` for an unreadable drafter, a target it does not belong to, an output folder
    that exists, and a check that fails.
    """
    if config.check is not None:
        lines = check(Path(config.check))
    else:
        assert config.output is not None
        lines = write(config, Path(config.output))
    sys.stdout.write("\n".join(lines) + "\n")


def write(config: ExportConfig, folder: Path) -> list[str]:
    """Export ``config.checkpoint`` to ``folder``; lines that say so."""
    require(not folder.exists(), f"output={folder} exists already: name a new folder")
    source = config.checkpoint.path
    assert source is not None
    model = load_drafter(source, revision=config.checkpoint.revision)
    target = config.target
    target_config = load_config(target) if target is not None else None
    if target_config is not None:
        check_pair(model.config, target_config)
    if config.format == "speculators":
        assert target is not None
        write_speculators(folder, model, target_config, resolve(target))
        return [f"{folder}: written for speculators and vLLM"]
    head = None
    facts = known_facts(Path(source))
    if target is not None:
        head = load_frozen_head(
            resolve(target), torch.float32, "cpu", target.revision, target.trust_remote_code
        )
        facts |= {"target": target.name, "target_revision": target.revision}
    parity = write_export(folder, model, facts, head)
    against = ", ".join(f"{k} {v:.3g}" for k, v in parity["against_training_model"].items())
    return [f"{folder}: written", f"bf16 against the weights in {source}: {against}"]


def known_facts(source: Path) -> dict[str, Any]:
    """What an export or a checkpoint says about its making."""
    if (source / PARITY).is_file():
        return dict(read_parity(source)["facts"])
    state = source / "state.json"
    if not state.is_file():
        return {}
    recorded = json.loads(state.read_text())
    return {
        ours: recorded[theirs]
        for ours, theirs in (("steps", "step"), ("data_fingerprint", "data"))
        if theirs in recorded
    }


def check(folder: Path) -> list[str]:
    """Lines on what was checked in an export, and on what it says about itself."""
    require(folder.is_dir(), f"check={folder}: there is no such folder")
    passed = check_export(folder)
    lines = [f"ok  {name:8} {found}" for name, found in passed.items()]
    parity = read_parity(folder)
    lines += ["", f"what {folder / PARITY} says:"]
    for section in ("versions", "against_training_model", "facts"):
        said = ", ".join(f"{key} {value}" for key, value in parity[section].items())
        lines.append(f"    {section.replace('_', ' ')}: {said or '-'}")
    return [*lines, "", "measure its acceptance again with python -m dflash_mp.evaluate"]


ConfigStore.instance().store(name="export_schema", node=ExportConfig)

if __name__ == "__main__":
    sys.argv[1:] = spell_path(sys.argv[1:], "checkpoint")
    run_command("export", ExportConfig, export)
