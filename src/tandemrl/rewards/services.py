"""The services that scorers defer to, of whatever task they are: a sandbox for programs, and a judge."""

from typing import Any

from tandemrl.config import Config
from tandemrl.processes.names import import_object

CODE = "tandemrl.tasks.code.grader:code_scorer"
JUDGE = "tandemrl.tasks.rubric.judge:judge_pool"


def code_scorer(config: Config) -> Any:
    """What scores a row whose ground truth are tests of a program, with the settings ``sandbox.*``."""
    return import_object(CODE)(config)


def judges(config: Config, judge: Any = None) -> Any:
    """The judge of a config (`tasks.rubric.judge.JudgePool`), or None if it names none.

    Args:
        judge: one that is made already.

    Raises:
        JudgeError: the endpoint is down, or serves another model.
    """
    return None if judge is None and config.judge.url is None else import_object(JUDGE)(config.judge, judge)
