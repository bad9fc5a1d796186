"""The strategies of a server. Requests ask for a selection, and what decodes them knows its strategy by a name."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from tandemrl.apps.serve.conversations import Refused
from tandemrl.config import SelectionConfig
from tandemrl.selection import Strategy

DEFAULT_NAME = "default"
"""The name of the strategy of requests that ask for none."""
MAX_SELECTIONS = 32
"""How many selections a server knows at once, its default included. The workers keep token tables for each of them."""


class Strategies:
    """The strategies of a server, by selection.

    The workers get to know a strategy by a name before a request uses it. If there are ``MAX_SELECTIONS``, a new one
    replaces the least recently used one that no request uses; the default always stays.

    Args:
        default: the selection of requests that ask for none.
        build: makes the strategy of a selection, or raises ``ValueError``.
        register: tells the workers all strategies by name.
    """

    def __init__(
        self,
        default: SelectionConfig,
        build: Callable[[SelectionConfig], Strategy],
        register: Callable[[dict[str, Strategy]], Awaitable[Any]],
    ) -> None:
        self.default, self._build, self._register = default, build, register
        self._known = {default: build(default)}
        self._names = {default: DEFAULT_NAME}  # the least recently used first
        self._users = Counter[SelectionConfig]()
        self._numbers = count(1)  # a name never comes again: the workers may still know the old one
        self._lock = asyncio.Lock()

    def __getitem__(self, selection: SelectionConfig) -> Strategy:
        return self._known[selection]

    async def acquire(self, selection: SelectionConfig) -> str:
        """Reserve a selection for a request, and return the name by which the workers know its strategy.

        The workers are told of a new selection first. It is kept until ``release`` has been called as often as this.

        Raises:
            Refused: a value is out of range, or too many other selections are in use.
        """
        async with self._lock:
            names, known = dict(self._names), dict(self._known)
            if selection not in names:
                if len(names) >= MAX_SELECTIONS:
                    idle = [one for one in names if one != self.default and not self._users[one]]
                    if not idle:
                        raise Refused(
                            f"tandem: {MAX_SELECTIONS} different selections are in use at this moment, and no more are "
                            "possible; try again when a request has ended"
                        )
                    del names[idle[0]], known[idle[0]]
                try:
                    known[selection] = self._build(selection)
                except ValueError as error:
                    raise Refused(f"tandem: {error}") from None
                names[selection] = str(next(self._numbers))
                await self._register({name: known[one] for one, name in names.items()})
            self._names = {one: name for one, name in names.items() if one != selection} | {selection: names[selection]}
            self._known = known
            self._users[selection] += 1
            return names[selection]

    def release(self, selection: SelectionConfig) -> None:
        """Release what ``acquire`` has reserved, once the request has ended."""
        self._users[selection] -= 1
        if not self._users[selection]:
            del self._users[selection]
