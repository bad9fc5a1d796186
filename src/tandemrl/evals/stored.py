"""Texts of a model that is not here, from a file: judged like those that a model has just written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError, Prompt, Row, object_of
from tandemrl.evals.measures import Sample, group_of
from tandemrl.evals.protocol import same_problems
from tandemrl.selection.draws import request_key

TEXT_KEYS = ("response", "text")
_OF_SAMPLES = ("plain", "opened")
"""What lines of samples have beside their ``text``; beside a ``response`` they are something of the user's."""
CUT_OFF = ("length", "max_tokens", "max_output_tokens", "model_length")
"""How APIs call it that a limit cut a response off."""


@dataclass(frozen=True)
class Stored:
    """A JSONL file of responses. A line has the response (``response`` or ``text``) and the row that it belongs to, by
    its ``example_id`` or its ``index`` among all rows from 0; if no line has either, line n belongs to row n.
    ``stop_reason`` or ``finish_reason`` is ``length`` or ``max_tokens`` where a limit cut the response off.

    name: what the model is called.
    """

    file: Path
    name: str = "stored"


def stored_samples(
    stored: Stored, rows: Sequence[Row], prompts: Sequence[Prompt], seed: int, *, own: bool = False
) -> list[Sample]:
    """The responses to some rows, in the order of the rows, not graded. Their tokens and authors are unknown.

    Args:
        rows: all rows. prompts: those of the first ones, whose responses are wanted. own: the lines are the rows.

    Raises:
        DataError: a line is malformed or belongs to no row, or there is no response.
    """
    places = {row.example_id: i for i, row in enumerate(rows)}
    same, counts = same_problems(prompts, episodes=True), Counter[int]()
    lines = []
    for line, value in read_jsonl(stored.file, halves=True):
        where = f"{stored.file}, line {line}"
        lines.append((where, object_of(value, where)))
    named = not own and any(record.get(key) is not None for _, record in lines for key in ("example_id", "index"))
    samples = []
    for n, (where, record) in enumerate(lines):
        texts = [record[key] for key in TEXT_KEYS if isinstance(record.get(key), str)]
        if len(texts) != 1:
            raise DataError(f"{where}: expected the response as a string in one of: {', '.join(TEXT_KEYS)}")
        name, index = (record.get("example_id"), record.get("index")) if named else (None, n)
        problem = index if name is None else places.get(name) if isinstance(name, str) else None
        if type(problem) is not int or not 0 <= problem < len(rows):
            what = f"no row {index if name is None else name!r}" if named else f"more lines than the {len(rows)} rows"
            raise DataError(
                f"{where}: {what}; name one by example_id, as in {rows[0].example_id!r}, or by index from 0"
            )
        if problem >= len(prompts):
            continue  # beyond the limit
        row, number = prompts[problem].row, counts[problem]
        counts[problem] += 1
        ends = {str(record.get(key)).lower() for key in ("stop_reason", "finish_reason")}
        length = record.get("length")
        samples.append(
            Sample(
                problem=problem,
                example_id=row.example_id,
                set=row.data_source,
                arm="solo",
                sample=number,
                key=request_key(seed, 0, problem, number),
                text=texts[0],
                tokens=[],
                length=length if type(length) is int else len(texts[0].split()),
                author=None,
                rounds=0,
                senior_share=None,
                stop_reason="length" if ends & {*CUT_OFF} else "stop",
                group=group_of(row.extra_info),
                same_as=same[problem],
                **{
                    key: record[key]
                    for key in _OF_SAMPLES
                    if "response" not in record and isinstance(record.get(key), str)
                },
            )
        )
    if not samples:
        raise DataError(f"{stored.file}: no response to any of the {len(prompts)} rows")
    return sorted(samples, key=lambda sample: sample.problem)
