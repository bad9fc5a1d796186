"""A real Qwen on GSM8K: GRPO and self-paired tandem GRPO for the same number of steps, side by side on one GPU.

    tandemrl data build gsm8k --out data/gsm8k
    python benchmarks/gsm8k_qwen.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --data data/gsm8k --seconds 420
    python benchmarks/gsm8k_qwen.py --collect --work runs/gsm8k_qwen          # the result again, from the files there

It only starts `tandemrl train` and `tandemrl eval`, and every command is in the result. All runs begin at once. When
the fastest run is about to reach the last step that the slowest one can make in its time, this step becomes the last
one of all: each run is stopped by SIGTERM in that step, which it finishes and saves. Then each model answers held-out
problems. Results go to `--out`; beside it a .tar.xz for each seed and one for the rest, from which `--collect` works
elsewhere.

The reward is whether \\boxed{} holds the right number: this model answers so, and wrote none of the published "####" in
12 of 12 responses (CPU, temperature 0.7; 2 were right, 210 to 460 tokens long), so the published reward would be 0.

The committed result was made with train.lr=5e-6 and two updates a step, which made both arms worse; this is what was
changed after it.

What the result has to show (BARS, written before the run):
- gain: solo pass@1 of GRPO minus that before training; the interval excludes 0.
- solo: tandem GRPO is not inferior to GRPO by more than 5 points of solo pass@1 (lower end above -0.05).
- handoff by steps and by words: tandem GRPO minus GRPO, with intervals; both against the model before training.
- truncation of every phase.
With one seed there is no verdict between the arms: intervals over problems say nothing about other seeds.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
ARMS = {"grpo": ("selection.strategy=solo",), "tandem": ()}
CONTRASTS = (("grpo", "base"), ("tandem", "base"), ("tandem", "grpo"))
MARGIN = 0.05
LATE_S = 60
"""How long after its time a run is killed."""
BARS = {
    "gain": "solo pass@1, grpo - base: the interval excludes 0",
    "solo": f"solo pass@1, tandem - grpo: the lower end is above -{MARGIN}",
    "handoff": "pass@1 by steps (handoff) and by words (tandem): differences with intervals",
    "truncation": "truncation_rate of every phase",
    "seeds": "with one seed no verdict between the arms",
}
KEPT = ("reward", "acc", "entropy", "grad_norm", "tokens", "mismatch", "time/", "senior", "truncat", "kl", "groups")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="the senior, and its own junior")
    p.add_argument("--data", type=Path, default=Path("data/gsm8k"), help="train.parquet and test.parquet")
    p.add_argument("--work", type=Path, default=Path("runs/gsm8k_qwen"), help="runs and evaluations; must not exist")
    p.add_argument("--out", type=Path, default=HERE / "results" / "gpu_day" / "gsm8k_qwen.json")
    p.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    p.add_argument("--seeds", nargs="+", type=int, default=[0])
    p.add_argument("--steps", type=int, default=200, help="at most")
    p.add_argument("--seconds", type=float, default=420, help="for everything")
    p.add_argument("--eval-seconds", type=float, default=130, help="of these, for the end of training and what follows")
    p.add_argument("--solo", type=int, default=1319, help="problems of the senior alone")
    p.add_argument("--together", type=int, default=512, help="problems by words, and by steps")
    p.add_argument("--at-once", type=int, default=12, help="evaluations at once")
    p.add_argument("--device", default="cuda")
    p.add_argument("--collect", action="store_true", help="only write the result, from the files in --work")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config keys of every run and evaluation")
    return p


def common(o: argparse.Namespace) -> list[str]:
    """`gsm8k_tandem` but for size, as both training and evaluation get it."""
    return [
        *("--config", "gsm8k_tandem", f"model.senior={o.model}", f"model.device={o.device}"),
        *(f"data.train=[{o.data}/train.parquet]", "data.eval=[]", "data.max_prompt_tokens=320"),
        *("rollout.temperature=1.0", "rollout.max_tokens=400", "eval.max_tokens=400"),
        "model.gradient_checkpointing=false",
        "reward.scorers.openai/gsm8k=math",  # it never writes "####", which the published reward asks for
        *(
            "train.lr=1e-6",
            "train.mini_batch_prompts=16",
            "train.eval_every=0",
            "train.eval_first=false",
            "train.save_every=1000000",
        ),
        *("train.keep_checkpoints=1", f"train.steps={o.steps}", *o.overrides),
    ]


def train_command(o: argparse.Namespace, arm: str, seed: int) -> list[str]:
    own = [*ARMS[arm], f"train.seed={seed}", f"output_dir={o.work}/seed-{seed}/{arm}"]
    return [sys.executable, "-m", "tandemrl", "train", *common(o), *own]


def eval_command(o: argparse.Namespace, phase: str, model: Path | str, out: Path) -> list[str]:
    """The senior alone; by words (tandem); or by steps (handoff, either author first)."""
    limit, rows = (o.solo, 512) if phase == "pass-at-k" else (o.together, 256)
    own = ["--model", str(model), "--data", f"{o.data}/test.parquet", "--samples", "1"]
    junior = [] if phase == "pass-at-k" else ["--junior", str(o.model)]
    where = ["--limit", str(limit), "--out", str(out), f"rollout.max_rows={rows}"]
    return [sys.executable, "-m", "tandemrl", "eval", phase, *common(o), *own, *junior, *where]


PHASES = ("pass-at-k", "handoff", "tandem")


class Day:
    """The processes of one run of this script, their commands and when they began and ended."""

    def __init__(self, o: argparse.Namespace) -> None:
        self.o, self.start = o, time.monotonic()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.log: dict[str, dict[str, Any]] = {}

    def now(self) -> float:
        return time.monotonic() - self.start

    def launch(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        file = self.o.work / f"{name.replace('/', '_')}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "HF_HUB_OFFLINE": "1"}
        with open(file, "wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.processes[name] = process
        self.log[name] = {"command": ["tandemrl", *command[3:]], "began_s": round(self.now(), 1)}
        return process

    def wait(self, name: str, until: float) -> int | None:
        """The exit code of a process, which is killed at ``until``."""
        process = self.processes[name]
        try:
            process.wait(max(0.0, until - self.now()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.log[name]["killed"] = True
        self.log[name] |= {"ended_s": round(self.now(), 1), "exit_code": process.returncode}
        if process.returncode not in (0, 128 + signal.SIGTERM):
            text = (self.o.work / f"{name.replace('/', '_')}.log").read_text(errors="replace")
            self.log[name]["end_of_output"] = text[-3000:]
            print(f"{self.now():.0f} s: {name} failed: {text[-1500:]}", flush=True)
        return process.returncode

    def end_all(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl."""
    file = run / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def train_all(day: Day, names: Mapping[str, Path]) -> Iterator[str]:
    """Stop all runs in the same step, and yield the name of each run that has ended."""
    o, until = day.o, day.o.seconds - day.o.eval_seconds
    ended: dict[str, list[float]] = {name: [] for name in names}  # when each step was seen to have ended
    seconds: dict[str, list[float]] = {}  # of each step
    stopped, last, told = set[str](), None, 0.0
    while ended:
        for name in list(ended):
            seconds[name] = [line["time/step"] for line in steps_of(names[name])]
            ended[name] += [day.now()] * (len(seconds[name]) - len(ended[name]))
            process = day.processes[name]
            if process.poll() is not None:
                del ended[name], seconds[name]
                yield name
            elif day.now() > until + LATE_S:
                os.killpg(process.pid, signal.SIGKILL)
            elif name not in stopped and len(ended[name]) + 1 == last and day.now() > ended[name][-1] + 1:
                os.kill(process.pid, signal.SIGTERM)  # it is in the last step
                stopped.add(name)
        if last is None and ended and all(len(times) >= 3 for times in ended.values()):
            last = last_step(ended, seconds, day.now(), until, o.steps)
            if last is not None:
                print(f"{day.now():.0f} s: the last step is {last}", flush=True)
        if day.now() > told + 20:
            told = day.now()
            print(f"{told:.0f} s: steps { ({name: len(times) for name, times in ended.items()}) }", flush=True)
        time.sleep(0.2)


