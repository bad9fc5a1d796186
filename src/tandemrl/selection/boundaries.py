"""Token tables for the strategies: which token ids begin a word, end a step, or end outside a word.

They are read off the vocabulary of a Hugging Face tokenizer. Two kinds of vocabulary are understood. Byte-level BPE
(GPT-2, Qwen, Llama 3) writes each byte of a token as one printable character, and a leading space as "Ġ". SentencePiece
(Llama 2, Gemma) writes a leading space as "▁", and a byte that has no piece of its own as "<0x0A>". The surface of a
token is what the vocabulary writes for it in this way. Special tokens (EOS, chat markers) are False in every table;
other added tokens are judged by their text. Ids that only the model has, beyond the tokenizer's, are False as well.
"""

import re
import unicodedata
from collections.abc import Iterable
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
    table = _tables(tokenizer).boundary
    _check_any(table, tokenizer, 'starts with "Ġ" or "▁", so no token begins a word')
    return _padded(table, size)


def start_table(tokenizer: Any, size: int | None = None) -> Bool[Tensor, " v"]:
    """The table that ``whole_words.before_word`` needs: the ids that begin a word, and the special tokens.

    Special tokens end a text or a turn, or belong to no text, so none of them continues a word. The arguments and the
    error are those of ``word_boundary_table``.
    """
    table = word_boundary_table(tokenizer, size).clone()
    table[sorted(_special(tokenizer))] = True
    return table


def step_tables(tokenizer: Any, size: int | None = None) -> StepTables:
    """The tables that ``strategies.sentence`` needs. The arguments are those of ``word_boundary_table``.

    Raises:
        ValueError: no token contains a blank line or ends in a newline; the message names the tokenizer.
    """
    steps = _tables(tokenizer).steps
    _check_any(steps.contains | steps.ends_newline, tokenizer, "holds a newline, so no token ends a step")
    return StepTables(*(_padded(table, size) for table in steps))


def word_start_tables(tokenizer: Any, size: int | None = None) -> WordTables:
    """The tables that ``strategies.word_aligned`` needs. The arguments are those of ``word_boundary_table``.

    Raises:
        ValueError: no token ends outside a word; the message names the tokenizer.
    """
    words = _tables(tokenizer).words
    _check_any(words.ends_outside_word, tokenizer, "ends outside a word, so no handover is ever safe")
    return WordTables(*(_padded(table, size) for table in words))


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes that each id stands for between two others. Special tokens, which are no text, are not in it."""
    return dict(_tables(tokenizer).pieces)


class Published(NamedTuple):
    """The models that share a vocabulary, and how many of its ids begin a word by an independent count."""

    family: str
    boundaries: int


PUBLISHED = {151_643: Published("Qwen2, Qwen2.5, Qwen3", 53_021)}
"""Independent counts, by the size of the vocabulary without added tokens. Qwen's is the number of entries that start
with a space in Qwen's own list of byte strings."""


def count_boundaries(tokenizer: Any) -> tuple[int, Published | None]:
    """How many ids begin a word, checked against ``PUBLISHED`` if it has a vocabulary of this size.

    Returns:
        The count, and the entry of ``PUBLISHED`` that it agrees with, or None if there is none.

    Raises:
        ValueError: no id begins a word, or the count differs from the published one; the message names the tokenizer.
    """
    count, published = int(word_boundary_table(tokenizer).sum()), PUBLISHED.get(tokenizer.vocab_size)
    if published is not None and count != published.boundaries:
        raise ValueError(
            f"tokenizer {_name(tokenizer)}: {count:,} tokens begin a word; {published.family}, whose vocabulary has as "
            f"many tokens ({tokenizer.vocab_size:,}), has {published.boundaries:,}. Its files are not as published, or "
            "are read in another way: authors would change at other places"
        )
    return count, published


class _Tables(NamedTuple):
    pieces: dict[int, bytes]
    boundary: Bool[Tensor, " v"]
    steps: StepTables
    words: WordTables


_CACHE: WeakKeyDictionary[Any, dict[int, _Tables]] = WeakKeyDictionary()


def _tables(tokenizer: Any) -> _Tables:
    """The tables of a tokenizer, built once per vocabulary size (``add_tokens`` makes a tokenizer grow)."""
    by_size = _CACHE.setdefault(tokenizer, {})
    if len(tokenizer) not in by_size:
        by_size[len(tokenizer)] = _build(tokenizer)
    return by_size[len(tokenizer)]


def _build(tokenizer: Any) -> _Tables:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = _special(tokenizer)
    surfaces = {index: surface for surface, index in vocabulary.items() if index not in special}
    marks = [surface[0] for surface in surfaces.values() if surface[:1] in ("Ġ", "▁")]
    byte_level = marks.count("Ġ") >= marks.count("▁")
    mark = "Ġ" if byte_level else "▁"
    read = _byte_level_bytes if byte_level else _sentencepiece_bytes
    pieces = {index: read(surface) for index, surface in surfaces.items()}
    texts = {index: piece.decode("utf-8", errors="replace") for index, piece in pieces.items()}

    size = max(len(tokenizer), 1 + max(vocabulary.values()))  # ids may have gaps

    def table(ids: Iterable[int]) -> Bool[Tensor, " v"]:
        result = torch.zeros(size, dtype=torch.bool)
        result[list(ids)] = True
        return result

    return _Tables(
        pieces=pieces,
        boundary=table(index for index, surface in surfaces.items() if surface.startswith(mark)),
        steps=StepTables(
            contains=table(index for index, text in texts.items() if "\n\n" in text),
            ends_newline=table(index for index, text in texts.items() if text.endswith("\n")),
            starts_newline=table(index for index, text in texts.items() if text.startswith("\n")),
        ),
        words=WordTables(
            ends_in_space=table(index for index, text in texts.items() if text[-1:].isspace()),
            ends_outside_word=table(index for index, text in texts.items() if text and not _in_word(text[-1])),
        ),
    )


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


def _padded(table: Bool[Tensor, " v"], size: int | None) -> Bool[Tensor, " w"]:
    return torch.cat([table, table.new_zeros(max((size or 0) - len(table), 0))])


def _check_any(table: Bool[Tensor, " v"], tokenizer: Any, what: str) -> None:
    if not table.any():
        raise ValueError(
            f"tokenizer {_name(tokenizer)}: none of its {len(table)} tokens {what}. Choose another selection.strategy."
        )


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
