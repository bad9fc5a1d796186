"""The training loop: sample -> rollout -> score -> old/reference/junior log-probs where needed -> advantages ->
updates -> sync -> evaluate -> log -> save. The step on one page is ``train_step``.

``train`` can be called from a notebook with its own recipe, strategy or reward. This module owns the order of the
phases; each of them is a function of another module.
"""

import faulthandler
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from tandemrl import evals
from tandemrl.config import Config, batch_plan
from tandemrl.data.rows import Prompt
from tandemrl.distributed.watchdog import WATCHDOG
from tandemrl.distributed.world import init_world
from tandemrl.losses import Recipe, adapt_kl_coef
from tandemrl.models.loading import resolve_device
from tandemrl.rewards.functions import RewardFunction, by_name
from tandemrl.rewards.judge.server import LOG, judge_server
from tandemrl.rollout import collect
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import Draws, Engine, Passes
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.groups import score_rollouts
from tandemrl.rollout.sync import sync_weights
from tandemrl.selection import Strategy, solo
from tandemrl.training import checkpoint, lessons, stopping
from tandemrl.training.arguments import StrategyFunction, require_config
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.build import build
from tandemrl.training.experience import (
    add_gae_advantages,
    add_group_advantages,
    add_logprobs,
    add_reward_kl,
    add_values,
    make_experience,
    pack_mini_batches,
    step_cost,
)
from tandemrl.training.faults import OptimizerSteps, Signals, Stopped, explain_errors, signal_anywhere
from tandemrl.training.function_records import in_use
from tandemrl.training.gates import MISMATCH, ROUNDINGS, TrainError, check_draws
from tandemrl.training.preflight import check_resume
from tandemrl.training.profiling import Clock, Profiler
from tandemrl.training.resume import export, restore, save
from tandemrl.training.state import Models, Run, RunSetup
from tandemrl.training.tracking import Tracker, write_eval_texts
from tandemrl.training.update import learning_rate, update
from tandemrl.training.writers import remember
from tandemrl.types import Author, Group, Metrics, Rollout


def train(
    config: Config,
    *,
    resume: str = "auto",
    recipe: Recipe | str | None = None,
    strategy: StrategyFunction | Strategy | str | None = None,
    reward: RewardFunction | Mapping[str, RewardFunction] | None = None,
    environment: Environment | None = None,
    stated: Collection[str] = (),
    console: Console | None = None,
    quiet: bool = False,
) -> Path:
    """Train the senior, and return ``config.output_dir``, which holds everything that the run wrote.

    If one of several processes raises an error, the run ends: a process that has raised and then makes no progress for
    ``parallel.timeout_s`` is killed, as is one that hangs in a step (see ``watchdog``).

    Args:
        config: the configuration of the run.
        resume: ``auto`` (from the newest checkpoint in ``output_dir``, if any), ``never``, or a checkpoint folder.
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
        stated: dotted keys of ``reward.*`` that must be used, also without evaluation (``train.eval_every: 0``). Then a
            reward that no training row uses could be one for the rows of ``data.eval``, so others give only a warning.
        console: where to print; see ``Tracker``.
        quiet: print nothing.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError, GraderError: the run cannot start.
        TrainError, EngineError: a check failed during the run. Its last checkpoint is kept. If no weight has changed in
            the failed step and all processes are able to, the state after the step before is saved first.
        OutOfMemoryError, LostProcessError: memory ran out or a process was lost (see ``faults``). Checkpoints are kept
            and saved as above.
        Stopped: a SIGTERM or SIGINT came; the step was finished and saved. It is a SystemExit.
    """
    check_resume(resume, require_config(config).output_dir)
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    world = init_world(config.parallel, resolve_device(config.model.device))
    if world.size > 1:
        faulthandler.enable()  # NCCL aborts a process whose collective timed out: say where it was
    if config.judge.command is not None and world.main and not quiet:
        say = (console or Console()).print
        say(f"judge.command: starting it; its output is in {Path(config.output_dir, LOG)}", markup=False)
    with in_use(environment), judge_server(config, start=world.main) as check_judge:
        run = build(config, recipe, strategy, world, by_name(reward), environment, check_judge, stated)
        config, silent = run.setup.config, quiet or not world.main
        locked = checkpoint.lock(config.output_dir) if world.main else nullcontext()
        with locked, run.setup.scorer, run.setup.episode_runner or nullcontext():
            restore(run, resume)
            with Tracker(config.output_dir, config, console=console, quiet=silent, record=world.main) as tracker:
                loop(run, tracker)
                checkpoint.wait()
                check_record(run, tracker)
                if world.main and (verdict := lessons.verdict(config, run.setup.recipe)):
                    tracker.say(verdict[1])
    WATCHDOG.end()  # not after an error: what is left of the group can hang the end of the process, too
    return Path(config.output_dir)


