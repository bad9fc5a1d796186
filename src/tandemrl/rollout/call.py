"""An open call of an engine: sequences join and leave it at any time. ``generate`` is a client of it, and so are the
server and ``tandemrl play``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from tandemrl.rollout.engine import Completion, Reply, Request, Responder, Turn


class NewTokens(NamedTuple):
    """Further tokens of a sequence, with their log-probs."""

    number: int
    tokens: list[int]
    logprobs: list[float]


class Finished(NamedTuple):
    """A sequence has ended; ``Call.take`` returns its completion."""

    number: int


Event = Turn | NewTokens | Finished
"""What a step brought. A ``Turn`` is in calls with turns only, and its sequence waits for ``Call.answer``."""


@runtime_checkable
class Call(Protocol):
    """Sequences that an engine is decoding. Nothing but ``abort`` may be called from two threads at once."""

    poll_every: int
    """Steps between two polls for answers."""
    steps: int
    """How many steps have decoded anything so far."""
    written: int
    """How many tokens were written so far, in all sequences."""

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Let sequences join, one for each key of each request. Returns their numbers, in this order.

        Raises:
            EngineError: a request asks for something this engine lacks; none of them joins.
        """
        ...

    def step(self) -> list[Event]:
        """Write the next tokens of all sequences that do not wait for an answer."""
        ...

    def answer(self, reply: Reply) -> None:
        """Answer the last turn of a sequence, which goes on with the next step.

        Raises:
            EngineError: it waits for no answer, or cannot read this one.
        """
        ...

    def abort(self, keys: Iterable[int] | None = None) -> None:
        """End sequences with the next step: all of them, or those with these request keys. Thread-safe."""
        ...

    def take(self, numbers: Sequence[int]) -> list[Completion]:
        """The completions of sequences that have ended. Their numbers may then stand for new sequences."""
        ...

    def close(self) -> None:
        """Give up what is left, and let others use the engine."""
        ...

    @property
    def awaits(self) -> bool:
        """Whether a sequence waits for an answer."""
        ...

    @property
    def idle(self) -> bool:
        """Whether no sequence is being decoded, though some may be about to join."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether a step could do nothing before an answer or another request comes."""
        ...


def run(
    call: Call,
    requests: Sequence[Request],
    *,
    progress: Callable[[int], None] | None = None,
    responder: Responder | None = None,
) -> list[list[Completion]]:
    """Write all completions of some requests; see ``Engine.generate``."""
    numbers = call.submit(requests)
    left, before = set(numbers), -1
    while left:
        steps, written = call.steps, call.written
        due = steps // call.poll_every > before // call.poll_every
        if responder is not None and call.awaits and (due or call.idle):
            for reply in responder.replies(wait=call.blocked):
                call.answer(reply)
        for event in call.step():
            if isinstance(event, Finished):
                left.remove(event.number)
            elif isinstance(event, Turn) and responder is not None:
                responder.submit(event)
        before = steps if call.steps > steps else before
        if progress is not None and call.steps > steps:
            progress(call.written - written)
    done = call.take(numbers)
    if responder is not None:
        done = [replace(c, transcript=responder.transcript(n)) for n, c in zip(numbers, done, strict=True)]
    completions = iter(done)
    return [[next(completions) for _ in request.keys] for request in requests]
