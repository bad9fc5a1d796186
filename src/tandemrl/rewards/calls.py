"""How a user's reward function is called, and what it may return. The module does not import torch.

The library's own form is ``(row, text) -> Score | float``. A third parameter, ``options``, receives the `RewardConfig`.
``text`` has the special tokens that were written, but not the end token. A parameter called ``transcript`` receives the
`Transcript` of an episode of several turns; ``text`` is then what the authors wrote in it. A parameter called
``opened``, of any function, receives what the chat template wrote of the response at the end of the prompt, such as
``<think>``. If the function returns a plain number x, this becomes a `Score` whose ``acc`` (is the response correct?)
is 1 if x ≥ 1, else 0. A function with a parameter ``texts`` or ``transcripts`` gets all responses to a prompt at once,
as lists, and returns a list with a score, or None, for each.

Functions that were written for other libraries are recognised by the names of their parameters, and called by keyword:

========= =================================== ==========================================================================
library   recognised by                       given
========= =================================== ==========================================================================
verl      ``solution_str``, ``ground_truth``  those of ``data_source``, ``solution_str``, ``ground_truth`` and
                                              ``extra_info`` that it takes
TRL       ``completions``                     for all responses to a prompt at once, each as a list: ``prompts``,
                                              ``completions``, ``completion_ids`` and the fields of the rows
                                              (`columns`); ``trainer_state``, ``log_metric``, ``log_extra``
verifiers ``completion`` first, or with       those of ``prompt``, ``completion``, ``answer``, ``state``, ``task`` and
          ``prompt``, or with two others      ``info`` that it takes
          of these names
verifiers ``states``, or with ``completions`` as TRL's, with verifiers' names in the plural
          others of its plurals
========= =================================== ==========================================================================

The ground truth is the value in the row's file, even if that is not text. A function of verl's may return a number, a
dict with ``score``, whose other numbers become parts of the score (as ``verl_NAME`` if a metric has the name, see
`is_metric`) and whose ``pred`` is the answer, or a tuple that begins with the score. A function of TRL's returns a list
with a number for each completion, or None where it has no score: then other terms of a sum count alone.

These libraries decode texts without special tokens, so their functions get them so (`Response.plain`).

TRL and verifiers give prompts and completions as texts or as lists of messages, depending on the data set. Here a
function gets texts. If it fails on them as one does that expects messages, it gets messages; if the annotation of the
completion says that it is a list of dicts, it gets them at once.

Any of these functions may be ``async``.
"""

import asyncio
import inspect
import json
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsFloat

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import NO_SCORE, GraderError, GroupScores, Item, Score, TrainerState, number

MEASURED = (
    *("score", "length", "truncation_rate", "rounds", "senior_share", "turns", "rejected_rate"),
    *("samples", "problems", "unfinished", "out_of_turns", "above_150_rounds", "judged", "judge_failures"),
)
"""The rates and counts of every evaluation, beside those of k, the parts of scores and the counts of episodes."""
METRICS = ("mean", "std", *MEASURED)
"""Names that no part of a score may have: ``reward/mean`` and ``reward/std`` are statistics of the reward, and
evaluations have metrics of the other names, and of those that begin as in ``OF_K``."""
OF_K = ("pass@", "maj@", "verified_pass@")
"""How the names of rates begin that have a k."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The keyword arguments that verl passes to a reward function."""
VERL_MARKS = {"solution_str", "ground_truth"}
"""The parameters by which a function with verl's signature is recognised. All of verl's own functions have them."""
VERIFIERS = ("prompt", "completion", "answer", "state", "task", "info")
"""The keyword arguments that verifiers passes to a reward function, without the objects of its rubric."""
PLURALS = {"answers", "states", "tasks", "infos"}
"""What a function of verifiers takes beside ``prompts`` and ``completions`` if it scores all responses to a prompt."""
KEYWORDS = ("transcript", "transcripts", "opened", "options")
"""What a function of the library's own form gets by keyword if it has such parameters."""
LOGS = ("log_metric", "log_extra")
"""The functions that TRL passes, so that a reward function can log numbers, and columns with a value per completion."""
GROUPS = {"texts", "transcripts"}
"""The parameters by which a function of the library's own form that scores all responses to a prompt is recognised."""
RUBRIC = ("parser", "judge")
"""Objects of a rubric of verifiers that its reward functions may take. Here there are none."""
WANTS_MESSAGES = (TypeError, AttributeError, KeyError, IndexError)
"""What a function raises that reads a text as a list of messages, or a list of messages as a text."""
READS_MESSAGES = re.compile("string indices must be integers|'str' object has no attribute|string index out of range")
"""What such an error on a text says. Any other is the function's own."""
OR_TEXT = re.compile(r"\bstr \||\| str\b|Union\[str")
"""In an annotation: texts are fine, too."""

