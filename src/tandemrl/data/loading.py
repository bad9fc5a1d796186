"""Loads rows from data sources: JSON lines and Parquet files, generated problems, the hub. It does not import torch."""

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tandemrl.data.messages import MEDIA
from tandemrl.data.rows import BUILT, GSM8K, DataError, Row, gsm8k_row, messages_of, object_of
from tandemrl.files import LineError, hint, parse_json, pip_install, read_json_lines

SYNTHETIC = "tandemrl.tasks.generated.rows:rows"
"""Makes the rows of a source ``synthetic:…``, as ``module:name``."""


def load_rows(sources: Sequence[str], *, graded: bool = True) -> list[Row]:
    """All rows of all sources, in order, with ids that are unique over the whole list.

    A row's id is ``data_source[/split]/index``, where the index is ``extra_info.index`` or else the line (from 1). The
    second, third … row of the same id get ``#2``, ``#3`` … appended.

    Args:
        sources: each a ``.jsonl`` or ``.parquet`` file in verl's row schema or GSM8K's raw one,
            ``synthetic:PAIR:SPLIT[:COUNT]``, or ``hf:REPO:CONFIG:SPLIT``.
        graded: whether responses to the rows will be graded. If not, rows in verl's schema and those of the hub need no
            ground truth; one that is missing is the empty text.

    Raises:
        DataError: a source is unknown, missing, empty or listed twice, or a row is malformed.
    """
    if isinstance(sources, str):
        raise DataError(f"sources={sources!r}: expected a list, as [{sources!r}]")
    first: dict[str, str] = {}
    for source in map(str, sources):
        file = os.path.realpath(source) if os.path.isfile(source) else source  # under whichever name
        if file in first:
            other = f"{first[file]} and {source} are one file" if source != first[file] else source
            raise DataError(f"data source listed twice: {other}; list it once")
        first[file] = source
    rows: list[Row] = []
    for source in sources:
        loaded = list(_load(str(source), graded))
        if not loaded:
            raise DataError(f"{source}: no rows; give a file with a problem on each line")
        rows += loaded
    return _unique(rows)


def read_jsonl(path: Path, *, halves: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) of every line that is not blank.

    Args:
        halves: see `parse_json`.

    Raises:
        DataError: a line is not JSON in UTF-8, or cannot be read in one way only (see `parse_json`).
    """
    try:
        parse = partial(parse_json, halves=halves)
        yield from read_json_lines(path, parse=parse, encoding="utf-8-sig", skip_blank=True)
    except LineError as error:
        raise DataError(f"{path}, line {error.line}: not JSON: {error}") from None


def read_list(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, value) of every value of a JSON file that is one list.

    Raises:
        DataError: it is something else; see `read_jsonl`.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(values, list):
        raise DataError(f"{path}: expected a list of rows, found {type(values).__name__}")
    yield from enumerate(values, 1)


def read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (row number from 1, record) of every row, with one batch in memory at a time.

    Raises:
        DataError: the file is not Parquet, or broken, or a text in it is not UTF-8.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            records = (record for batch in file.iter_batches(batch_size=512) for record in batch.to_pylist())
            yield from enumerate(records, 1)
    except (pyarrow.ArrowException, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from None


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of each record of a Parquet, JSONL or JSON file. A .json file may be a list, or lines."""
    if path.suffix == ".parquet":
        return read_parquet(path)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        whole = path.suffix == ".json" and file.read(64).lstrip().startswith("[")
    return read_list(path) if whole else read_jsonl(path)


