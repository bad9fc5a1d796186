"""The contract of a junior with a vocabulary of its own: text in, text out, a run of whole words at a time."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import EngineError, Passes, Request

SpanEnd = Literal["word", "eos", "length", "untranslatable", "failed"]
"""How a span ended: right before a word of the senior, with the text, at a limit of tokens; or it does not count, since
what the senior has written before cannot be read, or what the junior wrote is no text, or it wrote nothing usable."""


class Ask(NamedTuple):
    """The junior is to go on with a text, as many words as the draws give it.

    number: the completion. text: its turn so far. room: how many tokens the turn may still have, in the senior's
    vocabulary. words: for a partner that ``counts``, how many words the draws give the junior; None: those up to the
    end of a step (``selection.words.step_words``).
    """

    number: int
    text: bytes
    room: int
    words: int | None = 0


class Ended(NamedTuple):
    """A turn that has ended, and how the next one begins for the junior.

    number: the completion. text: the whole turn. by_token: whether a token ended it, not a limit. context: see
    ``Reply.junior_context``.
    """

    number: int
    text: bytes
    by_token: bool
    context: Sequence[int]


class Span(NamedTuple):
    """What the junior wrote. The end of the turn itself is no part of ``text``."""

    number: int
    text: bytes
    end: SpanEnd


@runtime_checkable
class Partner(Protocol):
    """A junior, for one call of ``generate``. counts: whether it does not draw authors itself, and has to be told how
    many words to write, or that it is to finish a step."""

    counts: bool

    @property
    def passes(self) -> Passes:
        """What the spans cost so far, in forward passes of ``junior``, or in ``asks``."""
        ...

    def extend(self, requests: Sequence[Request], total: int) -> None:
        """Hear of further requests of the call, with ``total`` completions in all.

        Raises:
            EngineError: a request asks for what it cannot do.
        """
        ...

    def held(self) -> set[int]:
        """The numbers of the completions that it has not dropped yet."""
        ...

    def release(self, numbers: Iterable[int]) -> None:
        """Forget completions that have ended: their numbers may stand for others."""
        ...

    def admit(self, rows: Sequence[Row]) -> None:
        """Hear of completions that begin. Those that the junior begins are asked for next."""
        ...

    def ask(self, asks: Sequence[Ask]) -> None:
        """Begin to write spans, and return without waiting for them."""
        ...

    def resume(self, turns: Sequence[Ended]) -> list[int]:
        """Begin the next turn of some completions. Those that the junior begins are asked for next.

        Returns:
            the completions whose last turn the junior cannot read.
        """
        ...

    def spans(self, *, wait: bool) -> list[Span]:
        """The spans that are ready. Each is returned once.

        Args:
            wait: there is nothing else to do; return at least one if any was asked for.
        """
        ...

    def forget(self, numbers: Iterable[int]) -> None:
        """Hear of completions that have ended. No span of theirs is returned any more."""
        ...


MakePartner = Callable[[Sequence[Request], int], Partner]
"""(the requests of a call, how many completions they ask for) -> the partner of this call."""


def check_untranslatable(reasons: Collection[str], share: float, error: type[Exception]) -> int:
    """How many texts ended as ``untranslatable``: no more than ``share``, but for chance (6σ).

    Args:
        reasons: the stop reason of every text.
        error: what is raised if there are more.
    """
    total, lost = len(reasons), sum(reason == "untranslatable" for reason in reasons)
    if lost > total * share + 6 * math.sqrt(total * share * (1 - share)):
        raise error(
            f"{lost} of {total} texts are untranslatable, more than selection.max_untranslatable={share:g}: one model "
            "writes what the other's tokenizer reads as another text or other words (cut characters, special tokens, "
            "accents). Choose a junior whose tokenizer suits the senior's (tandemrl check --senior S --junior J), "
            "lower rollout.temperature, or raise the limit: what is left out biases the gradient, and counts as wrong "
            "in evaluations"
        )
    return lost


def check_partnered(index: int, request: Request, *, apart: bool) -> None:
    """Refuse a request that does not suit an engine whose junior has a vocabulary of its own, or has none.

    Args:
        apart: whether it has one.

    Raises:
        EngineError: the message names the request and what works instead.
    """
    strategy, s = request.strategy, request.sampling
    by_text = strategy.removed is not None
    if not apart or (strategy.writers == "senior" and not by_text):
        if by_text:
            raise EngineError(
                f"request {index}: its strategy is for two vocabularies, and this engine has one; use before_word"
            )
        return
    if not by_text:
        raise EngineError(
            f"request {index}: junior and senior have two vocabularies, and its strategy looks at tokens of both; use "
            "selection.strategy=before_word, or a junior of the senior's tokenizer family"
        )
    if not request.junior_prompt:
        raise EngineError(f"request {index}: no prompt for the junior, which has another vocabulary; set junior_prompt")
    if s.stop_token_ids or s.ignore_eos:
        raise EngineError(
            f"request {index}: with a junior of another vocabulary a turn ends by EOS, a stop string or a limit on "
            "tokens; leave out stop ids and ignore_eos"
        )