MAX_ERROR_CHARS = 500

Form = Literal["own", "verl", "trl", "verifiers"]
Shown = Callable[[Item], tuple[Any, Any]]
"""A form of prompt and completion: `_as_text` or `_as_messages`."""


class Given(NamedTuple):
    """The arguments of a call.

    as_messages: the keyword arguments to try if the function fails on ``keywords`` because these are texts.
    """

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}
    as_messages: Mapping[str, Any] | None = None


class Call(NamedTuple):
    """How a reward function is called."""

    form: Form = "own"
    options: bool = False
    """Whether a function of the library's own form takes the `RewardConfig` as a third argument of another name."""
    names: tuple[str, ...] = ()
    """The keyword arguments that the function names: `KEYWORDS`, and those of another library."""
    optional: tuple[str, ...] = ()
    """Those of them that have a default."""
    rest: bool = False
    """Whether it takes any others, too (``**kwargs``)."""
    messages_only: bool = False
    """Whether its annotations ask for messages."""
    grouped: bool = False
    """Whether it scores all responses to a prompt in one call."""

    @property
    def transcript(self) -> bool:
        """Whether it takes the transcript of an episode."""
        return self.form == "own" and not {"transcript", "transcripts"}.isdisjoint(self.names)

    @property
    def logs(self) -> tuple[str, ...] | None:
        """The functions of `LOGS` that it takes; None if it scores one response."""
        return tuple(name for name in LOGS if self.rest or name in self.names) if self.grouped else None

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, keywords: Sequence[str] = KEYWORDS) -> "Call":
        """The way to call a function, read from its parameters.

        Args:
            keywords: what a function of the library's own form gets by keyword.

        Raises:
            GraderError: it cannot be called in any of the known ways; the message names it.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C do not say
            return cls()
        parameters, empty = signature.parameters, inspect.Parameter.empty
        optional = tuple(each for each in parameters if parameters[each].default is not empty)
        form = _foreign(parameters)
        if form == "own":
            names, grouped = tuple(each for each in keywords if each in parameters), not GROUPS.isdisjoint(parameters)
            if grouped and "transcript" in names:
                raise GraderError(
                    f"{name}: it gets all responses to a prompt; name its parameter transcripts, for a list"
                )
            for count in (2, 3):
                with suppress(TypeError):
                    signature.bind(*[None] * count, **dict.fromkeys(names))
                    return cls(form, count == 3, names, optional, grouped=grouped)
            raise _no_reward(name, signature)
        kinds = {each: parameter.kind for each, parameter in parameters.items()}
        rest = inspect.Parameter.VAR_KEYWORD in kinds.values()
        named = [each for each in kinds if not kinds[each].name.startswith("VAR_")]
        known = {"verl": VERL, "verifiers": VERIFIERS}.get(form)
        if known is not None:
            named = [each for each in (*known, "opened") if each in named or (rest and each != "opened")]
        try:
            signature.bind(**dict.fromkeys(named))
        except TypeError:
            raise _no_reward(name, signature) from None
        annotation = str(getattr(parameters.get("completions") or parameters.get("completion"), "annotation", ""))
        asks = any(word in annotation for word in ("dict", "Dict", "Message", "Mapping"))
        only = asks and not OR_TEXT.search(annotation)
        return cls(form, names=tuple(named), optional=optional, rest=rest, messages_only=only, grouped=form == "trl")

    def given(self, name: str, items: Sequence[Item], options: RewardConfig, state: TrainerState | None) -> Given:
        """The arguments of a call for one response, or for all responses to a prompt, without the functions of `LOGS`.

        Raises:
            GraderError: the function takes what cannot be given, such as a transcript; the message names it.
        """
        row, response, transcript = items[0]
        episodes = [item.transcript for item in items]
        if self.form in ("trl", "verifiers"):
            as_text, as_messages = (
                self._columns(name, items, form, state) if self.grouped else self._of_one(items[0], form)
                for form in (_as_text, _as_messages)
            )
            return Given((), as_messages) if self.messages_only else Given((), as_text, as_messages)
        told: dict[str, Any] = {"opened": response.opened, "options": options, "transcript": transcript}
        told["written"] = response.text
        if self.form == "verl":
            told |= zip(VERL, (row.data_source, response.plain, truth_of(row), dict(row.extra_info)), strict=True)
        elif None in episodes and {"transcript", "transcripts"} & {*self.names} - {*self.optional}:
            raise GraderError(
                f"{name}, row {row.example_id}: it reads the transcript of an episode, and a single response has none; "
                "set rollout.environment, or give the parameter `transcript` a default"
            )
        text: Any = response.text
        if self.grouped:
            text = [item.response.text for item in items]
            told |= {"transcripts": episodes, "opened": [item.response.opened for item in items]}
        own = (row, text, *((options,) if self.options else ())) if self.form == "own" else ()
        return Given(own, {name: told[name] for name in self.names})

    @property
    def remark(self) -> str:
        """What to add to an error of the function: for which library's it was taken, where that may be wrong."""
        names = ", ".join(self.names)
        fix = f" (called in verifiers' form because of its parameters {names}; name the first one `row` to get a Row)"
        return fix if self.form == "verifiers" else ""

    def checked(self, result: Any, name: str, items: Sequence[Item]) -> Score | GroupScores:
        """The result of the function as a score; what `called_group` returns as scores.

        Raises:
            GraderError: the result is not a score, or there is not a score, or None, for each response.
        """
        if not self.grouped:
            return checked(_of_verl(result) if self.form == "verl" else result, name, items[0].row)
        values = result["values"]
        if not isinstance(values, list) or len(values) != len(items):
            raise GraderError(
                f"{name}, row {items[0].row.example_id}: it got {len(items)} completions of a prompt in lists; "
                f"expected a list of {len(items)} numbers (None: no score), found {_shown(values)}"
            )
        scores = [
            NO_SCORE if value is None else checked(value, name, item.row)
            for value, item in zip(values, items, strict=True)
        ]
        return GroupScores(scores, result["metrics"], result["extra"])

    def _of_one(self, item: Item, form: Shown) -> dict[str, Any]:
        """The arguments of verifiers that the function takes."""
        told = {"opened": item.response.opened} | _of_verifiers(item, form)
        return {name: told[name] for name in self.names}

    def _columns(self, name: str, items: Sequence[Item], form: Shown, state: TrainerState | None) -> dict[str, Any]:
        """TRL's arguments, with those of verifiers in the plural. Other names are columns of the data set."""
        row, ids, theirs = items[0].row, [item.response.ids for item in items], [_of_verifiers(i, form) for i in items]
        fields = [columns(item.row, truth_of(item.row)) for item in items]
        known: dict[str, Any] = {key: [each[key[:-1]] for each in theirs] for key in PLURALS & {*self.names}}
        known["opened"] = [item.response.opened for item in items]
        known |= {key: [each.get(key) for each in fields] for key in fields[0]}
        known |= zip(("prompts", "completions"), map(list, zip(*map(form, items), strict=True)), strict=True)
        known |= {} if None in ids else {"completion_ids": [list(each or ()) for each in ids]}
        known |= {} if state is None else {"trainer_state": state}
        for each in self.names:
            if each in LOGS or each in self.optional or each in known:
                continue
            there = ", ".join(sorted(known.keys() - {"opened"}))
            of_row = f"which is no field of the row; put it into the row's extra_info. There are {there}"
            why = {
                "completion_ids": "and the ids of a text alone are not known; score a samples.jsonl, which has them",
                "trainer_state": "which only a training run has",
            }.get(each, of_row)
            raise GraderError(f"{name}, row {row.example_id}: it takes {each}, {why}; or give the parameter a default")
        own = {*self.names} | (known.keys() - {"opened"} if self.rest else set())
        return {each: value for each, value in known.items() if each in own}


