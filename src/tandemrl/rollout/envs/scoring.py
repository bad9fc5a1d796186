"""Scoring of whole batches: cheap items here, the rest in processes that are killed when they hang. No torch."""

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.math import GraderError, Score, Undecided, boxed_score, quick_score, require_math_verify

WORKER = (sys.executable, "-P", "-m", "tandemrl.rollout.envs.worker")
START_LIMIT_S = 120.0
ORPHAN_GRACE_S = 30.0
PAIRS_PER_WORKER = 8
"""A further process is worth its start (half a second of imports) for about this many comparisons."""

Pair = tuple[str, str]
Outcome = bool | str
"""A verdict, or how there came to be none: "timeout" or "failure"."""


class Scorer:
    """Scores responses in order; ``reward.timeout_s`` is a hard limit per item, from any thread.

    Strings and plain numbers are compared in this process. Only the rest goes to math-verify in child processes, which
    are started when first needed; one that hangs or dies is killed and replaced. Such an item scores 0, with the part
    ``timeout`` or ``failure`` set to 1, and is counted in ``timeouts`` or ``failures``.

    Args:
        worker: command of a scoring process (see `worker.serve`).

    Raises:
        GraderError: math-verify is not installed, or ``reward.workers`` is below 1.

    Example:
        >>> from tandemrl.data.rows import Row
        >>> with Scorer(RewardConfig()) as scorer:
        ...     [score.value for score in scorer.score([(Row("a", (), "math500", "7", {}), r"\\boxed{7}")])]
        [1.0]
    """

    def __init__(self, reward: RewardConfig, *, worker: Sequence[str] = WORKER) -> None:
        if reward.workers is not None and reward.workers < 1:
            raise GraderError(f"reward.workers must be at least 1, or null to choose, got {reward.workers}")
        require_math_verify()
        self.timeouts = 0
        self.failures = 0
        self._reward = reward
        self._command = tuple(worker)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()

    def score(self, items: Sequence[tuple[Row, str]]) -> list[Score]:
        """One score per (row, response), in the order given.

        Raises:
            DataError: a row's ``data_source`` has no scorer.
            GraderError: scoring processes do not start, or every one of several items hung or crashed.
        """
        reward = self._reward
        quick = [quick_score(row, text, gsm8k=reward.gsm8k, format_score=reward.format_score) for row, text in items]
        pairs = list(dict.fromkeys((item.gold, item.answer) for item in quick if isinstance(item, Undecided)))
        with self._lock:
            outcomes = dict(zip(pairs, self._grade(pairs), strict=True))
            scores = [self._settle(item, outcomes) if isinstance(item, Undecided) else item for item in quick]
        if len(scores) > 1 and all(score.parts.keys() & {"timeout", "failure"} for score in scores):
            raise GraderError(
                f"none of {len(scores)} responses could be scored: all hung for {reward.timeout_s} s or crashed; raise "
                "reward.timeout_s if the machine is slow"
            )
        return scores

    def close(self) -> None:
        """End the scoring processes; the next `score` starts new ones."""
        with self._lock:
            while self._workers:
                self._workers.pop().kill()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self, item: Undecided, outcomes: dict[Pair, Outcome]) -> Score:
        outcome = outcomes[item.gold, item.answer]
        if isinstance(outcome, bool):
            return boxed_score(outcome, item.answer)
        self.timeouts += outcome == "timeout"
        self.failures += outcome == "failure"
        return boxed_score(False, item.answer, **{outcome: 1.0})

    def _grade(self, pairs: Sequence[Pair]) -> list[Outcome]:
        """Deal the pairs to idle workers until each has an outcome."""
        outcomes: list[Outcome] = ["failure"] * len(pairs)
        waiting = deque(range(len(pairs)))
        most = self._most_workers(len(pairs))
        for dead in [worker for worker in self._workers if not worker.running()]:
            self._dismiss(dead)
        try:
            while waiting or any(worker.task is not None for worker in self._workers):
                self._employ(waiting, most, pairs)
                active = {worker.fileno(): worker for worker in self._workers if worker.deadline < math.inf}
                nearest = min(worker.deadline for worker in active.values())
                answered = wait(list(active), timeout=max(0.0, nearest - time.monotonic()))
                now = time.monotonic()
                for descriptor, worker in active.items():
                    task = worker.task
                    if descriptor in answered:
                        outcome = worker.receive()
                    elif now >= worker.deadline:
                        outcome = worker.abandon()
                    else:
                        continue
                    if not worker.alive:
                        self._dismiss(worker)
                    if task is not None:
                        outcomes[task] = outcome
        except BaseException:  # an interrupted worker would answer the next batch with this one's verdict
            while self._workers:
                self._workers.pop().kill()
            raise
        return outcomes

    def _employ(self, waiting: deque[int], most: int, pairs: Sequence[Pair]) -> None:
        """Give idle workers the next pairs, and start as many workers as the rest is worth."""
        for worker in self._workers:
            if waiting and worker.deadline == math.inf:
                task = waiting.popleft()
                worker.send(task, pairs[task], self._reward.timeout_s)
        starting = sum(worker.task is None for worker in self._workers)
        for _ in range(min(most - len(self._workers), len(waiting) - starting)):
            self._workers.append(_Worker(self._command))

    def _dismiss(self, worker: "_Worker") -> None:
        """Remove a worker that hung or died; one that never got ready means that none will."""
        self._workers.remove(worker)
        last_words = worker.kill()
        if not worker.ready:
            raise GraderError(f"scoring process `{' '.join(self._command)}` did not start: {last_words}")

    def _most_workers(self, count: int) -> int:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self._reward.workers or max(1, min(cores, math.ceil(count / PAIRS_PER_WORKER)))


class _Worker:
    """One scoring process. ``deadline`` is infinite while it is idle; ``task`` is the pair that it is working on."""

    def __init__(self, command: Sequence[str]) -> None:
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in kill()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            bufsize=0,
        )
        self.ready = False
        self.alive = True
        self.task: int | None = None
        self.deadline = time.monotonic() + START_LIMIT_S

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, task: int, pair: Pair, limit_s: float) -> None:
        assert self._process.stdin is not None
        self.task, self.deadline = task, time.monotonic() + limit_s
        with contextlib.suppress(BrokenPipeError):  # it just died: `receive` will find that out
            self._process.stdin.write(json.dumps([*pair, limit_s + ORPHAN_GRACE_S]).encode() + b"\n")

    def receive(self) -> Outcome:
        """The verdict that is waiting to be read; "failure" if there is none because of an error or a death."""
        line = os.read(self.fileno(), 2**16)  # a reply is one short line, written at once
        self.task, self.deadline = None, math.inf
        self.alive = line != b""
        self.ready = self.ready or self.alive
        verdict = json.loads(line) if self.alive else None
        return verdict if isinstance(verdict, bool) else "failure"

    def abandon(self) -> Outcome:
        """Give up on a worker whose deadline has passed."""
        self.alive = False
        return "timeout"

    def kill(self) -> str:
        """End the process; returns the end of what it wrote to stderr, or its exit status."""
        self._process.kill()
        self._process.communicate()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace").strip()[-500:] or f"exit status {self._process.returncode}"
