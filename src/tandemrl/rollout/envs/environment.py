"""What authors act in: how an episode starts, which tools there are, what the world answers, when it is over.

One ``Environment`` serves all episodes; what belongs to one is its state, which the caller keeps. Environments know
text and messages only: tokens, templates, limits and processes are the business of ``episodes``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandemrl.config import ConfigError
from tandemrl.data.rows import Row
from tandemrl.messages import Message
from tandemrl.rollout.envs.tools import Tool, call_tool, schema_of

MAX_ERROR_CHARS = 500

State = Mapping[str, Any]
"""What an environment keeps of one episode: JSON values. It is passed in and handed back, never shared or changed in
place: a call that is killed leaves the episode as it was."""


class BrokenEnvironmentError(RuntimeError):
    """The world cannot answer at all (an index is missing, a service is down): the run stops. What a tool merely cannot
    do is an ordinary exception, whose text the author gets."""


def check_instance(environment: Any) -> None:
    """Refuse what is given as an environment and is none, such as its class.

    Raises:
        ConfigError: names the fix.
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
    """What the world does after a turn.

    messages: of the roles ``tool`` and ``user``: ``role``, ``content`` and, if it is a tool's, ``name``. over: the
    episode has ended; the messages are recorded and not shown. counts: what happened, by name, to be summed over the
    episode.
    """

    messages: Sequence[Message]
    state: State
    over: bool = False
    counts: Mapping[str, int | float] = field(default_factory=dict)


class Environment:
    """Calls of tools until a turn has none, or calls one of ``ends``. Subclasses replace what is different.

    A turn is a message of the role ``assistant`` with ``content``; with ``tool_calls`` (``[{"type": "function",
    "function": {"name", "arguments"}}]``, parsed and of the right names and arguments) where it calls any; and with
    ``invalid_calls``, a list of what is wrong with calls that cannot be made.

    A subclass may have ``score(row, transcript) -> float | Score``: then it is the reward of its rows, like a function
    given to ``train`` (see ``rewards``). Without it, a row's ``data_source`` says how it is scored, as ever.
    """

    tools: Sequence[Tool] = ()
    """Plain functions with type hints and a Google docstring, from which their schemas are made, or bound methods. A
    parameter named ``row`` or ``state`` is filled in and not shown to the authors."""
    ends: frozenset[str] = frozenset()
    """Names of tools whose call ends the episode. They are not run, nor is what the same turn calls after them."""
    system: str | None = None
    """A system message in front of every row's own messages."""

    def start(self, row: Row) -> Opening:
        """How an episode starts from a row. Called in the training process, more than once: it has to be quick.

        These messages go through the chat template as they are: ``<|im_end|>`` in them is a control token, where in an
        answer it is text. What nobody has vetted, such as documents, belongs into answers.
        """
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return Opening([*system, *row.messages], {})

    def prepare(self) -> None:
        """Load what `reply` needs, such as a model. Called once in a process that answers, before its first turn.

        Raises:
            BrokenEnvironmentError: it is not there.
        """

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        """What the world answers to a turn. Called in a process of its own that is killed after
        ``rollout.tool_timeout_s``, and from several threads at once. Here: runs the calls one after the other.

        Raises:
            BrokenEnvironmentError: see there. Any other exception outside of a tool stops the run, too.
        """
        known = {tool.__name__: tool for tool in self.tools}
        calls, invalid = message.get("tool_calls") or (), message.get("invalid_calls") or ()
        answers: list[Message] = []
        over, errors = not calls and not invalid, 0
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if over := name in self.ends:
                break
            try:
                text, state = call_tool(known[name], arguments, row, state)
            except BrokenEnvironmentError:
                raise
            except (Exception, SystemExit) as error:
                text, errors = f"Error: {error or type(error).__name__}"[:MAX_ERROR_CHARS], errors + 1
            answers.append({"role": "tool", "name": name, "content": text})
        answers += [{"role": "tool", "content": f"Error: {fault}"[:MAX_ERROR_CHARS]} for fault in invalid]
        return Answer(answers, state, over, {"tool_errors": errors})

    def tool_schemas(self) -> list[dict[str, Any]]:
        """What the authors are told of the tools, for a chat template.

        Raises:
            ConfigError: a tool cannot be described, two have one name, or one of ``ends`` is no tool.
        """
        schemas = [schema_of(tool) for tool in self.tools]
        names = [schema["function"]["name"] for schema in schemas]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"environment {type(self).__name__}: two tools are named {min(twice)}")
        if unknown := sorted(self.ends - set(names)):
            raise ConfigError(f"environment {type(self).__name__}: {unknown[0]}, which ends an episode, is no tool")
        return schemas
