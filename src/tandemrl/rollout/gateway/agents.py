"""Runs the episodes of a ``Source``: each has a session of the gateway, a limit of time, and an outcome or a failure.

A failure (a crash, a limit of time, no request at all) leaves an episode that has no score (``failed``). It is counted,
and training leaves it out; above ``rollout.agent.max_failed`` the run ends. One server in a thread of this process
serves all sessions of a step, over one open call of the engine.
"""

import asyncio
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import uvicorn

from tandemrl.config import Config, ConfigError, SelectionConfig
from tandemrl.data.messages import Transcript, sound
from tandemrl.data.rows import Row
from tandemrl.data.templates import template_of, template_variables
from tandemrl.processes.world import launched
from tandemrl.rewards.protocol import GraderError, Score
from tandemrl.rollout.call import CallEngine
from tandemrl.rollout.decoding_rows import Part
from tandemrl.rollout.engine import Completion, Draws, Engine, EngineError, OnProgress, Request, check_authors
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.envs.parsing import call_format_of
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.rollout.gateway.address import KEEP_ALIVE_S, listen, url_of
from tandemrl.rollout.gateway.engine_app import Server, application
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.requests import Reader
from tandemrl.rollout.gateway.sessions import Limits, Session, Written
from tandemrl.rollout.gateway.source import AgentFailedError, Endpoint, Outcome, Source
from tandemrl.rollout.gateway.texts import Speaker
from tandemrl.selection import Strategy, solo

HOST = "127.0.0.1"
GRACE_S = 1.0
"""How long a program that was cancelled may take to end."""


class AgentRunner(EpisodeRunner):
    """An `EpisodeRunner` whose episodes are the programs of a source.

    Args:
        source: the programs.
        config: the limits: ``rollout.{max_tokens, turn_tokens, max_turns, observation_tokens, max_rows}``,
            ``rollout.agent.*``.
        how: see `EpisodeRunner`.

    Raises:
        ConfigError: the chat template does not support several turns, or the junior has a vocabulary of its own.
    """

    def __init__(self, source: Source, tokenizer: Any, config: Config, **how: Any) -> None:
        ends: Collection[int] | None = how.get("eos_token_ids")
        if config.rollout.workers:
            raise ConfigError("rollout.workers: must be 0 with agents, which ask an engine of this process")
        if launched() > 1:
            raise ConfigError("rollout.environment: agents ask an engine of one trainer process; start one")
        if how.get("junior") is not None:
            raise ConfigError("rollout.environment: agents need one vocabulary; use a junior of the senior's family")
        self.environment = self.source = source
        self.config, self._whole = config.rollout, config
        self.name: str = getattr(source, "name", type(source).__name__)
        self.stopped = threading.Event()
        self.tools, self.schemas, self.junior_rendering = [], {}, None
        self.ends = frozenset([tokenizer.eos_token_id] if ends is None else ends)
        arguments = config.data.template_arguments
        # Or this is an error before the run.
        self.rendering = Rendering(
            tokenizer, [], eos_token_ids=self.ends, template_arguments=arguments, keep_turns=True
        )
        calls = call_format_of(template_of(tokenizer, [{}]))
        self._speaker = Speaker(tokenizer, calls or "hermes", self.ends)
        self._reader = Reader(
            tokenizer,
            0,
            strategy_of=lambda selection: solo(selection.first),
            selection=SelectionConfig(),
            defaults={},
            template_arguments=template_variables(tokenizer, arguments),
            calls=calls is not None,
            ends=self.ends,
        )

    def episode(self, request: Request, row: Row) -> Request:
        return replace(request, task=row)

    def elsewhere(self, config: Config) -> Callable[[], EpisodeRunner | None]:
        return lambda: None

    def close(self) -> None:
        """There is nothing to end between two calls of ``generate``."""

    def stop(self) -> None:
        self.stopped.set()

    def generate(
        self, engine: Engine, requests: Sequence[Request], strategy: Strategy, *, progress: OnProgress | None = None
    ) -> tuple[list[list[Completion]], Draws]:
        """Run an episode for each key of each request, whose sampling and key they have; the prompt is the program's.

        Raises:
            EngineError: the engine has no open calls or fails, authors are not the strategy's, a program blocks all
                others, or too many episodes failed; the message says why most of them did.
            ConfigError, BrokenEnvironmentError: the source cannot run any.
        """
        if not isinstance(engine, CallEngine):
            why = "agents need an engine with open calls in this process"
            raise EngineError(f"rollout.engine: {why}; use torch or vllm, one trainer process and rollout.workers=0")
        reader = replace(self._reader, context=engine.context, strategy_of=self._strategies(strategy))
        sessions = dict[str, Session]()
        thread = EngineThread(engine, hold=True, clients=lambda: len(sessions))
        server = Server(thread, reader, self._speaker, "pair", sessions=sessions)
        pairs = [(request, key) for request in requests for key in request.keys]
        with _serving(server) as url:
            told = _Loop(self, server, url, progress).run(pairs)
        if server.thread.failure is not None:
            raise server.thread.failure
        if causes := Counter(failure for _, _, failure in told if failure is not None):
            failed, most, why = sum(causes.values()), self.config.agent.max_failed, causes.most_common(1)[0][0]
            if failed > most * len(pairs):
                said = f"{failed} of {len(pairs)} episodes failed, more than rollout.agent.max_failed={most:g}"
                raise EngineError(f"{self.name}: {said}; mostly: {why}")
        draws = self._check([session for session, _, _ in told], strategy)
        done = iter([_episode(*each, key, engine) for each, (_, key) in zip(told, pairs, strict=True)])
        return [[next(done) for _ in request.keys] for request in requests], draws

    def _strategies(self, strategy: Strategy) -> Callable[[SelectionConfig], Strategy]:
        alone = {who: solo(who) for who in ("senior", "junior")}
        return lambda selection: alone[selection.first] if selection.strategy == "solo" else strategy

    def _check(self, sessions: Sequence[Session], strategy: Strategy) -> Draws:
        """Verify the authors of all branches; those of requests to one author are known."""
        whole, mixed = list[Completion](), list[Written]()
        for branch in chain.from_iterable(session.written() for session in sessions):
            if any(branch.roles):
                mixed.append(branch)
            else:
                whole.append(replace(branch.completion, transcript=Transcript(())))
        draws = check_authors(whole, strategy)
        for branch in mixed:
            for asking in branch.asked:
                assert asking.completion is not None
                check_authors([asking.completion], asking.request.strategy, [asking.request.history])
        return draws

    def limits(self, request: Request, engine: Engine) -> Limits:
        """What a session may write for a request."""
        r, tokens = self.config, request.sampling.max_tokens
        context = self._whole.data.max_prompt_tokens + tokens + r.observation_tokens
        return Limits(tokens, r.max_turns, r.turn_tokens, min(context, engine.context))


