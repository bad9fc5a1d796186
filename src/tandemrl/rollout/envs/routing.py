"""From a row's ``data_source`` to the function that scores it.

A scorer is named by a word of `SCORERS`, or by ``module:function`` of your own: a function ``(row, text, options) ->
Score`` that runs in the killable child processes (4 GiB of address space). ``reward.scorers`` maps patterns of data
sources to either and is looked up first; then come suffixes (`SUFFIXES`), then `TABLE`. Patterns with a capital letter
are matched as written, others without regard to case.
"""

import fnmatch
import importlib
import math as numeric
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs import answers, countdown, math, prime, rubric
from tandemrl.rollout.envs.code import parse_tests
from tandemrl.rollout.envs.protocol import Deferred, GraderError, Lost, Score, ScorerFunction


def code(row: Row, text: str, options: RewardConfig) -> Deferred:
    """The share of the row's tests that the program in the response passes, in a sandbox.

    Raises:
        DataError: the ground truth holds no tests.
    """
    parse_tests(row)
    return Deferred("code", (row, text))


def judged(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """A judge's opinion, after PRIME's grader has given its own."""
    return follow(prime.prime(row, text, options), lambda rule: Deferred("judge", (row, text, rule)))


def follow(first: Score | Deferred, then: Callable[[Score], Score | Deferred]) -> Score | Deferred:
    """``then`` of a score, now or when it is there."""
    if isinstance(first, Score):
        return then(first)
    return first._replace(then=lambda outcome: follow(first.then(outcome), then))


SCORERS: dict[str, ScorerFunction] = {
    "boxed": math.boxed,
    "hendrycks": math.hendrycks,
    "dapo": math.dapo,
    "dapo_boxed": math.dapo_boxed,
    "math_verify": math.math_verified,
    "prime": prime.prime,
    "gsm8k": answers.gsm8k,
    "countdown": countdown.countdown,
    "integer": answers.integer,
    "exact_match": answers.exact_match,
    "code": code,
    "judge": judged,
    "grade": rubric.grade_score,
}

SUFFIXES: dict[str, str] = {"*_tinyv*": "judge", "*_mathverify*": "math_verify", "*_prime*": "prime"}
"""As in TinyV: how to verify, whatever the data."""

TABLE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "synthetic/*": "boxed",
    "deepscaler*": "boxed",
    "agentica-org/deepscaler*": "boxed",
    "math_dapo*": "dapo",
    "OLYMPIAD_BENCH": "prime",
    "MINERVA": "prime",
    "MATH": "prime",
    "AMC": "prime",
    "AIME": "prime",
    "math": "boxed",
    "math500": "boxed",
    "math-500": "boxed",
    "huggingfaceh4/math-500": "boxed",
    "lighteval/math": "boxed",
    "digitallearninggmbh/math-lighteval": "boxed",
    "*hendrycks_math": "boxed",
    "aime*": "boxed",
    "amc*": "boxed",
    "math-ai/*": "boxed",
    "matharena/*": "boxed",
    "minerva*": "boxed",
    "olympiad*": "boxed",
    "gaokao*": "boxed",
    "college_math": "boxed",
    "*hardverify-math*": "judge",
    "numina_*": "prime",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "*humaneval*": "code",
    "grade": "grade",
    "*countdown*": "countdown",
    "*multiply*": "integer",
    "*arithmetic*": "integer",
    "searchr1_*": "exact_match",
}
"""The library's choice by data source; first match."""

COMPAT: dict[str, dict[str, str]] = {
    "verl": {
        "math": "dapo",
        "aime*": "dapo",
        "lighteval/math": "hendrycks",
        "digitallearninggmbh/math-lighteval": "hendrycks",
        "huggingfaceh4/math-500": "hendrycks",
    }
}
"""What ``reward.compat`` puts before `TABLE`."""


def scorer_of(row: Row, options: RewardConfig) -> ScorerFunction:
    """The function that scores a row's responses.

    Raises:
        DataError: none is known; lists the known names.
        GraderError: ``reward.scorers`` names something that cannot be imported.
    """
    name = _find(row.data_source, options.scorers)
    for table in () if name else (SUFFIXES, COMPAT.get(options.compat, {}), TABLE):
        name = name or _find(row.data_source, table)
    if name is None:
        raise DataError(
            f"row {row.example_id}: no scorer for data_source {row.data_source!r}; name one in reward.scorers, as "
            f"{{{row.data_source}: NAME}} with NAME=module:function or one of {', '.join(SCORERS)}; or rename the data "
            f"source to one of {', '.join([*TABLE, *SUFFIXES])}"
        )
    if name in SCORERS:
        return SCORERS[name]
    imported(name)
    return _in_a_child(name)


def score_text(row: Row, text: str, options: RewardConfig | None = None) -> Score:
    r"""Score one response here and now. May run for ever on hostile LaTeX: see `scoring.Scorer`.

    Raises:
        DataError: no scorer is known for the row's ``data_source``.
        GraderError: math-verify is needed and not installed, or the row needs a sandbox or a judge.

    Example:
        >>> score_text(Row("a", (), "math500", r"\frac{1}{2}", {}), r"So it is \boxed{0.5}.").value
        1.0
    """
    options = options or RewardConfig()
    found = scorer_of(row, options)(row, text, options)
    while isinstance(found, Deferred):
        if found.kind != "symbolic":
            raise GraderError(f"row {row.example_id}: data_source {row.data_source!r} is scored by a Scorer only")
        found = found.then(call(*found.payload))
    return found


def call(path: str, *arguments: Any) -> Any:
    """What the function ``module:function`` returns, as it comes out of a child process."""
    return imported(path)(*arguments)


def imported(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules in the working directory are found too.

    Raises:
        GraderError: there is none, or importing it failed.
    """
    module, colon, function = path.partition(":")
    if not colon:
        raise GraderError(
            f"reward.scorers: {path!r} is neither module:function nor one of the library's scorers, which are "
            f"{', '.join(SCORERS)}"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a user's module may raise anything
        raise GraderError(f"reward.scorers: {path}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise GraderError(f"reward.scorers: {path} is a {type(found).__name__}, not a function")
    return found


@cache
def _in_a_child(path: str) -> ScorerFunction:
    def score(row: Row, text: str, options: RewardConfig) -> Deferred:
        return Deferred("symbolic", (path, row, text, options), lambda found: _users_score(found, path, row))

    return score


def _users_score(found: Any, path: str, row: Row) -> Score:
    """What a user's scorer returned, checked. An error in it stops the run; a hang or crash scores 0 and is counted."""
    if isinstance(found, Lost):
        if found.why:
            raise GraderError(f"{path}, row {row.example_id}: {found.why}")
        return Score(0.0, {"acc": 0.0, "answer_present": 0.0, found.how: 1.0}, None)
    try:
        value, parts, answer = found
        score = Score(float(value), {str(name): float(part) for name, part in parts.items()}, answer)
        usable = numeric.isfinite(score.value) and all(map(numeric.isfinite, score.parts.values()))
        usable = usable and "acc" in score.parts and (answer is None or isinstance(answer, str))
    except (TypeError, ValueError, AttributeError):
        usable = False
    if not usable:
        raise GraderError(
            f"{path}, row {row.example_id}: expected Score(value, parts, answer) with finite numbers, and acc (0 or 1) "
            f"among the parts; found {str(found)[:200]}"
        )
    return score


def _find(data_source: str, table: Mapping[str, str]) -> str | None:
    for pattern, name in table.items():
        source = data_source.strip() if pattern != pattern.lower() else data_source.strip().lower()
        if fnmatch.fnmatchcase(source, pattern):
            return name
    return None
