"""What the web applications of ``tandemrl play`` and ``tandemrl serve`` refuse before they read it: requests to a Host
that is not this machine, and bodies without end. The module does not import torch."""

import ipaddress
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def refused_host(scope: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The Host of a request if it is not one of ours, else None.

    A page from elsewhere can make the browser of its visitor take this machine for the page's own server, since the
    page's owner says which address its name has (DNS rebinding). Such requests have that name as their Host. An address
    cannot be rebound, so every address is ours.

    Args:
        scope: the ASGI scope of the request.
        names: the names of this server, in any case.
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    host = hosts[0] if len(hosts) == 1 else ", ".join(hosts)
    name = _without_port(host)
    ours = {each.lower() for each in names}
    return None if _is_address(name) or name.lower().removesuffix(".") in ours else host


def limited(
    receive: Receive,
    headers: Iterable[tuple[bytes, bytes]],
    limit: int,
    error: Callable[[int, str], Exception] = HTTPException,
) -> Receive:
    """``receive``, with the whole body in its first message, in linear time.

    The messages after it are passed on, and so is the message of a client that leaves while it sends.

    Args:
        receive: the function of the ASGI server.
        headers: the headers of the request. If they announce too long a body, nothing of it is read.
        limit: how many bytes the body may have.
        error: makes the exception of a status and a message that the application turns into a response.

    Raises:
        HTTPException: the body is longer (status 413); at the time when the application asks for it.
    """
    announced = next((value for name, value in headers if name == b"content-length"), b"")
    read = False

    def check(size: int) -> None:
        if size > limit:
            raise error(413, f"the body of a request may have at most {limit} bytes")

    async def whole() -> Message:
        nonlocal read
        if read:
            return await receive()
        read, more, body = True, True, bytearray()
        check(int(announced) if announced.isdigit() else 0)
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            check(len(body))
            more = message.get("more_body", False)
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return whole


def _without_port(host: str) -> str:
    """The name or address of a Host header. An IPv6 address stands in brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
