"""How a user's reward function is called, and what it may return. The module does not import torch.

The library's own form is ``(row, text) -> Score | float``. A third parameter, ``options``, receives the `RewardConfig`.
A parameter called ``transcript`` receives the `Transcript` of an episode of several turns; ``text`` is then what the
authors wrote in it. If the function returns a plain number x, this becomes a `Score` whose ``acc`` (is the response
correct?) is 1 if x ≥ 1, else 0.

Functions that were written for other libraries are recognised by the names of their parameters, and called by keyword:

========= =================================== ==========================================================================
library   recognised by                       given
========= =================================== ==========================================================================
verl      ``solution_str``, ``ground_truth``  those of ``data_source``, ``solution_str``, ``ground_truth`` and
                                              ``extra_info`` that it takes
TRL       ``completions``                     ``prompts``, ``completions`` and the fields of the row (`columns`), each
                                              as a list of one
verifiers ``completion`` first, or with       those of ``prompt``, ``completion``, ``answer``, ``state``, ``task`` and
          ``prompt``, or with two others      ``info`` that it takes
          of these names
========= =================================== ==========================================================================

The ground truth is the value in the row's file, even if that is not text. A function of verl's may return a number, a
dict with ``score``, whose other numbers become parts of the score (as ``verl_NAME`` if a metric has the name, see
`is_metric`) and whose ``pred`` is the answer, or a tuple that begins with the score. A function of TRL's returns a list
of one number.

TRL and verifiers give prompts and completions as texts or as lists of messages, depending on the data set. Here a
function gets texts. If it fails on them as one does that expects messages, it gets messages; if the annotation of the
completion says that it is a list of dicts, it gets them at once.

Any of these functions may be ``async``.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, SupportsFloat

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import GraderError, Score, number

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
RUBRIC = ("parser", "judge")
"""Objects of a rubric of verifiers that its reward functions may take. Here there are none."""
WANTS_MESSAGES = (TypeError, AttributeError, KeyError, IndexError)
"""What a function raises that reads a text as a list of messages, or a list of messages as a text."""
READS_MESSAGES = re.compile("string indices must be integers|'str' object has no attribute|string index out of range")
"""What such an error on a text says. Any other is the function's own."""
OR_TEXT = re.compile(r"\bstr \||\| str\b|Union\[str")
"""In an annotation: texts are fine, too."""

Form = Literal["own", "verl", "trl", "verifiers"]


class Given(NamedTuple):
    """The arguments of a call.

    as_messages: the keyword arguments to try if the function fails on ``keywords`` because these are texts.
    """

    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = {}
    as_messages: Mapping[str, Any] | None = None

    def bound(self, parameters: Mapping[str, Any]) -> "Given":
        """The same call with values for further parameters."""
        as_messages = None if self.as_messages is None else {**self.as_messages, **parameters}
        return Given(self.positional, {**self.keywords, **parameters}, as_messages)