def load_hub(repo: str, config: str | None, split: str | None, *, where: str) -> Any:
    """A split of a data set on the hub, as an iterable of records; every split by name if ``split`` is None.

    Raises:
        DataError: `datasets` is not installed, or the hub does not give the data set.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(f"{where}: reading from the hub needs `datasets`: {pip_install('hub')}") from None
    try:
        return datasets.load_dataset(repo, config, split=split)
    except Exception as error:
        raise DataError(f"{where}: could not be loaded: {type(error).__name__}: {error}") from error


def _load(source: str, graded: bool) -> Iterator[Row]:
    kind, _, rest = source.partition(":")
    if kind == "synthetic":
        return _generated(source, rest.split(":"))
    if kind == "hf":
        return _hub(source, rest.split(":"), graded)
    return _file(Path(source).expanduser(), graded)


def _generated(source: str, parts: list[str]) -> Iterator[Row]:
    module, _, name = SYNTHETIC.partition(":")
    rows: Iterator[Row] = getattr(import_module(module), name)(source, parts)
    return rows


def _hub(source: str, parts: list[str], graded: bool) -> Iterator[Row]:
    if len(parts) != 3 or not all(parts):
        raise DataError(f"{source}: expected hf:REPO:CONFIG:SPLIT, e.g. hf:openai/gsm8k:main:train")
    repo, config, split = parts
    records = enumerate(load_hub(repo, config, split, where=source), 1)
    parse = partial(parse_row, split=split, repo=repo, graded=graded)
    return (parse(_without_nulls(record), f"{source}, line {line}", line) for line, record in records)


def _file(path: Path, graded: bool) -> Iterator[Row]:
    if not path.is_file():
        known = next((name for name in BUILT if name in str(path).lower()), None)
        build = f"; build it with `tandemrl data build {known}`" if known else ""
        what = "a folder; name the files in it" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what}{hint(path) or build}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"{path}: expected a .jsonl or .parquet file, synthetic:PAIR:SPLIT[:COUNT] or hf:REPO:CONFIG:SPLIT"
        )
    read = _without_nulls if path.suffix == ".parquet" else (lambda record: record)
    parse = partial(parse_row, split=path.stem, graded=graded)
    return (parse(read(record), f"{path}, line {line}", line) for line, record in read_records(path))


def _without_nulls(value: Any) -> Any:
    """A value of a Parquet file without the fields that are null: its structs have the fields of all rows, so that null
    stands for a field that a row does not have."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def parse_row(record: Any, where: str, line: int, *, split: str, repo: str | None = None, graded: bool = True) -> Row:
    """The row of a record, whose schema is recognised by its fields.

    Args:
        where: the beginning of an error message.
        line: the number of the record, from 1, which stands for a missing index.
        repo: the repository on the hub, which becomes the ``data_source`` of records with just a problem and an answer.
        graded: see `load_rows`.

    Raises:
        DataError: the record has none of the known schemas, or is malformed.
    """
    record = object_of(record, where)
    for name, fix in _UNREAD.items():
        if record.get(name) not in (None, "", [], {}, ()):
            raise DataError(f"{where}, field {name!r}: does not reach the prompt; {fix}")
    if "prompt" in record:
        return _verl_row(record, where, line, graded)
    question = record.get("question")
    if repo in (None, GSM8K) and question is not None:
        answer, asked = _text(record, "answer", where), _text(record, "question", where)
        try:
            return gsm8k_row(asked, answer, split=split, index=line - 1)
        except DataError as error:
            raise DataError(f"{where}, field 'answer': {error}, as in GSM8K's files. {_SCHEMA}") from None
    if repo is not None and ("problem" in record or question is not None):
        problem = _text(record, "problem" if "problem" in record else "question", where)
        return Row(
            example_id=f"{repo}/{split}/{line - 1}",
            messages=({"role": "user", "content": problem},),
            data_source=repo,
            ground_truth=_ground_truth(record.get("answer"), f"{where}, field 'answer'", graded),
            extra_info={"split": split, "index": line - 1},
        )
    raise DataError(
        f"{where}, field 'prompt': missing; expected verl's schema (prompt, data_source, reward_model.ground_truth) or "
        f"GSM8K's (question, answer), found: {', '.join(sorted(map(str, record))) or 'no fields'}. {_SCHEMA}"
    )


_SCHEMA = (
    'Other rows: write {"data_source": NAME, "prompt": TEXT or messages, "reward_model": {"ground_truth": ANSWER}}; '
    "see docs/howto/data.md"
)
_UNREAD = {
    **dict.fromkeys(MEDIA, "models read text; leave it out"),
    "tools": "name functions in rollout.tools",
    "chat_template_kwargs": "set data.template_arguments",
}
"""Columns that other libraries show to a model."""


def _verl_row(record: Mapping[str, Any], where: str, line: int, graded: bool) -> Row:
    if record.get("data_source") is None:
        raise DataError(f"{where}, field 'data_source': missing; write a string there. {_SCHEMA}")
    data_source = _text(record, "data_source", where)
    reward_model = record.get("reward_model")
    if reward_model is None and not graded:
        reward_model = {}
    if not isinstance(reward_model, Mapping):
        found = 'missing; write {"ground_truth": ANSWER}' if reward_model is None else f"found {reward_model!r}"
        raise DataError(f"{where}, field 'reward_model': expected an object with ground_truth, {found}")
    extra = record.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise DataError(f"{where}, field 'extra_info': expected an object, found {extra!r}")
    for name in MEDIA:
        if extra.get(name) not in (None, "", [], {}, ()):
            raise DataError(f"{where}, field 'extra_info.{name}': does not reach the prompt; {_UNREAD[name]}")
    index = line if extra.get("index") is None else extra["index"]
    truth, ability = reward_model.get("ground_truth"), record.get("ability")
    if not isinstance(ability, str | None):
        raise DataError(f"{where}, field 'ability': expected a string, found {ability!r}")
    return Row(
        example_id="/".join(str(part) for part in (data_source, extra.get("split"), index) if part is not None),
        messages=messages_of(record["prompt"], where),
        data_source=data_source,
        ground_truth=_ground_truth(truth, f"{where}, field 'reward_model.ground_truth'", graded),
        extra_info=dict(extra),
        ability=ability or "",
        raw_ground_truth=None if isinstance(truth, str) else truth,
    )


def _ground_truth(value: Any, where: str, graded: bool) -> str:
    """A ground truth as text: strings as they are, numbers in Python's notation, structures as JSON."""
    if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        if not graded:
            return ""
        raise DataError(f"{where}: missing, empty or NaN; write the correct answer there, or leave the row out")
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        raise DataError(f"{where}: expected a text, a number or JSON, found a {type(value).__name__}") from None


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    value = record.get(field)
    if value is None:
        raise DataError(f"{where}, field {field!r}: missing; write a string there")
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}, field {field!r}: expected a non-empty string, found {value!r}")
    return value


def _unique(rows: list[Row]) -> list[Row]:
    taken = {row.example_id for row in rows}
    seen: dict[str, int] = {}
    unique = []
    for row in rows:
        seen[row.example_id] = times = seen.get(row.example_id, 0) + 1
        if times > 1:
            names = (f"{row.example_id}#{number}" for number in itertools.count(times))
            row = replace(row, example_id=next(name for name in names if name not in taken))
            taken.add(row.example_id)
        unique.append(row)
    return unique
