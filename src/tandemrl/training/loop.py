"""The training loop: sample -> rollout -> score -> old/reference/junior log-probs where needed -> advantages ->
updates -> sync -> evaluate -> log -> save. The step on one page is ``train_step``.

``train`` can be called from a notebook with its own recipe, strategy or reward. This module owns the order of the
phases; each of them is a function of another module.
"""

import faulthandler
from collections.abc import Collection, Mapping
from contextlib import closing, nullcontext
from pathlib import Path

import torch
from rich.console import Console

from tandemrl.config import Config, ConfigError, batch_plan
from tandemrl.losses import Recipe, adapt_kl_coef
from tandemrl.models.loading import resolve_device, use_deterministic_kernels
from tandemrl.processes.world import init_world
from tandemrl.rewards.functions import RewardFunction, by_name
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.factory import EngineFactory
from tandemrl.rollout.gateway.source import Source
from tandemrl.rollout.sync import sync_weights
from tandemrl.selection import Strategy
from tandemrl.training import checkpoint
from tandemrl.training.arguments import StrategyFunction, require_config, resolve_arguments
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.build import build
from tandemrl.training.diagnostics import watcher
from tandemrl.training.evaluation import evaluate, truncated_at_eval
from tandemrl.training.experience import (
    add_gae_advantages,
    add_group_advantages,
    add_reward_kl,
    add_scores,
    make_experience,
    pack_mini_batches,
)
from tandemrl.training.faults import Signals, Stopped, explain_errors
from tandemrl.training.profiling import Clock, Profiler
from tandemrl.training.rollouts import check_scored, resample, rollout_metrics, score
from tandemrl.training.state import Models, Run
from tandemrl.training.tracking import Tracker
from tandemrl.training.update import learning_rate, update
from tandemrl.types import Metrics


def train(
    config: Config,
    *,
    resume: str | checkpoint.Resume = "auto",
    recipe: Recipe | str | None = None,
    strategy: StrategyFunction | Strategy | str | None = None,
    reward: RewardFunction | Mapping[str, RewardFunction] | None = None,
    environment: Environment | None = None,
    engine: EngineFactory | str | None = None,
    rollouts: Source | None = None,
    stated: Collection[str] = (),
    console: Console | None = None,
    quiet: bool = False,
) -> Path:
    """Train the senior, and return ``config.output_dir``, which holds everything that the run wrote.

    If one of several processes hangs or ends, the others raise an error within ``parallel.timeout_s``, by their next
    collective. Then torchrun ends all.

    Args:
        config: the configuration of the run.
        resume: ``auto`` (from the newest checkpoint in ``output_dir``, if any), ``never``, or a checkpoint folder; or a
            ``checkpoint.Resume``, which also accepts changed code.
        recipe: a row of ``losses.RECIPES``, or a recipe of your own. It overrides ``loss.recipe``. A name stands for
            ``loss.recipe=NAME``.
        strategy: a function that gives the strategy of a training step, where steps count from 1, or one strategy for
            all steps. It overrides ``selection.*``. The share of its draws that fall to the senior is not checked. A
            name stands for ``selection.strategy=NAME``.
        reward: a function ``(row, text) -> float | Score``, or one written for verl, TRL or verifiers
            (``rewards.calls``), or several functions by name, whose weighted sum (``reward.weights``) is the reward.
            They score every row for which ``reward.scorers`` names no other scorer; ``reward.scorers`` can also name
            them in a sum. They run in this process, so an error in them stops the run, and a hang hangs it. Each is
            called once with a made-up text before the run.
        environment: what the authors act in, instead of ``rollout.environment``. If it has a method ``score``, this is
            a reward function.
        engine: a class, or a function, that makes the engine of what its parameters name (``rollout.make_engine``),
            instead of ``rollout.engine``. A name stands for ``rollout.engine=NAME``.
        rollouts: where episodes come from, instead of ``environment``: programs that ask the models themselves, such as
            ``openai_agent(function)`` (``rollout.gateway.source``).
        stated: dotted keys of ``reward.*`` that must be used, also without evaluation (``train.eval_every: 0``). Then a
            reward that no training row uses could be one for the rows of ``data.eval``, so others give only a warning.
        console: where to print; see ``Tracker``.
        quiet: print nothing.

    Raises:
        ConfigError, DataError, EvalError, ModelError, CheckpointError, GraderError: the run cannot start.
        TrainError, EngineError: a check failed during the run. Its last checkpoint is kept.
        OutOfMemoryError, LostProcessError: memory ran out or a process was lost (see ``faults``). Its last checkpoint
            is kept.
        Stopped: a SIGTERM or SIGINT came; the step was finished and saved. It is a SystemExit.
    """
    where, accepted = (resume, ()) if isinstance(resume, str) else resume
    require_config(config)
    if rollouts is not None:
        if environment is not None or not isinstance(rollouts, Source):
            raise ConfigError(f"rollouts={rollouts!r:.80}: pass a Source, openai_agent(FUNCTION), and no environment")
        environment = rollouts
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    if config.train.deterministic:
        use_deterministic_kernels()
    device = resolve_device(config.model.device)
    world = init_world(config.parallel, device)
    if world.size > 1:
        faulthandler.enable()  # NCCL aborts a process whose collective timed out: say where it was
    with checkpoint.lock(config.output_dir) if world.main else nullcontext():  # before anything is started
        checkpoint.check_folder(resolve_arguments(config, recipe, strategy, engine)[0], where, accepted)
        passed = (recipe, strategy, world, by_name(reward), environment, engine)
        run = build(config, *passed, stated, accepted)
        config, silent = run.setup.config, quiet or not world.main
        with closing(run.models.engine), run.setup.scorer, run.setup.episode_runner or nullcontext():
            checkpoint.restore(run, where, accepted)
            done = run.progress.step
            with Tracker(config, done=done, console=console, quiet=silent, record=world.main) as tracker:
                loop(run, tracker)
                tracker.say(f"done: {config.output_dir}")
    return Path(config.output_dir)


