"""The rollouts of a step, and with ``train.async_steps: k`` also those of the k next ones, generated in the meantime.

This overlap makes rollouts older: before the update of step t, the completions of step t + k are begun, by the weights
that step t begins with, so they are k updates older than in the synchronous loop. That is so whoever is late: the
weights of a rollout follow from its step. ``Completion.policy_version`` records them for each completion, and truncated
importance sampling corrects for their age (``losses.importance_weights``).
The mismatch between trainer and engine is measured with the weights that wrote the completions (``snapshot_policy``).
When the engine has received the trainer's weights and begins to write, each process of the trainer keeps a copy of its
part of the trained weights in host memory (with adapters, of the adapters alone). When the rollouts are finished, or a
checkpoint is about to be written, the trainer takes these weights back for one forward pass over a sample of the
rollouts. So the check compares the same weights on both sides, as it does without overlap. It leaves out the updates
since then, for which importance sampling corrects. At most k + 1 copies exist: the kept ones, and the newer weights
during that forward pass.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Self, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from tandemrl.data.messages import Transcript
from tandemrl.models.batching import micro_batches, pack, pack_tokens
from tandemrl.models.sharding import swapped_weights, trained_parts
from tandemrl.rollout import collect
from tandemrl.rollout.collect import CompletionBatch, rollout_of
from tandemrl.rollout.engine import Completion, Draws, Engine, Passes
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.relay import check_untranslatable
from tandemrl.training.gates import TrainError, check_draws, check_mismatch, check_starts
from tandemrl.training.profiling import Clock, Profiler
from tandemrl.training.state import Run, RunSetup
from tandemrl.training.tracking import Tracker
from tandemrl.training.update import logprob_mismatch
from tandemrl.types import Author, Metrics

Compare = Callable[[CompletionBatch], Metrics]
"""A function that measures the log-prob mismatch between engine and trainer on completions, where the trainer uses the
weights that wrote them."""


class _Pending(NamedTuple):
    step: int
    examples: list[int]
    batch: Future[CompletionBatch] | None
    """None in a process without the fleet, where ``FleetEngine.told`` brings it."""
    compare: Compare


class AsyncRollouts:
    """Rollouts step by step. Call ``take(step)`` in every step, and then ``start_until(step + k)`` to overlap.

    Args:
        run: the run. Its engine is aborted if the rollouts are no longer needed.
        tracker, profiler: for the progress of each step's rollouts and the trace of one.
    """

    def __init__(self, run: Run, tracker: Tracker, profiler: Profiler) -> None:
        self._setup, self._models, self._progress = run.setup, run.models, run.progress
        self._tracker, self._profiler, self._engine = tracker, profiler, run.models.engine
        self._threads = ThreadPoolExecutor(max(1, self._setup.config.train.async_steps), thread_name_prefix="rollout")
        self._pending = deque(map(self._restored, self._progress.rollouts_in_flight))
        self._counted = self._counts()

    def take(self, step: int) -> tuple[CompletionBatch, Compare | None]:
        """The rollouts of ``step``: those that ``start_until`` began, or new ones.

        With the former comes a function that measures the mismatch between trainer and engine, with the weights that
        wrote them. All processes must call it; it raises a TrainError if the mismatch is too large.

        Raises:
            EngineError, TrainError: the rollouts failed.
        """
        if not self._pending:
            return self.generate(step, self._draw()), None
        pending = self._pending.popleft()
        assert pending.step == step
        return self._result(pending), pending.compare

    def generate(self, step: int, examples: list[int], drawn: int = 0, engine: Engine | None = None) -> CompletionBatch:
        """Complete each prompt ``rollout.group_size`` times under the strategy of the step, with the weights that the
        engine has.

        Args:
            examples: numbers of the examples in the training data.
            drawn: see ``collect.generate``.
            engine: another engine.

        Raises:
            EngineError, TrainError: the rollouts failed.
        """
        setup, config = self._setup, self._setup.config
        strategy, size = setup.schedule.strategy(step), config.rollout.group_size
        check_starts(strategy, setup.options, step)
        advance_bar = self._tracker.rollout_progress(step, len(examples) * size)
        with self._profiler.trace("rollout", step) as count_call:

            def progress(tokens: int) -> None:
                advance_bar(tokens)
                count_call(tokens)

            completions = collect.generate(
                self._engine if engine is None else engine,
                [(example, setup.prompts[example]) for example in examples],
                strategy=strategy,
                sampling=setup.sampling,
                group_size=size,
                seed=config.train.seed,
                step=step,
                drawn=drawn,
                episode_runner=setup.episode_runner,
                progress=progress,
            )
        reasons = [c.stop_reason for group in completions.completions for c in group]
        check_untranslatable(reasons, config.selection.max_untranslatable, TrainError)
        check_draws(completions.draws, setup.schedule.prob_senior(step), size if strategy.shared_draws else 1)
        return completions

    def _draw(self) -> list[int]:
        return self._progress.sampler.next(self._setup.config.train.prompts_per_step)

    def start_until(self, first: int, last: int) -> None:
        """Begin the rollouts of the steps from ``first`` to ``last`` that are not begun, each in a thread.

        Unless the engine is a fleet, it must not be used otherwise until ``wait`` returns.
        """
        steps = range(self._pending[-1].step + 1 if self._pending else first, last + 1)
        if not steps:
            return
        compare = snapshot_policy(self._setup, self._models.policy)
        for step in steps:
            examples, engine = self._draw(), self._engine
            own = engine.snapshot() if isinstance(engine, FleetEngine) else engine
            batch = None if own is None else self._threads.submit(self.generate, step, examples, engine=own)
            self._pending.append(_Pending(step, examples, batch, compare))

    def wait(self) -> None:
        """Wait until the engine is free."""
        for pending in self._pending:
            self._result(pending)

    def fleet_metrics(self, step: int, batch: CompletionBatch, clock: Clock) -> Metrics:
        """How old the rollouts of a step are, and what trainer and workers did since the last call; nothing without
        workers.

        Args:
            clock: that of the step. The trainer waits for rollouts in its phases ``rollout`` and ``resample``.
        """
        before, self._counted = self._counted, self._counts()
        if not self._counted:
            return {}
        new = {name: value - before[name] for name, value in self._counted.items()}
        ages = [step - 1 - completion.policy_version for group in batch.completions for completion in group]
        means = {f"fleet/{each}_s": new[f"{each}_s"] / new[f"{each}s"] for each in ("unit", "load") if new[f"{each}s"]}
        waited_s = clock.seconds["rollout"] + clock.seconds.get("resample", 0.0)
        return {
            "fleet/staleness": float(np.mean(ages)),
            "fleet/idle_trainer": waited_s / clock.total(),
            "fleet/idle_workers": new["idle_s"] / max(new["worker_s"], 1e-9),
            "fleet/restarts": new["restarts"],
            **means,
        }

    def _counts(self) -> dict[str, float]:
        return self._engine.counts() if isinstance(self._engine, FleetEngine) else {}

    def _result(self, pending: _Pending) -> CompletionBatch:
        """Wait for the rollouts of a thread."""
        if isinstance(self._engine, FleetEngine):
            return cast(CompletionBatch, self._engine.told(pending.batch))
        assert pending.batch is not None
        return pending.batch.result()

    def state_dict(self) -> list[dict[str, Any]]:
        """The rollouts that are finished but not taken, as plain values.

        No checkpoint holds the weights that wrote them, so the mismatch is measured now.

        Raises:
            TrainError: the mismatch between trainer and engine is too large.
        """
        return [self._saved(i) for i in range(len(self._pending))]

    def _saved(self, i: int) -> dict[str, Any]:
        pending = self._pending[i]
        batch = self._result(pending)
        mismatch = pending.compare(batch)
        self._pending[i] = pending._replace(compare=lambda _: mismatch)
        return {
            "step": pending.step,
            "examples": pending.examples,
            "draws": list(batch.draws),
            "passes": list(batch.passes),
            "mismatch": mismatch,
            "completions": [[_plain(completion) for completion in group] for group in batch.completions],
        }

    def _restored(self, each: Mapping[str, Any]) -> _Pending:
        """What ``state_dict`` returned of the rollouts of a step."""
        prompts = [self._setup.prompts[i] for i in each["examples"]]
        completions = [[_completion(line) for line in group] for group in each["completions"]]
        done: Future[CompletionBatch] = Future()
        done.set_result(CompletionBatch(prompts, completions, Draws(*each["draws"]), Passes(*each["passes"])))
        return _Pending(each["step"], list(each["examples"]), done, lambda _: each["mismatch"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while running := [each.batch for each in self._pending if each.batch is not None and not each.batch.done()]:
            if self._setup.episode_runner is not None:
                self._setup.episode_runner.stop()
            self._engine.abort()  # again: an engine forgets what it was told before a call began
            wait(running, timeout=0.2)
        self._threads.shutdown(wait=True)


def _plain(c: Completion) -> dict[str, Any]:
    names = ("tokens", "author", "behaviour_logprobs", "handover_logprobs")
    channels = {name: torch.from_numpy(getattr(c, name)) for name in names if getattr(c, name) is not None}
    episode: dict[str, Any] = {} if c.transcript is None else {"transcript": c.transcript.to_json()}
    if c.prompt is not None:
        episode |= {"prompt": [*c.prompt], "branches": [*map(_plain, c.branches)]}
    return {"key": c.key, "stop_reason": c.stop_reason, "policy_version": c.policy_version, **channels, **episode}


def _completion(line: Mapping[str, Any]) -> Completion:
    values: dict[str, Any] = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in line.items()}
    if "transcript" in values:
        values["transcript"] = Transcript.from_json(values["transcript"])
    if "prompt" in values:
        values |= {"prompt": tuple(values["prompt"]), "branches": tuple(map(_completion, values["branches"]))}
    return Completion(**values)


def snapshot_policy(setup: RunSetup, policy: PreTrainedModel) -> Compare:
    """Keep a copy of the policy's weights, when the engine has them, too.

    Returns:
        a function that takes the completions which these weights wrote, and returns the metrics of
        ``update.logprob_mismatch`` as ``mismatch/writer_…``, or none if there is no senior token. All processes must
        call it together. It raises a TrainError if the mean is above ``setup.mismatch_limit`` or not a number.
    """
    kept = [part.to("cpu", copy=True) for part in trained_parts(policy)]

    def compare(completions: CompletionBatch) -> Metrics:
        with swapped_weights(trained_parts(policy), kept):
            metrics = writer_mismatch(setup, policy, completions)
        if metrics:
            check_mismatch(setup.mismatch_limit, metrics["mismatch/writer_mean_abs"])
        return metrics

    return compare


@torch.no_grad()
def writer_mismatch(setup: RunSetup, policy: PreTrainedModel, completions: CompletionBatch) -> Metrics:
    """The mismatch of the policy's present weights on completions with tokens of the senior, one micro-batch for each
    data rank."""
    pairs = [(p, c) for p, group in zip(completions.prompts, completions.completions, strict=True) for c in group]
    rollouts = [rollout_of(prompt, completion, group=0, index=i) for i, (prompt, completion) in enumerate(pairs)]
    rollouts = [each for r in rollouts for each in r.sequences]
    rollouts = [r for r in rollouts if (r.author == Author.SENIOR).any()]
    budget, world = setup.config.train.tokens_per_micro_batch, setup.world
    bins = micro_batches([len(r.tokens) for r in rollouts], budget, parts=world.data_size)
    sample = bins[world.data_rank] if bins else []
    # a rank without work still joins the collectives
    batch = pack([rollouts[i] for i in sample], setup.device) if sample else pack_tokens([[0]], setup.device)
    senior = batch.author == Author.SENIOR
    scores = setup.scores(policy, batch, senior)
    gaps = logprob_mismatch(world, scores.differences(batch, senior))
    return {name.replace("mismatch/", "mismatch/writer_"): value for name, value in gaps.items()}
