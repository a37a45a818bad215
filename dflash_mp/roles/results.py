"""The end of a run: results.json, plots, the model card, and a page for the terminal."""

import json
import sys
from typing import Any

from dflash_mp.job import Job
from dflash_mp.tracking import plot, read_metrics

CURVE_ROWS = 8


def write_results(job: Job, results: dict[str, Any]) -> None:
    """Write what the run came to into its folder and show it; the main drafter only.

    Args:
        job: the run.
        results: ``simulated`` (walk values of the exported drafter), ``decoded_before`` and
            ``decoded`` (summaries of real decoding, or None).
    """
    (job.folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    plots = plot(job.folder)
    (job.folder / "export" / "README.md").write_text(model_card(job, results))
    lines = ["", *curve(read_metrics(job.folder)), "", *acceptance_lines(results), ""]
    lines += [
        f"checkpoints  {job.folder / 'checkpoints'}",
        f"export       {job.folder / 'export'}",
        f"plots        {', '.join(str(path) for path in plots)}",
        f"results      {job.folder / 'results.json'}, {job.folder / 'metrics.jsonl'}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def curve(rows: list[dict[str, float]]) -> list[str]:
    """The learning curve as a table of at most ``CURVE_ROWS`` lines."""
    evaluated = [row for row in rows if "eval/acceptance_length" in row]
    training = [row for row in rows if "train/loss" in row]
    if len(evaluated) > CURVE_ROWS:
        picks = {round(i * (len(evaluated) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)}
        evaluated = [evaluated[i] for i in sorted(picks)]
    lines = ["  step  train loss  held-out loss  acceptance (simulated)"]
    for row in evaluated:
        before = [r["train/loss"] for r in training if r["step"] <= row["step"]]
        loss = f"{before[-1]:10.3f}" if before else " " * 10
        lines.append(
            f"{row['step']:6d}  {loss}  {row['eval/loss']:13.3f}"
            f"  {row['eval/acceptance_length']:22.2f}"
        )
    return lines


def acceptance_lines(results: dict[str, Any]) -> list[str]:
    """What real decoding gave, and the walk beside it."""
    before, after = results["decoded_before"], results["decoded"]
    if after is None:
        return ["no held-out prompts were decoded (evaluate.decode_prompts, data.heldout)"]
    lines = [
        f"acceptance length before training: {before['acceptance_length']:.2f} "
        f"({before['prompts']} prompts, {before['cycles']} cycles)",
        f"acceptance length after training:  {after['acceptance_length']:.2f} "
        f"({after['prompts']} held-out prompts, {after['cycles']} cycles)",
        f"greedy output identical to the target's on {after['greedy']} of {after['prompts']}",
    ]
    if results["simulated"]:
        simulated = results["simulated"]["eval/acceptance_length"]
        lines.append(f"simulated by a walk over the held-out text: {simulated:.2f}")
    return lines


def model_card(job: Job, results: dict[str, Any]) -> str:
    """README.md of the export folder."""
    config, drafter = job.config, job.drafter_config
    data = job.prepared.train.lengths
    acceptance = "\n".join(f"- {line}" for line in acceptance_lines(results))
    return f"""---
library_name: transformers
tags: [dflash, speculative-decoding]
---

# DFlash drafter for {config.target.name}

A block-diffusion draft model with the key layout of z-lab/dflash. Embedding and LM head are the
target's and are not in this folder.

- target: {config.target.name} (revision {config.target.revision or "default"})
- layers {drafter.num_hidden_layers}, block size {drafter.block_size}
  ({drafter.block_size - 1} drafted tokens), target layers {job.layer_ids},
  mask token {job.mask_token_id}
- data: {config.data.train}, {len(data)} conversations, {int(data.sum())} tokens,
  {job.plan.steps} optimizer steps
{acceptance}

Acceptance length counts the tokens committed by one target forward, the target's own included,
greedy, one prompt at a time, pooled over all cycles.
"""
