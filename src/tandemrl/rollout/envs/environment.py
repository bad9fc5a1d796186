"""Environments: how an episode starts, which tools there are, what a turn is answered, and when an episode is over.

One ``Environment`` serves all episodes. What belongs to a single episode is its state, which the caller keeps.
Environments deal with text and messages only; ``episodes`` deals with tokens, templates, limits and processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandemrl.config import Config, ConfigError
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.processes.names import function_named, instantiate
from tandemrl.rollout.envs.tools import Tool, call_tool, schema_of

MAX_ERROR_CHARS = 500

State = Mapping[str, Any]
"""The state of one episode, made of JSON values. It is passed to the environment and returned by it, never shared or
changed in place, so that a call that is killed leaves the episode as it was."""


class BrokenEnvironmentError(RuntimeError):
    """The environment cannot answer at all (an index is missing, a service is down), so the run stops.

    If a tool merely cannot do what it is asked for, it raises an ordinary exception, whose text the author gets.
    """


def check_instance(environment: Any) -> None:
    """Refuse an object that is not an environment, such as an environment's class.

    Raises:
        ConfigError: it is not an environment; the message names the fix.
    """
    if environment is not None and not isinstance(environment, Environment):
        hint = f"{environment.__name__}()" if isinstance(environment, type) else "an instance of an Environment"
        raise ConfigError(f"environment={environment!r:.100}: pass {hint}")


class Opening(NamedTuple):
    """How an episode begins: the messages of its prompt, and its first state."""

    messages: Sequence[Message]
    state: State


@dataclass(frozen=True)
class Answer:
    """What an environment answers to a turn.

    messages: messages of the roles ``tool`` and ``user``, with the keys ``role``, ``content`` and, for a tool's
    message, ``name``. state: the state of the episode after the turn. over: whether the episode has ended; then the
    messages are recorded but not shown to the authors. counts: how often things happened in this turn, by name; they
    are summed over the episode.
    """

    messages: Sequence[Message]
    state: State
    over: bool = False
    counts: Mapping[str, int | float] = field(default_factory=dict)


class Environment:
    """An environment with tools. It runs the tools that a turn calls, and ends the episode at a turn that calls none,
    or that calls one of ``ends``. Subclasses override what they do differently.

    A turn is a message of the role ``assistant`` with ``content``. If it calls tools, it also has ``tool_calls``
    (``[{"type": "function", "function": {"name", "arguments"}}]``, whose names and arguments were checked). If it has
    calls that cannot be made, it has ``invalid_calls``, a list of what is wrong with each (see `parsing.parse_turn`).

    A subclass may have a method ``score(row, transcript) -> float | Score``. It then gives the reward of the rows, like
    a function given to ``train`` (see ``rewards``). ``score_group(row, transcripts)`` instead returns the scores of all
    episodes of a group at once, which it can compare. Without either, the ``data_source`` of a row decides.
    """

    tools: Sequence[Tool] = ()
    """Functions or bound methods with type hints and a Google docstring, from which their schemas are made. A parameter
    named ``row`` or ``state`` is filled in and not shown to the authors."""
    ends: frozenset[str] = frozenset()
    """Names of tools whose call ends the episode. Such a call is not run, nor are the calls after it in its turn."""
    system: str | None = None
    """A system message that is put in front of every row's own messages. None means no such message."""

    def start(self, row: Row) -> Opening:
        """The messages and the state that an episode of a row starts with.

        This is called in the training process, more than once for a row, so it has to be quick. The messages go
        through the chat template as they are: ``<|im_end|>`` in them becomes a control token, while in an answer it
        stays text. Put text that nobody has vetted, such as documents, into answers.
        """
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Opening([*system, *row.messages], {})

    def prepare(self) -> None:
        """Load what `reply` needs, such as a model. Called once in each answering process, before its first turn.

        Raises:
            BrokenEnvironmentError: what `reply` needs cannot be loaded.
        """

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        """Answer a turn. This implementation runs the turn's tool calls one after the other, and keeps their order.

        It is called in a separate process, from several threads at once. The process is killed if an answer takes
        longer than ``rollout.tool_timeout_s``.

        Args:
            row: the row of the episode.
            state: the state of the episode before the turn.
            message: the turn.

        Raises:
            BrokenEnvironmentError: the environment cannot answer at all. Any other exception outside of a tool stops
                the run, too.
        """
        known = {tool.__name__: tool for tool in self.tools}
        calls, invalid = message.get("tool_calls") or (), message.get("invalid_calls") or ()
        answers: list[Message] = []
        over, errors = not calls and not invalid, 0
        faults = [{"role": "tool", "content": f"Error: {fault}"[:MAX_ERROR_CHARS]} for fault in invalid]
        after = message.get("invalid_after") or [len(calls)] * len(faults)
        for i, call in enumerate(calls):
            answers += [fault for fault, count in zip(faults, after, strict=True) if count == i]
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if over := name in self.ends:
                break
            try:
                text, state = call_tool(known[name], arguments, row, state)
            except BrokenEnvironmentError:
                raise
            except BaseException as error:  # of a call's own thread, such as SystemExit and asyncio.CancelledError
                text, errors = f"Error: {str(error) or type(error).__name__}"[:MAX_ERROR_CHARS], errors + 1
            answers.append({"role": "tool", "name": name, "content": text})
        answers += [fault for fault, count in zip(faults, after, strict=True) if count == len(calls)]
        return Answer(answers, state, over, {"tool_errors": errors})

    def tool_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools, which the chat template shows to the authors.

        Raises:
            ConfigError: a tool cannot be described, two tools have the same name, or a name in ``ends`` is not that of
                a tool.
        """
        schemas = [schema_of(tool) for tool in self.tools]
        names = [schema["function"]["name"] for schema in schemas]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"environment {type(self).__name__}: two tools are named {min(twice)}")
        if unknown := sorted(self.ends - set(names)):
            raise ConfigError(f"environment {type(self).__name__}: {unknown[0]}, which ends an episode, is no tool")
        return schemas


def make_environment(config: Config) -> Environment | None:
    """The environment of a config, or None where a prompt gets one response.

    In ``module:factory``, the factory may be a function or a class. It is given the `Config` if it has a parameter
    ``config``, and ``rollout.environment_parameters``.

    Raises:
        ConfigError: the environment cannot be imported or made; the message names the key and the fix.
    """
    rollout = config.rollout
    kind, key = rollout.environment_kind, f"rollout.environment={rollout.environment}"
    if kind.path is None:
        return None
    tools = [function_named(path, f"rollout.tools: {path}", ConfigError) for path in rollout.tools]
    environment = instantiate(kind.path, key, ConfigError, rollout.environment_parameters, config=lambda: config)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{key}: it is a {type(environment).__name__}, not an Environment; return an instance of one")
    if tools:
        environment.tools = (*environment.tools, *tools)
    return environment
