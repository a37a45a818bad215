"""Let the target answer prompts; under torchrun every rank answers its share.

    python -m dflash_mp.data.generate data.prompts=prompts.jsonl output=answers.jsonl

data.prompts=...       JSONL rows {id, messages}, or one of narrow_train, narrow_eval, ...
output=...             JSONL file to write; the same command resumes a job that was killed
target=smollm2         the model that answers, a file of conf/target
server=http://...      an OpenAI-compatible server that answers instead
max_new_tokens=512     longest reply, in tokens
temperature=0          0 is greedy
batch_size=48          conversations answered at once

A row of the output is {id, messages, finish_reason, response_token_ids, source}, in the order of
the prompts. The two about the reply are a single value when the conversation has one assistant
turn, else lists with an entry per assistant turn, null where the prompt brought the reply along.
"""

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from dflash_mp.command import run_command, say
from dflash_mp.config import TargetConfig, UserError, require
from dflash_mp.data.parts import Parts
from dflash_mp.data.prompts import SIZES, prompt_rows
from dflash_mp.data.responses import Respond, Sampling, local_respond, server_respond
from dflash_mp.data.turns import answer_conversations, open_turns
from dflash_mp.progress import progress_bar
from dflash_mp.target.model import load_target, load_tokenizer

log = logging.getLogger(__name__)


@dataclass
class PromptsConfig:
    """What is to be answered."""

    prompts: str = MISSING


@dataclass
class GenerateConfig:
    """The root of ``conf/generate.yaml``."""

    target: TargetConfig = MISSING
    data: PromptsConfig = MISSING
    output: str = MISSING
    server: str | None = MISSING
    batch_size: int = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    seed: int = MISSING

    def __post_init__(self) -> None:
        require(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        require(
            self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens}: must be at least 1"
        )
        require(
            self.temperature >= 0,
            f"temperature={self.temperature}: must not be negative; 0 is greedy",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p}: must be in (0, 1]")


def generate(config: GenerateConfig, rank: int, world_size: int) -> None:
    """Answer this rank's share of the prompts; rank 0 then waits for the rest and merges.

    Raises:
        UserError: prompts that cannot be read, an output that exists, a server that fails.
    """
    prompts = load_prompts(config.data.prompts)
    with Parts(Path(config.output), job_digest(config, prompts), rank) as parts:
        batches = rank_batches(prompts, rank, world_size, config.batch_size)
        if not all(parts.finished(index) for batch in batches for index in batch):
            try:
                respond = make_respond(config)
                answer_batches(prompts, batches, parts, respond, config.seed, rank == 0)
            except UserError as error:
                # Rank 0 says its own; nobody else would name what only this rank ran into.
                if rank > 0:
                    say(str(error))
                raise
        if rank == 0:
            if world_size > 1:
                log.info("waiting for the other ranks to finish")
            written, skipped = parts.merge(len(prompts))
            log.info("%s: %d rows from %d prompts", config.output, written, len(prompts))
            if skipped:
                log.warning(
                    "%d prompts were skipped and have no answer, the first: %s; shorten or drop "
                    "them, and write to another output",
                    len(skipped),
                    skipped[0],
                )


def load_prompts(name: str) -> list[dict[str, Any]]:
    """Rows ``{id, messages, source}`` of a JSONL file, or one of our own prompt sets by its name.

    Raises:
        UserError: no such file, or a line that is not a conversation with a user turn to answer.
    """
    if name in SIZES:
        return prompt_rows(name)
    path = Path(name)
    require(
        path.is_file(), f"data.prompts={name}: neither a file nor one of {', '.join(sorted(SIZES))}"
    )
    # Lines end with \n only: U+2028 and the like may stand inside a string.
    with path.open(encoding="utf-8", newline="\n") as lines:
        rows = [
            _prompt_row(line, path, number) for number, line in enumerate(lines, 1) if line.strip()
        ]
    require(bool(rows), f"data.prompts={name}: no prompts in it")
    return rows


def _prompt_row(line: str, path: Path, number: int) -> dict[str, Any]:
    place = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {error}") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    fine = isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in messages
    )
    require(fine, f'{place}: needs "messages", a list of {{"role": text, "content": text}}')
    texts = "".join(message["content"] for message in row["messages"])
    require(
        not any("\ud800" <= character <= "\udfff" for character in texts),
        f"{place}: half a character (a lone surrogate) in it, which no tokenizer takes",
    )
    require(bool(open_turns(row["messages"])), f"{place}: every user turn has its reply already")
    return {"id": f"{path.stem}:{number}", "source": path.stem, **row}


def job_digest(config: GenerateConfig, prompts: list[dict[str, Any]]) -> str:
    """Hexadecimal digest of all that decides the output."""
    settings = {**asdict(config), "data": prompts, "output": None, "batch_size": None}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def rank_batches(
    prompts: list[dict[str, Any]], rank: int, world_size: int, batch_size: int
) -> list[list[int]]:
    """The numbers of this rank's prompts, in batches of similar length, long ones first.

    They do not depend on what is finished already, so a resumed job decodes the same batches.
    """
    lengths = [sum(len(m["content"]) for m in row["messages"]) for row in prompts]
    order = sorted(range(len(prompts)), key=lambda index: (-lengths[index], index))
    share = order[rank::world_size]
    return [share[start : start + batch_size] for start in range(0, len(share), batch_size)]


def make_respond(config: GenerateConfig) -> Respond:
    """The server's answers if one is named, else the target's own, loaded here."""
    sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed)
    if config.server is not None:
        return server_respond(config.server, config.target.name, sampling)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return local_respond(
        load_target(config.target, device), load_tokenizer(config.target), sampling
    )


def answer_batches(
    prompts: list[dict[str, Any]],
    batches: list[list[int]],
    parts: Parts,
    respond: Respond,
    seed: int,
    show: bool,
) -> None:
    """Answer what is not finished yet, writing after each batch; a progress bar if ``show``."""
    todo = [[i for i in batch if not parts.finished(i)] for batch in batches]
    total = sum(len(batch) for batch in batches)
    bar = progress_bar(
        desc="answering",
        total=total,
        initial=total - sum(len(batch) for batch in todo),
        unit=" rows",
        disable=not show,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} rows, "
        "{rate_noinv_fmt}, {remaining} left",
    )
    with bar:
        for batch in filter(None, todo):
            rows = {index: prompts[index] for index in batch}
            parts.append(answer_conversations(rows, respond, seed))
            bar.update(len(batch))


ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)


def _this_rank(config: GenerateConfig, _: Path) -> None:
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    generate(config, int(rank), int(world_size))


if __name__ == "__main__":
    run_command("generate", GenerateConfig, _this_rank)
