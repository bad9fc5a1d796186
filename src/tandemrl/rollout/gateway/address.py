"""Where a server listens, and under which names it is asked."""

import errno
import socket
from collections.abc import Collection

import uvicorn
from starlette.applications import Starlette

from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.gateway.asgi import LOOPBACK

API_KEY = "VLLM_API_KEY"
"""The environment variable of the key that clients have to send."""
KEEP_ALIVE_S = 75
"""How long an idle connection stays open: well beyond the 5 s after which httpx's pool drops one, so that no client
writes into a connection that the server is about to close."""


def hosts_of(host: str, allowed: Collection[str] = ()) -> Collection[str]:
    """The names under which a server is asked: this machine's, that which it listens at, and those that it was given.

    Args:
        host: the name or address that it listens at.
        allowed: further names.
    """
    return {*LOOPBACK, socket.gethostname(), socket.getfqdn(), host, *allowed}


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at a port.

    Raises:
        EngineError: nothing can listen there, for example because the port is in use.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EngineError(f"port {port} of {host} is in use; choose another one with --port") from None
        raise EngineError(f"--host {host} --port {port}: {error.strerror or error}") from None


def url_of(host: str, listening: socket.socket) -> str:
    """The address of a server that listens at a host."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"


def run(app: Starlette, listening: socket.socket) -> None:
    """Answer at a socket until it is interrupted."""
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
    uvicorn.Server(config).run(sockets=[listening])