def loop(run: Run, tracker: Tracker) -> None:
    """Run the steps that are left."""
    setup, models, progress = run
    config, world, done = setup.config, setup.world, progress.step
    steps = config.train.steps
    tracker.say(str(batch_plan(config)) if done < steps else f"step {done} is the last one: nothing to do")
    if done:
        tracker.say(f"resumed after step {done}; anything later in {config.output_dir} was discarded")
    if setup.dropped:
        tracker.say(f"data.train: {setup.dropped} rows are longer than data.max_prompt_tokens and were left out")
    if config.model.lora.rank:
        shared = models.engine.info.adapters
        tracker.say(
            "model.lora: the engine's senior is adapters on the junior's weights; they alone are sent"
            if shared
            else "model.lora: the engine's senior has weights of its own; they are sent merged"
        )
    if config.model.dtype != "float32" and config.train.max_logprob_mismatch is None:
        tracker.say(
            f"train.max_logprob_mismatch: {setup.mismatch_limit:.2g} nats, {ROUNDINGS:g} times as far as rounding in "
            f"{config.model.dtype} moves the senior's log-probs, and at least {MISMATCH[config.model.dtype]:g}"
        )
    sync_weights(models.policy, models.engine, version=done)
    folder, dtype = Path(config.output_dir, "profile"), getattr(torch, config.model.dtype)
    profiler = Profiler(
        folder if config.train.profile else None, models.policy, setup.device, dtype, world, first=done + 1, last=steps
    )
    optimizer_steps = OptimizerSteps(part.optimizer for part in models.trained.values())
    draw = partial(progress.sampler.next, config.train.prompts_per_step)
    generate = partial(rollout, setup, models.engine, tracker, profiler)
    keep = partial(remember, setup, models.policy)
    warning_of = lessons.warner(config, setup.recipe)
    with AsyncRollouts(draw, generate, setup.prompts, models.engine, keep) as rollouts, Signals() as signals:
        rollouts.load_state_dict(progress.rollouts_in_flight)
        for step in range(done + 1, steps + 1):
            clock = profiler.clock(step)
            with explain_errors(step, clock, world, config.parallel.timeout_s):
                with save_on_failure(run, optimizer_steps, tracker):
                    metrics = train_step(run, step, rollouts, tracker, profiler, clock)
                    stop = signal_anywhere(signals.received, world)
                progress.step = step
                if warning := warning_of(metrics):
                    tracker.say(warning)
                for record in progress.records:
                    record.written = tracker.written(record.file.name)
                if stop or step == steps or step % config.train.save_every == 0:
                    with clock("save"):
                        progress.rollouts_in_flight = rollouts.state_dict()
                        removed = save(run)
                    if removed:
                        names = ", ".join(f"hf/{path.name}" for path in removed)
                        tracker.say(f"removed {names} (train.keep_exports={config.train.keep_exports})")
            if stop and step < steps:
                checkpoint.wait()
                tracker.say(
                    f"stopped by a signal after step {step}, which is saved; the same command goes on from there"
                )
                raise Stopped(stop)


