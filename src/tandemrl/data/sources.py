"""Raw records of published data sets, one at a time: from the hub, or from a local copy. No torch."""

import hashlib
import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.data.loading import load_hub, read_records
from tandemrl.data.rows import DataError, object_of

ExpectRows = Mapping[str, int] | Literal[0]
"""How many rows each split must have; 0 accepts any number."""

SUFFIXES = (".parquet", ".jsonl", ".json")
SPLITS = {"train", "test", "validation"}
"""A file with one of these names is never taken for another split."""


class Origin(NamedTuple):
    """A split of a data set on the hub.

    ``split`` None means the first split, which is the only one in the sets used here. The same holds for ``config``.
    ``file`` is a pattern of the name of the file that the authors publish, if it does not begin with the split's.
    """

    repo: str
    split: str | None = None
    config: str | None = None
    file: str = ""

    @property
    def name(self) -> str:
        """The name of the repository without its owner, which a local copy also has."""
        return self.repo.rpartition("/")[2]


class Record(NamedTuple):
    """One raw record. ``where`` names its source and row, for errors."""

    where: str
    fields: Mapping[str, Any]

    def text(self, *names: str) -> str:
        """The first of the fields with these names that is not empty, as text; numbers are written out.

        Raises:
            DataError: all of them are missing or empty, or the field is neither text nor a finite number.
        """
        field = next((name for name in names if self.fields.get(name) not in (None, "")), names[0])
        value = self.fields.get(field)
        usable = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        if not usable or isinstance(value, bool) or value == "":
            others = f" (or {', '.join(map(repr, names[1:]))})" if field == names[0] and names[1:] else ""
            raise DataError(f"{self.where}, field {field!r}{others}: expected a string, found {value!r}")
        return str(value)


PROBLEM = ("problem", "question", "Problem", "Question")
ANSWER = ("answer", "ground_truth", "Answer", "final_answer")
"""What published sets call a problem and its answer, see `Record.text`."""


