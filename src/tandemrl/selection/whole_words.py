"""The strategies that draw one author for each whole word: by ids, in one vocabulary, and by the text, in two; in two,
also those of whole turns."""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from tandemrl.selection.boundaries import start_table, token_bytes, word_boundary_table
from tandemrl.selection.strategies import (
    Chosen,
    Strategy,
    Who,
    check_probability,
    draw,
    is_senior,
    undrawn,
)
from tandemrl.selection.words import SPACES, word_starts


class TextTables(NamedTuple):
    """What the tokens of a vocabulary mean for words as a property of the text (``words``).

    starts: the ids that begin a word after anything but whitespace, and all special tokens, which end a text or belong
    to none. removed: the ids inside of which a word begins, and those that stand for nothing. width, tail: how many
    bytes an id has, at most 3, and the last of them as a number. blank_line: the ids that contain "\\n\\n". newline:
    those that start with "\\n".
    """

    starts: Bool[Tensor, " v"]
    removed: Bool[Tensor, " v"]
    width: Int64[Tensor, " v"]
    tail: Int64[Tensor, " v"]
    blank_line: Bool[Tensor, " v"]
    newline: Bool[Tensor, " v"]

    def appended(self, tail: Int64[Tensor, " b"], token: Int64[Tensor, " b"]) -> Int64[Tensor, " b"]:
        """The last three bytes of a text, once a token is appended."""
        return ((tail << 8 * self.width[token]) & 0xFFFFFF) | self.tail[token]

    def have_blank_line(
        self,
        known: Bool[Tensor, " b"],
        begins: Bool[Tensor, " b"],
        tail: Int64[Tensor, " b"],
        token: Int64[Tensor, " b"],
    ) -> Bool[Tensor, " b"]:
        """Whether the last word of a text contains a blank line, once a token is appended.

        Args:
            known: whether it did before.
            begins: whether the token begins a word.
            tail: the last three bytes before the token.
        """
        joined = self.newline[token] & ((tail & 0xFF) == _NEWLINE)
        return (known & ~begins) | self.blank_line[token] | joined

    def begin(self, tail: Int64[Tensor, " b"], token: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Whether a token begins a word after a text with this tail. After whitespace none does."""
        return self.starts[token] & ~_ends_in_space(tail)


class TextSentenceState(NamedTuple):
    """Author of the current word, whether it contains a blank line, and the text's last three bytes as a number."""

    senior: Bool[Tensor, " b"]
    blank_line: Bool[Tensor, " b"]
    tail: Int64[Tensor, " b"]


class WholeWordState(NamedTuple):
    """What a ``strategies.DrawnState`` counts, of words; whether the present one has a token of the current turn, and
    the last three bytes of the turn's text as a number."""

    key: Int64[Tensor, " b"]
    senior: Bool[Tensor, " b"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]
    begun: Bool[Tensor, " b"]
    tail: Int64[Tensor, " b"]


def before_word(prob_senior: float, starts: Bool[Tensor, " v"]) -> Strategy:
    """Draw one author for each whole word, the senior with probability ``prob_senior``. Not in the paper.

    Draw number j decides who writes word j. A word ends where its author proposes a token of ``starts``: draw j + 1 is
    made, and the proposal stands only if it falls to the same author. Otherwise it is dropped, also if it would have
    ended the text, and the other author begins word j + 1 (see ``Strategy``). So the author of a token of ``starts`` is
    that of a new draw, and the author of any other token is that of the token before it. The first token of a turn
    begins a word whatever it is, and is not masked.

    Args:
        starts: True at the ids that begin a word, and at all that can end a text or a turn; see
            ``boundaries.start_table``. It must cover every id that the models can emit.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    return before_text_word(prob_senior, id_tables(starts))._replace(removed=None)


_NEWLINE = 0x0A
_SPACE = torch.zeros(256, dtype=torch.bool)
_SPACE[[space[0] for space in SPACES if len(space) == 1]] = True
_WIDE_SPACES = [
    (256**size - 1, torch.tensor([int.from_bytes(space) for space in SPACES if len(space) == size])) for size in (2, 3)
]
"""The whitespace of several bytes: a mask with the numbers under it."""


def text_tables(tokenizer: Any, size: int | None = None) -> TextTables:
    """The tables that ``before_text_word`` and ``text_sentence`` need.

    The arguments are those of ``boundaries.word_boundary_table``.

    Raises:
        ValueError: no id begins a word; the message names the tokenizer.
    """
    pieces = token_bytes(tokenizer)
    starts = start_table(tokenizer, size) & ~word_boundary_table(tokenizer, size)  # the special tokens
    removed, width, tail = ~starts, torch.full_like(starts, 3, dtype=torch.int64), torch.zeros(len(starts)).long()
    blank_line, newline = torch.zeros_like(starts), torch.zeros_like(starts)
    ids, spelled = torch.tensor([*pieces], dtype=torch.int64), pieces.values()
    begun = [word_starts(piece, b"a") for piece in spelled]
    starts[ids] = torch.tensor([found == [0] for found in begun])
    removed[ids] = torch.tensor([found[-1:] > [0] for found in begun])
    width[ids] = torch.tensor([min(3, len(piece)) for piece in spelled])
    tail[ids] = torch.tensor([int.from_bytes(piece[-3:]) for piece in spelled])
    blank_line[ids] = torch.tensor([b"\n\n" in piece for piece in spelled])
    newline[ids] = torch.tensor([piece[:1] == b"\n" for piece in spelled])
    return TextTables(starts, removed, width, tail, blank_line, newline)


def id_tables(starts: Bool[Tensor, " v"]) -> TextTables:
    """The tables of a vocabulary where alone the id decides: each of ``starts`` begins a word, whatever it follows."""
    none = torch.zeros_like(starts)
    letter = torch.full(starts.shape, ord("a"))  # every text ends in one, hence not in whitespace
    return TextTables(starts, none, torch.ones_like(letter), letter, none, none)


def before_text_word(prob_senior: float, texts: TextTables) -> Strategy:
    """``before_word`` where a word is a property of the text, for models of two vocabularies.

    A token of ``texts.starts`` begins a word only after anything but whitespace: what follows whitespace belongs to the
    word before, also the end of the text. So in both vocabularies, a text has the same words and the same draws. Each
    turn is a text of its own, whose first token begins a word.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    check_probability(prob_senior)
    return Strategy(
        partial(_word_init, prob_senior),
        partial(_word_step, prob_senior, texts),
        turn=partial(_word_turn, prob_senior),
        starts=texts.starts,
        removed=texts.removed,
    )


def text_sentence(first: Who, texts: TextTables) -> Strategy:
    r"""``sentence`` for models of two vocabularies: hand over at the first word after a blank line ("\n\n").

    Words are those of ``before_text_word``, in which whitespace and what follows it belong to the word before. So the
    author of a step also writes the first characters of the next one, up to a space; with ``sentence`` it does not. The
    first token of a turn begins a word, so a turn changes hands if the last word before it has a blank line.

    Args:
        first: who writes the first step.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return Strategy(
        partial(_text_sentence_init, is_senior("first", first)),
        partial(_text_sentence_step, texts),
        turn=_text_sentence_turn,
        starts=texts.starts,
        removed=texts.removed,
        by_steps=True,
    )


def in_two_vocabularies(strategy: Strategy, texts: TextTables) -> Strategy:
    """A strategy that changes authors between turns at most, for models of two vocabularies, which both read along."""
    if strategy.writers == "senior":
        return strategy  # nothing has to be read
    return strategy._replace(writers="both", starts=texts.starts, removed=texts.removed)


def _text_sentence_init(senior_starts: bool, request_keys: Int64[Tensor, " b"]) -> Chosen:
    senior = torch.full_like(request_keys, senior_starts, dtype=torch.bool)
    return senior, TextSentenceState(senior, torch.zeros_like(senior), torch.zeros_like(request_keys))


def _text_sentence_turn(state: TextSentenceState) -> Chosen:
    senior = state.senior ^ state.blank_line
    return senior, TextSentenceState(senior, torch.zeros_like(senior), torch.zeros_like(state.tail))


def _text_sentence_step(texts: TextTables, state: TextSentenceState, last_token: Int64[Tensor, " b"]) -> Chosen:
    begins = texts.begin(state.tail, last_token)
    senior = state.senior ^ (begins & state.blank_line)
    blank_line = texts.have_blank_line(state.blank_line, begins, state.tail, last_token)
    return senior, TextSentenceState(senior, blank_line, texts.appended(state.tail, last_token))


def _word_init(prob_senior: float, request_keys: Int64[Tensor, " b"]) -> Chosen:
    key, senior, none, *_ = undrawn(request_keys)
    return _word_turn(prob_senior, WholeWordState(key, senior, none, none, begun=senior, tail=none))


def _word_turn(prob_senior: float, state: WholeWordState) -> Chosen:
    fresh = {"begun": torch.zeros_like(state.begun), "tail": torch.zeros_like(state.tail)}
    return draw(prob_senior, state, torch.ones_like(state.begun), **fresh)


def _word_step(prob_senior: float, texts: TextTables, state: WholeWordState, last_token: Int64[Tensor, " b"]) -> Chosen:
    where, tail = texts.begin(state.tail, last_token) & state.begun, texts.appended(state.tail, last_token)
    return draw(prob_senior, state, where, begun=torch.ones_like(where), tail=tail)


def _ends_in_space(tail: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
    found = _SPACE[tail & 0xFF]
    if bool((tail & 0x80).any()):  # hardly ever
        for mask, characters in _WIDE_SPACES:
            found = found | torch.isin(tail & mask, characters)
    return found
