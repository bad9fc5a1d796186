"""MuSiQue (arXiv:2108.00573): questions of two to four hops, each with about twenty paragraphs. No torch."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError, record_of
from tandemrl.data.sources import ExpectRows, Origin, Record, copy_of, provenance, split_rows

MUSIQUE = "bdsaglam/musique"
MUSIQUE_ROWS: Mapping[str, int] = {"train": 19_938, "validation": 2417}
"""The published sizes of MuSiQue-Answerable."""
OFFICIAL_FILES = {"train": "musique_ans_v1.0_train.jsonl", "validation": "musique_ans_v1.0_dev.jsonl"}
"""The files of the splits in the archive of MuSiQue's authors."""


def build_musique(
    source: Path | None, out: Path, *, noise_rate: float = 1.0, seed: int = 0, expect_rows: ExpectRows = MUSIQUE_ROWS
) -> dict[str, Any]:
    """Write MuSiQue-Answerable as ``train`` and ``validation`` into ``out``, in the published order, and return the
    manifest.

    The ground truth is the answer with its aliases. ``extra_info`` has ``id``, ``docs`` (see `data.documents`),
    ``n_hops`` (supporting paragraphs) and ``answerable``.

    Args:
        source: a folder with files of the two splits, or the unpacked archive of the authors. None means the hub. Rows
            as rlvr passes them on (``question``, ``answer``, and the rest in ``info``) can be read, too.
        noise_rate: the probability with which each paragraph that does not support the answer is kept.
        seed: seed of these draws, which also depend on the position of the paragraph.
        expect_rows: how many rows each split must have; 0 accepts any number.

    Raises:
        DataError: the data is missing or malformed, or a split has another number of rows than published.
    """
    if not 0 <= noise_rate <= 1:
        raise DataError(f"noise rate {noise_rate}: must be in [0, 1]")
    dropped: Counter[str] = Counter()
    numbers = {split: number for number, split in enumerate(MUSIQUE_ROWS)}

    def thinned(record: Record, split: str, index: int) -> dict[str, Any]:
        row = _row(record, split, index)
        noise = np.random.default_rng([seed, numbers[split], index])
        docs = row["extra_info"]["docs"]
        kept = [doc for doc in docs if doc["is_supporting"] or noise.random() < noise_rate]
        dropped["paragraphs"] += len(docs) - len(kept)
        row["extra_info"]["docs"] = kept
        return row

    origins = {split: Origin(MUSIQUE, split, "answerable") for split in MUSIQUE_ROWS}
    copies = {split: copy_of(source, OFFICIAL_FILES[split]) for split in origins}
    splits = split_rows(origins, copies, thinned, str(source or MUSIQUE), expect_rows)
    official = copies["train"] != source
    where = {"source": str(source)} if official else provenance([*origins.values()], source)
    return write_splits(out, "musique", splits, where | {"noise_rate": noise_rate, "seed": seed, "dropped": dropped})


def question_record(
    data_source: str,
    question: str,
    answers: Sequence[str],
    docs: Sequence[Mapping[str, Any]],
    where: str,
    place: Mapping[str, Any],
    answerable: bool = True,
) -> dict[str, Any]:
    """A row of a question about documents.

    Args:
        answers: the answer, and other forms of it.
        place: what ``extra_info`` has beside the documents.

    Raises:
        DataError: it has an answer, and no document supports that.
    """
    supporting = sum(doc["is_supporting"] for doc in docs)
    if answerable and supporting == 0:
        raise DataError(f"{where}, field 'paragraphs': no paragraph is supporting")
    extra = {**place, "docs": docs, "n_hops": supporting, "answerable": answerable}
    truth = json.dumps([*answers], ensure_ascii=False)
    return record_of(data_source, [{"role": "user", "content": question}], "qa", truth, extra)


# --------------------------------------------------------------------------------------------------------------------


def _row(record: Record, split: str, index: int) -> dict[str, Any]:
    info = record.fields.get("info")
    fields = {**record.fields, **info} if isinstance(info, Mapping) else record.fields
    record = Record(record.where, fields)
    question, answer = record.text("question"), record.text("answer")
    aliases = fields.get("answer_aliases") or [each for each in fields.get("answers") or [] if each != answer]
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"{record.where}, field 'answer_aliases': expected strings, found {aliases!r:.80}")
    answerable = bool(fields.get("answerable", True))
    place = {"split": split, "index": index, "id": record.text("id")}
    docs = list(_documents(record))
    return question_record("musique", question, [answer, *aliases], docs, record.where, place, answerable)


def _documents(record: Record) -> Iterator[dict[str, Any]]:
    paragraphs = record.fields.get("paragraphs", record.fields.get("docs"))
    if not isinstance(paragraphs, list) or not paragraphs:
        raise DataError(f"{record.where}, field 'paragraphs': expected a list of paragraphs, found {paragraphs!r:.80}")
    for number, paragraph in enumerate(paragraphs):
        if not isinstance(paragraph, Mapping):
            raise DataError(
                f"{record.where}, field 'paragraphs[{number}]': expected an object, found {paragraph!r:.80}"
            )
        fields = Record(f"{record.where}, field 'paragraphs[{number}]'", paragraph)
        yield {
            "id": fields.text("idx", "id"),
            "title": fields.text("title"),
            "body": plain_quotes(fields.text("paragraph_text", "body")),
            "is_supporting": bool(fields.fields.get("is_supporting")),
        }


def plain_quotes(text: str) -> str:
    """A text with plain quotation marks in place of TeX's, without those that have no partner.

    Examples:
        >>> plain_quotes("``Hey Jude'' is a song. It''s")
        '"Hey Jude" is a song. Its'
    """
    paired = re.sub(r"``(.*?)''", r'"\1"', text, flags=re.DOTALL)
    return paired.replace("``", "").replace("''", "")
