"""What the reference engine decodes with: models, rows, the tokens of a step, and what ends a turn."""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.models.sampling import Truncation, draw, kept_tokens, penalise
from tandemrl.rollout.drafting import count_accepted
from tandemrl.rollout.engine import Passes, Request, StopReason
from tandemrl.rollout.kv_cache import Layers
from tandemrl.selection.live import Mark


@dataclass(frozen=True, slots=True)
class Decoder:
    """The models and their LM heads, each by author (0 junior, 1 senior)."""

    models: Mapping[int, PreTrainedModel]
    heads: Mapping[int, nn.Linear]
    vocabulary: int
    eos: Sequence[int]
    tokenizer: PreTrainedTokenizerBase
    """It is used for stop strings only."""

    @property
    def device(self) -> torch.device:
        """Where tokens are drawn: that of the senior; the CPU where another process draws them."""
        return self.heads[1].weight.device if self.heads else torch.device("cpu")


@dataclass(slots=True, eq=False)
class Row:
    """One completion that is being written; ``number`` is its row in the output arrays."""

    request: Request
    key: int
    number: int
    index: int = 0
    """Number of the present turn, from 0."""
    start: int = 0
    """Column of the output arrays where the present turn begins."""
    told: int = 0
    """How many columns of the output arrays ``DecodingBatch.news`` has told of."""
    written: int = 0
    """How many columns of the output arrays the row has filled. It is not updated while a turn is being written."""
    own: int = 0
    """How many own tokens the finished turns have."""
    stop_reason: StopReason | None = None
    """Why the turn, and at last the completion, has ended. None while the row is being written or waits to be."""
    over: bool = False
    """Whether no further turn follows."""
    kept: dict[int, Layers] = field(default_factory=dict)
    """Between two turns, or two requests of a session: the keys and values of all tokens but the last, by author."""
    senior_next: bool = False
    """Between two turns: whether the strategy lets the senior write after the last token."""
    junior_context: Sequence[int] = ()
    """Between two turns: ``Reply.junior_context``."""

    @property
    def observed(self) -> int:
        """How many tokens of the environment the row holds. Valid between two turns only."""
        return self.written - self.own

    @property
    def own_left(self) -> int:
        """How many own tokens further turns may have."""
        return self.request.sampling.max_tokens - self.own

    @property
    def stays(self) -> bool:
        """Whether a further turn may follow. Valid between two turns only."""
        return not self.over and self.own_left > 0 and self.observed < self.request.observation_tokens

    def first_stop(self, known: Int64[Tensor, " n"], new: Int64[Tensor, " m"], decode: Callable[..., Any]) -> int:
        """The number, from 1, of the first of the ``new`` tokens after the ``known`` ones (all that follow the prompt)
        that completes a stop string of this turn; 0 if none does."""
        stops, whole = self.request.sampling.stop, torch.cat([known, new])
        for n in range(1, len(new) + 1) if stops else ():
            # A character is at most four byte tokens, and the last token completes the stop string.
            begin, end = self.start, len(known) + n
            tail = whole[max(begin, end - 4 * max(map(len, stops)) - 4) : end].tolist()
            text = decode(tail, skip_special_tokens=False).strip("\ufffd")  # halves of characters at its ends
            if any(stop in text for stop in stops):
                return n
        return 0

    def end(self, reason: StopReason | None) -> None:
        """End the completion: no further turn follows."""
        self.stop_reason, self.over, self.kept = reason, True, {}


