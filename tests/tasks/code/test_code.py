r"""Programs scored by their tests: the three formats, what counts as the same output, and HumanEval itself."""

import gzip
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandemrl.config import SandboxConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.tasks.code import sandbox
from tandemrl.tasks.code.grader import extract_program, same_text, same_value, score_code
from tandemrl.tasks.code.tests import Call, Check, Stdin, parse_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox runs on Linux only")

LIMITS = SandboxConfig(timeout_s=20.0, program_timeout_s=300.0)
DATA = Path(os.environ.get("TANDEMRL_DATA", Path(__file__).parents[4] / "shared" / "data"))
HUMANEVAL = DATA / "humaneval" / "HumanEval.jsonl.gz"


def row(**truth):
    return Row("apps/train/7", (), "apps", json.dumps(truth), {})


def fenced(program):
    return f"Let me think.\n```python\n{program}\n```\nDone."


def sums(count, wrong=()):
    """Tests of a program that adds two numbers; the expected output of some is not the sum."""
    return row(
        inputs=[f"{n} {n + 1}\n" for n in range(count)], outputs=[f"{2 * n + 1 + (n in wrong)}\n" for n in range(count)]
    )


ADD = "print(sum(map(int, input().split())))"


def score(row_, program, limits=LIMITS, **options):
    return score_code(row_, fenced(program), sandbox=limits, **options)


# The response -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a\n```python\nx\n```\nb", "x\n"),
        ("```python\nx\n```\n```python\ny\n```", "y\n"),
        ("```python\nx\n```\n```\noutput\n```", "x\n"),
        ("```Python3 title\nx\n```", "x\n"),
        ("```python\nx", "x"),
        ("```\nx\n```\n```\ny\n```", "y\n"),
        ("print(1)", "print(1)"),
        ("", ""),
        ("````markdown\n```python\nx\n```\n````", "x\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("~~~python\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("```python\nprint(1)```", "print(1)"),
        ("```python\nif x:\n\xa0\xa0y('\xa0')\n```", "if x:\n  y('\xa0')\n"),
        ("- ```python\n  x\n  ```\n- ```python\n  y\n  ```", "y\n"),
        ("```\nx\n```\nIt prints\n```\n2", "x\n"),
        ("```{.python}\nx\n```", "x\n"),
        ("```python\r\nx\r\n```\r\n", "x\r\n"),
        ("```python\n    return 1\n```", "    return 1\n"),  # the body of HumanEval's function
        ("```python\nx = '\u2028   y'\n```", "x = '\u2028   y'\n"),
    ],
)
def test_the_last_python_block_is_the_program(text, program):
    assert extract_program(text) == program


NESTED = "if x:\n    y\n\nz\n"


@pytest.mark.parametrize(
    ("place", "inside"),
    [
        *(("", ""), ("   ", "   "), ("\t", "\t"), ("\t", "    "), ("    ", "\t"), ("> ", "> "), (">", "> ")),
        ("> > ", "> > "),
        *(("1. ", "   "), ("- ", "  "), ("10) ", "    "), (">   ", ">   "), ("> 1. ", ">    "), ("* - ", "    ")),
    ],
)
@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_a_block_in_a_list_loses_what_its_fence_has_before_it(place, inside, fence):
    body = "".join(f"{inside}{line}".rstrip() + "\n" for line in NESTED.splitlines())
    for end in (f"{inside}{fence}\nDone.", f"{inside}{fence}", ""):
        program = extract_program(f"1. The program:\n{place}{fence}python\n{body}{end}")
        assert program.rstrip() == NESTED.rstrip(), (place, end)
        assert extract_program(f"1. The program:\n{place}{fence}\n{body}{end}").rstrip() == NESTED.rstrip()


# The tests ---------------------------------------------------------------------------------------------------------


def test_extraction_is_linear():
    start = time.process_time()
    for piece in ("```", "```\n", "```python", "```python\n", "`", "```x`"):
        extract_program(piece * 100_000)
    assert time.process_time() - start < 5


