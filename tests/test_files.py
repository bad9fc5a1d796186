"""JSON lines end at \\n alone: a text may hold every other character that Python takes for the end of a line."""

import json
from pathlib import Path

import pytest

from tandemrl.files import read_json_lines


@pytest.mark.parametrize("break_", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_a_text_with_a_line_separator_is_one_line(break_: str, tmp_path: Path) -> None:
    values = [{"text": f"a{break_}b"}, {"text": "c"}]
    (file := tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(v, ensure_ascii=False)}\n" for v in values))
    assert list(read_json_lines(file)) == list(enumerate(values, 1))
