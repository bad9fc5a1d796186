"""Seconds per GRPO step, solo or tandem, alone or in turn with TRL's GRPOTrainer (`peers/trl.py`, the same knobs).

    OMP_NUM_THREADS=1 python benchmarks/step_time.py --strategy word --threads 1

Prints one JSON line. A step is what `training.loop` does between two steps, without evaluation and checkpoints:
`generate` (rollouts, authors verified by replay), `reward`, `update` (pack, advantages, forward, backward, optimiser),
`sync` (weights to the engine, verified by checksum). Metrics and samples go to disk after the step, as the peer's do;
`log_s` says how long that takes. Both sides: AdamW, one optimiser step on all completions, token-mean loss, and every
completion has exactly --max-tokens tokens, unless --allow-eos lets them stop where they end. With --lengths lognormal
they are then cut, before the reward: to the same lengths in both libraries (`_common.given_lengths`).

`update_tokens_per_s` is response tokens per second of the update, the median over steps. TRL's update leaves out the
arithmetic of the loss and the padding; ours counts all that follows the reward.

With --trl-python PYTHON, an interpreter that has TRL, peer, solo and tandem are compared in --rounds rounds. In a round
each has a fresh process, and these take turns step by step, so that a machine that gets faster or slower does so for
all alike. A ratio is taken between the steps of one turn; its median over the counted turns stands for the round.
Printed are the medians over rounds with 90 % intervals, of wall and of CPU seconds; every single run goes to --out.
On one thread CPU seconds leave out what other processes took, but not that a busy neighbour slows a core down.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _common import (
    about,
    cpu_seconds,
    digit_fraction,
    given_lengths,
    over_rounds,
    prompt_texts,
    ratios,
    tiny_senior,
    wait_for_turn,
)

from tandemrl.config import Config, load
from tandemrl.data.messages import Response
from tandemrl.data.rows import Prompt, Row
from tandemrl.data.sampler import Sampler
from tandemrl.rewards.functions import Term
from tandemrl.rewards.protocol import Score
from tandemrl.rewards.scoring import Answer, Graded, Scorer
from tandemrl.rollout.engine import Completion, Engine, Request
from tandemrl.training.build import build
from tandemrl.training.loop import loop
from tandemrl.training.state import Run
from tandemrl.training.tracking import Tracker
from tandemrl.types import Rollout

PHASES = {"generate": "rollout", "reward": "score", "update": "update", "sync": "sync"}
"""Names of the phases here, as in the peer's result, and in the library's metrics."""
PEER = Path(__file__).parent / "peers" / "trl.py"


def main() -> None:
    options = parser().parse_args()
    model = options.model or tiny_senior()
    line = measure(model, options) if options.trl_python is None else compare(model, options)
    print(json.dumps(line))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="HF folder; default: the tiny pair's senior")
    p.add_argument("--strategy", choices=["solo", "word"], default="solo", help="word: p 0.5, K 32, self-paired junior")
    p.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    p.add_argument("--completions", type=int, default=32, help="completions per step")
    p.add_argument("--micro-batch", type=int, default=32, help="completions per forward and backward")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--lengths", choices=["equal", "lognormal"], default="equal", help="what completions are cut to")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=3, help="first steps left out of the statistics")
    p.add_argument("--lr", type=float, default=1e-6)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--prompts", type=int, default=64, help="distinct prompts")
    p.add_argument("--allow-eos", action="store_true", help="completions end at EOS: the work then varies")
    p.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # wait_for_turn before every step
    group = p.add_argument_group("comparison")
    group.add_argument("--trl-python", metavar="PYTHON", help="interpreter that has TRL")
    group.add_argument("--rounds", type=int, default=7, help="an interval needs at least 5")
    group.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_time.json")
    return p


# ---------------------------------------------------------------------------------------------------------- one measure


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train for ``options.steps`` steps; the result line."""
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = prepare(model, options, folder)
        init_s = time.perf_counter() - start
        start = time.perf_counter()
        wait = wait_for_turn if options.turns else lambda: None
        with Stopwatch(run.setup.config, wait) as tracker, run.setup.scorer:
            loop(run, tracker)
        train_s = time.perf_counter() - start

    steps = tracker.steps
    counted = steps[options.warmup :] or steps
    mean = {name: statistics.mean(step[name] for step in counted) for name in steps[0]}
    generated = options.completions * (mean["mean_len"] if options.allow_eos else options.max_tokens)
    return about() | {
        "strategy": options.strategy,
        "model": "tiny" if options.model is None else options.model.name,
        "params": sum(p.numel() for p in run.models.policy.parameters()),
        "dtype": options.dtype,
        "device": options.device,
        **{k: getattr(options, k) for k in ("group_size", "completions", "micro_batch", "max_tokens", "lengths")},
        "steps": options.steps,
        "warmup": options.warmup,
        "allow_eos": options.allow_eos,
        "s_per_step": round(mean["step"], 4),
        "split_s": {phase: round(mean[phase], 4) for phase in PHASES},
        "log_s": round(mean["log"], 4),
        "s_per_step_median": round(statistics.median(step["step"] for step in counted), 4),
        "s_per_step_all": [round(step["step"], 4) for step in steps],
        "cpu_s_per_step_all": [round(step["step"] * step["cpu"], 4) for step in steps],
        "cores_used": round(mean["cpu"], 2),
        "cores_others": round(mean["others"], 2),
        "gen_tokens_per_s": round(generated / mean["generate"], 1),
        "mean_len": round(mean["mean_len"], 1),
        "update_tokens_per_s": round(
            statistics.median(options.completions * step["mean_len"] / step["update"] for step in counted), 1
        ),
        "init_s": round(init_s, 2),
        "train_s": round(train_s, 2),
        "reward_last": steps[-1]["reward_mean"],
        "mismatch_last": steps[-1]["mismatch"],
        "senior_frac": round(mean["senior_frac"], 3),
        "load1": round(os.getloadavg()[0], 2),
    }


