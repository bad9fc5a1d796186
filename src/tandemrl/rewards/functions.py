"""A user's own reward functions, and weighted sums of rewards. The module does not import torch.

`calls` says which parameters a reward function may have and what it may return. A function that ``reward.scorers``
names as ``module:function`` runs in child processes that can be killed. A function given to ``train(reward=…)`` runs in
the training process: it may be a closure, and it has to be quick.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.processes.names import function_named
from tandemrl.rewards.calls import KEYWORDS, METRICS, Call, Given, called, called_group, raised
from tandemrl.rewards.protocol import (
    NO_SCORE,
    Deferred,
    GraderError,
    GroupScores,
    Item,
    Lost,
    Score,
    ScorerFunction,
    TrainerState,
)

RewardFunction = Callable[..., Score | float | Mapping[str, Any]]
"""A function of ``(row, text)`` or ``(row, text, options)``, optionally with ``transcript``; of ``(row, texts)`` and
``transcripts`` for all responses to a prompt; or one with the signature of verl, TRL or verifiers."""
Begin = Callable[[Sequence[Item], RewardConfig, TrainerState | None], Score | GroupScores | Deferred]
"""A reward of any kind in a uniform signature, for one response, or for all responses to a prompt."""
ENVIRONMENT = "environment"
"""The name of the reward that an environment gives with its own ``score``."""
RESERVED = (*METRICS, "acc", "answer_present", "timeout", "failure", "unscored")
"""Names that no reward of a sum may have, since parts of every score or metrics have them."""


class Term(NamedTuple):
    """One term of a row's reward: a named reward and its weight in the sum.

    own: whether it is a function of the user's. reads_transcripts: whether it is one that reads episodes. grouped:
    whether it scores all responses to a prompt in one call; its outcome is `GroupScores`. opened: whether it reads what
    the chat template wrote of a response.
    """

    name: str
    begin: Begin
    weight: float = 1.0
    own: bool = False
    reads_transcripts: bool = False
    grouped: bool = False
    opened: bool = False

    @classmethod
    def of(cls, name: str, how: Call, begin: Begin) -> "Term":
        """The term of a user's function."""
        return cls(name, begin, 1.0, True, how.transcript, how.grouped, "opened" in how.names)


