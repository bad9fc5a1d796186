"""The sets of the rubric reward model (arXiv 2510.07774): Polaris problems with criteria, and answers with the score
that a judge should give them. Also what a judge's template is. No torch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandemrl.data.parquet import build_splits
from tandemrl.data.rows import DataError, messages_of, record_of
from tandemrl.data.sources import ANSWER, PROBLEM, Origin, Record, flattened

RUBRIC_SETS = "Youliang/rrm"
"""Where the authors put ``train_polaris``, ``test_polaris``, ``train_rrm`` and ``test_rrm`` (.parquet)."""
POLARIS = "polaris_tinyv"
"""The ``data_source`` of the published Polaris rows."""
POLARIS_SYSTEM = "\nPlease reason step by step, and put your final answer within \\boxed{}.\n\n\n"
"""The system message of the published Polaris rows, white space included."""

FIELDS = ("QUESTION", "CRITERIA", "GROUND_TRUTH_ANSWER", "MODEL_ANSWER")
"""What a judge's template may show, each as ``{{FIELD}}``."""
_FIELD = re.compile(r"\{\{(" + "|".join(FIELDS) + r")\}\}")


def fill(template: str, value: Callable[[str], str]) -> str:
    """A judge's template with ``value(FIELD)`` at each place of a field.

    All places are filled in one pass: a response that contains ``{{CRITERIA}}`` is text like any other.
    """
    return _FIELD.sub(lambda field: value(field[1]), template)


def build_polaris(source: Path, out: Path) -> dict[str, Any]:
    """Write the problems of ``rrm_policy`` and ``rrm_outcome`` as ``train`` and ``test`` into ``out``, and return the
    manifest.

    Each has ``extra_info.question`` and ``.criteria``, which a judge is shown. The number of rows is not published.

    Args:
        source: a folder with ``train_polaris`` and ``test_polaris``, or files of the two splits with other names, in
            verl's schema or with the columns ``problem``, ``answer`` and ``criteria``.

    Raises:
        DataError: the data is missing or malformed.
    """
    return _build(source, out, "polaris", _polaris)


def build_rubric(source: Path, out: Path, *, template: str, full_marks: float = 1.0) -> dict[str, Any]:
    """Write the rows that train a rubric reward model (``rrm_train``) as ``train`` and ``test`` into ``out``, and
    return the manifest.

    Args:
        source: a folder with ``train_rrm`` and ``test_rrm``, or files of the two splits with other names, in verl's
            schema or with the columns ``question``, ``criteria``, ``response`` and ``score``.
        template: what a judge is shown (`tasks/rubric/prompts`). Rows in verl's schema have their own prompt.
        full_marks: the score that becomes 1. Ground truths in verl's schema are in [0, 1] whatever this is.

    Raises:
        DataError: the data is missing or malformed, or a score is not between 0 and ``full_marks``.
    """
    return _build(source, out, "rrm", lambda record, split, index: _graded(record, split, index, template, full_marks))


# --------------------------------------------------------------------------------------------------------------------


def _build(source: Path, out: Path, name: str, row: Callable[[Record, str, int], dict[str, Any]]) -> dict[str, Any]:
    origins = {split: Origin(RUBRIC_SETS, split, file=f"{split}_{name}.*") for split in ("train", "test")}
    return build_splits(out, name, origins, source, row)


def _polaris(record: Record, split: str, index: int) -> dict[str, Any]:
    each = Record(record.where, flattened(record.fields))
    question, answer = each.text("question", *PROBLEM), each.text(*ANSWER)
    prompt = [{"role": "system", "content": POLARIS_SYSTEM}, {"role": "user", "content": question}]
    own = record.fields.get("prompt")
    extra = {"split": split, "index": index, "question": question, "criteria": each.text("criteria")}
    return record_of(POLARIS, _plain(own, record.where) if own else prompt, "math", answer, extra)


def _graded(record: Record, split: str, index: int, template: str, full_marks: float) -> dict[str, Any]:
    own = record.fields.get("prompt")
    each = Record(record.where, flattened(record.fields))
    name, most = ("ground_truth", 1.0) if own else ("score", full_marks)
    try:
        score = float(each.text(name)) / most
    except ValueError:
        score = float("nan")
    if not 0.0 <= score <= 1.0:
        raise DataError(
            f"{record.where}, field {name!r}: expected a score from 0 to {most:g}, found {each.fields.get(name)!r}"
            + ("" if own else "; --full-marks says what the best score is")
        )
    if own:
        prompt = _plain(own, record.where)
    else:
        columns = {"QUESTION": PROBLEM, "CRITERIA": ("criteria",), "MODEL_ANSWER": ("response", "model_answer")}
        shown = {field: each.text(*names) for field, names in columns.items()}
        prompt = [{"role": "user", "content": fill(template, shown.__getitem__)}]
    return record_of("grade", prompt, "grade", f"{score:g}", {"split": split, "index": index})


def _plain(prompt: Any, where: str) -> list[dict[str, str]]:
    return [{"role": message["role"], "content": message["content"]} for message in messages_of(prompt, where)]