def truth_of(row: Row) -> Any:
    """The ground truth as the row's file has it."""
    return row.ground_truth if row.raw_ground_truth is None else row.raw_ground_truth


def _as_text(item: Item) -> tuple[Any, Any]:
    """Prompt and completion as texts."""
    return "\n\n".join(str(message["content"]) for message in item.row.messages), item.response.plain


def _as_messages(item: Item) -> tuple[Any, Any]:
    """Prompt and completion as messages."""
    written: list[Any] = [{"role": "assistant", "content": item.response.plain}]
    if item.transcript is not None:
        written = [dict(message) for message in item.transcript.messages]
    return [dict(message) for message in item.row.messages], written


def _of_verifiers(item: Item, form: Shown) -> dict[str, Any]:
    """The arguments of verifiers."""
    row, _, transcript = item
    info = row.extra_info.get("info")  # a column of verifiers' own rows
    told = {"answer": truth_of(row), "task": row.data_source}
    told |= zip(("prompt", "completion"), form(item), strict=True)
    told["info"] = dict(info if isinstance(info, Mapping) else row.extra_info)
    state = transcript.state if transcript is not None and isinstance(transcript.state, Mapping) else {}
    return told | {"state": {**told, **state}}


def columns(row: Row, truth: Any) -> dict[str, Any]:
    """The fields of a row as the columns of a data set: ``extra_info``, and of the others those that it does not have.

    The ground truth is also ``answer`` and ``solution``, as it is called in most data sets.
    """
    named = {"data_source": row.data_source, "ability": row.ability, "ground_truth": truth}
    return {**named, "answer": truth, "solution": truth, **{str(key): value for key, value in row.extra_info.items()}}


