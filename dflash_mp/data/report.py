"""What is in the data, before anything is trained on it: a table, report.json and report.html.

    python -m dflash_mp.data.report target=qwen3_8b data.train=my.jsonl

target=smollm2         whose tokenizer and chat template are used, a file of conf/target
data.train=...         conversations: a file, a folder, a hub dataset, narrow or mixed
data.heldout=...       held-out conversations; look-alikes of training rows are counted
data.max_length=...    longest document, in tokens
score_documents=32     documents whose text is compared with the target's own choices;
                       0 does not load the target
output=outputs/data_report  where the two files go

The tokenised data stays in the cache: a training on the same data starts at once.
"""

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.command import run_command
from dflash_mp.config import DataConfig, TargetConfig, require
from dflash_mp.data.corpus import Prepared, check_data, prepare
from dflash_mp.data.on_policy import on_policy_score
from dflash_mp.data.packing import fill, pack
from dflash_mp.data.report_page import page
from dflash_mp.data.summary import summary_lines
from dflash_mp.drafter.mask_token import pick_mask_token
from dflash_mp.target.model import load_config, load_target, load_tokenizer

log = logging.getLogger(__name__)

BAR = 40


@dataclass
class ReportConfig:
    """The root of ``conf/report.yaml``."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    output: str = MISSING
    mask_token_id: int | None = MISSING
    score_documents: int = MISSING
    seed: int = MISSING

    def __post_init__(self) -> None:
        require(
            self.score_documents >= 0,
            f"score_documents={self.score_documents}: must not be negative",
        )
        require(self.seed >= 0, f"seed={self.seed}: must not be negative")


def report(config: ReportConfig, _: Path) -> None:
    """Prepare the data, look at it, and write down what was found."""
    check_data(config.data)
    tokenizer = load_tokenizer(config.target)
    mask_token_id = pick_mask_token(tokenizer, load_config(config.target), config.mask_token_id)
    prepared = prepare(config.data, tokenizer, mask_token_id)
    found = {
        **prepared.summary,
        "packing": packing_facts(prepared, config.data.tokens_per_batch, config.seed),
        "on_policy": _score(config, prepared),
    }
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    (folder / "report.json").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(page(found), encoding="utf-8")
    sys.stdout.write("\n".join([*terminal_lines(found), f"written to {folder}/report.html"]) + "\n")


def _score(config: ReportConfig, prepared: Prepared) -> dict[str, Any] | None:
    if config.score_documents == 0:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(config.target, device)
    score = on_policy_score(model, prepared.train, config.score_documents, config.seed)
    return {**asdict(score), "is_own": score.is_own, "line": score.line()}


def packing_facts(prepared: Prepared, tokens_per_batch: int, seed: int) -> dict[str, Any]:
    """How full the micro-batches of the first epoch are."""
    train = prepared.train
    packs = pack(train.lengths, tokens_per_batch, seed, 0, train.weights)
    return {
        "tokens_per_batch": tokens_per_batch,
        "packs": len(packs),
        "fill": fill(train.lengths, packs, tokens_per_batch),
    }


def terminal_lines(found: dict[str, Any]) -> list[str]:
    """The report for a terminal."""
    lines = summary_lines(found)
    lines += ["", f"template: {found['template']}, mask from {found['mask_from']}"]
    for name in ("train", "heldout"):
        histogram = found[name]["length_histogram"]
        most = max(histogram.values(), default=1)
        lines += ["", f"data.{name}: documents by length in tokens"] if histogram else []
        for label, count in histogram.items():
            lines.append(f"  {label:>12} {count:>9,} {'#' * round(BAR * count / most)}")
    packing = found["packing"]
    lines += [
        "",
        f"packing: {packing['packs']:,} micro-batches of {packing['tokens_per_batch']:,} slots, "
        f"{packing['fill']:.1%} filled",
    ]
    if found["on_policy"] is not None:
        lines.append(found["on_policy"]["line"])
    return lines


ConfigStore.instance().store(name="report_schema", node=ReportConfig)


if __name__ == "__main__":
    run_command("report", ReportConfig, report)
