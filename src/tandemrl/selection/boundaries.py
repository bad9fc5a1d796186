"""Token tables for the strategies, read off a Hugging Face tokenizer's vocabulary: which ids begin or end what.

Two kinds of vocabulary are understood: byte-level BPE (GPT-2, Qwen, Llama 3), whose surfaces write each byte as one
printable character and a leading space as "Ġ", and SentencePiece (Llama 2, Gemma), which writes it as "▁" and a byte
without a piece of its own as "<0x0A>". Special tokens (EOS, chat markers) are in no table; other added tokens count
with their text. Ids of the model beyond the tokenizer's are in no table.
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
    """Tokens whose text contains "\\n\\n", ends in "\\n", starts with "\\n"."""

    contains: Bool[Tensor, " v"]
    ends_newline: Bool[Tensor, " v"]
    starts_newline: Bool[Tensor, " v"]


class WordTables(NamedTuple):
    """Tokens whose last character is whitespace (``str.isspace``), or lies outside of every word.

    A word is a maximal run of letters, marks, digits, connectors, dashes and format characters (Unicode L, M, N, Pc,
    Pd, Cf) and of the signs that words, numbers, times, addresses and LaTeX commands hold inside: . , : ; ' ’ · & @ /
    and the backslash. "don't", "3.14", "well-known" and "\\frac" are one word each. Every other character (whitespace,
    brackets, quotes, "!", "?", "=", "$", …) ends outside a word: no next token can continue one. A comma or full stop
    does not, since "000" or "14" may follow. A token that ends amid the bytes of a character is in neither table.
    ``ends_in_space`` implies ``ends_outside_word``.
    """

    ends_in_space: Bool[Tensor, " v"]
    ends_outside_word: Bool[Tensor, " v"]


def word_boundary_table(tokenizer: Any, size: int | None = None) -> Bool[Tensor, " v"]:
    """Ids that begin a word: those whose surface starts with the tokenizer's space mark, "Ġ" or "▁".

    The mark is the one of the two that more surfaces start with: "Ġ" is also a letter of Maltese.

    Args:
        size: vocabulary size of the model where that is larger than the tokenizer's.

    Raises:
        ValueError: no id begins a word; names the tokenizer.
    """
    table = _tables(tokenizer).boundary
    _check_any(table, tokenizer, 'starts with "Ġ" or "▁", so no token begins a word')
    return _padded(table, size)


def step_tables(tokenizer: Any, size: int | None = None) -> StepTables:
    """The tables of ``strategies.sentence``; ``size`` as in ``word_boundary_table``.

    Raises:
        ValueError: the vocabulary cannot write a blank line; names the tokenizer.
    """
    steps = _tables(tokenizer).steps
    _check_any(steps.contains | steps.ends_newline, tokenizer, "holds a newline, so no token ends a step")
    return StepTables(*(_padded(table, size) for table in steps))


def word_start_tables(tokenizer: Any, size: int | None = None) -> WordTables:
    """The tables of ``strategies.word_aligned``; ``size`` as in ``word_boundary_table``.

    Raises:
        ValueError: no id ends outside a word; names the tokenizer.
    """
    words = _tables(tokenizer).words
    _check_any(words.ends_outside_word, tokenizer, "ends outside a word, so no handoff is ever safe")
    return WordTables(*(_padded(table, size) for table in words))


class Published(NamedTuple):
    """Of whom a vocabulary is, and how many of its ids begin a word, counted elsewhere."""

    family: str
    boundaries: int


PUBLISHED = {151_643: Published("Qwen2, Qwen2.5, Qwen3", 53_021)}
"""By the size of the vocabulary without added tokens; the count is of Qwen's own list of byte strings, of which so many
start with a space."""


def count_boundaries(tokenizer: Any) -> tuple[int, Published | None]:
    """How many ids begin a word, held against what is published of a vocabulary of this size, if anything is.

    Raises:
        ValueError: no id begins a word, or another number than is published; names the tokenizer.
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
    boundary: Bool[Tensor, " v"]
    steps: StepTables
    words: WordTables


_CACHE: WeakKeyDictionary[Any, dict[int, _Tables]] = WeakKeyDictionary()


def _tables(tokenizer: Any) -> _Tables:
    """Built once per tokenizer and vocabulary size (``add_tokens`` makes a tokenizer grow)."""
    by_size = _CACHE.setdefault(tokenizer, {})
    if len(tokenizer) not in by_size:
        by_size[len(tokenizer)] = _build(tokenizer)
    return by_size[len(tokenizer)]


def _build(tokenizer: Any) -> _Tables:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added_special = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    special = {*tokenizer.all_special_ids, *added_special}
    surfaces = {index: surface for surface, index in vocabulary.items() if index not in special}
    marks = [surface[0] for surface in surfaces.values() if surface[:1] in ("Ġ", "▁")]
    byte_level = marks.count("Ġ") >= marks.count("▁")
    mark = "Ġ" if byte_level else "▁"
    read = _byte_level_text if byte_level else _sentencepiece_text
    texts = {index: read(surface) for index, surface in surfaces.items()}

    size = max(len(tokenizer), 1 + max(vocabulary.values()))  # ids may have gaps

    def table(ids: Iterable[int]) -> Bool[Tensor, " v"]:
        result = torch.zeros(size, dtype=torch.bool)
        result[list(ids)] = True
        return result

    return _Tables(
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


def _byte_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level surface stands for: printable Latin-1 is itself, the rest follows U+0100
    in order (Radford et al. 2019, the GPT-2 encoder)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_text(surface: str) -> str:
    if not all(character in _BYTE_OF for character in surface):
        return surface  # an added token, written as it is; the byte-level decoder does the same
    return bytes(_BYTE_OF[character] for character in surface).decode("utf-8", errors="replace")


def _sentencepiece_text(surface: str) -> str:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", surface)
    if byte:
        return bytes.fromhex(byte[1]).decode("utf-8", errors="replace")
    return surface.replace("▁", " ")


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
