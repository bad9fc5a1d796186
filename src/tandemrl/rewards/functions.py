"""Reward functions of a user's own, and weighted sums of rewards. Imports no torch.

A reward function is ``(row, text) -> Score | float``; a third parameter, ``options``, gets the `RewardConfig`. One that
``reward.scorers`` names as ``module:function`` runs in the killable child processes. One that is given to
``train(reward=…)`` runs in the training process: it may be a closure, and it has to be quick. A plain number x stands
for a `Score` whose ``acc`` (is the response correct?) is 1 from x = 1 on, and else 0.
"""

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, GraderError, Lost, Score, ScorerFunction, number

RewardFunction = Callable[..., Score | float]
"""``(row, text)`` or ``(row, text, options)``."""
METRICS = ("mean", "std")
"""``reward/mean`` and ``reward/std`` are statistics of the reward; no part of a score may take their place."""
RESERVED = (*METRICS, "acc", "answer_present", "timeout", "failure", "unscored")
"""Parts of every score: no reward may go by their names."""


class Term(NamedTuple):
    """One reward of a row, which counts ``weight`` times."""

    name: str
    weight: float
    score: ScorerFunction


def weighted(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """Σ weight · value. ``acc``, the answer and equally named parts are those of the first reward. The value of each
    reward, before weighting, is a part under its name; a part of that name moves to ``NAME/part``.

    Example:
        >>> terms = [Term("boxed", 1.0, in_process("", max)), Term("brevity", 0.2, in_process("", max))]
        >>> weighted(terms, [Score(1.0, {"acc": 1.0}, "7"), Score(0.5, {"acc": 0.0}, None)])
        Score(value=1.1, parts={'acc': 1.0, 'boxed': 1.0, 'brevity': 0.5}, answer='7')
    """
    if len(terms) == 1 and terms[0].weight == 1.0:
        return scores[0]
    values = {term.name: score.value for term, score in zip(terms, scores, strict=True)}
    parts: dict[str, float] = {}
    for score in reversed(scores):
        parts |= {f"{part}/part" if part in values else part: value for part, value in score.parts.items()}
    return Score(sum(term.weight * values[term.name] for term in terms), parts | values, scores[0].answer)


def by_name(reward: RewardFunction | Mapping[str, Any] | None) -> dict[str, RewardFunction]:
    """Reward functions by name. A single one goes by its own name, or as ``reward`` if it has none (a lambda).

    Raises:
        GraderError: something is not a function, or cannot be called with ``(row, text)``; names it.
    """
    if reward is None:
        return {}
    if not isinstance(reward, Mapping):
        name = getattr(reward, "__name__", "")
        reward = {name if name.isidentifier() else "reward": reward}
    if not reward:
        raise GraderError("reward={}: no function; leave it out to score by the rows' data_source")
    for name, function in reward.items():
        if not callable(function):
            raise GraderError(
                f"reward {name}: {function!r} is a {type(function).__name__}, not a function; one that is named "
                "module:function belongs in reward.scorers"
            )
        takes_options(function, name)
    return dict(reward)


def in_process(name: str, function: RewardFunction) -> ScorerFunction:
    """A scorer that calls the function in this process. What it raises stops the run."""
    optional = takes_options(function, name)

    def score(row: Row, text: str, options: RewardConfig) -> Deferred:
        def call() -> Any:
            try:
                return function(row, text, options) if optional else function(row, text)
            except Exception as error:
                raise GraderError(f"reward {name}, row {row.example_id}: {type(error).__name__}: {error}") from error

        return Deferred("function", (call,), lambda result: checked(result, f"reward {name}", row))

    return score


def in_child(path: str) -> ScorerFunction:
    """A scorer that calls ``module:function`` in a child process. An error in it stops the run. Where it hangs or
    crashes, the reward is 0 and counted as lost.

    Raises:
        GraderError: it cannot be imported.
    """
    optional = takes_options(imported(path), path)

    def score(row: Row, text: str, options: RewardConfig) -> Deferred:
        def then(result: Any) -> Score:
            if not isinstance(result, Lost):
                return checked(result, path, row)
            if result.why:
                raise GraderError(f"{path}, row {row.example_id}: {result.why}")
            return Score(0.0, {"acc": 0.0, "answer_present": 0.0, result.how: 1.0}, None)

        return Deferred("symbolic", (path, row, text, options) if optional else (path, row, text), then)

    return score


def takes_options(function: Callable[..., Any], name: str) -> bool:
    """Whether it is called as ``(row, text, options)``, not as ``(row, text)``.

    Raises:
        GraderError: it can be called as neither.
    """
    try:
        parameters = inspect.signature(function)
    except ValueError:  # some functions written in C do not say
        return False
    for count in (3, 2) if "options" in parameters.parameters else (2, 3):
        try:
            parameters.bind(*[None] * count)
        except TypeError:
            continue
        return count == 3
    raise GraderError(f"reward {name}: its parameters are {parameters}; expected (row, text) or (row, text, options)")


def checked(result: Any, name: str, row: Row) -> Score:
    """What a reward function returned, as a score.

    Raises:
        GraderError: it is neither a finite number nor a usable `Score`.
    """
    try:
        if isinstance(result, tuple | list):
            value, parts, answer = result
            score = Score(number(value), {str(part): number(x) for part, x in parts.items()}, answer)
        else:
            value = number(result)
            score = Score(value, {"acc": float(value >= 1.0)}, None)
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
        usable = False
    else:
        usable = all(map(math.isfinite, (score.value, *score.parts.values())))
        usable = usable and "acc" in score.parts and not any(part in METRICS for part in score.parts)
        usable = usable and (score.answer is None or isinstance(score.answer, str))
    if not usable:
        raise GraderError(
            f"{name}, row {row.example_id}: expected a finite number, or Score(value, parts, answer) with finite "
            "numbers, acc (0 or 1) and neither mean nor std among the parts, and a string or None as the answer; found "
            f"{str(result)[:200]}"
        )
    return score


def call(path: str, *arguments: Any) -> Any:
    """What the function ``module:function`` returns, as it comes out of a child process."""
    return imported(path)(*arguments)


def imported(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules in the working directory are found too.

    Raises:
        GraderError: there is none, or importing it failed.
    """
    module, _, function = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        attribute = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise GraderError(f"reward.scorers: {path}: {type(error).__name__}: {error}") from error
    if not callable(attribute):
        raise GraderError(f"reward.scorers: {path} is a {type(attribute).__name__}, not a function")
    return attribute
