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

from tandemrl.config.catalogue import TASKS
from tandemrl.config.hints import hint, pip_install
from tandemrl.data.messages import MEDIA, first_filled
from tandemrl.data.rows import GSM8K, DataError, Row, gsm8k_row, messages_of, object_of
from tandemrl.files import LineError, parse_json, read_json_lines

NO_COLUMNS: Mapping[str, str] = {}


def load_rows(sources: Sequence[str], *, graded: bool = True, columns: Mapping[str, str] = NO_COLUMNS) -> list[Row]:
    """All rows of all sources, in order, with ids that are unique over the whole list.

    A row's id is ``data_source[/split]/index``, where the index is ``extra_info.index`` or else the line (from 1). The
    second, third … row of the same id get ``#2``, ``#3`` … appended.

    Args:
        sources: each a ``.jsonl`` or ``.parquet`` file, ``synthetic:PAIR:SPLIT[:COUNT]``, ``gym:NAME:SPLIT:N``,
            or ``hf:REPO:CONFIG:SPLIT``.
        graded: whether responses to the rows will be graded. If not, rows need no ground truth; one that is missing is
            the empty text.
        columns: the columns of ``prompt``, ``ground_truth``, ``data_source`` and ``ability`` where they have other
            names (``data.columns``). Rows in verl's schema that lack such a column are read without it.

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
        loaded = list(_load(str(source), graded, columns))
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


def _load(source: str, graded: bool, columns: Mapping[str, str]) -> Iterator[Row]:
    kind, _, rest = source.partition(":")
    if kind in TASKS and (made := TASKS[kind].rows):
        module, _, name = made.partition(":")
        rows: Iterator[Row] = getattr(import_module(module), name)(source, rest.split(":"))
        return rows
    if kind == "hf":
        return _hub(source, rest.split(":"), graded, columns)
    return _file(Path(source).expanduser(), graded, columns)


def _hub(source: str, parts: list[str], graded: bool, columns: Mapping[str, str]) -> Iterator[Row]:
    if len(parts) != 3 or not all(parts):
        raise DataError(f"{source}: expected hf:REPO:CONFIG:SPLIT, e.g. hf:openai/gsm8k:main:train")
    repo, config, split = parts
    records = enumerate(load_hub(repo, config, split, where=source), 1)
    parse = partial(parse_row, split=split, repo=repo, graded=graded, columns=columns)
    return (parse(_without_nulls(record), f"{source}, line {line}", line) for line, record in records)


def _file(path: Path, graded: bool, columns: Mapping[str, str]) -> Iterator[Row]:
    if not path.is_file():
        known = next((name for name, task in TASKS.items() if task.build and name in str(path).lower()), None)
        build = f"; build it with `tandemrl data build {known}`" if known else ""
        what = "a folder; name the files in it" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what}{hint(path) or build}")
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"{path}: expected a .jsonl or .parquet file, synthetic:PAIR:SPLIT[:COUNT], gym:NAME:SPLIT:N or "
            "hf:REPO:CONFIG:SPLIT"
        )
    read = _without_nulls if path.suffix == ".parquet" else (lambda record: record)
    parse = partial(parse_row, split=path.stem, graded=graded, columns=columns)
    return (parse(read(record), f"{path}, line {line}", line) for line, record in read_records(path))


def _without_nulls(value: Any) -> Any:
    """A value of a Parquet file without the fields that are null: its structs have the fields of all rows, so that null
    stands for a field that a row does not have."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def parse_row(
    record: Any,
    where: str,
    line: int,
    *,
    split: str,
    repo: str | None = None,
    graded: bool = True,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> Row:
    """The row of a record: in verl's schema, of GSM8K, or with a prompt and an answer in columns of their own.

    Args:
        where: the beginning of an error message.
        line: the number of the record, from 1, which stands for a missing index.
        split: the name of the file or split, which is the ``data_source`` of records without one from a file.
        repo: the repository on the hub, which is the ``data_source`` of records without one from there.
        graded, columns: see `load_rows`.

    Raises:
        DataError: a column is missing or malformed.
    """
    record = object_of(record, where)
    extra = record.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        raise DataError(f"{where}, field 'extra_info': expected an object, found {extra!r}")
    for fields, names, inside in ((record, _UNREAD, ""), (extra, MEDIA, "extra_info.")):
        if name := first_filled(fields, names):
            raise DataError(f"{where}, field '{inside}{name}': does not reach the prompt; {_UNREAD[name]}")
    asked, answer = record.get("question"), record.get("answer")
    worked = isinstance(answer, str) and "####" in answer and not columns.keys() & {"prompt", "ground_truth"}
    if "prompt" not in record and repo in (None, GSM8K) and isinstance(asked, str) and (worked or repo):
        try:
            return gsm8k_row(asked, str(answer), split=split, index=line - 1)
        except DataError as error:
            raise DataError(f"{where}, field 'answer': {error}, as in GSM8K's files") from None
    verls = isinstance(record.get("reward_model"), Mapping)

    def find(key: str, names: Sequence[str]) -> tuple[str | None, Any]:
        """The name and the value of the column for a part of a row."""
        name = columns.get(key)
        if name is None or (verls and name not in record):
            name = next((name for name in names if record.get(name) is not None), None)
            return name, record.get(name) if name is not None else None
        value = _at(record, name)
        if value is None:
            raise DataError(f"{where}, field {name!r}: missing, and data.columns.{key} names it. {_there(record)}")
        return name, value

    asked, prompt = find("prompt", PROMPT)
    if asked is None:
        raise DataError(f"{where}, field 'prompt': missing; set data.columns.prompt=COLUMN. {_there(record)}")
    source, data_source = find("data_source", ("data_source",))
    data_source = (repo or split) if source is None else data_source
    if not isinstance(data_source, str) or not data_source:
        raise DataError(f"{where}, field {source!r}: expected a non-empty string, found {data_source!r}")
    kind, ability = find("ability", ("ability",))
    if not isinstance(ability, str | None):
        raise DataError(f"{where}, field {kind!r}: expected a string, found {ability!r}")
    answered, truth = find("ground_truth", () if verls else TRUTH)
    if answered is None and verls:
        answered, truth = "reward_model.ground_truth", record["reward_model"].get("ground_truth")
    elif answered is None and graded:
        reward_model = record.get("reward_model")
        what = "'ground_truth': missing" if reward_model is None else f"'reward_model': no object: {reward_model!r}"
        raise DataError(
            f'{where}, field {what}; write the correct answer there ({{"reward_model": {{"ground_truth": ANSWER}}}} '
            f"in verl's schema), or set data.columns.ground_truth=COLUMN. {_there(record)}"
        )
    used = {"prompt", source, kind, "reward_model", "extra_info", *({answered} & {*TRUTH})}
    others = {name: value for name, value in record.items() if name not in used and value is not None}
    if repo is not None and not verls:
        extra = {"split": split, "index": line - 1, **extra}
    index = line if extra.get("index") is None else extra["index"]
    return Row(
        example_id="/".join(str(part) for part in (data_source, extra.get("split"), index) if part is not None),
        messages=messages_of(prompt, where, str(asked)),
        data_source=data_source,
        ground_truth=_ground_truth(truth, f"{where}, field {answered!r}", graded),
        extra_info={**others, **extra},
        ability=ability or "",
        raw_ground_truth=None if isinstance(truth, str) else truth,
    )


PROMPT = ("prompt", "question", "problem")
TRUTH = ("ground_truth", "answer", "solution")
"""The columns of a prompt and of its answer in TRL's, verifiers' and other rows. The first one that is there counts."""
_UNREAD = {
    **dict.fromkeys(MEDIA, "models read text; leave it out"),
    "tools": "name functions in rollout.tools",
    "chat_template_kwargs": "set data.template_arguments",
}
"""Columns that other libraries show to a model."""


def _at(record: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field in it (``info.answer``)."""
    value: Any = record
    for part in (name,) if name in record else name.split("."):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return None
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _there(record: Mapping[str, Any]) -> str:
    columns = ", ".join(sorted(map(str, record))) or "no columns"
    return f"The row has {columns}; docs/howto/data.md says what rows may look like"


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
