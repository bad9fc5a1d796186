"""A user's own reward functions, and weighted sums of rewards. The module does not import torch.

A reward function is ``(row, text) -> Score | float``. A third parameter, ``options``, receives the `RewardConfig`. A
parameter called ``transcript`` receives the `Transcript` of an episode of several turns; ``text`` is then what the
authors wrote in it. A function that ``reward.scorers`` names as ``module:function`` runs in child processes that can be
killed. A function given to ``train(reward=…)`` runs in the training process: it may be a closure, and it has to be
quick. If it returns a plain number x, this becomes a `Score` whose ``acc`` (is the response correct?) is 1 if x ≥ 1,
else 0.

A reward function with verl's signature is recognised by its parameters ``solution_str`` and ``ground_truth``. It is
called with those of ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` that it takes, by keyword.
The ground truth is the value in the row's file, even if that is not text. The function may return a number, a dict with
``score``, whose other numbers become parts of the score and whose ``pred`` is the answer, or a tuple that begins with
the score.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsFloat

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.messages import Transcript
from tandemrl.processes.names import function_named
from tandemrl.rewards.protocol import Deferred, GraderError, Lost, Score, ScorerFunction, number

RewardFunction = Callable[..., Score | float | Mapping[str, Any]]
"""A function of ``(row, text)`` or ``(row, text, options)``, optionally with ``transcript``; or one with verl's
signature."""
Grade = Callable[[Row, str, RewardConfig, Transcript | None], Score | Deferred]
"""A reward of any kind in a uniform signature. The transcript is None without an episode."""
ENVIRONMENT = "environment"
"""The name of the reward that an environment gives with its own ``score``."""
METRICS = ("mean", "std")
"""Names that no part of a score may have, since ``reward/mean`` and ``reward/std`` are statistics of the reward."""
RESERVED = (*METRICS, "acc", "answer_present", "timeout", "failure", "unscored")
"""Names that no reward may have, since parts of every score have them."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keyword arguments that verl passes to a reward function."""
VERL_MARKS = {"solution_str", "ground_truth"}
"""The parameters by which a function with verl's signature is recognised. All of verl's own functions have them."""


class Term(NamedTuple):
    """One term of a row's reward: a named reward and its weight in the sum."""

    name: str
    weight: float
    score: Grade