def called(function: Callable[..., Any], given: Given) -> Any:
    """What a function returns for some arguments. A coroutine is run to its end.

    Raises:
        TypeError: it takes neither texts nor messages; the message has both errors.
        Exception: whatever the function raises.
    """
    try:
        return _settled(function(*given.positional, **given.keywords))
    except WANTS_MESSAGES as error:
        if given.as_messages is None or not READS_MESSAGES.search(str(error)):
            raise
        on_texts = error
    try:
        return _settled(function(*given.positional, **given.as_messages))
    except WANTS_MESSAGES as error:
        raise TypeError(
            f"on texts: {type(on_texts).__name__}: {on_texts}; on lists of messages: {type(error).__name__}: {error}"
        ) from error


def called_group(function: Callable[..., Any], given: Given, logs: Sequence[str], count: int) -> dict[str, Any]:
    """What a function returns for ``count`` responses to a prompt, and what it logs, as JSON values.

    Args:
        logs: the functions of `LOGS` that it takes.
    """
    metrics: dict[str, list[float]] = {}
    extra: dict[str, list[Any]] = {}

    def log_metric(name: str, value: Any) -> None:
        metrics.setdefault(str(name), []).append(number(value))

    def log_extra(column: str, values: Any) -> None:
        values = [*values]
        if len(values) != count:
            raise ValueError(f"log_extra({column!r}): {len(values)} values for {count} completions")
        extra[str(column)] = json.loads(json.dumps(values, default=_number_or_text))

    offered = {"log_metric": log_metric, "log_extra": log_extra}

    def attempt(*positional: Any, **arguments: Any) -> Any:
        metrics.clear()
        extra.clear()
        return function(*positional, **arguments, **{name: offered[name] for name in logs})

    values = called(attempt, given)
    if not isinstance(values, str | Mapping | None):
        with suppress(TypeError):  # which `Call.checked` says
            values = [*values]
    return {"values": values, "metrics": metrics, "extra": extra}