def loop(run: Run, tracker: Tracker) -> None:
    """Run the steps that are left."""
    setup, models, progress = run
    config, train, world, done = setup.config, setup.config.train, setup.world, progress.step
    for line in opening_lines(run):
        tracker.say(line)
    sync_weights(models.policy, models.engine, version=done)
    folder = Path(config.output_dir, "profile") if train.profile else None
    profiler = Profiler(folder, setup.device, traces=world.main, step=min(done + 2, train.steps))
    warnings_of = watcher(config, setup.recipe, len(setup.preflight.heldout.prompts))
    with AsyncRollouts(run, tracker, profiler) as rollouts, Signals() as signals:
        if done == 0 and setup.preflight.heldout.prompts and train.eval_first:
            with explain_errors(0, profiler.clock(), world) as clock:
                with clock("eval"):
                    metrics = evaluate(run, 0)
                tracker.step(0, metrics | {"time/eval": clock.seconds["eval"]})
                say_best(run, tracker, 0)
        for step in range(done + 1, train.steps + 1):
            with explain_errors(step, profiler.clock(), world) as clock:
                metrics = train_step(run, step, rollouts, tracker, profiler, clock)
                stop = max(world.gather(signals.received))  # all stop after the same step
                progress.step = step
                for line in warnings_of(metrics):
                    tracker.say(line)
                progress.written = tracker.written()
                if stop or step == train.steps or step % train.save_every == 0:
                    with clock("save"):
                        progress.rollouts_in_flight = rollouts.state_dict()
                        removed = checkpoint.save(run)
                    if removed:
                        names = ", ".join(f"hf/{path.name}" for path in removed)
                        tracker.say(f"removed {names} (train.keep_exports={train.keep_exports})")
            if stop and step < train.steps:
                tracker.say(f"stopped by a signal after step {step}, which is saved; rerun to resume")
                raise Stopped(stop)