def train_step(
    run: Run, step: int, rollouts: AsyncRollouts, tracker: Tracker, profiler: Profiler, clock: Clock
) -> Metrics:
    """Run one training step, from its rollouts to its line in the record. Returns its metrics."""
    setup, models, progress = run
    config, train, loss = setup.config, setup.config.train, setup.config.loss
    last = step == train.steps
    evaluates = bool(setup.heldout) and (last or step % train.eval_every == 0)
    learns = models.critic is None or step > train.critic_warmup_steps  # else the critic alone

    check_record(run, tracker)  # before any weight changes: the state after the last step can then be saved
    with clock("rollout"):
        completions = rollouts.take(step)
    writer_mismatch: Metrics | None = None
    if train.async_steps:
        with clock("gate"):
            writer_mismatch = rollouts.mismatch()
    if train.async_steps and not last:
        with clock("sync"):
            sync_if_stale(models, version=step - 1)
        rollouts.start(step + 1)
    with clock("score"):
        groups = score_rollouts(completions, setup.scorer, setup.tokenizer)
    if train.max_resamples:
        with clock("resample"):
            completions, groups, resampled = resample(run, rollouts.generate, step, completions, groups)

    with clock("update"), profiler.trace("update", step):
        experience = make_experience(setup, groups)
        mini_batches = pack_mini_batches(setup, experience)
        with clock("logprobs"):
            if len(mini_batches) > 1 or loss.kl_in_reward or config.model.lora.dropout > 0:
                mini_batches = add_logprobs(setup, models, mini_batches, "old_logprobs")
            if models.reference is not None:
                mini_batches = add_logprobs(setup, models, mini_batches, "ref_logprobs")
            if models.junior is not None:
                mini_batches = add_logprobs(setup, models, mini_batches, "junior_logprobs")
            if models.critic is not None:
                mini_batches = add_values(setup, models, mini_batches)
        metrics = experience.metrics | {"lr": learning_rate(config, step)}
        if loss.kl_in_reward:
            experience = add_reward_kl(setup, mini_batches, experience)
            metrics |= {"kl/coef": progress.kl_coef, "kl/per_token": experience.kl_per_token}
        if models.critic is not None:
            mini_batches, value_metrics = add_gae_advantages(setup, mini_batches, experience, progress.kl_coef)
            metrics |= value_metrics
        else:
            mini_batches = add_group_advantages(setup, mini_batches, experience, progress.kl_coef)
        metrics |= writer_mismatch or {}
        metrics |= update(setup, models, mini_batches, step, clock, learns=learns, fresh=writer_mismatch is None)
        if loss.kl_target is not None and metrics["updates"] and learns:
            progress.kl_coef = adapt_kl_coef(progress.kl_coef, metrics["kl/per_token"], target=loss.kl_target)
        del mini_batches  # before the engine wants its memory back

    written = [r for group in groups for r in group.rollouts]
    metrics |= rollout_metrics(completions, groups, step)
    if train.max_resamples:
        metrics["groups/resampled"] = float(resampled)
    if not train.async_steps or evaluates:
        with clock("sync"):
            rollouts.wait()
            sync_if_stale(models, version=step)
    if evaluates:
        with clock("eval"):
            metrics |= evaluate(run, step)
            limit = evals.profile_of(config.eval).sampling.max_tokens
            metrics["response/truncated_at_eval"] = stopping.unfinished(written, limit)
    not_written = tracker.samples(step, written, setup.tokenizer)
    if train.max_samples_gb is not None:
        metrics["samples/not_written"] = float(not_written)
    tracker.step(step, metrics | clock.metrics(metrics["tokens/response"]))
    if evaluates:
        solo_texts = len(setup.heldout) * config.eval.train_samples
        if warning := stopping.warning(metrics, solo_texts=solo_texts, rollout_texts=len(written)):
            tracker.warn("stopping", warning)
    if train.profile:
        profiler.step(step, clock, step_cost(setup, groups, experience, profiler.cost))
    return metrics


