"""Words as a property of the text, whatever its tokens are, and what one model wrote as the tokens of another.

A word begins at a space (U+0020) that follows anything but whitespace, and at the first byte of a text. So a run of
spaces is one beginning, indentation is none, and models of two vocabularies count the same words: where a token begins
a word depends on the text before it, not on its id alone. Tokenizers hardly ever join two words in a token (Gemma 3's
"> </" does), so a text that is cut there nearly always has the tokens of the whole; ``read`` checks it each time.

No tensors here. The strategy of these words is ``whole_words.before_text_word``.
"""

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from threading import Lock
from typing import Any, NamedTuple

from tandemrl.selection.boundaries import token_bytes

SPACES = [chr(i).encode() for i in range(0x3001) if chr(i).isspace()]
"""All whitespace (``str.isspace``), in UTF-8."""
_START = re.compile(b"\x20" + b"".join(b"(?<!" + re.escape(space) + b"\x20)" for space in SPACES))
_LOOKBEHIND = 3
_CACHED = 64  # characters; whole texts would fill the memory


def word_starts(text: bytes, before: bytes = b"") -> list[int]:
    """The offsets in ``text`` at which a word begins, if it follows ``before``. Nothing before it: at 0, too."""
    seen = before[-_LOOKBEHIND:]
    found = [match.start() - len(seen) for match in _START.finditer(seen + text) if match.start() >= len(seen)]
    return [0, *found] if text and not before and found[:1] != [0] else found


def step_words(text: bytes, starts: Sequence[int]) -> int:
    """How many words end a step, the last of them with a blank line ("\\n\\n"); one more than there are if none does.

    Args:
        starts: where the words begin in ``text`` (``word_starts``).
    """
    ends = [*starts, len(text)][1:]
    whole = (k for k, word in enumerate(zip(starts, ends, strict=True), 1) if b"\n\n" in text[slice(*word)])
    return next(whole, len(starts) + 1)


def last_word(text: bytes) -> bytes:
    """The end of a text, from where its last word begins; empty if there is none."""
    starts = word_starts(text)
    return text[starts[-1] :] if starts else b""


def whole_characters(text: bytes) -> bytes:
    """A text without the character that it ends inside of, if it does."""
    for cut in range(min(4, len(text))):
        if text[-1 - cut] & 0xC0 != 0x80:  # no continuation byte: the last character begins here
            try:
                text[-1 - cut :].decode()
            except UnicodeDecodeError:
                return text[: -1 - cut]
            break
    return text


def begin_words(pieces: Sequence[bytes], before: bytes = b"") -> list[bool]:
    """Whether each token of a text, by its bytes, begins a word. A word that begins inside a token has none."""
    starts = set(word_starts(b"".join(pieces), before))
    return [edge in starts for edge in accumulate(map(len, pieces[:-1]), initial=0)] if pieces else []


class Vocabulary(NamedTuple):
    """What it takes to spell and read with a tokenizer.

    pieces: the bytes of each id that is text. encode: a text as ids, in which no text becomes a special token.
    """

    pieces: Mapping[int, bytes]
    encode: Callable[[str], Sequence[int]]


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a Hugging Face tokenizer."""

    # How a tokenizer treats special tokens is a state of it, and threads encode: those that ask an endpoint for words,
    # and those that an engine writes in while another one encodes prompts.
    lock, own = Lock(), copy.deepcopy(tokenizer)

    def split(text: str) -> tuple[int, ...]:
        with lock:
            return tuple(own.encode(text, add_special_tokens=False, split_special_tokens=True))

    few = lru_cache(maxsize=2**14)(split)  # the same few words come again and again

    def encode(text: str) -> tuple[int, ...]:
        return few(text) if len(text) <= _CACHED else split(text)

    return Vocabulary(token_bytes(tokenizer), encode)


def spell(tokens: Iterable[int], vocabulary: Vocabulary) -> bytes | None:
    """The text of some tokens; None if one of them is no text."""
    pieces = [vocabulary.pieces.get(token) for token in tokens]
    return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)


def read(text: bytes, reader: Vocabulary, before: bytes) -> tuple[int, ...] | None:
    """What one model wrote, whole words, as tokens of another, in context; None if it cannot be read.

    It cannot if it begins or ends amid a character; if the reader would have read what is before it as other tokens; if
    its tokens are another text (of a tokenizer that normalises text); if a word begins inside of one of them. The end
    of the text is no part of it: it is the end in both vocabularies. What the reader itself has written before may be
    other tokens than its tokenizer would make of that text, and stays as it is.

    Args:
        before: the text before it: all of it, or from the beginning of a word on. Empty at the beginning of a text,
            where a word begins whatever comes.
    """
    if not text:
        return ()
    earlier = last_word(before)
    try:
        known, encoded = (tuple(reader.encode(each.decode())) for each in (earlier, earlier + text))
    except UnicodeDecodeError:
        return None
    tokens = encoded[len(known) :]
    pieces = [reader.pieces.get(token, b"") for token in tokens]
    if encoded[: len(known)] != known or b"".join(pieces) != text:
        return None
    begun = begin_words(pieces, earlier)
    return tokens if begun[0] and sum(begun) == len(word_starts(text, earlier)) else None
