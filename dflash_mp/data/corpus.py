"""From configuration to tokenised data: prepared once, kept in a cache, mapped by every rank."""

import fcntl
import hashlib
import importlib.metadata
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mp.config import DataConfig, UserError
from dflash_mp.config import cache_dir as default_cache_dir
from dflash_mp.data.documents import Corpus, empty_corpus, load_corpus, save_corpus, select
from dflash_mp.data.ingest import ingest
from dflash_mp.data.overlap import copied_share, shared_prompts
from dflash_mp.data.sources import Dropped, Source, content_hash, read_rows, resolve_sources
from dflash_mp.data.summary import Tally, describe_set
from dflash_mp.data.template import ChatFormat, chat_format

log = logging.getLogger(__name__)

CODE = (
    *("conversations", "corpus", "documents", "ingest", "overlap", "sources", "summary"),
    *("template", "tokenize"),
)
"""Modules whose text decides what the cache holds."""

PACKAGES = ("transformers", "tokenizers", "jinja2")
NOT_IN_KEY = ("train", "heldout", "tokens_per_batch", "cache_dir", "chat_template")


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs to know of its data; ``folder`` is what ``load_prepared`` takes."""

    train: Corpus
    heldout: Corpus
    summary: dict[str, Any]
    folder: Path


def check_data(data: DataConfig) -> tuple[list[Source], list[Source]]:
    """The sources of training and held-out data; raises ``UserError`` for a missing file.

    Reads no data: for a check before any model is loaded.
    """
    train = resolve_sources("data.train", data.train, "train")
    return train, resolve_sources("data.heldout", data.heldout, "eval")


def prepare(
    data: DataConfig, tokenizer: Any, mask_token_id: int, cache_dir: Path | None = None
) -> Prepared:
    """Read, tokenise and check all data, or find the same work done in the cache.

    For one process; the others call ``load_prepared(folder)`` afterwards.

    Args:
        data: what to read and how.
        tokenizer: the target's, a fast one.
        mask_token_id: the drafter's; no document may contain it.
        cache_dir: where to keep the result; None is ``data.cache_dir`` or the common cache.

    Raises:
        UserError: a file is missing, too many lines are unreadable, the chat template is
            unusable, or nothing is left to train on (with counted reasons).
    """
    sources = check_data(data)
    chat = chat_format(tokenizer, data, mask_token_id)
    key = cache_key(data, *sources, chat)
    root = cache_dir or cache_root(data)
    folder = root / f"data-{key[:20]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            # Others who want the same data wait; the system drops the lock of a killed process.
            fcntl.flock(lock, fcntl.LOCK_EX)
            problem = damage(folder, key) if folder.exists() else "nothing there yet"
            if folder.exists() and problem:
                log.warning(
                    "not using the data in %s: %s; preparing again, there is nothing to do unless "
                    "it comes again: then look at that disk, or set data.cache_dir elsewhere",
                    folder,
                    problem,
                )
            if problem:
                _build_atomically(folder, key, sources, chat, data)
    except OSError as error:
        raise UserError(f"data.cache_dir: cannot write to {folder}: {error}") from error
    return load_prepared(folder)


def cache_root(data: DataConfig) -> Path:
    """``data.cache_dir``, or where everything else is kept between runs."""
    return Path(data.cache_dir).expanduser() if data.cache_dir else default_cache_dir()


def load_prepared(folder: Path) -> Prepared:
    """Map what ``prepare`` left in ``folder``."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Prepared(
        load_corpus(folder / "train.safetensors"),
        load_corpus(folder / "heldout.safetensors"),
        summary,
        folder,
    )


