"""Judges, which are models that score responses; the rewards made of their scores; and a reward to train a judge.

How a reward of a judge comes about: `judged` compares the answer by rules and defers to the pool "judge", which
`rewards.scoring.Scorer` settles for a whole batch at once with a `JudgePool`; that asks a `Judge`, over HTTP an
`HttpJudge`, whose requests, retries and time limits are those of `processes.http.Client`. ``rewards.services.judges``
makes the pool of a config.

The rubric reward model of arXiv 2510.07774 scores a whole response by the criteria of its problem. The verifier of
arXiv 2505.14625 (TinyV) says whether two answers are the same. If a reply holds no score, the judge is asked again. A
response without a score in the end is unscored and not used in training. It is an error if more than the share
``judge.max_failure_rate`` of a batch is unscored, or if the judge is down. A judge that fails never becomes a silent 0.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tandemrl.config import JudgeConfig, RewardConfig
from tandemrl.data.messages import sound
from tandemrl.data.rows import DataError, Row
from tandemrl.processes.http import Client, RefusedError, Response, RetryableError, Service, chat_message, excerpt
from tandemrl.rewards.protocol import Deferred, GraderError, Score
from tandemrl.tasks.math.prime import prime
from tandemrl.tasks.rubric.rows import FIELDS, POLARIS, fill

Messages = Sequence[Mapping[str, str]]
Usable = Callable[[str], bool]

FULL_MARKS = 10.0
SEVERAL = 4
"""If at least this many responses are judged and none gets a score, this is an error, however large the batch is."""


class JudgeError(GraderError):
    """A judge cannot be asked, or gives no scores. The message says what was tried and what to change."""


@runtime_checkable
class Judge(Protocol):
    """A model that replies to chat prompts. ``model`` is its name."""

    model: str

    def ask(self, prompts: Sequence[Messages], usable: Usable = lambda reply: True) -> list[str]:
        """Get one reply per prompt, in order.

        Args:
            usable: whether a reply will do. If not, it is asked for anew up to ``judge.retries`` times, at
                ``judge.retry_temperature``.

        Raises:
            JudgeError: a prompt has no reply.
        """
        ...


class HttpJudge:
    """A `rubric.Judge` that gets its replies from ``judge.url``, with at most ``judge.concurrency`` requests at a time.

    ``model`` is the name of the model that replies: ``judge.model``, or the first one that the endpoint lists. If the
    endpoint does not answer yet, the constructor waits for up to ``judge.wait_s``.

    Raises:
        JudgeError: the endpoint is down or does not serve ``judge.model``, or ``judge.api_key_env`` is not set.

    Examples:
        >>> judge = HttpJudge(JudgeConfig(url="http://localhost:8000/v1"))
        >>> judge.ask([[{"role": "user", "content": "Reply with one word: True or False. Is 7 prime?"}]])
    """

    def __init__(self, config: JudgeConfig) -> None:
        if config.url is None:
            raise JudgeError("judge.url is not set; give an address such as http://localhost:8000/v1")
        self.config = config
        self._client = Client(Service.of(config, "judge", "vllm serve MODEL", JudgeError))
        self._client.wait(config.wait_s)
        self.model = self._client.model(config.model)

    def ask(self, prompts: Sequence[Messages], usable: Usable = lambda reply: True) -> list[str]:
        """Get one reply per prompt, in order.

        A prompt is sent at most 1 + ``judge.retries`` times, whether requests fail or replies are not ``usable``. After
        each of those, the next one is sampled at ``judge.retry_temperature``, with their number as the seed.

        Raises:
            JudgeError: a prompt has no reply after all retries; the other prompts are then given up, too.
        """

        def read(response: Response) -> str:
            reply = _reply(response)
            if not usable(reply):
                raise RefusedError(reply)
            return reply

        bodies = [partial(self._body, [*messages]) for messages in prompts]
        return self._client.post_all("/chat/completions", bodies, read)

    def _body(self, messages: Messages, refused: int) -> dict[str, Any]:
        config, warmth = self.config, self.config.retry_temperature if refused else self.config.temperature
        body = {"model": self.model, "max_completion_tokens": config.max_tokens, "temperature": warmth, "top_p": 1.0}
        return body | ({"seed": refused} if warmth > 0 else {}) | {"messages": messages}


class Template(NamedTuple):
    """What a judge is shown, and how its reply is read.

    whole: whether the judge sees the whole response rather than the extracted answer.
    """

    text: str
    parse: Callable[[str], float | None]
    whole: bool


PROMPTS = Path(__file__).with_name("prompts")
"""The folder of the library's templates, by ``judge.prompt``."""


