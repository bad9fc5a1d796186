"""Spans: a model goes on with a text for some words, and ends before a word of the other author.

Whoever asks says how many words the draws give the model, or that it is to finish a step. The first token is then drawn
from those that begin one, after a handover. The proposal that begins a word too many is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from tandemrl.models.sampling import log_mass
from tandemrl.selection.draws import fold_in
from tandemrl.selection.whole_words import TextTables


@dataclass(slots=True)
class Span:
    """How a model goes on with a text.

    words: how many words it may begin; None: those up to the first one after a blank line. tail: the text's last three
    bytes as a number. counter: the number of its first draw. stream: of its draws. end: an id that ends a text.
    opening: the stream of its first draw after a handover; None where a turn begins. bare: whether it may draw any id.
    written: how many tokens it has. blank_line: whether its last word contains a blank line.
    """

    words: int | None
    tail: int
    counter: int
    stream: int
    end: int
    opening: int | None = None
    bare: bool = False
    written: int = 0
    blank_line: bool = False

    @property
    def opens(self) -> bool:
        """Whether its next token is the first after a handover."""
        return self.opening is not None and not self.written


def draw_keys(spans: Sequence[Span]) -> Int64[Tensor, " k"]:
    """The keys that the next tokens are drawn with."""
    streams = [span.opening if span.opens else span.stream for span in spans]
    return fold_in(torch.tensor(streams), torch.tensor([span.counter + span.written for span in spans]))


class SpanRules:
    """What the tables of a vocabulary mean for its spans."""

    def __init__(self, tables: TextTables) -> None:
        self._tables = tables

    def masked(self, logits: Float[Tensor, "k v"], spans: Sequence[Span]) -> Float[Tensor, "k v"]:
        """The logits without the ids that the spans cannot have next."""
        opens, bare = (torch.tensor(each)[:, None] for each in zip(*((s.opens, s.bare) for s in spans), strict=True))
        barred = torch.where(opens, ~self._tables.starts, self._tables.removed)
        barred = self._sized(barred, logits.shape[-1]) & ~bare
        return logits.masked_fill_(barred.to(logits.device), -torch.inf)

    def advance(self, spans: Sequence[Span], tokens: Int64[Tensor, " k"]) -> list[int]:
        """Tell the spans their next tokens. Returns those, by place, of which it begins a word too many."""
        tails = torch.tensor([span.tail for span in spans], dtype=torch.int64)
        begins, after = self._tables.begin(tails, tokens), self._tables.appended(tails, tokens).tolist()
        blank = torch.tensor([span.blank_line for span in spans])
        blank_after = self._tables.have_blank_line(blank, begins, tails, tokens).tolist()
        over = list[int]()
        for i, (span, begun) in enumerate(zip(spans, begins.tolist(), strict=True)):
            if span.words is None:
                is_over = span.blank_line and begun
            else:
                span.words -= begun or not span.written
                is_over = span.words < 0
            if is_over:
                over.append(i)
            span.tail, span.written, span.blank_line = after[i], span.written + 1, blank_after[i]
        return over

    def word_ends(self, logits: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
        """The log-prob that a word ends, by logits after truncation."""
        inside = self._sized(~self._tables.starts, logits.shape[-1])
        return log_mass(logits, inside.to(logits.device).expand(logits.shape))

    def _sized(self, barred: Bool[Tensor, "*k w"], size: int) -> Bool[Tensor, "*k v"]:
        return F.pad(barred[..., :size], (0, max(0, size - barred.shape[-1])), value=True)