@contextmanager
def save_on_failure(run: Run, optimizer_steps: OptimizerSteps, tracker: Tracker) -> Iterator[None]:
    """A context that saves the state after the last finished step if the step inside fails before any weight changed.

    With several processes this is possible only for errors that all of them raise. With ``train.async_steps`` nothing
    is saved, since the rollouts that the state would need are used up.
    """
    setup, models, progress = run
    optimizer_steps.reset()
    step, sampler, kl_coef = progress.step, progress.sampler.state_dict(), progress.kl_coef
    try:
        yield
    except Exception as error:
        together = setup.world.size == 1 or isinstance(error, TrainError)
        if together:
            checkpoint.wait()  # it may be writing just this one
        folder = Path(setup.config.output_dir, "checkpoints", f"step_{step}")
        if step and together and not (optimizer_steps.taken or setup.config.train.async_steps or folder.exists()):
            for part in models.trained.values():
                part.optimizer.zero_grad(set_to_none=True)
            progress.sampler.load_state_dict(sampler)
            progress.kl_coef, progress.rollouts_in_flight = kl_coef, None
            try:
                save(run)
                checkpoint.wait()
                tracker.say(f"step {step + 1} failed; the state after step {step} is saved")
            except Exception as failure:
                tracker.say(f"step {step + 1} failed, and the state after step {step} could not be saved: {failure}")
        raise


def check_record(run: Run, tracker: Tracker) -> None:
    """Check, in all processes together, that metrics.jsonl and samples.jsonl are still those that are written to.

    Raises:
        TrainError: a file was deleted, cut or replaced; names it.
    """
    if lost := run.setup.world.broadcast(tracker.lost()):
        raise TrainError(lost)


def sync_if_stale(models: Models, version: int) -> None:
    """Send the policy's weights to the engine, unless it has them already."""
    if models.engine.policy_version != version:
        sync_weights(models.policy, models.engine, version=version)


def rollout(
    setup: RunSetup,
    engine: Engine,
    tracker: Tracker,
    profiler: Profiler,
    step: int,
    examples: list[int],
    drawn: int = 0,
) -> CompletionBatch:
    """Let the engine complete each prompt ``rollout.group_size`` times under the strategy of the step.

    Args:
        examples: numbers of the examples in the training data.
        drawn: see ``collect.generate``.
    """
    config = setup.config
    advance_bar = tracker.rollout_progress(len(examples) * config.rollout.group_size)
    with profiler.trace("rollout", step) as count_call:

        def progress(tokens: int) -> None:
            advance_bar(tokens)
            count_call(tokens)

        completions = collect.generate(
            engine,
            [(example, setup.prompts[example]) for example in examples],
            strategy=setup.schedule.strategy(step),
            sampling=setup.sampling,
            group_size=config.rollout.group_size,
            seed=config.train.seed,
            step=step,
            drawn=drawn,
            episode_runner=setup.episode_runner,
            progress=progress,
        )
    check_draws(completions.draws, setup.schedule.prob_senior(step))
    return completions


