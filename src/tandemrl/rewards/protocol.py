"""What a scorer is: a function of a row and a response that returns a score, or says who has to find it out.

A scorer is ``(row, text, options) -> Score | Deferred``; one with a parameter ``transcript`` also gets what was said in
an episode, and is refused where there is none, unless the parameter has a default. It runs in the training process, so
it must be quick and bounded whatever the model wrote: strings and plain numbers. Everything else it defers to one of
four pools, which `scoring.Scorer` runs for a whole batch at once:

=========== ================================= ========================================= ===============================
kind        payload                           settled by                                outcome given to ``then``
=========== ================================= ========================================= ===============================
"symbolic"  ``("module:function", *strings)`` that function, in a child process that is what it returned (JSON), or
                                              killed after ``reward.timeout_s``         `Lost`
"function"  ``(call,)``                       ``call()``, in this process               what it returned
"code"      ``(row, text)``                   ``code(row, text)`` of the `Scorer`, in   a `Score`
                                              threads
"judge"     ``(row, text, rule)``             ``judge(payloads)`` of the `Scorer`, in   a `Score`
                                              one call for the whole batch
=========== ================================= ========================================= ===============================

``then`` turns the outcome into the score, or defers again: TinyV asks a judge only after PRIME's grader (``rule``) has
found its verdict. A score with the part ``timeout``, ``failure`` or ``unscored`` is counted as such in the metrics. A
pool that is broken (no sandbox, a judge that is down) raises; it never returns zeros.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, SupportsFloat

Pool = Literal["symbolic", "function", "code", "judge"]


class GraderError(RuntimeError):
    """Answers cannot be graded; the message says what to install or change."""


class Score(NamedTuple):
    """``value`` is the reward. ``parts``: ``acc`` and ``answer_present`` (0 or 1), and more by scorer; with the part
    ``unscored``, a judge gave no score, and the value means nothing whatever the response was. ``answer`` is what was
    extracted from the text, None if nothing was."""

    value: float
    parts: dict[str, float]
    answer: str | None


class Lost(NamedTuple):
    """There is no outcome: the child process hung (``timeout``), or raised or died (``failure``)."""

    how: Literal["timeout", "failure"]
    why: str = ""


def _as_it_is(outcome: Any) -> "Score":
    assert isinstance(outcome, Score)
    return outcome


class Deferred(NamedTuple):
    """A score that a pool has to find out; see the module's table. Payloads are hashable for "symbolic": equal ones
    are settled once per batch."""

    kind: Pool
    payload: tuple[Any, ...]
    then: "Callable[[Any], Score | Deferred]" = _as_it_is


def number(value: Any) -> float:
    """A number of any library (NumPy, torch) as a float; a string is none.

    Raises:
        TypeError: it is no number.
    """
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)


ScorerFunction = Callable[..., Score | Deferred]
"""``(row, text, options)``, and ``transcript``."""
