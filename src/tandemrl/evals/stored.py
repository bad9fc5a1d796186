"""Texts of a model that is not here, from a file: judged like those that a model has just written."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError, Prompt, object_of
from tandemrl.evals.measures import Sample, group_of
from tandemrl.evals.protocol import same_problems
from tandemrl.selection.draws import request_key

TEXT_KEYS = ("response", "text")


@dataclass(frozen=True)
class Stored:
    """A JSONL file of responses. A line has the response (``response`` or ``text``) and the row that it belongs to, by
    its ``example_id`` or its ``index`` among all rows from 0; if no line has either, line n belongs to row n.
    ``stop_reason`` or ``finish_reason`` is ``length`` where a limit cut the response off.

    name: what the model is called.
    """

    file: Path
    name: str = "stored"


def stored_samples(stored: Stored, prompts: Sequence[Prompt], seed: int) -> list[Sample]:
    """The responses to some rows, in the order of the rows, not graded. Their tokens and authors are unknown.

    Raises:
        DataError: a line is malformed or belongs to no row, or there is no response.
    """
    places = {prompt.row.example_id: i for i, prompt in enumerate(prompts)}
    same, counts = same_problems(prompts, episodes=True), Counter[int]()
    samples = []
    for n, (line, value) in enumerate(read_jsonl(stored.file, halves=True)):
        where = f"{stored.file}, line {line}"
        record = object_of(value, where)
        texts = [record[key] for key in TEXT_KEYS if isinstance(record.get(key), str)]
        if len(texts) != 1:
            raise DataError(f"{where}: expected the response as a string in one of: {', '.join(TEXT_KEYS)}")
        name, index = record.get("example_id"), record.get("index", n)
        problem = index if name is None else places.get(name)
        if not isinstance(problem, int):
            raise DataError(f"{where}: no row {name or index!r}; name one by example_id, as in {next(iter(places))!r}")
        if not 0 <= problem < len(prompts):
            continue  # beyond the limit
        row, number = prompts[problem].row, counts[problem]
        counts[problem] += 1
        cut = "length" in (record.get("stop_reason"), record.get("finish_reason"))
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
                length=int(record.get("length") or len(texts[0].split())),
                author=None,
                rounds=0,
                senior_share=None,
                stop_reason="length" if cut else "stop",
                group=group_of(row.extra_info),
                same_as=same[problem],
            )
        )
    if not samples:
        raise DataError(f"{stored.file}: no response to any of the {len(prompts)} rows")
    return sorted(samples, key=lambda sample: sample.problem)
