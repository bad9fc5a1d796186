"""Does the handover effect find planted places, better than the junior's surprisal does?

For each problem of the jargon pair a right solution is worded three times up to a step: plainly; in jargon; and in
jargon but for the last step before the place, which is plain. There the junior takes over. It can go on from the first
and the third, since the number that it needs stands there, and not from the second (positive). The steps before the
place are what both measures are told: the effect by its branches, the surprisal by the step before the place.

Power: a reward of 0 or 1 has a standard error of at most .5 / sqrt(m) per branch and .7 / sqrt(m) per difference, .18
for m = 16: a place where the junior fails (effect about -.8) is 4.5 of them away from 0.

    python benchmarks/handover_effect.py --out benchmarks/results/handover_effect.json
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import numpy as np
from scipy.stats import rankdata

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import RewardConfig, RolloutConfig
from tandemrl.data.rows import Row, encode_prompts
from tandemrl.evals import Sample, grade
from tandemrl.evals.handover import handover_effects, of_all_places, unit_of
from tandemrl.evals.protocol import PROFILES
from tandemrl.evals.reading import by_junior, read_tokens
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.selection.draws import request_key
from tandemrl.tasks.generated.synthetic import Numbers, Problem, generate, jargon_solution, solution

KINDS = ("plain", "jargon", "plain again")


def planted(row: Row, rng: random.Random) -> tuple[int, dict[str, str]]:
    """The number of the last step before the place, and the solution of a row in the three wordings."""
    told = row.extra_info
    problem = Problem(Numbers(told["start"], tuple(told["deltas"])), "")
    plain = solution(problem, rng, about_rate=0, plain_error=0).split("\n\n")
    jargon = jargon_solution(problem, rng, error=0).split("\n\n")
    step = rng.randrange(1, len(told["deltas"]))
    begun = plain[: step + 1], jargon[: step + 1], [*jargon[:step], plain[step]]
    texts = ("\n\n".join([*lines, *plain[step + 1 :]]) for lines in begun)
    return step, dict(zip(KINDS, texts, strict=True))


def auroc(positive: list[float], negative: list[float]) -> float:
    """The probability that a positive scores above a negative; ties count half."""
    ranks = rankdata([*positive, *negative])[: len(positive)].sum()
    return float((ranks - len(positive) * (len(positive) + 1) / 2) / (len(positive) * len(negative)))


def measure(pair: Path, seed: int, problems: int, branches: int, unit: str = "step") -> dict[str, object]:
    """One seed: its problems, wordings and branches."""
    rng, rows = random.Random(f"planted/{seed}"), generate("jargon", "heldout", problems, seed)
    tokenizer = load_tokenizer(pair / "senior")
    prompts, _ = encode_prompts(rows, tokenizer, max_prompt_tokens=512)
    samples, steps = [], []
    for problem, row in enumerate(rows):
        step, texts = planted(row, rng)
        for number, text in enumerate(texts.values()):
            tokens, key = tokenizer.encode(text, add_special_tokens=False), request_key(seed, 0, problem, 0)
            samples.append(
                Sample(
                    problem, row.example_id, row.data_source, "solo", number, key, text, tokens, len(tokens),
                    f"S{len(tokens)}", 1, 1.0, "stop",
                )
            )  # fmt: skip
            steps.append(step)
    cut = unit_of(unit, tokenizer)
    places = {i: [cut.places(one.tokens)[steps[i] + 1]] for i, one in enumerate(samples)}
    senior, junior = (load_model(str(pair / who)) for who in ("senior", "junior"))
    engine = make_engine(
        RolloutConfig(),
        ModelSource(str(pair / "senior"), lambda: senior),
        ModelSource(str(pair / "junior"), lambda: junior),
        tokenizer,
    )
    with Scorer(RewardConfig()) as scorer:
        found = handover_effects(
            samples,
            prompts,
            cut,
            engine=engine,
            tokenizer=tokenizer,
            profile=PROFILES["tiny"],
            branches=branches,
            grade=lambda some: grade(some, prompts, scorer),
            places=places,
            surprisals={i: of["cross_entropy"] for i, of in read_tokens(samples, prompts, [junior], by_junior())},
        )
    effects, surprisals = {kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}
    for one in found:
        [place] = one.places
        effects[KINDS[one.sample]].append(-place["effect"])
        surprisals[KINDS[one.sample]].append(place["surprisal"])
    figures: dict[str, object] = {"seed": seed}
    for name, by_kind in (("effect", effects), ("surprisal", surprisals)):
        positive = by_kind["jargon"]
        figures[f"{name} AUROC"] = auroc(positive, by_kind[KINDS[0]] + by_kind[KINDS[2]])
        figures |= {f"{name} AUROC against {kind}": auroc(positive, by_kind[kind]) for kind in (KINDS[0], KINDS[2])}
        figures |= {f"mean {name}, {kind}": float(np.mean(values)) for kind, values in by_kind.items()}
    return figures | of_all_places(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--unit", choices=("step", "rest"), default="step")
    parser.add_argument("--pair", type=Path, help="a jargon pair; default: the packaged one")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pair = arguments.pair or Path(folder) / "pair"
        if arguments.pair is None:
            build_tiny_pair(pair, pair="jargon")
        rows = []
        for seed in range(arguments.seeds):
            rows.append(measure(pair, seed, arguments.problems, arguments.branches, arguments.unit))
            print(json.dumps(rows[-1]), flush=True)
    names = [name for name in rows[0] if name != "seed"]
    means = {name: float(np.mean([row[name] for row in rows])) for name in names}
    for name, mean in means.items():
        print(f"{name}: {mean:.3f}")
    if arguments.out is not None:
        content = {
            "problems": arguments.problems,
            "branches": arguments.branches,
            "unit": arguments.unit,
            "seeds": rows,
            "means": means,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
