"""The contracts of those who write spans of a text by turns (``relay``), by tokens or by the text."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import EngineError, Passes, Request
from tandemrl.rollout.spans import Span


class Job(NamedTuple):
    """A row to go on with. tokens: its prompt and all that follows, in the writer's vocabulary. room: how many more it
    may have."""

    row: Row
    tokens: Sequence[int]
    room: int
    span: Span


class Written(NamedTuple):
    """Tokens of a span with their log-probs. over: the log-prob that its last word ends, where the proposal of the next
    one was dropped. whole: whether it is done."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    over: float | None = None
    whole: bool = True


@runtime_checkable
class Writer(Protocol):
    """A model that writes spans alone. Its length is how many it is writing, by the numbers of their rows."""

    def __len__(self) -> int: ...

    def __contains__(self, number: object) -> bool: ...

    def admit(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Hear of rows that begin, by number."""
        ...

    def begin(self, jobs: Sequence[Job]) -> None: ...

    def step(self) -> dict[int, Written]:
        """Make a step in all spans, and return by number what is known of them now."""
        ...

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        """Drop all rows but these. Those that wait are not being written."""
        ...


SpanEnd = Literal["word", "eos", "length", "untranslatable", "failed"]
"""How a text ended: right before a word of the senior, with its end, at a limit of tokens; or it does not count, since
what the senior has written before cannot be read, or what the junior wrote is no text, or it wrote nothing usable."""


class Ask(NamedTuple):
    """The junior is to go on with a text.

    number: of the row. text: its turn so far. room: how many tokens the turn may still have, in the senior's
    vocabulary. words: how many it is to write; None: those up to the end of a step (``selection.words.step_words``).
    """

    number: int
    text: bytes
    room: int
    words: int | None


class Ended(NamedTuple):
    """A turn that has ended, and how the next one begins for the junior.

    number: of the row. text: the whole turn. by_token: whether a token ended it, not a limit. context: see
    ``Reply.junior_context``.
    """

    number: int
    text: bytes
    by_token: bool
    context: Sequence[int]


class Said(NamedTuple):
    """What the junior wrote. The end of the turn itself is no part of ``text``."""

    number: int
    text: bytes
    end: SpanEnd


@runtime_checkable
class Partner(Protocol):
    """A junior with a vocabulary of its own: text in, text out. passes: what it cost so far, in forward passes of
    ``junior``, or in ``asks``."""

    passes: Passes

    def extend(self, requests: Sequence[Request]) -> None:
        """Hear of further requests of the call.

        Raises:
            EngineError: a request asks for what it cannot do.
        """
        ...

    def admit(self, rows: Sequence[Row]) -> None:
        """Hear of rows that begin."""
        ...

    def ask(self, asks: Sequence[Ask]) -> None:
        """Begin to write, and return without waiting."""
        ...

    def resume(self, turns: Sequence[Ended]) -> list[int]:
        """Begin the next turn of some rows. Returns those whose last turn the junior cannot read."""
        ...

    def spans(self, *, wait: bool) -> list[Said]:
        """What is ready. Each is returned once.

        Args:
            wait: there is nothing else to do; return at least one if any was asked for.
        """
        ...

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        """Drop all rows but these. Nothing is returned any more of one that is not live."""
        ...


MakePartner = Callable[[], Partner]
"""Makes the partner of a call."""


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


def refuse_penalties(index: int, request: Request) -> None:
    """Refuse penalties where two models write by spans.

    Raises:
        EngineError: the message names the request and what works instead.
    """
    if request.sampling.penalised:
        raise EngineError(
            f"request {index}: sampling with penalties: two models that write by spans each count the tokens of each "
            "span alone; leave out repetition_penalty, presence_penalty and frequency_penalty"
        )


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
    refuse_penalties(index, request)
    if s.stop_token_ids or s.ignore_eos:
        raise EngineError(
            f"request {index}: with a junior of another vocabulary a turn ends by EOS, a stop string or a limit on "
            "tokens; leave out stop ids and ignore_eos"
        )
