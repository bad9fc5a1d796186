"""Write the figures of README.md and docs/ from the committed results. `make figures`.

Every table between `<!-- figures: NAME -->` and `<!-- end -->` is one of `BLOCKS`, made from `docs/*.json` (written by
`tandemrl experiment`) and `benchmarks/results/` (written by the benchmarks). Nobody edits them by hand.

    python docs/refresh.py                                    # renew the tables
    python docs/refresh.py runs/paper-claims runs/ablations   # take over the results of finished experiments first
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from tandemrl.apps.experiments.experiment import SCHEMA
from tandemrl.apps.report import read_results
from tandemrl.apps.report.tables import (
    JUNIOR_CE,
    JUNIOR_FIRST,
    SENIOR_FIRST,
    SOLO,
    UNSEEN,
    headline_table,
    markdown_table,
)
from tandemrl.evals.compare import show_interval
from tandemrl.evals.stats import Interval
from tandemrl.files import read_json_lines, write_text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", DOCS / "results.md", DOCS / "speed.md")
PUBLISHED = {
    ("paper-claims", ("jargon",)): "paper_claims_jargon.json",
    ("quickstart", ("jargon",)): "quickstart_three_seeds.json",
    ("quickstart rollout.workers=1 train.async_steps=2", ("jargon",)): "two_steps_ahead.json",
    ("two-tokenizers", ("jargon_two_tokenizers",)): "two_tokenizers.json",
    ("ablations", ("jargon",)): "ablations.json",
    ("repair", ("repair",)): "repair.json",
    ("frontier", ("jargon",)): "frontier.json",
    ("shorthand", ("shorthand",)): "shorthand.json",
    ("hops", ("hops",)): "hops.json",
    ("hops", ("hops_jargon",)): "hops_jargon.json",
    ("smollm2", ("word_problems",)): "smollm2.json",
    ("smollm2", ("word_problems_terse",)): "smollm2_terse.json",
}
"""Where the results of an experiment, with its overrides, and its pairs are committed."""

# --------------------------------------------------------------------------------------------------------- experiments


def content_of(name: str) -> dict[str, Any]:
    return json.loads((DOCS / name).read_text())


def headline(name: str) -> str:
    """A row per arm with 95 % intervals, and what made the file: command, commit, date, what the numbers are over."""
    content = content_of(name)
    asked, revisions = content["experiment"], content["evaluated_by"]
    seeds = {row["seed"] for row in content["rows"]}
    named = " and ".join(f"`{each['git_revision'][:7]}`" for each in revisions)
    [setting] = read_results(DOCS / name)
    table = headline_table(setting.arms, (SOLO, SENIOR_FIRST, JUNIOR_FIRST, JUNIOR_CE))
    for old, new in {"KL-regularised GRPO": "GRPO, KL", "tandem GRPO": "tandem"}.items():  # titles when it was run
        table = table.replace(f"| {old} |", f"| {new} |")
    return (
        f"{table}\n`{content['command']}` at commit{'s' if len(revisions) > 1 else ''} {named}, {content['date']}; "
        f"means over {len(seeds)} seeds, with 95 % intervals; {asked['problems']} held-out problems × "
        f"{asked['samples']} samples: [{name}](docs/{name}).\n"
    )


def transfer_tests() -> str:
    """For the results: what tandem's transfer differs by from each other arm's, and Holm's p."""
    content = content_of("frontier.json")
    titles = {arm["name"]: arm["title"] for arm in content["experiment"]["arms"]}
    rows = [
        [
            titles[each["b"]],
            f"{show_interval(Interval(each['mean'], each['low'], each['high']))}",
            f"{each['holm']:.2g}",
        ]
        for each in content["tests"]
        if each["measure"] == UNSEEN.measure
    ]
    return markdown_table(["tandem minus …", "transfer", "Holm’s p"], rows)


def smollm2_sentence() -> str:
    """For README: means alone, as intervals are in the results."""
    rows = content_of("smollm2.json")["rows"]
    before, grpo, tandem = (
        f"{fmean(row['solo/pass@1'] for row in rows if row['arm'] == arm):.2f}"
        for arm in ("base", "grpo", "tandem_self")
    )
    return (
        "[SmolLM2-135M](docs/howto/pretrained.md) after 12 steps, 3 seeds: "
        f"solo pass@1 from {before} to {grpo} by GRPO, {tandem} by\ntandem beside its copy; "
        "**no gain in handoff is shown** ([intervals](docs/results.md#a-pretrained-model))."
    )


# --------------------------------------------------------------------------------------------------------------- speed


def measured(name: str) -> list[dict[str, Any]]:
    """The lines of a benchmark's file."""
    file = BENCHMARKS / name
    return [json.loads(file.read_text())] if name.endswith(".json") else [line for _, line in read_json_lines(file)]


def speed_sentence() -> str:
    """For README."""
    (step,) = (line for line in measured("pretrained_speed.jsonl") if line["part"] == "step")
    solo, tandem = (step["cpu_ratios"][f"{who} / trl"]["median"] for who in ("solo", "tandem"))
    return (
        f"On a CPU core a GRPO step of SmolLM2-135M takes {solo:.2f} of the CPU time of {step['peer'].upper()}'s, a "
        f"tandem step {tandem:.2f}\n([speed](docs/speed.md)).\n"
    )


