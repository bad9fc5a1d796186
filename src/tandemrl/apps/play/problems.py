"""Problems whose answers are known, those that a pair was trained for first, and whether a text answers one of them."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tandemrl.apps.experiments.pair import read_manifest
from tandemrl.config import Config, load
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import RENDERED, Prompt, Row, with_suffix
from tandemrl.evals import Sample, grade, run_of_model
from tandemrl.rewards.functions import with_environment
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer
from tandemrl.rollout.envs.environment import Environment, make_environment
from tandemrl.tasks.generated.rows import generated_rows

EXAMPLE = Row(
    "example", ({"role": "user", "content": r"What is 2 + 3? Put the answer in \boxed{}."},), "math500", "5", {}
)
"""For models of which nothing is known."""
LIMIT = 32
"""How many problems there are."""
MAX_NEW = 256
"""Tokens after which a text stops at first. The page can continue it."""


class Verdict(NamedTuple):
    """Whether a text answers its problem: by the reward, as ``acc`` in training. ``answer``: what the scorer found."""

    correct: bool
    answer: str | None
    expected: str


class Problems:
    """Problems by prompt, and the scorer of their answers.

    Args:
        config: its ``reward`` and ``sandbox`` grade, and its ``data.prompt_suffix`` ends the prompts.
        environment: what the authors act in, if rows are episodes. On the page, their last message stands for them.

    Raises:
        ConfigError, DataError, GraderError: the rows cannot be scored here; see ``Scorer.check``.
    """

    def __init__(self, config: Config, rows: Iterable[Row], environment: Environment | None = None) -> None:
        asked = [(with_suffix(row, row.messages, config.data.prompt_suffix), row) for row in rows]
        self.rows = {messages[-1]["content"]: row for messages, row in asked}
        functions = with_environment({}, environment)
        self._scorer = Scorer(config.reward, code=code_scorer(config), functions=functions)
        self._scorer.check(self.rows.values(), stated=(), episodes=environment is not None)
        self.prompts = [*self.rows]

    def verdict(self, prompt: str, text: str | Response, transcript: Transcript | None = None) -> Verdict | None:
        """Whether a text answers its prompt. None if the prompt is no problem, or its scorer gave no score."""
        row = self.rows.get(prompt)
        if row is None:
            return None
        [score] = self._scorer.score([(row, text)], [transcript])
        if not score.scored:
            return None
        return Verdict(score.parts["acc"] == 1.0, score.answer, row.ground_truth)

    def graded(self, prompt: str) -> tuple[Row, Callable[[Sequence[Sample]], list[Sample]]]:
        """The row of a prompt, and what scores texts that answer it.

        Raises:
            ValueError: the prompt is no problem.
        """
        if (row := self.rows.get(prompt)) is None:
            raise ValueError("prompt: its answer is not known, so nothing can be scored; choose one of the problems")
        return row, partial(grade, prompts=[Prompt(row, ())], scorer=self._scorer)


def known_problems(senior: str) -> tuple[Config, Sequence[Row], Environment | None]:
    """The held-out problems of the run whose ``hf/`` holds a senior, with the run's config and what its authors act in,
    or those of its tiny pair. If there are none that the page can ask, it is `EXAMPLE`.

    Raises:
        ConfigError, DataError: the run's config or data cannot be read, or the pair has no such problems.
    """
    folder = Path(senior).resolve().parent
    config: Config = load()
    rows, environment = list[Row](), None
    if (run := run_of_model(senior)) is not None:
        config = load(run)
        environment = make_environment(config)
        if environment is not None or not config.has_episodes:  # else it was an object of a program
            rows = load_rows(config.data.eval or config.data.train, columns=config.data.columns)
    elif (manifest := read_manifest(folder)) is not None:
        rows = generated_rows(str(manifest.get("pair")), "heldout", LIMIT, 0)
    return config, [row for row in rows if environment or _is_plain(row)][:LIMIT] or [EXAMPLE], environment


def _is_plain(row: Row) -> bool:
    """Whether the page can ask a problem: by one message of a user."""
    return [message["role"] for message in row.messages] == ["user"] and not row.extra_info.get(RENDERED)