def prepare(model: Path, options: argparse.Namespace, folder: str) -> Run:
    """A run as `tandemrl train` builds it, but with plain prompts, a trivial reward, and EOS as asked."""
    texts = prompt_texts(options.prompts)
    config = load(
        overrides=[
            f"model.senior={model}",
            f"model.dtype={options.dtype}",
            f"model.device={options.device}",
            f"rollout.group_size={options.group_size}",
            f"rollout.max_tokens={options.max_tokens}",
            f"rollout.max_rows={options.completions}",
            f"selection.strategy={options.strategy}",
            f"train.steps={options.steps}",
            f"train.seed={options.seed}",
            f"train.lr={options.lr}",
            "train.weight_decay=0",
            f"train.prompts_per_step={options.completions // options.group_size}",
            "train.eval_every=0",
            f"output_dir={folder}",
        ]
    )
    setup, models, progress = build(config)
    prompts = [
        Prompt(
            Row(f"fox/{i}", ({"role": "user", "content": text},), "fox", "", {}), tuple(setup.tokenizer.encode(text))
        )
        for i, text in enumerate(texts)
    ]
    longest = max(len(prompt.tokens) for prompt in prompts) + options.max_tokens
    train = replace(config.train, tokens_per_micro_batch=options.micro_batch * longest)
    setup = replace(
        setup,
        config=replace(config, train=train),
        prompts=prompts,
        scorer=DigitScorer(config.reward),
        sampling=replace(setup.sampling, ignore_eos=not options.allow_eos),
    )
    progress.sampler = Sampler(len(prompts), seed=options.seed)
    engine = models.engine if options.lengths == "equal" else Cut(models.engine, options)
    return Run(setup, replace(models, engine=engine), progress)


class Cut:
    """An engine whose completions are cut to given lengths; everything else is the inner engine's."""

    def __init__(self, inner: Engine, options: argparse.Namespace) -> None:
        self.inner, self.options = inner, options
        self.step = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def generate(self, requests: Sequence[Request], **kwargs: Any) -> list[list[Completion]]:
        o = self.options
        lengths = iter(given_lengths(o.lengths, o.completions, o.max_tokens, seed=o.seed, step=self.step))
        self.step += 1
        return [[shorter(c, next(lengths)) for c in group] for group in self.inner.generate(requests, **kwargs)]


def shorter(completion: Completion, length: int) -> Completion:
    names = ("tokens", "author", "behaviour_logprobs")
    return replace(completion, **{name: getattr(completion, name)[:length] for name in names})


class DigitScorer(Scorer):
    """Fraction of digits in the text."""

    def graded(self, items: Sequence[Answer], *_: object, **__: object) -> list[Graded]:
        return [Graded(Score(digit_fraction(Response.of(text).text), {}, None)) for _, text in items]

    def terms_of(self, row: Row) -> tuple[Term, ...]:
        return ()


class Stopwatch(Tracker):
    """Times the steps of the library's own loop, each from the start of its rollouts to the first thing it records."""

    def __init__(self, config: Config, wait: Callable[[], None]) -> None:
        super().__init__(config, quiet=True)
        self.wait = wait
        self.steps: list[dict[str, float]] = []
        self.waited = 0.0
        self.begin = self.end = (0.0, 0.0, 0.0)

    def rollout_progress(self, step: int, total_rows: int) -> Callable[[int], None]:
        arrived = time.perf_counter()
        self.wait()
        self.waited = time.perf_counter() - arrived
        self.begin = (time.perf_counter(), *cpu_seconds())
        return super().rollout_progress(step, total_rows)

    def samples(self, step: int, rollouts: Sequence[Rollout], tokenizer: Any) -> int:
        self.end = (time.perf_counter(), *cpu_seconds())
        return super().samples(step, rollouts, tokenizer)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        wall, used, busy = (end - begin for begin, end in zip(self.begin, self.end, strict=True))
        self.steps.append(
            {phase: metrics[f"time/{name}"] for phase, name in PHASES.items()}
            | {
                "generate": metrics["time/rollout"] - self.waited,  # the library's clock starts before the turn
                "step": wall,
                "log": time.perf_counter() - self.end[0],
                "cpu": used / wall,
                "others": max(0.0, busy - used) / wall,
                "mean_len": metrics["response/length"],
                "reward_mean": metrics["reward/mean"],
                "mismatch": metrics["mismatch/mean_abs"],
                "senior_frac": metrics["tandem/senior_frac"],
            }
        )


