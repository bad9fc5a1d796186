"""Chooses the rewards that score a row, by its ``data_source`` or its ``ability``.

A reward is a name from `SCORERS`, a function of your own as ``module:function``, or a function given to ``train`` (see
`functions`). ``reward.scorers`` maps patterns of data sources to a reward, or to a sum such as ``boxed +
my.module:brevity``, in which ``reward.weights`` weighs each term. A pattern that begins with ``ability:``, as in
``ability:math``, is compared with the rows' ``ability`` instead. The first pattern that matches decides. If none
matches, the functions given to ``train`` that ``reward.scorers`` does not name score the row; if there are none,
suffixes (`SUFFIXES`) decide, then `TABLE`, and last ``reward.fallback``. Patterns with a capital letter are matched as
written, others without regard to case.
"""

import difflib
import fnmatch
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from tandemrl.config import ConfigError, RewardConfig
from tandemrl.config.catalogue import TASKS
from tandemrl.data.controls import END_OF_THOUGHT, THOUGHT
from tandemrl.data.rows import DataError, Row
from tandemrl.processes.names import function_named
from tandemrl.rewards.calls import MEASURED
from tandemrl.rewards.functions import (
    RESERVED,
    RewardFunction,
    Term,
    in_child,
    in_process,
    of_library,
)
from tandemrl.rewards.protocol import GraderError

SCORERS: dict[str, str] = {
    "math": "tandemrl.tasks.math.boxed:math",
    "boxed": "tandemrl.tasks.math.boxed:boxed",
    "math_verify": "tandemrl.tasks.math.boxed:math",
    "hendrycks": "tandemrl.tasks.math.published:hendrycks",
    "dapo": "tandemrl.tasks.math.published:dapo",
    "dapo_boxed": "tandemrl.tasks.math.published:dapo_boxed",
    "prime": "tandemrl.tasks.math.prime:prime",
    "gsm8k": "tandemrl.tasks.gsm8k.grader:gsm8k",
    "countdown": "tandemrl.tasks.countdown.grader:countdown",
    "integer": "tandemrl.tasks.math.tagged:integer",
    "exact_match": "tandemrl.tasks.math.tagged:exact_match",
    "musique": "tandemrl.tasks.qa.grader:musique",
    "code": "tandemrl.tasks.code.grader:code",
    "judge": "tandemrl.tasks.rubric.judge:judged",
    "grade": "tandemrl.tasks.rubric.judge:graded",
}
"""The library's scorers by name, each as ``module:function``; `scorers` has those of `config.catalogue`, too."""


def scorers() -> dict[str, str]:
    """The scorers of the library and of its tasks, each as ``module:function``."""
    return SCORERS | {name: task.grader for name, task in TASKS.items() if task.grader is not None}


EQUALITY = "tandemrl.tasks.math.equality"
"""The module that says whether two answers are equal."""

IDEAL: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("boxed", "hendrycks", "dapo_boxed", "math", "math_verify", "prime"), (r"\boxed{", "}")),
    **{"gsm8k": ("#### ", ""), "dapo": ("Answer: ", "")},
    **dict.fromkeys(("integer", "exact_match", "gym"), ("<answer>", "</answer>")),
}
"""What stands before and after the ground truth in an ideal response, of scorers for which that is known."""
THINKING = (f"{THOUGHT}\nSo it is.\n{END_OF_THOUGHT}\n", "")
"""The same of a model that thinks first."""

SUFFIXES: dict[str, str] = {"*_tinyv*": "judge", "*_mathverify*": "math", "*_prime*": "prime"}
"""Suffixes of a data source that name the scorer, whatever the data, as in TinyV."""

TABLE: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "synthetic/hops*": "musique",
    "synthetic/word_problems*": "gsm8k",
    **dict.fromkeys(("synthetic/*", "deepscaler*", "agentica-org/deepscaler*"), "boxed"),
    "math_dapo*": "dapo",
    **dict.fromkeys(("OLYMPIAD_BENCH", "MINERVA", "MATH", "AMC", "AIME", "polaris*"), "prime"),
    **dict.fromkeys(("math", "math500", "math-500", "huggingfaceh4/math-500", "lighteval/math"), "boxed"),
    **dict.fromkeys(("digitallearninggmbh/math-lighteval", "*hendrycks_math", "aime*", "amc*", "math-ai/*"), "boxed"),
    **dict.fromkeys(("matharena/*", "minerva*", "olympiad*", "gaokao*", "college_math"), "boxed"),
    "*hardverify-math*": "judge",
    "numina_*": "prime",
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco", "*humaneval*"), "code"),
    "grade": "grade",
    "*countdown*": "countdown",
    **dict.fromkeys(("*multiply*", "*arithmetic*"), "integer"),
    "searchr1_*": "exact_match",
    **dict.fromkeys(("*musique*", "hops*", "hotpotqa*", "2wikimultihopqa*"), "musique"),
}
"""The scorers that the library chooses by data source. The first pattern that matches decides."""

