"""Which micro-batch goes where, and when: pure functions of the configuration.

A drafter receives frames in a fixed order ``k = 0, 1, 2, ...``: first its share of the held-out
micro-batches, then, step by step, its share of the training micro-batches. Every drafter gets
the same number of frames; what is missing is PAD, which both sides derive from the plan, so it
never travels. Nothing here depends on the number of targets, on ranks' speed or on time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a frame carries; SKIP is what becomes of a frame that a target cannot make."""

    HELDOUT = 0
    TRAIN = 1
    PAD = 2
    SKIP = 3


@dataclass(frozen=True)
class Frame:
    """Frame ``k`` of drafter ``drafter``; ``number`` counts micro-batches of its kind."""

    drafter: int
    k: int
    kind: Kind
    number: int


@dataclass(frozen=True)
class Plan:
    """The order of a whole run.

    Args:
        heldout: held-out micro-batches, streamed once, before training.
        training: training micro-batches of the run.
        per_step: micro-batches of one optimizer step over all drafters.
        drafters: drafter ranks of the job.
        first_step: steps done before; a resumed run starts behind them.
        first_batch: training micro-batches done before. Usually ``first_step * per_step``; fewer
            when a run that ended with a short step is given more steps.
    """

    heldout: int
    training: int
    per_step: int
    drafters: int
    first_step: int = 0
    first_batch: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; the last one may be short of micro-batches."""
        return self.first_step - (self.first_batch - self.training) // self.per_step

    def batches_done(self, step: int) -> int:
        """Training micro-batches in the steps up to and with ``step``."""
        done = self.first_batch + (step - self.first_step) * self.per_step
        return min(done, self.training)

    @property
    def heldout_frames(self) -> int:
        """Held-out frames of each drafter, PAD included."""
        return -(-self.heldout // self.drafters)

    @property
    def step_frames(self) -> int:
        """Frames of each drafter in one step, PAD included: its backward passes."""
        return -(-self.per_step // self.drafters)

    @property
    def frames(self) -> int:
        """Frames of each drafter in the run."""
        return self.heldout_frames + (self.steps - self.first_step) * self.step_frames

    def frame(self, drafter: int, k: int) -> Frame:
        """What drafter ``drafter`` receives as its ``k``-th frame."""
        if k < self.heldout_frames:
            number = k * self.drafters + drafter
            kind = Kind.HELDOUT if number < self.heldout else Kind.PAD
            return Frame(drafter, k, kind, number)
        step, turn = divmod(k - self.heldout_frames, self.step_frames)
        within = turn * self.drafters + drafter
        number = self.first_batch + step * self.per_step + within
        real = within < self.per_step and number < self.training
        return Frame(drafter, k, Kind.TRAIN if real else Kind.PAD, number)

    def claim(self, count: int, node: int, drafters_per_node: int) -> Frame | None:
        """The ``count``-th frame that a node's targets owe its drafters; ``None`` at the end.

        In the order in which drafters consume: lower ``k`` first. The lowest frame that is not
        delivered yet therefore always has its slot, and the stream cannot lock up.
        """
        k, index = divmod(count, drafters_per_node)
        if k >= self.frames:
            return None
        return self.frame(node * drafters_per_node + index, k)

    def received(self, drafter: int) -> Iterator[Frame]:
        """All frames of one drafter in order."""
        return (self.frame(drafter, k) for k in range(self.frames))
