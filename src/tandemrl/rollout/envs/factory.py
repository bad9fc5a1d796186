"""Makes the environment that ``rollout.environment`` and ``rollout.tools`` ask for.

It does not import torch, since the processes that environments answer in make it, too.
"""

from tandemrl.config import Config, ConfigError
from tandemrl.processes.names import function_named, instantiate
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.tools import Tool


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
    tools = tuple(_tool(path) for path in rollout.tools)
    environment = instantiate(kind.path, key, ConfigError, rollout.environment_parameters, config=lambda: config)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{key}: it is a {type(environment).__name__}, not an Environment; return an instance of one")
    if tools:
        environment.tools = (*environment.tools, *tools)
    return environment


def _tool(path: str) -> Tool:
    if ":" not in path:
        raise ConfigError(
            f"rollout.tools: {path}: must be module:function, as tandemrl.rollout.envs.multihop:get_document is"
        )
    return function_named(path, f"rollout.tools: {path}", ConfigError)
