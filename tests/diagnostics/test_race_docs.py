"""The page about the race says what the committed results say."""

import re
from pathlib import Path

import pytest

from dflash_mp.diagnostics.catalogue import SCENARIOS, TREATMENTS
from dflash_mp.diagnostics.tables import ABOUT_FLAG, ABOUT_REST, load, tables
from dflash_mp.markdown import with_tables

PAGE = (Path(__file__).parents[2] / "docs" / "race.md").read_text()


def test_tables_are_those_of_the_results():
    assert with_tables(PAGE, tables()) == PAGE


def test_every_scenario_has_a_place_in_the_tables():
    assert set(ABOUT_FLAG) | set(ABOUT_REST) == set(SCENARIOS)


@pytest.mark.parametrize("name", [*SCENARIOS, *TREATMENTS])
def test_every_scenario_and_treatment_is_explained(name):
    story = PAGE.split("<!-- tables: begin -->")[0]
    assert f"`{name}`" in story


def test_names_on_the_page_exist():
    named = re.findall(r"(?:scenario|treatment)=([a-z-]+)", PAGE)
    assert set(named) <= {*SCENARIOS, *TREATMENTS}


def test_results_of_three_kinds_of_torch_are_committed():
    """Before the flag was masked, with the mask, and with a flag per thread."""
    minors = {".".join(about["torch"].split(".")[:2]) for about, _ in load()}
    assert minors >= {"2.11", "2.13", "2.14"}


def test_processes_were_clean_in_every_committed_run():
    for about, cells in load():
        processes = [cell for cell in cells.values() if cell.treatment == "processes"]
        assert {cell.scenario for cell in processes} >= set(SCENARIOS) - {"trace-over-inductor"}
        assert [(about["torch"], c.scenario) for c in processes if c.bad or not c.runs] == []


def test_the_race_was_seen_in_every_committed_run():
    for about, cells in load():
        assert cells["leaked-hooks", "none"].bad, about["torch"]
