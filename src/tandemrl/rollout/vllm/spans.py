"""Spans inside vLLM (``rollout.spans``): each is a request, whose engine writes alone (``two_engines``).

The proposal that begins a word too many is dropped: the request ends with an EOS in its place, which has the log-prob
that a word ends, and ``HANDED_OVER`` as its reason to stop.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from tandemrl.rollout.spans import Span, SpanRules, draw_keys
from tandemrl.selection.whole_words import TextTables

SPAN = "span"
"""The name of the strategy of these requests: in its own engine, each model writes alone."""
HANDED_OVER = "handover"
"""The ``stop_reason`` of a request whose last token stands for a proposal that was dropped."""


def arguments_of(span: Span) -> dict[str, Any]:
    """A span as ``SamplingParams.extra_args``."""
    opening = [] if span.opening is None else [span.opening]
    told = [span.words, span.tail, span.counter, span.stream, span.end, *opening]
    return {"tandem_strategy": SPAN, "tandem_span": told}


class Spans:
    """The spans that an engine writes. In each step call ``update``, ``keys``, ``masked`` and ``ended``.

    Args:
        tables: of the vocabulary.
    """

    def __init__(self, tables: TextTables) -> None:
        self._rules = SpanRules(tables)
        self._spans: dict[str, Span] = {}
        self.handed = set[str]()
        """The requests that have handed over in this step."""
        self._ids: list[str] = []
        self._drawing: list[int] = []  # the rows whose token counts

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
        self._ids, self._drawing = list(ids), [i for i, id in enumerate(ids) if id in finished]
        return draw_keys(self._rows)

    @property
    def _rows(self) -> list[Span]:
        return [self._spans[id] for id in self._ids]

    def masked(self, logits: Tensor) -> Tensor:
        """The logits without the ids that the rows cannot have next."""
        return self._rules.masked(logits, self._rows)

    def ended(self, output: Any, logprobs: Tensor | None) -> Any:
        """What was sampled, with the end of the span in place of a word too many.

        Args:
            output: vLLM's ``SamplerOutput``, which is changed.
            logprobs: those that were drawn from, (b, v); None if all decode greedily.
        """
        if not self._drawing:
            return output
        rows, tokens = self._rows, output.sampled_token_ids[:, 0].cpu().long()
        over = self._rules.advance([rows[i] for i in self._drawing], tokens[self._drawing])
        at, told = [self._drawing[i] for i in over], output.logprobs_tensors
        for i in at:
            output.sampled_token_ids[i, 0] = told.logprob_token_ids[i, 0] = rows[i].end
            told.logprobs[i, 0] = 0.0
        self.handed |= {self._ids[i] for i in at}
        if at and logprobs is not None:
            told.logprobs[at, 0] = self._rules.word_ends(logprobs[at])
        return output
