"""The training loop: sample -> rollout -> score -> advantages -> old/ref log-probs where needed -> updates -> sync ->
evaluate -> log -> save.

``train`` can be called from a notebook with its own recipe, strategy or reward. What this module owns is the order of
things; each of them is a function of another module.
"""

import faulthandler
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from tandemrl import evals
from tandemrl.config import Config, batch_plan
from tandemrl.distributed.watchdog import WATCHDOG
from tandemrl.distributed.world import join
from tandemrl.losses import Recipe
from tandemrl.models.loading import resolve_device
from tandemrl.rewards.functions import RewardFunction, by_name
from tandemrl.rewards.rollouts import score_rollouts
from tandemrl.rollout import collect
from tandemrl.rollout.engine import Draws
from tandemrl.rollout.sync import sync_weights
from tandemrl.selection import Strategy, solo
from tandemrl.training import checkpoint
from tandemrl.training.async_rollouts import Ahead
from tandemrl.training.checkpoint import lock
from tandemrl.training.faults import Signals, Steps, Stopped, agreed_signal, told
from tandemrl.training.preflight import check_resume
from tandemrl.training.profiling import Profile
from tandemrl.training.run import (
    Run,
    TrainError,
    build,
    check_draws,
    export,
    restore,
    save,
)
from tandemrl.training.tracking import Tracker
from tandemrl.training.update import update, work
from tandemrl.types import Author, Group, Metrics


