"""Spans inside vLLM: a request goes on with a text for some words, and ends before a word of the other author.

Another engine writes the text, too, maybe in another vocabulary (``two_engines``). Whoever asks says how many words the
draws give this model, or that it is to finish a step. The first token is then drawn from those that begin a word, after
a handover. The proposal that begins a word too many is dropped: the request ends with an EOS in its place, which has
the log-prob that a word ends, and ``HANDED_OVER`` as its reason to stop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from tandemrl.models.sampling import log_mass
from tandemrl.selection.draws import fold_in
from tandemrl.selection.whole_words import TextTables, TextTails

SPAN = "span"
"""The name of the strategy of these requests: in its own engine, each model writes alone."""
HANDED_OVER = "handover"
"""The ``stop_reason`` of a request whose last token stands for a proposal that was dropped."""


@dataclass(slots=True)
class Span:
    """A request that goes on with a text.

    words: how many words it may begin; None: those up to the first one after a blank line. tail: the text's last three
    bytes as a number. counter: the number of its first draw. stream: of its draws. end: an id that ends the request.
    opening: the stream of its first draw after a handover; None where a turn begins. written: how many tokens it has.
    blank_line: whether its last word contains a blank line.
    """

    words: int | None
    tail: int
    counter: int
    stream: int
    end: int
    opening: int | None = None
    written: int = 0
    blank_line: bool = False

    def arguments(self) -> dict[str, Any]:
        """It as ``SamplingParams.extra_args``."""
        opening = [] if self.opening is None else [self.opening]
        told = [self.words, self.tail, self.counter, self.stream, self.end, *opening]
        return {"tandem_strategy": SPAN, "tandem_span": told}

    @property
    def opens(self) -> bool:
        """Whether its next token is the first after a handover."""
        return self.opening is not None and not self.written


class Spans:
    """The spans that an engine writes. In each step call ``update``, ``keys``, ``masked`` and ``ended``.

    Args:
        tables: of the vocabulary.
    """

    def __init__(self, tables: TextTables) -> None:
        self._tables, self._tails = tables, TextTails(tables)
        self._spans: dict[str, Span] = {}
        self.handed = set[str]()
        """The requests that have handed over in this step."""
        self._ids: list[str] = []
        self._rows: list[Span] = []
        self._drawing = torch.empty(0, dtype=torch.int64)  # the rows whose token counts

    def __bool__(self) -> bool:
        """Whether there are spans. Then no other requests run: the senior writes alone in calls of their own."""
        return bool(self._spans)

    def update(self, scheduled: Any) -> None:
        """Hear of the requests that end and of those that begin with a step of the scheduler."""
        self.handed = set()
        for id in scheduled.finished_req_ids:
            self._spans.pop(id, None)
        for new in scheduled.scheduled_new_reqs:
            extra: Mapping[str, Any] = new.sampling_params.extra_args or {}
            if "tandem_span" in extra:
                self._spans[new.req_id] = Span(*extra["tandem_span"])

    def keys(self, ids: Sequence[str], forward: Any) -> Int64[Tensor, " b"]:
        """The keys that the next tokens of a batch are drawn with.

        Args:
            ids: the request of each row of the batch.
            forward: the pass after which they are drawn. What is drawn of a row that it does not finish is ignored.
        """
        finished = {id for id, ends in zip(forward.ids, forward.ends.tolist(), strict=True) if ends}
        self._ids, self._rows = list(ids), (rows := [self._spans[id] for id in ids])
        self._drawing = torch.tensor([i for i, id in enumerate(ids) if id in finished], dtype=torch.int64)
        streams = [row.opening if row.opens else row.stream for row in rows]
        return fold_in(torch.tensor(streams), torch.tensor([row.counter + row.written for row in rows]))

    def masked(self, logits: Tensor) -> Tensor:
        """The logits without the ids that the rows cannot have next."""
        width, size = len(self._tables.starts), logits.shape[-1]
        opens = torch.tensor([row.opens for row in self._rows])
        barred = torch.where(opens[:, None], ~self._tables.starts, self._tables.removed)[:, :size]
        return logits.masked_fill_(
            torch.nn.functional.pad(barred, (0, max(0, size - width)), value=True).to(logits.device), -torch.inf
        )

    def ended(self, output: Any, logprobs: Tensor | None) -> Any:
        """What was sampled, with the end of the span in place of a word too many.

        Args:
            output: vLLM's ``SamplerOutput``, which is changed.
            logprobs: those that were drawn from, (b, v); None if all decode greedily.
        """
        tokens = output.sampled_token_ids[:, 0].cpu().long()
        at = self._drawing
        tails = torch.tensor([row.tail for row in self._rows], dtype=torch.int64)
        begins = self._tails.begin(tails, tokens)
        after = self._tails.appended(tails, tokens).tolist()
        blank = torch.tensor([row.blank_line for row in self._rows])
        blank_after = self._tails.have_blank_line(blank, begins, tails, tokens).tolist()
        over = list[int]()
        for i in at.tolist():
            row = self._rows[i]
            if row.words is None:
                is_over = row.blank_line and bool(begins[i])
            else:
                row.words -= int(begins[i]) or not row.written
                is_over = row.words < 0
            if is_over:
                over.append(i)
            row.tail, row.written, row.blank_line = after[i], row.written + 1, blank_after[i]
        told = output.logprobs_tensors
        for i in over:
            output.sampled_token_ids[i, 0] = told.logprob_token_ids[i, 0] = self._rows[i].end
            told.logprobs[i, 0] = 0.0
        self.handed |= {self._ids[i] for i in over}
        if over and logprobs is not None:
            ids = torch.arange(logprobs.shape[-1])
            other = ~self._tables.starts[ids.clamp(max=len(self._tables.starts) - 1)] | (
                ids >= len(self._tables.starts)
            )
            mass = log_mass(logprobs[over], other.to(logprobs.device).expand(len(over), -1))
            told.logprobs[over, 0] = mass
        return output
