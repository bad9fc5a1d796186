"""Train a tiny senior with a frozen junior, beside a plain-GRPO control, and see both in numbers. `make quickstart`.

Builds the tiny pair, trains both for the same number of steps, evaluates base, control and tandem on the same 512
held-out problems, and writes the table to RUNS/quickstart/report.md. Every part is skipped if it is already there.
"""

import argparse
import time
from pathlib import Path

import torch

from tandemrl.config import EvalConfig, load
from tandemrl.evals import PHASES, run_phase
from tandemrl.report import learning_curves, summary_table, write_report
from tandemrl.tiny import build_tiny_pair
from tandemrl.train import train

WHAT_IT_SHOWS = (
    "The plain pair shows that tandem training works as training: the senior learns although the junior writes half of "
    "the words. It cannot show the paper's claims on handoff and legibility: here the junior understands the senior "
    "before training already, and the senior has no way to repair a junior's slip, so tandem and GRPO end up alike."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides for both runs, e.g. train.steps=20")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=0, help="of the pair and of both training runs")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems to evaluate on")
    parser.add_argument("--samples", type=int, default=8, help="samples per problem")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the pair is tiny: a second thread only waits for the first

    started = time.perf_counter()
    pair, out = args.runs / "tiny", args.runs / "quickstart"
    if args.seed:
        pair, out = args.runs / f"tiny-{args.seed}", args.runs / f"quickstart-{args.seed}"
    print(f"== tiny pair: {pair}", flush=True)
    build_tiny_pair(pair, seed=args.seed)

    models = {"base": pair / "senior"}
    for arm, extra in {"tandem": [], "grpo": ["selection.strategy=solo", "model.junior=null"]}.items():
        print(f"== training: {arm}", flush=True)
        paths = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}/{arm}"]
        config = load("quickstart.yaml", [*paths, f"train.seed={args.seed}", *extra, *args.overrides])
        train(config)
        models[arm] = out / arm / "hf" / f"step_{config.train.steps}"
    trained = time.perf_counter() - started

    results: dict[str, dict[str, dict]] = {}
    settings = EvalConfig(samples=args.samples, k=tuple(k for k in (1, 2, 4, 8) if k <= args.samples))
    for arm, title in (("base", "base"), ("grpo", "GRPO (control)"), ("tandem", "tandem GRPO")):
        for phase in PHASES:
            print(f"== evaluating: {title}, {phase}", flush=True)
            results.setdefault(title, {})[phase] = run_phase(
                phase,
                model=str(models[arm]),
                junior=str(pair / "junior"),
                data=[f"synthetic:plain:heldout:{args.problems}"],
                eval=settings,
                out=out / "eval" / arm,
            )
    table = summary_table(results)
    curves = learning_curves({arm: out / arm / "metrics.jsonl" for arm in ("grpo", "tandem")})
    setting = f"{args.problems} held-out problems, {args.samples} samples each, temperature 1, 95 % intervals."
    write_report(out / "report.md", "Quickstart: the plain tiny pair", [table, setting, WHAT_IT_SHOWS, curves])
    print(f"\n{table}\n{setting}\n{WHAT_IT_SHOWS}\n\n{curves}")
    print(f"pair and training {trained:.0f} s, everything {time.perf_counter() - started:.0f} s")
    print(f"report: {out / 'report.md'}")


if __name__ == "__main__":
    main()
