"""Small enough to hold in the head: no function of the core takes over 12 parameters."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "tandemrl"
CORE = sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "apps")
PARAMETERS = 12


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """The name of each function and how many parameters a caller gives it."""
    tree = ast.parse(path.read_text())
    methods = {id(each) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for each in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            a = node.args
            count = len([*a.posonlyargs, *a.args, *a.kwonlyargs]) + (a.vararg is not None) + (a.kwarg is not None)
            yield node.name, count - (id(node) in methods)


def test_functions_of_the_core_take_few_values() -> None:
    counts = {f"{path.relative_to(SOURCE)}:{name}": count for path in CORE for name, count in functions(path)}
    assert not [name for name, count in counts.items() if count > PARAMETERS]