def train_step(
    run: Run, step: int, rollouts: AsyncRollouts, tracker: Tracker, profiler: Profiler, clock: Clock
) -> Metrics:
    """Run one training step, from its rollouts to its line in the record. Returns its metrics."""
    setup, models, progress = run
    config, train, loss = setup.config, setup.config.train, setup.config.loss
    last = step == train.steps
    evaluates = bool(setup.preflight.heldout.prompts) and (last or step % train.eval_every == 0)
    learns = models.critic is None or step > train.critic_warmup_steps  # else the critic alone

    with clock("rollout"):
        completions, compare = rollouts.take(step)
    mismatch: Metrics | None = None  # of older weights' rollouts; that of fresh ones is measured by the update
    if train.async_steps:
        with clock("gate"):
            mismatch = None if compare is None else compare(completions)
        if not last:
            with clock("sync"):
                sync_if_stale(models, version=step - 1)
            rollouts.start_until(step + 1, min(step + train.async_steps, train.steps))
    with clock("score"):
        groups = score(setup, completions, step)
    resampled = 0
    if train.max_resamples:
        with clock("resample"):
            completions, groups, resampled = resample(run, rollouts.generate, step, completions, groups)
    with clock("score"):
        check_scored(setup, completions, groups)

    with clock("update"), profiler.trace("update", step):
        experience = make_experience(setup, groups)
        mini_batches = pack_mini_batches(setup, experience)
        with clock("logprobs"):
            mini_batches = add_scores(setup, models, mini_batches)
        metrics = experience.metrics | {"lr": learning_rate(train, step, train.lr)}
        if loss.kl_in_reward:
            experience = add_reward_kl(setup, mini_batches, experience)
            metrics |= {"kl/coef": progress.kl_coef, "kl/per_token": experience.kl_per_token}
        if models.critic is not None:
            mini_batches, explained = add_gae_advantages(setup, mini_batches, experience, progress.kl_coef)
            metrics |= explained
        else:
            mini_batches = add_group_advantages(setup, mini_batches, experience, progress.kl_coef)
        metrics |= mismatch or {}
        metrics |= update(setup, models, mini_batches, step, clock, learns=learns, fresh=mismatch is None)
        if loss.kl_target is not None and metrics["updates"] and learns:
            progress.kl_coef = adapt_kl_coef(progress.kl_coef, metrics["kl/per_token"], target=loss.kl_target)
        del mini_batches  # before the engine wants its memory back

    written = [rollout for group in groups for rollout in group.rollouts]
    metrics |= rollout_metrics(completions, groups, step)
    if train.max_resamples:
        metrics["groups/resampled"] = float(resampled)
    if not train.async_steps or evaluates:
        with clock("rollout"):
            rollouts.wait()
        with clock("sync"):
            sync_if_stale(models, version=step)
    if evaluates:
        with clock("eval"):
            metrics |= evaluate(run, step) | truncated_at_eval(config.eval, written)
    metrics |= rollouts.fleet_metrics(step, completions, clock)
    tracker.samples(step, written, setup.tokenizer)
    tracker.step(step, metrics | clock.metrics(metrics["tokens/response"]))
    say_best(run, tracker, step)
    return metrics


def opening_lines(run: Run) -> list[str]:
    """What a run says before its first step: its batches, and what is not as one might expect."""
    setup, models, progress = run
    config, done = setup.config, progress.step
    lines = [batch_plan(config) if done < config.train.steps else f"step {done} is the last one: nothing to do"]
    if done:
        lines.append(f"resumed after step {done}; anything later in {config.output_dir} was discarded")
    if progress.accepted:
        lines.append(f"code changed in the run (--accept-changed): {', '.join(progress.accepted)}")
    if dropped := setup.preflight.prompts[1]:
        lines.append(f"data.train: {dropped} rows are longer than data.max_prompt_tokens and were left out")
    if config.model.lora.rank and not models.engine.info.adapters:
        lines.append("model.lora: the engine's senior has weights of its own; they are sent merged")
    return lines


def say_best(run: Run, tracker: Tracker, step: int) -> None:
    """Say what chose ``hf/best``, if it is of this step."""
    if (best := run.progress.best) is not None and best.step == step:
        why = " (rewards are graded)" if best.by == "reward" and run.setup.config.train.select_by is None else ""
        tracker.say(f"  hf/best: {best}{why}")


def sync_if_stale(models: Models, version: int) -> None:
    """Send the policy's weights to the engine, unless it has them already."""
    if models.engine.policy_version != version:
        sync_weights(models.policy, models.engine, version=version)
