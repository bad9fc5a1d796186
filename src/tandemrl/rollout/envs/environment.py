"""Environments: how an episode starts, which tools there are, what a turn is answered, and when an episode is over.
Tools are plain functions that authors call.

One ``Environment`` serves all episodes. What belongs to a single episode is its state, which the caller keeps.
Environments deal with text and messages only; ``episodes`` deals with tokens, templates, limits and processes.
"""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, get_type_hints

from tandemrl.config import Config, ConfigError
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.processes.names import function_named, instantiate

FILLED_IN = ("row", "state")
"""Names of the parameters that are filled in and not shown to the authors: the row of the episode, and its state."""

Tool = Callable[..., Any]
"""A function with type hints and a Google docstring. What it returns becomes text: a string as it is, anything else as
JSON. If it changes the ``state`` that it is given, the state of the episode changes, unless it raises."""

Schema = Mapping[str, Any]
"""The schema of a tool in the form that chat templates take:
``{"type": "function", "function": {"name", "description", "parameters"}}``."""

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


# ---- tools: how to describe them, check a call, and run it ----------------------------------------------------------


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool, made by ``transformers.utils.get_json_schema``.

    It says nothing about what the tool returns, since OpenAI's format has no place for it.

    Raises:
        ConfigError: a parameter has no type hint, or is missing in the docstring's ``Args:``; the message names the
            tool and the parameter.
    """
    from transformers.utils import get_json_schema  # it imports torch, which a process that runs tools can do without

    def shown() -> None: ...

    try:
        signature, hints = inspect.signature(tool), get_type_hints(tool)
        parameters = [each for each in signature.parameters.values() if each.name not in FILLED_IN]
        shown.__name__, shown.__doc__ = tool.__name__, inspect.getdoc(tool)
        shown.__annotations__ = {each.name: hints[each.name] for each in parameters if each.name in hints}
        setattr(shown, "__signature__", inspect.Signature(parameters))  # noqa: B010 - mypy knows no such attribute
        return get_json_schema(shown)
    except Exception as error:  # a private exception of transformers, or whatever a type hint raises
        fix = "give every parameter a type hint, and say what it is in the docstring's `Args:`"
        raise ConfigError(f"tool {getattr(tool, '__name__', tool)}: {error}; {fix}") from error


def call_fault(name: Any, arguments: Any, schemas: Mapping[str, Schema]) -> str | None:
    """What is wrong with a call, in words for its author, or None if it can be made.

    Args:
        name: the name of the tool that is called.
        arguments: the arguments of the call.
        schemas: the schemas of the tools, by name.
    """
    if name not in schemas:
        return f"there is no tool {name!r:.100}; known: {', '.join(schemas) or 'none'}"
    if not isinstance(arguments, Mapping):
        return f"the arguments of {name} must be an object"
    parameters = schemas[name]["function"]["parameters"]
    known = parameters["properties"]
    if missing := [each for each in parameters.get("required", ()) if each not in arguments]:
        return f"{name} needs the argument {missing[0]!r}"
    for key, value in arguments.items():
        if key not in known:
            return f"{name} has no argument {key!r:.100}; known: {', '.join(known) or 'none'}"
        if fault := _value_fault(value, known[key]):
            return f"argument {key!r} of {name} must be {fault}"
    return None


def sample(schema: Schema) -> Any:
    """An example value for a JSON schema that ``get_json_schema`` writes. An object has all of its properties."""
    if options := schema.get("anyOf"):
        return sample(options[0])
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        return {name: sample(each) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(each) for each in schema.get("prefixItems", [schema.get("items", {})])]
    return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(kind, "some text")


def call_tool(tool: Tool, arguments: Mapping[str, Any], row: Row, state: Mapping[str, Any]) -> tuple[str, Any]:
    """Run a tool, and return its result as text and the state after it. The given ``state`` is not changed.

    Raises:
        Exception: whatever the tool raises, or a TypeError if its result is not a JSON value.
    """
    parameters = inspect.signature(tool).parameters
    state = copy.deepcopy(state) if "state" in parameters else state
    given = {name: value for name, value in (("row", row), ("state", state)) if name in parameters}
    result = tool(**arguments, **given)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), state


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _value_fault(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What a value would have to be to match a JSON schema that ``get_json_schema`` writes, or None if it matches."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        faults = [_value_fault(value, option) for option in schema["anyOf"]]
        return None if None in faults else " or ".join(fault for fault in faults if fault)
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if "type" in schema:
        names: Sequence[str] = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        allowed = tuple(kind for name in names for kind in _TYPES.get(name, (object,)))
        if not isinstance(value, allowed) or (isinstance(value, bool) and not {bool, object}.intersection(allowed)):
            return " or ".join(names)
    if isinstance(value, list):
        kinds = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        if len(kinds) != len(value):
            return f"array of {len(kinds)}"
        inside, of = "array whose items are", zip(value, kinds, strict=True)
    elif isinstance(value, dict) and "additionalProperties" in schema:
        inside, of = "object whose values are", zip(value.values(), repeat(schema["additionalProperties"]))
    else:
        return None
    return next((f"{inside} {fault}" for item, kind in of if (fault := _value_fault(item, kind))), None)
