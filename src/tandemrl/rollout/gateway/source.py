"""Sources of episodes: programs that ask the models themselves, at an endpoint of their own, and say how it went.

A source is an ``Environment`` of another kind: it is named and passed where one is (``rollout.environment``,
``train(rollouts=…)``), and what comes of it goes the same way. It has one method to write, ``episode``. `openai_agent`
makes one of a coroutine or a command. No starlette and no torch is imported here.
"""

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tandemrl.config import Config, ConfigError
from tandemrl.config.hints import pip_install
from tandemrl.data.messages import Message, Transcript
from tandemrl.data.rows import Row
from tandemrl.processes.names import function_named, import_object
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.envs.environment import Answer, BrokenEnvironmentError, Environment, State

USED_UP = "context_length_exceeded"
"""In the refusal of a request, once a limit of the session is used up."""
_ENDINGS = {"score", "answer", "counts"}
MAX_OUTPUT = 1 << 20
"""Bytes of a command's output that are kept: its end."""


class Endpoint(NamedTuple):
    """Where the program of an episode asks: a server of OpenAI's interface. Under ``root`` there is
    ``/inference/v1/generate``, too. Models are ``senior``, ``junior``, and by any other name both together."""

    base_url: str
    api_key: str

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")


class AgentFailedError(RuntimeError):
    """An episode came to nothing: it has no score and is left out. Any other exception of a program says the same."""


@dataclass(frozen=True)
class Outcome:
    """What a program says of its episode.

    score: its reward, if the source gives it (``transcript.state["score"]``); None: none, so it is left out. answer:
    the text that is scored otherwise; None: what the authors wrote in the branch that was written last. counts: numbers
    to be logged. messages, state: those of the transcript; None: those sent and answered in that branch, and nothing.
    """

    score: float | Score | None = None
    answer: str | None = None
    counts: Mapping[str, int | float] = field(default_factory=dict)
    messages: Sequence[Message] | None = None
    state: Any = None


class Source(Environment):
    """A source of episodes. A subclass that gives the reward has ``score`` or ``score_group``, as an environment has;
    the rewards of other sources are those of the rows."""

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        """Run one episode. It may be cancelled, at a limit of time; many run at once.

        Raises:
            AgentFailedError: the episode came to nothing; so says any other exception but these two.
            ConfigError, BrokenEnvironmentError: no episode can be run; the run ends.
        """
        raise NotImplementedError  # what a subclass has to write

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        raise BrokenEnvironmentError(f"{type(self).__name__} asks the models itself; it cannot answer a turn")

    def make_runner(self, tokenizer: Any, config: Config, **how: Any) -> Any:
        """The ``EpisodeRunner`` of this source.

        Raises:
            ConfigError: a package is missing, or the junior has a vocabulary of its own.
        """
        try:
            runner = import_object("tandemrl.rollout.gateway.agents:AgentRunner")
        except ImportError as error:
            raise ConfigError(f"rollout.environment: {error.name} is missing; {pip_install('serve')}") from None
        return runner(self, tokenizer, config, **how)


class ScoredSource(Source):
    """A source whose episodes give their reward (``Outcome.score``)."""

    def score(self, row: Row, transcript: Transcript) -> Any:
        found = (transcript.state or {}).get("score")
        return Score(**found) if isinstance(found, Mapping) else found


def openai_agent(run: Callable[..., Any] | Sequence[str], *, scores: bool = False) -> Source:
    """A source of a program that asks a server of OpenAI's interface.

    Args:
        run: a coroutine function, which gets those of ``row``, ``base_url``, ``api_key``, ``client`` (an
            ``openai.AsyncOpenAI``) that it names; or a command, which gets the row as JSON on its standard input, and
            OPENAI_BASE_URL and OPENAI_API_KEY. What counts is what the function returns, or the last line that the
            command prints: None or an answer to score, or with ``scores`` a number; or, of either, an object (JSON)
            with any of ``score``, ``answer``, ``counts``.
        scores: whether the program gives the reward. Else its answer is scored as a response to its row.

    Raises:
        ConfigError: it is neither.
    """
    if callable(run):
        if not inspect.iscoroutinefunction(run):
            raise ConfigError(f"openai_agent({run!r:.80}): pass a coroutine function (async def), or a command")
    elif isinstance(run, str) or not run or not all(isinstance(part, str) for part in run):
        raise ConfigError(f"openai_agent({run!r:.80}): pass a function, or a command as a list, [python, my_agent.py]")
    return (_ScoredProgram if scores else _Program)(run if callable(run) else tuple(run))


