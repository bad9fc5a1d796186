"""The training loop: sample -> rollout -> score -> advantages -> old/ref log-probs where needed -> updates -> sync ->
evaluate -> log -> save.

``train`` can be called from a notebook with its own recipe or strategy. What this module owns is the order of things;
each of them is a function of another module.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tandemrl import evals
from tandemrl.ahead import Ahead
from tandemrl.checkpoint import lock
from tandemrl.config import Config, batch_plan
from tandemrl.losses import Recipe
from tandemrl.model import resolve_device
from tandemrl.parallel import join
from tandemrl.rollout import collect
from tandemrl.rollout.sync import sync_weights
from tandemrl.run import Run, build, check_draws, export, restore, save
from tandemrl.selection import Strategy, solo
from tandemrl.tracking import Tracker
from tandemrl.types import Author, Group, Metrics
from tandemrl.update import update


def train(
    config: Config,
    *,
    resume: str = "auto",
    recipe: Recipe | None = None,
    strategy: Callable[[int], Strategy] | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Path:
    """Train the senior; returns ``config.output_dir``, which holds everything the run wrote.

    Args:
        resume: ``auto`` (from the newest checkpoint in ``output_dir``, if any), ``never``, or a checkpoint folder.
        recipe: overrides ``loss.recipe``: a row of ``losses.RECIPES``, or your own.
        strategy: training step (from 1) -> strategy; overrides ``selection.*``. Its draws are not held to any share.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the run cannot start.
        TrainError, EngineError: a gate closed during the run; its last checkpoint is kept.
    """
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    world = join(config.parallel, resolve_device(config.model.device))
    run = build(config, recipe, strategy, world)
    with lock(config.output_dir) if world.main else nullcontext(), run.scorer:
        done = restore(run, resume)
        silent = quiet or not world.main
        with Tracker(config.output_dir, config, console=console, quiet=silent, record=world.main) as tracker:
            loop(run, done, tracker)
    return Path(config.output_dir)


def loop(run: Run, done: int, tracker: Tracker) -> None:
    """The steps after ``done``."""
    config = run.config
    steps = config.train.steps
    tracker.say(str(batch_plan(config)) if done < steps else f"step {done} is the last one: nothing to do")
    if done:
        tracker.say(f"resumed after step {done}; anything later in {config.output_dir} was discarded")
    if run.dropped:
        tracker.say(f"data.train: {run.dropped} rows are longer than data.max_prompt_tokens and were left out")
    sync_weights(run.policy, run.engine, version=done)
    with Ahead(run, partial(rollout, run, tracker)) as rollouts:
        rollouts.load_state_dict(run.ahead)
        for step in range(done + 1, steps + 1):
            one_step(run, step, rollouts, tracker)


def one_step(run: Run, step: int, rollouts: Ahead, tracker: Tracker) -> None:
    """From the rollouts of ``step`` to its record, and its checkpoint if one is due."""
    config = run.config
    last = step == config.train.steps
    clock = Clock()
    with clock("rollout"):
        written = rollouts.take(step)
    if config.train.async_steps and not last:
        with clock("sync"):
            renew(run, step - 1)
        rollouts.start(step + 1)
    with clock("score"):
        groups = collect.score(written, run.scorer, run.tokenizer)
    with clock("update"):
        metrics = update(run, groups, step)
    metrics |= describe(written, groups, step)
    evaluates = bool(run.heldout) and (last or step % config.train.eval_every == 0)
    if not config.train.async_steps or evaluates:
        with clock("sync"):
            rollouts.wait()
            renew(run, step)
    if evaluates:
        with clock("eval"):
            metrics |= evaluate(run)
    tracker.samples(step, [r for group in groups for r in group.rollouts], run.tokenizer)
    tracker.step(step, metrics | clock.metrics(metrics["tokens/response"]))
    if last or step % config.train.save_every == 0:
        run.ahead = rollouts.state_dict()
        save(run, step)


def renew(run: Run, version: int) -> None:
    """Bring the engine to the policy's weights, unless it has them."""
    if run.engine.policy_version != version:
        sync_weights(run.policy, run.engine, version=version)


def rollout(run: Run, tracker: Tracker, step: int, examples: list[int]) -> collect.Written:
    """The step's prompts, each completed ``rollout.group_size`` times by the step's strategy."""
    config = run.config
    written = collect.write(
        run.engine,
        [(example, run.prompts[example]) for example in examples],
        strategy=run.schedule.strategy(step),
        sampling=run.sampling,
        group_size=config.rollout.group_size,
        seed=config.train.seed,
        step=step,
        progress=tracker.rollout_progress(config.train.prompts_per_step * config.rollout.group_size),
    )
    check_draws(written.draws, run.schedule.prob_senior(step))
    return written


def evaluate(run: Run) -> Metrics:
    """The senior alone on the held-out problems; the best step so far is exported to ``hf/best``."""
    settings = run.config.eval
    ks = [k for k in settings.k if k <= settings.train_samples]
    result = evals.evaluate(
        {"solo": solo("senior")},
        engine=run.engine,
        tokenizer=run.tokenizer,
        prompts=run.heldout,
        scorer=run.scorer,
        profile=evals.profile_of(settings),
        samples=settings.train_samples,
        k=ks,
        seed=settings.seed,
        bootstrap=settings.bootstrap,
    )
    macro = result.metrics["macro"]
    selector = settings.select_by or f"pass@{max((k for k in ks if k <= 4), default=ks[0])}"
    if macro[selector] > run.best:
        run.best = macro[selector]
        export(run, "best")
    return {f"eval/{name}": macro[name] for name in [*(f"pass@{k}" for k in ks), "length", "truncation_rate"]}


def describe(written: collect.Written, groups: Sequence[Group], step: int) -> Metrics:
    """What the rollouts of a step were like."""
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = np.array([r.reward for r in rollouts])
    response = np.array([r.response_tokens for r in rollouts])
    senior = sum(int((r.author == Author.SENIOR).sum()) for r in rollouts)
    parts = sorted({name for r in rollouts for name in r.reward_parts})
    draws = written.draws
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/{name}": float(np.mean([r.reward_parts.get(name, 0.0) for r in rollouts])) for name in parts},
        "tandem/senior_frac": senior / max(1, int(response.sum())),
        **({"tandem/senior_draw_frac": draws.senior / draws.total} if draws.total else {}),
        "response/length": float(response.mean()),
        "response/truncated": float(np.mean([r.stop_reason == "length" for r in rollouts])),
        "weights/version_lag": float(step - 1 - min(r.policy_version for r in rollouts)),
        "tokens/response": float(response.sum()),
        "tokens/total": float(sum(len(r.tokens) for r in rollouts)),
        "scoring/timeouts": float(sum("timeout" in r.reward_parts for r in rollouts)),
        "scoring/failures": float(sum("failure" in r.reward_parts for r in rollouts)),
    }


class Clock:
    """Seconds per phase of one step."""

    def __init__(self) -> None:
        self.start, self.phases = time.perf_counter(), dict[str, float]()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: float) -> Metrics:
        total = time.perf_counter() - self.start
        return {"time/step": total, "tokens/s": tokens / total} | {f"time/{k}": v for k, v in self.phases.items()}
