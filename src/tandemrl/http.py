"""A client of JSON services over HTTP, such as OpenAI-compatible endpoints: models that judge, that are evaluated, that
rank documents. No torch.

Every request gets a reply, or it is an error. What may pass (no connection, a time-out, HTTP 408, 409, 425, 429 and
5xx, a body that is too long or not what it should be) is tried again after a growing wait; any other status is not.
"""

import json
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from tandemrl.distributed.watchdog import WATCHDOG, stamp

PASSING = {408, 409, 425, 429}
MAX_WAIT_S = 60.0
POLL_S = 1.0
"""Between two looks at a service that is still starting."""
MAX_REPLY_BYTES = 4 * 2**20
"""Of a body, unpacked: many times what a model says."""
T = TypeVar("T")
LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")
Read = Callable[["Response"], T]
"""Makes something of a response, or raises `Passing` or `Refused`. The status is below 300, or 404."""


class Passing(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(Exception):
    """A failure that further attempts would repeat."""


@dataclass(frozen=True)
class Service:
    """Where a service is, and how patient to be with it.

    section: of the config that says so, and start: how one is started; for messages. error: what is raised.
    api_key_env: the environment variable with its key; None = no key is sent. timeout_s: of one attempt. retries:
    further attempts; backoff_s: the wait before the first of them, which doubles. concurrency: requests in flight.
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


class Client:
    """Asks a `Service`. Each attempt ends after its ``timeout_s``, even where the server goes on sending.

    Raises:
        Service.error: ``api_key_env`` is not set.
    """

    def __init__(self, service: Service) -> None:
        self.service, self.url = service, service.url.rstrip("/")
        headers = {"Accept-Encoding": "gzip"}  # what `_unpacked` can read
        if service.api_key_env is not None:
            if not os.environ.get(service.api_key_env):
                raise service.error(
                    f"{service.section}.api_key_env={service.api_key_env}: this environment variable is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[service.api_key_env]}"
        self._client = httpx.Client(
            headers=headers,
            timeout=service.timeout_s,
            limits=httpx.Limits(max_connections=service.concurrency),
            mounts=dict.fromkeys(LOOPBACK),  # a proxy of the environment is not for this machine
        )

    def get(self, path: str, read: Read[T]) -> T:
        """What ``read`` makes of the response.

        Raises:
            Service.error: the last attempt failed too, or one failed in a way that further ones would repeat.
        """
        return self._attempts(path, None, read, threading.Event())

    def post(self, path: str, body: Mapping[str, Any], read: Read[T]) -> T:
        """As `get`, with a JSON body."""
        return self._attempts(path, body, read, threading.Event())

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]], read: Read[T]) -> list[T]:
        """One reply per body, in order.

        Raises:
            Service.error: a body has no reply after all attempts; the others are then given up too.
        """
        if not bodies:
            return []
        stop = threading.Event()
        with ThreadPoolExecutor(min(self.service.concurrency, len(bodies))) as pool:
            futures: list[Future[T]] = []
            try:
                futures.extend(pool.submit(self._attempts, path, body, read, stop) for body in bodies)
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

    def wait(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Return as soon as an OpenAI-compatible endpoint answers, or after ``seconds``, for the next request to find
        out. ``check`` is called in between; what it raises ends the wait."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                _models(self._send("/models", None))
                return
            except Refused:
                return
            except Passing:
                check()
                stamp()
                time.sleep(min(left, POLL_S))

    def model(self, name: str | None) -> str:
        """``name`` if an OpenAI-compatible endpoint lists it, or has no list; None = the first one that is listed.

        Raises:
            Service.error: it serves other models, or none is named and it has no list.
        """
        listed = self.get("/models", _models)
        if name is None:
            if listed is None:
                raise self.service.error(f"{self.url}/models does not exist; set {self.service.section}.model")
            return listed[0]
        if listed is not None and name not in listed:
            raise self.service.error(f"{self.service.section}.model={name}: {self.url} serves {', '.join(listed)}")
        return name

    def _attempts(self, path: str, body: Mapping[str, Any] | None, read: Read[T], stop: threading.Event) -> T:
        service = self.service
        for attempt in range(1 + service.retries):
            if stop.is_set():
                raise _GivenUp
            try:
                reply = read(self._send(path, body))
                stamp()
                return reply
            except Passing as problem:
                last = problem
            except Refused as problem:
                stop.set()
                raise service.error(str(problem)) from None
            if attempt < service.retries:
                delay = service.backoff_s * 2**attempt * _JITTER.uniform(0.5, 1.0)
                stop.wait(min(max(delay, last.retry_after), MAX_WAIT_S))
        stop.set()
        section = service.section
        raise service.error(
            f"the service at {self.url} ({section}.url) failed {1 + service.retries} time(s), at last with: {last}. Is "
            f"it running ({service.start})? {section}.timeout_s, {section}.retries and {section}.backoff_s say how "
            "patient to be"
        )

    def _send(self, path: str, body: Mapping[str, Any] | None) -> "Response":
        """One attempt: the whole response, within ``timeout_s`` (httpx's own limit is per read) and
        `MAX_REPLY_BYTES`.

        Raises:
            Passing: there is none, it is too long or packed in another way, or its status is one that may pass.
            Refused: any other status from 300 on, but 404, which is left to the reader.
        """
        limit = self.service.timeout_s
        deadline, received = time.monotonic() + limit, bytearray()
        try:
            with self._client.stream("GET" if body is None else "POST", self.url + path, json=body) as response:
                for chunk in _unpacked(response):
                    received += chunk
                    if len(received) > MAX_REPLY_BYTES:
                        raise Passing(f"HTTP {response.status_code} with a body of more than {MAX_REPLY_BYTES} bytes")
                    if time.monotonic() > deadline:
                        raise Passing(f"no complete reply within {limit:g} s")
        except httpx.InvalidURL as error:
            raise Refused(f"{self.service.section}.url={self.url}: {error}") from None
        except httpx.RequestError as error:
            raise Passing(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        status, content = response.status_code, bytes(received)
        if status in PASSING or status >= 500:
            raise Passing(f"HTTP {status}: {start(content)}", _retry_after(response.headers.get("retry-after")))
        if status >= 300 and status != 404:
            raise Refused(f"{self.url}{path} answers HTTP {status}: {start(content)}")
        return Response(status, content)


class Response:
    """A whole body with its status."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    def json(self) -> Any:
        """The body, parsed.

        Raises:
            Passing: not JSON, or nested too deeply to read.
        """
        try:
            return json.loads(self.body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise Passing(f"HTTP {self.status} with a body that is not JSON: {start(self.body)}") from None


def chat_message(response: Response) -> Mapping[str, Any]:
    """The message of a chat completion; a `Read`."""
    if response.status == 404:
        raise Refused(f"HTTP 404: {start(response.body)}; the address must end where /chat/completions begins")
    try:
        message = response.json()["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise Passing(f"not a chat completion: {start(response.body)}")
    return message


def start(body: bytes) -> str:
    """The beginning of a body, for messages."""
    return " ".join(body[:2000].decode(errors="replace").split())[:300] or "(empty)"


# --------------------------------------------------------------------------------------------------------------------


_JITTER = random.SystemRandom()  # the global generator is the user's


class _GivenUp(Exception):
    """Another request of the batch has failed for good."""


def _unpacked(response: httpx.Response) -> Iterator[bytes]:
    """The body in small pieces, as it comes: httpx itself would unpack a chunk to any size at once.

    Raises:
        Passing: packed by anything but gzip, or broken.
    """
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise Passing(f"HTTP {response.status_code} with a body packed by {encoding[:50]!r}, which was not asked for")
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
        raise Passing(f"HTTP {response.status_code} with a body that is not gzip: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _models(response: Response) -> list[str] | None:
    """The names that an endpoint lists; None if it has no list."""
    if response.status == 404:
        return None
    try:
        names = [model["id"] for model in response.json()["data"]]
    except (KeyError, TypeError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise Passing(f"not a list of models: {start(response.body)}")
    if not names:
        raise Passing("the list of models is empty")
    return names


def _retry_after(value: str | None) -> float:
    """Seconds; a date is not worth reading."""
    return float(value) if value is not None and value.isdecimal() else 0.0