def last_step(
    ended: Mapping[str, Sequence[float]], seconds: Mapping[str, Sequence[float]], now: float, until: float, most: int
) -> int | None:
    """The last step that every run can make by ``until``, once the fastest is two steps before it; else None.

    Args:
        ended: when each step of each run ended, in seconds.
        seconds: how long each step took.
        most: no step after this one is the last.
    """
    reached = [len(t) + int(max(0.0, until - t[-1]) / median(seconds[name][-3:])) for name, t in ended.items()]
    fastest, last = max(map(len, ended.values())), min(most, *reached)
    return max(last, fastest + 2) if last <= fastest + 2 or now > until else None


def run(o: argparse.Namespace) -> None:
    day = Day(o)
    runs = {f"seed-{seed}/{arm}": o.work / f"seed-{seed}" / arm for seed in o.seeds for arm in o.arms}
    exports: dict[str, str] = {}
    with ThreadPoolExecutor(o.at_once) as pool:

        def evaluate(name: str, model: Path | str, out: Path) -> None:
            for phase in PHASES:
                pool.submit(measure, f"{name}/{phase}", eval_command(o, phase, model, out))

        def measure(name: str, command: list[str]) -> None:
            if day.now() < o.seconds - 20:
                day.launch(name, command)
                day.wait(name, o.seconds)

        try:
            for name, (arm, seed) in zip(runs, [(arm, seed) for seed in o.seeds for arm in o.arms], strict=True):
                day.launch(name, train_command(o, arm, seed))
            evaluate("base", o.model, o.work / "base")
            for name in train_all(day, runs):
                day.wait(name, o.seconds)
                found = sorted((runs[name] / "hf").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
                if found:
                    exports[name] = found[-1].name
                    print(f"{day.now():.0f} s: {name} ended with {found[-1].name}", flush=True)
                    evaluate(name, found[-1], o.work / Path(name).parent / "eval" / Path(name).name)
            pool.shutdown(wait=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            day.end_all()
            report = {"exports": exports, "seconds": round(day.now(), 1), "processes": day.log}
            (o.work / "day.json").write_text(json.dumps(report, indent=1) + "\n")
            (o.work / "about.json").write_text(json.dumps(machine(o), indent=1) + "\n")
            pack(o, "base", [*(o.work / "base").glob("*.json*"), *o.work.glob("*.log"), *o.work.glob("*.json")])
            for home in (o.work / f"seed-{seed}" for seed in o.seeds):
                of_runs = [file for name in ("config.yaml", "metrics.jsonl") for file in home.glob(f"*/{name}")]
                pack(o, home.name, [*home.glob("eval/*/*.json*"), *of_runs])
            collect(o)


def pack(o: argparse.Namespace, name: str, files: Sequence[Path]) -> None:
    """Files beside the result, under their paths in ``--work``."""
    o.out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(o.out.parent / f"gsm8k_qwen_{name}.tar.xz", "w:xz", preset=1) as archive:
        for file in files:
            archive.add(file, file.relative_to(o.work))


def machine(o: argparse.Namespace) -> dict[str, Any]:
    import torch
    from _common import about

    cuda = o.device.startswith("cuda")
    return about() | {"vllm": _version("vllm"), "gpu": torch.cuda.get_device_name() if cuda else None}


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    for each in (name, f"{name}-cpu"):
        try:
            return version(each)
        except PackageNotFoundError:
            pass
    return None


def collect(o: argparse.Namespace) -> None:
    """Write the result, from the files in ``--work``."""
    from tandemrl.evals.compare import CompareError, compare, to_json
    from tandemrl.evals.files import read_samples

    held_out, correct = {}, {}
    places = {"base": o.work / "base"} | {
        f"{arm}/seed-{seed}": o.work / f"seed-{seed}" / "eval" / arm for seed in o.seeds for arm in o.arms
    }
    for name, place in places.items():
        for phase in PHASES:
            if (file := place / f"{phase}.json").is_file():
                held_out.setdefault(name, {})[phase] = json.loads(file.read_text())["metrics"]["macro"]
                marks: dict[str, str] = {}
                for sample in read_samples(place / f"{phase}.samples.jsonl"):
                    marks[sample.arm] = marks.get(sample.arm, "") + str(int(bool(sample.correct)))
                correct.setdefault(name, {})[phase] = marks
    contrasts = {}
    for a, b in CONTRASTS:
        seeds = [seed for seed in o.seeds if all(_of(o, arm, seed).is_dir() for arm in (a, b))]
        for chosen in [[seed] for seed in seeds] + ([seeds] if len(seeds) > 1 else []):
            label = f"{a} - {b}, seed{'s' if len(chosen) > 1 else ''} {', '.join(map(str, chosen))}"
            try:
                found = compare([_of(o, a, seed) for seed in chosen], [_of(o, b, seed) for seed in chosen])
                contrasts[label] = to_json(found)
            except CompareError as error:
                contrasts[label] = str(error)
    read = {name: json.loads((o.work / f"{name}.json").read_text()) for name in ("about", "day") if _there(o, name)}
    steps = {
        f"{arm}/seed-{seed}": [
            {key: value for key, value in line.items() if key == "step" or any(k in key for k in KEPT)}
            for line in steps_of(o.work / f"seed-{seed}" / arm)
        ]
        for seed in o.seeds
        for arm in o.arms
    }
    result = {**read.get("about", {}), "benchmark": "gsm8k_qwen", "bars": BARS, **read.get("day", {})}
    result |= {"held_out": held_out, "contrasts": contrasts, "correct": correct, "steps": steps}
    o.out.parent.mkdir(parents=True, exist_ok=True)
    o.out.write_text(json.dumps(result) + "\n")
    for label, rows in contrasts.items():
        for row in rows if isinstance(rows, list) else []:
            d = row["difference"]
            if "pass@1" in row["metric"] or "truncation" in row["metric"]:
                print(
                    f"{label}: {row['phase']} {row['metric']}: {row['a']:.3f} and {row['b']:.3f}, "
                    f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]"
                )


def _of(o: argparse.Namespace, arm: str, seed: int) -> Path:
    """The evaluation of an arm; that before training is the same for all seeds."""
    return o.work / "base" if arm == "base" else o.work / f"seed-{seed}" / "eval" / arm


def _there(o: argparse.Namespace, name: str) -> bool:
    return (o.work / f"{name}.json").is_file()


def main() -> None:
    o = parser().parse_args()
    if o.collect:
        collect(o)
    elif o.work.exists():
        raise SystemExit(f"{o.work} exists; choose another --work, or remove it")
    else:
        run(o)


if __name__ == "__main__":
    main()