Told = tuple[Session, Outcome, str | None]
"""A session, what its program said, and why it failed."""


class _Loop:
    """The programs of a step, in a thread: one that never lets the others go on cannot be cancelled, but is noticed."""

    def __init__(self, runner: AgentRunner, server: Server, url: str, progress: OnProgress | None) -> None:
        self._runner, self._server, self._url, self._progress = runner, server, url, progress
        self._beat = time.monotonic()
        self._begun = Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    def run(self, pairs: Sequence[tuple[Request, int]]) -> list[Told]:
        """Run all episodes.

        Raises:
            EngineError: a program blocks the others, or the run ends.
        """
        told, limit_s = list[Any](), self._runner.config.agent.timeout_s

        def work() -> None:
            try:
                told.append(asyncio.run(self._all(pairs)))
            except BaseException as error:
                told.append(error)

        thread = threading.Thread(target=work, name="agents", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.2)
                if self._runner.stopped.is_set():
                    raise EngineError(f"{self._runner.name}: the run has ended, and its episodes with it")
                if time.monotonic() - self._beat > limit_s + 5:
                    raise EngineError(
                        f"{self._runner.name}: a coroutine has held up all others for {limit_s:g} s "
                        "(rollout.agent.timeout_s); await what takes time, or run the agent as a command"
                    )
        finally:
            if thread.is_alive() and self._begun.done():  # also when interrupted: no program outlives its run
                loop, task = self._begun.result()
                loop.call_soon_threadsafe(task.cancel)
                thread.join(5 * GRACE_S)
        if isinstance(told[0], BaseException):
            raise told[0]
        return told[0]

    async def _all(self, pairs: Sequence[tuple[Request, int]]) -> list[Told]:
        task = asyncio.current_task()
        assert task is not None
        self._begun.set_result((asyncio.get_running_loop(), task))
        beating = asyncio.create_task(self._beats())
        places = asyncio.Semaphore(self._runner.config.agent.at_once)
        tasks = [asyncio.create_task(self._one(request, key, places)) for request, key in pairs]
        try:
            return [*await asyncio.gather(*tasks)]
        finally:
            for task in (beating, *tasks):
                task.cancel()
            await asyncio.wait(tasks, timeout=GRACE_S)

    async def _beats(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(0.2)

    async def _one(self, request: Request, key: int, places: asyncio.Semaphore) -> Told:
        runner, server = self._runner, self._server
        limits = runner.limits(request, server.thread.engine)
        session = Session(key, server.reader, request.sampling, limits)
        async with places:
            server.sessions[session.name] = session
            try:
                outcome, failure = await self._outcome(request.task, session)
            finally:
                session.close()
                del server.sessions[session.name]
        written = sum(int((each.completion.author >= 0).sum()) for each in session.written())
        if failure is None and not written:
            failure = "the agent did not ask the model"
        if failure is not None:  # the name is a secret, and both differ from run to run
            failure = failure.replace(self._url, "").replace(session.name, "SESSION")[:400]
        if self._progress is not None:
            self._progress(written)
        return session, outcome, failure

    async def _outcome(self, row: Row, session: Session) -> tuple[Outcome, str | None]:
        """What the program says, or why it failed."""
        limit_s = self._runner.config.agent.timeout_s
        endpoint = Endpoint(f"{self._url}/sessions/{session.name}/v1", session.name)
        task = asyncio.create_task(self._ended(row, endpoint))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio complains
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
            if not done:
                return Outcome(), f"no end within {limit_s:g} s (rollout.agent.timeout_s)"
            return (Outcome(), "it was cancelled") if task.cancelled() else (task.result(), None)
        except (ConfigError, BrokenEnvironmentError, GraderError):
            raise
        except AgentFailedError as error:
            return Outcome(), str(error)
        except Exception as error:
            return Outcome(), f"{type(error).__name__}: {error}"
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_S)

    async def _ended(self, row: Row, endpoint: Endpoint) -> Outcome:
        try:
            return await self._runner.source.episode(row, endpoint)
        except SystemExit as error:  # else the run would end, by this status
            raise AgentFailedError(f"SystemExit: {error}") from None


