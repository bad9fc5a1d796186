"""The engine contract: tokens in, tokens, authors and the authors' log-probs out. Every engine obeys it."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tandemrl.selection import Replay, Strategy, Who, replay
from tandemrl.types import Transcript, own_turns

StopReason = Literal["eos", "stop", "length", "turns", "abort"]
"""Why a completion ended. ``turns``: the environment allows no further one."""


class EngineError(RuntimeError):
    """An engine cannot serve a request, or broke its contract. The message names the culprit and the fix."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn from its author's logits; the same knobs, in the same order, in every engine.

    Order (vLLM's): penalties, temperature, min_p, top_k, top_p; the kept tokens are renormalised. ``temperature`` 0 is
    greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch truncation off. ``stop`` strings are kept in the text, as
    are stop ids and EOS. ``repetition_penalty`` counts prompt and output; the other two count output only. To a further
    turn all that was before it is its prompt: stop strings and those two see its own tokens alone.

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
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or a positive number"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            "repetition_penalty": (self.repetition_penalty > 0.0, "positive"),
        }
        for name, (ok, allowed) in bounds.items():
            if not ok:
                raise ValueError(f"sampling.{name} must be {allowed}, got {getattr(self, name)}")

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p removes tokens from the distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """Write ``len(keys)`` completions of one prompt. Each key (see ``selection.draws.request_key``) seeds one
    completion: its author draws and its sampling draws. Prompt ids are used as they are, never re-tokenised.

    Of a completion of several turns (``generate`` with a ``Responder``), ``sampling.max_tokens`` bounds the own tokens
    of all of them; ``turn_tokens``, where there is one, those of each; ``world_tokens`` what is said in between.

    ``history``: the own tokens of each turn that was written before, under the same key; ``prompt`` contains them.
    Strategy and sampling counters go on where they were, so that several requests write what one with a ``Responder``
    would have. ``task`` is for the ``Responder`` alone.
    """

    prompt: Sequence[int]
    keys: tuple[int, ...]
    sampling: Sampling
    strategy: Strategy
    turn_tokens: int | None = None
    world_tokens: int = 0
    history: tuple[tuple[int, ...], ...] = ()
    task: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What follows the prompt: generated tokens and, between turns, what the world said. All three channels have the
    same length.

    author: 0 junior, 1 senior, -1 the world. behaviour_logprobs: float32 nats, of each token under its author's
    sampling distribution (after penalties, temperature and truncation, renormalised; 0.0 when greedy, and for the
    world's). transcript: what the ``Responder`` has to say of it, None without one.
    """

    key: int
    tokens: np.ndarray
    author: np.ndarray
    behaviour_logprobs: np.ndarray
    stop_reason: StopReason
    policy_version: int = 0
    transcript: Transcript | None = None

    @property
    def turns(self) -> list[np.ndarray]:
        """The own tokens of each turn."""
        return own_turns(self.tokens, self.author)

    @property
    def authorship_mask(self) -> np.ndarray:
        """The original's name for ``author``: 1 where the senior wrote the token."""
        return self.author


class Turn(NamedTuple):
    """A turn that its author ended: by an EOS or stop token, which is its last one, or by a limit (``length``)."""

    number: int
    """Of the completion, among all keys of all requests of the call, in order."""
    task: Any
    """``Request.task``."""
    index: int  # type: ignore[assignment]  # instead of the method of tuples
    """0: the first turn of the completion in this call."""
    tokens: np.ndarray
    """Own tokens of this turn."""
    stop_reason: StopReason


class Reply(NamedTuple):
    """What the world says after a turn: the next one follows it. Without ``context`` the completion is over."""

    number: int
    context: tuple[int, ...] = ()
    stop_reason: StopReason | None = None
    """Why it is over, if it is not for how the last turn ended."""


@runtime_checkable
class Responder(Protocol):
    """The world that authors take turns with, for one call of ``generate``; see ``rollout.envs.episodes``.

    The engine goes on with other rows while an answer is awaited. The order in which answers come changes no token.
    """

    def submit(self, turn: Turn) -> None:
        """Begin to answer a turn; returns at once."""
        ...

    def replies(self, *, wait: bool) -> list[Reply]:
        """The answers that are ready, each once. ``wait``: at least one, however long it takes.

        Raises:
            EngineError: the world is broken; the call of ``generate`` ends with it.
        """
        ...

    def transcript(self, number: int) -> Transcript:
        """Of a completion that has ended, whoever ended it."""
        ...


class EngineInfo(NamedTuple):
    """What an engine reports about itself."""

    name: str
    dtype: str
    """Of the weights, as torch names it; weights are compared in it."""
    adapters: bool = False
    """The senior is adapters on the junior's weights: ``load_weights`` takes them alone, and its fingerprint is over
    them and the base, under the trainer's names."""


class Passes(NamedTuple):
    """What a ``generate`` cost. A forward of a model counts once for each row in it, however many tokens of the row it
    reads; prompts, and what the world says, are left out."""

    tokens: int = 0
    """Own tokens of all completions."""
    senior: int = 0
    junior: int = 0
    drafted: int = 0
    """Tokens that the junior drafted where the senior is the author, up to the first one in a draft that the senior
    draws otherwise."""
    accepted: int = 0
    """Those of them that the senior draws, too."""

    @property
    def acceptance(self) -> float | None:
        """How often both models draw the same token where the senior writes; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def __add__(self, other: "Passes") -> "Passes":  # type: ignore[override]  # not tuple + tuple
        return Passes(*(a + b for a, b in zip(self, other, strict=True)))


@runtime_checkable
class Engine(Protocol):
    """Tokens in, tokens out. Engines are synchronous: ``generate`` returns when all completions are finished."""

    policy_version: int
    passes: Passes
    """Of the last ``generate``; all 0 in an engine that does not count."""
    vocabulary: int
    """Token ids below this can be written: the smaller of the two LM heads."""
    has_junior: bool

    @property
    def info(self) -> EngineInfo: ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        """Completions in the order of the requests, one per key. ``progress(k)`` is called after k new tokens.

        With a ``responder`` every ended turn is submitted to it, and a reply with context is followed by another turn:
        of ``turn_tokens`` at most, while own tokens are left of ``max_tokens`` and the context fits ``world_tokens``;
        else the completion ends there, by ``length``, without that context. A limit on tokens ends a turn like an EOS
        does, and the reply tells what the author did not write of its end.

        Raises:
            EngineError: a request asks for something this engine lacks, or does not fit its context.
        """
        ...

    def abort(self, keys: Iterable[int] | None = None) -> None:
        """End the named completions (None: all) that are in flight, at the next token, with ``stop_reason="abort"``.
        Where every one of them waits for the world, that is at its next answer.

        Thread-safe. It reaches the ``generate`` that is running, not a later one.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the senior's weights in place. The junior is never touched."""
        ...

    def fingerprint(self, who: Who = "senior") -> int:
        """An integer checksum of the weights this engine decodes with (see ``rollout.sync.fingerprint``)."""
        ...

    def close(self) -> None:
        """Give back processes and memory that the engine holds itself; it is of no further use."""
        ...


class Aborts:
    """The completions of the running ``generate`` that are to end at their next token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[int] | None = set()  # None: all

    def __bool__(self) -> bool:
        return self._keys != set()

    def __contains__(self, key: int) -> bool:
        return (keys := self._keys) is None or key in keys

    def add(self, keys: Iterable[int] | None) -> None:
        """None: all."""
        with self._lock:
            self._keys = None if keys is None or self._keys is None else self._keys | set(keys)

    def clear(self) -> None:
        with self._lock:
            self._keys = set()


def check_request(index: int, request: Request, *, vocabulary: int, context: int, has_junior: bool) -> None:
    """Refuse what an engine cannot serve, before anything is decoded.

    Raises:
        EngineError: names the request and what is wrong with it.
    """
    length, new = len(request.prompt), request.sampling.max_tokens + request.world_tokens
    if length == 0:
        raise EngineError(f"request {index}: empty prompt")
    if length + new > context:
        raise EngineError(
            f"request {index}: {length} prompt tokens and max_tokens {new} exceed the context of {context}; lower "
            "rollout.max_tokens (with turns also rollout.world_tokens), or in an evaluation use eval.profile=custom "
            "with a smaller eval.max_tokens"
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
    if request.strategy.writers != "senior" and not has_junior:
        raise EngineError(f"request {index}: its strategy needs a junior and the engine has none; pass `junior`")


def check_completion(completion: Completion) -> None:
    """Refuse a completion whose channels are missing, short or not finite: nothing may train on it by accident.

    Raises:
        EngineError: names the completion and the channel.
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
        raise EngineError(
            f"completion {completion.key}: authors must be 0 (junior) or 1 (senior), or -1 between turns of an episode"
        )
    if length and completion.behaviour_logprobs[completion.author < 0].any():
        raise EngineError(f"completion {completion.key}: what the world says has no log-prob but 0")
    if length and not np.isfinite(completion.behaviour_logprobs).all():
        raise EngineError(f"completion {completion.key}: behaviour_logprobs are not finite")


def check_answers(requests: Sequence[Request], completions: Sequence[Sequence[Completion]], version: int) -> None:
    """Completions under another prompt, cut off by an abort, or from other weights must not be used.

    Raises:
        EngineError: names the request.
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
    """Author draws of some completions, and how many of them fell to the senior."""

    total: int
    senior: int


def check_authors(
    completions: Sequence[Completion], strategy: Strategy, histories: Sequence[Sequence[Sequence[int]]] | None = None
) -> Draws:
    """Recompute every completion's authors from its key and own tokens alone, and compare with what the engine
    recorded. What the world says is left out.

    Args:
        histories: per completion its request's ``history``; its draws are counted again.

    Raises:
        EngineError: they differ; names the completion and the first wrong token.
    """
    for completion in completions:
        check_completion(completion)
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
    """``replay`` of completions given as the own tokens of their turns."""
    lengths = torch.tensor([sum(map(len, each)) for each in turns], dtype=torch.int64)
    width = int(lengths.max()) if len(turns) else 0
    tokens = torch.zeros(len(turns), width, dtype=torch.int64)
    starts = torch.zeros(len(turns), width, dtype=torch.bool)
    for row, each in enumerate(turns):
        if lengths[row]:
            tokens[row, : lengths[row]] = torch.as_tensor(np.concatenate(each).astype(np.int64))
        for start in [*accumulate(map(len, each))][:-1]:
            starts[row, start] = True
    several = any(len(each) > 1 for each in turns)
    return replay(strategy, torch.tensor(keys, dtype=torch.int64), tokens, lengths, starts if several else None)


def generate_verified(
    engine: Engine,
    requests: Sequence[Request],
    strategy: Strategy,
    *,
    progress: Callable[[int], None] | None = None,
    responder: Responder | None = None,
) -> tuple[list[list[Completion]], Draws]:
    """``engine.generate`` of requests of one strategy, whose answers and authors are proved.

    Raises:
        EngineError: a completion is missing, in another's place, aborted, from other weights or lacks a channel, or
            its authors are not those the strategy gives for its key.
    """
    version = engine.policy_version
    turns: dict[str, Any] = {} if responder is None else {"responder": responder}  # not every engine takes turns
    completions = engine.generate(requests, progress=progress, **turns)
    check_answers(requests, completions, version)
    histories = [request.history for request in requests for _ in request.keys]
    flat = [completion for group in completions for completion in group]
    return completions, check_authors(flat, strategy, histories)
