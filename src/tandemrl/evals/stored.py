"""Texts of a model that is not here, from a file: judged like those that a model has just written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandemrl.data.responses import read_responses
from tandemrl.data.rows import DataError, Prompt, Row
from tandemrl.evals.measures import Sample, group_of
from tandemrl.evals.protocol import same_problems
from tandemrl.selection.draws import request_key

_OF_SAMPLES = ("plain", "opened")
"""What lines of samples have beside their ``text``; beside a ``response`` they are something of the user's."""
CUT_OFF = ("length", "max_tokens", "max_output_tokens", "model_length")
"""How APIs call it that a limit cut a response off."""


@dataclass(frozen=True)
class Stored:
    """A JSONL file of responses (`read_responses`), in which ``stop_reason`` or ``finish_reason`` is ``length`` or
    ``max_tokens`` where a limit cut the response off.

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
    same, counts = same_problems(prompts, episodes=True), Counter[int]()
    samples = []
    for _, problem, text, record in read_responses(stored.file, rows, own=own):
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
                text=text,
                tokens=[],
                length=length if type(length) is int else len(text.split()),
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
