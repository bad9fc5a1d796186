"""Judges that are reached over HTTP: any OpenAI-compatible chat endpoint, such as ``vllm serve MODEL``."""

from collections.abc import Callable, Sequence
from typing import Any

from tandemrl.config import JudgeConfig
from tandemrl.data.messages import sound
from tandemrl.processes.http import Client, Response, RetryableError, Service, chat_message, excerpt
from tandemrl.tasks.rubric.judge import JudgeError, Messages


class HttpJudge:
    """A `rubric.Judge` that gets its replies from ``judge.url``, with at most ``judge.concurrency`` requests at a time.

    ``model`` is the name of the model that replies: ``judge.model``, or the first one that the endpoint lists. If the
    endpoint does not answer yet, the constructor waits for up to ``judge.wait_s``.

    Args:
        check: called while it waits; it raises if there is nothing to wait for.

    Raises:
        JudgeError: the endpoint is down or does not serve ``judge.model``, or ``judge.api_key_env`` is not set.

    Examples:
        >>> judge = HttpJudge(JudgeConfig(url="http://localhost:8000/v1"))
        >>> judge.ask([[{"role": "user", "content": "Reply with one word: True or False. Is 7 prime?"}]])
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
        """Get one reply per prompt, in order.

        Args:
            attempt: number of the attempt. Attempt 0 is sampled at ``judge.temperature``, later ones at
                ``judge.retry_temperature``, with their number as the seed.

        Raises:
            JudgeError: a prompt has no reply after all retries; the other prompts are then given up, too.
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
    """The text of a chat completion. It is "" if there is none, as from a model that never stopped thinking."""
    message = chat_message(response)
    if "content" not in message:
        raise RetryableError(f"not a chat completion: {excerpt(response.body)}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
        raise RetryableError(f"not a text: {excerpt(response.body)}")
    return sound(content or "")