# ---------------------------------------------------------------------------------------------------------- comparison


def compare(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Peer, solo and tandem in turn; writes every line to ``options.out`` and returns the summary."""
    names = ("group_size", "completions", "micro_batch", "max_tokens", "lengths", "steps", "warmup", "threads", "seed")
    flags = [f"--model={model}", f"--dtype={options.dtype}", f"--device={options.device}", f"--lr={options.lr}"]
    flags += [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    flags += ["--allow-eos"] if options.allow_eos else []
    commands = {
        "trl": [options.trl_python, str(PEER), *flags],
        "solo": [sys.executable, __file__, *flags, "--strategy=solo"],
        "tandem": [sys.executable, __file__, *flags, "--strategy=word"],
    }
    ours = ["solo", "tandem"]
    lines: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for who, line in one_round(commands, options.steps).items():
            line["model"] = "tiny" if options.model is None else options.model.name  # a path is of no use to a reader
            lines.append({"round": number, "who": who} | line)
            print(
                f"round {number} {who}: {line['s_per_step_median']} s per step, "
                f"{line['update_tokens_per_s']} tokens/s in the update",
                file=sys.stderr,
            )
    pairs = [*((who, "trl") for who in ours), ("tandem", "solo")]
    by_who = {who: [line for line in lines if line["who"] == who] for who in commands}
    update = {who: [line["update_tokens_per_s"] for line in own] for who, own in by_who.items()}
    wall, cpu = (
        {who: [line[name][options.warmup :] or line[name] for line in own] for who, own in by_who.items()}
        for name in ("s_per_step_all", "cpu_s_per_step_all")
    )
    summary = {
        "benchmark": "step_time",
        **{k: getattr(options, k) for k in ("allow_eos", "lengths", "max_tokens", "completions", "rounds")},
        "s_per_step": {who: over_rounds([*map(statistics.median, values)]) for who, values in wall.items()},
        "cpu_s_per_step": {who: over_rounds([*map(statistics.median, values)]) for who, values in cpu.items()},
        "ratios": turn_ratios(wall, pairs),
        "cpu_ratios": turn_ratios(cpu, pairs),
        "update_tokens_per_s": {who: over_rounds(values) for who, values in update.items()},
        "update_tokens_per_s_ratios": ratios(update, pairs),
        "cores_others": round(statistics.median(line["cores_others"] for line in lines), 2),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary | {"lines": lines}, indent=1) + "\n")
    return summary


def turn_ratios(
    seconds: Mapping[str, Sequence[Sequence[float]]], pairs: Sequence[tuple[str, str]]
) -> dict[str, dict[str, Any]]:
    """For each pair (a, b), how long a takes relative to b: per round the median over its turns. ``seconds``: of each
    contestant, by round and turn."""
    return {
        f"{a} / {b}": over_rounds(
            [
                statistics.median(x / y for x, y in zip(*turns, strict=True))
                for turns in zip(seconds[a], seconds[b], strict=True)
            ]
        )
        for a, b in pairs
    }


def one_round(commands: Mapping[str, Sequence[str]], steps: int) -> dict[str, dict[str, Any]]:
    """Start every benchmark and let them do their steps in turn; the JSON object that each of them prints last.

    Raises:
        RuntimeError: one failed; quotes the end of its stderr.
    """
    with ExitStack() as stack:
        errors = {who: stack.enter_context(tempfile.TemporaryFile("w+")) for who in commands}
        processes = {
            who: stack.enter_context(
                subprocess.Popen(
                    [*command, "--turns"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors[who], text=True
                )
            )
            for who, command in commands.items()
        }
        for process in processes.values():
            stack.callback(process.kill)  # those that still wait when another one failed

        def answer(who: str) -> str:
            assert processes[who].stdout is not None
            if line := processes[who].stdout.readline():
                return line
            errors[who].seek(0)
            raise RuntimeError(f"{who} exited with {processes[who].wait()}: {errors[who].read()[-2000:]}")

        last = {who: answer(who) for who in commands}
        for step in range(steps):
            first = step % len(commands)
            for who in [*commands][first:] + [*commands][:first]:  # nobody always goes first
                pipe = processes[who].stdin
                assert pipe is not None
                pipe.write("go\n")
                pipe.flush()
                last[who] = answer(who)  # ready for the next step, or done
    return {who: json.loads(line) for who, line in last.items()}


if __name__ == "__main__":
    main()
