"""What torch.compile makes in this process, and what it makes again while a run goes on.

Shapes are fixed where something is compiled, so nothing new comes after each kind of work was done
once. Otherwise a run is slow by seconds every now and then, and nothing says why.
"""

import logging

from torch._dynamo.utils import counters, get_compilation_metrics

from dflash_mp.warn_once import warn_once

log = logging.getLogger(__name__)

ADVICE = (
    "each time costs seconds: if perf/recompiles and perf/target_recompiles keep growing, set "
    "drafter.compile=null, target.compile=false, or drafter.attention=sdpa, whichever it belongs to"
)


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process, those made again included."""
    return int(counters["stats"]["unique_graphs"])


class Recompiles:
    """Counts the graphs that are made after the first time of each kind of work.

    Args:
        alone: whether this process has one rank. Otherwise nothing is counted: graphs do not say
            which thread has made them.
    """

    def __init__(self, alone: bool) -> None:
        self.alone, self.count = alone, 0
        self._graphs = compiled_graphs()
        self._done: set[str] = set()

    def check(self, work: str) -> None:
        """Call behind every piece of ``work``; warns if what was done before was compiled again."""
        made, self._graphs = compiled_graphs() - self._graphs, compiled_graphs()
        if self.alone and work in self._done and made > 0:
            self.count += made
            warn_once(log, f"{work}: {newest_compile()}", ADVICE)
        self._done.add(work)

    def value(self) -> int | None:
        """The count; None where nothing was compiled at all, or nothing is counted."""
        return self.count if self.alone and self._graphs else None


def newest_compile() -> str:
    """Which function was compiled last and what was new about its arguments, for people."""
    for made in reversed(get_compilation_metrics()):
        if made.co_name is not None:
            why = (made.recompile_reason or "it was not called before").splitlines()[0]
            where = f"{made.co_filename}:{made.co_firstlineno}"
            return f"{made.co_name} ({where}) was compiled again: {why}"
    return "something was compiled again"
