"""Adds the author of every token to responses, whole or streamed. Authors are replayed from keys and tokens.

Every choice of a response has ``authorship``, with one entry for each of its ``token_ids``: 1 for the senior, 0 for the
junior. The response has ``tandem``; in a stream, each chunk that ends a choice has it. It holds the senior's share of
the tokens, the seed that repeats the request, the strategy, our version and the id of the conversation, if there is
one.
"""

import importlib.metadata
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tandemrl.apps.serve.conversations import StreamedTurn
from tandemrl.apps.serve.requests import ParsedRequest
from tandemrl.rollout.engine import EngineError, replay_turns
from tandemrl.selection import Strategy, resumed

VERSION = importlib.metadata.version("tandemrl")


def annotated(response: dict[str, Any], parsed: ParsedRequest, strategy: Strategy) -> dict[str, Any]:
    """A whole response with its authors and the summary ``tandem``.

    Args:
        response: the server's response, whose choices are changed.
        parsed: the request.
        strategy: the strategy of the request's selection.

    Raises:
        EngineError: the server returned a choice without token ids.
    """
    choices = response["choices"]
    if any(choice.get("token_ids") is None for choice in choices):
        raise EngineError("the server returned a choice without token ids: its authors cannot be told")
    turns = [[np.array(turn) for turn in (*parsed.history, choice["token_ids"])] for choice in choices]
    replayed = replay_turns(strategy, [parsed.key(choice["index"]) for choice in choices], turns)
    before, senior, total = sum(map(len, parsed.history)), 0, 0
    for row, choice in zip(replayed.author.tolist(), choices, strict=True):
        choice["authorship"] = row[before : before + len(choice["token_ids"])]
        senior, total = senior + sum(choice["authorship"]), total + len(choice["authorship"])
    _hide_prompts(response, parsed)
    return response | {"tandem": _summary(parsed, senior, total)}


class StreamAuthors:
    """Adds the authors to a streamed response, chunk by chunk.

    Args:
        parsed: the request.
        strategy: the strategy of the request's selection.
    """

    def __init__(self, parsed: ParsedRequest, strategy: Strategy) -> None:
        self._parsed, self._strategy = parsed, strategy
        self._states: dict[int, tuple[torch.Tensor, Any]] = {}
        if parsed.history:
            self._states[0] = resumed(strategy, torch.tensor([parsed.key(0)]), [parsed.history])
        self._senior = self._total = 0
        self._rest = b""
        self.written = StreamedTurn()
        """What was written so far. It stays empty if the request is not part of a conversation."""

    def events(self, data: bytes, *, last: bool = False) -> bytes:
        """The complete server-sent events so far, with authors. An incomplete event is kept until the rest of it comes.

        Args:
            data: the next bytes of the stream.
            last: whether the stream ends here. Then an incomplete event is returned as it is.
        """
        *complete, self._rest = (self._rest + data).split(b"\n\n")
        out = b"".join(self._event(event) + b"\n\n" for event in complete)
        return out + self._rest if last else out

    def _event(self, event: bytes) -> bytes:
        prefix = b"data: "
        if not event.startswith(prefix + b"{"):  # a comment, or [DONE]
            return event
        return prefix + dumps(self._annotated(json.loads(event[len(prefix) :])))

    def _annotated(self, chunk: dict[str, Any]) -> dict[str, Any]:
        choices = chunk.get("choices") or ()
        if self._parsed.conversation is not None:
            self.written.add(chunk)
        for choice in choices:
            choice["authorship"] = self._write(choice["index"], choice.get("token_ids") or ())
        _hide_prompts(chunk, self._parsed)
        if any(choice.get("finish_reason") is not None for choice in choices):
            chunk["tandem"] = _summary(self._parsed, self._senior, self._total)
        return chunk

    def _write(self, index: int, tokens: Iterable[int]) -> list[int]:
        if index not in self._states:
            self._states[index] = self._strategy.init(torch.tensor([self._parsed.key(index)]))
        authors = []
        for token in tokens:
            before = self._states[index]
            after = self._states[index] = self._strategy.step(before[1], torch.tensor([token]))
            authors.append(int((before if self._strategy.starts is None else after)[0]))
        self._senior += sum(authors)
        self._total += len(authors)
        return authors


def _summary(parsed: ParsedRequest, senior: int, total: int) -> dict[str, Any]:
    """The field ``tandem`` of a response with ``total`` tokens, of which the senior wrote ``senior``."""
    return {
        "senior_frac": senior / total if total else None,
        "seed": parsed.seed,
        "strategy": parsed.selection.strategy,
        "version": VERSION,
    } | ({} if parsed.conversation is None else {"conversation": parsed.conversation.id})


def _hide_prompts(response: dict[str, Any], parsed: ParsedRequest) -> None:
    """Remove the prompt's token ids if the client did not ask for them. vLLM sends them with the token ids."""
    if not parsed.show_prompt:
        for place in (response, *(response.get("choices") or ())):
            place.pop("prompt_token_ids", None)


def dumps(value: Any) -> bytes:
    """A JSON value without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()
