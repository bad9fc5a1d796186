"""A client of JSON services over HTTP, such as OpenAI-compatible endpoints: models that judge, models that are
evaluated, models that rank documents. The module does not import torch.

Every request gets a reply, or it is an error. A request is tried again after a growing wait if its failure may pass: no
connection, a time-out, HTTP 408, 409, 425, 429 or 5xx, or a body that is malformed. After any other status
it is not tried again.
"""

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import httpx

RETRYABLE = {408, 409, 425, 429}
MAX_WAIT_S = 60.0
POLL_S = 1.0
"""Seconds between two requests to a service that is still starting."""
T = TypeVar("T")
Body = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
"""JSON to send, or a function that makes it of how many replies were refused before (`RefusedError`)."""
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")
Read = Callable[["Response"], T]
"""A function that reads a response with a status below 300, or 404 of a GET request, or raises `RetryableError` or
`PermanentError`."""


class RetryableError(Exception):
    """A failure that may pass, so that another attempt is worth it."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RefusedError(RetryableError):
    """A reply that is of no use: another one is asked for, without a wait. The last one counts if there is no other."""

    def __init__(self, reply: Any) -> None:
        super().__init__("a reply of no use")
        self.reply = reply


class PermanentError(Exception):
    """A failure that further attempts would repeat."""


@dataclass(frozen=True)
class Service:
    """Where a service is, and how often and how long to try.

    section: the section of the config that names the service, for messages. start: a command that starts such a
    service, for messages. error: the class of the errors to raise. url: the address. api_key_env: the environment
    variable with the key; None sends no key. timeout_s: the time-out of one attempt. retries: the number of further
    attempts. backoff_s: the wait before the first of them, which doubles each time. concurrency: how many requests may
    run at once. cap_retry_after: wait no longer than that, even if the service asks for it (``Retry-After``), since
    something else has a time limit that counts on it.
    """

    section: str
    start: str
    error: type[Exception]
    url: str
    api_key_env: str | None
    timeout_s: float
    retries: int
    backoff_s: float
    concurrency: int
    cap_retry_after: bool = False

    @classmethod
    def of(cls, settings: Any, section: str, start: str, error: type[Exception], **more: Any) -> "Service":
        """The service that a section of a config names by its keys. more: fields that are none of its keys."""
        shared = [name for name in cls.__dataclass_fields__ if hasattr(settings, name) and name not in more]
        return cls(section, start, error, **{name: getattr(settings, name) for name in shared}, **more)


class Client:
    """Sends requests to a `Service`. An attempt ends after ``timeout_s``, whatever the server still sends.

    httpx limits single reads alone, so that attempts run in an event loop, where a whole one can be limited.

    Raises:
        Service.error: ``api_key_env`` is not set.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.url = service, service.url.rstrip("/")
        self._given_up = False
        headers = {}
        if service.api_key_env is not None:
            if not os.environ.get(service.api_key_env):
                raise service.error(
                    f"{service.section}.api_key_env={service.api_key_env}: this environment variable is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[service.api_key_env]}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,
            mounts=dict.fromkeys(LOOPBACK),  # a proxy of the environment is not for this machine
        )
        self._free = asyncio.Semaphore(service.concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()

    def give_up(self) -> None:
        """Let requests that are running end after their present attempt, and begin no others."""
        self._given_up = True

    def close(self) -> None:
        """Close the connections, of which none may be in use."""
        if self._thread.is_alive():
            self._run(self._client.aclose())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def get(self, path: str, read: Read[T]) -> T:
        """Send a GET request, and return what ``read`` makes of the response.

        Raises:
            Service.error: the last attempt failed, or one failed in a way that further attempts would repeat.
        """
        return self._run(self._attempts(path, None, read))

    def post(self, path: str, body: Mapping[str, Any], read: Read[T]) -> T:
        """As `get`, with a JSON body."""
        return self._run(self._attempts(path, body, read))

    def post_all(self, path: str, bodies: Sequence[Body], read: Read[T]) -> list[T]:
        """Send one POST request per body, and return their replies in order.

        Raises:
            Service.error: a request has no reply after all attempts; the others are then given up, too.
        """

        async def all_of_them() -> list[T]:
            tasks = [asyncio.ensure_future(self._attempts(path, body, read)) for body in bodies]
            try:
                return await asyncio.gather(*tasks)
            finally:  # of no effect after a success
                for task in tasks:
                    task.cancel()

        return self._run(all_of_them())

    def wait(self, seconds: float) -> None:
        """Return as soon as an OpenAI-compatible endpoint answers, or after ``seconds``.

        If it does not answer until then, the next request fails.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                _models(self._run(self._send("/models", None)))
                return
            except PermanentError:
                return
            except RetryableError:
                time.sleep(min(left, POLL_S))

    def model(self, name: str | None) -> str:
        """The name of the model to ask an OpenAI-compatible endpoint for.

        Args:
            name: a name that the endpoint must list, unless it has no list. None means the first one that it lists.

        Raises:
            Service.error: the endpoint serves other models, or ``name`` is None and it has no list.
        """
        listed = self.get("/models", _models)
        if name is None:
            if listed is None:
                raise self.service.error(f"{self.url}/models does not exist; set {self.service.section}.model")
            return listed[0]
        if listed is not None and name not in listed:
            raise self.service.error(f"{self.service.section}.model={name}: {self.url} serves {', '.join(listed)}")
        return name

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of what runs in the event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # where this thread was interrupted

    async def _attempts(self, path: str, body: Body | None, read: Read[T]) -> T:
        service, last, refused = self.service, RetryableError(""), list[T]()
        async with self._free:
            for attempt in range(1 + service.retries):
                if attempt and not isinstance(last, RefusedError):
                    longest = service.backoff_s * 2 ** (attempt - 1)
                    asked = min(last.retry_after, longest) if service.cap_retry_after else last.retry_after
                    await asyncio.sleep(min(max(longest * _JITTER.uniform(0.5, 1.0), asked), MAX_WAIT_S))
                if self._given_up:
                    raise _GivenUp
                try:
                    return read(await self._send(path, body(len(refused)) if callable(body) else body))
                except RetryableError as problem:
                    last = problem
                    refused += [problem.reply] if isinstance(problem, RefusedError) else []
                except PermanentError as problem:
                    raise service.error(str(problem)) from None
        if refused:
            return refused[-1]
        section = service.section
        raise service.error(
            f"the service at {self.url} ({section}.url) failed {1 + service.retries} time(s), at last with: {last}. Is "
            f"it running ({service.start})? {section}.timeout_s, {section}.retries and {section}.backoff_s say how "
            "patient to be"
        )

    async def _send(self, path: str, body: Mapping[str, Any] | None) -> "Response":
        """One attempt: the whole response, within ``timeout_s``.

        Raises:
            RetryableError: there is no response, or its status may pass.
            PermanentError: the status is another one from 300 on. Of a GET request, 404 is left to the reader.
        """
        limit = self.service.timeout_s
        try:
            asked = self._client.request("GET" if body is None else "POST", self.url + path, json=body)
            response = await asyncio.wait_for(asked, limit)
        except TimeoutError:
            raise RetryableError(f"no complete reply within {limit:g} s") from None
        except httpx.InvalidURL as error:
            raise PermanentError(f"{self.service.section}.url={self.url}: {error}") from None
        except httpx.RequestError as error:
            raise RetryableError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        status, content = response.status_code, response.content
        if status in RETRYABLE or status >= 500:
            raise RetryableError(
                f"HTTP {status}: {excerpt(content)}", _retry_after(response.headers.get("retry-after"))
            )
        if status >= 300 and (status != 404 or body is not None):
            fix = f"; {self.service.section}.url must end where {path.partition('?')[0]} begins" * (status == 404)
            raise PermanentError(f"{self.url}{path} answers HTTP {status}: {excerpt(content)}{fix}")
        return Response(status, content)


class Response(NamedTuple):
    """A response with its whole body."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body, parsed.

        Raises:
            RetryableError: the body is not JSON, or is nested too deeply to read.
        """
        try:
            return json.loads(self.body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise RetryableError(f"HTTP {self.status} with a body that is not JSON: {excerpt(self.body)}") from None


def chat_message(response: Response) -> Mapping[str, Any]:
    """The message of a chat completion; a `Read`."""
    try:
        message = response.json()["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise RetryableError(f"not a chat completion: {excerpt(response.body)}")
    return message


def excerpt(body: bytes) -> str:
    """The beginning of a body, for messages."""
    return " ".join(body[:2000].decode(errors="replace").split())[:300] or "(empty)"


# --------------------------------------------------------------------------------------------------------------------


_JITTER = random.SystemRandom()  # the global generator is the user's


class _GivenUp(Exception):
    """All requests are given up."""


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _models(response: Response) -> list[str] | None:
    """The model names that an endpoint lists, or None if it has no list."""
    if response.status == 404:
        return None
    try:
        names = [model["id"] for model in response.json()["data"]]
    except (KeyError, TypeError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise RetryableError(f"not a list of models: {excerpt(response.body)}")
    if not names:
        raise RetryableError("the list of models is empty")
    return names


def _retry_after(value: str | None) -> float:
    """The seconds of a ``Retry-After`` header. A date is not read."""
    return float(value) if value is not None and value.isdecimal() else 0.0
