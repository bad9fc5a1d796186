"""Scores the program in a response by its tests (see `tests`), which run in a `sandbox`.

Every test counts, while PRIME stops after ten. Printed text is compared word by word, in order, while PRIME also
accepts the same set of words. If the expected number has a decimal point, the printed one may differ by a relative
1e-5, numpy's default.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from tandemrl.config import Config, RewardConfig, SandboxConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, Score
from tandemrl.tasks.code.sandbox import Sandbox
from tandemrl.tasks.code.tests import Check, Stdin, Test, parse_tests

RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""How far a printed number may be from the expected one, relatively and absolutely."""
MAX_NUMBER_CHARS = 400

_FENCE = re.compile(r"(?P<before>(?:(?!```).)*?)(?P<fence>`{3,}|(?<![^\s>.)*+-])~{3,})[ \t]*(?P<info>[^`\n]*)")
_PYTHON = re.compile(r"\{?\.?(?:python3?|py)\b", re.IGNORECASE)
_PLACE = re.compile(r"[ \t>]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*")
"""What stands before a fence in a quotation or a list."""
_INDENT = re.compile(r"^[ \t\xa0]+", re.MULTILINE)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?")


def code(row: Row, text: str, options: RewardConfig) -> Deferred:
    """The share of the row's tests that the program in the response passes, in a sandbox.

    Raises:
        DataError: the ground truth holds no tests.
    """
    parse_tests(row)
    return Deferred("code", (row, text))


def score_code(
    row: Row, text: str, *, sandbox: SandboxConfig, credit: Literal["fraction", "all"] = "fraction"
) -> Score:
    """The share of the row's tests that the program in ``text`` passes. With ``credit="all"`` it is 1 if all pass, else
    0.

    The parts are ``acc`` (whether all tests passed), ``answer_present`` (whether there is a fenced block),
    ``tests_passed`` and ``tests_timed_out`` (shares of all tests). The call blocks until the tests are done. It may be
    made from several threads.

    Raises:
        DataError: the row's ground truth has none of the known formats.
        SandboxError: programs cannot be run safely here.

    Examples:
        >>> row = Row("a", (), "apps", '{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}', {})
        >>> reply = "```python\nprint(sum(map(int, input().split())))\n```"
        >>> score_code(row, reply, sandbox=SandboxConfig()).value
        1.0
    """
    tests = parse_tests(row)
    program = extract_program(text)
    fenced = float("```" in text)
    if not program.strip():
        return Score(0.0, {"acc": 0.0, "answer_present": 0.0, "tests_passed": 0.0, "tests_timed_out": 0.0}, None)
    passed = late = 0
    box = Sandbox(sandbox)
    for done, (test, expected) in enumerate(tests):
        if (left := sandbox.program_timeout_s - box.seconds) <= 0:
            late += len(tests) - done
            break
        outcome = box.run(program, test, timeout_s=left)
        good = outcome.status == "ok" and _agrees(test, outcome.output, outcome.value, expected)
        passed += good
        late += outcome.status == "timeout"
        if outcome.status == "syntax" or (credit == "all" and not good):
            break
    share, acc = passed / len(tests), float(passed == len(tests))
    parts = {"acc": acc, "answer_present": fenced, "tests_passed": share, "tests_timed_out": late / len(tests)}
    return Score(acc if credit == "all" else share, parts, program)


def code_scorer(config: Config) -> Callable[[Row, str], Score]:
    """``score_code`` with the settings ``sandbox.*`` and ``reward.code_credit`` of a config."""
    return partial(score_code, sandbox=config.sandbox, credit=config.reward.code_credit)


def extract_program(text: str) -> str:
    """The program in a response: the last block with a Python fence. Without a Python fence it is the last fenced
    block, closed if there is one, and without any fence the whole text.

    A block in a list or a quotation has as much less indentation as its fence has, and no ">".
    """
    blocks = list(_blocks(text))
    for wanted in (lambda block: _PYTHON.match(block.info), lambda block: block.closed, lambda block: True):
        if chosen := [block.program for block in blocks if wanted(block)]:
            return _INDENT.sub(lambda indent: indent[0].replace("\xa0", " "), chosen[-1])
    return text


class _Block(NamedTuple):
    info: str
    program: str
    closed: bool


def _blocks(text: str) -> Iterator[_Block]:
    """The fenced blocks of a text. A Python fence begins one also within a block of another language."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        content = line.rstrip()
        found = _FENCE.fullmatch(content)
        if opening is None:
            opening, lines = found, []
            continue
        inner = _inside(line, opening["before"])
        if found and _PYTHON.match(found["info"]) and not _PYTHON.match(opening["info"]):
            yield _Block(opening["info"], "".join(lines), closed=False)
            opening, lines = found, []
        elif inner.lstrip().startswith(opening["fence"]) or content.endswith(opening["fence"]):
            lines.append(inner.partition(opening["fence"])[0])
            yield _Block(opening["info"], "".join(lines), closed=True)
            opening = None
        else:
            lines.append(inner)
    if opening is not None and "".join(lines).strip():
        yield _Block(opening["info"], "".join(lines), closed=False)


def _inside(line: str, before: str) -> str:
    """A line of a block without the quotation marks and the indentation that its fence has."""
    if not (before and _PLACE.fullmatch(before)):
        return line
    line = re.sub(rf"(?:[ \t]*> ?){{0,{before.count('>')}}}", "", line, count=1)
    indent = re.sub(r".*> ?", "", before)
    if line.startswith(indent):
        return line[len(indent) :]
    code = line.lstrip(" \t")
    return line[: len(line) - len(code)].expandtabs(4)[len(indent.expandtabs(4)) :] + code


# --------------------------------------------------------------------------------------------------------------------


def _agrees(test: Test, output: str, value: Any, expected: Any) -> bool:
    if isinstance(test, Stdin):
        return same_text(output, expected)
    if isinstance(test, Check):
        return value is True
    wrapped = isinstance(expected, list) and len(expected) == 1  # APPS wraps some results in a list
    return same_value(value, expected) or (wrapped and same_value(value, expected[0]))


def same_text(output: str, expected: str) -> bool:
    """Whether two texts have the same words in the same order. The docstring of the module says how numbers compare.

    Examples:
        >>> same_text("1  2\\n0.33333", "1 2\\n0.333333\\n"), same_text("2 1", "1 2"), same_text("12.0001", "12")
        (True, False, False)
    """
    return all(_same_word(*pair) for pair in zip_longest(output.split(), expected.split()))


def _same_word(word: str | None, expected: str | None) -> bool:
    if word == expected or word is None or expected is None:
        return word == expected
    if len(word) > MAX_NUMBER_CHARS or not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if re.fullmatch(r"[+-]?\d+", expected):
        return Decimal(word) == Decimal(expected)
    return math.isclose(float(word), float(expected), rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def same_value(value: Any, expected: Any) -> bool:
    """Equality of JSON values by Python's rules; floating-point numbers may differ in their last digits."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(same_value(value[key], expected[key]) for key in expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, float) and isinstance(expected, int | float):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats is equal to none
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    return bool(value == expected)
