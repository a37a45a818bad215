"""Real decoding during a run: the drafter asks with an export folder, the targets answer.

The targets hold the target, so they decode. They look for a request after each frame, before they
claim the next: a frame that is claimed is waited for. Keys: ``decode/<i>`` (the request, or
``end``), ``decoded/<i>/<target>`` (a share of the results) and ``decoded`` (prompts so far, of all
requests). Only the targets of the main drafter's node take part: they share its disk.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

END = "end"
DECODED = "decoded"


class Asking:
    """The main drafter's side."""

    def __init__(self, store: dist.Store, targets: int, timeout: timedelta) -> None:
        self.store, self.targets, self.timeout = store, targets, timeout
        self.asked = 0
        self.prompts = 0
        """Of all requests so far."""
        self.open: list[tuple[int, int]] = []

    def ask(self, folder: Path, step: int, prompts: int, max_new_tokens: int) -> None:
        """Request the decoding of the first ``prompts`` held-out prompts with a drafter."""
        request = {"folder": str(folder), "prompts": prompts, "max_new_tokens": max_new_tokens}
        self.store.set(f"decode/{self.asked}", json.dumps(request))
        self.open.append((self.asked, step))
        self.asked += 1
        self.prompts += prompts

    def decoded(self) -> int:
        """Prompts that the targets have decoded so far, of all requests."""
        return int(self.store.add(DECODED, 0))

    def waits(self) -> bool:
        """Whether an answer is still to come."""
        return not all(self.store.check(self._shares(number)) for number, _ in self.open)

    def answers(self, wait: bool) -> list[tuple[int, list[Any]]]:
        """``(step, one share per target)`` of requests answered by now, or of all with ``wait``."""
        done = []
        while self.open:
            number, step = self.open[0]
            keys = self._shares(number)
            if wait:
                self.store.wait(keys, self.timeout)
            elif not self.store.check(keys):
                break
            done.append((step, [json.loads(self.store.get(key)) for key in keys]))
            self.open.pop(0)
        return done

    def _shares(self, number: int) -> list[str]:
        return [
            f"{DECODED}/{number}/{target}"
            for target in range(self.targets)
            # A lost one's share is missing (``topology.elastic``).
            if not self.store.check([f"lost/{target}"])
        ]

    def end(self) -> None:
        """Tell the targets that nothing more will come."""
        self.store.set(f"decode/{self.asked}", json.dumps(END))


class Answering:
    """A target's side; ``answer(request)`` decodes this target's share."""

    def __init__(
        self, store: dist.Store, target: int, answer: Callable[[dict[str, Any]], Any]
    ) -> None:
        self.store, self.target, self.answer = store, target, answer
        self.next = 0

    def pending(self) -> None:
        """Answer what has been asked by now."""
        while self.store.check([f"decode/{self.next}"]) and self._one():
            pass

    def until_end(self, timeout: timedelta) -> None:
        """Answer until the drafter says that it is done."""
        while True:
            self.store.wait([f"decode/{self.next}"], timeout)
            if not self._one():
                return

    def _one(self) -> bool:
        request = json.loads(self.store.get(f"decode/{self.next}"))
        if request == END:
            return False
        self.store.set(f"{DECODED}/{self.next}/{self.target}", json.dumps(self.answer(request)))
        self.next += 1
        return True
