"""All scenarios and treatments by name, and the cells of the two matrices."""

from dflash_mp.diagnostics.attention import ATTENTION
from dflash_mp.diagnostics.compiles import COMPILES
from dflash_mp.diagnostics.plans import TREATMENTS
from dflash_mp.diagnostics.stochastic import STOCHASTIC
from dflash_mp.diagnostics.traces import TRACES

__all__ = ["SCENARIOS", "TREATMENTS", "full_matrix", "quick_matrix"]

SCENARIOS = {**TRACES, **ATTENTION, **COMPILES, **STOCHASTIC}

# Random scenarios in which the FX flag plays a part. The others are run under the treatments
# that could matter to them.
_ABOUT_FLAG = ("flex-threads", "block-threads")
_BESIDE_FLAG = ("none", "backport-hooks", "lock", "gate", "processes")

# What the quick matrix runs besides every scenario without treatment and in processes, and every
# treatment on the two calls that a trainer makes.
_QUICK = {
    "trace-over-inductor": ("patch-before", "backport"),
    "call-in-symbolic-trace": ("patch-before", "backport", "backport-hooks"),
    "lost-update": ("backport", "backport-hooks"),
    "lost-update-flex": ("shim", "patch-before", "backport"),
    "leaked-hooks": ("backport", "backport-hooks"),
    "past-recompile-limit": ("backport", "warm"),
    "rewound-draws": ("backport-hooks", "lock"),
    "branch-on-compiling": ("backport-hooks", "lock"),
    "optimizer-in-compile": ("backport-hooks", "lock"),
    "stuck-annotation": ("backport-hooks", "lock"),
}
_QUICK_ALL_TREATMENTS = ("call-in-compile", "call-in-make-fx")

Names = list[tuple[str, str]]


def quick_matrix() -> Names:
    """Return the cells for a minute, those that take longest first."""
    cells = []
    for name in _longest_first():
        treatments = list(TREATMENTS)
        if name not in _QUICK_ALL_TREATMENTS:
            treatments = ["none", *_QUICK.get(name, ()), "processes"]
        if name == "trace-over-inductor":
            # One thread alone: processes have nothing to separate.
            treatments.remove("processes")
        cells += [(name, treatment) for treatment in treatments]
    return cells


def full_matrix() -> Names:
    """Return every cell that says something."""
    return [
        (name, treatment)
        for name in _longest_first()
        for treatment in TREATMENTS
        if not SCENARIOS[name].random or name in _ABOUT_FLAG or treatment in _BESIDE_FLAG
    ]


def _longest_first() -> list[str]:
    # The first inductor kernel on a machine takes some ten seconds.
    return sorted(SCENARIOS, key=lambda n: (n != "trace-over-inductor", not SCENARIOS[n].random))
