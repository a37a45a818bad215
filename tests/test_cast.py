"""Who is who, for many sizes, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_mp.cast import DRAFTER, TARGET, place, split
from dflash_mp.config import TopologyConfig, UserError


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, (1, 1)), (3, (2, 1)), (4, (3, 1)), (6, (4, 2)), (8, (5, 3))]
)
def test_default_split(ranks: int, expected: tuple[int, int]) -> None:
    assert split(ranks, TopologyConfig(None, None)) == expected


def test_one_number_gives_the_other() -> None:
    assert split(8, TopologyConfig(6, None)) == (6, 2)
    assert split(8, TopologyConfig(None, 4)) == (4, 4)


@pytest.mark.parametrize(("targets", "drafters"), [(5, 4), (1, 1), (8, None), (None, 8)])
def test_a_wrong_sum_is_refused_with_both_numbers(
    targets: int | None, drafters: int | None
) -> None:
    message = f"topology.targets={targets} and topology.drafters={drafters} .* started 8"
    with pytest.raises(UserError, match=message):
        split(8, TopologyConfig(targets, drafters))


def test_fewer_than_two_ranks_is_refused() -> None:
    with pytest.raises(UserError, match="at least 2"):
        split(1, TopologyConfig(None, None))


def test_eight_ranks_are_five_targets_and_three_drafters() -> None:
    places = [place(rank, 8, 8, TopologyConfig(5, 3)) for rank in range(8)]
    assert [p.role for p in places] == [TARGET] * 5 + [DRAFTER] * 3
    assert [p.name for p in places[4:6]] == ["target4", "drafter0"]
    assert [p.is_main for p in places] == [False] * 5 + [True, False, False]


def test_two_nodes_split_alike_and_role_ranks_run_through() -> None:
    places = [place(rank, 6, 3, TopologyConfig(2, 1)) for rank in range(6)]
    assert [p.name for p in places] == [
        "target0",
        "target1",
        "drafter0",
        "target2",
        "target3",
        "drafter1",
    ]
    assert [p.node for p in places] == [0, 0, 0, 1, 1, 1]
    assert {(p.targets, p.drafters) for p in places} == {(4, 2)}


@pytest.mark.distributed
def test_leaving_a_role_does_not_hang() -> None:
    """A deadlock inside torch between DDP's end and gloo's threads; one time in a dozen."""
    script = Path(__file__).parent / "many_roles.py"
    command = [sys.executable, "-m", "launch.spawn", "--nproc", "3", "--script", str(script)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
