"""What the reference engine decodes with: models, rows, the tokens of a step, and what ends a turn."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.models.sampling import Truncation, draw, kept_tokens, penalise
from tandemrl.rollout.drafting import count_accepted
from tandemrl.rollout.engine import EngineError, Passes, Request, StopReason
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

    def hits_stop_string(self, tokens: Int64[Tensor, " n"], decode: Callable[..., Any]) -> bool:
        """Whether the last of the ``tokens`` (all that follow the prompt) completes a stop string of this turn."""
        stops = self.request.sampling.stop
        if not stops:
            return False
        # A character is at most four byte tokens, and the last token completes the stop string.
        tail = tokens[max(self.start, len(tokens) - 4 * max(map(len, stops)) - 4) :]
        text = decode(tail.tolist(), skip_special_tokens=False).strip("\ufffd")  # halves of characters at its ends
        return any(stop in text for stop in stops)

    def first_stop(self, known: Int64[Tensor, " n"], new: Int64[Tensor, " m"], decode: Callable[..., Any]) -> int:
        """The number, from 1, of the first of the ``new`` tokens after the ``known`` ones (all that follow the prompt)
        that completes a stop string of this turn; 0 if none does."""
        whole = torch.cat([known, new])
        texts = (whole[: len(known) + n] for n in range(1, len(new) + 1))
        return next((n for n, text in enumerate(texts, start=1) if self.hits_stop_string(text, decode)), 0)

    def end(self, reason: StopReason | None) -> None:
        """End the completion: no further turn follows."""
        self.stop_reason, self.over, self.kept = reason, True, {}


def sampling_parameters(rows: Sequence[Row]) -> Float[Tensor, "b 7"]:
    """For each row temperature, top_k, top_p, min_p, and the repetition, presence and frequency penalty."""
    parameters = [
        (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
        for s in (row.request.sampling for row in rows)
    ]
    return torch.tensor(parameters, dtype=torch.float32)


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


def places_of(back: Sequence[Row], rows: Sequence[Row], free: Sequence[int]) -> Int64[Tensor, " k"]:
    """A place in a batch for each row that comes back: the one that it left, if no other row has taken that. So no row
    is in the batch twice.

    Args:
        back: the rows that come back.
        rows: the row that is, or was last, in each place.
        free: the places that hold no live row.
    """
    left = {rows[place].number: place for place in free if place < len(rows)}
    own = {row.number: left[row.number] for row in back if row.number in left}
    taken = {*own.values()}
    others = iter([place for place in free if place not in taken])
    return torch.tensor([own[row.number] if row.number in own else next(others) for row in back])


class StopTable:
    """Which tokens end a turn: one row of booleans for each distinct pair (ignore_eos, stop_token_ids)."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.index: dict[tuple[bool, tuple[int, ...]], int] = {}
        self.stop = torch.empty(0, decoder.vocabulary, dtype=torch.bool)
        self.eos = self.stop

    def extend(self, requests: Sequence[Request]) -> None:
        """Add the pairs of further requests."""
        kinds = dict.fromkeys((r.sampling.ignore_eos, r.sampling.stop_token_ids) for r in requests)
        for ignore_eos, ids in [kind for kind in kinds if kind not in self.index]:
            self.index[ignore_eos, ids] = len(self.index)
            eos = torch.zeros(1, self._decoder.vocabulary, dtype=torch.bool)
            eos[0, list(() if ignore_eos else self._decoder.eos)] = True
            stop = eos.clone()
            stop[0, list(ids)] = True
            self.eos, self.stop = torch.cat([self.eos, eos]), torch.cat([self.stop, stop])

    def row(self, request: Request) -> int:
        return self.index[(request.sampling.ignore_eos, request.sampling.stop_token_ids)]


class StartTable:
    """Which tokens may follow a handover: one row of booleans for each distinct ``Strategy.starts``; row 0 for none."""

    def __init__(self, decoder: Decoder) -> None:
        self._index: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that their ids stay theirs
        self.table = torch.zeros(1, decoder.vocabulary, dtype=torch.bool)

    def extend(self, requests: Sequence[Request], stops: StopTable) -> None:
        """Add the tables of further requests.

        Raises:
            EngineError: a token that ends a turn of a request is not in its table.
        """
        kinds = {id(r.strategy.starts): r.strategy.starts for r in requests if r.strategy.starts is not None}
        for kind, starts in kinds.items():
            if kind not in self._index:
                self._index[kind] = len(self.table)
                self._kept.append(starts)
                known = torch.zeros(1, self.table.shape[1], dtype=torch.bool)
                known[0, : len(starts)] = starts[: self.table.shape[1]]
                self.table = torch.cat([self.table, known])
        for number, request in enumerate(requests):
            if row := self.row(request):
                missing = (stops.stop[stops.row(request)] & ~self.table[row]).nonzero().flatten().tolist()
                if missing:
                    raise EngineError(
                        f"request {number}: the tokens {missing} end a turn, but its strategy (before_word) does not "
                        "know that a word ends before them; make them special tokens of the tokenizer, end turns by "
                        "stop strings, or use selection.strategy=word"
                    )

    def __bool__(self) -> bool:
        return len(self.table) > 1

    def row(self, request: Request) -> int:
        return self._index.get(id(request.strategy.starts), 0)
