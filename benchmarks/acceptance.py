"""How often the junior draws what the senior writes, before and after training, on trained pairs of several sizes.

    tandemrl experiment paper-claims --arms grpo,tandem --seeds 0 --size 1m --out runs/acceptance/1m
    python benchmarks/acceptance.py runs/acceptance/* --out benchmarks/results/acceptance.jsonl

Trains nothing: reads the folders of experiments, finished or not, and prints one JSON line for every evaluation of a
seed and arm that is there (`base` is the senior before training). acceptance: the share of the tokens of the senior's
solo texts that the junior, given the same text so far and the same random numbers, draws, too; junior_ce: its
cross-entropy on these texts, nats per token. The interval is over the problems of the seed.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import write_lines

ORDER = ("base", "grpo")
"""Arms that come first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", type=Path, nargs="*", help="folders of `tandemrl experiment`; default: in runs/")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    folders = options.experiments or sorted(file.parent for file in Path("runs").glob("*/experiment.json"))
    lines = [line for folder in folders for line in of_experiment(folder)]
    if not lines:
        print(
            "no experiment whose legibility knows acceptance: has an evaluation ended, by recent code?", file=sys.stderr
        )
    for line in lines:
        print(json.dumps(line), flush=True)
    if options.out is not None and lines:
        write_lines(options.out, lines)


def of_experiment(folder: Path) -> Iterator[dict[str, Any]]:
    """A line for each pair, arm and seed whose texts the junior has read."""
    asked = json.loads((folder / "experiment.json").read_text())
    arms = {"base": "before training"} | {arm["name"]: arm["title"] for arm in asked["arms"]}
    for pair in asked["pairs"]:
        for arm in sorted(arms, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
            for seed in asked["seeds"]:
                home = folder / pair / f"seed-{seed}"
                file = home / "eval" / arm / "legibility.json"
                if not file.is_file():
                    continue
                read = json.loads(file.read_text())
                macro = read["metrics"]["macro"]
                if "acceptance" not in macro:
                    continue
                yield {
                    "benchmark": "acceptance",
                    "command": asked["command"],
                    "pair": pair,
                    "size": asked["size"],
                    "parameters": json.loads((home / "pair" / "manifest.json").read_text())["parameters"],
                    "arm": arms[arm],
                    "seed": seed,
                    "acceptance": round(macro["acceptance"], 4),
                    "interval_95": [round(macro[f"acceptance/{end}"], 4) for end in ("low", "high")],
                    "junior_ce": round(macro["cross_entropy"], 4),
                    "problems": asked["problems"],
                    "samples": asked["samples"],
                    "versions": read["versions"],
                }


if __name__ == "__main__":
    main()
