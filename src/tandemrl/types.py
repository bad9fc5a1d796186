"""The types that flow through the library: rows -> Request -> Completion -> Rollout -> Group -> Batch -> numbers.

Shape legend, used in every signature: ``t`` packed tokens, ``s`` sequences, ``g`` groups, ``n`` rollouts per group,
``v`` vocabulary, ``b`` rows of a decoding batch.

Alignment: entry *i* of every per-token channel describes token *i*, never a shifted one. Log-probs of CONTEXT tokens
(prompt, tool output) are 0.0 in every channel, so that their ratio is 1. The shift from logits to tokens happens once,
in ``tandemrl.models.forward``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int8, Int64, jaxtyped
from torch import Tensor

from tandemrl.data.messages import Message as Message
from tandemrl.data.messages import Response as Response
from tandemrl.data.messages import Transcript as Transcript

try:  # Checks at the public boundary when beartype is there; it is not needed to train.
    from beartype import beartype as typechecker
except ImportError:  # pragma: no cover - exercised by `make test-core` without beartype
    typechecker = None  # type: ignore[assignment]  # jaxtyped takes None

PerToken = Float[Tensor, " t"]
IntPerToken = Int64[Tensor, " t"]
PerSequence = Float[Tensor, " s"]
IntPerSequence = Int64[Tensor, " s"]
Scalar = Float[Tensor, ""]


class Author(IntEnum):
    """Who wrote a token, which decides whether it is trained on (``losses.weights``)."""

    CONTEXT = -1
    JUNIOR = 0
    SENIOR = 1


def own_turns(tokens: np.ndarray, author: np.ndarray) -> list[np.ndarray]:
    """The tokens that the authors wrote, one array per turn: the runs of tokens that are not CONTEXT."""
    own = (author >= 0).astype(np.int8)
    starts = (np.diff(own, prepend=0) == 1).nonzero()[0]
    ends = (np.diff(own, append=0) == -1).nonzero()[0] + 1
    return [tokens[start:end] for start, end in zip(starts, ends, strict=True)]


def taken_over(author: np.ndarray) -> np.ndarray:
    """Where a token follows one of the other author, in the same turn."""
    before = np.concatenate([[Author.CONTEXT], author[:-1]])
    after: np.ndarray = (author >= 0) & (before >= 0) & (author != before)
    return after


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One finished, scored completion together with its prompt; also a line of ``samples.jsonl``.

    ``tokens``, ``author`` and ``behaviour_logprobs`` have the same length (prompt + response). ``author`` is
    ``Author.CONTEXT`` on the prompt and on what the environment says between turns. ``behaviour_logprobs`` is the
    log-prob of each written token under its AUTHOR's sampling distribution (nats), 0.0 on context. ``key`` is the
    request key that all random draws follow from; it is called "seed" in ``samples.jsonl``. ``transcript`` holds the
    messages of an episode of several turns, and is None for a single-turn rollout. ``handover_logprobs`` is another
    channel of the tokens, and None unless the strategy has ``starts`` (see ``Completion``). ``policy_version`` is that
    of the weights that wrote it. ``response`` is what rewards read, None before they do; ``logged`` is what they noted
    (TRL's ``log_extra``). ``branches`` are further texts of the same episode (``rollout.gateway.sessions``); what they
    share with this one is CONTEXT in them.

    Raises:
        ValueError: the channels differ in length, or ``author`` holds another value than -1, 0 or 1.
    """

    example_id: str
    group: int
    index: int
    key: int
    tokens: np.ndarray
    author: np.ndarray
    behaviour_logprobs: np.ndarray
    reward: float
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = "eos"
    turns: int = 1
    policy_version: int = 0
    transcript: Transcript | None = None
    handover_logprobs: np.ndarray | None = None
    response: Response | None = None
    logged: Mapping[str, Any] = field(default_factory=dict)
    branches: "tuple[Rollout, ...]" = ()

    def __post_init__(self) -> None:
        channels = {"tokens": np.int64, "author": np.int8, "behaviour_logprobs": np.float32}
        if self.handover_logprobs is not None:
            channels["handover_logprobs"] = np.float32
        for name, dtype in channels.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        lengths = {name: len(getattr(self, name)) for name in channels}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"rollout {self.example_id}/{self.index}: channels differ in length: {lengths}")
        if not np.isin(self.author, (-1, 0, 1)).all():
            raise ValueError(f"rollout {self.example_id}/{self.index}: author must be -1, 0 or 1")

    @property
    def sequences(self) -> "tuple[Rollout, ...]":
        """All texts of the episode."""
        return self, *self.branches

    def in_group(self, group: int) -> "Rollout":
        """The rollout as one of this group."""
        return replace(self, group=group, branches=tuple(each.in_group(group) for each in self.branches))

    @property
    def response_tokens(self) -> int:
        return int((self.author >= 0).sum())

    @property
    def word_ends(self) -> int:
        """At how many places the senior ended its word and the junior took over, which are choices of the senior."""
        if self.handover_logprobs is None:
            return 0
        return int((taken_over(self.author) & (self.author == Author.JUNIOR)).sum())

    @property
    def context_tokens(self) -> int:
        """How many tokens the leading context has. That is the prompt, which all rollouts of a group share."""
        written = np.flatnonzero(self.author >= 0)
        return int(written[0]) if len(written) else len(self.author)

    @property
    def scored(self) -> bool:
        """False where a judge gave no score, or a text is untranslatable (reward part ``unscored``); such a reward is
        meaningless and not used.

        A scorer that hangs or dies is another case: its response scores 0, is trained on, and is counted
        (``rewards.scoring.Scorer``).
        """
        return not self.reward_parts.get("unscored")

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict; ``Rollout.from_json`` is its inverse."""
        told = self.handover_logprobs
        return {
            **({} if self.response is None else self.response.to_json()),
            "example_id": self.example_id,
            "group": self.group,
            "index": self.index,
            "seed": self.key,
            "tokens": self.tokens.tolist(),
            "author": self.author.tolist(),
            "behaviour_logprobs": [round(float(x), 6) for x in self.behaviour_logprobs],
            **({} if told is None else {"handover_logprobs": [round(float(x), 6) for x in told]}),
            "reward": self.reward,
            "reward_parts": dict(self.reward_parts),
            **({"logged": dict(self.logged)} if self.logged else {}),
            "stop_reason": self.stop_reason,
            "turns": self.turns,
            "policy_version": self.policy_version,
            **({} if self.transcript is None else {"transcript": self.transcript.to_json()}),
            **({"branches": [each.to_json() for each in self.branches]} if self.branches else {}),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Rollout":
        channels = ("tokens", "author", "behaviour_logprobs", "handover_logprobs")
        arrays = {name: np.asarray(line[name]) for name in channels if name in line}
        others = {name: line[name] for name in cls.__dataclass_fields__ if name in line}
        if others.get("transcript") is not None:
            others["transcript"] = Transcript.from_json(others["transcript"])
        if "branches" in others:
            others["branches"] = tuple(map(cls.from_json, others["branches"]))
        if "text" in line:
            others["response"] = Response.from_json(line, _after_prompt(line["tokens"], line["author"]))
        return cls(**others | arrays | {"key": line["seed"]})


def _after_prompt(tokens: Sequence[int], author: Sequence[int]) -> Sequence[int]:
    written = [i for i, who in enumerate(author) if who >= 0]
    return tokens[written[0] :] if written else ()


class Group(NamedTuple):
    """The rollouts of one prompt. Advantages compare the rollouts of a group with each other. logged: the values that
    reward functions logged about it (TRL's ``log_metric``)."""

    example_id: str
    rollouts: tuple[Rollout, ...]
    logged: Mapping[str, Sequence[float]] = {}

    @property
    def scored(self) -> "Group":
        """The group with its scored rollouts only, which are those that training uses.

        It has no rollouts where fewer than two are scored, since a single one has no baseline. A group of one keeps
        its rollout if that is scored.
        """
        scored = tuple(rollout for rollout in self.rollouts if rollout.scored)
        return self._replace(rollouts=scored if len(scored) >= min(2, len(self.rollouts)) else ())


class Totals(NamedTuple):
    """Global counts of one optimiser step, over every rank and micro-batch, counted before any loss is reduced.

    sequences: how many sequences have a token of positive weight. response_tokens: how many tokens either author wrote.
    weight: the sum of all token weights.
    """

    sequences: float | Tensor
    response_tokens: float | Tensor
    weight: float | Tensor


Metrics = dict[str, float]


@jaxtyped(typechecker=typechecker)
@dataclass(frozen=True, slots=True, eq=False)
class WordEnds:
    """The places of a batch where the senior ended its word, and the junior took over (``Strategy.starts``).

    ``places`` are the indices of the junior's tokens. The log-probs are those of proposing a token that begins a word:
    of the engine, of the policy before its first update, of the reference.
    """

    places: Int64[Tensor, " e"]
    behaviour_logprobs: Float[Tensor, " e"]
    old_logprobs: Float[Tensor, " e"] | None = None
    ref_logprobs: Float[Tensor, " e"] | None = None


@jaxtyped(typechecker=typechecker)
@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Packed tensors of one micro-batch: ``s`` sequences laid end to end in ``t`` tokens, no padding.

    ``sequence_ids`` counts 0, 1, … s-1 without gaps and is sorted; ``positions`` restarts at 0 in each sequence.
    ``lengths`` are the tokens of each sequence. The trainer fills the optional channels when the recipe needs them.
    ``taken_over`` is None unless the strategy has ``starts``. Then it is True at the first token after each handover,
    which was drawn from ``starts`` alone; and ``word_ends`` is set unless these are not trained. ``shares`` says how
    much of an episode with branches each sequence is (``losses.reduce``); None: all of it.
    """

    tokens: Int64[Tensor, " t"]
    positions: Int64[Tensor, " t"]
    sequence_ids: Int64[Tensor, " t"]
    author: Int8[Tensor, " t"]
    advantages: Float[Tensor, " t"]
    behaviour_logprobs: Float[Tensor, " t"]
    lengths: Int64[Tensor, " s"]
    old_logprobs: Float[Tensor, " t"] | None = None
    ref_logprobs: Float[Tensor, " t"] | None = None
    junior_logprobs: Float[Tensor, " t"] | None = None
    old_values: Float[Tensor, " t"] | None = None
    returns: Float[Tensor, " t"] | None = None
    taken_over: Bool[Tensor, " t"] | None = None
    word_ends: WordEnds | None = None
    shares: Float[Tensor, " s"] | None = None

    @property
    def num_sequences(self) -> int:
        return self.lengths.shape[0]
