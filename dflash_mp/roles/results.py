"""The end of a run: results.json, plots, what the export tells, and a page for the terminal."""

import json
import shlex
import sys
from typing import Any

from dflash_mp.acceptance import simulation_warning
from dflash_mp.config import DataConfig, TargetConfig
from dflash_mp.export_folder import add_facts
from dflash_mp.job import Job
from dflash_mp.learning_config import CROSS_ENTROPY, OBJECTIVES
from dflash_mp.report.run_files import REPORT
from dflash_mp.run_folder import PROFILE
from dflash_mp.target.model import resolve
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
        *([f"profile      {job.folder / PROFILE}"] if job.config.profile.kind != "none" else []),
        f"results      {job.folder / 'results.json'}, {job.folder / 'metrics.jsonl'}",
        *next_commands(job),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def next_commands(job: Job) -> list[str]:
    """Commands for what comes after a run, from docs/serving.md, with this run's names."""
    export, block_size = job.folder / "export", job.drafter_config.block_size
    data = job.config.data
    ours, served = target_words(job.config.target), resolve(job.config.target)
    evaluate = shlex.join(
        [*("python", "-m", "dflash_mp.evaluate", f"drafter={export}"), *ours, *template_words(data)]
    )
    check = shlex.join(["python", "-m", "dflash_mp.export", f"check={export}"])
    convert = ["python", "-m", "dflash_mp.export", f"checkpoint={export}", "format=speculators"]
    method = {
        "method": "dflash",
        "model": str(export),
        # The first slot of a block is known; SGLang counts it.
        "num_speculative_tokens": block_size - 1,
    }
    vllm = [
        *("vllm", "serve", served, "--max-num-batched-tokens", "32768"),
        *("--attention-backend", "flash_attn", "--speculative-config", json.dumps(method)),
    ]
    sglang = [
        *("python", "-m", "sglang.launch_server", "--model-path", served),
        *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(export)),
        *("--speculative-num-draft-tokens", str(block_size)),
    ]
    template = ["--chat-template", data.chat_template] if data.chat_template is not None else []
    asked = json.dumps({"chat_template_kwargs": data.template_kwargs})
    return [
        f"evaluate     {evaluate} data.prompts=my_prompts.jsonl",
        f"export       {check}  # is it whole?",
        f"             {shlex.join([*convert, *ours])} output=new_folder",
        f"serve        {shlex.join(vllm + template)}",
        f"             {shlex.join(sglang + template)}",
        *(
            [f"             # in each request, as in training: {asked}"]
            if data.template_kwargs
            else []
        ),
        "             # on GPUs; what to do when an engine accepts less: docs/serving.md",
    ]


def target_words(target: TargetConfig) -> list[str]:
    """The overrides that name this target to another command."""
    if target.name == "smollm2":
        return ["target=smollm2"]
    words = ["target=hub", f"target.name={target.name}"]
    words += [f"target.revision={target.revision}"] if target.revision else []
    return words + (["target.trust_remote_code=true"] if target.trust_remote_code else [])


def template_words(data: DataConfig) -> list[str]:
    """The overrides that make another command render prompts as this run's data was."""
    words = [f"data.chat_template={data.chat_template}"] if data.chat_template is not None else []
    given = (data.template_kwargs or {}).items()
    return words + [f"+data.template_kwargs.{key}={in_override(value)}" for key, value in given]


def in_override(value: Any) -> str:
    """A value as Hydra's override grammar writes it: JSON, but for the keys of mappings."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{in_override(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(in_override, value))}]"
    return json.dumps(value, ensure_ascii=False)


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
