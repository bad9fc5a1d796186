"""An engine in a thread of its own, for requests that come one by one. Each joins the open call with its next step."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tandemrl.rollout.call import Call, CallEngine, Finished, NewTokens
from tandemrl.rollout.engine import Completion, EngineError, Request

OnTokens = Callable[[int, list[int], list[float]], None]
"""Hears of new tokens, in the thread of the engine: the number of the completion in its job, its further tokens and
their log-probs."""
GAP_S, LONGEST_GAP_S = 0.05, 0.25
"""How long the first step waits for the next of several requests that are about to come, and any step at most."""


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
        clients: how many may ask, each once at a time. While less than a quarter of them is served, a request that
            comes waits for the next one, as long as the last step took: rows that join together cost fewer passes.
    """

    def __init__(self, engine: CallEngine, *, hold: bool = False, clients: Callable[[], int] = lambda: 0) -> None:
        self.engine, self._closed, self._hold, self._clients = engine, False, hold, clients
        self._gap_s = GAP_S
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
                    self._gather(call, first)
                    while self._running or (self._hold and not self._closed):
                        job = None
                        if self._running:
                            self._step(call)
                        elif (job := self._waiting.get()) is None:
                            break
                        self._gather(call, job)
                        if lost := [number for number, job in self._running.items() if self._closed or not job.wanted]:
                            call.abort(lost)
            except Exception as error:
                logging.getLogger(__name__).exception("the engine failed; the requests that it was writing are ended")
                failed, self._running, self.failure = {first, *self._running.values()}, {}, _of_engine(error)
                for job in failed:  # the first is not running if no call could be opened
                    if not job.done.done():
                        job.done.set_exception(_of_engine(error))

    def _gather(self, call: Call, job: Job | None) -> None:
        """Let a job join, those that wait, and those that come soon."""
        few = 4 * len(self._running) < self._clients()
        with suppress(Empty):
            job = job or self._waiting.get_nowait()
            while job is not None:
                self._join(call, job)
                soon = few and len(self._running) < self._clients()
                job = self._waiting.get(timeout=self._gap_s if soon else 0)

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
        began = time.monotonic()
        events = call.step()
        self._gap_s = min(time.monotonic() - began, LONGEST_GAP_S)
        for event in events:
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
