"""The command that answers prompts with the target, in this process and in real ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from answering import assistant, make_config, read

import dflash_mp
from dflash_mp.config import UserError
from dflash_mp.data.generate import generate, load_prompts


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[]", 'needs "messages"'),
        ('{"messages": [{"role": "user"}]}', 'needs "messages"'),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
        ('{"messages": []}', "every user turn has its reply"),
    ],
)
def test_bad_prompt_is_named_by_its_line(tmp_path, line, problem):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"prompts\.jsonl:2: .*{problem}"):
        load_prompts(str(path))


def test_generate_writes_exact_ids_in_prompt_order(tmp_path, prompt_file, target_folder, tokenizer):
    output = tmp_path / "out.jsonl"
    config = make_config(
        prompt_file, output, f"target.name={target_folder}", "max_new_tokens=6", "batch_size=4"
    )
    generate(config, rank=0, world_size=1)
    rows = read(output)
    assert [row["id"] for row in rows] == [f"p{n}" for n in range(18)]
    for row, prompt in zip(rows, load_prompts(str(prompt_file)), strict=True):
        assert list(row) == ["id", "messages", "finish_reason", "response_token_ids", "source"]
        assert row["messages"][:-1] == prompt["messages"]
        assert row["messages"][-1] == assistant(tokenizer.decode(row["response_token_ids"]))
        assert (len(row["response_token_ids"]) == 6) == (row["finish_reason"] == "length")
        assert row["source"] == "prompts"
    with pytest.raises(UserError, match="exists"):
        generate(config, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=0", "batch_size=0: must be at least 1"),
        ("max_new_tokens=0", "max_new_tokens=0: must be at least 1"),
        ("temperature=-1", "temperature=-1.0: must not be negative"),
        ("top_p=0", r"top_p=0.0: must be in \(0, 1\]"),
    ],
)
def test_bad_settings_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        make_config("p.jsonl", "o.jsonl", override)


@pytest.mark.slow
@pytest.mark.distributed
def test_killed_command_resumes_with_other_ranks(tmp_path, prompt_file, target_folder):
    """One process, killed outright with work half done; two under torchrun finish it."""
    output = tmp_path / "out.jsonl"
    arguments = [
        f"data.prompts={prompt_file}",
        f"target.name={target_folder}",
        "max_new_tokens=100",
        "batch_size=1",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(dflash_mp.__file__).parent.parent),
    }
    command = ["-m", "dflash_mp.data.generate", *arguments]
    whole = tmp_path / "whole.jsonl"
    subprocess.run(
        [sys.executable, *command, f"output={whole}"], env=environment, check=True, timeout=120
    )
    process = subprocess.Popen(
        [sys.executable, *command, f"output={output}"], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (finished := [p for p in tmp_path.glob("out.jsonl.parts-*/*") if p.stat().st_size]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    before = finished[0].read_bytes()
    assert 0 < before.count(b"\n") < 18
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [sys.executable, *torchrun, *command, f"output={output}"],
        env=environment,
        check=True,
        timeout=120,
    )
    assert output.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.parts-*"))
