"""Makes the environment that ``rollout.environment`` and ``rollout.tools`` ask for.

It does not import torch, since the processes that environments answer in make it, too.
"""

import inspect

from tandemrl.config import Config, ConfigError
from tandemrl.processes.names import function_named
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.tools import Tool

BUILT_IN = {"multihop": "tandemrl.rollout.envs.multihop:multihop"}
"""The library's environments beside ``tools``: their names, and the functions that make them."""


def make_environment(config: Config) -> Environment | None:
    """The environment of a config, or None for ``single``, where a prompt gets one response.

    In ``module:factory``, the factory may be a function or a class. It is given the `Config` if it has a parameter
    ``config``.

    Raises:
        ConfigError: the environment cannot be imported or made; the message names the key and the fix.
    """
    name = config.rollout.environment
    if name == "single":
        return None
    tools = tuple(_tool(path) for path in config.rollout.tools)
    environment = Environment() if name == "tools" else _made(name, config)
    if tools:
        environment.tools = (*environment.tools, *tools)
    return environment


def _made(name: str, config: Config) -> Environment:
    key = f"rollout.environment={name}"
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(f"{key}: must be one of single, tools, {', '.join(BUILT_IN)}, or module:factory")
    factory = function_named(BUILT_IN.get(name, name), key, ConfigError)
    try:
        wants = "config" in inspect.signature(factory).parameters
        environment = factory(config=config) if wants else factory()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: making it failed: {type(error).__name__}: {error}") from error
    if not isinstance(environment, Environment):
        raise ConfigError(f"{key}: it is a {type(environment).__name__}, not an Environment; return an instance of one")
    return environment


def _tool(path: str) -> Tool:
    if ":" not in path:
        raise ConfigError(
            f"rollout.tools: {path}: must be module:function, as tandemrl.rollout.envs.multihop:get_document is"
        )
    return function_named(path, f"rollout.tools: {path}", ConfigError)
