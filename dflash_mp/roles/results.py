"""The end of a run: results.json, plots, what the export tells, and a page for the terminal."""

import json
import sys
from typing import Any

from dflash_mp.acceptance import simulation_warning
from dflash_mp.export_folder import add_facts
from dflash_mp.job import Job
from dflash_mp.learning_config import CROSS_ENTROPY, OBJECTIVES
from dflash_mp.report.page import REPORT
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
    objective = OBJECTIVES[job.config.loss.kind]
    plots = plot(job.folder, objective)
    add_facts(job.folder / "export", measured_facts(job, results))
    lines = ["", *curve(read_metrics(job.folder), objective), "", *acceptance_lines(results), ""]
    lines += [
        f"checkpoints  {job.folder / 'checkpoints'}",
        f"export       {job.folder / 'export'}",
        f"plots        {', '.join(str(path) for path in plots)}",
        f"report       {job.folder / REPORT}",
        f"results      {job.folder / 'results.json'}, {job.folder / 'metrics.jsonl'}",
        f"evaluate     python -m dflash_mp.evaluate drafter={job.folder / 'export'} "
        f"target.name={job.config.target.name} data.prompts=<file of conversations>",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def curve(rows: list[dict[str, float]], objective: str) -> list[str]:
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
    if objective != CROSS_ENTROPY:
        lines.append(f"  train loss: {objective}; held-out loss: {CROSS_ENTROPY}")
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
        f"greedy output identical to the target's on {after['same']} of {after['prompts']}"
        + (f", numerical ties on {after['ties']}" if after["ties"] else "")
        + (f", DIFFERENT on {after['different']}" if after["different"] else ""),
    ]
    if results["simulated"]:
        simulated = results["simulated"]["eval/acceptance_length"]
        lines.append(f"simulated by a walk over the held-out text: {simulated:.2f}")
        if warning := simulation_warning(simulated, after["acceptance_length"]):
            lines.append(f"warning: {warning}")
    return lines


def export_facts(job: Job) -> dict[str, Any]:
    """What the export says of its making."""
    config, data = job.config, job.prepared.train.lengths
    return {
        "target": config.target.name,
        "target_revision": config.target.revision,
        "data": str(config.data.train),
        "data_fingerprint": job.prepared.folder.name,
        "conversations": len(data),
        "tokens": int(data.sum()),
        "steps": job.plan.steps,
        "objective": config.loss.kind,
    }


def measured_facts(job: Job, results: dict[str, Any]) -> dict[str, Any]:
    """What the export says of its acceptance."""
    facts: dict[str, Any] = {}
    if results["decoded"] is not None:
        facts["acceptance_length"] = results["decoded"]["acceptance_length"]
        facts["prompts"] = results["decoded"]["prompts"]
        facts["max_new_tokens"] = job.config.evaluate.max_new_tokens
    if results["simulated"]:
        facts["simulated_acceptance_length"] = results["simulated"]["eval/acceptance_length"]
    return facts