def test_formats():
    assert parse_tests(row(inputs=["1\n", ["2", "3"]], outputs=["a", ["b", "c"]])) == [
        (Stdin("1\n"), "a"),
        (Stdin("2\n3"), "b\nc"),
    ]
    assert parse_tests(row(inputs=['[1, 2]\n"x"', [[3], "y"], '{"1": 2}'], outputs=["[4]", [5], "6"], fn_name="f")) == [
        (Call("f", ([1, 2], "x")), [4]),
        (Call("f", ([3], "y")), [5]),
        (Call("f", ({1: 2},)), 6),
    ]
    assert parse_tests(row(test="t", entry_point="e", prompt="p")) == [(Check("e", "p", "t"), True)]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("{", "not JSON"),
        ('{"inputs": [], "outputs": []}', "at least one"),
        ('{"inputs": ["1"], "outputs": ["1", "2"]}', "as many inputs as outputs"),
        ('{"inputs": ["1"], "outputs": ["one"], "fn_name": "f"}', "of f is not JSON"),
        ('{"test": "t"}', "expected strings: test, entry_point"),
    ],
)
def test_a_row_without_tests_is_named(truth, message):
    with pytest.raises(DataError, match=rf"row apps/train/7: ground_truth is not a set of tests: .*{message}"):
        score_code(Row("apps/train/7", (), "apps", truth, {}), fenced(ADD), sandbox=LIMITS)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("3", "3\n", True),
        (" 1 2 \n\n3\n", "1 2\n3", True),
        ("1\n2\n3", "1 2 3", True),
        ("", "0", False),
        ("1 1", "1", False),
        ("2 1", "1 2", False),  # PRIME: the same set of words
        ("YES", "Yes", False),
        ("5.0", "5", True),
        ("1e2", "100", True),
        ("-0", "0", True),
        ("5.00001", "5", False),
        ("12345678", "12345679", False),
        ("0.333333", "0.3333333333", True),
        ("0.3334", "0.3333333333", False),
        ("1e-9", "0.0", True),
        ("nan", "0.5", False),
        ("0x10", "16", False),
        ("1_000", "1000", False),
        ("1" * 5000, "1" * 5000, True),
        ("1e999999", "1.5", False),
    ],
)
def test_printed_text(output, expected, same):
    assert same_text(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True),
        ([1, 2], [2, 1], False),
        ({"1": "a"}, {"1": "a"}, True),
        ({"1": "a"}, {"1": "b"}, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (3.0, 3, True),
        ("a", ["a"], False),
        (None, False, False),
        (float("nan"), 1, False),
        (1.5, 10**400, False),
        ([float("inf")], [10**400], False),
    ],
)
def test_returned_values(value, expected, same):
    assert same_value(value, expected) is same


# Scores ------------------------------------------------------------------------------------------------------------


def test_every_test_counts():
    assert score(sums(3), ADD) == (
        1.0,
        {"acc": 1.0, "answer_present": 1.0, "tests_passed": 1.0, "tests_timed_out": 0.0},
        ADD + "\n",
    )
    partial = score(sums(12, wrong={10, 11}), ADD)  # PRIME: 1, for it stops after ten
    assert (partial.value, partial.parts["acc"], partial.parts["tests_passed"]) == (10 / 12, 0.0, 10 / 12)
    assert score(sums(10, wrong={0, 3, 9}), ADD).value == 0.7
    assert score(sums(3), "print(0)").value == 0.0


def test_a_response_without_a_program():
    assert score_code(sums(2), " \n", sandbox=LIMITS) == (
        0.0,
        {"acc": 0.0, "answer_present": 0.0, "tests_passed": 0.0, "tests_timed_out": 0.0},
        None,
    )
    bare = score_code(sums(2), ADD, sandbox=LIMITS)
    assert (bare.value, bare.parts["answer_present"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("def add(a, b):\n  return a + b", 1.0),
        ("class Solution:\n  def add(self, a: int, b: int) -> int:\n    return a + b", 1.0),
        ("def add(a, b):\n  return [a + b]", 0.5),
        ("def add(a, b):\n  return str(a + b)", 0.0),
        ("def add(a, b):\n  if a > 1: raise ValueError\n  return a + b", 0.5),
        ("def plus(a, b):\n  return a + b", 0.0),
        ("def add(a, b):\n  import sys; sys.exit(0)", 0.0),
        (ADD, 0.0),
    ],
)
def test_functions(program, value):
    assert score(row(inputs=["1\n2", "3\n4"], outputs=["3", "[7]"], fn_name="add"), program).value == value


