"""The main drafter's requests for real decoding, and what comes of the answers."""

import json
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from dflash_mp.acceptance_summary import merge_results
from dflash_mp.cast import Cast
from dflash_mp.drafter.checkpoint_format import save_drafter
from dflash_mp.drafter.model import DFlashDraftModel
from dflash_mp.job import Job
from dflash_mp.progress import progress_bar
from dflash_mp.roles.requests import Asking
from dflash_mp.tracking import Tracker

ANSWER_TIMEOUT = timedelta(days=1)
BEFORE_PROMPTS = 8
"""Prompts decoded by the untrained drafter: it accepts next to nothing, so more say no more."""
BEFORE_TOKENS = 16
"""Tokens of each of them."""
LOOK_S = 0.2
"""Between two looks at how far the targets are."""


class Decoding:
    """Asks the targets to decode with the drafter as it is; does nothing on other drafters."""

    def __init__(self, cast: Cast, job: Job, tracker: Tracker) -> None:
        self.active = cast.place.is_main
        self.prompts = len(job.decoded_documents)
        self.max_new_tokens = job.config.evaluate.max_new_tokens
        self.folder = job.folder / "decode"
        self.tracker = tracker
        self.asking = Asking(cast.store, cast.place.targets_per_node, ANSWER_TIMEOUT)
        self.summaries: dict[int, dict[str, Any]] = {}
        if self.active and self.prompts and job.start.step:
            self._continue(job.start.step)

    def ask_before(self, model: DFlashDraftModel) -> None:
        """Request a short decoding with the untrained drafter, unless that has been done."""
        if self.active and self.prompts and 0 not in self.summaries:
            save_drafter(model, self._weights(0))
            self.asking.ask(self._weights(0), 0, min(BEFORE_PROMPTS, self.prompts), BEFORE_TOKENS)

    def _continue(self, first_step: int) -> None:
        """Ask again for what an earlier process asked and got no answer to."""
        if self._answers(0).exists():
            self.summaries[0] = merge_results(read_rows(self._answers(0)))
        for weights in sorted(self.folder.glob("step-*/")):
            step = int(weights.name.removeprefix("step-"))
            if 0 < step <= first_step and (weights / "config.json").exists():
                self.asking.ask(weights, step, self.prompts, self.max_new_tokens)
            elif step:
                shutil.rmtree(weights)

    def ask(self, model: DFlashDraftModel, step: int) -> None:
        """Write the drafter as it is and request its decoding."""
        if self.active and self.prompts:
            save_drafter(model, self._weights(step))
            self.asking.ask(self._weights(step), step, self.prompts, self.max_new_tokens)

    def ask_export(self, folder: Path, step: int) -> None:
        """Request the decoding of an exported drafter."""
        if self.active and self.prompts:
            self.folder.mkdir(exist_ok=True)
            self.asking.ask(folder, step, self.prompts, self.max_new_tokens)

    def collect(self, wait: bool) -> None:
        """Log the answers that have come; with ``wait``, all that are still open."""
        if not self.active:
            return
        if wait:
            self._show_waiting()
        for step, shares in self.asking.answers(wait):
            results = sorted((row for share in shares for row in share), key=lambda r: r["prompt"])
            self._answers(step).write_text("".join(json.dumps(row) + "\n" for row in results))
            summary = merge_results(results)
            self.summaries[step] = summary
            self.tracker.log(
                step,
                {
                    "eval/decoded_acceptance_length": summary["acceptance_length"],
                    "eval/decoded_same_share": summary["same"] / max(1, summary["prompts"]),
                },
            )
            # Last: whatever is left of these was not answered.
            shutil.rmtree(self._weights(step), ignore_errors=True)

    def _show_waiting(self) -> None:
        """A progress line until everything that was asked for is decoded."""
        asking = self.asking
        with progress_bar(
            desc="decoding", total=asking.prompts, unit="prompt", delay=1, leave=False
        ) as bar:
            while asking.waits():
                bar.update(asking.decoded() - bar.n)
                time.sleep(LOOK_S)

    def _answers(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.jsonl"

    def _weights(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def end(self) -> None:
        """Let the targets go."""
        if self.active:
            self.asking.end()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of answers."""
    return [json.loads(line) for line in path.read_text().splitlines()]
