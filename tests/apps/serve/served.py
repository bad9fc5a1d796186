"""A real server in a process of its own, and what asks it."""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairs import CONTEXT, models, save

from helpers import tokenizer
from tandemrl.config import SelectionConfig

TURNS = """{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor -%}
{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}!{% endif %}"""
SERVED = SelectionConfig(strategy="word", max_gap_tokens=4)
PAIR = "Llama junior"


def save_pair(folder: Path) -> Path:
    """Save the models of ``PAIR`` with a chat template."""
    for name, model in zip(("senior", "junior"), models(PAIR), strict=True):
        save(model, folder / name)
    with_turns = copy.deepcopy(tokenizer())
    with_turns.chat_template = TURNS
    with_turns.save_pretrained(folder / "senior")
    return folder


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    model: str
    engine: str


@contextlib.contextmanager
def serving(
    engine: str, senior: Path, junior: Path, log: Path, *options: str, context: int = CONTEXT
) -> Iterator[Server]:
    """The command in a process group of its own, which never outlives the tests."""
    port = free_port()
    command = [sys.executable, "-c", "from tandemrl.cli.main import main; main()", "serve", "--engine", engine]
    command += ["--senior", str(senior), "--junior", str(junior), *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--context", str(context)]
    command += ["--", "model.dtype=float32", "model.device=cpu"]
    # No process of its own for the worker: each one imports vLLM anew.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield Server(process, url, log, str(senior), engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def openai_client(server: Server) -> Any:
    """The client that is used most; its ``model`` is the name of what is served."""
    from openai import OpenAI

    client: Any = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
    client.model = server.model
    return client


def complete(client: Any, prompt: Any = "ab cd", *, max_tokens: int = 20, tandem: Any = None, **options: Any) -> Any:
    body = {"ignore_eos": True} | ({} if tandem is None else {"tandem": tandem}) | options.pop("extra", {})
    return client.completions.create(
        model=client.model, prompt=prompt, max_tokens=max_tokens, extra_body=body, **options
    )