def sampling_parameters(rows: Sequence[Row]) -> Float[Tensor, "b 7"]:
    """For each row temperature, top_k, top_p, min_p, and the repetition, presence and frequency penalty."""
    parameters = [
        (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        for s in (row.request.sampling for row in rows)
    ]
    return torch.tensor(parameters, dtype=torch.float32).view(-1, 7)


def seen_tokens(texts: Sequence[Sequence[int]], vocabulary: int) -> Bool[Tensor, "b v"]:
    """Which tokens each text has."""
    seen = torch.zeros(len(texts), vocabulary, dtype=torch.bool)
    for i, text in enumerate(texts):
        seen[i, text] = True
    return seen


class Shaping(NamedTuple):
    """What the rows ask for, and so what is computed for all of them: a temperature other than 1, the most probable
    token, truncation."""

    scaled: bool = False
    greedy: bool = False
    truncated: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Shaping":
        """What these requests ask for."""
        drawn = [request.sampling for request in requests]
        scaled = any(s.temperature not in (0, 1) for s in drawn)
        return cls(scaled, any(s.temperature == 0 for s in drawn), any(s.truncated for s in drawn))

    def __or__(self, other: "Shaping") -> "Shaping":
        return Shaping(*(a or b for a, b in zip(self, other, strict=True)))


Penalised = tuple[Bool[Tensor, "k v"], Int64[Tensor, "k v"]]
"""Which tokens each row has before its turn, and how often each in it."""


def shaped(
    logits: Float[Tensor, "k v"], parameters: Float[Tensor, "k 7"], penalised: Penalised | None, shaping: Shaping
) -> Float[Tensor, "k v"]:
    """Logits after penalties, temperature and truncation, as far as any row asks for each; -inf at what is cut off.

    Args:
        parameters: see ``sampling_parameters``.
    """
    temperature, top_k, top_p, min_p, repetition, presence, frequency = parameters.split(1, dim=1)
    if penalised is not None:
        seen, counts = penalised
        logits = penalise(
            logits,
            seen_in_prompt=seen,
            output_counts=counts,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
    if shaping.scaled or shaping.greedy:
        logits = logits / torch.where(temperature > 0, temperature, 1.0)
    if shaping.truncated:
        logits = logits.masked_fill(~kept_tokens(logits, Truncation(top_k.long(), top_p, min_p)), -torch.inf)
    return logits


def sample(
    logits: Float[Tensor, "k v"],
    race: Float64[Tensor, "k r"],
    parameters: Float[Tensor, "k 7"],
    penalised: Penalised | None,
    shaping: Shaping,
) -> tuple[Int64[Tensor, " k"], Float[Tensor, " k"]]:
    """Sample a token for each row and return the tokens with their log-probs.

    Args:
        logits: logits of the author's model.
        race: random numbers of the draws.
        parameters, penalised, shaping: see ``shaped``.
    """
    logits = shaped(logits, parameters, penalised, shaping)
    tokens, logprobs = draw(logits, race)
    if shaping.greedy:
        deterministic = parameters[:, 0] == 0
        tokens = torch.where(deterministic, logits.argmax(-1), tokens)
        logprobs = torch.where(deterministic, 0.0, logprobs)
    return tokens, logprobs


class Block(NamedTuple):
    """The next tokens of every row, of which each row takes at most the first ``most``.

    After several tokens, marks are the states of the strategies before each token, or before the last one alone if no
    row that has ended goes on; after a draft, guesses are the drafted tokens. After a single token, next says whether
    the senior writes (or proposes) what follows it, and handovers are those of
    ``Completion.handover_logprobs``.
    """

    tokens: Int64[Tensor, "b c"]
    authors: Bool[Tensor, "b c"]
    logprobs: Float[Tensor, "b c"]
    most: Int64[Tensor, " b"]
    marks: Sequence[Mark] = ()
    guesses: Int64[Tensor, "b c"] | None = None
    next: Bool[Tensor, " b"] | None = None
    handovers: Float[Tensor, "b c"] | None = None

    def cost(self, count: Int64[Tensor, " b"], live: int, readers: Container[int]) -> Passes:
        """What it cost with ``live`` rows, of which each row takes ``count`` tokens, and ``readers`` read every one."""
        total = int(count.sum())
        if self.guesses is None:
            read = max(total, live)  # also a row whose token is dropped
            return Passes(total, *(read * (who in readers) for who in (1, 0)))
        examined = self.authors & (torch.arange(self.tokens.shape[1]) < count[:, None])
        accepted = count_accepted(examined, self.guesses == self.tokens)
        return Passes(total, live, live * self.tokens.shape[1]) + accepted


class TokenSets:
    """Sets of tokens, each a row of booleans over the vocabulary, which a key stands for."""

    def __init__(self, vocabulary: int) -> None:
        self._rows: dict[Hashable, int] = {}
        self.table = torch.zeros(0, vocabulary, dtype=torch.bool)

    def row(self, key: Hashable, tokens: Sequence[int] | Bool[Tensor, " v"]) -> int:
        """The row of a set, by its ids or a table of them, which is added if there is none."""
        if key not in self._rows:
            self._rows[key] = len(self.table)
            self.table = F.pad(self.table, (0, 0, 0, 1))
            size = self.table.shape[1]
            self.table[-1, tokens[:size].nonzero().flatten() if isinstance(tokens, Tensor) else [*tokens]] = True
        return self._rows[key]
