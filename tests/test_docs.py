"""The figures of README.md and docs/ are those of the committed results, and the results say what made them."""

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

import tandemrl
from tandemrl.config import Config, expected, leaves

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/results.md", "docs/speed.md")
HEADLINE = {
    "solo pass@1": "solo/pass@1",
    "tandem pass@1": "tandem/pass@1",
    "handoff, senior first": "handoff/senior_first",
    "handoff, junior first": "handoff/junior_first",
    "handoff pass@1": "handoff/pass@1",
    "junior CE (nats/token)": "junior_ce",
    "jargon rate": "jargon_rate",
    "repairs per handoff text": "handoff/repairs",
}
"""What the columns of the tables are called in the rows of ``results.json``."""


@pytest.fixture(scope="module")
def refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def block(page: str, name: str) -> str:
    match = re.search(rf"<!-- figures: {name} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)
    assert match, f"{page} has no block {name}"
    return match.group(1)


def table(text: str) -> list[dict[str, str]]:
    """The rows of the first Markdown table, by column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


def numbers(cell: str) -> list[str]:
    return re.findall(r"[+−-]?\d[\d,]*\.?\d*", cell)


def decimals(shown: str) -> int:
    return len(shown.partition(".")[2])


def assert_shows(cell: str, values: list[float]) -> None:
    """Every number of a cell is the value beside it, rounded to the decimals that it is shown with."""
    shown = numbers(cell)
    assert len(shown) == len(values), (cell, values)
    for text, value in zip(shown, values, strict=True):
        plain = float(text.replace(",", "").replace("−", "-"))
        assert abs(plain - value) <= 0.5 * 10 ** -decimals(text) + 1e-9, (cell, values)


def over_seeds(
    values: list[float], lowest: float = -np.inf, highest: float = np.inf, within: Sequence[float] = (0.0,)
) -> list[float]:
    """Mean and Student's 95 % interval, no narrower than errors within seeds make it; one value stands for itself."""
    if len(values) == 1:
        return values
    mean = np.mean(values)
    error = max(stats.sem(values), np.sqrt(np.mean(np.square(within)) / len(values)))
    low, high = (mean + sign * stats.t.ppf(0.975, len(values) - 1) * error for sign in (-1, 1))
    return [float(mean), max(lowest, float(low)), min(highest, float(high))]


def of_arm(content: Mapping[str, Any], title: str, measure: str) -> list[float]:
    names = {arm["title"]: arm["name"] for arm in content["experiment"]["arms"]}
    names |= {"before training": "base", "GRPO, KL": "kl", "tandem": "tandem"}  # the last two are titles of today
    rows = [row for row in content["rows"] if row["arm"] == names[title]]
    return [row[measure] for row in sorted(rows, key=lambda row: row["seed"])]


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_are_those_of_the_committed_results(refresh: ModuleType, page: str) -> None:
    assert ROOT / page in refresh.PAGES
    assert refresh.refreshed(ROOT / page) == (ROOT / page).read_text(), f"{page} is out of date: run `make figures`"


def test_the_headline_table_has_means_and_intervals_of_the_rows() -> None:
    content = json.loads((ROOT / "docs" / "paper_claims_jargon.json").read_text())
    rows = table(block("README.md", "readme-claims"))
    assert len(rows) == 1 + len(content["experiment"]["arms"])
    for row in rows:
        title = row.pop("")
        for column, cell in row.items():
            highest = 1.0 if "pass@1" in column or "handoff, " in column or "rate" in column else np.inf
            values = of_arm(content, title, HEADLINE[column])
            assert_shows(cell, over_seeds(values, lowest=0.0, highest=highest))


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "docs").glob("*.json")))
def test_results_name_the_commit_that_made_them_and_have_a_picture(refresh: ModuleType, file: str) -> None:
    content = json.loads((ROOT / "docs" / file).read_text())
    assert file in refresh.PUBLISHED.values()
    made_by = content.get("evaluated_by", [content["versions"]])
    assert all(re.fullmatch(r"[0-9a-f]{40}", each["git_revision"]) for each in made_by)
    text = (ROOT / "docs" / "results.md").read_text()
    assert f"[{file}]({file})" in text
    if file != "quickstart_three_seeds.json":
        assert f"](images/results/{file.removesuffix('.json')}.svg)" in text


