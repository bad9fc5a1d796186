"""What docs/ say of the published systems: what the packaged configs do otherwise, and the names of things there."""

import re
from pathlib import Path

import pytest

from runs import UNDECIDED
from tandemrl.config import leaves, load, packaged_configs

ROOT = Path(__file__).parents[1]
OURS = {name for name in packaged_configs() if name.startswith(("quickstart", "hops_", "smollm2"))}
"""Packaged configs that reproduce nothing."""
KEYS = {leaf.key for leaf in leaves(load())}


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    text = (ROOT / "docs" / page).read_text()
    assert f"\n## {heading}\n" in text, f"{page} has no section {heading}"
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_reproduced_config_is_listed_with_what_is_not_as_published() -> None:
    named = [re.findall(r"`(\w+)`", configs) for configs, _, _ in rows("status.md", "Not as published")]
    assert {name for each in named for name in each} == set(packaged_configs()) - OURS


@pytest.mark.parametrize("name", sorted(set(packaged_configs()) - OURS))
def test_the_values_that_are_said_to_be_ours_are_those_of_the_config(name: str) -> None:
    config = load(name, UNDECIDED.get(name, []))
    said = [here for configs, here, _ in rows("status.md", "Not as published") if f"`{name}`" in configs]
    stated = [pair for here in said for pair in re.findall(r"`([a-z_.]+)=([^`]+)`", here)]
    assert stated
    assert load(name, [*UNDECIDED.get(name, []), *(f"{key}={value}" for key, value in stated)]) == config


def test_the_names_of_the_original_stand_beside_ours() -> None:
    table = rows("concepts.md", "Names elsewhere")
    named = {key for here, _ in table for key in re.findall(r"`([a-z_]+\.[a-z_]+)", here)}
    assert named <= KEYS
    there = " ".join(name for _, name in table)
    terms = ("primary", "frozen", "prob_primary", "tandem_jr_tkn_weight", "authorship_mask", "tandem_disabled")
    assert [term for term in terms if term not in there] == []