# --------------------------------------------------------------------------------------------------- reading a reply


def parse_score(text: str, full: float = FULL_MARKS) -> float | None:
    """The score after the last "Total Score" of a reply, from 0 to 1, or None if there is none that can be trusted.

    A reply without these words counts only if it consists of the score alone. Scores are out of ``full``, and the
    result is clamped to [0, 1]. Another denominator, a sum, a range, a percentage or a number that is not finite gives
    None. The table in docs/howto/judge.md lists what the published code reads otherwise.

    Examples:
        >>> [parse_score(text) for text in ("**Total Score: 7/10**", "Total Score: [8.5/10 points]", "about seven")]
        [0.7, 0.85, None]
    """
    text = _after_thinking(text)
    marks = list(_MARK.finditer(text))
    score = _SCORE.match(text, marks[-1].end() if marks else 0)
    if score is None:
        return None
    rest = text[score.end() :]
    if not marks and rest.strip(_DECORATION):
        return None
    if score["total"] is not None:
        if float(score["total"]) != full or re.match(r"[\w%]|\s*[-+*/–—]\s*[0-9]", rest):
            return None
    elif re.match(r"\w|[.,]\w|\s*[-–—~]\s*[0-9]", rest) or re.search(r"[/=+%]", rest.partition("\n")[0]):
        return None
    value = float(score["score"].replace("−", "-"))
    return min(max(value / full, 0.0), 1.0) if value < float("inf") else None


def parse_verdict(text: str) -> float | None:
    """1 if a reply says true (or yes), 0 if it says false (or no), None if it says neither, both, or negates its word.

    Examples:
        >>> [parse_verdict(text) for text in ("True.", "no", "It isn't true.", "not entirely false")]
        [1.0, 0.0, None, None]
    """
    text = _after_thinking(text).rpartition("Answer:")[2].lower()
    for positive, negative in (("true", "false"), ("yes", "no")):
        if re.search(rf"(?:\bnot|\bcannot|\bnever|n['’]t)\s+(?:\w+\s+)?(?:{positive}|{negative})\b", text):
            return None
        verdicts = {word for word in (positive, negative) if re.search(rf"\b{word}\b", text)}
        if verdicts:
            return None if len(verdicts) == 2 else float(positive in verdicts)
    return None


# ------------------------------------------------------------------------------------------------------------- rewards


def judged(row: Row, text: str, options: RewardConfig, written: str) -> Score | Deferred:
    """The score of a judge, which reads the text as written after PRIME's grader has given its verdict."""
    return _follow(prime(row, text, options), lambda rule: Deferred("judge", (row, written, rule)))


def graded(row: Row, text: str, options: RewardConfig, written: str, opened: str) -> Score:
    """The reward of a judge that is trained. A thought that the chat template opens may not be over."""
    return grade_score(row, opened + written)