def flattened(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a record, and beside them what verl's schema has inside ``reward_model`` and ``extra_info``."""
    inner = (fields.get("reward_model"), fields.get("extra_info"))
    return ChainMap(*(dict(part) for part in (fields, *inner) if isinstance(part, Mapping)))


def read(origin: Origin, source: Path | None, *, alone: bool = True) -> Iterator[Record]:
    """Yield every record of a split, in order.

    Args:
        source: a local copy, see `local_files`. None means the hub.
        alone: whether ``source`` is a copy of this data set and no other.

    Raises:
        DataError: the data set is missing or malformed.
    """
    if source is None:
        where = f"hf:{origin.repo}" + (f":{origin.split}" if origin.split else "")
        table = load_hub(origin.repo, origin.config, origin.split, where=where)
        if origin.split is None:
            table = next(iter(table.values()))
        for row, record in enumerate(table, 1):
            yield Record(f"{where}, row {row}", object_of(record, f"{where}, row {row}"))
        return
    for path in local_files(origin, source, alone=alone):
        for line, record in read_records(path):
            where = f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {line}"
            yield Record(where, object_of(record, where))


def local_files(origin: Origin, source: Path, *, alone: bool = True) -> list[Path]:
    """The files of a local copy of a split, in order.

    ``source`` is a file, or a folder with Parquet, JSONL or JSON files, or with a folder of the config that has them.
    As on the hub, the name of a file or of its folder starts with the name of the split; a single file may have any
    name. If ``source`` holds copies of several data sets, each is a file or a folder with the name of its repository,
    with or without the owner.

    Raises:
        DataError: there is no such file, or more than one could be meant.
    """
    if origin.file and (published := sorted(source.glob(origin.file))):
        return published[:1]
    if source.is_file() and alone:
        if source.suffix not in SUFFIXES:
            raise DataError(f"{source}: expected a {', '.join(SUFFIXES)} file")
        return [source]
    if not source.is_dir():
        what = "file or folder" if alone else "folder"
        raise DataError(f"{source}: no such {what}; --source takes one with the files of {origin.repo}")
    files = [path for suffix in SUFFIXES if (path := source / f"{origin.name}{suffix}").is_file()]
    among = source if alone else None
    folder = next((path for path in (source / origin.repo, source / origin.name) if path.is_dir()), among)
    if not files and folder is None:
        raise DataError(
            f"{source}: no copy of {origin.repo}; expected a folder {origin.name}/ or a file {origin.name}"
            f"{{{','.join(SUFFIXES)}}} there"
        )
    if not files and folder is not None:
        config = folder / str(origin.config)
        files = _below(config if config.is_dir() else folder)
    chosen = files
    if origin.split is not None:
        chosen = [path for path in files if _in_split(path, origin.split)]
        chosen = chosen or [path for path in files if not any(_in_split(path, other) for other in SPLITS)]
    if len({(path.parent, _SHARD.sub("", path.stem), path.suffix) for path in chosen}) == 1:
        if (shards := _SHARD.search(chosen[0].stem)) and shards["all"] and int(shards["all"]) != len(chosen):
            raise DataError(
                f"{chosen[0].parent}: {len(chosen)} of {int(shards['all'])} files of the split are there; add the "
                "missing ones"
            )
        return chosen
    names = ", ".join(str(path.relative_to(source)) for path in chosen[:8]) or "none"
    raise DataError(
        f"{source}: expected the {origin.split or 'only'} split of {origin.repo} as Parquet, JSONL or JSON; files "
        f"found: {names}; --source can be one of them"
    )


def expect(where: str, count: int, expect_rows: ExpectRows, split: str) -> None:
    """Check the number of rows of a split.

    Raises:
        DataError: the split has another number of rows than expected.
    """
    if expect_rows != 0 and count != expect_rows[split]:
        raise DataError(
            f"{where}: {count} rows, expected {expect_rows[split]}; the file is incomplete or another revision "
            "(--expect-rows 0 accepts it)"
        )


def provenance(
    origins: Sequence[Origin], source: Path | None, dropped: Mapping[str, int] | None = None, *, alone: bool = True
) -> dict[str, Any]:
    """The entries of a manifest that say where the rows are from and how many were dropped.

    The counts in ``dropped`` may still change afterwards.

    Raises:
        DataError: a file would be two splits of one data set.
    """
    if source is None:
        where: dict[str, Any] = {"source": ", ".join(dict.fromkeys(origin.repo for origin in origins))}
    else:
        files = [path for origin in origins for path in local_files(origin, source, alone=alone)]
        of_two = next((path for path in files if files.count(path) > 1), None)
        if of_two is not None and len({origin.repo for origin in origins}) < len(origins):
            raise DataError(
                f"{of_two} would be more than one split of {origins[0].repo}: name each file after its split, as "
                f"{' and '.join(f'{origin.split}{of_two.suffix}' for origin in origins)}"
            )
        where = {"source": str(source), "source_sha256": {str(path): checksum(path) for path in files}}
    return where if dropped is None else where | {"dropped": dropped}


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------------------------


def _below(folder: Path) -> list[Path]:
    """The data files of a folder and of the folders in it. Hidden ones, which the hub's client uses, are left out."""
    found = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return sorted(each for each in found if not re.search(r"(^|/)\.", each.relative_to(folder).as_posix()))


def _in_split(path: Path, split: str) -> bool:
    """Whether a file belongs to a split, as train.jsonl, gsm8k_train.jsonl, train-00000-of-00002.parquet or
    train/0000.parquet do.

    A file's own name takes precedence over the name of its folder.
    """
    named = {name for name in SPLITS | {split} if re.search(rf"(?<![A-Za-z]){name}(?![A-Za-z])", path.stem)}
    return split in (named or {path.parent.name})


_SHARD = re.compile(r"-\d{5}-of-(?P<all>\d{5})$|^\d{4}$")
"""What the names of the files of one split differ in."""
