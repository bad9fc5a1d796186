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


def said(name: str) -> str:
    """What a head says is not as published."""
    found = re.search(r"(?i)not as published.*", head(name))
    return found[0] if found else ""


@pytest.mark.parametrize("name", sorted(set(packaged_configs()) - OURS))
def test_a_reproduced_config_says_what_is_not_as_published(name: str) -> None:
    """In its head, or in the head of the config that it names there."""
    assert said(name)
    if named := re.search(r"(?:see|beside what) (\w+)", said(name)):
        assert said(named[1])


def test_the_share_of_a_card_that_a_head_gives_to_vllm_is_that_of_its_config() -> None:
    stated = {name: found for name in packaged_configs() if (found := re.findall(r"vLLM has (0\.\d)", said(name)))}
    assert stated.keys() == {"countdown", "deepscaler_kl", "eurus", "rrm_policy"}
    for name, found in stated.items():
        assert found == [str(load(name, UNDECIDED.get(name, [])).rollout.vllm.gpu_memory_utilization)], name


def test_the_names_of_the_original_stand_beside_ours() -> None:
    table = rows("concepts.md", "Names elsewhere")
    named = {key for here, _ in table for key in re.findall(r"`([a-z_]+\.[a-z_]+)", here)}
    assert named <= KEYS
    there = " ".join(name for _, name in table)
    terms = ("primary", "frozen", "prob_primary", "tandem_jr_tkn_weight", "authorship_mask", "tandem_disabled")
    assert [term for term in terms if term not in there] == []
