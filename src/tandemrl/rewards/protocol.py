"""What a scorer is: a function of a row and a response that returns a score, or defers it to a pool.

A scorer is ``(row, text, options) -> Score | Deferred``. The text is without special tokens, as published graders
expect it. If it has a parameter ``written``, it also gets the text as written, with the special tokens; ``opened``,
what the chat template wrote before that; ``transcript``, the transcript of an episode: without an episode it is
refused, unless the parameter has a default. A scorer runs in the training process, so whatever the model wrote, it must
be quick and bounded: it compares strings and plain numbers. Everything else it defers to one of four pools, which
`scoring.Scorer` runs for a whole batch at once:

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
given its verdict. A score with the part ``timeout``, ``failure`` or ``unscored`` is counted as such in the metrics. A
pool that is broken (no sandbox, a judge that is down) raises; it never returns zeros.

To add one to the library, write the function and its row in ``routing.SCORERS``. To add a reward that asks a service:
if a model grades, put a backend behind the protocol ``tasks.rubric.judge.Judge`` and make it in
``tasks.rubric.judge.judge_pool``; anything else is a function with a client such as ``processes.http.Client``. As
``module:function`` in ``reward.scorers`` it runs in child processes, several at once; a call that takes longer than
``reward.timeout_s`` gives 0 and counts as ``timeout``, so raise that. Passed as ``train(reward=…)`` it runs in this
process without a limit, one call after another.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsFloat

from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import Row

Pool = Literal["symbolic", "function", "code", "judge"]


class GraderError(RuntimeError):
    """Answers cannot be graded. The message says what to install or change."""


class Score(NamedTuple):
    """The score of one response.

    ``value`` is the reward. ``parts`` are ``acc`` and ``answer_present`` (0 or 1), and further numbers that depend on
    the scorer. If ``parts`` has ``unscored``, a judge gave no score, and the value is meaningless. ``answer`` is the
    answer that was extracted from the text, or None.
    """

    value: float
    parts: dict[str, float]
    answer: str | None

    @property
    def scored(self) -> bool:
        """False without a score: see `NO_SCORE`."""
        return not self.parts.get("unscored")


NO_SCORE = Score(0.0, {"acc": 0.0, "unscored": 1.0}, None)
"""What a function gives that says None, and a response that is lost (`rollout.engine.LOST`): there is no score.

In a sum, such a term is left out (`functions.weighted`). If all are, or a judge gave no score, `Score.scored` and
`types.Rollout.scored` are False: training leaves the rollout out, and its group if fewer than two remain
(`types.Group.scored`); evaluations count it as wrong. ``reward/unscored`` is their share. A step whose responses all
have none, by functions that said None, ends the run.
"""


class Item(NamedTuple):
    """A response to be scored, and the transcript of its episode."""

    row: Row
    response: Response
    transcript: Transcript | None = None


class TrainerState(NamedTuple):
    """How far a run has come, under the names of transformers' object. ``global_step``: the steps that are done."""

    global_step: int
    max_steps: int
    epoch: float
    num_train_epochs: int


class GroupScores(NamedTuple):
    """The scores of a function that is called once for all responses to a prompt, and what it logged.

    metrics: values by name. extra: by name a value for each response.
    """

    scores: list[Score]
    metrics: Mapping[str, Sequence[float]] = {}
    extra: Mapping[str, Sequence[Any]] = {}


class Lost(NamedTuple):
    """The outcome of a task whose child process hung (``timeout``), or raised or died (``failure``)."""

    how: Literal["timeout", "failure"]
    why: str = ""

    def score(self, answer: str | None = None) -> Score:
        """0 for the response, counted under ``how``."""
        return Score(0.0, {"acc": 0.0, "answer_present": float(answer is not None), self.how: 1.0}, answer)


class Deferred(NamedTuple):
    """A score that a pool has to find; see the table of the module.

    The payload of a "symbolic" task is hashable, and equal payloads are computed once per batch. responses: for how
    many responses, of one prompt, the task is; its time limit is so many times as long.
    """

    kind: Pool
    payload: tuple[Any, ...]
    then: "Callable[[Any], Score | GroupScores | Deferred]" = lambda outcome: outcome
    responses: int = 1


def number(value: Any) -> float:
    """A number of any library (NumPy, torch) as a float. A string is not a number.

    Raises:
        TypeError: ``value`` is not a number.
    """
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{type(value).__name__} is not a number")
    return float(value)


ScorerFunction = Callable[..., Score | Deferred]
"""A function of ``(row, text, options)``, and of ``transcript`` if it has this parameter."""
