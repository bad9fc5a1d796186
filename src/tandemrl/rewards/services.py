"""The services that scorers defer to, of whatever task they are: a sandbox for programs, and a judge. No torch here; a
judge in this process loads it."""

from typing import Any

from tandemrl.config import Config
from tandemrl.processes.names import import_object
from tandemrl.rewards.protocol import Judges

CODE = "tandemrl.tasks.code.grader:code_scorer"
JUDGE = "tandemrl.tasks.rubric.in_process:judge_pool"


def code_scorer(config: Config) -> Any:
    """What scores a row whose ground truth are tests of a program, with the settings ``sandbox.*``."""
    return import_object(CODE)(config)


def judges(config: Config) -> Judges | None:
    """The judge of a config, or None if it names none.

    Raises:
        JudgeError: the endpoint is down, or serves another model.
        ModelError: the model cannot be loaded.
    """
    if config.judge.url is None and config.judge.model is None:
        return None
    found: Judges | None = import_object(JUDGE)(config)
    return found
