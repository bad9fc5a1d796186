"""A client of OpenAI-compatible chat endpoints such as ``vllm serve MODEL``: judges behind HTTP.

Every prompt gets a reply, or the batch is an error. What may pass (no connection, a time-out, HTTP 408, 409, 425, 429
and 5xx, a body that is too long or not a chat completion) is tried again after a growing wait; any other status is not.
"""

import json
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx

from tandemrl.config import JudgeConfig
from tandemrl.distributed.watchdog import WATCHDOG, stamp
from tandemrl.rewards.judge.rubric import JudgeError, Messages

PASSING = {408, 409, 425, 429}
MAX_WAIT_S = 60.0
MAX_REPLY_BYTES = 4 * 2**20
"""Of a body, unpacked: many times what a model can say in ``judge.max_tokens``."""
T = TypeVar("T")
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class HttpJudge:
    """Replies from ``judge.url``; a `rubric.Judge`. At most ``judge.concurrency`` requests are in flight, and each
    attempt ends after ``judge.timeout_s``, even where the server goes on sending.

    ``model`` is the name that is asked for: ``judge.model``, or else the first one that the endpoint lists.

    Raises:
        JudgeError: the endpoint is down or does not serve ``judge.model``, or ``judge.api_key_env`` is not set.

    Example::

        judge = HttpJudge(JudgeConfig(url="http://localhost:8000/v1"))
        judge.ask([[{"role": "user", "content": "Reply with one word: True or False. Is 7 prime?"}]])
    """

    def __init__(self, config: JudgeConfig) -> None:
        if config.url is None:
            raise JudgeError("judge.url is not set; give an address such as http://localhost:8000/v1")
        self.config, self.url = config, config.url.rstrip("/")
        headers = {"Accept-Encoding": "gzip"}  # what `_unpacked` can read
        if config.api_key_env is not None:
            if not os.environ.get(config.api_key_env):
                raise JudgeError(f"judge.api_key_env={config.api_key_env}: this environment variable is not set")
            headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._client = httpx.Client(
            headers=headers,
            timeout=config.timeout_s,
            limits=httpx.Limits(max_connections=config.concurrency),
            mounts=dict.fromkeys(LOOPBACK),  # a proxy of the environment is not for this machine
        )
        self.model = self._served_model()

    def ask(self, prompts: Sequence[Messages], *, attempt: int = 0) -> list[str]:
        """One reply per prompt, in order.

        Args:
            attempt: 0 is sampled at ``judge.temperature``; later ones at ``judge.retry_temperature``, seeded by their
                number.

        Raises:
            JudgeError: a prompt has no reply after all attempts; the others are then given up too.
        """
        if not prompts:
            return []
        body: dict[str, Any] = {
            "model": self.model,
            "max_completion_tokens": self.config.max_tokens,
            "temperature": self.config.retry_temperature if attempt else self.config.temperature,
            "top_p": 1.0,
        }
        if body["temperature"] > 0:
            body["seed"] = attempt
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.config.concurrency, len(prompts))) as pool:
            futures: list[Future[str]] = []
            try:
                for messages in prompts:
                    content = body | {"messages": list(messages)}
                    futures.append(pool.submit(self._attempts, "/chat/completions", content, _reply, stop))
                with WATCHDOG.shared():
                    wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # of no effect after a success
                stop.set()
                for future in futures:
                    future.cancel()
        errors = [future.exception() for future in futures if not future.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _GivenUp):
                raise error
        return [future.result() for future in futures]

    def _served_model(self) -> str:
        """``judge.model`` if the endpoint lists it, or if it has no list; the first one listed if none is named."""
        listed = self._attempts("/models", None, _models, threading.Event())
        name = self.config.model
        if name is None:
            if listed is None:
                raise JudgeError(f"{self.url}/models does not exist; set judge.model")
            return listed[0]
        if listed is not None and name not in listed:
            raise JudgeError(f"judge.model={name}: {self.url} serves {', '.join(listed)}")
        return name

    def _attempts(
        self, path: str, body: Mapping[str, Any] | None, read: Callable[["_Response"], T], stop: threading.Event
    ) -> T:
        """What ``read`` makes of the response, after as many attempts as the config allows.

        Raises:
            JudgeError: the last attempt failed too, or one failed in a way that further ones would repeat.
        """
        for attempt in range(1 + self.config.retries):
            if stop.is_set():
                raise _GivenUp
            try:
                reply = read(self._send(path, body))
                stamp()
                return reply
            except _Passing as problem:
                last = problem
            except JudgeError:
                stop.set()
                raise
            if attempt < self.config.retries:
                delay = self.config.backoff_s * 2**attempt * _JITTER.uniform(0.5, 1.0)
                stop.wait(min(max(delay, last.retry_after), MAX_WAIT_S))
        stop.set()
        raise JudgeError(
            f"the judge at {self.url} failed {1 + self.config.retries} time(s), at last with: {last}. Is it running "
            "(vllm serve MODEL)? judge.timeout_s, judge.retries and judge.backoff_s say how patient to be"
        )

    def _send(self, path: str, body: Mapping[str, Any] | None) -> "_Response":
        """One attempt: the whole response, within ``judge.timeout_s`` (httpx's own limit is per read) and
        `MAX_REPLY_BYTES`.

        Raises:
            _Passing: there is none, it is too long or packed in another way, or its status is one that may pass.
            JudgeError: any other status from 300 on, but 404, which is left to the reader.
        """
        limit = self.config.timeout_s
        deadline, received = time.monotonic() + limit, bytearray()
        try:
            with self._client.stream("GET" if body is None else "POST", self.url + path, json=body) as response:
                for chunk in _unpacked(response):
                    received += chunk
                    if len(received) > MAX_REPLY_BYTES:
                        raise _Passing(f"HTTP {response.status_code} with a body of more than {MAX_REPLY_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise _Passing(f"no complete reply within {limit:g} s")
        except httpx.InvalidURL as error:
            raise JudgeError(f"judge.url={self.url}: {error}") from None
        except httpx.RequestError as error:
            raise _Passing(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        status, content = response.status_code, bytes(received)
        if status in PASSING or status >= 500:
            raise _Passing(f"HTTP {status}: {_start(content)}", _retry_after(response.headers.get("retry-after")))
        if status >= 300 and status != 404:
            raise JudgeError(f"{self.url}{path} answers HTTP {status}: {_start(content)}")
        return _Response(status, content)


# --------------------------------------------------------------------------------------------------------------------


_JITTER = random.SystemRandom()  # the global generator is the user's


class _Passing(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _GivenUp(Exception):
    """Another request of the batch has failed for good."""


def _unpacked(response: httpx.Response) -> Iterator[bytes]:
    """The body in small pieces, as it comes: httpx itself would unpack a chunk to any size at once.

    Raises:
        _Passing: packed by anything but gzip, or broken.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise _Passing(f"HTTP {response.status_code} with a body packed by {encoding[:50]!r}, which was not asked for")
    if encoding == "identity":
        yield from response.iter_raw()
        return
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: gzip
    try:
        for chunk in response.iter_raw():
            yield unpack.decompress(chunk, 2**16)
            while unpack.unconsumed_tail:
                yield unpack.decompress(unpack.unconsumed_tail, 2**16)
    except zlib.error as error:
        raise _Passing(f"HTTP {response.status_code} with a body that is not gzip: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class _Response:
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    def json(self) -> Any:
        """The body, parsed.

        Raises:
            _Passing: not JSON, or nested too deeply to read.
        """
        try:
            return json.loads(self.body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise _Passing(f"HTTP {self.status} with a body that is not JSON: {_start(self.body)}") from None


def _reply(response: _Response) -> str:
    """The text of a chat completion; "" where there is none, as from a model that never stopped thinking."""
    if response.status == 404:
        raise JudgeError(f"HTTP 404: {_start(response.body)}; judge.url must end where /chat/completions begins")
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise _Passing(f"not a chat completion: {_start(response.body)}") from None
    if content is not None and not isinstance(content, str):
        raise _Passing(f"not a text: {_start(response.body)}")
    return content or ""


def _models(response: _Response) -> list[str] | None:
    """The names that an endpoint lists; None if it has no list."""
    if response.status == 404:
        return None
    try:
        names = [model["id"] for model in response.json()["data"]]
    except (KeyError, TypeError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise _Passing(f"not a list of models: {_start(response.body)}")
    if not names:
        raise _Passing("the list of models is empty")
    return names


def _start(body: bytes) -> str:
    return " ".join(body[:2000].decode(errors="replace").split())[:300] or "(empty)"


def _retry_after(value: str | None) -> float:
    """Seconds; a date is not worth reading."""
    return float(value) if value is not None and value.isdecimal() else 0.0