def grade_score(row: Row, text: str) -> Score:
    """The reward that trains a rubric reward model (source: the code of arXiv 2510.07774).

    It is ``(1 − |s − t|)²`` for a response with the score s to a row whose ground truth is t, both in [0, 1], and 0 for
    a response without a score. ``acc`` is 1 if s is within half a point of ten of t. ``answer_present`` is 1 if the
    response has a score.

    Raises:
        DataError: the ground truth is not a number in [0, 1].
    """
    try:
        target = float(row.ground_truth)
    except ValueError:
        target = float("nan")
    if not 0.0 <= target <= 1.0:
        raise DataError(f"row {row.example_id}: ground_truth {row.ground_truth!r} must be a score in [0, 1]")
    score = parse_score(text)
    if score is None:
        return Score(0.0, {"acc": 0.0, "answer_present": 0.0}, None)
    error = abs(score - target)
    parts = {"acc": float(error <= 0.05 + 1e-9), "answer_present": 1.0, "grade_error": error}
    return Score((1.0 - error) ** 2, parts, f"{score:g}")


def judge_pool(config: JudgeConfig, judge: Judge | None = None) -> "JudgePool":
    """A judge, or else the one at ``judge.url``, as one that scores batches."""
    return JudgePool(judge or HttpJudge(config), config)


