"""Measure a drafter by decoding with it; under torchrun every rank decodes its share.

    python -m dflash_mp.evaluate drafter=outputs/smollm2_narrow/export data.prompts=narrow

drafter=...            an export folder, a checkpoint or a hub name
target=smollm2         the model it drafts for, a file of conf/target
data.prompts=...       rows {messages: [...]} or {prompt: text}; narrow and mixed are shipped
data.max_prompts=...   only the first so many
block_sizes=[8,16]     decode with each of them; by default with the drafter's own
max_new_tokens=256     length of a response, at most
temperature=0          0 is greedy
plain=true             also decode with the target alone: same text, and the time to compare with
run_name=evaluate      results lie in outputs/<run_name>: evaluate.json, evaluate.png
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from hydra.core.config_store import ConfigStore
from jinja2 import TemplateError
from omegaconf import MISSING
from transformers import PreTrainedModel

from dflash_mp import __version__
from dflash_mp.acceptance import check_pair, evaluate_prompts
from dflash_mp.acceptance_report import plot, table
from dflash_mp.acceptance_summary import Row, merge_results
from dflash_mp.cast import choose_device, connect
from dflash_mp.command import run_command, say
from dflash_mp.config import TargetConfig, UserError, require
from dflash_mp.data.conversations import parse_line
from dflash_mp.data.responses import stop_token_ids
from dflash_mp.data.sources import Dropped, read_rows, resolve_sources
from dflash_mp.drafter.checkpoint_format import load_drafter, read_drafter_config
from dflash_mp.drafter.hf_config import read_config
from dflash_mp.drafter_source import DrafterSource, spell_path
from dflash_mp.progress import progress_bar
from dflash_mp.speculate import DecodeSettings
from dflash_mp.target.model import load_config, load_target, load_tokenizer

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]


@dataclass
class PromptsConfig:
    """What is decoded."""

    prompts: Any = MISSING
    max_prompts: int | None = MISSING
    chat_template: str | None = MISSING
    template_kwargs: dict[str, Any] = MISSING

    def __post_init__(self) -> None:
        count = self.max_prompts
        require(count is None or count >= 1, f"data.max_prompts={count}: must be at least 1")


@dataclass
class EvaluateRun:
    """The root of ``conf/evaluate.yaml``."""

    target: TargetConfig = MISSING
    data: PromptsConfig = MISSING
    drafter: DrafterSource = MISSING
    run_name: str = MISSING
    block_sizes: list[int] | None = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    seed: int = MISSING
    plain: bool = MISSING
    threads: int | None = MISSING

    def __post_init__(self) -> None:
        sizes = self.block_sizes
        require(
            sizes is None or (len(sizes) > 0 and min(sizes) >= 2 and len(set(sizes)) == len(sizes)),
            f"block_sizes={sizes}: name different sizes of at least 2 (the anchor and one drafted "
            "token), or null",
        )
        require(
            self.max_new_tokens >= 2,
            f"max_new_tokens={self.max_new_tokens}: must be at least 2, the first comes from the "
            "prefill",
        )
        require(self.temperature >= 0, f"temperature={self.temperature}: must not be negative")


def evaluate(config: EvaluateRun, folder: Path) -> None:
    """Decode this rank's share of the prompts; rank 0 then collects all rows and reports.

    Raises ``UserError`` for prompts or a drafter that cannot be read, a prompt longer than the
    target's context, and a drafter that does not belong to the target.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    os.environ.setdefault("LOCAL_RANK", "0")
    device = choose_device(config.threads)
    target_config = load_config(config.target)
    # Whatever is wrong with the input is found before weights are loaded.
    path, revision = config.drafter.path, config.drafter.revision
    require(path is not None, "drafter: name a checkpoint, an export folder or a hub name")
    assert path is not None
    check_pair(read_config(read_drafter_config(path, revision)), target_config)
    tokenizer = load_tokenizer(config.target)
    prompts = encode_prompts(config, tokenizer, target_config)
    target: PreTrainedModel = load_target(config.target, device)
    drafter = load_drafter(path, target.dtype, device, revision=revision).eval()
    settings = DecodeSettings(
        max_new_tokens=config.max_new_tokens,
        stop_ids=tuple(stop_token_ids(target, tokenizer)),
        temperature=config.temperature,
        seed=config.seed,
    )
    mine = list(enumerate(prompts))[rank::ranks]
    sizes = config.block_sizes or [drafter.config.block_size]
    with progress_bar(desc="decoding", total=len(mine) * len(sizes), disable=rank > 0) as bar:
        rows = evaluate_prompts(
            target, drafter, mine, settings, sizes, config.plain, lambda: bar.update() and None
        )
    rows = gather(rows, rank, ranks, job=str(folder))
    if rank == 0:
        report(config, folder, rows, sizes)


