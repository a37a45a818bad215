"""A drafter that has learnt eight conversations by heart decodes them in whole blocks.

Any mismatch between training and decoding (positions, labels, mask, layers, mask token) breaks it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_mp.config import TargetConfig
from dflash_mp.data.generate import GenerateConfig, PromptsConfig, generate
from tiny import make_conversations

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_eight_conversations_are_learnt_and_decoded_in_blocks(
    launch: Callable[..., object], tiny_target: Path, tmp_path: Path
) -> None:
    prompts = make_conversations(tmp_path / "prompts.jsonl", 8, seed=5)
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    for row in rows:
        row["messages"] = row["messages"][:1]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answered = tmp_path / "answered.jsonl"
    config = GenerateConfig(
        target=TargetConfig(str(tiny_target), None, "float32", "sdpa", None, False),
        data=PromptsConfig(str(prompts)),
        output=str(answered),
        server=None,
        batch_size=8,
        max_new_tokens=24,
        temperature=0.0,
        top_p=1.0,
        seed=0,
    )
    generate(config, rank=0, world_size=1)

    # The held-out rows are the training rows here, so the rule against copies is told to wait.
    result = launch(
        3,
        f"data.train={answered}",
        f"data.heldout={answered}",
        "data.near_copy_threshold=null",
        "data.tokens_per_batch=160",
        "drafter.block_size=8",
        "drafter.anchors_per_batch=64",
        "loss.gamma=4",
        "steps=240",
        "micro_batches_per_step=1",
        "optim.lr=1e-2",
        "log_interval=20",
        "evaluate.decode_prompts=8",
        "evaluate.max_new_tokens=24",
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    run = tmp_path / "run"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in metrics if "train/loss" in row]
    assert losses[-1] < 0.3
    results = json.loads((run / "results.json").read_text())
    assert results["decoded"]["acceptance_length"] >= 6
    assert results["decoded"]["same"] == 8
    simulated = results["simulated"]["eval/acceptance_length"]
    assert simulated == pytest.approx(results["decoded"]["acceptance_length"], rel=0.02)
