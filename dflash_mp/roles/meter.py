"""Rates and shares of a running training: what the progress line and the trackers show."""

import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from dflash_mp.cast import Cast
from dflash_mp.job import Job
from dflash_mp.plan.split import advice
from dflash_mp.recompiles import Recompiles
from dflash_mp.roles.flops import Trained, drafter_flops, mean_document
from dflash_mp.wire.receiver import Receiver

SHARES = {
    "target_wait": "send_wait",
    "target_forward": "forward",
    "target_decode": "decode",
    "target_credit_wait": "credit_wait",
    "target_send": "send",
}
"""What is logged of the labels of a target's clock."""


class DivergedError(Exception):
    """The weights are no numbers any more."""


class Meter:
    """Adds up the counts of steps between two log lines, without waiting for the device."""

    def __init__(self, cast: Cast, job: Job, receiver: Receiver, peak: float | None) -> None:
        self.store = cast.store
        self.place = cast.place
        self.targets = range(cast.place.targets_per_node)
        self.main = cast.place.is_main
        self.receiver = receiver
        self.job, self.peak = job, peak
        self.document = mean_document(job)
        self.counts = torch.zeros(8, dtype=torch.float64, device=cast.device)
        self.steps = 0
        # What an earlier process did of both: it belongs to the means, but not to the rates.
        self.earlier_counts, self.earlier_steps = [0.0] * 8, 0
        self.since = time.perf_counter()
        self.wire = self._wire()
        self.training = 0.0
        self.clocks: dict[str, float] = {}
        self.latest: dict[str, float] = {}
        self.windows, self.advised = 0, False
        self.acceptance: float | None = None
        self.recompiles = Recompiles(alone=job.config.isolation == "processes")

    def add(self, step: Callable[[], Tensor]) -> None:
        """Do a step and add its time and its ``[8]`` counts (see ``train_step``)."""
        begun = time.perf_counter()
        self.counts += step()
        self.steps += 1
        self.training += time.perf_counter() - begun
        self.recompiles.check("a step")

    def walked(self, acceptance: float) -> None:
        """Call behind each walk over the held-out text; its acceptance is shown."""
        self.acceptance = acceptance
        self.recompiles.check("a walk")

    def state(self) -> dict[str, Any]:
        """What is added up since the last ``values``, for a checkpoint; waits for the device."""
        return {"counts": self.finite_counts(), "steps": self.steps}

    def finite_counts(self) -> list[float]:
        """The sums since the last ``values``; waits for the device.

        Raises:
            DivergedError: a gradient was not finite, and with it the weights are not.
        """
        counts: list[float] = self.counts.tolist()
        if not all(math.isfinite(value) for value in counts):
            raise DivergedError(
                f"the gradient norm is {counts[-1]} in the last {self.steps} steps: continue from "
                "an earlier checkpoint with a lower optim.lr"
            )
        return counts

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from ``state()``, so that the next means are those of an unbroken run."""
        self.earlier_counts, self.earlier_steps = state["counts"], int(state["steps"])
        self.counts += torch.tensor(
            self.earlier_counts, dtype=torch.float64, device=self.counts.device
        )
        self.steps = self.earlier_steps

    def values(self, step: int, schedule: LambdaLR) -> dict[str, float]:
        """Means since the last call, behind ``step``; waits for the device."""
        counts = self.finite_counts()
        loss, weight, correct, supervised, tokens, blocks, skipped, norm = counts
        now, wire = time.perf_counter(), self._wire()
        seconds = now - self.since
        passed = {name: (value - self.wire[name]) / seconds for name, value in wire.items()}
        done = self.job.plan.batches_done(step)
        batches = done - self.job.plan.batches_done(step - self.steps)
        fresh = [count - early for count, early in zip(counts, self.earlier_counts, strict=True)]
        fresh_steps = self.steps - self.earlier_steps
        trained = Trained(
            batches=done - self.job.plan.batches_done(step - fresh_steps),
            supervised=fresh[3],
            tokens=fresh[4],
            blocks=fresh[5],
        )
        # Start-up is over when the first step is: what is before it counts nowhere.
        self.latest = {
            "train/loss": loss / max(weight, 1e-12),
            "train/accuracy": correct / max(supervised, 1.0),
            "train/grad_norm": norm / self.steps,
            "train/skipped": skipped,
            "train/lr": float(schedule.get_last_lr()[0]),
            "data/epoch": self.job.order.epochs(done),
            "data/fill": tokens / (batches * self.job.config.data.tokens_per_batch),
            "data/blocks": blocks / batches,
            "data/supervised_slots": supervised / batches,
            "perf/tokens_per_s": trained.tokens / seconds,
            "perf/supervised_per_s": trained.supervised / seconds,
            "perf/steps_per_s": fresh_steps / seconds,
            "perf/wire_bytes_per_s": passed["bytes"],
            "perf/drafter_receive": passed["receive"],
            "perf/drafter_wait": passed["recv_wait"],
            "perf/drafter_train": self.training / seconds - passed["recv_wait"],
            **recompiled("", [self.recompiles.value()]),
            **self._utilization(trained, seconds),
            **self._target_shares(),
        }
        self.counts.zero_()
        self.earlier_counts, self.earlier_steps = [0.0] * 8, 0
        self.steps, self.since, self.wire, self.training = 0, now, wire, 0.0
        self.windows += 1
        return dict(self.latest)

    def split_advice(self) -> str | None:
        """Once, behind the second ``values`` or later: the best split by measured rates.

        In the first interval the pipeline fills, and a target may begin late. None where two ranks
        leave no choice, on ranks without the targets' clocks, and when nothing could be trained on.
        """
        place = self.place
        ranks = place.targets_per_node + place.drafters_per_node
        if self.advised or self.windows < 2 or ranks == 2 or "perf/target_wait" not in self.latest:
            return None
        if not self.latest["perf/tokens_per_s"]:
            return None
        self.advised = True
        return advice(
            self.latest["perf/tokens_per_s"] / place.nodes,
            place.targets_per_node,
            place.drafters_per_node,
            self.latest["perf/target_wait"],
            self.latest["perf/drafter_wait"],
        )

    def shown(self) -> dict[str, str]:
        """The progress line's fields, as of the last ``values``."""
        if not self.latest:
            return {}
        shown = {"loss": f"{self.latest['train/loss']:.2f}"}
        if self.acceptance is not None:
            shown["accept"] = f"{self.acceptance:.2f}"
        shown["tok/s"] = f"{self.latest['perf/tokens_per_s']:.0f}"
        waits = [f"drafter {self.latest['perf/drafter_wait']:.0%}"]
        if "perf/target_wait" in self.latest:
            waits.append(f"target {self.latest['perf/target_wait']:.0%}")
        shown["waiting"] = " ".join(waits)
        roles = [role for role in ("drafter", "target") if f"perf/{role}_mfu" in self.latest]
        if roles:
            each = (f"{role} {self.latest[f'perf/{role}_mfu']:.0%}" for role in roles)
            shown["mfu"] = " ".join(each)
        return shown

    def _wire(self) -> dict[str, float]:
        """Bytes that have come to this drafter so far, and seconds."""
        clock = self.receiver.clock.seconds
        seconds = {name: clock.get(name, 0.0) for name in ("recv_wait", "receive")}
        return {"bytes": float(self.receiver.bytes), **seconds}

    def _utilization(self, trained: Trained, seconds: float) -> dict[str, float]:
        """FLOP/s of a drafter, the mean over all, and their share of what its device could do."""
        reads_target = self.job.config.loss.reads_target
        flops = drafter_flops(self.job.drafter_config, trained, self.document, reads_target)
        rate = flops / seconds / self.job.place.drafters
        return utilization("drafter", rate, self.peak)

    def _target_shares(self) -> dict[str, float]:
        """Shares of time of this node's targets since the last call; empty if none has moved.

        Waiting is for the wire, forward is the model's, decode answers requests; beside these a
        thread waits for credits and sends. A target's clock is as of its last frame.
        """
        keys = [f"clock/{target}" for target in self.targets]
        if not self.main or not self.store.check(keys):
            return {}
        read = [json.loads(self.store.get(key)) for key in keys]
        total = {
            name: sum(clock.get(name, 0.0) for clock in read)
            for name in (*SHARES.values(), "elapsed", "flops")
        }
        passed = {name: value - self.clocks.get(name, 0.0) for name, value in total.items()}
        self.clocks = total
        if not passed["elapsed"]:
            return {}
        rate = passed["flops"] / passed["elapsed"]
        return {
            **{f"perf/{name}": passed[label] / passed["elapsed"] for name, label in SHARES.items()},
            **utilization("target", rate, read[0]["peak"]),
            **recompiled("target_", [clock["recompiles"] for clock in read]),
        }


def utilization(role: str, rate: float, peak: float | None) -> dict[str, float]:
    """What is logged of ``rate`` FLOP/s of one rank whose device makes ``peak``, if known."""
    mfu = {} if peak is None else {f"perf/{role}_mfu": rate / peak}
    return {f"perf/{role}_flop_per_s": rate, **mfu}


def recompiled(role: str, counts: list[int | None]) -> dict[str, float]:
    """What is logged of the ``Recompiles`` of some ranks; nothing where none compiles."""
    known = [count for count in counts if count is not None]
    return {f"perf/{role}recompiles": sum(known)} if known else {}
