"""Solo skill of the models of a finished experiment on more samples than its evaluations of all phases have.

    python benchmarks/solo_skill.py runs/smollm2 --arms base grpo grpo_8 tandem --samples 4

An evaluation that is there is not made again. ``rows`` has pass@k of each model, ``contrasts`` the paired differences
of the pairs of arms in ``PAIRS``: over problems for each seed, over seeds for their mean.
"""

import argparse
import json
from pathlib import Path

import torch
from _common import about

from tandemrl import evals
from tandemrl.config import load
from tandemrl.evals.compare import compare, to_json

PAIRS = (
    *(("grpo", "base"), ("tandem", "base"), ("tandem_self", "base"), ("sentence", "base")),
    *(("tandem", "grpo"), ("tandem_self", "grpo"), ("sentence", "grpo"), ("tandem", "grpo_8")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, help="the folder of a finished experiment")
    parser.add_argument("--pair", default="word_problems")
    parser.add_argument("--config", default="smollm2", help="of the evaluations")
    parser.add_argument("--arms", nargs="+", default=["base", "grpo"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--step", type=int, default=12, help="of the weights")
    parser.add_argument("--evaluations", type=Path, default=Path("runs/solo"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "smollm2_solo.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    ks = sorted({1, given.samples})
    keys = [f"data.eval=[synthetic:{given.pair}:heldout]", f"eval.samples={given.samples}", f"eval.k={ks}"]
    config = load(given.config, [*keys, "train.eval_every=0"])
    seeds = sorted(int(folder.name.removeprefix("seed-")) for folder in (given.experiment / given.pair).glob("seed-*"))
    rows = []
    for seed in seeds:
        home = given.experiment / given.pair / f"seed-{seed}"
        for arm in given.arms:
            model = home / "pair" / "senior" if arm == "base" else home / arm / "hf" / f"step_{given.step}"
            out = given.evaluations / f"seed-{seed}" / arm
            macro = evals.evaluate(config, model=model, out=out, phases=["pass-at-k"])["pass-at-k"]["metrics"]["macro"]
            kept = [*(f"pass@{k}" for k in ks), "length", "truncation_rate"]
            rows.append({"seed": seed, "arm": arm} | {name: macro[name] for name in kept})
    contrasts = []
    for a, b in PAIRS:
        if {a, b} <= {*given.arms}:
            sides = ([given.evaluations / f"seed-{seed}" / arm for seed in seeds] for arm in (a, b))
            found = [each for each in to_json(compare(*sides)) if each["metric"].startswith("pass@")]
            contrasts += [{"A": a, "B": b} | each for each in found]
    pair = "" if given.pair == parser.get_default("pair") else f"--pair {given.pair} "
    asked = f"{pair}--arms {' '.join(given.arms)} --samples {given.samples}"
    command = f"python benchmarks/solo_skill.py runs/{given.experiment.name} {asked}"
    result = {"command": command, "samples": given.samples, "rows": rows, "contrasts": contrasts, **about()}
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