STEPS, PRETRAINED, COST = "step_time.json", "pretrained_speed.jsonl", "tandem_cost.jsonl"
HIGH = {"model": "12-high", "prompt": 32}
SPEED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("GRPO step, 0.28M, 128 tokens each", "solo / trl", STEPS, {}),
    ("GRPO step, 0.28M, 128 tokens each", "tandem / trl", STEPS, {}),
    ("GRPO step, 0.28M, lengths mixed", "solo / trl", "step_time_lognormal.json", {}),
    ("GRPO step, 0.28M, lengths mixed", "tandem / trl", "step_time_lognormal.json", {}),
    ("GRPO step, 135M", "solo / trl", PRETRAINED, {"part": "step"}),
    ("GRPO step, 135M", "tandem / trl", PRETRAINED, {"part": "step"}),
    ("rollout, 135M, 1 row", "solo / transformers", PRETRAINED, {"rows": 1}),
    ("rollout, 135M, 1 row", "solo / vllm", PRETRAINED, {"rows": 1}),
    ("rollout, 135M, 1 row", "tandem / solo", PRETRAINED, {"rows": 1}),
    ("rollout, 135M, 64 rows", "solo / transformers", PRETRAINED, {"rows": 64}),
    ("rollout, 135M, 64 rows", "solo / vllm", PRETRAINED, {"rows": 64}),
    ("rollout, 135M, 64 rows", "tandem / solo", PRETRAINED, {"rows": 64}),
    (
        "drafts by its first 6 layers, 135M, 1 row",
        "tandem with drafts / tandem",
        "pretrained_drafts.jsonl",
        {"rows": 1},
    ),
    (
        "drafts by its first 6 layers, 135M, 8 rows",
        "tandem with drafts / tandem",
        "pretrained_drafts.jsonl",
        {"rows": 8},
    ),
    ("drafts, torch, 60M with 5M, 8 rows", "tandem auto / solo", "drafting.jsonl", {"rows": 8, "level": "high"}),
    ("drafts, vLLM, 60M with 5M, 8 rows", "auto / stock", COST, HIGH | {"rows": 8}),
    ("drafts, vLLM, 60M with 5M, 32 rows", "auto / stock", COST, HIGH | {"rows": 32}),
    ("lazy, vLLM, 60M with 5M, 8 rows", "lazy / stock", COST, HIGH | {"rows": 8}),
    ("two vocabularies, 135M, 8 rows", "two / one", "two_vocabularies.jsonl", {"rows": 8}),
    ("two workers on the same cores, 135M (wall time)", "2 workers / engine, 2 threads", "fleet_throughput.json", {}),
)
"""The rows of the table of speed: what is measured, the name of the ratio, its file, the line of the file."""


def speed() -> str:
    """Ratios of time, each a median over rounds with its 90 % interval, or from the lowest to the highest round."""
    rows = []
    for what, ratio, name, which in SPEED:
        [line] = [line for line in measured(name) if which.items() <= line.items()]
        found = next(line[key] for key in ("cpu_ratios", "seconds_ratios", "ratios") if key in line)[ratio]
        low, high = found["interval_90"] or (min(found["per_round"]), max(found["per_round"]))
        shown = f"{found['median']:.2f} [{low:.2f}, {high:.2f}]"
        rows.append([what, ratio, shown, f"[{name}](../benchmarks/results/{name})"])
    return markdown_table(["", "ratio of CPU time", "median", "file"], rows, left=2)


# --------------------------------------------------------------------------------------------------------------- pages

BLOCKS: dict[str, Callable[[], str]] = {
    "readme-claims": lambda: headline("paper_claims_jargon.json"),
    "readme-smollm2": smollm2_sentence,
    "transfer": transfer_tests,
    "speed-sentence": speed_sentence,
    "speed": speed,
}
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def refreshed(page: Path) -> str:
    """The text of a page with every block made anew.

    Raises:
        ValueError: an unknown block; names it.
    """

    def refresh_block(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"{page}: unknown block {name!r}; known: {', '.join(BLOCKS)}")
        return f"{opening}{BLOCKS[name]()}{closing}"

    return BLOCK.sub(refresh_block, page.read_text(encoding="utf-8"))


def take_over(folders: Iterable[Path]) -> None:
    """Copy the ``results.json`` of finished experiments into docs/.

    Raises:
        ValueError: one that is not published here, or that no commit made; names it.
    """
    for folder in folders:
        text = (folder / "results.json").read_text()
        content: Mapping[str, Any] = json.loads(text)
        words = shlex.split(content["command"] or "")
        overrides = [word for word in words if "=" in word and not word.startswith("-")]
        key = " ".join([content["experiment"]["name"], *overrides]), tuple(content["experiment"]["pairs"])
        if key not in PUBLISHED:
            raise ValueError(f"{folder}: {key} is not published; known: {', '.join(map(str, PUBLISHED))}")
        if content["schema"] != SCHEMA:
            raise ValueError(
                f"{folder}: written by older code; give its command again, which collects what is finished"
            )
        made_by = [content["versions"], *content["evaluated_by"]]
        if content["command"] is None or any(each["git_revision"] is None or each["git_dirty"] for each in made_by):
            raise ValueError(f"{folder}: made by no commit, or by no command; run it from a clean checkout")
        write_text(DOCS / PUBLISHED[key], text)


def main() -> None:
    take_over(map(Path, sys.argv[1:]))
    for page in PAGES:
        text = refreshed(page)
        if text != page.read_text(encoding="utf-8"):
            write_text(page, text)
            print(f"{page.relative_to(ROOT)}: renewed")


if __name__ == "__main__":
    main()
