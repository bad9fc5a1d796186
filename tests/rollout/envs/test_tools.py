"""Tools: what authors are told of them, which calls are made, what a call can and cannot do. And factories."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import tempers

from tandemrl.config import ConfigError, load
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.environment import Answer, Environment, call_fault, make_environment, schema_of
from tandemrl.rollout.envs.worker import answering


def many(
    text: str,
    count: int,
    row: Row,
    share: float = 0.5,
    sure: bool = False,
    names: list[str] | None = None,
    kind: Literal["a", "b"] = "a",
    either: int | str = 0,
    table: dict[str, int] | None = None,
    state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Take everything.

    Args:
        text: Words.
        count: How many.
        share: Of it.
        sure: Or not.
        names: Of whom.
        kind: Which.
        either: A number or a name.
        table: Of numbers.

    Returns:
        What it was given.
    """
    return {"text": text, "count": count, "row": row.example_id}


SCHEMAS = {"many": schema_of(many), "who": schema_of(tempers.who)}


def test_authors_see_neither_row_nor_state() -> None:
    function = schema_of(many)["function"]
    assert function["description"] == "Take everything."
    assert list(function["parameters"]["properties"]) == [
        *("text", "count", "share", "sure", "names", "kind", "either", "table")
    ]
    assert function["parameters"]["required"] == ["text", "count"]
    assert function["parameters"]["properties"]["names"] == {
        "type": "array",
        "items": {"type": "string"},
        "nullable": True,
        "description": "Of whom.",
    }
    assert SCHEMAS["who"]["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"text": "a", "count": 1}, None),
        ({"text": "a", "count": 1, "share": 1, "sure": True, "names": None, "kind": "b", "either": "x"}, None),
        ({"text": "a", "count": 1, "names": ["x"], "either": 3, "table": {"a": 1}}, None),
        ({"text": "a"}, "many needs the argument 'count'"),
        ({"text": "a", "count": 1, "colour": 2}, "many has no argument 'colour'; known: text, count, share"),
        ({"text": "a", "count": 1, "row": {}}, "many has no argument 'row'"),
        ({"text": 1, "count": 1}, "argument 'text' of many must be string"),
        ({"text": "a", "count": True}, "argument 'count' of many must be integer"),
        ({"text": "a", "count": 1.0}, "argument 'count' of many must be integer"),
        ({"text": "a", "count": 1, "sure": 1}, "argument 'sure' of many must be boolean"),
        ({"text": "a", "count": 1, "names": ["x", 1]}, "argument 'names' of many must be array whose items are string"),
        ({"text": "a", "count": 1, "kind": "c"}, """argument 'kind' of many must be one of ["a", "b"]"""),
        ({"text": "a", "count": 1, "either": []}, "argument 'either' of many must be integer or string"),
        ({"text": "a", "count": 1, "table": {"a": "b"}}, "'table' of many must be object whose values are integer"),
        (["text"], "the arguments of many must be an object"),
    ],
)
def test_calls_are_checked(arguments: Any, fault: str | None) -> None:
    found = call_fault("many", arguments, SCHEMAS)
    assert (found is None) == (fault is None)
    assert fault is None or fault in str(found)


def test_a_tool_that_cannot_be_described_is_named() -> None:
    def undocumented(x: int) -> int:
        """Do it."""
        return x

    def untyped(x):  # type: ignore[no-untyped-def]
        """Do it.

        Args:
            x: What.
        """

    with pytest.raises(ConfigError, match=r"tool undocumented: .*'x'.*`Args:`"):
        schema_of(undocumented)
    with pytest.raises(ConfigError, match=r"tool untyped: .*x is missing a type hint"):
        schema_of(untyped)


def reply(
    *calls: tuple[str, dict[str, Any]], invalid: tuple[str, ...] = (), after: tuple[int, ...] = (), state: Any = None
) -> Answer:
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    message = {"role": "assistant", "content": ""} | ({"tool_calls": made} if made else {})
    message |= {"invalid_calls": list(invalid)} if invalid else {}
    message |= {"invalid_after": list(after)} if after else {}
    return tempers.World().reply(tempers.row("r1"), {} if state is None else state, message)


def test_calls_are_answered_in_order_and_errors_are_text() -> None:
    calls = [("note", {"text": "x"}), ("spoil", {"how": "?"}), ("add", {"a": 1}), ("spoil", {"how": "unspeakable"})]
    answer = reply(*calls, ("spoil", {"how": "exit"}), ("note", {"text": "y"}), invalid=("no such tool",))
    assert [(message["role"], message.get("name"), message["content"]) for message in answer.messages] == [
        ("tool", "note", "noted: ['x']"),
        ("tool", "spoil", "Error: no such harm"),
        ("tool", "add", "2"),
        ("tool", "spoil", "Error: Object of type set is not JSON serializable"),
        ("tool", "spoil", "Error: bye"),
        ("tool", "note", "noted: ['x', 'y']"),  # what a tool that raised did to the state is undone
        ("tool", None, "Error: no such tool"),
    ]
    assert answer.state == {"notes": ["x", "y"]}
    assert answer.counts == {"tool_errors": 3}
    assert not answer.over


# ---- factories -----------------------------------------------------------------------------------------------------


def made(*overrides: str) -> Environment | None:
    return make_environment(load(None, overrides))


def configured(config: Any) -> Environment:
    environment = Environment()
    environment.system = f"{config.rollout.max_turns} turns"
    return environment


def test_what_a_subclass_adds_to_an_answer_stays_in_the_process() -> None:
    @dataclass(frozen=True)
    class Traced(Answer):
        trace: Any = None

    class Tracing(Environment):
        def reply(self, row: Row, state: Any, message: Any) -> Answer:
            return Traced([{"role": "user", "content": "go on"}], {"n": 1}, trace=object())

    said = json.loads(answering(Tracing())((Row("r", (), "d", "", {}), {}, {"role": "assistant", "content": ""})))
    assert said == {"messages": [{"role": "user", "content": "go on"}], "state": {"n": 1}, "over": False, "counts": {}}


def test_what_a_config_makes() -> None:
    assert made() is None
    tools = made("rollout.environment=tools", "rollout.tools=[tempers:add,tempers:echo]")
    assert tools is not None
    assert tuple(tools.tools) == (tempers.add, tempers.echo)
    world = made("rollout.environment=tempers:World", "rollout.tools=[os.path:join]")
    assert isinstance(world, tempers.World)
    assert [tool.__name__ for tool in world.tools][-2:] == ["complete", "join"]
    assert len(tempers.World.tools) == 7  # only this one has another
    given = made("rollout.environment=test_tools:configured", "rollout.max_turns=7")
    assert given is not None
    assert given.start(tempers.row()).messages[0] == {"role": "system", "content": "7 turns"}


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["rollout.environment=no_such:x"], r"rollout\.environment=no_such:x: cannot be imported: ModuleNotFound"),
        (["rollout.environment=tempers:add"], r"tempers:add: its parameter 'a' has no value; give it one"),
        (["rollout.environment=tempers:row"], "it is a Row, not an Environment"),
        (["rollout.environment=tools", "rollout.tools=[add]"], r"rollout\.tools: add: cannot be imported"),
        (["rollout.environment=tools", "rollout.tools=[tempers:x]"], r"rollout\.tools: tempers:x: cannot be imported"),
    ],
)
def test_environments_and_tools_that_are_not_there(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        made(*overrides)