def train(
    config: Config,
    *,
    resume: str = "auto",
    recipe: Recipe | None = None,
    strategy: Callable[[int], Strategy] | None = None,
    reward: RewardFunction | Mapping[str, RewardFunction] | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Path:
    """Train the senior; returns ``config.output_dir``, which holds everything the run wrote.

    Args:
        resume: ``auto`` (from the newest checkpoint in ``output_dir``, if any), ``never``, or a checkpoint folder.
        recipe: overrides ``loss.recipe``: a row of ``losses.RECIPES``, or your own.
        strategy: training step (from 1) -> strategy; overrides ``selection.*``. Its draws are not held to any share.
        reward: a function ``(row, text) -> float | Score``, or several by name, whose weighted sum (``reward.weights``)
            is the reward. They score every row for which ``reward.scorers`` has nothing else. They run in this process,
            so an error in them stops the run, and a hang hangs it. ``reward.scorers`` can name them in a sum, too.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError, GraderError: the run cannot start.
        TrainError, EngineError: a gate closed during the run; its last checkpoint is kept. Where no weight of the step
            had changed and all processes can, the step before it is saved first.
        OutOfMemoryError, LostProcessError: see ``faults``; likewise.
            Among several processes an error is the end: a process that has raised one and then does nothing for
            ``parallel.timeout_s`` is ended, as is one that hangs in a step (see ``watchdog``).
        Stopped: after a SIGTERM or SIGINT and the end of the step, which is saved. It is a SystemExit.
    """
    check_resume(resume, config.output_dir)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    world = join(config.parallel, resolve_device(config.model.device))
    if world.size > 1:
        faulthandler.enable()  # NCCL aborts a process whose collective timed out: say where it was
    run = build(config, recipe, strategy, world, by_name(reward))
    with lock(config.output_dir) if world.main else nullcontext(), run.scorer:
        done = restore(run, resume)
        silent = quiet or not world.main
        with Tracker(config.output_dir, run.config, console=console, quiet=silent, record=world.main) as tracker:
            loop(run, done, tracker)
            checkpoint.wait()
    WATCHDOG.end()  # not after an error: what is left of the group can hang the end of the process, too
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
    profile = Profile(
        Path(config.output_dir, "profile") if config.train.profile else None,
        model=run.policy,
        device=run.device,
        dtype=getattr(torch, config.model.dtype),
        world=run.world,
        first=done + 1,
        last=steps,
    )
    moved = Steps(part.optimizer for part in run.parts.values())
    with Ahead(run, partial(rollout, run, tracker, profile)) as rollouts, Signals() as signals:
        rollouts.load_state_dict(run.ahead)
        for step in range(done + 1, steps + 1):
            run.clock = profile.clock(step)
            with told(step, run.clock, run.world, config.parallel.timeout_s):
                with rescued(run, step - 1, moved, tracker):
                    one_step(run, step, rollouts, tracker, profile)
                    stop = agreed_signal(signals.received, run.world)
                if stop or step == steps or step % config.train.save_every == 0:
                    with run.clock("save"):
                        run.ahead = rollouts.state_dict()
                        save(run, step)
            if stop and step < steps:
                checkpoint.wait()
                tracker.say(
                    f"stopped by a signal after step {step}, which is saved; the same command goes on from there"
                )
                raise Stopped(stop)


@contextmanager
def rescued(run: Run, step: int, moved: Steps, tracker: Tracker) -> Iterator[None]:
    """Save the state after ``step`` if the one after it fails before any weight has changed.

    Among several processes only errors that all of them meet allow it. With ``train.async_steps`` the rollouts that
    the state would need are used up.
    """
    moved.mark()
    sampler, kl_coef = run.sampler.state_dict(), run.kl_coef
    try:
        yield
    except Exception as error:
        together = run.world.size == 1 or isinstance(error, TrainError)
        if together:
            checkpoint.wait()  # it may be writing just this one
        folder = Path(run.config.output_dir, "checkpoints", f"step_{step}")
        if step and together and not (moved.taken or run.config.train.async_steps or folder.exists()):
            for part in run.parts.values():
                part.optimizer.zero_grad(set_to_none=True)
            run.sampler.load_state_dict(sampler)
            run.kl_coef, run.ahead = kl_coef, None
            try:
                save(run, step)
                checkpoint.wait()
                tracker.say(f"step {step + 1} failed; the state after step {step} is saved")
            except Exception as failure:
                tracker.say(f"step {step + 1} failed, and the state after step {step} could not be saved: {failure}")
        raise


def one_step(run: Run, step: int, rollouts: Ahead, tracker: Tracker, profile: Profile) -> None:
    """From the rollouts of ``step`` to its record."""
    config = run.config
    last = step == config.train.steps
    clock = run.clock
    with clock("rollout"):
        written = rollouts.take(step)
    if config.train.async_steps and not last:
        with clock("sync"):
            renew(run, step - 1)
        rollouts.start(step + 1)
    with clock("score"):
        groups = score_rollouts(written, run.scorer, run.tokenizer)
    if config.train.max_resamples:
        with clock("resample"):
            written, groups, resampled = resample(run, tracker, profile, step, written, groups)
    with clock("update"), profile.trace("update", step):
        metrics = update(run, groups, step)
    metrics |= describe(written, groups, step)
    if config.train.max_resamples:
        metrics["groups/resampled"] = float(resampled)
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
    if config.train.profile:
        profile.step(step, clock, work(run, groups, profile.cost))


def renew(run: Run, version: int) -> None:
    """Bring the engine to the policy's weights, unless it has them."""
    if run.engine.policy_version != version:
        sync_weights(run.policy, run.engine, version=version)


def rollout(
    run: Run, tracker: Tracker, profile: Profile, step: int, examples: list[int], drawn: int = 0
) -> collect.Written:
    """Prompts, each completed ``rollout.group_size`` times by the step's strategy. ``drawn``: see ``collect.write``."""
    config = run.config
    shown = tracker.rollout_progress(len(examples) * config.rollout.group_size)
    with profile.trace("rollout", step) as traced:

        def progress(tokens: int) -> None:
            shown(tokens)
            traced(tokens)

        written = collect.write(
            run.engine,
            [(example, run.prompts[example]) for example in examples],
            strategy=run.schedule.strategy(step),
            sampling=run.sampling,
            group_size=config.rollout.group_size,
            seed=config.train.seed,
            step=step,
            drawn=drawn,
            progress=progress,
        )
    check_draws(written.draws, run.schedule.prob_senior(step))
    return written


def resample(
    run: Run, tracker: Tracker, profile: Profile, step: int, written: collect.Written, groups: Sequence[Group]
) -> tuple[collect.Written, list[Group], int]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal, or of which fewer
    than two rollouts are scored, give way to those of the next prompts, in at most ``train.max_resamples`` rounds.

    Returns:
        the rollouts with the draws of all rounds, the groups, and how many prompts were drawn in place of others.
    """
    groups, drawn = list(groups), 0
    for _ in range(run.config.train.max_resamples):
        flat = [i for i, group in enumerate(groups) if len({r.reward for r in group.scored.rollouts}) < 2]
        if not flat:
            break
        more = rollout(run, tracker, profile, step, run.sampler.next(len(flat)), drawn=len(groups) + drawn)
        drawn += len(flat)
        written = written._replace(draws=Draws(*(a + b for a, b in zip(written.draws, more.draws, strict=True))))
        for i, fresh in zip(flat, score_rollouts(more, run.scorer, run.tokenizer), strict=True):
            groups[i] = fresh._replace(rollouts=tuple(replace(r, group=i) for r in fresh.rollouts))
    return written, groups, drawn


def evaluate(run: Run) -> Metrics:
    """The senior alone on the held-out problems; the best step so far is exported to ``hf/best``."""
    settings = run.config.eval
    ks = [k for k in settings.k if k <= settings.train_samples]
    result = evals.generate_and_grade(
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
    names = [*(f"pass@{k}" for k in ks), "length", "truncation_rate", *(["unscored"] if run.judge is not None else [])]
    return {f"eval/{name}": macro[name] for name in names}


def describe(written: collect.Written, groups: Sequence[Group], step: int) -> Metrics:
    """What the rollouts of a step were like."""
    rollouts = [r for group in groups for r in group.rollouts]
    scored = [r for r in rollouts if r.scored]
    rewards = np.array([r.reward for r in scored])
    response = np.array([r.response_tokens for r in rollouts])
    senior = sum(int((r.author == Author.SENIOR).sum()) for r in rollouts)
    parts = sorted({name for r in scored for name in r.reward_parts})
    draws = written.draws
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/{name}": float(np.mean([r.reward_parts.get(name, 0.0) for r in scored])) for name in parts},
        "reward/unscored": 1 - len(scored) / len(rollouts),
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