def resample(
    run: Run, generate: Callable[..., CompletionBatch], step: int, completions: CompletionBatch, groups: Sequence[Group]
) -> tuple[CompletionBatch, list[Group], int]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

    Groups whose rewards are all equal, or of which fewer than two rollouts are scored, are replaced by the groups of
    the next prompts, in at most ``train.max_resamples`` rounds.

    Args:
        generate: writes the completions of (step, examples, drawn=how many prompts the step had so far).

    Returns:
        the completions with the draws and passes of all rounds, the groups, and how many prompts were drawn as
        replacements.
    """
    setup, _, progress = run
    groups, drawn = list(groups), 0
    for _ in range(setup.config.train.max_resamples):
        flat = [i for i, group in enumerate(groups) if len({r.reward for r in group.scored.rollouts}) < 2]
        if not flat:
            break
        more = generate(step, progress.sampler.next(len(flat)), drawn=len(groups) + drawn)
        drawn += len(flat)
        draws = Draws(*(a + b for a, b in zip(completions.draws, more.draws, strict=True)))
        completions = completions._replace(draws=draws, passes=completions.passes + more.passes)
        for i, fresh in zip(flat, score_rollouts(more, setup.scorer, setup.tokenizer), strict=True):
            groups[i] = fresh._replace(rollouts=tuple(replace(r, group=i) for r in fresh.rollouts))
    return completions, groups, drawn


def evaluate(run: Run, step: int) -> Metrics:
    """Evaluate the senior alone on the held-out problems and on those of ``data.monitor``.

    If the held-out score is the best so far, the policy is exported to ``hf/best``. The problems of ``data.monitor``
    have no influence on that.
    """
    setup, _, progress = run
    settings = setup.config.eval
    ks = [k for k in settings.k if k <= settings.train_samples]
    samples: dict[str, list[evals.Sample]] = {"eval": [], "monitor": []}
    macro = solo_metrics(run, setup.heldout, ks, samples["eval"])["macro"]
    selector = settings.select_by or f"pass@{max((k for k in ks if k <= 4), default=ks[0])}"
    if macro[selector] > progress.best:
        progress.best = macro[selector]
        export(run, "best", step)
    names = [
        *(f"pass@{k}" for k in ks),
        "length",
        "truncation_rate",
        *("em", "f1"),
        *(["unscored"] if setup.judge is not None else []),
    ]
    metrics = {f"eval/{name}": macro[name] for name in names if name in macro}
    if setup.monitored:
        watched = solo_metrics(run, setup.monitored, ks, samples["monitor"])
        metrics |= {f"monitor/{name}": watched["macro"][name] for name in names if name in watched["macro"]}
        for source, values in watched["by_set"].items():
            metrics |= {f"monitor/{source}/pass@{k}": values[f"pass@{k}"] for k in ks}
    if setup.world.main and setup.config.train.keep_eval_texts:
        write_eval_texts(Path(setup.config.output_dir), step, samples)
    return metrics


def solo_metrics(run: Run, prompts: Sequence[Prompt], ks: Sequence[int], samples: list[evals.Sample]) -> dict[str, Any]:
    """The metrics of ``evals.summarise`` for what the senior writes alone, which is added to ``samples``."""
    setup, settings = run.setup, run.setup.config.eval
    result = evals.generate_and_grade(
        {"solo": solo("senior")},
        engine=run.models.engine,
        tokenizer=setup.tokenizer,
        prompts=prompts,
        scorer=setup.scorer,
        episode_runner=setup.episode_runner,
        profile=evals.profile_of(settings),
        samples=settings.train_samples,
        k=ks,
        seed=settings.seed,
        bootstrap=settings.bootstrap,
    )
    samples += result.samples
    return result.metrics


def rollout_metrics(completions: CompletionBatch, groups: Sequence[Group], step: int) -> Metrics:
    """Metrics of a step's rollouts, such as their rewards, lengths and authors."""
    rollouts = [r for group in groups for r in group.rollouts]
    scored = [r for r in rollouts if r.scored]
    rewards = np.array([r.reward for r in scored])
    response = np.array([r.response_tokens for r in rollouts])
    senior = sum(int((r.author == Author.SENIOR).sum()) for r in rollouts)
    parts = sorted({name for r in scored for name in r.reward_parts})
    draws = completions.draws
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": 0.0 if len(set(rewards.tolist())) == 1 else float(rewards.std()),  # exactly, though sums round
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
        **episode_metrics(rollouts),
        **pass_metrics(completions.passes),
    }


def pass_metrics(passes: Passes) -> Metrics:
    """Metrics of the forward passes that the rollouts of a step took, and of how often the senior accepted drafts.

    There are none if the engine does not count passes, and no acceptance rate if no token of the senior was drafted.
    """
    metrics: Metrics = {}
    if passes.senior or passes.junior:
        metrics |= {"passes/senior": float(passes.senior), "passes/junior": float(passes.junior)}
    if passes.senior:
        metrics["draft/tokens_per_senior_pass"] = passes.tokens / passes.senior
    if passes.acceptance is not None:
        metrics["draft/acceptance"] = passes.acceptance
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Metrics of what happened in the environment, as means over rollouts; none without an environment."""
    transcripts = [r.transcript for r in rollouts if r.transcript is not None]
    if not transcripts:
        return {}
    counts = sorted({name for transcript in transcripts for name in transcript.counts})
    world = [len(r.tokens) - r.context_tokens - r.response_tokens for r in rollouts]
    return {
        "env/world_tokens": float(np.mean(world)),
        **{f"env/{name}": float(np.mean([t.counts.get(name, 0.0) for t in transcripts])) for name in counts},
        "response/stopped_turns": float(np.mean([r.stop_reason == "turns" for r in rollouts])),
    }
