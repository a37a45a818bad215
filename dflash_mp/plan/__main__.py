"""Plan a training: rates, memory, the best split, time and wire load, from configurations alone.

    python -m dflash_mp.plan target=qwen3_8b gpus=8 gpu=h200

target=qwen3_8b    a file of conf/target; it and all other keys of a training are understood, with
                   the same defaults, and what says nothing about time or memory changes nothing
gpus=8 nodes=1     GPUs of a node, and nodes
gpu=h200           a file of conf/gpu: h200, h100, a100, b200, or cpu (measured on this machine)
tokens=1e9         tokens of the training data, which is not read
simulate=true      also predict how the job grows up to nodes=..., as a table and scaling.png
output=...         folder of the results, outputs/plan by default

Needs no GPU and loads no weights; leaves a table in the terminal and plan.json.
"""

import json
import sys
from pathlib import Path

from dflash_mp.command import run_command
from dflash_mp.plan.settings import PlanRun


def plan(run: PlanRun, folder: Path) -> None:
    """Predict, show and write; raises ``UserError`` for what cannot be read or does not fit."""
    # Only now: a mistake in the configuration is said before torch is loaded, at once.
    from dflash_mp.plan.plan import make_plan
    from dflash_mp.plan.predict import Costs, Prediction
    from dflash_mp.plan.report import scaling, table
    from dflash_mp.plan.scaling import plot, simulate

    facts = make_plan(run)
    lines = ["", *table(facts)]
    files = [folder / "plan.json"]
    if run.simulate:
        scales = simulate(
            Costs(**facts["costs"]), Prediction(**facts["best"]), run.nodes, run.scaling
        )
        lines += ["", *scaling(scales)]
        files.append(folder / "scaling.png")
        plot(scales, files[-1])
        facts["scaling"] = [vars(scale) for scale in scales]
    files[0].write_text(json.dumps(facts, indent=1) + "\n")
    sys.stdout.write("\n".join([*lines, "", "  ".join(map(str, files))]) + "\n")


if __name__ == "__main__":
    run_command("plan", PlanRun, plan)