SITE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *SITE)
HOUSE = ROOT / "src" / "tandemrl"


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_path_that_a_document_names_is_there_and_holds_what_it_names(page: str) -> None:
    """`models/loading.py`, `tasks/math/`, `training/loop.py: train_step` and `training/loop.py`: `train_step`."""
    text = " ".join((ROOT / page).read_text().split())
    paths = re.findall(r"`((?:[\w*{},-]+/)*[\w-]+\.pyi?|(?:[\w-]+/)+)(?:: (\w+)`|`: `(\w+)`|`)", text)
    for path, *names in paths:
        if path.split("/")[0] in ("runs", "hf", "checkpoints", "profile"):
            continue  # of a run
        places = [place / path for place in (ROOT, HOUSE) if (place / path).exists()]
        assert places, f"{page}: no {path}"
        for name in filter(None, names):
            defined = re.search(rf"^(def |class )?{name}\b", places[0].read_text(), re.MULTILINE)
            assert defined, f"{page}: no {name} in {path}"


def test_the_architecture_lists_the_public_names() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## Public names")[2].partition("\n## ")[0]
    names = [name for line in section.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)]
    assert sorted(names) == sorted(set(tandemrl.__all__) - {"__version__"})


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_key_that_a_document_names_is_one_of_the_configuration(page: str) -> None:
    """`train.lr`, `rollout.engine=vllm`; not files such as `loss.py`, nor patterns of users' own."""
    known = {key.key for key in leaves(Config())}
    sections = {key.rpartition(".")[0] for key in known}
    tops = {section.partition(".")[0] for section in sections} - {""}
    text = (ROOT / page).read_text()
    if page == "docs/howto/coming_from.md":  # the last column is ours
        text = re.sub(r"^\|.*\|(?=[^|]+\|$)", "", text, flags=re.MULTILINE)
    words = re.findall(rf"(?<![\w/.@-])((?:{'|'.join(tops)})(?:\.[a-z_]+)+)(?![\w(*.{{/-])", text)
    files = (".yaml", ".py", ".json", ".jsonl", ".parquet", ".md", ".html", ".log")
    named = {word for word in words if not word.endswith(files)}
    assert {word for word in named if word not in known | sections and not word.startswith(MAPPINGS)} == set()


MAPPINGS = tuple(f"{key.key}." for key in leaves(Config()) if expected(key.type).startswith("a mapping"))
PHASES = ("loop.py", "rollouts.py", "evaluation.py", "update.py", "experience.py")
"""Modules of `training/` that name metrics of a step."""


def test_the_glossary_has_every_metric_of_a_step() -> None:
    code = "".join((HOUSE / "training" / name).read_text() for name in PHASES)
    keys = {key for key in re.findall(r'"([a-z]+/[a-z_]+)"', code) if not key.startswith("update/")}
    recipes = (HOUSE / "losses" / "policy.py").read_text()
    keys |= set(re.findall(r'^            "(\w+)": ', recipes, re.MULTILINE))
    keys |= set(re.findall(r'(?:per_token|metrics)\["(\w+)"\] = ', recipes))
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    assert len(keys) > 25
    assert {key for key in keys if f"`{key}`" not in glossary} == set()


FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", SITE)
def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(page: str) -> None:
    assert f" {page.removeprefix('docs/')}\n" in (ROOT / "mkdocs.yml").read_text()
    text = FENCED.sub("", (ROOT / page).read_text())
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page}: no {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", FENCED.sub("", file.read_text()), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, (page, anchor)
