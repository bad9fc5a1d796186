"""Reads the tests of programs from the ground truth of a row. Without torch.

There are three formats, all of them JSON objects:

- ``{"inputs": [...], "outputs": [...]}``: a script reads each input and should print the output (PRIME, Eurus: APPS,
  CodeContests, TACO, Codeforces). Lists stand for lines.
- the same with ``"fn_name"``: a function, or a method of ``class Solution``, is called. An input is a list of the
  arguments, or a string with one JSON value per line for each argument. An output is a JSON value, or its text.
- ``{"test": ..., "entry_point": ..., "prompt": ...}``: ``test`` defines ``check(candidate)`` (HumanEval).
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tandemrl.data.rows import DataError, Row


class Stdin(NamedTuple):
    """Run the program as a script that reads this text."""

    text: str


class Call(NamedTuple):
    """Call a function of the program, or of its class ``Solution``."""

    function: str
    arguments: tuple[Any, ...]


class Check(NamedTuple):
    """Call ``check(candidate)``, which ``test`` defines, with a function of the program. It sees the names that
    ``prompt`` defines."""

    function: str
    prompt: str
    test: str


Test = Stdin | Call | Check


def parse_tests(row: Row) -> list[tuple[Test, Any]]:
    """The tests of a row, each with its expected result.

    Raises:
        DataError: there are no tests, or they have none of the formats.
    """
    try:
        truth = json.loads(row.ground_truth)
    except (ValueError, RecursionError) as error:
        raise _unusable(row, f"not JSON: {error}") from None
    if not isinstance(truth, Mapping):
        raise _unusable(row, f"expected a JSON object, found {type(truth).__name__}")
    if truth.get("test") is not None:
        texts = truth["test"], truth.get("entry_point"), truth.get("prompt", "")
        if not all(isinstance(text, str) for text in texts):
            raise _unusable(row, "expected strings: test, entry_point and, if there is one, prompt")
        test, entry_point, prompt = map(str, texts)
        return [(Check(entry_point, prompt, test), True)]
    inputs, outputs = truth.get("inputs"), truth.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise _unusable(row, "expected as many inputs as outputs, and at least one")
    name = truth.get("fn_name")
    if name is None:
        return [(Stdin(_lines(text)), _lines(expected)) for text, expected in zip(inputs, outputs, strict=True)]
    try:
        calls = [Call(str(name), tuple(map(_integer_keys, _arguments(arguments)))) for arguments in inputs]
        results = [json.loads(expected) if isinstance(expected, str) else expected for expected in outputs]
        return [*zip(calls, results, strict=True)]
    except (ValueError, RecursionError) as error:
        raise _unusable(row, f"an argument or a result of {name} is not JSON: {error}") from None


def _unusable(row: Row, why: str) -> DataError:
    return DataError(
        f"row {row.example_id}: ground_truth is not a set of tests: {why}; expected "
        '{"inputs": […], "outputs": […][, "fn_name": …]} or {"test": …, "entry_point": …, "prompt": …}'
    )


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [json.loads(line) for line in value.split("\n") if line.strip()]
    return value if isinstance(value, list) else [value]


def _integer_keys(argument: Any) -> Any:
    """An argument with integer keys restored: JSON has none, so keys that all look like integers were integers."""
    if isinstance(argument, dict) and argument and all(re.fullmatch(r"-?\d+", key) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument
