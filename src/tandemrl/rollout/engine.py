"""The contract of every engine: prompt tokens in; tokens, their authors and the authors' log-probs out.

Engines have rows in ``config.components.ENGINES``; ``factory.make_engine`` makes the one of a config.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tandemrl.selection import Replay, Strategy, Who, replay
from tandemrl.types import Transcript, own_turns

StopReason = Literal["eos", "stop", "length", "turns", "abort", "untranslatable", "failed"]
"""Why a completion ended. ``turns`` means that the environment allows no further turn."""
LOST: tuple[StopReason, ...] = ("untranslatable", "failed")
"""Not to be scored: what was written in one vocabulary cannot be expressed in the other; the junior gave no words."""


OnProgress = Callable[[int], None]
"""Hears how many tokens were written since it was called last."""


class EngineError(RuntimeError):
    """An engine cannot serve a request, or broke its contract. The message names the cause and the fix."""


class EngineDeadError(EngineError):
    """The engine's process has ended. Another engine could serve the same request."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from its author's logits; the same knobs, in the same order, in every engine.

    The order is vLLM's: penalties, temperature, min_p, top_k, top_p; then the kept tokens are renormalised.
    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch truncation off. ``stop`` strings are
    kept in the text, as are stop ids and EOS. ``repetition_penalty`` counts tokens of the prompt and the output; the
    presence and frequency penalties count those of the output only. For a further turn, everything before it is its
    prompt, so stop strings and these two penalties look at the turn's own tokens alone.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[bool, str]] = {
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a tuple of texts that are not empty"),
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or a positive number"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0.0, "positive"),
        }
        for name, (ok, allowed) in bounds.items():
            if not ok:
                raise ValueError(f"sampling.{name} must be {allowed}, got {getattr(self, name)!r}")

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p removes tokens from the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for ``len(keys)`` completions of one prompt.

    Each key (see ``selection.draws.request_key``) seeds one completion: its author draws and its sampling draws. Prompt
    ids are used as they are, never re-tokenised.

    A completion may have several turns (``generate`` with a ``Responder``). Then ``sampling.max_tokens`` bounds the own
    tokens of all turns, ``turn_tokens`` (if set) those of each, ``observation_tokens`` those of the observations.

    ``history`` holds the own tokens of each turn that was written before under the same key; ``prompt`` contains them.
    Strategy and sampling counters continue after them, so that several requests write what one with a ``Responder``
    would have written. ``task`` is passed to the ``Responder``. ``junior_prompt`` is the prompt in the vocabulary of a
    junior that has its own; ``end_of_turn`` is the senior's token for the end of a turn by it (None: EOS). Of what a
    ``session`` computed last, an engine may keep the keys and values for its next request.
    """

    prompt: Sequence[int]
    keys: tuple[int, ...]
    sampling: Sampling
    strategy: Strategy
    turn_tokens: int | None = None
    observation_tokens: int = 0
    history: tuple[tuple[int, ...], ...] = ()
    task: Any = None
    junior_prompt: Sequence[int] = ()
    end_of_turn: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What follows the prompt: generated tokens and, between turns, the tokens of the environment.

    The three channels ``tokens``, ``author`` and ``behaviour_logprobs`` have the same length.

    author: 0 for the junior, 1 for the senior, -1 for the environment. behaviour_logprobs: the log-prob of each token
    under its author's sampling distribution (float32, nats), after penalties, temperature and truncation and
    renormalised. It is 0.0 for greedy decoding and for tokens of the environment. transcript: the messages of the
    episode, from the ``Responder``; None without one. handover_logprobs: None unless the strategy has ``starts``. Then
    it holds, at the first token of the junior after one of the senior, the log-prob that the senior proposes a token of
    ``starts`` there, and 0.0 elsewhere. A token after a handover has its log-prob among ``starts`` alone.
    policy_version: of the weights that wrote it. prompt: that of the completion, if it is another than the request's.
    branches: what a program had written beside it (``gateway``): further completions, each of a prompt of its own.
    """

    key: int
    tokens: np.ndarray
    author: np.ndarray
    behaviour_logprobs: np.ndarray
    stop_reason: StopReason
    policy_version: int = 0
    transcript: Transcript | None = None
    handover_logprobs: np.ndarray | None = None
    prompt: tuple[int, ...] | None = None
    branches: "tuple[Completion, ...]" = ()

    @property
    def turns(self) -> list[np.ndarray]:
        """The own tokens of each turn."""
        return own_turns(self.tokens, self.author)

    @property
    def authorship_mask(self) -> np.ndarray:
        """``author`` under the name of the paper's own code: 1 where the senior wrote the token."""
        return self.author


class Turn(NamedTuple):
    """A finished turn. It ended by an EOS or stop token, which is its last token, or by a limit (``length``)."""

    number: int
    """Number of the completion, counted over all keys of all requests of the call, in order."""
    task: Any
    """``Request.task``."""
    index: int  # type: ignore[assignment]  # instead of the method of tuples
    """Number of the turn; 0 is the first turn of the completion in this call."""
    tokens: np.ndarray
    """The own tokens of this turn."""
    stop_reason: StopReason


class Reply(NamedTuple):
    """The answer of the environment to a turn.

    ``context`` holds its tokens, after which the next turn begins. If it is empty, the completion is over, by
    ``stop_reason`` or else that of its last turn. ``junior_context``: what a junior with a vocabulary of its own reads
    instead. It begins with the junior's token for the end of a turn, whoever ended this one.
    """

    number: int
    context: tuple[int, ...] = ()
    stop_reason: StopReason | None = None
    junior_context: tuple[int, ...] = ()


@runtime_checkable
class Responder(Protocol):
    """The environment that the authors take turns with, for one call of ``generate``; see ``rollout.envs.episodes``.

    While a row waits for an answer, the engine decodes other rows. The order in which answers come changes no token.
    """

    def submit(self, turn: Turn) -> None:
        """Begin to answer a turn, and return without waiting for the answer."""

    def replies(self, *, wait: bool) -> list[Reply]:
        """The answers that are ready. Each answer is returned once.

        Args:
            wait: wait until there is at least one answer, however long it takes.

        Raises:
            EngineError: the environment is broken; the call of ``generate`` ends with this error.
        """

    def transcript(self, number: int) -> Transcript:
        """The transcript of a completion that has ended, for whatever reason."""


class EngineInfo(NamedTuple):
    """What an engine reports about itself."""

    name: str
    dtype: str
    """The dtype of the weights, by torch's name for it. Fingerprints of weights are compared in this dtype."""
    adapters: bool = False
    """Whether the senior is adapters on the junior's weights. Then ``load_weights`` takes the adapters alone, and the
    fingerprint covers them and the base, under the trainer's names."""
    drops: bool = False
    """Whether it can drop what an author proposes, as strategies with ``starts`` ask for."""


class Passes(NamedTuple):
    """What a call of ``generate`` cost, in forward passes of ``senior`` and ``junior``.

    A forward pass of a model counts once for each row in it, however many tokens of the row it reads. The passes over
    prompts and over what the environment says are not counted.
    """

    tokens: int = 0
    """How many own tokens all completions have."""
    senior: int = 0
    junior: int = 0
    drafted: int = 0
    """How many tokens the junior drafted where the senior is the author, up to and with the first one in each draft
    that the senior draws otherwise."""
    accepted: int = 0
    """How many of the drafted tokens the senior draws, too (``drafting.count_accepted``)."""
    spans: int = 0
    asks: int = 0
    """How often a junior behind an endpoint was asked for ``spans`` runs of words, until answers began with a word."""

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that the senior accepts; None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]  # not tuple + tuple
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))


@runtime_checkable
class Engine(Protocol):
    """Tokens in, tokens out. Engines are synchronous: ``generate`` returns when all completions are finished.

    `factory.make_engine` makes the one that ``rollout.engine`` names; a ``module:name`` gets those of
    ``config``, ``senior``, ``junior``, ``tokenizer``, ``dtype``, ``device``, ``longest`` and ``ends`` that it names.
    Serve and play need a `call.CallEngine`, which also has ``open``.
    """

    policy_version: int
    passes: Passes
    """What the last call of ``generate`` cost; all 0 in an engine that does not count."""
    vocabulary: int
    """The engine writes token ids below this number, which is the size of the smaller of the two LM heads."""
    has_junior: bool
    context: int
    """How many tokens prompt and completion may have together."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(
        self, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
    ) -> list[list[Completion]]:
        """Write the completions of all requests.

        With a ``responder``, every ended turn is submitted to it, and another turn follows a reply that has context.
        That turn has at most ``turn_tokens`` own tokens. If no own tokens are left of ``max_tokens``, or the context
        does not fit into ``observation_tokens``, the completion ends instead, by ``length`` and without that context. A
        limit on tokens ends a turn as EOS does; the context of the reply then begins with the end-of-turn token that
        the author did not generate.

        Args:
            progress: called with the number of new tokens whenever some were written.
            responder: the environment that the authors take turns with. None means one turn for each completion.

        Returns:
            For each request, in order, one completion per key.

        Raises:
            EngineError: a request asks for something this engine lacks, or does not fit its context.
        """

    def abort(self) -> None:
        """Give up the running call of ``generate``, which fails, or ends its completions as ``abort``. Thread-safe."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the senior's weights in place. The junior is never touched.

        Of ``SentWeights``, an engine in this process takes one tensor after another, without holding all.

        In another thread than that of a running ``generate``, this waits for the end of the call.
        """

    def fingerprint(self, who: Who = "senior") -> int:
        """An integer checksum of the weights this engine decodes with (see ``rollout.sync.fingerprint``)."""

    def close(self) -> None:
        """Release the processes and the memory that the engine holds itself. It cannot be used afterwards."""


class SentWeights:
    """A trainer's weights, which are gathered one by one while they are iterated over.

    shapes: the names and whole shapes of all, known before the first is gathered.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], weights: Iterator[tuple[str, Tensor]]) -> None:
        self.shapes, self._weights = shapes, weights

    @classmethod
    def of(cls, weights: Iterable[tuple[str, Tensor]]) -> "SentWeights":
        """Weights that need not be gathered."""
        if isinstance(weights, cls):
            return weights
        named = dict(weights)
        return cls({name: tuple(tensor.shape) for name, tensor in named.items()}, iter(named.items()))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights


def check_request(index: int, request: Request, engine: Engine) -> None:
    """Refuse a request that an engine cannot serve, before anything is decoded.

    Args:
        index: number of the request, for the message.

    Raises:
        EngineError: the request cannot be served.
    """
    vocabulary, context, turns = engine.vocabulary, engine.context, request.observation_tokens
    length, new = len(request.prompt), request.sampling.max_tokens
    if length == 0:
        raise EngineError(f"request {index}: empty prompt")
    if length + new + turns > context:
        raise EngineError(
            f"request {index}: {length} prompt tokens and max_tokens {new}{f' + {turns}' if turns else ''} exceed the "
            f"context of {context}; lower rollout.max_tokens (with turns also .observation_tokens), or in an "
            "evaluation use eval.profile=custom with a smaller eval.max_tokens"
        )
    if max(request.prompt) >= vocabulary or min(request.prompt) < 0:
        raise EngineError(f"request {index}: a prompt token is outside the vocabulary of {vocabulary}")
    if request.turn_tokens is not None and request.turn_tokens < 1:
        raise EngineError(f"request {index}: turn_tokens must be at least 1, got {request.turn_tokens}")
    if not all(map(len, request.history)):
        raise EngineError(f"request {index}: a turn of its history has no tokens")
    if any(max(turn) >= vocabulary or min(turn) < 0 for turn in request.history):
        raise EngineError(f"request {index}: a token of its history is outside the vocabulary of {vocabulary}")
    if bad := [token for token in request.sampling.stop_token_ids if not 0 <= token < vocabulary]:
        raise EngineError(f"request {index}: stop_token_ids {bad} are outside the vocabulary of {vocabulary}")
    if request.strategy.writers != "senior" and not engine.has_junior:
        raise EngineError(f"request {index}: its strategy needs a junior and the engine has none; pass `junior`")
    if request.strategy.starts is not None and not engine.info.drops:
        raise EngineError(
            f"request {index}: its strategy (before_word) may drop what an author proposes, which this engine cannot "
            "do; use rollout.engine=torch with rollout.draft_tokens=0, or selection.strategy=word"
        )


def check_completion(completion: Completion) -> None:
    """Refuse a completion whose channels are missing, short or not finite, so that nothing trains on it by accident.

    Raises:
        EngineError: a channel is wrong; the message names the completion and the channel.
    """
    length = len(completion.tokens)
    for name in ("author", "behaviour_logprobs"):
        channel = getattr(completion, name)
        if channel is None or len(channel) != length:
            fault = "is missing" if channel is None else f"has {len(channel)} entries"
            raise EngineError(
                f"completion {completion.key}: {name} {fault} for {length} tokens. Without a full author channel "
                "training would silently become plain GRPO."
            )
    known = (0, 1) if completion.transcript is None else (-1, 0, 1)
    if length and not np.isin(completion.author, known).all():
        raise EngineError(f"completion {completion.key}: authors must be 0 (junior), 1 (senior) or -1 (between turns)")
    if completion.behaviour_logprobs[completion.author < 0].any():
        raise EngineError(f"completion {completion.key}: the observation has a log-prob other than 0")
    if not np.isfinite(completion.behaviour_logprobs).all():
        raise EngineError(f"completion {completion.key}: behaviour_logprobs are not finite")
    told = completion.handover_logprobs
    if told is not None and not (len(told) == length and np.isfinite(told).all()):
        raise EngineError(f"completion {completion.key}: handover_logprobs are not {length} finite numbers")


def check_answers(requests: Sequence[Request], completions: Sequence[Sequence[Completion]], version: int) -> None:
    """Refuse completions that are missing, stand under another request's prompt, were aborted, or are from other
    weights.

    Args:
        version: of the weights when the call began.

    Raises:
        EngineError: a completion must not be used; the message names the request.
    """
    if len(completions) != len(requests):
        raise EngineError(f"the engine returned {len(completions)} groups for {len(requests)} requests")
    for i, (request, group) in enumerate(zip(requests, completions, strict=True)):
        keys = tuple(completion.key for completion in group)
        if keys != request.keys:
            raise EngineError(f"request {i}: the engine returned completions of the keys {keys}, not {request.keys}")
        for completion in group:
            if completion.stop_reason == "abort":
                raise EngineError(f"request {i}: completion {completion.key} was aborted; it is not complete")
            if completion.policy_version != version:
                raise EngineError(
                    f"request {i}: completion {completion.key} is from policy version {completion.policy_version}, the "
                    f"engine is at {version}"
                )


class Draws(NamedTuple):
    """How many author draws some completions took, and how many of them fell to the senior."""

    total: int
    senior: int


def check_authors(
    completions: Sequence[Completion], strategy: Strategy, histories: Sequence[Sequence[Sequence[int]]] | None = None
) -> Draws:
    """Recompute every completion's authors from its key and own tokens alone, and compare with what the engine
    recorded. The environment's tokens are left out.

    Args:
        histories: for each completion, its request's ``history``. The draws made in it are counted again.

    Returns:
        The author draws of all completions.

    Raises:
        EngineError: the authors differ; the message names the completion and the first wrong token.
    """
    for completion in completions:
        check_completion(completion)
        if (completion.handover_logprobs is None) != (strategy.starts is None):
            raise EngineError(f"completion {completion.key}: it lacks handover_logprobs, or has some without starts")
    before = histories if histories is not None else [()] * len(completions)
    turns = [[*map(np.asarray, past), *c.turns] for past, c in zip(before, completions, strict=True)]
    expected = replay_turns(strategy, [c.key for c in completions], turns)
    for row, (completion, past) in enumerate(zip(completions, before, strict=True)):
        own = np.flatnonzero(completion.author >= 0)
        authors = expected.author[row, sum(map(len, past)) :][: len(own)].numpy()
        wrong = np.flatnonzero(authors != completion.author[own])
        if len(wrong):
            column = own[wrong[0]]
            raise EngineError(
                f"completion {completion.key}: token {column} is recorded as written by author "
                f"{completion.author[column]}, but replaying the strategy gives {authors[wrong[0]]} "
                f"({len(wrong)} tokens differ in all). The engine and the trainer disagree on who wrote what."
            )
    return Draws(int(expected.draws.sum()), int(expected.senior_draws.sum()))


def replay_turns(strategy: Strategy, keys: Sequence[int], turns: Sequence[Sequence[np.ndarray]]) -> Replay:
    """``selection.replay`` of completions that are given as the own tokens of each of their turns."""
    lengths = torch.tensor([sum(map(len, each)) for each in turns], dtype=torch.int64)
    width = int(lengths.max()) if len(turns) else 0
    tokens = torch.zeros(len(turns), width, dtype=torch.int64)
    starts = torch.zeros(len(turns), width, dtype=torch.bool)
    for row, each in enumerate(turns):
        if lengths[row]:
            tokens[row, : lengths[row]] = torch.as_tensor(np.concatenate(each).astype(np.int64))
        starts[row, [*accumulate(map(len, each))][:-1]] = True
    several = any(len(each) > 1 for each in turns)
    return replay(strategy, torch.tensor(keys, dtype=torch.int64), tokens, lengths, starts if several else None)


def generate_verified(
    engine: Engine,
    requests: Sequence[Request],
    strategy: Strategy,
    *,
    progress: OnProgress | None = None,
    responder: Responder | None = None,
) -> tuple[list[list[Completion]], Draws]:
    """Call ``engine.generate`` for requests of one strategy, and verify the completions and their authors.

    Raises:
        EngineError: a completion is missing, in another's place, aborted, from other weights or lacks a channel, or
            its authors are not those the strategy gives for its key.
    """
    version = engine.policy_version
    turns: dict[str, Any] = {} if responder is None else {"responder": responder}  # not every engine takes turns
    completions = engine.generate(requests, progress=progress, **turns)
    check_answers(requests, completions, version)
    histories = [request.history for request in requests for _ in request.keys]
    return completions, check_authors([*chain.from_iterable(completions)], strategy, histories)
