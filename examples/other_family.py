"""Tandem GRPO beside a junior of another family, on word problems: what the senior learns, and what the junior reads.

    tandemrl model smollm2
    tandemrl model warm-start --model google/gemma-3-270m-it --data synthetic:word_problems:train --steps 60 \
        --out runs/gemma-warm
    python examples/other_family.py runs/smollm2-pair/senior runs/gemma-warm --json benchmarks/results/other_family.json

Arguments: folders of the senior and of a junior with other tokens and a chat template. Evaluates both before and after
training, with intervals over problems, and with --control a senior that was trained otherwise. An hour to an hour and a
half of one core; the same command goes on where it was killed.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import tandemrl
from tandemrl.evals.compare import compare
from tandemrl.files import read_json_lines, versions, write_text

SETTINGS = [
    *("selection.strategy=before_word", "selection.max_untranslatable=0.1", "rollout.max_rows=128"),
    *("train.steps=40", "train.save_every=2", "data.eval=[synthetic:word_problems:heldout:128]"),
]
SHOWN = {
    "pass-at-k": ("pass@1", "length"),
    "tandem": ("pass@1", "senior_share", "untranslatable"),
    "legibility": ("cross_entropy_per_byte",),
}


def measured(config: tandemrl.Config, model: Path, out: Path) -> dict[str, dict[str, float]]:
    """The metrics of ``SHOWN`` on held-out problems, one sample each; intervals are over problems."""
    config = replace(config, eval=replace(config.eval, samples=1, k=(1,)))
    phases = tandemrl.evaluate(config, model=model, out=out, phases=list(SHOWN))
    metrics = {phase: result["metrics"]["macro"] for phase, result in phases.items()}
    return {
        phase: {name: value for name, value in metrics[phase].items() if name.partition("/")[0] in names}
        for phase, names in SHOWN.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("senior", type=Path)
    parser.add_argument("junior", type=Path)
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. train.steps=4")
    parser.add_argument("--control", type=Path, help="another senior to evaluate with the junior, e.g. of plain GRPO")
    parser.add_argument("--out", type=Path, default=Path("runs/other-family"), help="where everything goes")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    args = parser.parse_intermixed_args()
    models = [f"model.senior={args.senior}", f"model.junior={args.junior}"]
    settings = [*SETTINGS, *models, f"output_dir={args.out}/run", *args.overrides]
    config = tandemrl.load("smollm2", settings)
    before = measured(config, args.senior, args.out / "before")
    print(f"before: {json.dumps(before)}", flush=True)
    tandemrl.train(config, quiet=True)
    lines = [line for _, line in read_json_lines(args.out / "run" / "metrics.jsonl")]
    after = measured(config, args.out / "run" / "hf" / f"step_{config.train.steps}", args.out / "after")
    print(f"after: {json.dumps(after)}", flush=True)
    evaluated, others = {"before": before, "after": after}, {"differences": "before"}
    if args.control is not None:
        evaluated["control"], others["differences_to_control"] = (
            measured(config, args.control, args.out / "control"),
            "control",
        )
        print(f"control: {json.dumps(evaluated['control'])}", flush=True)
    differences = {
        name: {
            f"{each.phase}/{each.metric}": each.difference._asdict()
            for each in compare(args.out / "after", args.out / other)
        }
        for name, other in others.items()
    }
    result: dict[str, Any] = {
        "schema": 1,
        "models": [args.senior.name, args.junior.name],
        "settings": [*SETTINGS, *args.overrides],
        "versions": versions(),
        **evaluated,
        **differences,
        "training": {
            name: [line[name] for line in lines]
            for name in ("reward/mean", "tandem/handovers", "tandem/senior_frac", "tandem/untranslatable", "time/step")
        },
    }
    for file in (args.out / "other_family.json", args.json):
        if file is not None:
            write_text(file, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
