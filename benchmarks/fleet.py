"""Seconds per training step with a rollout worker on Ray, k steps ahead and not, beside what the plan predicts.

    OMP_NUM_THREADS=1 python benchmarks/fleet.py --cores 0 1 --out benchmarks/results/fleet.json

The trainer has one core and the worker the other, so nothing else should run on the machine. First the size of the
units is chosen with which generating the rollouts of a step takes as long as everything else in it: the smaller they
are, the longer the rollouts take. Then in each round a run with train.async_steps=0 and one with each --ahead follow
each other, with the same keys. From the first of them the plan gets its times (`train --dry-run --times-of`) and
predicts all steps. Counted are the steps after --warmup, without the last ones, beside which nothing is generated.

Prints the medians over rounds with 90 % intervals: seconds per step, their ratio to those with async_steps=0, and the
plan's prediction relative to what was measured. --out also has every step.
"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from _common import TINY_PAIR, about, over_rounds, ratios, tiny_senior

from tandemrl.apps.planning.fleet import measured, simulate, units_of
from tandemrl.config import Config, load, to_yaml
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.factory import torch_engine
from tandemrl.training.loop import train


def main() -> None:
    options = parser().parse_args()
    if options.config is not None:  # one run, in a process of its own
        pin(options.cores[0])
        train(load(options.config), quiet=True)
        return
    tiny_senior()
    with tempfile.TemporaryDirectory() as folder:
        result = compare(options, Path(folder))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "runs"}))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="of the trainer, and of the worker")
    p.add_argument("--ahead", type=int, nargs="+", default=[2], help="train.async_steps, beside 0")
    p.add_argument("--rounds", type=int, default=5, help="an interval needs at least 5")
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--warmup", type=int, default=4, help="first steps left out of the statistics")
    p.add_argument("--prompts", type=int, default=16, help="per step")
    p.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--unit-groups", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="the sizes to choose from")
    p.add_argument("--out", type=Path)
    p.add_argument("--config", help=argparse.SUPPRESS)
    return p


# --------------------------------------------------------------------------------------------------------------- a core


def pin(core: int) -> None:
    """Keep all threads of this process on a core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})


def pinned_engine(config: Any, senior: Any, junior: Any, tokenizer: Any, core: int) -> Engine:
    """The torch engine. The process that it is made in stays on a core."""
    pin(core)
    return torch_engine(config, senior, junior, tokenizer)


# --------------------------------------------------------------------------------------------------------------- a run


def run(
    options: argparse.Namespace, folder: Path, unit_groups: int, **keys: int
) -> tuple[Config, list[dict[str, Any]]]:
    """A run in processes of its own, and its steps."""
    values = {
        "model.senior": TINY_PAIR / "senior",
        "model.junior": TINY_PAIR / "junior",
        "output_dir": folder,
        "data.train": "synthetic:plain:train:4096",
        "data.eval": "[]",
        "train.eval_every": 0,
        "data.max_prompt_tokens": 128,
        "rollout.ray": "local",
        "rollout.engine": "fleet:pinned_engine",
        "rollout.engine_parameters": f"{{core: {options.cores[1 if keys.get('rollout__workers') else 0]}}}",
        "rollout.unit_groups": unit_groups,
        "rollout.group_size": options.group_size,
        "rollout.max_tokens": options.max_tokens,
        "train.threads": 1,
        "train.steps": options.steps,
        "train.prompts_per_step": options.prompts,
        "train.save_every": options.steps,
        "train.lr": 1e-6,
        **{f"{section}.{key}": value for name, value in keys.items() for section, key in [name.split("__")]},
    }
    folder.mkdir()
    config = load(None, [f"{key}={value}" for key, value in values.items()])
    file = folder / "asked.yaml"
    file.write_text(to_yaml(config))
    command = [sys.executable, __file__, "--config", str(file), "--cores", *map(str, options.cores)]
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": here})  # where workers find this module
    return config, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def balanced(options: argparse.Namespace, folder: Path) -> tuple[int, dict[int, float]]:
    """The size of the units with which rollouts take most nearly as long as the rest of a step, and for each size how
    much longer they take."""
    longer: dict[int, float] = {}
    for size in options.unit_groups:
        _, steps = run(options, folder / f"units-{size}", size, train__steps=max(4, options.warmup))
        counted = steps[1:]
        rollouts = statistics.median(step["time/rollout"] for step in counted)
        longer[size] = rollouts / statistics.median(step["time/step"] - step["time/rollout"] for step in counted)
        print(f"units of {size}: rollouts take {longer[size]:.2f} times as long as the rest", file=sys.stderr)
    return min(longer, key=lambda size: abs(math.log(longer[size]))), longer


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All runs, and what they came to."""
    size, longer = balanced(options, folder)
    seconds: dict[int, list[float]] = {ahead: [] for ahead in (0, *options.ahead)}
    planned: dict[int, list[float]] = {ahead: [] for ahead in seconds}
    runs = []
    for number in range(options.rounds):
        source = folder / f"{number}-0"
        for ahead in seconds:
            config, steps = run(
                options, folder / f"{number}-{ahead}", size, rollout__workers=1, train__async_steps=ahead
            )
            shape = {"workers": 1, "units": units_of(config), "ahead": ahead}
            planned[ahead].append(simulate(measured(source, config), **shape).step_s)
            counted = steps[options.warmup : len(steps) - ahead]
            seconds[ahead].append(statistics.fmean(step["time/step"] for step in counted))
            print(
                f"round {number}, async_steps={ahead}: {seconds[ahead][-1]:.3f} s per step, planned "
                f"{planned[ahead][-1]:.3f} s",
                file=sys.stderr,
            )
            kept = ("time/", "fleet/", "weights/")
            lines = [{k: v for k, v in step.items() if k.startswith(kept)} for step in steps]
            runs.append({"round": number, "async_steps": ahead, "planned_s": planned[ahead][-1], "steps": lines})
    named = {f"async_steps={ahead}": values for ahead, values in seconds.items()}
    plans = {f"planned {name}": planned[ahead] for name, ahead in zip(named, planned, strict=True)}
    return about() | {
        "benchmark": "fleet",
        "ray": version("ray"),
        "command": shlex.join(["python", *sys.argv]),
        "unit_groups": size,
        "rollouts_to_rest": {size: round(value, 3) for size, value in longer.items()},
        "s_per_step": {name: over_rounds(values) for name, values in named.items()},
        "ratios": ratios(named, [(name, "async_steps=0") for name in [*named][1:]]),
        "planned_to_measured": ratios(named | plans, [(f"planned {name}", name) for name in named]),
        "load1": round(os.getloadavg()[0], 2),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
