"""Judges behind HTTP: any OpenAI-compatible chat endpoint, such as ``vllm serve MODEL``."""

from collections.abc import Callable, Sequence
from typing import Any

from tandemrl.config import JudgeConfig
from tandemrl.http import Client, Passing, Response, Service, chat_message, start
from tandemrl.rewards.judge.rubric import JudgeError, Messages


class HttpJudge:
    """Replies from ``judge.url``; a `rubric.Judge`. At most ``judge.concurrency`` requests are in flight.

    ``model`` is the name that is asked for: ``judge.model``, or else the first one that the endpoint lists. An endpoint
    that does not answer yet is given ``judge.wait_s``.

    Args:
        check: called while that time passes; raises if there is nothing to wait for.

    Raises:
        JudgeError: the endpoint is down or does not serve ``judge.model``, or ``judge.api_key_env`` is not set.

    Example::

        judge = HttpJudge(JudgeConfig(url="http://localhost:8000/v1"))
        judge.ask([[{"role": "user", "content": "Reply with one word: True or False. Is 7 prime?"}]])
    """

    def __init__(self, config: JudgeConfig, check: Callable[[], None] = lambda: None) -> None:
        if config.url is None:
            raise JudgeError("judge.url is not set; give an address such as http://localhost:8000/v1")
        self.config = config
        patience = (config.timeout_s, config.retries, config.backoff_s, config.concurrency)
        starts = config.command or "vllm serve MODEL"
        self._client = Client(Service("judge", starts, JudgeError, config.url, config.api_key_env, *patience))
        self._client.wait(config.wait_s, check)
        self.model = self._client.model(config.model)

    def ask(self, prompts: Sequence[Messages], *, attempt: int = 0) -> list[str]:
        """One reply per prompt, in order.

        Args:
            attempt: 0 is sampled at ``judge.temperature``; later ones at ``judge.retry_temperature``, seeded by their
                number.

        Raises:
            JudgeError: a prompt has no reply after all attempts; the others are then given up too.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "max_completion_tokens": self.config.max_tokens,
            "temperature": self.config.retry_temperature if attempt else self.config.temperature,
            "top_p": 1.0,
        }
        if body["temperature"] > 0:
            body["seed"] = attempt
        return self._client.post_all(
            "/chat/completions", [body | {"messages": list(messages)} for messages in prompts], _reply
        )


def _reply(response: Response) -> str:
    """The text of a chat completion; "" where there is none, as from a model that never stopped thinking."""
    message = chat_message(response)
    if "content" not in message:
        raise Passing(f"not a chat completion: {start(response.body)}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
        raise Passing(f"not a text: {start(response.body)}")
    return content or ""
