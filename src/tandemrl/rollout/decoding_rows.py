"""What the reference engine decodes with: models, rows, the tokens of a step, and what ends a turn."""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.models.sampling import Truncation, draw, kept_tokens, penalise
from tandemrl.rollout.drafting import count_accepted
from tandemrl.rollout.engine import Completion, Passes, Request, StopReason, Turn
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


class Part(NamedTuple):
    """A turn that has ended, or what the environment said after it. The channels are those of ``Completion``."""

    tokens: np.ndarray
    author: np.ndarray
    logprobs: np.ndarray
    handovers: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[int], author: int, logprobs: Sequence[float] | None = None) -> "Part":
        """Tokens of one author."""
        values = np.zeros(len(tokens), np.float32) if logprobs is None else np.array(logprobs, np.float32)
        authors = np.full(len(tokens), author, np.int8)
        return cls(np.array(tokens, np.int64), authors, values, np.zeros_like(values))


@dataclass(slots=True, eq=False)
class Row:
    """One completion that is being written, in any engine; ``number`` is its number in the call."""

    request: Request
    key: int
    number: int
    parts: list[Part] = field(default_factory=list)
    """All turns that have ended, and between them what the environment said."""
    index: int = 0
    """Number of the present turn, from 0."""
    slot: int = -1
    """Where ``LiveSelection`` has its state."""
    told: int = 0
    """How many tokens of the present turn were told as ``NewTokens``."""
    own: int = 0
    """How many own tokens the finished turns have."""
    observed: int = 0
    """How many tokens of the environment there are."""
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
    def text(self) -> list[int]:
        """The prompt, and all that follows it up to the present turn."""
        return [*self.request.prompt, *chain.from_iterable(part.tokens.tolist() for part in self.parts)]

    @property
    def turns(self) -> list[np.ndarray]:
        """The own tokens of each turn that has ended."""
        return [part.tokens for part in self.parts if len(part.tokens) and part.author[0] >= 0]

    @property
    def own_left(self) -> int:
        """How many own tokens further turns may have."""
        return self.request.sampling.max_tokens - self.own

    @property
    def turn_left(self) -> int:
        """How many own tokens the present turn may have."""
        return min(self.request.turn_tokens or self.own_left, self.own_left)

    @property
    def stays(self) -> bool:
        """Whether a further turn may follow. Valid between two turns only."""
        return not self.over and self.own_left > 0 and self.observed < self.request.observation_tokens

    def end_turn(self, part: Part, reason: StopReason) -> None:
        """The present turn has ended, with these tokens."""
        self.parts.append(part)
        self.own, self.stop_reason = self.own + len(part.tokens), reason

    def observe(self, context: Sequence[int]) -> None:
        """Begin the next turn, after an answer of the environment."""
        self.parts.append(Part.of(context, -1))
        self.observed, self.index, self.told, self.stop_reason = self.observed + len(context), self.index + 1, 0, None

    @property
    def turn(self) -> Turn:
        """The turn that has just ended, as the ``Responder`` gets it."""
        assert self.stop_reason is not None
        return Turn(self.number, self.request.task, self.index, self.parts[-1].tokens, self.stop_reason)

    def completion(self, version: int) -> Completion:
        """The finished completion. An answer of the environment after which nothing was written is left out."""
        assert self.stop_reason is not None
        parts = [Part.of((), 0), *(part for part in self.parts if len(part.tokens))]
        if len(parts) > 1 and parts[-1].author[0] < 0:
            parts.pop()
        tokens, authors, logprobs, handovers = map(np.concatenate, zip(*parts, strict=True))
        told = None if self.request.strategy.starts is None else handovers
        return Completion(self.key, tokens, authors, logprobs, self.stop_reason, version, None, told)

    def first_stop(self, known: Int64[Tensor, " n"], new: Int64[Tensor, " m"], decode: Callable[..., Any]) -> int:
        """The number, from 1, of the first of the ``new`` tokens after a turn's ``known`` ones that completes a stop
        string; 0 if none does."""
        stops, whole = self.request.sampling.stop, torch.cat([known, new])
        for n in range(1, len(new) + 1) if stops else ():
            # A character is at most four byte tokens, and the last token completes the stop string.
            end = len(known) + n
            tail = whole[max(0, end - 4 * max(map(len, stops)) - 4) : end].tolist()
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
    the senior writes (or proposes) what follows it, and handovers are those of ``Completion.handover_logprobs``. ends
    says by place why a turn ends with its tokens, if that is not seen from them.
    """

    tokens: Int64[Tensor, "b c"]
    authors: Bool[Tensor, "b c"]
    logprobs: Float[Tensor, "b c"]
    most: Int64[Tensor, " b"]
    marks: Sequence[Mark] = ()
    guesses: Int64[Tensor, "b c"] | None = None
    next: Bool[Tensor, " b"] | None = None
    handovers: Float[Tensor, "b c"] | None = None
    ends: dict[int, StopReason] | None = None

    def cost(self, count: Int64[Tensor, " b"], total: int, live: int, readers: Container[int]) -> Passes:
        """What it cost with ``live`` rows, of which each takes ``count`` tokens, ``total`` in all, and ``readers`` read
        every one."""
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