def raised(error: BaseException, function: Callable[..., Any]) -> str:
    """An exception in a user's function in words, with its place in the file of the function."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename] or frames
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:MAX_ERROR_CHARS]}{where}"


def is_metric(name: str) -> bool:
    """Whether the library has a metric of this name, so that no part of a score may have it.

    Examples:
        >>> is_metric("length"), is_metric("pass@1"), is_metric("brevity")
        (True, True, False)
    """
    return name in METRICS or name.startswith(OF_K)


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
        usable = usable and "acc" in score.parts and not any(map(is_metric, score.parts))
        usable = usable and (score.answer is None or isinstance(score.answer, str))
    if not usable:
        raise GraderError(
            f"{name}, row {row.example_id}: expected a finite number, or Score(value, parts, answer) with finite "
            f"numbers, acc (0 or 1) and none of {', '.join((*METRICS, 'pass@…'))} among the parts, and a string or "
            f"None as the answer; found {_shown(result)}"
        )
    return score


# ----------------------------------------------------------------------------------------------------------------------


def _foreign(parameters: Mapping[str, inspect.Parameter]) -> Form:
    """The other library that a function was written for, if it is none of our own."""
    if parameters.keys() >= VERL_MARKS:
        return "verl"
    if "row" in parameters:
        return "own"
    if "completions" in parameters or "states" in parameters:
        return "trl"
    if "completion" in parameters:
        theirs = next(iter(parameters)) in ("completion", *RUBRIC) or "prompt" in parameters
        several = len(parameters.keys() & {*VERIFIERS}) > 2  # (task, completion) may be of ours
        return "verifiers" if theirs or several else "own"
    return "own"


def _no_reward(name: str, signature: inspect.Signature) -> GraderError:
    return GraderError(
        f"{name}: its parameters are {signature}; expected (row, text) or (row, text, options), (row, texts) for all "
        f"responses to a prompt, `transcript` and `opened` with any, or verl's ({', '.join(VERL)}), TRL's (prompts, "
        f"completions, **kwargs) or verifiers' ({', '.join(VERIFIERS)}); bind others with functools.partial"
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
    rest = {f"verl_{name}" if is_metric(name) else name: x for name, x in rest.items()}
    parts: dict[str, Any] = {name: x for name, x in rest.items() if isinstance(x, SupportsFloat)}
    answer = None if result.get("pred") is None else str(result["pred"])
    try:
        parts.setdefault("acc", float(number(result["score"]) >= 1.0))
    except TypeError:
        return result
    return Score(result["score"], parts, answer)


def _settled(result: Any) -> Any:
    """The result of a call, for which a coroutine is run, in a thread of its own if this one has an event loop."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, wait()).result()


def _number_or_text(value: Any) -> float | str:
    return number(value) if isinstance(value, SupportsFloat) else str(value)


def _shown(result: Any) -> str:
    """What a function returned, and of which type that is."""
    if result is None:
        return "None; does every branch of the function return something?"
    shown = f"{result!r:.200}"
    plain = isinstance(result, float | tuple | list | dict)
    return shown if plain else f"{shown}, which is a {type(result).__name__}"