class Call(NamedTuple):
    """How a reward function is called."""

    form: Form = "own"
    options: bool = False
    """Whether a function of the library's own form takes the `RewardConfig`."""
    transcript: Literal["no", "may", "must"] = "no"
    """Whether a function of the library's own form takes the transcript."""
    names: tuple[str, ...] = ()
    """The keyword arguments of another library that the function names."""
    optional: tuple[str, ...] = ()
    """Those of them that have a default."""
    rest: bool = False
    """Whether it takes any others, too (``**kwargs``)."""
    messages_only: bool = False
    """Whether its annotations ask for messages."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> "Call":
        """The way to call a function, read from its parameters.

        Raises:
            GraderError: it cannot be called in any of the known ways; the message names it.
        """
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C do not say
            return cls()
        parameters = signature.parameters
        if form := _foreign(parameters):
            kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
            known = {"verl": VERL, "verifiers": VERIFIERS}.get(form)
            named = tuple(each for each in parameters if parameters[each].kind not in kinds)
            names = named if known is None else tuple(each for each in known if rest or each in named)
            optional = tuple(each for each in named if parameters[each].default is not inspect.Parameter.empty)
            try:
                signature.bind(**dict.fromkeys(names))
            except TypeError:
                raise _no_reward(name, signature) from None
            annotation = str(getattr(parameters.get("completions") or parameters.get("completion"), "annotation", ""))
            asks = any(word in annotation for word in ("dict", "Dict", "Message", "Mapping"))
            return cls(
                form, names=names, optional=optional, rest=rest, messages_only=asks and not OR_TEXT.search(annotation)
            )
        if (transcript := parameters.get("transcript")) is not None:
            options = "options" in parameters
            try:
                signature.bind(None, None, transcript=None, **({"options": None} if options else {}))
            except TypeError:
                raise _no_reward(name, signature) from None
            return cls("own", options, "must" if transcript.default is inspect.Parameter.empty else "may")
        for count in (3, 2) if "options" in parameters else (2, 3):
            try:
                signature.bind(*[None] * count)
            except TypeError:
                continue
            return cls("own", options=count == 3)
        raise _no_reward(name, signature)

    def arguments(self, name: str, row: Row, text: str, options: RewardConfig, transcript: Transcript | None) -> Given:
        """The arguments of a call.

        Raises:
            GraderError: the function reads transcripts, and there is none; or it takes a field that the row lacks.
        """
        truth = row.ground_truth if row.raw_ground_truth is None else row.raw_ground_truth
        if self.form == "verl":
            told = (row.data_source, text, truth, dict(row.extra_info))
            return Given((), {part: value for part, value in zip(VERL, told, strict=True) if part in self.names})
        if self.form != "own":
            written = [{"role": "assistant", "content": text}]
            if transcript is not None:
                written = [dict(message) for message in transcript.messages]
            asked = "\n\n".join(str(message["content"]) for message in row.messages)
            fill = self._columns if self.form == "trl" else self._named
            as_text = fill(name, row, asked, text, truth, transcript)
            as_messages = fill(name, row, [dict(message) for message in row.messages], written, truth, transcript)
            return Given((), as_messages) if self.messages_only else Given((), as_text, as_messages)
        if self.transcript == "no":
            return Given((row, text, options) if self.options else (row, text))
        if self.transcript == "must" and transcript is None:
            raise GraderError(
                f"{name}, row {row.example_id}: it reads the transcript of an episode, and a single response has none; "
                "set rollout.environment, or give the parameter `transcript` a default"
            )
        return Given((row, text), {"transcript": transcript, **({"options": options} if self.options else {})})

    @property
    def remark(self) -> str:
        """What to add to an error of the function: for which library's it was taken, where that may be wrong."""
        if self.form != "verifiers":
            return ""
        return (
            f" (called in verifiers' form because of its parameters {', '.join(self.names)}; name the first one `row` "
            "to get a Row)"
        )

    def checked(self, result: Any, name: str, row: Row) -> Score:
        """The result of the function as a score.

        Raises:
            GraderError: the result is not a score.
        """
        if self.form == "verl":
            result = _of_verl(result)
        if self.form == "trl" and isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        return checked(result, name, row)

    def _columns(self, name: str, row: Row, prompt: Any, completion: Any, truth: Any, _: Any) -> dict[str, Any]:
        """TRL's arguments: each value stands in a list of one."""
        known = columns(row, truth) | {"prompts": prompt, "completions": completion}
        missing = next((each for each in self.names if each not in known and each not in self.optional), None)
        if missing is not None:
            raise GraderError(
                f"{name}, row {row.example_id}: it takes {missing}, which is no field of the row; put it into the "
                f"row's extra_info, or give the parameter a default. There are {', '.join(sorted(known))}"
            )
        return {each: [value] for each, value in known.items() if self.rest or each in self.names}

    def _named(
        self, name: str, row: Row, prompt: Any, completion: Any, truth: Any, transcript: Transcript | None
    ) -> dict[str, Any]:
        """The arguments of verifiers."""
        told = {"prompt": prompt, "completion": completion, "answer": truth, "task": row.data_source}
        told["info"] = dict(row.extra_info)
        state = transcript.state if transcript is not None and isinstance(transcript.state, Mapping) else {}
        told["state"] = {**told, **state}
        return {each: told[each] for each in self.names}


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


def _foreign(parameters: Mapping[str, inspect.Parameter]) -> Form | None:
    """The other library that a function was written for, or None."""
    if parameters.keys() >= VERL_MARKS:
        return "verl"
    if "row" in parameters:
        return None
    if "completions" in parameters:
        return "trl"
    if "completion" in parameters:
        theirs = next(iter(parameters)) in ("completion", *RUBRIC) or "prompt" in parameters
        several = len(parameters.keys() & {*VERIFIERS}) > 2  # (task, completion) may be of ours
        return "verifiers" if theirs or several else None
    return None


def _no_reward(name: str, signature: inspect.Signature) -> GraderError:
    return GraderError(
        f"{name}: its parameters are {signature}; expected (row, text) or (row, text, options), and `transcript` with "
        f"either, or verl's ({', '.join(VERL)}), TRL's (prompts, completions, **kwargs) or verifiers' "
        f"({', '.join(VERIFIERS)}); bind others with functools.partial"
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


def _shown(result: Any) -> str:
    """What a function returned, and of which type that is."""
    if result is None:
        return "None; does every branch of the function return something?"
    shown = f"{result!r:.200}"
    plain = isinstance(result, float | tuple | list | dict)
    return shown if plain else f"{shown}, which is a {type(result).__name__}"