def weighted(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """The weighted sum Σ weight · value of several scores, as one score.

    ``acc``, the answer, and parts that several rewards have are those of the first one. The value of each reward before
    weighting becomes a part under the name of the reward; a part that already has this name moves to ``NAME/part``. A
    reward that gives no score (`NO_SCORE`) is left out, with the part ``NAME/none``; if none gives one, there is none.

    Examples:
        >>> terms = [in_process("boxed", max), in_process("brevity", max)._replace(weight=0.2)]
        >>> weighted(terms, [Score(1.0, {"acc": 1.0}, "7"), Score(0.5, {"acc": 0.0}, None)])
        Score(value=1.1, parts={'acc': 1.0, 'boxed': 1.0, 'brevity': 0.5}, answer='7')
    """
    given = [(term, score) for term, score in zip(terms, scores, strict=True) if score != NO_SCORE]
    if not given or (len(terms) == 1 and terms[0].weight == 1.0):
        return scores[0]
    parts = {f"{term.name}/none": 1.0 for term, score in zip(terms, scores, strict=True) if score == NO_SCORE}
    terms, scores = zip(*given, strict=True)
    values = {term.name: score.value for term, score in given}
    for score in reversed(scores):
        parts |= {f"{part}/part" if part in values else part: value for part, value in score.parts.items()}
    return Score(sum(term.weight * values[term.name] for term in terms), parts | values, scores[0].answer)


def means_of(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each part over several scores. A missing part counts as 0, that of a reward that gives no score
    (``NAME/none``) does not count."""
    names = dict.fromkeys(name for each in values for name in each)
    having = {name: [each.get(name, 0.0) for each in values if f"{name}/none" not in each] for name in names}
    return {name: sum(have) / len(have) for name, have in having.items()}


def by_name(reward: RewardFunction | Mapping[str, Any] | None) -> dict[str, RewardFunction]:
    """Reward functions by name. A single one has its own name, or ``reward`` if it is a lambda.

    Raises:
        GraderError: something is not a function, or cannot be called with ``(row, text)``; the message names it.
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
        Call.of(function, f"reward {name}")  # refuses it
    return dict(reward)


def with_environment(functions: Mapping[str, RewardFunction], environment: Any) -> dict[str, RewardFunction]:
    """The functions, and the method ``score_group`` of an environment, or else ``score``, if it has one, under the name
    ``environment``.

    Raises:
        GraderError: a function already has that name.
    """
    grouped = hasattr(environment, "score_group")
    if not grouped and not hasattr(environment, "score"):
        return dict(functions)
    if ENVIRONMENT in functions:
        raise GraderError(f"reward {ENVIRONMENT}: so is called the score of the environment; rename the function")

    def of_environment(row: Row, text: str, transcript: Transcript) -> Any:
        return environment.score(row, transcript)

    def of_episodes(row: Row, texts: list[str], transcripts: list[Transcript]) -> Any:
        return environment.score_group(row, transcripts)

    return {ENVIRONMENT: of_episodes if grouped else of_environment, **functions}


def of_library(name: str, function: ScorerFunction) -> Term:
    """The reward of one of the library's scorers. They get plain text, as published graders expect it."""
    how = Call.of(function, name, (*KEYWORDS, "written"))

    def begin(items: Sequence[Item], options: RewardConfig, state: TrainerState | None) -> Score | Deferred:
        given = how.given(name, items, options, state)
        row, _, *more = given.positional
        result: Score | Deferred = function(row, items[0].response.plain, *more, **given.keywords)
        return result

    return Term(name, begin)


def in_process(short: str, function: RewardFunction) -> Term:
    """The reward of a function that is called in this process. An exception in it stops the run."""
    name = f"reward {short}"
    how = Call.of(function, name)

    def begin(items: Sequence[Item], options: RewardConfig, state: TrainerState | None) -> Deferred:
        given = how.given(name, items, options, state)

        def call() -> Any:
            try:
                return made(function, given, how.logs, len(items))
            except GraderError as error:
                raise GraderError(f"{name}, row {items[0].row.example_id}: {error}{how.remark}") from error.__cause__

        return Deferred("function", (call,), lambda result: how.checked(result, name, items))

    return Term.of(short, how, begin)


def in_child(path: str, parameters: Mapping[str, Any] | None = None) -> Term:
    """The reward of ``module:function``, which is called in a child process.

    An exception in it stops the run. If it hangs or crashes, the reward is 0 and counted as lost.

    Args:
        parameters: values of its own parameters (``reward.parameters``), which it gets by keyword.

    Raises:
        GraderError: the function cannot be imported, or has no such parameter.
    """
    function, parameters = imported(path), parameters or {}
    if unknown := [name for name in parameters if name not in inspect.signature(function).parameters]:
        raise GraderError(f"reward.parameters: {path} has no parameter {unknown[0]!r}")
    how = Call.of(partial(function, **parameters), path)

    def begin(items: Sequence[Item], options: RewardConfig, state: TrainerState | None) -> Deferred:
        def then(result: Any) -> Score | GroupScores:
            if not isinstance(result, Lost):
                return how.checked(result, path, items)
            if result.why:
                raise GraderError(f"{path}, row {items[0].row.example_id}: {result.why}{how.remark}")
            return GroupScores([result.score()] * len(items))

        given = how.given(path, items, options, state)
        return Deferred("symbolic", (AS_GIVEN, path, parameters, given, how.logs, len(items)), then, len(items))

    return Term.of(path.rpartition(":")[2], how, begin)


def call(path: str, *arguments: Any) -> Any:
    """Call the function ``module:function`` and return its result. A scoring process runs this."""
    return imported(path)(*arguments)


def made(function: Callable[..., Any], given: Given, logs: Sequence[str] | None, count: int) -> Any:
    """What a user's function returns; with ``logs``, for all responses to a prompt (see `called_group`).

    Raises:
        GraderError: it raised; the message says what, in which file and line.
    """
    try:
        return called(function, given) if logs is None else called_group(function, given, logs, count)
    except (Exception, SystemExit) as error:
        raise GraderError(raised(error, function)) from error


def made_in_child(path: str, parameters: Mapping[str, Any], given: Given, *how: Any) -> Any:
    """`made` with ``module:function``, which gets its own parameters by keyword, in place of fields of the row."""
    keywords, messages = (None if each is None else {**each, **parameters} for each in given[1:])
    return made(imported(path), Given(given.positional, keywords or {}, messages), *how)


AS_GIVEN = f"{__name__}:{made_in_child.__name__}"


def imported(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Modules in the working directory are found, too.

    Raises:
        GraderError: there is no such function, or importing it failed.
    """
    return function_named(path, f"reward.scorers: {path}", GraderError)
