"""What drafters that are threads use in place of a process group, Accelerate's and the sentinel."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dflash_mp.diagnostics.treatments import Section
from dflash_mp.roles.step import StopVote

LOADS = ("load the target", "load the drafter")
"""Phases in which transformers and Accelerate change what belongs to the whole process."""


class Meeting:
    """Adds up tensors of all drafters' threads, always in the order of their ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks)
        self._given: list[list[Tensor]] = [[] for _ in range(ranks)]

    def total(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        """The sums of what all have given, each in its place of the list; all drafters call it."""
        self._given[rank] = tensors
        self._barrier.wait()
        totals = [torch.stack(list(parts)).sum(0) for parts in zip(*self._given, strict=True)]
        # Nobody gives anew, or changes what was given, before everybody has read it.
        self._barrier.wait()
        return totals


class ThreadAccelerator(Accelerator):
    """Accelerate for one process, with the collectives of the drafters' threads.

    Args:
        rank: of the drafter.
        meeting: of all drafters.
        section: what goes around compiled code (``race.treatment``).
        settings: of ``Accelerator``.
    """

    def __init__(self, rank: int, meeting: Meeting, section: Section, **settings: Any) -> None:
        super().__init__(**settings)
        self.rank, self.meeting, self.section = rank, meeting, section
        self._averages = True

    @property
    def num_processes(self) -> int:
        """Drafters."""
        return self.meeting.ranks

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first drafter."""
        return self.rank == 0

    def prepare(self, *objects: Any, **kwargs: Any) -> Any:
        """As without a process group, with the section around the model's forward."""
        self.parameters = [p for o in objects if isinstance(o, nn.Module) for p in o.parameters()]
        for model in (o for o in objects if isinstance(o, nn.Module)):
            self._around_forward(model)
        return super().prepare(*objects, **kwargs)

    def _around_forward(self, model: nn.Module) -> None:
        inside: list[Any] = []

        def enter(*_: Any) -> None:
            inside.append(self.section((self.rank, "forward", torch.is_grad_enabled()), no_notice))
            inside[-1].__enter__()

        def leave(*_: Any) -> None:
            inside.pop().__exit__(None, None, None)

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """A backward in here leaves gradients as they are."""
        self._averages = False
        try:
            yield
        finally:
            self._averages = True

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As DDP: the backward of a step's last frame averages gradients; all drafters."""
        with self.section((self.rank, "backward"), no_notice):
            super().backward(loss, **kwargs)
        if self._averages:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            shares = [gradient / self.num_processes for gradient in gradients]
            totals = self.meeting.total(self.rank, shares)
            for gradient, total in zip(gradients, totals, strict=True):
                gradient.copy_(total)

    def reduce(self, tensor: Tensor, reduction: str = "sum", scale: float = 1.0) -> Tensor:
        """The sum over all drafters."""
        return self.meeting.total(self.rank, [tensor])[0]

    def wait_for_everyone(self) -> None:
        """Wait for all drafters."""
        self.meeting.total(self.rank, [])


def no_notice() -> None:
    """Nobody counts how often a section was waited for."""


class NoVote(StopVote):
    """Threads end with their process: nobody asks them to stop."""

    def decided(self) -> bool:
        """Never."""
        return False


class Watch:
    """A thread's stand-in for the sentinel: threads load one after another.

    Args:
        loading: of all threads.
        built: called once, when the thread first waits behind loading.
    """

    stop_reason: str | None = None

    def __init__(self, loading: threading.Lock, built: Callable[[], None]) -> None:
        self.now = "start"
        self._loading, self._built = loading, built
        self._loads = False

    def phase(self, name: str, limit: float | None = None) -> None:
        """The thread now does ``name``."""
        self.now = name
        if name in LOADS:
            self._loading.acquire()
            self._loads = True

    def wait(self, name: str, limit: float | None = None, frame: str | None = None) -> None:
        """The thread now waits for others."""
        self.now = f"wait for {name}"
        if self._loads:
            self._loads = False
            self._loading.release()
            self._built()

    def training(self, runs: bool) -> None:
        """Nobody asks."""
