"""An engine in a thread of its own, for requests that come one by one. Each joins the open call with its next step."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

from tandemrl.rollout.call import Call, CallEngine, Finished, NewTokens
from tandemrl.rollout.engine import Completion, EngineError, Request

OnTokens = Callable[[int, list[int], list[float]], None]
"""Hears of new tokens, in the thread of the engine: the number of the completion in its job, its further tokens and
their log-probs."""


@dataclass(slots=True, eq=False)
class Job:
    """Requests to an engine, whose completions are wanted together."""

    requests: Sequence[Request]
    on_tokens: OnTokens | None
    done: Future[list[Completion]] = field(default_factory=Future)
    numbers: list[int] = field(default_factory=list)
    """Of its completions in the open call."""
    left: int = 0
    """How many of them have not ended."""
    wanted: bool = True


class EngineThread:
    """Writes what is submitted. The call stays open as long as there is something to write. If it fails, so do the jobs
    in it, by an ``EngineError``; those that come later get a new call.

    Args:
        engine: the engine, which nothing else may use.
        hold: keep the call open, once there is one, until ``close``. So all is written by the same weights.
    """

    def __init__(self, engine: CallEngine, *, hold: bool = False) -> None:
        self.engine, self._closed, self._hold = engine, False, hold
        self.failure: EngineError | None = None
        """The last one."""
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._running: dict[int, Job] = {}
        """By the numbers of their completions."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], on_tokens: OnTokens | None = None) -> Job:
        """Begin to write the completions of some requests.

        Raises:
            EngineError: the engine cannot serve one of them.
        """
        for index, request in enumerate(requests):
            self.engine.check(index, request)
        job = Job(requests, on_tokens)
        self._waiting.put(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a job that nobody waits for."""
        job.wanted = False
        job.done.cancel()  # if it has not begun

    def close(self) -> None:
        """End what is being written, and the thread. The engine stays open, and keeps nothing of sessions."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join()
        self.engine.forget()

    def _run(self) -> None:
        while not self._closed and (first := self._waiting.get()) is not None:
            try:
                with self.engine.open() as call:
                    self._join(call, first)
                    while self._running or (self._hold and not self._closed):
                        if not self._running:
                            if (job := self._waiting.get()) is None:
                                break
                            self._join(call, job)
                            continue
                        self._step(call)
                        while not self._waiting.empty() and (job := self._waiting.get()) is not None:
                            self._join(call, job)
                        if lost := [number for number, job in self._running.items() if self._closed or not job.wanted]:
                            call.abort(lost)
            except Exception as error:
                logging.getLogger(__name__).exception("the engine failed; the requests that it was writing are ended")
                failed, self._running, self.failure = {first, *self._running.values()}, {}, _of_engine(error)
                for job in failed:  # the first is not running if no call could be opened
                    if not job.done.done():
                        job.done.set_exception(_of_engine(error))

    def _join(self, call: Call, job: Job) -> None:
        if not job.done.set_running_or_notify_cancel():
            return
        try:
            job.numbers = call.submit(job.requests)
        except Exception as error:
            job.done.set_exception(_of_engine(error))
            return
        job.left = len(job.numbers)
        self._running |= dict.fromkeys(job.numbers, job)

    def _step(self, call: Call) -> None:
        for event in call.step():
            job = self._running[event.number]
            if isinstance(event, NewTokens) and job.on_tokens is not None:
                job.on_tokens(job.numbers.index(event.number), event.tokens, event.logprobs)
            elif isinstance(event, Finished):
                job.left -= 1
                if job.left == 0:
                    for number in job.numbers:
                        del self._running[number]
                    job.done.set_result(call.take(job.numbers))


def _of_engine(error: Exception) -> EngineError:
    said = f"the engine failed: {type(error).__name__}: {error}"
    return error if isinstance(error, EngineError) else EngineError(said)