COMPAT: dict[str, dict[str, str]] = {
    "verl": {
        "math": "dapo",
        "aime*": "dapo",
        "lighteval/math": "hendrycks",
        "digitallearninggmbh/math-lighteval": "hendrycks",
        "huggingfaceh4/math-500": "hendrycks",
    }
}
"""The patterns that each ``reward.compat`` puts before those of `TABLE`."""

ABILITY = "ability:"
"""The beginning of a pattern of ``reward.scorers`` that is compared with abilities."""


class RowKind(NamedTuple):
    """The two fields of a row that decide which rewards score it."""

    data_source: str
    ability: str = ""

    @classmethod
    def of(cls, row: Row) -> "RowKind":
        return cls(row.data_source, row.ability)


Functions = Mapping[str, RewardFunction]
"""Reward functions of this process, by name: those given to ``train``."""
NO_FUNCTIONS: Functions = {}


def terms_of(row: Row, options: RewardConfig, functions: Functions = NO_FUNCTIONS) -> tuple[Term, ...]:
    """The rewards whose weighted sum scores a row's responses. In most cases it is a single one.

    Raises:
        DataError: no reward is known for the row; the message lists the known names.
        GraderError: ``reward.scorers`` names something that cannot be imported, or a sum that is not valid.
    """
    kind = RowKind.of(row)
    pattern = _match(kind, options.scorers)
    names = _names(options.scorers[pattern]) if pattern is not None else _unplaced(options, functions)
    tasks = {pattern: name for name, task in TASKS.items() for pattern in task.graded}
    for table in () if names else (tasks, SUFFIXES, COMPAT.get(options.compat, {}), TABLE):
        pattern = _match(kind, table)
        if pattern is not None:
            names = (table[pattern],)
            break
    if not names and options.fallback is not None:
        names = _names(options.fallback)
    if not names:
        close = difflib.get_close_matches(row.data_source, [*TABLE, *SUFFIXES], n=3)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise DataError(
            f"row {row.example_id}: no scorer for data_source {row.data_source!r}{meant}; name one in reward.scorers, "
            f"as {{{row.data_source}: NAME}} with NAME=module:function or one of {', '.join(scorers())}; or one for "
            "all such rows, as reward.fallback=prime. The data sources that need neither: TABLE in rewards/routing.py"
        )
    short = [_short(name) for name in names]
    if len(names) > 1 or any(name in options.weights for name in short):
        total = f"reward.scorers: {' + '.join(names)}"
        if repeated := next((name for name in short if short.count(name) > 1), None):
            raise GraderError(f"{total}: two rewards are called {repeated}; rename a function")
        if taken := next((name for name in short if name in RESERVED), None):
            raise GraderError(f"{total}: {taken} is a metric or a part of every score; rename the function")
    return tuple(
        _scorer(path, functions, options)._replace(name=name, weight=options.weights.get(name, 1.0))
        for name, path in zip(short, names, strict=True)
    )


def ideal_texts(term: Term, row: Row) -> list[str]:
    """The responses with the ground truth of a row that a reward is tried on: in the form that a scorer of the library
    reads, in all of them for one of the user's. None if right answers are no ground truths, as with tests of a
    program."""
    if term.own:
        forms = [("", ""), *IDEAL.values(), THINKING]
    else:
        plain = row.ground_truth and isinstance(row.raw_ground_truth, str | int | float | None)
        forms = [IDEAL[term.name]] if plain and term.name in IDEAL else []
    return [*dict.fromkeys(row.ground_truth.join(form) for form in forms)]


