"""A running training says which split would be best."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.distributed
def test_a_run_says_once_which_split_would_be_best(launch: Callable[..., object]) -> None:
    # A target that has made nothing has no rate.
    script = Path(__file__).parents[1] / "sharing_targets.py"
    result = launch(3, "steps=8", "log_interval=2", script=script)
    assert result.returncode == 0, result.stderr[-2000:]
    found = re.findall(
        r"2 targets \+ 1 drafters: a target makes ([\d,]+) tokens/s, a drafter takes ([\d,]+); "
        r"(?:no other split|topology\.targets=1 topology\.drafters=2)",
        result.stdout + result.stderr,
    )
    assert len(found) == 1
    assert all(int(rate.replace(",", "")) > 0 for rate in found[0])
