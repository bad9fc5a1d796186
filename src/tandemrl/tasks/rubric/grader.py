"""The rewards of a judge, and of a judge that is trained."""

from collections.abc import Callable
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, Score
from tandemrl.tasks.math.prime import prime
from tandemrl.tasks.rubric.judge import grade_score


def judged(row: Row, text: str, options: RewardConfig, written: str) -> Score | Deferred:
    """The score of a judge, which reads the text as written after PRIME's grader has given its verdict."""
    return _follow(prime(row, text, options), lambda rule: Deferred("judge", (row, written, rule)))


def graded(row: Row, text: str, options: RewardConfig, written: str, opened: str) -> Score:
    """The reward of a judge that is trained. A thought that the chat template opens may not be over."""
    return grade_score(row, opened + written, options)


def _follow(first: Any, then: Callable[[Score], Score | Deferred]) -> Score | Deferred:
    """Apply ``then`` to a score, now or as soon as a deferred score is found."""
    if isinstance(first, Score):
        return then(first)
    return first._replace(then=lambda outcome: _follow(first.then(outcome), then))