def encode_prompts(config: EvaluateRun, tokenizer: Any, target_config: Any) -> list[list[int]]:
    """Token ids of every prompt, the chat template applied as a server does it."""
    kwargs = dict(config.data.template_kwargs)
    if config.data.chat_template is not None:
        path = Path(config.data.chat_template)
        require(path.is_file(), f"data.chat_template: there is no file {path}")
        kwargs["chat_template"] = path.read_text(encoding="utf-8")
    limit = getattr(target_config.get_text_config(), "max_position_embeddings", None)
    encoded = []
    for where, messages in read_prompts(config.data.prompts, config.data.max_prompts):
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **kwargs
            )["input_ids"]
        except (TemplateError, ValueError, TypeError) as error:
            raise UserError(
                f"{where}: the chat template refuses it: {str(error).splitlines()[0]}"
            ) from None
        require(
            limit is None or len(ids) < limit,
            f"{where}: a prompt of {len(ids)} tokens does not fit into the target's context of "
            f"{limit}: shorten or remove it",
        )
        encoded.append(ids)
    return encoded


def read_prompts(spec: Any, count: int | None) -> list[tuple[str, Messages]]:
    """The first ``count`` conversations to be continued, each with where it stands.

    Raises ``UserError`` naming file and line for a row that is no prompt, and for no rows at all.
    """
    prompts: list[tuple[str, Messages]] = []
    for source in resolve_sources("data.prompts", spec, "eval"):
        for raw in read_rows(source):
            if count is not None and len(prompts) == count:
                return prompts
            try:
                row = parse_line(raw)
            except Dropped as error:
                raise UserError(f"{raw.where}: {error.reason}: {error.detail}") from None
            prompts.append((raw.where, _open_messages(row, raw.where)))
    require(bool(prompts), f"data.prompts={spec}: no prompts in it")
    return prompts


def _open_messages(row: dict[str, Any], where: str) -> Messages:
    """The messages of a row without the replies at its end."""
    if isinstance(row.get("prompt"), str):
        return [{"role": "user", "content": row["prompt"]}]
    messages = row.get("messages")
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    )
    require(good, f'{where}: needs "messages", a list of {{role, content}}, or "prompt", a text')
    assert isinstance(messages, list)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    require(bool(messages), f"{where}: there is nothing to answer in it")
    return messages


def gather(rows: list[Row], rank: int, ranks: int, job: str) -> list[Row]:
    """All rows in the order of the prompts on rank 0, through the launcher's store.

    ``job`` differs between the jobs of a sweep, which share that store.
    """
    if ranks == 1:
        return rows
    store = connect(job)
    if rank > 0:
        store.set(f"rows/{rank}", json.dumps(rows))
        return rows
    keys = [f"rows/{other}" for other in range(1, ranks)]
    # A rank that fails ends the whole job; waiting itself must not time out on a slow one.
    store.wait(keys, timedelta(days=7))
    for key in keys:
        rows += json.loads(store.get(key))
    return sorted(rows, key=lambda row: row["prompt"])


def report(config: EvaluateRun, folder: Path, rows: list[Row], block_sizes: Sequence[int]) -> None:
    """Write ``evaluate.json`` and ``evaluate.png`` and show the table."""
    summaries = [
        merge_results([row for row in rows if row["block_size"] == size]) for size in block_sizes
    ]
    facts = {
        "config": asdict(config),
        "versions": {
            "dflash_mp": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "summaries": summaries,
        "rows": rows,
    }
    (folder / "evaluate.json").write_text(json.dumps(facts, indent=1) + "\n")
    plot(summaries, folder / "evaluate.png")
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature}"
    head = [
        "",
        f"drafter {config.drafter.path} for target {config.target.name}",
        f"{summaries[0]['prompts']} prompts one at a time, {how}, at most {config.max_new_tokens} "
        "new tokens",
        "",
    ]
    lines = [*head, *table(summaries), "", f"{folder / 'evaluate.json'}  {folder / 'evaluate.png'}"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    different = sum(summary["different"] for summary in summaries)
    if different:
        say(
            f"{different} texts differ from plain decoding by more than rounding explains: see "
            "verdict and largest_gap of the rows in evaluate.json"
        )


ConfigStore.instance().store(name="evaluate_schema", node=EvaluateRun)


if __name__ == "__main__":
    sys.argv[1:] = spell_path(sys.argv[1:], "drafter")
    run_command("evaluate", EvaluateRun, evaluate)