def check_rewards(
    kinds: Iterable[RowKind],
    options: RewardConfig,
    functions: Functions = NO_FUNCTIONS,
    *,
    stated: Collection[str] | None = None,
) -> None:
    """Refuse rewards that would not be used: a pattern that is the first match of no row, a function that scores no
    row, or a weight of no reward. All rewards that are used are imported.

    Args:
        kinds: the kinds of the rows that were read.
        stated: dotted keys such as ``reward.scorers.mydata`` that must be used. None means all keys. Other patterns and
            weights come from a config that was written for other data, so an unused pattern gives only a warning.

    Raises:
        ConfigError: a pattern, a weight or a function is not used; the message names it and what there is.
        GraderError: a reward cannot be imported, or a function has the name of another reward.
    """
    kinds = sorted(set(kinds))
    for name in functions:
        taken = name in scorers() or (name in RESERVED and name not in MEASURED)  # no metric's in a sum: see `terms_of`
        if taken or not name.isidentifier():
            kind = "no name" if not name.isidentifier() else "a name of the library's"
            raise GraderError(f"reward {name!r} is {kind}; give the function one of its own: reward={{'my_reward': …}}")

    matches = {kind: _match(kind, options.scorers) for kind in kinds}
    for pattern, rewards in options.scorers.items():
        if pattern in matches.values():
            for name in _names(rewards):
                _scorer(name, functions, options)
            continue
        key = f"reward.scorers.{pattern}"
        message = f"{key}={rewards}: {_why_unused(pattern, kinds)}"
        if stated is None or key in stated:
            raise ConfigError(message)
        warnings.warn(message, stacklevel=3)
    for name in () if options.fallback is None else _names(options.fallback):
        _scorer(name, functions, options)

    unplaced = _unplaced(options, functions)
    if unplaced and None not in matches.values():
        raise ConfigError(f"reward {unplaced[0]}: scores no row: reward.scorers has a reward for each")
    known = {_short(name) for name in reward_names(options)} | set(functions)
    named = [*((name, "weights") for name in options.weights), *((name, "parameters") for name in options.parameters)]
    for name, table in named:
        key = f"reward.{table}.{name}"
        if name not in known and (stated is None or any(f"{each}.".startswith(f"{key}.") for each in stated)):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"{key}: no reward of that name; {hint}Names come from reward.scorers and train(reward=…): "
                f"{', '.join(sorted(known)) or 'there are none'}"
            )


def reward_names(options: RewardConfig) -> list[str]:
    """All names in ``reward.scorers`` and ``reward.fallback``, without repetitions."""
    named = [*options.scorers.values(), *(() if options.fallback is None else (options.fallback,))]
    return list(dict.fromkeys(name for rewards in named for name in _names(rewards)))


def _scorer(name: str, functions: Functions, options: RewardConfig) -> Term:
    """The reward that a name stands for.

    Raises:
        GraderError: the name is unknown, or the function cannot be imported.
    """
    if name in scorers():
        return of_library(name, function_named(scorers()[name], name, GraderError))
    if name in functions:
        return in_process(name, functions[name])
    if ":" in name:
        return in_child(name, options.parameters.get(_short(name)))
    mine = f", given to train: {', '.join(functions)}" if functions else ""
    key = "reward.fallback" if name == options.fallback else "reward.scorers"
    raise GraderError(
        f"{key}: {name!r} is neither module:function nor one of the library's scorers, which are "
        f"{', '.join(scorers())}{mine}"
    )


def _names(rewards: str) -> tuple[str, ...]:
    """The names in a sum such as ``boxed + my.module:brevity``."""
    return tuple(name.strip() for name in rewards.split("+"))


def _short(name: str) -> str:
    """The name of a reward in ``reward.weights`` and in the metrics. For ``module:function`` it is the function."""
    return name.rpartition(":")[2]


def _unplaced(options: RewardConfig, functions: Functions) -> tuple[str, ...]:
    """The functions that ``reward.scorers`` does not name. They score the rows for which it has no pattern."""
    placed = reward_names(options)
    return tuple(name for name in functions if name not in placed)


def _match(kind: RowKind, patterns: Iterable[str]) -> str | None:
    """The first pattern that matches a kind of rows, or None."""
    for pattern in patterns:
        name = _named_by(pattern, kind).strip()
        words = pattern.removeprefix(ABILITY)
        if fnmatch.fnmatchcase(name if words != words.lower() else name.lower(), words):
            return pattern
    return None


def _named_by(pattern: str, kind: RowKind) -> str:
    """The field of a kind that a pattern is compared with."""
    return kind.ability if pattern.startswith(ABILITY) else kind.data_source


def _why_unused(pattern: str, kinds: Sequence[RowKind]) -> str:
    names = sorted({_named_by(pattern, kind) for kind in kinds} - {""})
    what = "abilities" if pattern.startswith(ABILITY) else "data sources"
    close = difflib.get_close_matches(pattern.removeprefix(ABILITY), names, n=1, cutoff=0.0)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"no row matches it first; the {what} are {', '.join(names) or 'none'}{hint} (a pattern is the whole name, "
        "with * for any characters, and goes before wider ones)"
    )