class JudgePool:
    """Scores whole batches with a judge. It is the ``judge`` argument of `scoring.Scorer`.

    The reward is made of r, the ``acc`` of the rules, and j, the judge's score in [0, 1]. ``judge.mode`` decides how:
    ``addon`` is 1 if r is 1, else weight·j, and the judge is asked only where r is 0; ``mixed`` is
    weight·j + (1 − weight)·r; ``tinyv_only`` is j.

    The parts of a score are: ``rule``, which is r; ``judge_asked``, which is 1 if the judge was asked; ``judge``, which
    is j if it was asked; and ``unscored``, which is 1 if none of its replies held a score (the reward is then 0 and
    meaningless, see `protocol.Score`). ``acc`` is r for a judge of reasoning. For a judge of answers (``tinyv``) it is
    1 if the rules or the judge accept the answer, and with ``tinyv_only`` if the judge does.

    A request that fails, or whose reply has no score, is made again up to ``judge.retries`` times. Without any reply
    the run ends; without a score the response is unscored, which ``judge.max_failure_rate`` limits.

    Raises:
        JudgeError: the judge is down, ``judge.template`` cannot be used, or no score was found for more than the share
            ``judge.max_failure_rate`` of the responses, or for any of several that it was asked about.
        DataError: a row lacks a field that the template shows; the message names both.
    """

    def __init__(self, judge: Judge, config: JudgeConfig) -> None:
        self.judge, self.config = judge, config
        self.template = template_of(config)
        self._refused_reply = ""  # the last one that held no score, for the error message

    def __call__(self, items: Sequence[tuple[Row, str, Score]]) -> list[Score]:
        scores = self.score_part(items)
        self.check(scores)
        return scores

    def score_part(self, items: Sequence[tuple[Row, str, Score]]) -> list[Score]:
        """Score a part of a batch. Call `check` with the scores of the whole batch, which limits the unscored ones."""
        asked = [
            i
            for i, (_, _, rule) in enumerate(items)
            if not (self.config.mode == "addon" and rule.parts["acc"])
            and (self.template.whole or rule.answer is not None)
        ]
        marks = dict(zip(asked, self._marks([(*items[i][:2], items[i][2].answer) for i in asked]), strict=True))
        return [self._reward(rule, i in marks, marks.get(i)) for i, (_, _, rule) in enumerate(items)]

    def check(self, scores: Sequence[Score]) -> None:
        """Check the scores of a whole batch against ``judge.max_failure_rate``. Only scores of a judge count.

        Raises:
            JudgeError: too many are unscored.
        """
        judged = [score for score in scores if "judge_asked" in score.parts]
        self._check([score.scored for score in judged if score.parts["judge_asked"]], len(judged))

    def marks(self, items: Sequence[tuple[Row, str, str | None]]) -> list[float | None]:
        """The judge's score in [0, 1] for each (row, response, extracted answer), or None if no reply held one.

        Equal prompts are asked once. A judge of answers is not asked about a response without an answer, whose score is
        0.

        Raises:
            JudgeError, DataError: as listed for the class.
        """
        marks = self._marks(items)
        self._check([mark is not None for mark in marks], len(marks))
        return marks

    def _check(self, scored: Sequence[bool], batch: int) -> None:
        """Raise a `JudgeError` if too many of the responses that it was asked about, in a batch, are unscored."""
        limit, unscored, asked = self.config.max_failure_rate, scored.count(False), len(scored)
        allowed = max(1, math.floor(limit * batch)) if limit > 0 else 0
        if unscored <= allowed and not unscored == asked >= SEVERAL:
            return
        form = '"Total Score: x/10"' if self.template.parse is parse_score else '"True" or "False"'
        reply = f"; the last such reply ends: {self._refused_reply[-200:]!r}" if self._refused_reply else ""
        raise JudgeError(
            f"the judge gave no score to {unscored} of the {asked} responses it was asked about, in a batch of {batch} "
            f"(judge.max_failure_rate={limit:g}): no reply, of up to {1 + self.config.retries} to each, holds {form}"
            f"{reply}. Is this the right judge.model, judge.prompt and judge.max_tokens?"
        )

    def _marks(self, items: Sequence[tuple[Row, str, str | None]]) -> list[float | None]:
        """As `marks`, without a limit on how many may be None."""
        prompts = [self._prompt(row, text if self.template.whole else answer) for row, text, answer in items]
        asked, parse = [*dict.fromkeys(prompt for prompt in prompts if prompt is not None)], self.template.parse
        messages = [[{"role": "user", "content": prompt}] for prompt in asked]
        replies = self.judge.ask(messages, lambda reply: parse(reply) is not None) if asked else []
        if len(replies) != len(asked):
            raise JudgeError(f"the judge gave {len(replies)} replies to {len(asked)} prompts")
        marks = {prompt: parse(reply) for prompt, reply in zip(asked, replies, strict=True)}
        refused = [reply for prompt, reply in zip(asked, replies, strict=True) if marks[prompt] is None]
        self._refused_reply = refused[-1] if refused else self._refused_reply
        return [0.0 if prompt is None else marks[prompt] for prompt in prompts]

    def _prompt(self, row: Row, answer: str | None) -> str | None:
        if answer is None:
            return None
        fields = {"MODEL_ANSWER": lambda: answer, "QUESTION": lambda: _question(row)}
        fields |= {"GROUND_TRUTH_ANSWER": lambda: row.ground_truth, "CRITERIA": lambda: _criteria(row)}
        return fill(self.template.text, lambda field: fields[field]())

    def _reward(self, rule: Score, asked: bool, mark: float | None) -> Score:
        mode, weight = self.config.mode, self.config.weight
        r, j = float(rule.parts["acc"]), mark or 0.0
        mixed = weight * j + (1.0 - weight) * r
        value = {"tinyv_only": j, "mixed": mixed, "addon": 1.0 if r else weight * j}[mode]
        acc = r if self.template.whole else j if mode == "tinyv_only" else max(r, j)
        # A verdict that the rules lost does not count as lost, since the judge is asked.
        parts = {f"rule_{name}" if name in ("timeout", "failure") else name: part for name, part in rule.parts.items()}
        parts |= {"acc": acc, "rule": r, "judge_asked": float(asked)}
        if asked and mark is None:
            return Score(0.0, parts | {"unscored": 1.0}, rule.answer)
        return Score(value, parts | ({"judge": j} if asked else {}), rule.answer)


def template_of(config: JudgeConfig) -> Template:
    """The template that a config names, with the text of the file ``judge.template`` if there is one.

    Raises:
        JudgeError: the file cannot be read, does not show the response, or has an unknown field.
    """
    of_scale = partial(parse_score, full=4.0) if config.prompt == "legibility" else parse_score
    parse, whole = (parse_verdict, False) if config.prompt == "tinyv" else (of_scale, True)
    try:
        text = Path(config.template or PROMPTS / f"{config.prompt}.txt").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JudgeError(f"judge.template={config.template}: not readable: {error}") from None
    unknown = set(re.findall(r"\{\{(\w+)\}\}", text)) - set(FIELDS)
    if unknown or "{{MODEL_ANSWER}}" not in text:
        problem = f"unknown field {{{{{min(unknown)}}}}}" if unknown else "no {{MODEL_ANSWER}}"
        raise JudgeError(f"judge.template={config.template}: {problem}; known: {', '.join(FIELDS)}")
    return Template(text, parse, whole)


