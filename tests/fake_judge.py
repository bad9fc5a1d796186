"""Judges of tests: in this process, and over real HTTP (an OpenAI-compatible endpoint in a thread)."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Body = dict[str, Any]


class Reply(NamedTuple):
    """Anything but a plain chat completion. drip: seconds between single bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    delay: float = 0.0
    drip: float = 0.0


def completion(text: str | None) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


class Scripted:
    """A judge in this process: ``answer(prompt)``."""

    model = "scripted"

    def __init__(self, answer: Callable[[str], str]) -> None:
        self.answer, self.calls = answer, list[list[str]]()

    def ask(self, prompts: Sequence[Any], usable: object = None) -> list[str]:
        self.calls.append([prompt[-1]["content"] for prompt in prompts])
        return [self.answer(content) for content in self.calls[-1]]


def says(text: str) -> Scripted:
    return Scripted(lambda prompt: text)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FakeJudge:
    """``answer(prompt, number of this request)`` is the reply's text, or a `Reply`. Without a prompt it gets the body.

    ``bodies``: what was asked, in order of arrival. ``at``: when, in seconds. ``most_at_once``: requests in flight.
    """

    def __init__(
        self,
        answer: Callable[[Any, int], str | Reply],
        *,
        models: tuple[str, ...] | Reply = ("fake",),
        port: int = 0,
        path: str = "/v1/chat/completions",
    ) -> None:
        self.answer, self.models, self._port, self._path = answer, models, port, path
        self.bodies: list[Body] = []
        self.authorizations: list[str | None] = []
        self.at: list[float] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def __enter__(self) -> "FakeJudge":
        judge = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                assert self.path == "/v1/models"
                if isinstance(judge.models, Reply):
                    self.write(judge.models)
                else:
                    self.write(Reply(body=json.dumps({"data": [{"id": name} for name in judge.models]}).encode()))

            def do_POST(self) -> None:
                assert self.path == judge._path
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with judge._lock:
                    judge.bodies.append(body)
                    judge.authorizations.append(self.headers["authorization"])
                    judge.at.append(time.monotonic())
                    number = len(judge.bodies)
                    judge._at_once += 1
                    judge.most_at_once = max(judge.most_at_once, judge._at_once)
                try:
                    asked = body["messages"][-1]["content"] if "messages" in body else body.get("prompt", body)
                    answer = judge.answer(asked, number)
                finally:  # before the reply is out: the client may send its next request at once
                    with judge._lock:
                        judge._at_once -= 1
                self.write(answer if isinstance(answer, Reply) else Reply(body=completion(answer)))

            def write(self, reply: Reply) -> None:
                time.sleep(reply.delay)
                try:
                    self.send_response(reply.status)
                    for name, value in (*reply.headers, ("content-length", str(len(reply.body)))):
                        self.send_header(name, value)
                    self.end_headers()
                    if not reply.drip:
                        self.wfile.write(reply.body)
                    for byte in reply.body if reply.drip else b"":
                        self.wfile.write(bytes([byte]))
                        time.sleep(reply.drip)
                except (BrokenPipeError, ConnectionResetError):  # a client that lost its patience
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
