"""The explanations of the keys, which are the strings under the fields of the schema."""

import ast
import inspect
from functools import cache
from itertools import pairwise

from tandemrl.config import schema


def explanation(leaf: schema.Leaf) -> str:
    """The string under a key's field, or "" if there is none."""
    return _explanations().get((leaf.section.__name__, leaf.key.rpartition(".")[2]), "")


@cache
def _explanations() -> dict[tuple[str, str], str]:
    """The explanations by class and field, read from the source, since Python keeps no docstrings of fields."""
    return {
        (section.name, ast.unparse(field.target)): " ".join(ast.literal_eval(text.value).split())
        for section in ast.parse(inspect.getsource(schema)).body
        if isinstance(section, ast.ClassDef)
        for field, text in pairwise(section.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