def cache_key(
    data: DataConfig, train: list[Source], heldout: list[Source], chat: ChatFormat
) -> str:
    """Hex digest of all that decides the result: contents, template, tokenizer, options, code."""
    options = {name: value for name, value in asdict(data).items() if name not in NOT_IN_KEY}
    code = hashlib.sha256()
    for module in CODE:
        code.update((Path(__file__).parent / f"{module}.py").read_bytes())
    parts = {
        "options": options,
        "sources": [
            [(content_hash(s), s.weight, [f.name for f in s.files]) for s in group]
            for group in (train, heldout)
        ],
        "template": chat.template,
        "template_kwargs": dict(chat.template_kwargs),
        "tokenizer": hashlib.sha256(chat.tokenizer.to_str().encode()).hexdigest(),
        "control_tokens": chat.control_tokens,
        "vocab_size": chat.vocab_size,
        "mask_token_id": chat.mask_token_id,
        "code": code.hexdigest(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def damage(folder: Path, key: str) -> str | None:
    """Why a cache folder must not be used, or None when it is whole and of this key."""
    try:
        seal = json.loads((folder / "seal.json").read_text(encoding="utf-8"))
        if seal["key"] != key:
            return "it was made from other data or settings"
        for name, digest in seal["files"].items():
            if _digest(folder / name) != digest:
                return f"{name} has changed since it was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it is incomplete ({error})"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build_atomically(
    folder: Path,
    key: str,
    sources: tuple[list[Source], list[Source]],
    chat: ChatFormat,
    data: DataConfig,
) -> None:
    """Fill a folder beside ``folder`` and rename it; called with the lock held."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    # Left by a process that was killed.
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        _build(unfinished, key, sources, chat, data)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _build(
    work: Path,
    key: str,
    sources: tuple[list[Source], list[Source]],
    chat: ChatFormat,
    data: DataConfig,
) -> None:
    """Write the three files of the cache and, last, the seal that says they are whole."""
    train, train_tally = ingest("data.train", sources[0], chat, data, work / "train.safetensors")
    summary: dict[str, Any] = {
        "template": chat.name,
        "end_of_turn": chat.end_of_turn or None,
        "mask_from": "generation markers" if chat.marked else "prefix rendering",
        "train": describe_set(train, train_tally, sources[0]),
    }
    heldout, heldout_tally = empty_corpus(), Tally()
    if sources[1]:
        path = work / "all_heldout.safetensors"
        whole, heldout_tally = ingest("data.heldout", sources[1], chat, data, path)
        threshold = data.near_copy_threshold
        heldout = (
            whole
            if threshold is None
            else _without_overlap(whole, train, sources[1], heldout_tally, threshold)
        )
        path.unlink()
    save_corpus(heldout, work / "heldout.safetensors")
    summary["heldout"] = describe_set(heldout, heldout_tally, sources[1])
    summary["heldout"]["rule"] = (
        "nothing was removed (data.near_copy_threshold=null): values may be those of training text"
        if data.near_copy_threshold is None
        else f"removed: prompts that occur in training, and rows with at least "
        f"{data.near_copy_threshold:.0%} of a response's 8-token runs in one training response"
    )
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    (work / "summary.json").write_text(text, encoding="utf-8")
    names = ("train.safetensors", "heldout.safetensors", "summary.json")
    seal = {"key": key, "files": {name: _digest(work / name) for name in names}}
    (work / "seal.json").write_text(json.dumps(seal), encoding="utf-8")


def _without_overlap(
    whole: Corpus, train: Corpus, sources: list[Source], tally: Tally, threshold: float
) -> Corpus:
    """Remove held-out rows that training gives away, all documents of a row together."""
    prompt = np.isin(whole.rows, whole.rows[shared_prompts(whole, train)])
    share = copied_share(whole, train)
    copied = np.isin(whole.rows, whole.rows[share >= threshold]) & ~prompt
    gone = prompt | copied
    names = _names_of_rows(sources, set(whole.rows[gone].tolist()))
    for row, where in names.items():
        documents = whole.rows == row
        reason = "prompt_in_training" if prompt[documents].any() else "near_copy_of_training"
        most = share[documents].max()
        tally.withdraw(where, Dropped(reason, f"{most:.0%} of a response is in training"))
    return select(whole, ~gone)


def _names_of_rows(sources: list[Source], rows: set[int]) -> dict[int, str]:
    """Where the rows of these numbers stand, as "file:line"."""
    if not rows:
        return {}
    read = (raw.where for source in sources for raw in read_rows(source))
    return {number: where for number, where in enumerate(read) if number in rows}
