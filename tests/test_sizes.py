"""Small enough to hold in the head: no function of the core takes over 12 parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tandemrl"
CORE = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "apps")
PARAMETERS = 12
NOT_OURS = {"models/attention.py:attention"}
"""Functions whose signature somebody else defines: transformers calls this one."""


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The name of each function and how many parameters a caller gives it."""
    tree = ast.parse(path.read_text())
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            count = len([*a.posonlyargs, *a.args, *a.kwonlyargs]) + (a.vararg is not None) + (a.kwarg is not None)
            yield node.name, count - (id(node) in methods)


@pytest.mark.parametrize("path", CORE, ids=name)
def test_functions_of_the_core_take_few_values(path: Path) -> None:
    assert {f"{name(path)}:{function}" for function, count in functions(path) if count > PARAMETERS} <= NOT_OURS