def other_words(rows: Iterable[Row], config: JudgeConfig) -> str | None:
    """Why a judge does not expect the words that it is asked with, or None: a rubric reward model replies to the words
    that it was trained on.

    Raises:
        JudgeError: as in `template_of`.
    """
    ours, published = (template_of(each).text for each in (config, JudgeConfig(prompt="rrm")))
    words = re.compile(".*?".join(re.escape(each.strip()) for each in re.split(r"\{\{\w+\}\}", ours)), re.DOTALL)
    chosen = f"judge.template={config.template}" if config.template else f"judge.prompt={config.prompt}"
    asks = config.url is not None or config.model is not None
    for row in rows:
        if row.data_source == "grade" and not words.match(row.messages[-1]["content"].strip()):
            return (
                f"row {row.example_id} trains a judge in other words than those of {chosen}; ask the judge in the "
                "words of its rows: judge.prompt or judge.template=FILE"
            )
        if asks and row.data_source == POLARIS and ours != published:
            return (
                f"row {row.example_id}: {chosen} asks in other words than the published judge of {POLARIS} was trained "
                "on; if yours is a rubric reward model: judge.prompt=rrm"
            )
    return None


# --------------------------------------------------------------------------------------------------------------------


def _reply(response: Response) -> str:
    """The text of a chat completion. It is "" if there is none, as from a model that never stopped thinking."""
    message = chat_message(response)
    if "content" not in message:
        raise RetryableError(f"not a chat completion: {excerpt(response.body)}")
    content = message["content"]
    if content is not None and not isinstance(content, str):
        raise RetryableError(f"not a text: {excerpt(response.body)}")
    return sound(content or "")


def _follow(first: Any, then: Callable[[Score], Score | Deferred]) -> Score | Deferred:
    """Apply ``then`` to a score, now or as soon as a deferred score is found."""
    if isinstance(first, Score):
        return then(first)
    return first._replace(then=lambda outcome: _follow(first.then(outcome), then))


_DECORATION = " \t\r\n:*_`[](){}|'\"$>"
_MARK = re.compile(r"total score", re.IGNORECASE)
_SCORE = re.compile(
    r"""[\s:*_`\[({|'"$>=]* (?: out\ of\ 10 [\s:*)\]]* )?
        (?P<score> [-−+]? (?: [0-9]+ (?:\.[0-9]*)? | \.[0-9]+ ) )
        (?: \s* (?:points?|pts) \b )?
        (?: [\s*_`\])}|'"$]* (?:/|out\ of) [\s*_`\[({$]* (?P<total> [0-9]+ (?:\.[0-9]+)? ) )?""",
    re.VERBOSE | re.IGNORECASE,
)


def _after_thinking(text: str) -> str:
    """The reply of a model that thinks first, without the thought. It is "" if the model was cut off while thinking."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def _question(row: Row) -> str:
    said = [message["content"] for message in row.messages if message["role"] == "user"]
    if not (question := row.extra_info.get("question") or (said and said[-1])):
        raise DataError(f"row {row.example_id}, field 'extra_info.question': missing, and there is no user message")
    return str(question)


def _criteria(row: Row) -> str:
    criteria: Any = row.extra_info.get("criteria")
    if not criteria:
        raise DataError(
            f"row {row.example_id}, field 'extra_info.criteria': missing; judge.prompt=rubric and rrm need it. "
            "judge.prompt=reasoning judges without criteria"
        )
    return criteria if isinstance(criteria, str) else json.dumps(criteria, ensure_ascii=False)
