"""Train a tiny senior with a frozen junior, beside a plain-GRPO control, and see both in numbers. `make quickstart`.

Takes the jargon pair that comes with the library, or trains one: a senior that answers better in made-up words than in
plain ones, and a junior that has never seen them. Trains two copies of the senior for the same number of steps, one
alone and one in tandem, and evaluates both and the model before training on the same held-out problems. A killed run
goes on; what is finished is kept.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from tandemrl import EXPERIMENTS, build_tiny_pair, run_experiment
from tandemrl.cli.heartbeat import heartbeat, last_written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides for both runs, e.g. train.steps=20")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="where everything goes")
    parser.add_argument("--seed", type=int, default=0, help="of the pair and of both training runs")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems to evaluate on")
    parser.add_argument("--samples", type=int, default=4, help="samples per problem")
    parser.add_argument("--train", action="store_true", help="train the pair here, even if the library brings it")
    args = parser.parse_args()
    quickstart = EXPERIMENTS["quickstart"]
    experiment = replace(
        quickstart,
        seeds=(args.seed,),
        overrides=(*quickstart.overrides, *args.overrides),
        problems=args.problems,
        samples=args.samples,
    )
    with heartbeat(lambda line: print(line, flush=True), lambda: last_written(args.out)):
        if args.train:
            build_tiny_pair(
                args.out / "jargon" / f"seed-{args.seed}" / "pair", pair="jargon", seed=args.seed, train=True
            )
        run_experiment(experiment, args.out, command=shlex.join(["python", *sys.argv]))
    print(f"\nreport: {args.out}/report.html")


if __name__ == "__main__":
    main()
