"""Evaluation: the reference's acceptance lengths come out, from files and over ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoConfig

from dflash_mp.acceptance import (
    check_pair,
    evaluate_prompts,
    head_of,
    largest_gap,
    simulation_warning,
    verdict,
)
from dflash_mp.acceptance_report import table
from dflash_mp.acceptance_summary import merge_results
from dflash_mp.config import UserError, config_dir, to_config
from dflash_mp.drafter_source import spell_path
from dflash_mp.evaluate import EvaluateRun, encode_prompts, evaluate, read_prompts
from dflash_mp.speculate import DecodeSettings, plain_decode
from dflash_mp.target.model import load_config, load_tokenizer
from golden_models import (
    GOLDEN,
    golden_drafter,
    golden_head,
    golden_prompts,
    golden_target,
    target_folder,
    write_prompts,
)

SETTINGS = DecodeSettings(40)


@pytest.fixture(scope="module")
def rows():
    prompts = list(enumerate(golden_prompts()))
    return evaluate_prompts(golden_target(), golden_drafter(), prompts, SETTINGS, [4, 8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A target with a tokenizer, and a prompts file beside it."""
    parent = tmp_path_factory.mktemp("evaluate")
    target_folder(parent / "target")
    write_prompts(parent / "prompts.jsonl", golden_prompts())
    return parent


def configure(folder: Path, *overrides: str) -> EvaluateRun:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        raw = compose(
            "evaluate",
            [
                f"drafter.path={GOLDEN / 'draft_trained'}",
                f"target.name={folder / 'target'}",
                f"data.prompts={folder / 'prompts.jsonl'}",
                "max_new_tokens=40",
                *overrides,
            ],
        )
    return to_config(raw, EvaluateRun)


def of_size(rows, size):
    return [row for row in rows if row["block_size"] == size]


def test_both_acceptance_lengths_are_the_reference_package_s(rows):
    reference = json.loads((GOLDEN / "outputs.json").read_text())["accept_zlab_pypi"]
    cycles = [reference[f"seen{index}"]["acc"] for index in range(6)]
    flat = [committed for one in cycles for committed in one]
    summary = merge_results(of_size(rows, 8))
    assert summary["acceptance_length"] == pytest.approx(sum(flat) / len(flat))
    means = [sum(one) / len(one) for one in cycles]
    assert summary["prompt_acceptance_length"] == pytest.approx(sum(means) / len(means))
    assert summary["histogram"] == [flat.count(size) for size in range(1, 9)]
    assert (summary["prompts"], summary["cycles"]) == (6, len(flat))


def test_text_is_that_of_plain_decoding_at_every_block_size(rows):
    for size in (4, 8):
        summary = merge_results(of_size(rows, size))
        assert (summary["same"], summary["ties"], summary["different"]) == (6, 0, 0)
        assert summary["speedup"] == pytest.approx(
            summary["tokens_per_second"] / summary["plain_tokens_per_second"]
        )
    assert json.loads(json.dumps(rows)) == rows


def test_checking_by_one_forward_says_the_same_without_times():
    prompts = list(enumerate(golden_prompts()))[:2]
    rows = evaluate_prompts(golden_target(), golden_drafter(), prompts, SETTINGS, plain=False)
    summary = merge_results(rows)
    assert (summary["same"], summary["plain_tokens_per_second"], summary["speedup"]) == (
        2,
        None,
        None,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_largest_gap_finds_a_token_the_target_did_not_choose(temperature):
    settings = DecodeSettings(12, temperature=temperature, seed=7)
    prompt = golden_prompts()[3]
    text = plain_decode(golden_target(), prompt, settings).tokens
    assert largest_gap(golden_target(), prompt, text, settings) < 1e-4
    text[6] = (text[6] + 1) % 512
    assert largest_gap(golden_target(), prompt, text, settings) > 0.1


@pytest.mark.parametrize(
    ("same", "unchecked", "gap", "dtype", "expected"),
    [
        (True, False, 0.0, torch.float32, "same"),
        (False, True, 0.0, torch.float32, "same"),
        (False, True, 5e-4, torch.float32, "tie"),
        # The whole-text forward agrees with the drafted text, token-by-token decoding did not.
        (False, False, 0.0, torch.float32, "tie"),
        (False, False, 0.02, torch.float32, "different"),
        (False, False, 0.25, torch.bfloat16, "tie"),
        (False, True, 0.75, torch.bfloat16, "different"),
    ],
)
def test_only_rounding_counts_as_a_tie(same, unchecked, gap, dtype, expected):
    assert verdict(same, unchecked, gap, dtype) == expected


def test_rates_by_hand():
    row = {
        "block_size": 4,
        "tokens": list(range(9)),
        "committed": [1, 3, 4, 2],
        "accepted": [0, 2, 3, 2],
        # The last cycle ends with a drafted stop token: slot 3 was not put to the test.
        "proposed": [3, 3, 3, 2],
        "decode_seconds": 2.0,
        "plain_tokens": 9,
        "plain_seconds": 4.0,
        "verdict": "tie",
    }
    summary = merge_results([row, row | {"committed": [], "accepted": [], "proposed": []}])
    assert summary["slot_acceptance_rate"] == pytest.approx([3 / 4, 3 / 3, 1 / 2])
    assert summary["histogram"] == [1, 1, 1, 1]
    assert summary["acceptance_length"] == pytest.approx(10 / 4)
    assert summary["prompt_acceptance_length"] == pytest.approx(10 / 4)
    assert summary["tokens_per_second"] == pytest.approx(10 / 4)
    assert summary["plain_tokens_per_second"] == pytest.approx(16 / 8)
    assert summary["ties"] == 2
    empty = merge_results([])
    assert empty["acceptance_length"] is None
    assert any("2.50" in line for line in table([summary]))


def test_head_of_a_loaded_target_is_the_one_read_from_its_files():
    head = head_of(golden_target())
    assert (head.weight == golden_head().weight).all()
    assert (head.embedding == golden_head().embedding).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "its hidden_size is 64, the target's is 128"),
        ({"vocab_size": 500}, "its vocab_size is 512, the target's is 500"),
        ({"num_hidden_layers": 6}, "its num_target_layers is 4, the target's is 6"),
    ],
)
def test_a_drafter_of_another_target_is_refused(change, message):
    target = AutoConfig.from_pretrained(GOLDEN / "target")
    check_pair(golden_drafter().config, target)
    for key, value in change.items():
        setattr(target, key, value)
    with pytest.raises(UserError, match=message):
        check_pair(golden_drafter().config, target)