def weighted(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """The weighted sum Σ weight · value of several scores, as one score.

    ``acc``, the answer, and parts that several rewards have are those of the first one. The value of each reward before
    weighting becomes a part under the name of the reward; a part that already has this name moves to ``NAME/part``.

    Examples:
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
    """The functions, and the method ``score`` of an environment, if it has one, under the name ``environment``.

    Raises:
        GraderError: a function already has that name.
    """
    score = getattr(environment, "score", None)
    if score is None:
        return dict(functions)
    if ENVIRONMENT in functions:
        raise GraderError(f"reward {ENVIRONMENT}: so is called the score of the environment; rename the function")

    def of_environment(row: Row, text: str, transcript: Transcript) -> Any:
        return score(row, transcript)

    return {ENVIRONMENT: of_environment, **functions}


def of_library(name: str, function: ScorerFunction) -> Grade:
    """The reward of one of the library's scorers."""
    how = Call.of(function, name)

    def score(row: Row, text: str, options: RewardConfig, transcript: Transcript | None) -> Score | Deferred:
        arguments, keywords = how.arguments(name, row, text, options, transcript)
        return function(*arguments, **keywords)

    return score


def in_process(name: str, function: RewardFunction) -> Grade:
    """The reward of a function that is called in this process. An exception in it stops the run."""
    how = Call.of(function, f"reward {name}")

    def score(row: Row, text: str, options: RewardConfig, transcript: Transcript | None) -> Deferred:
        arguments, keywords = how.arguments(f"reward {name}", row, text, options, transcript)

        def call() -> Any:
            try:
                return function(*arguments, **keywords)
            except Exception as error:
                raise GraderError(f"reward {name}, row {row.example_id}: {type(error).__name__}: {error}") from error

        return Deferred("function", (call,), lambda result: how.checked(result, f"reward {name}", row))

    return score


def in_child(path: str) -> Grade:
    """The reward of ``module:function``, which is called in a child process.

    An exception in it stops the run. If it hangs or crashes, the reward is 0 and counted as lost.

    Raises:
        GraderError: the function cannot be imported.
    """
    how = Call.of(imported(path), path)

    def score(row: Row, text: str, options: RewardConfig, transcript: Transcript | None) -> Deferred:
        def then(result: Any) -> Score:
            if not isinstance(result, Lost):
                return how.checked(result, path, row)
            if result.why:
                raise GraderError(f"{path}, row {row.example_id}: {result.why}")
            return Score(0.0, {"acc": 0.0, "answer_present": 0.0, result.how: 1.0}, None)

        arguments, keywords = how.arguments(path, row, text, options, transcript)
        payload = (WITH_KEYWORDS, path, arguments, keywords) if keywords else (path, *arguments)
        return Deferred("symbolic", payload, then)

    return score


class Call(NamedTuple):
    """How a reward function is called: what it is given beside the row and the text."""

    options: bool
    transcript: Literal["no", "may", "must"]
    verl: tuple[str, ...] = ()
    """The keyword arguments of a function with verl's signature; empty for any other function."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Call":
        """The way to call a function, read from its parameters.

        Raises:
            GraderError: it cannot be called in any of the known ways; the message names it.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C do not say
            return cls(options=False, transcript="no")
        if signature.parameters.keys() >= VERL_MARKS:
            takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
            names = tuple(part for part in VERL if takes_all or part in signature.parameters)
            try:
                signature.bind(**dict.fromkeys(names))
            except TypeError:
                raise _no_reward(name, signature) from None
            return cls(options=False, transcript="no", verl=names)
        if (transcript := signature.parameters.get("transcript")) is not None:
            options = "options" in signature.parameters
            try:
                signature.bind(None, None, transcript=None, **({"options": None} if options else {}))
            except TypeError:
                raise _no_reward(name, signature) from None
            return cls(options, "must" if transcript.default is inspect.Parameter.empty else "may")
        for count in (3, 2) if "options" in signature.parameters else (2, 3):
            try:
                signature.bind(*[None] * count)
            except TypeError:
                continue
            return cls(options=count == 3, transcript="no")
        raise _no_reward(name, signature)

    def arguments(
        self, name: str, row: Row, text: str, options: RewardConfig, transcript: Transcript | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional arguments and the keyword arguments of a call.

        Raises:
            GraderError: the function reads transcripts, and there is none.
        """
        if self.verl:
            truth = row.ground_truth if row.raw_ground_truth is None else row.raw_ground_truth
            told = (row.data_source, text, truth, dict(row.extra_info))
            return (), {part: value for part, value in zip(VERL, told, strict=True) if part in self.verl}
        if self.transcript == "no":
            return (row, text, options) if self.options else (row, text), {}
        if self.transcript == "must" and transcript is None:
            raise GraderError(
                f"{name}, row {row.example_id}: it reads the transcript of an episode, and a single response has none; "
                "set rollout.environment, or give the parameter `transcript` a default"
            )
        return (row, text), {"transcript": transcript, **({"options": options} if self.options else {})}

    def checked(self, result: Any, name: str, row: Row) -> Score:
        """The result of the function as a score.

        Raises:
            GraderError: the result is not a score.
        """
        return checked(_of_verl(result) if self.verl else result, name, row)


def _no_reward(name: str, signature: inspect.Signature) -> GraderError:
    return GraderError(
        f"{name}: its parameters are {signature}; expected (row, text) or (row, text, options), and `transcript` with "
        f"either, or verl's ({', '.join(VERL)})"
    )


def _of_verl(result: Any) -> Any:
    """The result of a function with verl's signature as a number or a `Score`. Any other value is returned as it is.

    Source: verl's ``default_compute_score`` and its naive reward manager.
    """
    if isinstance(result, tuple | list):
        of_ours = len(result) == len(Score._fields) and isinstance(result[1], Mapping)
        return result if of_ours or not result else result[0]
    if not isinstance(result, Mapping) or "score" not in result:
        return result
    rest = {str(name): x for name, x in result.items() if name not in ("score", "pred")}
    parts: dict[str, Any] = {name: x for name, x in rest.items() if isinstance(x, SupportsFloat)}
    answer = None if result.get("pred") is None else str(result["pred"])
    try:
        parts.setdefault("acc", float(number(result["score"]) >= 1.0))
    except TypeError:
        return result
    return Score(result["score"], parts, answer)


def checked(result: Any, name: str, row: Row) -> Score:
    """The result of a reward function as a score.

    Raises:
        GraderError: the result is neither a finite number nor a usable `Score`.
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
    """Call the function ``module:function`` and return its result. A scoring process runs this."""
    return imported(path)(*arguments)


def call_with_keywords(path: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """As ``call``, for a function that takes keyword arguments as well."""
    return imported(path)(*arguments, **keywords)


WITH_KEYWORDS = f"{__name__}:{call_with_keywords.__name__}"


def imported(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names. Modules in the working directory are found, too.

    Raises:
        GraderError: there is no such function, or importing it failed.
    """
    return function_named(path, f"reward.scorers: {path}", GraderError)
