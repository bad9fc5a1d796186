"""Where a server listens: the check before any model is loaded for it, and the line that says where it is."""

import errno
import socket
import threading
import time
from collections.abc import Collection
from contextlib import closing
from http.client import HTTPConnection, HTTPException

from tandemrl.apps.asgi import LOOPBACK
from tandemrl.rollout.engine import EngineError

API_KEY = "VLLM_API_KEY"
"""The environment variable of the key that clients have to send."""


def hosts_of(host: str, allowed: Collection[str]) -> Collection[str]:
    """The names under which a server is asked: this machine's, that which it listens at, and those that it was given.

    Args:
        host: the name or address that it listens at.
        allowed: further names.
    """
    return {*LOOPBACK, socket.gethostname(), socket.getfqdn(), host, *allowed}


def check_port(host: str, port: int) -> None:
    """Check that a server can listen at a port, before any model is loaded for it.

    Raises:
        EngineError: nothing can listen there, for example because the port is in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EngineError(f"port {port} of {host} is in use; choose another one with --port") from None
        raise EngineError(f"--host {host} --port {port}: {error.strerror or error}") from None


def announce(models: str, host: str, port: int, *, locked: bool) -> None:
    """Print what is served, where, and whether clients have to send a key, once the server answers. Returns at once."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

    def wait() -> None:
        while True:
            try:
                with closing(HTTPConnection(host, port, timeout=5)) as connection:
                    connection.request("GET", "/health")
                    connection.getresponse()
                break
            except (OSError, HTTPException):
                time.sleep(0.1)
        print(f"serving {models} at {url}, {'with' if locked else 'without'} an API key", flush=True)

    threading.Thread(target=wait, name="announce", daemon=True).start()