def agent(config: Config) -> Source:
    """The source of ``rollout.agent``: ``[module:function]`` or a command.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    run, scores = config.rollout.agent.run, config.rollout.agent.scores
    if len(run) == 1 and ":" in run[0]:
        return openai_agent(function_named(run[0], f"rollout.agent.run={run[0]}", ConfigError), scores=scores)
    return openai_agent(run, scores=scores)


class _Program(Source):
    """See `openai_agent`."""

    scored = False

    def __init__(self, run: Callable[..., Any] | tuple[str, ...]) -> None:
        self.run = run
        self.name = getattr(run, "__qualname__", "") or " ".join(run if isinstance(run, tuple) else (repr(run),))

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        if callable(self.run):
            return self._outcome(await _call(self.run, row, endpoint))
        last = await _command(self.run, row, endpoint)
        with suppress(ValueError):
            told = json.loads(last)
            ours = isinstance(told, dict) and not _ENDINGS.isdisjoint(told)  # any other object is an answer
            if isinstance(told, (dict, int, float)) if self.scored else ours:
                return self._outcome(told)
        return self._outcome(last)

    def _outcome(self, told: Any) -> Outcome:
        known = told if isinstance(told, Mapping) else {"score" if self.scored else "answer": told}
        kinds = {"score": (int, float, Score) if self.scored else (), "answer": str, "counts": Mapping}
        counts = known.get("counts")
        uncounted = isinstance(counts, Mapping) and not all(isinstance(each, (int, float)) for each in counts.values())
        wrong = [name for name, x in known.items() if x is not None and not isinstance(x, kinds.get(name, ()))]
        if wrong := [*wrong, *["counts"] * uncounted]:
            fix = (
                "return a number"
                if self.scored
                else "return a text to score, or pass scores=True (rollout.agent.scores)"
            )
            raise ConfigError(f"the agent ended with {told!r:.100}, whose {wrong[0]} is none; {fix}")
        known = {name: float(value) if type(value) is int else value for name, value in known.items()}
        return Outcome(**{name: value for name, value in known.items() if value is not None})


class _ScoredProgram(ScoredSource, _Program):
    """The same, of one that ends with its score."""

    scored = True


async def _call(function: Callable[..., Any], row: Row, endpoint: Endpoint) -> Any:
    offered = {"row": row, "base_url": endpoint.base_url, "api_key": endpoint.api_key}
    wanted = inspect.signature(function).parameters
    given = {name: value for name, value in offered.items() if name in wanted}
    if "client" not in wanted:
        return await function(**given)
    async with client_of(*endpoint) as client:
        return await function(client=client, **given)


def client_of(base_url: str, api_key: str, **more: Any) -> Any:
    """An ``openai.AsyncOpenAI`` of a server of this machine: it asks no proxy.

    Raises:
        ConfigError: the package is missing.
    """
    try:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    except ImportError:
        raise ConfigError("the agent asks for `client`: pip install openai, or take base_url and api_key") from None
    # Each would read all certificates, though there is no TLS.
    plain = DefaultAsyncHttpxClient(verify=False, trust_env=False, **more)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain, **more)


async def _command(command: Sequence[str], row: Row, endpoint: Endpoint) -> str:
    """Run a command, whose process group ends with it in any case. Returns the last line that it prints."""
    variables = {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1"]))
    variables |= {"NO_PROXY": direct, "no_proxy": direct}
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | variables, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"rollout.agent.run={[*command]}: {error.strerror or error}") from None
    assert process.stdin is not None
    readers = [asyncio.create_task(_end(stream)) for stream in (process.stdout, process.stderr)]
    try:
        process.stdin.write(json.dumps({name: getattr(row, name) for name in _TOLD}, default=str).encode() + b"\n")
        with suppress(ConnectionError):  # it need not read
            await process.stdin.drain()
        process.stdin.close()
        await _exit(process)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _exit(process)
        done, late = await asyncio.wait(readers, timeout=1.0)  # one that left the group may hold the pipe
        for task in late:
            task.cancel()
    said, wrong = (reader.result().decode(errors="replace") if reader in done else "" for reader in readers)
    if process.returncode:
        last = wrong.strip().rpartition("\n")[2][-300:]
        raise AgentFailedError(f"exit status {process.returncode}: {last}")
    return next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")


async def _exit(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process, not for that of its pipes, which others may hold."""
    while process.returncode is None:
        await asyncio.sleep(0.02)


_TOLD = ("example_id", "messages", "data_source", "ground_truth", "extra_info", "ability")


async def _end(stream: asyncio.StreamReader | None) -> bytes:
    """The end of what comes out of a stream, however much that is."""
    assert stream is not None
    kept = b""
    for piece in iter(partial(stream.read, 1 << 16), None):
        if not (read := await piece):
            break
        kept = (kept + read)[-MAX_OUTPUT:]
    return kept