def test_values_of_functions_come_back_as_json_means_them():
    truth = row(inputs=['{"1": "a"}', "[[1, 2]]"], outputs=['{"2": ["a", 1]}', "[[2, 1]]"], fn_name="f")
    program = "def f(x):\n  if isinstance(x, dict): return {k + 1: (v, 1) for k, v in x.items()}\n"
    assert score(truth, program + "  return [tuple(reversed(x[0]))]").value == 1.0
    truth = row(inputs=["[]"], outputs=['{"1": [1, 2], "true": null}'], fn_name="f")
    assert (
        score(truth, "import numpy\ndef f(x): return {1: numpy.arange(1, 3), True == 2 or 'true': None}").value == 1.0
    )
    assert score(row(inputs=["[]"], outputs=["[1, 2]"], fn_name="f"), "def f(x): return {1, 2}").value == 0.0


def test_programs_that_never_end_fail_only_where_they_do():
    hangs = "n = int(input().split()[0])\nwhile n == 1: pass\nprint(2 * n + 1)"
    slow = score(sums(4), hangs, SandboxConfig(timeout_s=2.0, program_timeout_s=300.0))
    assert (slow.value, slow.parts["tests_timed_out"]) == (0.75, 0.25)


def test_a_program_has_a_limit_for_all_its_tests():
    start = time.monotonic()
    limits = SandboxConfig(timeout_s=1.0, program_timeout_s=2.0)
    endless = score(sums(50), "while True: pass", limits)
    assert time.monotonic() - start < 30
    assert (endless.value, endless.parts["tests_timed_out"]) == (0.0, 1.0)


def test_a_program_that_kills_its_sandbox_has_failed_that_test(monkeypatch):
    """On machines without a process namespace it can, and must not get off as one that could not be scored."""

    def ask(process, messages, limit_s):
        if messages[0].get("input") == "1 2\n":
            raise EOFError
        return real(process, messages, limit_s)

    real = sandbox._Process.ask
    monkeypatch.setattr(sandbox._Process, "ask", ask)
    found = score(sums(2), ADD)
    assert (found.value, "failure" in found.parts) == (0.5, False)


PROMPT = 'from typing import List\n\ndef double(x: List[int]) -> List[int]:\n    """Twice each."""\n'
TWICE = "\ndef double(x: List[int]) -> list[int] | None:\n    return [2 * n for n in x]\n"


@pytest.mark.parametrize(
    ("opening", "value"),
    [
        ("from __future__ import annotations", 1.0),
        ('"""A text."""\n# why\nfrom __future__ import (annotations,\n    division)  # both', 1.0),
        ("from __future__ import annotations; import math", 1.0),
        ("import math\nfrom __future__ import division", 0.0),  # as without a prompt
    ],
)
def test_imports_from_the_future_stay_in_front_of_a_prompt(opening, value):
    check = "def check(candidate):\n    assert candidate([1, 2]) == [2, 4]\n"
    truth = row(test=check, entry_point="double", prompt=PROMPT)
    assert score(truth, opening + TWICE).value == value


# HumanEval -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problems():
    if not HUMANEVAL.is_file():
        pytest.skip("no HumanEval; set TANDEMRL_DATA to the folder above humaneval/")
    with gzip.open(HUMANEVAL, "rt") as lines:
        found = [json.loads(line) for line in lines]
    assert len(found) == 164
    return found


def humaneval_row(record):
    truth = {key: record[key] for key in ("prompt", "test", "entry_point")}
    return Row(f"humaneval/{record['task_id']}", (), "openai/openai_humaneval", json.dumps(truth), {})


def scores_of(problems, programs):
    def one(problem, program):
        return score_code(humaneval_row(problem), fenced(program), sandbox=LIMITS)

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(one, problems, programs))


def test_the_canonical_solutions_pass(problems):
    whole = scores_of(problems, [p["prompt"] + p["canonical_solution"] for p in problems])
    assert [p["task_id"] for p, s in zip(problems, whole, strict=True) if s.value != 1.0] == []
    assert all(s.parts["acc"] == 1.0 for s in whole)


def test_a_body_alone_completes_the_prompt(problems):
    bodies = scores_of(problems[:20], [p["canonical_solution"].rstrip() for p in problems[:20]])
    assert [s.value for s in bodies] == [1.0] * 20


def test_functions_that_do_nothing_fail(problems):
    stubs = scores_of(problems, ["def {entry_point}(*args): return None".format(**p) for p in problems])
    assert [p["task_id"] for p, s in zip(problems, stubs, strict=True) if s.value != 0.0] == []
