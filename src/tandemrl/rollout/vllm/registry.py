"""The strategies of a tandem server. Requests ask for a selection, and the workers know its strategy by a name."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import cloudpickle

from tandemrl.config import SelectionConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.vllm.conversations import Refused
from tandemrl.selection import Strategy

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
        self._names = {default: "default"}  # the least recently used first
        self._users = Counter[SelectionConfig]()
        self._numbers = count(1)  # a name never comes again: the workers may still know the old one
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, state: Any) -> "Strategies":
        """The strategies of a vLLM server. The worker builds the default strategy from the same options.

        Args:
            state: the state of the server's application.
        """
        config, client = state.vllm_config, state.engine_client
        tokenizer = load_tokenizer(config.model_config.tokenizer)
        vocabulary = config.model_config.get_vocab_size()

        def build(selection: SelectionConfig) -> Strategy:
            return schedule_of(selection, tokenizer, vocabulary).strategy(1)

        async def register(strategies: dict[str, Strategy]) -> None:
            await client.collective_rpc("tandem_register", args=(cloudpickle.dumps(strategies),))

        return cls(SelectionConfig(**config.additional_config["tandem"]["selection"]), build, register)

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
