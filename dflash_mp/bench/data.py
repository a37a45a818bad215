"""How fast conversations become packed micro-batches on this machine.

    python -m dflash_mp.bench.data 20000

Rows per second of one core for each stage, on synthetic conversations of one to three turns with a
long tail of lengths, and the memory that preparing all of them takes. Uses the default target's
tokenizer.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path

from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

from dflash_mp.bench.machine import RESULTS, write_result
from dflash_mp.config import DataConfig, TrainConfig, config_dir, to_config
from dflash_mp.data.corpus import prepare
from dflash_mp.data.ingest import process_rows
from dflash_mp.data.packing import collate, fill, pack
from dflash_mp.data.sources import read_rows, resolve_sources
from dflash_mp.data.template import chat_format
from dflash_mp.target.smollm2 import converted_folder

ROWS_OF_ONE_CORE = 2000
MASK_TOKEN = "<empty_output>"


def main(arguments: list[str]) -> None:
    """Print one line per stage and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash_mp.bench.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", type=int, nargs="?", default=100_000, help="default: 100000")
    parser.add_argument("result", type=Path, nargs="?", default=RESULTS / "data.json")
    parsed = parser.parse_args(arguments)
    rows = parsed.rows
    tokenizer = AutoTokenizer.from_pretrained(converted_folder())
    mask_token_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows)
        with initialize_config_dir(config_dir(), version_base="1.3"):
            raw = compose("train", ["data=jsonl", f"data.train={folder / 'rows.jsonl'}"])
        data = to_config(raw, TrainConfig).data
        found = one_core(tokenizer, data, mask_token_id)
        say(
            "one core: {rows_per_core_s:,.0f} rows/s, {mb_per_core_s:.2f} MB/s, "
            "{tokens_per_core_s:,.0f} tokens/s".format(**found)
        )
        found |= whole(tokenizer, data, mask_token_id, folder / "cache")
        say(
            "all cores: {rows:,} rows in {prepare_s:.1f} s, {peak_mib:,.0f} MiB above the start\n"
            "from the cache: {cached_s:.1f} s\n"
            "packing: {documents:,} documents in {pack_s:.2f} s, {fill:.1%} filled; "
            "{collate_us:.0f} us to collate a micro-batch".format(**found)
        )
    write_result(parsed.result, found)


def say(line: str) -> None:
    """One line on the terminal."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write_rows(path: Path, count: int) -> None:
    """Conversations of made-up words, the same every time."""
    rng = random.Random(0)
    heads, tails = ("ba", "ne", "ti", "ro", "su", "al", "en"), ("n", "rs", "lt", "m", "ck", "ding")
    words = [a + b + c for a in heads for b in heads for c in tails]

    def text(low: int, median: float) -> str:
        size = max(low, min(1500, int(rng.lognormvariate(median, 0.8))))
        return " ".join(rng.choices(words, k=size))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [
                {"role": role, "content": text(3, median)}
                for _ in range(rng.choice((1, 1, 1, 2, 3)))
                for role, median in (("user", 2.8), ("assistant", 3.8))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def one_core(tokenizer: object, data: DataConfig, mask_token_id: int) -> dict[str, float]:
    """Reading, rendering and tokenising in this process: rows, megabytes, tokens a CPU second."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    chat = chat_format(tokenizer, data, mask_token_id)
    raws = list(islice(read_rows(resolve_sources("", data.train, "train")[0]), ROWS_OF_ONE_CORE))
    start = time.process_time()
    chunk = process_rows(chat, data, raws)
    seconds = time.process_time() - start
    text = Path(data.train).read_bytes().split(b"\n")[: len(raws)]
    return {
        "rows_per_core_s": len(raws) / seconds,
        "mb_per_core_s": sum(map(len, text)) / seconds / 1e6,
        "tokens_per_core_s": sum(len(one.input_ids) for one in chunk.documents) / seconds,
    }


def whole(tokenizer: object, data: DataConfig, mask_token_id: int, cache: Path) -> dict[str, float]:
    """Everything from the file to the first micro-batch, by all cores; wall seconds."""
    with Memory() as memory:
        start = time.perf_counter()
        prepared = prepare(data, tokenizer, mask_token_id, cache)
        prepare_s = time.perf_counter() - start
    start = time.perf_counter()
    prepare(data, tokenizer, mask_token_id, cache)
    cached_s = time.perf_counter() - start
    lengths = prepared.train.lengths
    start = time.perf_counter()
    packs = pack(lengths, data.tokens_per_batch, 0, 0)
    pack_s = time.perf_counter() - start
    start = time.perf_counter()
    for documents in packs[:200]:
        collate(prepared.train, documents, data.tokens_per_batch)
    collate_s = (time.perf_counter() - start) / min(200, len(packs))
    return {
        "rows": prepared.summary["train"]["rows_read"],
        "prepare_s": prepare_s,
        "peak_mib": memory.peak / 2**20,
        "cached_s": cached_s,
        "documents": len(lengths),
        "pack_s": pack_s,
        "fill": fill(lengths, packs, data.tokens_per_batch),
        "collate_us": collate_s * 1e6,
    }


class Memory:
    """Peak of the anonymous memory of this process and its children, in bytes above the start."""

    def __init__(self) -> None:
        self.peak = 0
        self._before = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        tasks = Path("/proc/self/task").iterdir()
        children = " ".join(_read(task / "children") for task in tasks).split()
        states = [_read(Path(f"/proc/{pid}/status")) for pid in ["self", *children]]
        lines = [line for state in states for line in state.splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        # The process or thread has ended in the meantime.
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
