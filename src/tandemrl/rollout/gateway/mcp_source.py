"""Tools behind an MCP server, as a source of episodes: a chat that calls them until a turn calls none."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tandemrl.config import ConfigError
from tandemrl.config.hints import pip_install
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.gateway.source import USED_UP, Endpoint, Outcome, Source, client_of


def mcp_tools(server: str | Sequence[str], *, system: str | None = None) -> Source:
    """A source of chats with the tools of an MCP server. The rows say how what was written is scored.

    Args:
        server: the address of one that runs, such as http://localhost:8000/mcp; or a command such as
            [python, tools.py], which is started for each episode and speaks over its standard input and output.
        system: a message in front of those of the row.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        import mcp
        import openai  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError(f"mcp_tools: {error.name} is missing; {pip_install('mcp')}") from None
    if not hasattr(mcp, "Client"):
        raise ConfigError(f"mcp_tools: it needs mcp 2; {pip_install('mcp')}")
    return _Tools(server if isinstance(server, str) else tuple(server), system)


class _Tools(Source):
    """See `mcp_tools`."""

    def __init__(self, server: str | tuple[str, ...], system: str | None) -> None:
        self.server, self.system = server, system

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        from mcp import Client, StdioServerParameters, stdio_client

        where: Any = self.server
        if not isinstance(where, str):
            where = stdio_client(StdioServerParameters(command=where[0], args=[*where[1:]]))
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            async with Client(where) as server, client_of(*endpoint) as client:
                listed = (await server.list_tools()).tools

                async def call(name: str, arguments: Any) -> str:
                    result = await server.call_tool(name, arguments)
                    return "\n".join(getattr(part, "text", str(part)) for part in result.content)

                about = [
                    {"name": t.name, "description": t.description or "", "parameters": t.input_schema} for t in listed
                ]
                tools = [{"type": "function", "function": each} for each in about]
                await converse(client, [*messages, *map(dict, row.messages)], calling(tools, call), tools)
        except OSError as error:
            raise BrokenEnvironmentError(f"mcp_tools({self.server!r}): {error}") from error
        return Outcome()


Reply = Callable[[Any], Awaitable[list[Any]]]
"""What answers a turn of the assistant: further messages; none end the chat."""


async def converse(
    client: Any, messages: list[Any], reply: Reply, tools: Sequence[Any] = (), model: str = "pair"
) -> list[Any]:
    """Chat until a turn has no reply, or the session has used up a limit, and return all messages.

    Args:
        client: an ``openai.AsyncOpenAI``.
    """
    from openai import BadRequestError

    asked, given = len(messages), {"tools": tools} if tools else {}
    while True:
        try:
            answer = (await client.chat.completions.create(model=model, messages=messages, **given)).choices[0].message
        except BadRequestError as error:
            if len(messages) == asked or USED_UP not in str(error):
                raise
            return messages  # that an episode went on for too long earns what it earns
        messages.append(answer.model_dump(exclude_none=True))
        if not (further := await reply(messages[-1])):
            return messages
        messages += further


def calling(tools: Sequence[Any], call: Callable[[str, Any], Awaitable[Any]]) -> Reply:
    """Replies with the results of the calls of a turn. call: what a tool of this name answers to these arguments."""
    known = {tool["function"]["name"] for tool in tools}

    async def result(each: Any) -> Any:
        name, arguments = each["function"]["name"], json.loads(each["function"]["arguments"] or "{}")
        text = await call(name, arguments) if name in known else f"Error: no tool {name!r}"
        return {"role": "tool", "tool_call_id": each["id"], "name": name, "content": text}

    async def reply(message: Any) -> list[Any]:
        return [await result(each) for each in message.get("tool_calls") or ()]

    return reply
