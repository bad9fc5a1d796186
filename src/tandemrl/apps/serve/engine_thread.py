"""An engine in a thread of its own, for requests that come one by one: those that wait are written in one call."""

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from tandemrl.rollout.engine import Completion, Engine, OnTokens, Request, check_request
from tandemrl.rollout.partner import check_partnered


@dataclass(slots=True, eq=False)
class Job:
    """A request to an engine. ``on_tokens`` counts completions by the keys of the request."""

    request: Request
    on_tokens: OnTokens | None
    done: Future[list[Completion]] = field(default_factory=Future)


class EngineThread:
    """Writes what is submitted. What comes while the engine writes waits for the next call of ``generate``.

    Args:
        engine: the engine, which nothing else may use.
        apart: whether its junior has a vocabulary of its own.
    """

    def __init__(self, engine: Engine, *, apart: bool = False) -> None:
        self.engine, self.apart = engine, apart
        self._waiting: SimpleQueue[Job | None] = SimpleQueue()
        self._running: list[Job] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Job:
        """Begin to write the completions of a request.

        Args:
            on_tokens: called in the thread of the engine. An engine that does not stream tells everything at the end.

        Raises:
            EngineError: the engine cannot serve the request.
        """
        check_request(0, request, self.engine)
        check_partnered(0, request, apart=self.apart)
        job = Job(request, on_tokens)
        self._waiting.put(job)
        return job

    def cancel(self, jobs: Iterable[Job]) -> None:
        """End jobs that nobody waits for. Keys that another running job has, too, are written on."""
        begun = {job for job in jobs if not job.done.cancel()}
        with self._lock:
            unwanted = {key for job in self._running if job in begun for key in job.request.keys}
            self._running = [job for job in self._running if job not in begun]
            unwanted -= {key for job in self._running for key in job.request.keys}
            if unwanted:
                self.engine.abort(unwanted)

    def close(self) -> None:
        """End what is being written, and the thread. The engine stays open."""
        self._waiting.put(None)
        while self._thread.is_alive():
            self.engine.abort()  # again: it forgets what it was told before a call began
            self._thread.join(0.2)

    def _run(self) -> None:
        while (first := self._waiting.get()) is not None:
            jobs = [job for job in (first, *self._others()) if job.done.set_running_or_notify_cancel()]
            if not jobs:
                continue
            with self._lock:
                self._running = jobs
            try:
                groups = self._written(jobs)
            except Exception as error:
                for job in jobs:
                    job.done.set_exception(error)
            else:
                for job, group in zip(jobs, groups, strict=True):
                    job.done.set_result(group)
            finally:
                with self._lock:
                    self._running = []

    def _others(self) -> Iterator[Job]:
        while True:
            try:
                job = self._waiting.get_nowait()
            except Empty:
                return
            if job is None:  # `close`, after this call
                self._waiting.put(None)
                return
            yield job

    def _written(self, jobs: list[Job]) -> list[list[Completion]]:
        requests = [job.request for job in jobs]
        streams: dict[str, Any] = {"on_tokens": _dealt(jobs)} if self.engine.info.streams else {}
        groups = self.engine.generate(requests, **streams)
        if not streams:
            for job, group in zip(jobs, groups, strict=True):
                for number, one in enumerate(group):
                    if job.on_tokens is not None:
                        job.on_tokens(number, one.tokens.tolist(), one.behaviour_logprobs.tolist())
        return groups


def _dealt(jobs: list[Job]) -> OnTokens:
    """What gives the tokens of each completion of a call to the job that it belongs to."""
    owners = [(job, number) for job in jobs for number in range(len(job.request.keys))]

    def on_tokens(number: int, tokens: list[int], logprobs: list[float]) -> None:
        job, own = owners[number]
        if job.on_tokens is not None:
            job.on_tokens(own, tokens, logprobs)

    return on_tokens
