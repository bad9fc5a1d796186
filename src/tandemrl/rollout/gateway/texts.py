"""What an engine wrote, as OpenAI's bodies: texts, messages with tool calls, log-probs, chunks of a stream; and its
authors.

Every choice has ``authorship``, with one entry for each of its ``token_ids``: 1 for the senior, 0 for the junior. The
response has ``tandem``; in a stream, each chunk that ends a choice has it. It holds the senior's share of the tokens,
the seed that repeats the request (in a session there is none), the strategy and our version.
"""

import importlib.metadata
import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from tandemrl.data.messages import sound
from tandemrl.rollout.engine import LOST, Completion, Request
from tandemrl.rollout.envs.parsing import CallFormat, parse_turn
from tandemrl.rollout.gateway.requests import Asked, Form, TextStyle
from tandemrl.selection import Strategy, resumed
from tandemrl.selection.boundaries import token_bytes

VERSION = importlib.metadata.version("tandemrl")

_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "turns": "stop", "abort": "abort"}
_REASONS |= dict.fromkeys(LOST, "error")


def text_of(
    tokenizer: Any, tokens: Sequence[int], style: TextStyle, *, eos: bool = False
) -> tuple[str, str | int | None]:
    """The text of a completion, and the stop string or id at its end, if there is one.

    Args:
        eos: whether an author ended it: its last token, special or not, is then no text.
    """
    tokens = [*tokens]
    ended = tokens[-1] if tokens and tokens[-1] in style.stop_token_ids else None
    if (ended is not None or eos) and not style.keep_stop:
        tokens.pop()
    text = tokenizer.decode(tokens, skip_special_tokens=style.skip_special)
    whole = text.rstrip("\ufffd")  # what it ends in may be half of a character
    found = [(whole.index(stop), stop) for stop in style.stop if stop in whole]
    if ended is not None or not found:
        return text, ended
    start, stop = min(found)
    return text[: start + len(stop) * style.keep_stop], stop


class TextStream:
    """The text of a completion, piece by piece: no half characters, and nothing of a stop string."""

    def __init__(self, tokenizer: Any, style: TextStyle, ends: Collection[int] = ()) -> None:
        self.tokenizer, self.style = tokenizer, style
        self._ends = {*ends, *style.stop_token_ids}
        self.tokens: list[int] = []
        self._from = self._read = 0  # places in the tokens: a window's begin, and how far its text is told
        self._held = ""
        self.told = self.offset = 0
        """How many characters were told, and how many the tokens begin whose log-probs were told."""
        self._hold = 0 if style.keep_stop else max((len(stop) - 1 for stop in style.stop), default=0)

    def add(self, tokens: Sequence[int]) -> str:
        """The further text that is certain with these tokens."""
        self.tokens += tokens
        if self.tokens and self.tokens[-1] in self._ends:
            return ""  # it is told with the whole text

        def decoded(end: int | None) -> str:
            return self.tokenizer.decode(self.tokens[self._from : end], skip_special_tokens=self.style.skip_special)

        known, whole = decoded(self._read), decoded(None)
        if len(whole) <= len(known) or whole.endswith("\ufffd"):
            return ""
        self._from, self._read = self._read, len(self.tokens)
        self._held += whole[len(known) :]
        if any(stop in self._held for stop in self.style.stop):
            return ""
        certain = self._held[: max(0, len(self._held) - self._hold)]
        self._held = self._held[len(certain) :]
        self.told += len(certain)
        return certain


