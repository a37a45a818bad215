"""What ranks have answered so far survives any death, and is written once."""

import threading
import time

import pytest
from answering import echo, read

from dflash_mp.config import UserError
from dflash_mp.data.generate import answer_batches, load_prompts, rank_batches
from dflash_mp.data.parts import Parts
from dflash_mp.data.responses import Skipped


def run(prompts, output, respond, rank=0, world_size=1, merge=True):
    with Parts(output, "d" * 64, rank) as parts:
        batches = rank_batches(prompts, rank, world_size, 3)
        answer_batches(prompts, batches, parts, respond, 0, False)
        return parts.merge(len(prompts)) if merge else None


def test_resumes_after_a_kill_at_any_byte(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    whole = tmp_path / "whole.jsonl"
    run(prompts, whole, echo, merge=False)
    part = tmp_path / f"whole.jsonl.parts-{'d' * 12}" / "rank0.jsonl"
    lines = part.read_bytes()
    run(prompts, whole, echo)
    assert [row["id"] for row in read(whole)] == [f"p{n}" for n in range(len(prompts))]

    line_end = lines.index(b"\n") + 1
    for cut in (*range(0, len(lines), 97), line_end - 1, line_end, len(lines)):
        output = tmp_path / f"cut{cut}.jsonl"
        folder = tmp_path / f"cut{cut}.jsonl.parts-{'d' * 12}"
        folder.mkdir()
        (folder / "rank0.jsonl").write_bytes(lines[:cut])
        asked = []

        def respond(conversations, seeds, asked=asked):
            asked.extend(conversations)
            return echo(conversations, seeds)

        run(prompts, output, respond)
        assert output.read_bytes() == whole.read_bytes()
        # Nothing is done twice: what has its whole line is not asked again.
        assert len(asked) == len(prompts) - lines[:cut].count(b"\n")
        assert not folder.exists()


def test_ranks_together_write_what_one_rank_writes(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    run(prompts, tmp_path / "one.jsonl", echo)
    # A job of three ranks that was killed when rank 2 had finished, resumed with two.
    run(prompts, tmp_path / "two.jsonl", echo, rank=2, world_size=3, merge=False)
    run(prompts, tmp_path / "two.jsonl", echo, rank=1, world_size=2, merge=False)
    run(prompts, tmp_path / "two.jsonl", echo, rank=0, world_size=2)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_torn_line_of_a_rank_that_is_gone_is_not_taken(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    run(prompts, tmp_path / "one.jsonl", echo)
    run(prompts, tmp_path / "two.jsonl", echo, rank=1, world_size=2, merge=False)
    part = tmp_path / f"two.jsonl.parts-{'d' * 12}" / "rank1.jsonl"
    part.write_bytes(part.read_bytes()[:-20])
    run(prompts, tmp_path / "two.jsonl", echo)
    assert (tmp_path / "two.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_rank_zero_waits_for_the_others(tmp_path, prompt_file):
    prompts = load_prompts(str(prompt_file))
    output = tmp_path / "out.jsonl"
    results = []
    waiting = threading.Thread(target=lambda: results.append(run(prompts, output, echo, 0, 2)))
    waiting.start()
    time.sleep(0.3)
    assert not output.exists()
    run(prompts, output, echo, rank=1, world_size=2, merge=False)
    waiting.join(timeout=20)
    assert results == [(len(prompts), [])]


def test_refuses_to_mix_or_overwrite(tmp_path, prompt_file):
    output = tmp_path / "out.jsonl"
    with (
        Parts(output, "a" * 64, 0),
        pytest.raises(UserError, match="being written by another process"),
    ):
        Parts(output, "a" * 64, 0)
    with pytest.raises(UserError, match="other prompts or settings"):
        Parts(output, "b" * 64, 0)
    output.touch()
    with pytest.raises(UserError, match=r"out\.jsonl exists"):
        Parts(output, "a" * 64, 0)


def test_all_prompts_skipped_is_an_error(tmp_path, prompt_file):
    def never(conversations, seeds):
        return [Skipped("too long") for _ in conversations]

    prompts = load_prompts(str(prompt_file))
    with pytest.raises(UserError, match="all 18 prompts were skipped; the first one: p0: too long"):
        run(prompts, tmp_path / "out.jsonl", never)
    assert not (tmp_path / "out.jsonl").exists()
