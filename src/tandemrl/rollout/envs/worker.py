"""The process in which an environment answers, which `episodes.EpisodeRunner` starts and kills.

It does not import torch by itself.
"""

import json
from collections.abc import Callable
from dataclasses import fields

from tandemrl.config import Config, ConfigError
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.processes.child import serve_calls
from tandemrl.rollout.envs.environment import Answer, BrokenEnvironmentError, Environment, State, make_environment

Turned = tuple[Row, State, Message]
"""What an environment is told of a turn: the row, the state of the episode, and the message."""


def answering(environment: Environment) -> Callable[[Turned], str]:
    """Prepare ``environment``, and return the function that answers a turn with a JSON text.

    Raises:
        BrokenEnvironmentError: the environment cannot be prepared.
    """
    environment.prepare()

    def answer(turned: Turned) -> str:
        answer = environment.reply(*turned)
        if not isinstance(answer, Answer):
            raise TypeError(f"reply must return an Answer, not a {type(answer).__name__}")
        try:
            said = {each.name: getattr(answer, each.name) for each in fields(Answer)}  # not what a subclass adds
            return json.dumps({**said, "messages": [*answer.messages]}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise type(error)(f"its answer has to be of JSON values, and so has its state: {error}") from error

    return answer


def _prepare(config: Config) -> Callable[[Turned], str]:
    try:
        environment = make_environment(config)
        assert environment is not None
        return answering(environment)
    except (ConfigError, BrokenEnvironmentError) as error:
        raise SystemExit(str(error)) from None  # its message is what the parent reports


if __name__ == "__main__":
    serve_calls(_prepare)
