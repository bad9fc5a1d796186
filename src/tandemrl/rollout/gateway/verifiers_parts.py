"""Parts for verifiers (0.4): a harness that needs neither a network nor uv, and a renderer for any chat template.

Only who uses verifiers imports this. `register` gives the harness the id ``tandem``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar

import verifiers.v1 as vf
from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from tandemrl.data.templates import template_of
from tandemrl.rollout.envs.environment import Schema
from tandemrl.rollout.envs.parsing import call_format_of, parse_turn
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.rollout.gateway.mcp_source import calling, converse
from tandemrl.rollout.gateway.source import client_of

HARNESS = "tandem"
"""The id of `Loop` in ``harness``."""


def register() -> None:
    """Let verifiers find the harness."""
    sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = sys.modules[__name__]


class LoopConfig(vf.HarnessConfig):
    """That of `Loop`, which has no settings of its own."""


class Loop(vf.Harness[LoopConfig]):
    """A chat that calls the tools of the task until a turn calls none, as ``null`` but in this process."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_MCP: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the chat; the tools answer an error in words."""
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [] if system is None else [{"role": "system", "content": system}]
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        )
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack, client_of(endpoint, secret, timeout=None) as client:
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)

            async def call(name: str, arguments: Any) -> Any:
                return await call_mcp(connected, dispatch, name, arguments)

            await converse(client, messages, calling(tools, call), tools, ctx.model)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class ChatRenderer(DefaultRenderer):
    """Renders and parses for ``TrainClient`` with any chat template, as episodes of this library do: what was sampled
    stays as it is, calls are read from the text.

    In a config: ``{"name": "custom", "import_path": "tandemrl.rollout.gateway.verifiers_parts:ChatRenderer"}``.
    """

    config_class = DefaultRendererConfig

    @property
    def supports_tools(self) -> bool:
        return True

    def parse_response(
        self, token_ids: list[int], *, tools: Sequence[Schema] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """The message of a turn."""
        ids = [*token_ids]
        while ids and ids[-1] in self.get_stop_token_ids():
            ids.pop()
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        schemas = {schema["function"]["name"]: schema for schema in _schemas(tools)}
        calls_as = call_format_of(template_of(self._tokenizer, [*schemas.values()])) or "hermes"
        message = parse_turn(text, schemas, self._tokenizer, "", calls_as)
        if "invalid_calls" in message:
            return ParsedResponse(text)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parsed = [ParsedToolCall(json.dumps(call), call["name"], call["arguments"]) for call in calls]
        return ParsedResponse(message["content"], message.get("reasoning_content"), parsed)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: Sequence[Schema] | None = None,
    ) -> RenderedTokens:
        """The next prompt: all ids so far, and those of the new messages after them."""
        schemas = _schemas(tools)
        ends = self.get_stop_token_ids()
        rendering = Rendering(self._tokenizer, schemas, eos_token_ids=ends, keep_turns=True)
        written = [*previous_prompt_ids, *previous_completion_ids]
        ended = written[-1] == rendering.end_of_turn
        tail = rendering.context(new_messages, ended=ended).tokens
        roles = [message["role"] for message in new_messages]
        return RenderedTokens([*written, *tail], [-1] * len(written) + [0] * len(tail), message_roles=roles)


def _schemas(tools: Sequence[Mapping[str, Any]] | None) -> list[Schema]:
    empty = {"type": "object", "properties": {}}
    return [
        {**tool, "function": {**tool["function"], "parameters": empty | (tool["function"].get("parameters") or {})}}
        for tool in tools or ()
    ]


__all__ = ["Loop"]
