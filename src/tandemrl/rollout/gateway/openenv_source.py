"""Environments of OpenEnv (0.10) as a source of episodes: a chat whose turns are the actions, over its own client."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tandemrl.config import ConfigError
from tandemrl.config.hints import pip_install
from tandemrl.data.rows import Row
from tandemrl.processes.names import function_named
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.gateway.mcp_source import calling, converse
from tandemrl.rollout.gateway.source import AgentFailedError, Endpoint, Outcome, ScoredSource, client_of

_APART = ("done", "reward", "metadata")


def shown(observation: Any) -> str:
    """The text of an observation: its only field if that is a text, else its fields as JSON."""
    fields = {name: value for name, value in _fields(observation).items() if name not in _APART and value is not None}
    texts = [*fields.values()]
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(fields, ensure_ascii=False)


def openenv(
    server: str | Callable[[], Any],
    act: str | Callable[[str], Any] | None = None,
    *,
    show: str | Callable[[Any], str] = shown,
    system: str | None = None,
) -> "ScoredSource":
    """A source of episodes in an environment behind a server of OpenEnv. The reward is the sum of what its steps gave.

    The environment is reset with ``extra_info.reset`` of the row, e.g. {seed: 3}, as the rows ``openenv:512`` have it.
    The prompt is that of the row, and the first observation after it. If the server is full or too busy,
    an episode waits for it.

    Args:
        server: its address, such as http://localhost:8000; or a function that makes an ``EnvClient``.
        act: what was written in a turn → the action, a dict or an ``Action``. A ValueError of it is told to the model.
            None: a turn calls the tools of the environment, an ``MCPEnvironment``, until one calls none.
        show: an observation → its text, see `shown`.
        system: a message in front of those of the row.

    Functions may be named, ``module:function``.

    Raises:
        ConfigError: a package is missing, or a function cannot be imported.
    """
    try:
        import openai  # noqa: F401 - only whether it is there
        from openenv.core import GenericEnvClient
    except ImportError as error:
        raise ConfigError(f"openenv: {error.name} is missing; {pip_install('openenv')}") from None

    def found(function: Any) -> Any:
        named = isinstance(function, str)
        return function_named(function, f"openenv({function})", ConfigError) if named else function

    if isinstance(server, str) and "://" in server:
        address = server
        return _OpenEnv(lambda: GenericEnvClient(base_url=address), found(act), found(show), system)
    return _OpenEnv(found(server), found(act), found(show), system)


class _OpenEnv(ScoredSource):
    """See `openenv`."""

    name = "openenv"

    def __init__(self, connect: Any, act: Callable[[str], Any] | None, show: Any, system: str | None) -> None:
        self.connect, self.act, self.show, self.system = connect, act, show, system

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        if "reset" not in row.extra_info:
            fix = "give it what the environment is reset with, {seed: 3} or {}, or use data.train=[openenv:512]"
            raise ConfigError(f"openenv: row {row.example_id} has no extra_info.reset; {fix}")
        played = _Played(self.connect(), self)
        try:
            async with client_of(*endpoint) as client:
                first = await played.begin(row.extra_info["reset"])
                messages = [] if self.system is None else [{"role": "system", "content": self.system}]
                messages += map(dict, row.messages)
                messages[-1]["content"] += f"\n\n{first}" if first not in ("", "{}") else ""
                tools = [] if self.act else await played.tools()
                await converse(client, messages, played.heard if self.act else played.called(tools), tools)
        except ConnectionError as error:
            raise BrokenEnvironmentError(f"openenv: {error}; start its server") from error
        finally:
            await played.env.close()
        if played.over and not played.rewards:
            raise AgentFailedError("the environment gave no reward")
        return Outcome(float(sum(played.rewards)))


class _Played:
    """An environment in which an episode is played."""

    def __init__(self, env: Any, source: _OpenEnv) -> None:
        self.env, self._source = env, source
        self.rewards, self.over = list[float](), False

    async def begin(self, how: Mapping[str, Any]) -> str:
        """Begin an episode, and return the first observation."""
        while True:
            try:
                return self._source.show((await self.env.reset(**how)).observation)
            except (RuntimeError, ConnectionError) as error:
                if "CAPACITY_REACHED" not in str(error) and not isinstance(error.__cause__, TimeoutError):
                    raise
            await self.env.disconnect()
            await asyncio.sleep(0.25)

    async def _step(self, action: Any) -> Any:
        result = await self.env.step(action)
        self.rewards += [] if result.reward is None else [float(result.reward)]
        self.over = self.over or result.done
        return result.observation

    async def heard(self, message: Mapping[str, Any]) -> list[Any]:
        """Act as a turn says, and return the observation as a message; none if the episode is over."""
        assert self._source.act is not None
        try:
            action = self._source.act(message["content"] or "")
        except ValueError as error:
            return [{"role": "user", "content": f"Error: {error}"}]
        try:
            text = self._source.show(await self._step(action))
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            text = f"Error: {error}"
        return [] if self.over else [{"role": "user", "content": text}]

    async def tools(self) -> list[Any]:
        """The tools of the environment, as a request has them.

        Raises:
            ConfigError: there is none.
        """
        from openenv.core.env_server.mcp_types import ListToolsAction

        listed = None
        with suppress(RuntimeError):  # it has another kind of action
            listed = _fields(await self._step(ListToolsAction())).get("tools")
        if not listed:
            raise ConfigError("openenv: the environment has no tools; pass `act`, which makes an action of a text")
        about = [{"name": t["name"], "description": t["description"], "parameters": t["input_schema"]} for t in listed]
        return [{"type": "function", "function": each} for each in about]

    def called(self, tools: Sequence[Any]) -> Any:
        """A ``reply`` of `converse` that calls the tools until the episode is over."""
        from openenv.core.env_server.mcp_types import CallToolAction

        async def call(name: str, arguments: Any) -> str:
            if self.over:
                return "Error: the episode is over"
            told = _fields(await self._step(CallToolAction(tool_name=name, arguments=arguments)))
            if told.get("error"):
                return f"Error: {_fields(told['error'])['message']}"
            result = told.get("result")
            parts = result.get("content") if isinstance(result, Mapping) else None
            if parts is None:
                return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            return "\n".join(part.get("text", str(part)) for part in parts)

        answered = calling(tools, call)

        async def reply(message: Any) -> list[Any]:
            messages = await answered(message)
            return [] if self.over else messages

        return reply


def _fields(value: Any) -> dict[str, Any]:
    """The fields of an object of OpenEnv, or of a client that has dicts."""
    return dict(value) if isinstance(value, Mapping) else value.model_dump(mode="json")
