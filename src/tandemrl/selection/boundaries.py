"""Token tables for the strategies: which token ids begin a word, end a step, or end outside a word.

They are read off the vocabulary of a Hugging Face tokenizer. Two kinds of vocabulary are understood. Byte-level BPE
(GPT-2, Qwen, Llama 3) writes each byte of a token as one printable character, and a leading space as "Ġ". SentencePiece
(Llama 2, Gemma) writes a leading space as "▁", and a byte that has no piece of its own as "<0x0A>". The surface of a
token is what the vocabulary writes for it in this way. Special tokens (EOS, chat markers) are False in every table;
other added tokens are judged by their text. Ids that only the model has, beyond the tokenizer's, are False as well.
"""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool
from torch import Tensor


class StepTables(NamedTuple):
    """Three tables: the tokens whose text contains "\\n\\n", ends in "\\n", and starts with "\\n"."""

    contains: Bool[Tensor, " v"]
    ends_newline: Bool[Tensor, " v"]
    starts_newline: Bool[Tensor, " v"]


class WordTables(NamedTuple):
    """Two tables: the tokens whose last character is whitespace (``str.isspace``), and those whose last character lies
    outside of every word.

    A word is a maximal run of letters, marks, digits, connectors, dashes and format characters (Unicode L, M, N, Pc,
    Pd, Cf) and of the signs that words, numbers, times, addresses and LaTeX commands hold inside: . , : ; ' ’ · & @ /
    and the backslash. "don't", "3.14", "well-known" and "\\frac" are one word each. A token that ends in any other
    character (whitespace, brackets, quotes, "!", "?", "=", "$", …) ends outside a word: no next token can continue a
    word. A token that ends in a comma or a full stop does not, since "000" or "14" may follow. A token that ends amid
    the bytes of a character is in neither table. Every token of ``ends_in_space`` is in ``ends_outside_word``.
    """

    ends_in_space: Bool[Tensor, " v"]
    ends_outside_word: Bool[Tensor, " v"]


def word_boundary_table(tokenizer: Any, size: int | None = None) -> Bool[Tensor, " v"]:
    """True at the ids that begin a word: those whose surface starts with the tokenizer's space mark, "Ġ" or "▁".

    The mark is whichever of the two more surfaces start with, since "Ġ" is also a letter of Maltese.

    Args:
        tokenizer: a Hugging Face tokenizer.
        size: vocabulary size of the model, if it is larger than the tokenizer's. The table is padded with False.

    Raises:
        ValueError: no id begins a word; the message names the tokenizer.
    """
    starts = _vocabulary(tokenizer).starts
    return _table(tokenizer, size, starts, 'starts with "Ġ" or "▁", so no token begins a word')


def start_table(tokenizer: Any, size: int | None = None) -> Bool[Tensor, " v"]:
    """The table that ``whole_words.before_word`` needs: the ids that begin a word, and the special tokens.

    Special tokens end a text or a turn, or belong to no text, so none of them continues a word. The arguments and the
    error are those of ``word_boundary_table``.
    """
    table = word_boundary_table(tokenizer, size)
    table[sorted(_special(tokenizer))] = True
    return table


def step_tables(tokenizer: Any, size: int | None = None) -> StepTables:
    """The tables that ``strategies.sentence`` needs. The arguments are those of ``word_boundary_table``.

    Raises:
        ValueError: no token contains a blank line or ends in a newline; the message names the tokenizer.
    """
    texts = _texts(tokenizer)
    contains = [i for i, text in texts.items() if "\n\n" in text]
    ends = [i for i, text in texts.items() if text.endswith("\n")]
    starts = [i for i, text in texts.items() if text.startswith("\n")]
    _table(tokenizer, size, [*contains, *ends], "holds a newline, so no token ends a step")
    return StepTables(*(_table(tokenizer, size, ids) for ids in (contains, ends, starts)))


def word_start_tables(tokenizer: Any, size: int | None = None) -> WordTables:
    """The tables that ``strategies.word_aligned`` needs. The arguments are those of ``word_boundary_table``.

    Raises:
        ValueError: no token ends outside a word; the message names the tokenizer.
    """
    texts = _texts(tokenizer)
    in_space = [i for i, text in texts.items() if text[-1:].isspace()]
    outside = [i for i, text in texts.items() if text and not _in_word(text[-1])]
    missing = "ends outside a word, so no handover is ever safe"
    return WordTables(_table(tokenizer, size, in_space), _table(tokenizer, size, outside, missing))


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes that each id stands for between two others. Special tokens, which are no text, are not in it."""
    return dict(_vocabulary(tokenizer).pieces)


class _Vocabulary(NamedTuple):
    """The bytes of each id that is text, the ids that begin a word; the size of a table; how many entries it has."""

    pieces: dict[int, bytes]
    starts: list[int]
    size: int
    entries: int


_CACHE: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    """What the files of a tokenizer say, read once (``add_tokens`` makes it grow)."""
    known = _CACHE.get(tokenizer)
    if known is not None and known.entries == len(tokenizer):
        return known
    vocabulary, special = tokenizer.get_vocab(), _special(tokenizer)
    surfaces = {index: surface for surface, index in vocabulary.items() if index not in special}
    marks = [surface[0] for surface in surfaces.values() if surface[:1] in ("Ġ", "▁")]
    byte_level = marks.count("Ġ") >= marks.count("▁")
    mark, read = ("Ġ", _byte_level_bytes) if byte_level else ("▁", _sentencepiece_bytes)
    starts = [index for index, surface in surfaces.items() if surface.startswith(mark)]
    pieces = {index: read(surface) for index, surface in surfaces.items()}
    size = max(len(tokenizer), 1 + max(vocabulary.values()))  # ids may have gaps
    _CACHE[tokenizer] = _Vocabulary(pieces, starts, size, len(tokenizer))
    return _CACHE[tokenizer]


def _texts(tokenizer: Any) -> dict[int, str]:
    return {index: piece.decode(errors="replace") for index, piece in _vocabulary(tokenizer).pieces.items()}


def _table(tokenizer: Any, size: int | None, ids: Sequence[int], missing: str = "") -> Bool[Tensor, " v"]:
    """A table that is True at some ids.

    Args:
        size: the least size.
        missing: why there must be some: "none of its tokens ...".
    """
    table = torch.zeros(max(size or 0, _vocabulary(tokenizer).size), dtype=torch.bool)
    if missing and not ids:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise ValueError(
            f"tokenizer {name}: none of its {len(table)} tokens {missing}. Choose another selection.strategy."
        )
    table[list(ids)] = True
    return table


def _special(tokenizer: Any) -> set[int]:
    """The ids of the special tokens."""
    return {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level surface stands for (Radford et al. 2019, the GPT-2 encoder).

    Printable characters of Latin-1 stand for their own byte. The other bytes are numbered in order from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(surface: str) -> bytes:
    if not all(character in _BYTE_OF for character in surface):
        return surface.encode()  # an added token, written as it is; the byte-level decoder does the same
    return bytes(_BYTE_OF[character] for character in surface)


def _sentencepiece_bytes(surface: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", surface)
    return bytes.fromhex(byte[1]) if byte else surface.replace("▁", " ").encode()


_INSIDE_WORDS = frozenset(".,:;'’·&@/\\")
_UNFINISHED = "\ufffd"  # what decoding makes of a cut character


def _in_word(character: str) -> bool:
    category = unicodedata.category(character)
    return (
        category[0] in "LMN" or category in ("Pc", "Pd", "Cf") or character in _INSIDE_WORDS or character == _UNFINISHED
    )
