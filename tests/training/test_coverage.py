"""Which lines of the record a checkpoint covers, and what is said where they are not there any more."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tandemrl.training.checkpoint import DamagedError
from tandemrl.training.checkpoint.coverage import Coverage, of_step, restored


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, **more}, ensure_ascii=False) + "\n"


LINES = [line(1, x=0.5), line(2, x=None), line(2, text="é\u2028"), line(3), line(4)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(LINES), encoding="utf-8")
    return path


def expected(lines: list[str]) -> dict[str, object]:
    content = "".join(lines).encode()
    written = len(content)
    return {"size": written, "lines": len(lines), "written": written, "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("rest", ["", line(5), line(5) + '{"step": 5, "x"', '{"st', "4"])
@pytest.mark.parametrize("stops", [(4,), (1, 4), (2, 3, 4), (1, 1, 4, 4)])
def test_it_covers_whole_lines_up_to_a_step_however_it_got_there(file: Path, stops: tuple[int, ...], rest: str) -> None:
    coverage = Coverage(file)
    for stop in stops:
        file.write_text("".join(each for each in LINES if json.loads(each)["step"] <= stop) + rest, encoding="utf-8")
        coverage.extend(stop)
    assert coverage.to_plain() == expected(LINES)
    back = restored(file, coverage.to_plain(), 4)
    assert back.to_plain() == coverage.to_plain()
    back.drop_rest()
    assert file.read_text(encoding="utf-8") == "".join(LINES)
    with open(file, "a", encoding="utf-8") as more:
        more.write(line(5))
    back.extend(5)
    assert back.to_plain() == expected([*LINES, line(5)])


def test_nothing_is_covered_before_the_first_step(file: Path) -> None:
    Coverage(file).drop_rest()
    assert file.read_text() == ""
    file.unlink()
    Coverage(file).drop_rest()
    assert not file.exists()


DAMAGE: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "torn in step 3": (lambda b: b[: b.index(b'p": 3')], r"line 4 is torn or damaged; no readable line of step 3, 4"),
    "cut after step 3": (lambda b: b[: b.index(b'{"step": 4')], r"no readable line of step 4$"),
    "without the last line break": (lambda b: b[:-1], r"line 5 is torn or damaged; no readable line of step 4"),
    "a line less in the middle": (lambda b: b.replace(line(3).encode(), b""), r"no readable line of step 3$"),
    "one of two lines of a step less": (lambda b: b.replace(LINES[1].encode(), b""), r"lines of step 4 and before are"),
    "two steps in one line": (lambda b: b.replace(b'}\n{"step": 3', b'} {"step": 3'), r"line 3 is torn or damaged"),
    "another number": (lambda b: b.replace(b"0.5", b"0.6"), r"lines of step 4 and before are not those that were"),
    "a line more": (lambda b: LINES[0].encode() + b, r"lines of step 4 and before are not those"),
    "zeros, as a crash may leave them": (lambda b: b[:30] + bytes(len(b) - 30), r"line 2 is torn or damaged; no read"),
    "not UTF-8": (lambda b: b.replace("é".encode(), b"\xff\xff"), r"line 3 is torn or damaged"),
    "empty": (lambda b: b"", r"no readable line of step 1, 2, 3, 4"),
    "missing": (lambda b: None, r"missing, with the 5 lines of step 4 and before"),
}


def test_lines_that_had_gone_before_the_checkpoint_are_missed_unless_they_are_back(file: Path) -> None:
    content = file.read_bytes()
    for start in (b"", "".join(LINES[:2]).encode()):
        coverage = Coverage(file, written=len(content))
        file.write_bytes(start)
        coverage.extend(4)
        stored = coverage.to_plain()
        assert (stored["size"], stored["written"]) == (len(start), len(content))
        for left in (start, content[: -len(LINES[-1])]):
            file.write_bytes(left)
            with pytest.raises(DamagedError, match=r"samples\.jsonl: no readable line of step"):
                restored(file, stored, 4)
        file.write_bytes(content + line(5).encode())
        assert restored(file, stored, 4).to_plain() == expected(LINES)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_covered_lines_is_named(file: Path, name: str) -> None:
    change, message = DAMAGE[name]
    stored = expected(LINES)
    content = change(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(DamagedError, match=rf"samples\.jsonl: .*{message}"):
        restored(file, stored, 4)
    assert (file.read_bytes() if content is not None else None) == content


def test_lines_of_an_earlier_version_are_taken_as_they_are_if_every_step_has_one(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole + line(5).encode() + b'{"st')
    assert of_step(file, 4).to_plain() == expected(LINES)
    for damaged in (whole[:-1], whole.replace(line(3).encode(), b""), whole.replace(b'"step": 3', b'"step": x')):
        file.write_bytes(damaged)
        with pytest.raises(DamagedError, match=r"no readable line of step"):
            of_step(file, 4)
