"""The tasks by name: what `tandemrl data build` makes, sources of generated rows, and graders that come with them.

To add a task, write a folder of `tasks/` and its row here. What a task has is named as ``module:name``, so that nothing
here imports it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Task(NamedTuple):
    """What a task has.

    about: what `data build` makes, in words. build: a function whose parameters are options of that command. fixed:
    other arguments of it. needs: options without a default. sets: evaluation sets, each in a folder of its own. rows: a
    function of (source, its parts) that gives the rows of a source ``NAME:…``. grader: a scorer, which has the name of
    the task and scores the data sources that match a pattern of ``graded``.
    """

    about: str
    build: str | None = None
    fixed: Mapping[str, Any] = MappingProxyType({})
    needs: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    rows: str | None = None
    grader: str | None = None
    graded: tuple[str, ...] = ()


def _task(about: str, build: str, fixed: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> Task:
    return Task(about, f"tandemrl.tasks.{build}", fixed, **more)


_CALCULATIONS = "countdown.rows:generate_calculations"
_BENCHMARK, _HOTPOT = "math.rows:build_benchmark", "qa.rows:build_hotpot"
_GYM, _ABOUT_GYM = "tandemrl.tasks.gym", "reasoning-gym's generators: a source gym:NAME:SPLIT:N"
_INSTRUCT = {"template": "instruct"}
TASKS: dict[str, Task] = {
    "gsm8k": _task("GSM8K: 6,973 training, 500 held-out and 1,319 test problems", "gsm8k.rows:build_gsm8k"),
    "synthetic": _task(
        "generated word problems for a tiny pair",
        "generated.rows:build_synthetic",
        rows="tandemrl.tasks.generated.rows:rows",
    ),
    "deepscaler": _task("DeepScaleR: 39,309 training and 1,000 held-out problems", "math.rows:build_deepscaler"),
    "countdown": _task(
        "Countdown with 3 or 4 numbers: TinyZero's, or --generate", "countdown.rows:build_countdown", _INSTRUCT
    ),
    "multiply": _task("generated products, as in TinyZero", _CALCULATIONS, _INSTRUCT | {"data_source": "multiply"}),
    "arithmetic": _task(
        "generated sums, differences and products", _CALCULATIONS, _INSTRUCT | {"data_source": "arithmetic"}
    ),
    "eurus": _task("Eurus-2-RL-Data: maths, and code with tests, if gradable", "code.rows:build_eurus"),
    "polaris": _task("problems with criteria, for the rrm configs", "rubric.rows:build_polaris", needs=("source",)),
    "rrm": _task("responses and scores, for rrm_train", "rubric.rows:build_rubric", needs=("source",)),
    "musique": _task("MuSiQue: 19,938 training, 2,417 validation questions", "qa.rows:build_musique"),
    "hotpotqa": _task("HotpotQA: 90,447 training, 7,405 validation questions", _HOTPOT, {"name": "hotpotqa"}),
    "2wikimultihopqa": _task("167,454 training, 12,576 validation questions", _HOTPOT, {"name": "2wikimultihopqa"}),
    "aime": _task("AIME 2024, 2025 and 2026, 30 each", _BENCHMARK, sets=("aime24", "aime25", "aime26")),
    "amc": _task("AMC 2023 to 2025: amc23_25, 121 problems", _BENCHMARK, sets=("amc23_25",)),
    "math500": _task("MATH-500: 500 problems", _BENCHMARK, sets=("math500",)),
    "minerva": _task("Minerva: 272 problems", _BENCHMARK, sets=("minerva",)),
    "olympiad": _task("Olympiad: 581 problems, from a file", _BENCHMARK, sets=("olympiad",)),
    "eval-all": _task("the sets of the five above", _BENCHMARK),
    "openenv": Task("seeds for OpenEnv: a source openenv:N[:FIRST]", rows="tandemrl.tasks.openenv.rows:rows"),
    "verifiers": Task("tasksets of verifiers: a source verifiers:NAME:N", rows="tandemrl.tasks.verifiers.rows:rows"),
    "gym": Task(_ABOUT_GYM, rows=f"{_GYM}.rows:rows", grader=f"{_GYM}.grader:gym", graded=("gym/*",)),
}
"""The tasks that the library has."""
