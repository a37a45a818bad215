"""All scenarios and treatments by name, and which treatments a scenario is run under."""

from dflash_mp.diagnostics.plans import TREATMENTS
from dflash_mp.diagnostics.scenarios import SCENARIOS as DETERMINISTIC
from dflash_mp.diagnostics.stochastic import STOCHASTIC

__all__ = ["SCENARIOS", "TREATMENTS"]

SCENARIOS = {**DETERMINISTIC, **STOCHASTIC}
