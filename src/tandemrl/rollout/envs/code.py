r"""Programs in a response, scored by their tests in a `sandbox`.

Three formats of ground truth, all JSON objects:

- ``{"inputs": [...], "outputs": [...]}``: a script reads each input and should print the output (PRIME, Eurus: APPS,
  CodeContests, TACO, Codeforces). Lists stand for lines.
- the same with ``"fn_name"``: a function, or method of ``class Solution``, is called, with PRIME's imports at hand. An
  input is a string with one JSON value per line, one line per argument, or a list of the arguments; an output is JSON,
  as text or as it is.
- ``{"test": ..., "entry_point": ..., "prompt": ...}``: ``test`` defines ``check(candidate)`` (HumanEval).

Every test counts, where PRIME stops after ten. Printed text is compared word by word, in order, where PRIME also
accepts the same set of words; a number may differ from one with a decimal point by 1e-5 of it, numpy's default.
"""

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import zip_longest
from typing import Any, Literal

from tandemrl.config import SandboxConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.protocol import Score
from tandemrl.rollout.envs.sandbox import Call, Check, Sandbox, Stdin, Test

HUMANEVAL = "openai/openai_humaneval"
RELATIVE, ABSOLUTE = 1e-5, 1e-8
"""How far a printed number may be from the expected one."""
MAX_NUMBER_CHARS = 400

_PYTHON_FENCE = re.compile(r"```(?:python3?|py)\b[^\n`]*\n", re.IGNORECASE)
_ANY_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?")


def score_code(
    row: Row, text: str, *, sandbox: SandboxConfig, credit: Literal["fraction", "all"] = "fraction"
) -> Score:
    """The share of the row's tests that the program in ``text`` passes; with ``credit="all"`` 1 or 0.

    Parts: ``acc`` (all passed), ``answer_present`` (there is a fenced block), ``tests_passed`` and ``tests_timed_out``
    (shares of all tests). Blocks; may be called from several threads.

    Raises:
        DataError: the row's ground truth has none of the formats.
        SandboxError: programs cannot be run safely here.

    Example:
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
    with Sandbox(sandbox) as box:
        for done, (test, expected) in enumerate(tests):
            left = sandbox.program_timeout_s - box.seconds
            if left <= 0:
                late += len(tests) - done
                break
            outcome = box.run(complete(program, test), test, timeout_s=left)
            good = outcome.status == "ok" and _agrees(test, outcome.output, outcome.value, expected)
            passed += good
            late += outcome.status == "timeout"
            if outcome.status == "syntax" or (credit == "all" and not good):
                break
    share, acc = passed / len(tests), float(passed == len(tests))
    parts = {"acc": acc, "answer_present": fenced, "tests_passed": share, "tests_timed_out": late / len(tests)}
    return Score(acc if credit == "all" else share, parts, program)


def extract_program(text: str) -> str:
    """What follows the last Python fence up to the next fence; else the last fenced block; else the whole text."""
    fences = list(_PYTHON_FENCE.finditer(text))
    if fences:
        return text[fences[-1].end() :].partition("```")[0]
    blocks = _ANY_BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def complete(program: str, test: Test) -> str:
    """HumanEval's prompt before the program: its imports and helpers, and the head of a function that lacks it."""
    return f"{test.prompt}\n{program}" if isinstance(test, Check) else program


def parse_tests(row: Row) -> list[tuple[Test, Any]]:
    """The tests of a row, each with what it should give.

    Raises:
        DataError: no tests, or none of the formats.
    """
    try:
        truth = json.loads(row.ground_truth)
    except ValueError as error:
        raise _unusable(row, f"not JSON: {error}") from None
    if not isinstance(truth, Mapping):
        raise _unusable(row, f"expected a JSON object, found {type(truth).__name__}")
    if "test" in truth:
        return [_check(row, truth)]
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise _unusable(row, "expected as many inputs as outputs, and at least one")
    name = truth.get("fn_name")
    if name is None:
        return [(Stdin(_lines(given)), _lines(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    try:
        return [
            (Call(str(name), tuple(map(_integer_keys, _arguments(given)))), _json(expected))
            for given, expected in zip(inputs, outputs, strict=True)
        ]
    except ValueError as error:
        raise _unusable(row, f"an argument or a result of {name} is not JSON: {error}") from None


def humaneval_row(record: Mapping[str, Any]) -> Row:
    """A problem of HumanEval (https://github.com/openai/human-eval, MIT) as a row."""
    truth = {key: record[key] for key in ("prompt", "test", "entry_point")}
    ask = f"Complete this function. Answer with the whole function in a Python block.\n```python\n{record['prompt']}```"
    return Row(
        example_id=f"{HUMANEVAL}/{record['task_id']}",
        messages=({"role": "user", "content": ask},),
        data_source=HUMANEVAL,
        ground_truth=json.dumps(truth),
        extra_info={"index": int(str(record["task_id"]).rpartition("/")[2])},
    )


# --------------------------------------------------------------------------------------------------------------------


def _check(row: Row, truth: Mapping[str, Any]) -> tuple[Test, Any]:
    test, entry_point, prompt = truth["test"], truth.get("entry_point"), truth.get("prompt", "")
    if not (isinstance(test, str) and isinstance(entry_point, str) and isinstance(prompt, str)):
        raise _unusable(row, "expected strings: test, entry_point and, if there is one, prompt")
    return Check(entry_point, prompt, test), True


def _unusable(row: Row, why: str) -> DataError:
    return DataError(
        f"row {row.example_id}: ground_truth is no set of tests: {why}; expected "
        '{"inputs": […], "outputs": […][, "fn_name": …]} or {"test": …, "entry_point": …, "prompt": …}'
    )


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    return given if isinstance(given, list) else [given]


def _json(expected: Any) -> Any:
    return json.loads(expected) if isinstance(expected, str) else expected


def _integer_keys(argument: Any) -> Any:
    """JSON has no integer keys: an object whose keys are all integers had them."""
    if isinstance(argument, dict) and argument and all(re.fullmatch(r"-?\d+", key) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _agrees(test: Test, output: str, value: Any, expected: Any) -> bool:
    if isinstance(test, Stdin):
        return same_text(output, expected)
    if isinstance(test, Check):
        return value is True
    wrapped = isinstance(expected, list) and len(expected) == 1  # APPS wraps some results in a list
    return same_value(value, expected) or (wrapped and same_value(value, expected[0]))


def same_text(output: str, expected: str) -> bool:
    """Whether two texts have the same words in the same order; see the module for numbers.

    Example:
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
    """Equality by Python's rules, up to what JSON does not know: tuples are lists, keys are strings."""
    if isinstance(value, Mapping) and isinstance(expected, Mapping):
        mine = {_key(key): item for key, item in value.items()}
        return mine.keys() == expected.keys() and all(same_value(mine[key], expected[key]) for key in expected)
    if isinstance(value, list | tuple) and isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, float) and isinstance(expected, int | float):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats is equal to none
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    return bool(value == expected)


def _key(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=str)