def test_prompts_are_rendered_as_a_server_does(folder):
    config = configure(folder)
    tokenizer, target_config = load_tokenizer(config.target), load_config(config.target)
    assert encode_prompts(config, tokenizer, target_config) == golden_prompts()
    config.data.max_prompts = 2
    assert encode_prompts(config, tokenizer, target_config) == golden_prompts()[:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no prompts in it"),
        ('{"messages": []}\n', "bad.jsonl:1: there is nothing to answer"),
        ('{"prompt": "<5>"}\n{"text": "x"}\n', 'bad.jsonl:2: needs "messages"'),
        ('{"prompt": "<5>"\n', "bad.jsonl:1: bad_json"),
        (json.dumps({"prompt": "<5> " * 600}) + "\n", "bad.jsonl:1: a prompt of 600 tokens"),
    ],
)
def test_bad_prompt_files_are_named(folder, tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    config = configure(folder, f"data.prompts={path}")
    with pytest.raises(UserError, match=message):
        encode_prompts(config, load_tokenizer(config.target), load_config(config.target))


def test_last_replies_are_left_out_and_earlier_ones_kept(tmp_path):
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user", "assistant")]
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    assert read_prompts(str(tmp_path / "p.jsonl"), None) == [("p.jsonl:1", turns[:3])]


def test_command_line_leaves_table_json_and_picture(folder, tmp_path, capsys):
    evaluate(configure(folder, "data.max_prompts=2", "block_sizes=[3,8]"), tmp_path)
    facts = json.loads((tmp_path / "evaluate.json").read_text())
    assert [summary["block_size"] for summary in facts["summaries"]] == [3, 8]
    assert (tmp_path / "evaluate.png").read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert f"{facts['summaries'][1]['acceptance_length']:.2f}" in shown


def test_bad_settings_are_refused(folder):
    for override, message in (
        ("block_sizes=[8,8]", "block_sizes"),
        ("max_new_tokens=1", "max_new_tokens=1"),
        ("temperature=-0.5", "temperature=-0.5"),
        ("data.max_prompts=0", "data.max_prompts=0"),
    ):
        with pytest.raises(UserError, match=message):
            configure(folder, override)


def test_drafter_may_be_named_without_path():
    arguments = ["drafter=a/b", "drafter.revision=main", "seed=1"]
    expected = ["drafter.path=a/b", "drafter.revision=main", "seed=1"]
    assert spell_path(arguments, "drafter") == expected


def test_far_apart_simulation_is_explained():
    assert simulation_warning(2.2, 2.0) is None
    assert "35% apart" in (simulation_warning(2.7, 2.0) or "")


@pytest.mark.distributed
def test_ranks_share_the_prompts(folder, tmp_path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        "-m", "dflash_mp.evaluate", f"drafter={GOLDEN / 'draft_trained'}",
        f"target.name={folder / 'target'}", f"data.prompts={folder / 'prompts.jsonl'}",
        "max_new_tokens=40", f"hydra.run.dir={tmp_path}",
    ]  # fmt: skip
    root = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, cwd=tmp_path,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "evaluate.json").read_text())
    assert [row["prompt"] for row in facts["rows"]] == list(range(6))
    assert facts["summaries"][0]["acceptance_length"] == pytest.approx(234 / 91)
    assert done.stdout.count("tokens/s") > 0
