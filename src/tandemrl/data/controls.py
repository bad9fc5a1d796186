"""Control tokens of a tokenizer, and how a text is cut so that it does not become one. No torch."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"


class Controls:
    """The control tokens of a tokenizer with a chat template: special tokens, markup, tags of calls and thoughts, and
    tokens that contain one of these.

    ids: theirs, without that of the unknown token, which may stand for any character.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        controls = _controls(tokenizer, template)
        self.ids = frozenset(controls) - {tokenizer.unk_token_id}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normaliser = getattr(backend, "normalizer", None)
        self._normalise: Callable[[str], str] = normaliser.normalize_str if normaliser else str
        texts = {text for text in controls.values() if len(text) > 1}
        texts |= {text for text in map(self._normalise, texts) if len(text) > 1}
        self._texts = [text for text in texts if not any(part in texts for part in _parts(text))]
        self._pattern = re.compile(f"(?={'|'.join(map(re.escape, self._texts)) or '(?!)'})")
        self._begins = {text[:end] for text in self._texts for end in range(1, len(text))}
        self._ends = {text[start:] for text in self._texts for start in range(1, len(text))}
        self._longest = max(map(len, self._texts), default=0)
        self._spaces = tokenizer.decode([*tokenizer.encode("a", add_special_tokens=False)] * 2) == "a a"

    def occur(self, text: str) -> bool:
        """Whether a control token's text is in a text, as it is or normalised."""
        return any(control in each for each in {text, self._normalise(text)} for control in self._texts)

    def may_join(self, text: str) -> bool:
        """Whether a text begins, ends or is a part of a control token, so that it may be one with what is beside it."""
        short = range(1, min(len(text) + 1, self._longest))
        return any(text[:end] in self._ends or text[-end:] in self._begins for end in short) or (
            0 < len(text) < self._longest and any(text in control for control in self._texts)
        )

    def splits(self, text: str) -> Sequence[int]:
        """The offsets at which a text is cut, so that its pieces contain no control token: after the first character of
        each; everywhere, if a normaliser makes one."""
        if not self.occur(text):
            return ()
        splits = [found.start() + 1 for found in self._pattern.finditer(text)]
        pieces = (text[a:b] for a, b in zip([0, *splits], [*splits, len(text)], strict=True))
        return range(1, len(text)) if any(map(self.occur, pieces)) else splits

    def apart(self, pieces: Sequence[str], encode: Callable[[str], Sequence[int]]) -> Iterator[Sequence[int]]:
        """The ids of each piece of a text, without the space that some tokenizers put in front of every text."""
        yield encode(pieces[0])
        anchor = [*encode("\n")] if self._spaces else []
        for piece in pieces[1:]:
            ids = [*encode("\n" + piece)] if anchor else []
            yield ids[len(anchor) :] if anchor and ids[: len(anchor)] == anchor else encode(piece)


def controls_of(tokenizer: Any, template: str) -> Controls:
    """The control tokens of a tokenizer with a template; found once."""
    return _known(tokenizer, template, len(tokenizer))


@lru_cache(maxsize=8)
def _known(tokenizer: Any, template: str, size: int) -> Controls:
    return Controls(tokenizer, template)


def _controls(tokenizer: Any, template: str) -> Mapping[int, str]:
    """The control tokens and their texts. Other added tokens, such as words of a small vocabulary, are text."""
    signs = {CALL, END_OF_CALL, THOUGHT, END_OF_THOUGHT} | {
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or _is_tag(token.content) or (_is_markup(token.content) and token.content.strip() in template)
    }
    holds = re.compile("|".join(map(re.escape, signs)))
    found = [index for token, index in tokenizer.get_vocab().items() if holds.search(token)]
    return {index: tokenizer.decode([index], skip_special_tokens=False) for index in found}


def _parts(text: str) -> Iterator[str]:
    """What is inside of a text, but the text itself. Some tokenizers have thousands of control tokens, all short."""
    ends = range(1, len(text) + 1)
    return (text[start:end] for end in ends for start in range(end) if end - start < len(text))


def _is_markup(text: str) -> bool:
    return any(sign in text for sign in "<>[]{}|") and any(map(str.isalpha, text))


def _is_tag(text: str) -> bool:
    return re.fullmatch(r"\s*<[^<>\s]*[^\W\d_][^<>\s]*>\s*", text) is not None
