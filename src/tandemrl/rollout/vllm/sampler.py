"""Draws each row's next token inside vLLM with the row's key, as the reference engine does.

Also of spans (``rollout.relay``): each is a request, whose engine writes alone (``engine.VllmTwoEngines``). The
proposal that begins a word too many is dropped: the request ends with an EOS in its place, which has the log-prob that
a word ends, and ``HANDED_OVER`` as its reason to stop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from tandemrl.models.sampling import Truncation, draw_token, kept_tokens
from tandemrl.rollout.relay import Span, SpanRules, draw_keys
from tandemrl.selection.whole_words import TextTables

SPAN = "span"
"""The name of the strategy of these requests: in its own engine, each model writes alone."""
HANDED_OVER = "handover"
"""The ``stop_reason`` of a request whose last token stands for a proposal that was dropped."""


def arguments_of(span: Span) -> dict[str, Any]:
    """A span as ``SamplingParams.extra_args``."""
    return {"tandem_strategy": SPAN, "tandem_span": astuple(span)}


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


class _Draw(torch.nn.Module):
    """Replaces the module with which vLLM truncates and draws.

    Each row has a counter-based key, so that batching, chunking, preemption and the number of ranks cannot change a
    token. Truncation and drawing are those of the reference engine.
    """

    token_keys: Tensor | None = None
    """The key of each row. None stands for keys of 0."""
    min_p: Tensor | None = None
    """The ``min_p`` of each row, if vLLM has not applied it already."""
    keeps: bool = False
    """Whether to keep ``drawn_from``, the log-probs that the last tokens were drawn from, (b, v)."""
    drawn_from: Tensor | None = None

    def forward(
        self, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The token of each row, and the log-probs of all tokens after truncation.

        Args:
            logits: the logits (b, v), after penalties and temperature.
            generators: not used; they are vLLM's source of randomness.
            k: ``top_k`` of each row, or None.
            p: ``top_p`` of each row, or None.
        """
        least = self.min_p
        if k is not None or p is not None or least is not None:
            truncation = Truncation(
                0 if k is None else k[:, None].long(),
                1.0 if p is None else p[:, None],
                0.0 if least is None else least[:, None],
            )
            logits = logits.masked_fill(~kept_tokens(logits, truncation), -torch.inf)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        keys = self.token_keys if self.token_keys is not None else torch.zeros(len(logits), dtype=torch.int64)
        self.drawn_from = logprobs if self.keeps else None
        return draw_token(logprobs, keys.to(logits.device)), logprobs


class TandemSampler(Sampler):
    """vLLM's sampler, with our draw and limited to the shared vocabulary.

    Args:
        logprobs_mode: vLLM's setting of that name.
        vocabulary: the size of the smaller of the two LM heads. Ids from there on are never drawn.
    """

    def __init__(self, logprobs_mode: Any, vocabulary: int) -> None:
        super().__init__(logprobs_mode)
        self._draw = _Draw()
        self.topk_topp_sampler = self._draw  # has the same forward, but is no subclass
        self.vocabulary = vocabulary
        self.spans: Spans | None = None
        """Of the rows, if they are spans of a text that another engine goes on with (``spans``)."""

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if logits.shape[-1] > self.vocabulary:
            logits[:, self.vocabulary :] = -torch.inf
        self._draw.keeps, self._draw.drawn_from = bool(self.spans), None  # greedy decoding draws nothing
        if not self.spans:
            return super().forward(logits, *args, **kwargs)
        output = super().forward(self.spans.masked(logits), *args, **kwargs)
        return self.spans.ended(output, self._draw.drawn_from)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        index = token_ids[:, None]
        # The drawn token alone: no top-k, and no rank, which stock vLLM compiles a kernel for.
        return LogprobsTensors(index.to(torch.int32), logprobs.gather(-1, index), torch.zeros_like(token_ids))
