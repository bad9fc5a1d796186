"""What our web servers (``tandemrl play``, ``serve`` and that of an index) have in common: what they refuse before they
read it: requests to a Host that is not this machine, and bodies without end."""

import ipaddress
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class Door:
    """The middleware that refuses requests to other hosts, and bodies of more than ``limit`` bytes.

    Args:
        hosts: the names of this machine.
        hint: what to do about another name.
        refusal: makes the response of a status and a message. That a body is too long is an ``HTTPException`` (413)
            inside of the application.
        admits: whether a request may pass, by its scope.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        limit: int,
        hint: str,
        refusal: Callable[[int, str], Response],
        admits: Callable[[Scope], bool] = lambda scope: True,
    ) -> None:
        self._app, self._hosts, self._limit, self._hint = app, hosts, limit, hint
        self._refusal, self._admits = refusal, admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise HTTPException(413, f"the body of a request may have at most {self._limit} bytes")
            return message

        answer = self._app
        if scope["type"] == "http":
            if (host := refused_host(scope, self._hosts)) is not None:
                answer = self._refusal(400, f"Host {host!r} is not answered; {self._hint}")
            elif not self._admits(scope):
                answer = self._refusal(401, "Unauthorized")
        await answer(scope, counted, send)


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        HTTPException: it is none.
    """
    try:
        body = json.loads(await request.body())
    except ClientDisconnect:
        raise HTTPException(400, "the client left") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body: expected a JSON object")
    return body
