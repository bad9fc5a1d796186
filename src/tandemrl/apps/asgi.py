"""What our web servers (``tandemrl play`` and ``serve``) refuse before they read it: requests to a
Host that is not this machine, and bodies without end. The module imports nothing but the standard library."""

import ipaddress
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether the Host of a request is this machine.

    A page from elsewhere can make the browser of its visitor take this machine for the page's own server, since the
    page's owner says which address its name has (DNS rebinding). Such requests have that name as their Host. An address
    cannot be rebound, so every address is ours.

    Args:
        host: the header, with or without a port.
        names: the names of this machine, in any case.

    Examples:
        >>> is_ours("localhost:8000", LOOPBACK), is_ours("evil.example:8000", LOOPBACK)
        (True, False)
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]  # [::1]:8000
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.lower().removesuffix(".") in {each.lower() for each in names}
    return True


def refused_host(scope: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The Host of a request if it is not one that `is_ours`, else None.

    A request without one is no browser's, but for instance a health check's in HTTP/1.0.

    Args:
        scope: the ASGI scope of the request.

    Examples:
        >>> refused_host({"headers": [(b"host", b"evil.example")]}, LOOPBACK)
        'evil.example'
        >>> refused_host({"headers": []}, LOOPBACK)
    """
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    return None if not hosts or (len(hosts) == 1 and is_ours(hosts[0], names)) else ", ".join(hosts)


def limited(receive: Receive, limit: int, error: Callable[[int, str], Exception]) -> Receive:
    """``receive``, until the body of a request has more than ``limit`` bytes.

    Args:
        receive: the function of the ASGI server.
        error: makes the exception of a status (413) and a message, which is then raised and the application turns into
            a response.
    """
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise error(413, f"the body of a request may have at most {limit} bytes")
        return message

    return counted
