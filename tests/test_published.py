"""What docs/ say of the published systems: what the packaged configs do otherwise, and the names of things there."""

import itertools
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


def head(name: str) -> str:
    """What the comment at the top of a packaged config says, in one line."""
    lines = (ROOT / "configs" / f"{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in itertools.takewhile(lambda x: x.startswith("#"), lines))


@pytest.mark.parametrize("name", sorted(set(packaged_configs()) - OURS))
def test_a_reproduced_config_says_what_is_not_as_published(name: str) -> None:
    """In its head, or in the head of the config that it names there. Values that are said to be ours are its own."""
    said = re.search(r"(?i)not as published.*", head(name))
    assert said
    if named := re.search(r"(?:see|beside what) (\w+)", said[0]):
        assert "ot as published" in head(named[1])
    keys = re.findall(r"\b([a-z]+\.[a-z_.]+)=(\w+)", said[0])
    stated = [f"{key}={value}" for key, value in keys if key in KEYS and key != "reward.compat"]
    config = load(name, UNDECIDED.get(name, []))
    assert load(name, [*UNDECIDED.get(name, []), *stated]) == config


def test_the_names_of_the_original_stand_beside_ours() -> None:
    table = rows("concepts.md", "Names elsewhere")
    named = {key for here, _ in table for key in re.findall(r"`([a-z_]+\.[a-z_]+)", here)}
    assert named <= KEYS
    there = " ".join(name for _, name in table)
    terms = ("primary", "frozen", "prob_primary", "tandem_jr_tkn_weight", "authorship_mask", "tandem_disabled")
    assert [term for term in terms if term not in there] == []
