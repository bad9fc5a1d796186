"""What the draws of the authors do to the rewards of tandem rollouts, read off the samples of finished runs.

For each arm of an experiment on word problems (``tandemrl experiment smollm2``), over all steps of all seeds:

- ``split_numbers``: of the numbers of two digits or more (a token per digit), how many have digits of both authors.
- ``explained``: how much of the variance of the reward within groups goes with who wrote: with the senior's share of
  the tokens, and with its share of the results, that is of the numbers after "=". They are squared correlations with
  both sides centred in each group, as the advantage centres the reward. What goes with the draws is noise to the
  senior's gradient, which `selection.draws=per_group` would take out. ``by_chance`` is what the share is if rewards are
  permuted within groups (mean of 200).
- ``truncated``, ``entropy``, ``senior_tokens``: means over the first and the last third of the steps.
- ``time``: shares of rollout, update and sync in the step.

    python benchmarks/tandem_noise.py runs/smollm2 --out benchmarks/results/tandem_noise.json
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from _common import about
from transformers import AutoTokenizer

from tandemrl.types import Author

PERMUTATIONS = 200
TIMES = ("time/rollout", "time/update", "time/sync")


class Told(NamedTuple):
    """A rollout. ``authors`` has those of each number of two digits or more, ``results`` who wrote those after "="."""

    group: tuple[int, int, int]
    reward: float
    senior: float
    authors: list[set[int]]
    results: list[int]


def lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open() as rows:
        yield from map(json.loads, rows)


def told(line: dict[str, Any], seed: int, texts: Sequence[str]) -> Told:
    own = [(texts[token], who) for token, who in zip(line["tokens"], line["author"], strict=True) if who >= 0]
    numbers, results, before = list[list[int]](), list[int](), ""
    for place, (text, who) in enumerate(own):
        if text.isdigit():
            if place and own[place - 1][0].isdigit():
                numbers[-1].append(who)
            else:
                numbers.append([who])
                if before == "=":
                    results.append(who)
        elif text.strip():
            before = text.strip()
    senior = fmean(who == Author.SENIOR for _, who in own)
    many = [set(authors) for authors in numbers if len(authors) > 1]
    return Told((seed, line["step"], line["group"]), line["reward"], senior, many, results)


def explained(values: Sequence[float], rewards: Sequence[float], groups: Sequence[Any]) -> dict[str, float]:
    """Squared correlation within groups, and what it is by chance."""
    places = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    within = [np.array(each) for each in places.values()]

    def centred(each: Sequence[float] | np.ndarray) -> np.ndarray:
        found = np.array(each, dtype=float)
        for group in within:
            found[group] -= found[group].mean()
        return found

    x, y = centred(values), centred(rewards)
    draw = np.random.default_rng(0)

    def share(y: np.ndarray) -> float:
        return float((x @ y) ** 2 / ((x @ x) * (y @ y)))

    by_chance = []
    for _ in range(PERMUTATIONS):
        permuted = y.copy()
        for group in within:
            permuted[group] = draw.permutation(y[group])
        by_chance.append(share(permuted))
    return {"share": share(y), "by_chance": fmean(by_chance)}


def of_arm(runs: Sequence[Path], seeds: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
    rollouts = [
        told(line, seed, texts) for run, seed in zip(runs, seeds, strict=True) for line in lines(run / "samples.jsonl")
    ]
    steps = [[*lines(run / "metrics.jsonl")] for run in runs]
    numbers = [authors for each in rollouts for authors in each.authors]
    third = max(1, len(steps[0]) // 3)

    def mean(name: str, which: slice) -> float:
        return fmean(line[name] for run in steps for line in run[which])

    found: dict[str, Any] = {"seeds": [*seeds], "rollouts": len(rollouts), "numbers": len(numbers)}
    if any(0 < each.senior < 1 for each in rollouts):
        both = [each for each in rollouts if each.results]
        groups, rewards = [each.group for each in both], [each.reward for each in both]
        found |= {
            "split_numbers": sum(len(authors) > 1 for authors in numbers),
            "explained": {
                "tokens": explained([each.senior for each in both], rewards, groups),
                "results": explained([fmean(each.results) for each in both], rewards, groups),
            },
        }
    for name, metric in (("truncated", "response/truncated"), ("entropy", "entropy")):
        found[name] = {"first": mean(metric, slice(third)), "last": mean(metric, slice(-third, None))}
    found["senior_tokens"] = mean("tokens/response", slice(None)) * mean("tandem/senior_frac", slice(None))
    every = [line for run in steps for line in run]
    found["time"] = {
        name: sum(line[name] for line in every) / sum(line["time/step"] for line in every) for name in TIMES
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, help="the folder of a finished experiment")
    parser.add_argument("--pair", default="word_problems")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    experiment = json.loads((given.experiment / "experiment.json").read_text())
    [*seeds] = sorted(
        int(folder.name.removeprefix("seed-")) for folder in (given.experiment / given.pair).glob("seed-*")
    )
    first = given.experiment / given.pair / f"seed-{seeds[0]}"
    tokenizer = AutoTokenizer.from_pretrained(first / "pair" / "senior")
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    arms = {}
    for arm in experiment["arms"]:
        there = {seed: given.experiment / given.pair / f"seed-{seed}" / arm["name"] for seed in seeds}
        there = {seed: run for seed, run in there.items() if (run / "samples.jsonl").is_file()}
        if there:
            arms[arm["name"]] = {"title": arm["title"]} | of_arm([*there.values()], [*there], texts)
    result = {"arms": arms, "command": experiment["command"], **about()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(arms, indent=1))


if __name__ == "__main__":
    main()