def _episode(session: Session, outcome: Outcome, failure: str | None, key: int, engine: Engine) -> Completion:
    """The completion of an episode: that of the branch that was written last, with the others by their keys."""
    branches = sorted(
        session.written(), key=lambda each: (each.asked[0].branch is not session.last, each.completion.key)
    )
    counts: dict[str, float] = {"agent/requests": sum(len(each.roles) for each in branches)}
    counts |= {"agent/forks": max(0, len(branches) - 1), "agent/failed": failure is not None, **outcome.counts}
    score, messages = outcome.score, [] if not branches else branches[0].messages
    state = {} if outcome.state is None else {"state": outcome.state}
    if score is not None and failure is None:
        state["score"] = score._asdict() if isinstance(score, Score) else float(score)
    state |= {} if failure is None else {"failure": failure}
    said = messages if outcome.messages is None else outcome.messages
    numbers = {name: float(n) for name, n in counts.items()}
    transcript = Transcript(tuple(sound([*said])), sound(state or None), numbers, outcome.answer)
    if not branches:
        nothing = Part.of((), 0)
        return Completion(key, *nothing[:3], "failed", engine.policy_version, transcript)
    main, *others = (replace(each.completion, prompt=each.prompt) for each in branches)
    reason = main.stop_reason if failure is None else "failed"
    return replace(main, stop_reason=reason, transcript=transcript, branches=tuple(others))


@contextmanager
def _serving(server: Server) -> Iterator[str]:
    """A server at a port of this machine alone, in a thread. Its address; afterwards, the engine is free again."""
    settings: Mapping[str, Any] = {"log_level": "error", "access_log": False, "timeout_keep_alive": KEEP_ALIVE_S}
    app = application(server, hosts={HOST}, api_key=secrets.token_urlsafe(24))  # sessions alone are answered
    running = uvicorn.Server(uvicorn.Config(app, **settings, timeout_graceful_shutdown=1))
    with closing(server.thread), listen(HOST, 0) as listening:
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, name="gateway", daemon=True)
        thread.start()
        try:
            yield url_of(HOST, listening)
        finally:
            running.should_exit = True
            thread.join()