class Speaker:
    """Makes the choices of responses.

    Args:
        calls: how tool calls are written.
        ends: the ids that end a text.
    """

    def __init__(self, tokenizer: Any, calls: CallFormat, ends: Collection[int] = ()) -> None:
        self.tokenizer, self.calls, self.ends = tokenizer, calls, ends

    @cached_property
    def _pieces(self) -> dict[int, bytes]:
        return token_bytes(self.tokenizer)

    def choice(self, asked: Asked, index: int, completion: Completion) -> dict[str, Any]:
        """A choice of a whole response."""
        tokens, logprobs = completion.tokens.tolist(), completion.behaviour_logprobs.tolist()
        text, stop = text_of(self.tokenizer, tokens, asked.style, eos=completion.stop_reason == "eos")
        choice: dict[str, Any] = {
            "index": index,
            "logprobs": self.logprobs(asked.form, tokens, logprobs) if asked.wants("logprobs") else None,
            "finish_reason": _REASONS[completion.stop_reason],
            "stop_reason": completion.stop_reason if completion.stop_reason in LOST else stop,
            "token_ids": tokens,
            "authorship": completion.author.tolist(),
        }
        if asked.form == "ids":
            return choice
        if asked.form == "text":
            return choice | {"text": text}
        content, calls = self.parsed(asked, text)
        if calls:
            choice["finish_reason"] = "tool_calls"
        message = {"role": "assistant", "content": content, "refusal": None}
        return choice | {"message": message | ({"tool_calls": calls} if calls else {})}

    def parsed(self, asked: Asked, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """The content and the tool calls of a text. If a call cannot be made, all of the text is content."""
        if not asked.tools:
            return text, []
        message = parse_turn(text, asked.tools, self.tokenizer, "", self.calls)
        if "invalid_calls" in message or not message.get("tool_calls"):
            return text, []
        calls = [
            {
                "id": f"call-{secrets.token_hex(12)}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
        return message.get("content") or None, calls

    def logprobs(
        self, form: Form, tokens: Sequence[int], values: Sequence[float], stream: TextStream | None = None
    ) -> dict[str, Any]:
        """OpenAI's field ``logprobs`` of some tokens. ``stream``: whose next tokens they are."""
        if form == "ids":
            return {"content": [_logprob(f"token_id:{t}", None, v) for t, v in zip(tokens, values, strict=True)]}
        texts = [str(sound(self.tokenizer.decode([token]))) for token in tokens]
        pieces = [self._pieces.get(token, text.encode()) for token, text in zip(tokens, texts, strict=True)]
        if form == "chat":
            return {"content": [_logprob(t, [*piece], v) for t, piece, v in zip(texts, pieces, values, strict=True)]}
        offsets, begun = list[int](), 0 if stream is None else stream.offset  # in characters, which tokens may share
        for piece in pieces:
            first = [byte & 0xC0 != 0x80 for byte in piece]
            offsets.append(max(0, begun - (first[:1] == [False])))
            begun += sum(first)
        if stream is not None:
            stream.offset = begun
        return {"tokens": texts, "token_logprobs": [*values], "top_logprobs": None, "text_offset": offsets}


def _logprob(token: str, piece: list[int] | None, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": piece, "top_logprobs": []}


class Chunks:
    """A choice of a stream, chunk by chunk.

    Args:
        request, key: what it completes.
    """

    def __init__(self, speaker: Speaker, asked: Asked, index: int, request: Request, key: int) -> None:
        self._speaker, self._asked, self._index = speaker, asked, index
        self._text = TextStream(speaker.tokenizer, asked.style, speaker.ends)
        self._authors = Authors(request.strategy, key, request.history)
        self._prompt = {"prompt_token_ids": [*request.prompt]} if asked.wants("return_token_ids") else {}

    def begin(self) -> dict[str, Any]:
        """The chunk before the first token of a chat."""
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._chunk(begun) | self._prompt

    def further(self, tokens: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        """The chunk with further tokens. Where calls may come, the text waits for the end of the completion."""
        asked, text = self._asked, self._text.add(tokens)
        shown = None
        if asked.wants("logprobs"):
            shown = self._speaker.logprobs(asked.form, tokens, values, self._text)
        said = {"logprobs": shown, "finish_reason": None, "token_ids": [*tokens]}
        return self._chunk(self._said("" if asked.tools else text) | said)

    def last(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """The chunk that ends a ``choice``."""
        message = choice.get("message", {})
        text = message.get("content", choice.get("text")) or ""
        said = self._said(text if self._asked.tools else text[self._text.told :])
        if calls := message.get("tool_calls"):
            said["delta"]["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        ended = {name: choice[name] for name in ("finish_reason", "stop_reason")}
        return self._chunk({**said, "logprobs": None, **ended, "token_ids": []})

    def _said(self, text: str) -> dict[str, Any]:
        if self._asked.form == "chat":
            return {"delta": {"content": text} if text else {}}
        prompt, self._prompt = self._prompt, {}  # with the first chunk
        return {"text": text, **prompt}

    def _chunk(self, said: Mapping[str, Any]) -> dict[str, Any]:
        authorship = self._authors.of(said.get("token_ids", ()))
        return {"choices": [{"index": self._index, **said, "authorship": authorship}]}


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


def summary(asked: Asked, completions: Sequence[Completion]) -> dict[str, Any]:
    """The field ``tandem`` of a response."""
    senior, total = (sum(map(count, completions)) for count in (lambda c: int(c.author.sum()), lambda c: len(c.tokens)))
    return {
        "senior_frac": senior / total if total else None,
        **({} if asked.seed is None else {"seed": asked.seed}),
        "strategy": asked.selection.strategy,
        "version": VERSION,
    }
