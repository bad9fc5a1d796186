"""Reward functions of a user's own, and weighted sums of rewards. Imports no torch.

A reward function is ``(row, text) -> Score | float``; a third parameter, ``options``, gets the `RewardConfig`, and one
called ``transcript`` the `Transcript` of an episode of several turns, of which ``text`` is what the authors wrote. One
that ``reward.scorers`` names as ``module:function`` runs in the killable child processes. One that is given to
``train(reward=…)`` runs in the training process: it may be a closure, and it has to be quick. A plain number x stands
for a `Score` whose ``acc`` (is the response correct?) is 1 from x = 1 on, and else 0.

A reward function of verl's is known by its parameters ``solution_str`` and ``ground_truth``, and is called by name with
those of ``data_source``, ``solution_str``, ``ground_truth`` and ``extra_info`` that it takes. The ground truth is what
the row's file holds, also where that is no text. It returns a number, a dict with ``score``, of which other numbers are
parts of the score and ``pred`` is the answer, or a tuple that begins with the score.
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
"""``(row, text)`` or ``(row, text, options)``, and a parameter ``transcript`` with either; or a function of verl's."""
Grade = Callable[[Row, str, RewardConfig, Transcript | None], Score | Deferred]
"""A reward of any kind, called in one way; without an episode there is no transcript."""
ENVIRONMENT = "environment"
"""The name of a reward that an environment gives itself."""
METRICS = ("mean", "std")
"""``reward/mean`` and ``reward/std`` are statistics of the reward; no part of a score may take their place."""
RESERVED = (*METRICS, "acc", "answer_present", "timeout", "failure", "unscored")
"""Parts of every score: no reward may go by their names."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl tells a reward function, by name."""
VERL_MARKS = {"solution_str", "ground_truth"}
"""Parameters by which such a function is known: those of each of verl's own have them."""


class Term(NamedTuple):
    """One reward of a row, which counts ``weight`` times."""

    name: str
    weight: float
    score: Grade


def weighted(terms: Sequence[Term], scores: Sequence[Score]) -> Score:
    """Σ weight · value. ``acc``, the answer and equally named parts are those of the first reward. The value of each
    reward, before weighting, is a part under its name; a part of that name moves to ``NAME/part``.

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
        Call.of(function, f"reward {name}")  # refuses it
    return dict(reward)


def with_environment(functions: Mapping[str, RewardFunction], environment: Any) -> dict[str, RewardFunction]:
    """The functions, and the ``score`` of an environment that has one, as ``environment``.

    Raises:
        GraderError: a function goes by that name already.
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
    """One of the library's scorers."""
    how = Call.of(function, name)

    def score(row: Row, text: str, options: RewardConfig, transcript: Transcript | None) -> Score | Deferred:
        arguments, keywords = how.arguments(name, row, text, options, transcript)
        return function(*arguments, **keywords)

    return score


def in_process(name: str, function: RewardFunction) -> Grade:
    """A scorer that calls the function in this process. What it raises stops the run."""
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
    """A scorer that calls ``module:function`` in a child process. An error in it stops the run. Where it hangs or
    crashes, the reward is 0 and counted as lost.

    Raises:
        GraderError: it cannot be imported.
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
    """What a reward function is told beside the row and the text."""

    options: bool
    transcript: Literal["no", "may", "must"]
    verl: tuple[str, ...] = ()
    """The parameters of a function of verl's, by which it is called; () = it is none."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Call":
        """As its parameters say.

        Raises:
            GraderError: it cannot be called so; names it.
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
        """Positional ones and those by keyword.

        Raises:
            GraderError: it reads transcripts, and there is none.
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
        """What the function returned, as a score.

        Raises:
            GraderError: it is none.
        """
        return checked(_of_verl(result) if self.verl else result, name, row)


def _no_reward(name: str, signature: inspect.Signature) -> GraderError:
    return GraderError(
        f"{name}: its parameters are {signature}; expected (row, text) or (row, text, options), and `transcript` with "
        f"either, or verl's ({', '.join(VERL)})"
    )


def _of_verl(result: Any) -> Any:
    """What a function of verl's returned, as a number or a `Score`; what is neither stays as it is.

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


def call_with_keywords(path: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
    """``call`` of a function that is told some things by name."""
    return imported(path)(*arguments, **keywords)


WITH_KEYWORDS = f"{__name__}:{call_with_keywords.__name__}"


def imported(path: str) -> Callable[..., Any]:
    """The function that ``module:function`` names; modules in the working directory are found too.

    Raises:
        GraderError: there is none, or importing it failed.
    """
    return function_named(path, f"reward.scorers: {path}", GraderError)
