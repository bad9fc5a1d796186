"""Words as a property of the text, whatever its tokens are, and what one model wrote as the tokens of another.

A word begins at a space (U+0020) that follows anything but whitespace, and at the first byte of a text. So a run of
spaces is one beginning, indentation is none, and models of two vocabularies count the same words: where a token begins
a word depends on the text before it, not on its id alone. Tokenizers hardly ever join two words in a token (Gemma 3's
"> </" does), so a text that is cut there nearly always has the tokens of the whole; ``translate`` checks it each time.

No tensors here. No engine uses this yet: models of two vocabularies are refused (``models.loading.vocabulary_check``).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from tandemrl.selection.boundaries import token_bytes

# A space after none of the characters for which str.isspace holds, by their bytes in UTF-8.
_START = re.compile(
    rb"(?<![\t-\r\x1c-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)\x20"
)
_LOOKBEHIND = 3


def word_starts(text: bytes, before: bytes = b"") -> list[int]:
    """The offsets in ``text`` at which a word begins, if it follows ``before``. Nothing before it: at 0, too."""
    seen = before[-_LOOKBEHIND:]
    found = [match.start() - len(seen) for match in _START.finditer(seen + text) if match.start() >= len(seen)]
    return [0, *found] if text and not before and found[:1] != [0] else found


def begin_words(pieces: Sequence[bytes], before: bytes = b"") -> list[bool]:
    """Whether each token of a text, by its bytes, begins a word. A word that begins inside a token has none."""
    starts = set(word_starts(b"".join(pieces), before))
    return [edge in starts for edge in accumulate(map(len, pieces[:-1]), initial=0)] if pieces else []


class Vocabulary(NamedTuple):
    """What a translation needs of a tokenizer.

    pieces: the bytes of each id that is text. encode: a text as ids, in which no text becomes a special token.
    """

    pieces: Mapping[int, bytes]
    encode: Callable[[str], Sequence[int]]


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The vocabulary of a Hugging Face tokenizer."""

    def encode(text: str) -> Sequence[int]:
        ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    return Vocabulary(token_bytes(tokenizer), encode)


class StartCounts(NamedTuple):
    """How many ids of a vocabulary begin a word after anything but whitespace, and in how many another one begins."""

    begin: int
    inside: int


def count_starts(pieces: Iterable[bytes]) -> StartCounts:
    """Count the ids that begin a word, and those inside of which one begins."""
    starts = [word_starts(piece, b"a") for piece in pieces]
    return StartCounts(sum(found[:1] == [0] for found in starts), sum(found[-1:] > [0] for found in starts))


Refusal = Literal["special token", "cut character", "other words", "other ids before it", "other bytes"]
"""Why a span cannot be translated: it holds a token that is no text; it begins or ends amid a character; its tokens, or
the reader's, do not begin exactly the words that were drawn; the reader would have read what is before it as other
tokens; the reader's tokens are another text (of a tokenizer that normalises text)."""


class Translation(NamedTuple):
    """A span as the reader's tokens, or why there are none."""

    tokens: tuple[int, ...]
    refusal: Refusal | None = None


def translate(
    span: Sequence[int], writer: Vocabulary, reader: Vocabulary, before: Sequence[int], *, words: int
) -> Translation:
    """What one model wrote, as tokens of the other, in context.

    The end of a text is no part of a span: it is the end in both vocabularies.

    Args:
        span: the writer's tokens, whole words.
        before: what the reader has as the text before the span: all its ids, or the last of them from the beginning of
            a word on. Empty at the beginning of a text, where a word begins whatever comes.
        words: how many words the span must have, as drawn.
    """
    try:
        written, context = ([v.pieces[token] for token in ids] for v, ids in ((writer, span), (reader, before)))
    except KeyError:
        return Translation((), "special token")
    text, earlier = b"".join(written), b"".join(context)
    try:
        encoded = tuple(reader.encode((earlier + text).decode()))
    except UnicodeDecodeError:
        return Translation((), "cut character")
    if encoded[: len(before)] != tuple(before):
        return Translation((), "other ids before it")
    tokens = encoded[len(before) :]
    read = [reader.pieces.get(token, b"") for token in tokens]
    if b"".join(read) != text:
        return Translation((), "other bytes")
    begun = [begin_words(pieces, earlier) for pieces in (written, read)]
    if any(each[:1] != [True] or sum(each) != words for each in begun):
        return Translation((), "other words")
    return Translation(tokens)
