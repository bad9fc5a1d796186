"""The authors of a response. Every choice has ``authorship``, with one entry for each of its ``token_ids``: 1 for the
senior, 0 for the junior. The response has ``tandem``; in a stream, each chunk that ends a choice has it. It holds the
senior's share of the tokens, the seed that repeats the request, the strategy, our version and the id of the
conversation, if there is one."""

import importlib.metadata
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tandemrl.apps.serve.requests import ParsedRequest
from tandemrl.rollout.engine import Completion
from tandemrl.selection import Strategy, resumed

VERSION = importlib.metadata.version("tandemrl")


class Authors:
    """The authors of a choice, piece by piece.

    Args:
        strategy: who writes.
        key: of the choice.
        history: the own tokens of each earlier turn.
    """

    def __init__(self, strategy: Strategy, key: int, history: Sequence[Sequence[int]]) -> None:
        keys, self._strategy = torch.tensor([key]), strategy
        self._state = resumed(strategy, keys, [history]) if history else strategy.init(keys)

    def of(self, tokens: Iterable[int]) -> list[int]:
        """The authors of the next tokens."""
        authors = []
        for token in tokens:
            before = self._state
            after = self._state = self._strategy.step(before[1], torch.tensor([token]))
            authors.append(int((before if self._strategy.starts is None else after)[0]))
        return authors


def summary(parsed: ParsedRequest, completions: Sequence[Completion]) -> dict[str, Any]:
    """The field ``tandem`` of a response."""
    senior, total = (sum(map(count, completions)) for count in (lambda c: int(c.author.sum()), lambda c: len(c.tokens)))
    return {
        "senior_frac": senior / total if total else None,
        "seed": parsed.seed,
        "strategy": parsed.selection.strategy,
        "version": VERSION,
    } | ({} if parsed.conversation is None else {"conversation": parsed.conversation.id})


def dumps(value: Any) -> bytes:
    """A JSON value without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
