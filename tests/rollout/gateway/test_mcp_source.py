"""Tools of a real MCP server, which a tiny pair calls."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import ConfigError, load
from tandemrl.rollout.gateway.mcp_source import calling, converse, mcp_tools
from tandemrl.training.loop import train

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_calculator.py"))]


def test_a_pair_trains_with_the_tools_of_a_server(tmp_path: Path) -> None:
    mcp = pytest.importorskip("mcp", reason="needs mcp: the extra mcp")
    if not hasattr(mcp, "Client"):
        pytest.skip("needs mcp 2: the extra mcp")
    pytest.importorskip("openai", reason="needs openai: the extra mcp")
    build_tiny_pair(tmp_path, pair="calculator")
    named = [
        f"rollout.environment_parameters={{server: {json.dumps(SERVER)}}}",
        "rollout.environment=tandemrl:mcp_tools",
    ]
    small = [
        "train.steps=1",
        "train.prompts_per_step=1",
        "rollout.group_size=4",
        "train.eval_every=0",
        "train.threads=1",
    ]
    limits = ["rollout.max_tokens=96", "rollout.turn_tokens=48", "rollout.observation_tokens=64", "rollout.max_turns=3"]
    about = [f"model.senior={tmp_path}/senior", f"model.junior={tmp_path}/junior", f"output_dir={tmp_path}/run"]
    data = ["data.train=[synthetic:calculator:train:4]", "selection.strategy=turn", "model.device=cpu"]
    train(load(None, [*named, *small, *limits, *about, *data]), quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    said = [message for line in lines for message in line["transcript"]["messages"]]
    calls = [call["function"]["arguments"] for message in said for call in message.get("tool_calls") or ()]
    results = [message["content"] for message in said if message["role"] == "tool"]
    assert results
    assert [str(eval(call["expression"])) for call in calls] == results  # sums of the generator's
    assert not any("unscored" in line["reward_parts"] for line in lines)


def test_a_chat_ends_where_its_session_has_used_up_a_limit() -> None:
    """As an environment's does: it is scored, or models learn to go on for ever."""
    openai = pytest.importorskip("openai", reason="needs openai: the extra mcp")
    httpx = pytest.importorskip("httpx")
    said = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{}"}}]}
    answer = SimpleNamespace(model_dump=lambda exclude_none: said)
    told: list[Any] = [SimpleNamespace(choices=[SimpleNamespace(message=answer)])]

    async def create(**given: Any) -> Any:
        if told:
            return told.pop()
        response = httpx.Response(400, request=httpx.Request("POST", "http://127.0.0.1"))
        raise openai.BadRequestError(
            "context_length_exceeded: this session has used up …", response=response, body=None
        )

    async def result(name: str, arguments: Any) -> str:
        return "3"

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    tools = [{"function": {"name": "add"}}]
    reply = calling(tools, result)
    found = asyncio.run(converse(client, [{"role": "user", "content": "x"}], reply, tools))
    assert [each["role"] for each in found] == ["user", "assistant", "tool"]
    with pytest.raises(openai.BadRequestError):  # not even one answer
        asyncio.run(converse(client, [{"role": "user", "content": "x"}], reply, tools))


def test_a_missing_or_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, said in ((None, "mcp is missing"), (SimpleNamespace(), "it needs mcp 2")):
        monkeypatch.setitem(sys.modules, "mcp", module)
        with pytest.raises(ConfigError, match=said):
            mcp_tools("http://127.0.0.1:1/mcp")
