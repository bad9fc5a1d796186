"""Do labels of legibility hold with a model as reader, and from how many draws on?

Right solutions of word problems are worded plainly, in a jargon that the reader never saw, and with the answer said
first. They are labelled by the junior of the packaged jargon pair, which itself errs: alone it solves less than half.
One run says what at most 32, 64, … draws would give.

    python benchmarks/labels.py --out benchmarks/results/labels.json
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import Config, DataConfig, EvalConfig, RewardConfig
from tandemrl.evals import Sample, Stored, evaluate, read_samples
from tandemrl.evals.transfer import ALONE, LABELS, LOOKS, TEXT, label_of, unsettled
from tandemrl.tasks.generated.synthetic import Numbers, Problem, generate, jargon_solution, solution

EXPECTED = {"plain": "legible", "jargon": "illegible", "leak": "answer_leaked"}
"""The kinds of texts, and the label of each."""
DRAWS = (32, 64, 128, 256)


def planted(kind: str, seed: int, problems: int) -> list[dict[str, str]]:
    """Problems of the held-out split, each with a right response of a kind."""
    rng, lines = random.Random(f"labels/{kind}/{seed}"), []
    for row in generate("jargon", "heldout", problems, seed):
        problem = Problem(Numbers(row.extra_info["start"], tuple(row.extra_info["deltas"])), "")
        plain = solution(problem, rng, about_rate=0, plain_error=0)
        wordings = {"plain": plain, "jargon": jargon_solution(problem, rng, error=0)}
        wordings["leak"] = f"The answer is {problem.numbers.answer}.\n\n{plain}"
        said = {"example_id": row.example_id, "prompt": row.messages[-1]["content"], "response": wordings[kind]}
        lines.append(said | {"ground_truth": row.ground_truth})
    return lines


def read(pair: Path, kind: str, seed: int, problems: int, draws: int, folder: Path) -> list[Sample]:
    """What the junior of a pair makes of planted texts."""
    file = folder / f"{kind}-{seed}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in planted(kind, seed, problems)))
    config = Config(
        data=DataConfig(eval=(str(file),)),
        eval=EvalConfig(samples=1, k=(1,), bootstrap=0, readers=(str(pair / "junior"),), draws=draws),
        reward=RewardConfig(scorers={"*": "boxed"}),
    )
    out = folder / f"{kind}-{seed}"
    evaluate(config, model=Stored(file, kind), out=out, phases=("transfer",))
    return read_samples(out / "transfer.samples.jsonl")


def with_fewer(draws: Sequence[Sequence[bool]], most: int) -> tuple[str, int]:
    """The label that at most so many draws give, and how many decide it."""
    alone, after = draws
    looked = 0
    for share in LOOKS:
        if unsettled(alone[:looked], after[:looked], most):
            looked = min(max(1, round(most * share)), len(alone))
    return label_of(alone[:looked], after[:looked]), looked


def measure(samples: Sequence[Sample], draws: int) -> dict[str, object]:
    """The shares of labels by the largest number of draws, how many were needed, and how often the reader is right."""
    texts = [each.draws for each in samples if each.given == TEXT and each.draws is not None]
    found: dict[str, object] = {"texts": len(texts)}
    for most in (each for each in DRAWS if each <= draws):
        labels, looked = zip(*(with_fewer(draws, most) for draws in texts), strict=True)
        found[str(most)] = {label: labels.count(label) / len(labels) for label in LABELS} | {
            "draws": float(np.mean(looked))
        }
    for given in (ALONE, "free/75"):
        found[given] = float(np.mean([bool(each.correct) for each in samples if each.given == given]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--draws", type=int, choices=DRAWS, default=DRAWS[-1])
    parser.add_argument("--kinds", nargs="+", choices=EXPECTED, default=[*EXPECTED])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    content: dict[str, object] = {"problems": arguments.problems, "seeds": arguments.seeds, "expected": EXPECTED}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_pair(folder / "pair", pair="jargon")
        for kind in arguments.kinds:
            by_seed = [
                read(folder / "pair", kind, seed, arguments.problems, arguments.draws, folder)
                for seed in range(arguments.seeds)
            ]
            content[kind] = {
                "all": measure([*chain(*by_seed)], arguments.draws),
                "by_seed": [measure(each, arguments.draws) for each in by_seed],
            }
            print(kind, json.dumps(content[kind]["all"]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
