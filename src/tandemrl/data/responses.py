"""A JSONL file of responses that a model wrote elsewhere, each with the row that it belongs to. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError, Row, object_of

TEXT_KEYS = ("response", "text")


class Written(NamedTuple):
    """A line of the file. where: its place, for errors. row: the number of its row, from 0. text: the response."""

    where: str
    row: int
    text: str
    fields: Mapping[str, Any]


def read_responses(file: Path, rows: Sequence[Row], *, own: bool = False) -> Iterator[Written]:
    """Yield the responses of a file.

    A line has the response (``response`` or ``text``) and the row that it belongs to, by its ``example_id`` or its
    ``index`` among all rows from 0; if no line has either, line n belongs to row n.

    Args:
        own: the lines are the rows, whatever else they have.

    Raises:
        DataError: a line is malformed or belongs to no row; the message names it.
    """
    places, named = {row.example_id: i for i, row in enumerate(rows)}, False if own else None
    for count, (line, value) in enumerate(read_jsonl(file, halves=True)):
        where = f"{file}, line {line}"
        fields = object_of(value, where)
        says = not own and any(fields.get(key) is not None for key in ("example_id", "index"))
        named = says if named is None else named
        if says is not named:
            raise DataError(f"{where}: either every line has an example_id or index, or none has")
        name, index = (fields.get("example_id"), fields.get("index")) if named else (None, count)
        row = index if name is None else places.get(name) if isinstance(name, str) else None
        if type(row) is not int or not 0 <= row < len(rows):
            what = f"no row {index if name is None else name!r}" if named else f"more lines than the {len(rows)} rows"
            known = f"name one by example_id, as in {rows[0].example_id!r}, or by index from 0"
            raise DataError(f"{where}: {what}; {known}")
        texts = [fields[key] for key in TEXT_KEYS if fields.get(key) is not None]
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise DataError(f"{where}: expected the response as a string in one of: {', '.join(TEXT_KEYS)}")
        yield Written(where, row, texts[0], fields)
