"""Questions of several hops, each with its paragraphs: MuSiQue (arXiv:2108.00573), and in its form HotpotQA
(arXiv:1809.09600) and 2WikiMultiHopQA (arXiv:2011.01060). No torch."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandemrl.data.parquet import build_splits
from tandemrl.data.rows import DataError, object_of, record_of
from tandemrl.data.sources import ExpectRows, Origin, Record


class Question(NamedTuple):
    """A question about documents. answers: the answer, and other forms of it. place: what ``extra_info`` has beside
    the documents."""

    text: str
    answers: Sequence[str]
    docs: Sequence[Mapping[str, Any]]
    place: Mapping[str, Any]
    answerable: bool = True


SPLITS = ("train", "validation")


class Published(NamedTuple):
    """A set. rows: the published sizes of `SPLITS`. files: those of the splits in what its authors publish."""

    repo: str
    config: str | None
    rows: tuple[int, int]
    files: tuple[str, str]


_MUSIQUE_FILES = ("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl")
_HOTPOT_FILES = ("hotpot_train_v1.1.json", "hotpot_dev_distractor_v1.json")
MUSIQUE = Published("bdsaglam/musique", "answerable", (19_938, 2417), _MUSIQUE_FILES)
MUSIQUE_ROWS: Mapping[str, int] = dict(zip(SPLITS, MUSIQUE.rows, strict=True))
"""The published sizes of MuSiQue-Answerable."""
SETS: Mapping[str, Published] = {
    "hotpotqa": Published("hotpotqa/hotpot_qa", "distractor", (90_447, 7405), _HOTPOT_FILES),
    "2wikimultihopqa": Published("ohjoonhee/2WikiMultihopQA", None, (167_454, 12_576), ("train.json", "dev.json")),
}


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

    def thinned(record: Record, split: str, index: int) -> Question:
        question = _question(record)
        noise = np.random.default_rng([seed, SPLITS.index(split), index])
        kept = [doc for doc in question.docs if doc["is_supporting"] or noise.random() < noise_rate]
        dropped["paragraphs"] += len(question.docs) - len(kept)
        return question._replace(docs=kept)

    settings = {"noise_rate": noise_rate, "seed": seed, "dropped": dropped}
    return _build("musique", MUSIQUE, source, out, thinned, expect_rows, **settings)


def build_hotpot(name: str, source: Path | None, out: Path, *, expect_rows: ExpectRows | None = None) -> dict[str, Any]:
    """Write a set as ``train`` and ``validation`` into ``out``, in the published order, and return the manifest.

    The rows are as those of `build_musique`, with ``type`` in ``extra_info``. A document is a paragraph; it
    supports the answer if one of its sentences does.

    Args:
        name: a set of `SETS`.
        source: a folder with files of the two splits, as on the hub or as its authors publish them. None means the hub.
        expect_rows: how many rows each split must have; None as published, 0 any number.

    Raises:
        DataError: the data is missing or malformed, or a split has another number of rows than published.
    """
    return _build(name, SETS[name], source, out, lambda record, split, index: _hotpot_question(record), expect_rows)


# --------------------------------------------------------------------------------------------------------------------


def _build(
    name: str,
    published: Published,
    source: Path | None,
    out: Path,
    question: Callable[[Record, str, int], Question],
    expect_rows: ExpectRows | None,
    **settings: Any,
) -> dict[str, Any]:
    def row(record: Record, split: str, index: int) -> dict[str, Any]:
        text, answers, docs, place, answerable = question(record, split, index)
        supporting = sum(doc["is_supporting"] for doc in docs)
        if answerable and supporting == 0:
            raise DataError(f"{record.where}, field 'paragraphs': no paragraph is supporting")
        truth = json.dumps(answers, ensure_ascii=False)
        extra = {"split": split, "index": index, **place, "docs": docs, "n_hops": supporting, "answerable": answerable}
        return record_of(name, [{"role": "user", "content": text}], "qa", truth, extra)

    named = zip(SPLITS, published.files, strict=True)
    origins = {split: Origin(published.repo, split, published.config, file) for split, file in named}
    rows = dict(zip(SPLITS, published.rows, strict=True)) if expect_rows is None else expect_rows
    return build_splits(out, name, origins, source, row, rows, **settings)


def _question(record: Record) -> Question:
    info = record.fields.get("info")
    fields = {**record.fields, **info} if isinstance(info, Mapping) else record.fields
    record = Record(record.where, fields)
    question, answer = record.text("question"), record.text("answer")
    aliases = fields.get("answer_aliases") or [each for each in fields.get("answers") or [] if each != answer]
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"{record.where}, field 'answer_aliases': expected strings, found {aliases!r:.80}")
    answerable = bool(fields.get("answerable", True))
    return Question(question, [answer, *aliases], list(_documents(record)), {"id": record.text("id")}, answerable)


def _documents(record: Record) -> Iterator[dict[str, Any]]:
    paragraphs = record.fields.get("paragraphs", record.fields.get("docs"))
    if not isinstance(paragraphs, list) or not paragraphs:
        raise DataError(f"{record.where}, field 'paragraphs': expected a list of paragraphs, found {paragraphs!r:.80}")
    for number, paragraph in enumerate(paragraphs):
        where = f"{record.where}, field 'paragraphs[{number}]'"
        fields = Record(where, object_of(paragraph, where))
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


def _hotpot_question(record: Record) -> Question:
    facts = {title for title, _ in _pairs(record, "supporting_facts", "sent_id")}
    docs = []
    for number, (title, sentences) in enumerate(_pairs(record, "context", "sentences")):
        body = " ".join(map(str.strip, sentences))
        docs.append({"id": str(number), "title": title, "body": body, "is_supporting": title in facts})
    place = {"id": record.text("id", "_id"), "type": record.text("type")}
    return Question(record.text("question"), [record.text("answer")], docs, place)


def _pairs(record: Record, field: str, second: str) -> list[tuple[str, Any]]:
    """(title, value) of a column: pairs as its authors write them, also as JSON text, or two lists as on the hub."""
    found: Any = record.fields.get(field)
    try:
        value = json.loads(found) if isinstance(found, str) else found
        if isinstance(value, Mapping):
            columns = value["title"], value.get(second, value.get("content"))
            value = [*zip(*columns, strict=True)] if all(isinstance(each, list) for each in columns) else ()
        pairs = [(title, other) for title, other in value]
    except (ValueError, TypeError, LookupError):
        pairs = []
    texts = [title for title, _ in pairs]
    if second == "sentences":
        lists = [other if isinstance(other, list) else [None] for _, other in pairs]
        texts += [*itertools.chain.from_iterable(lists)]
    if not pairs or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"{record.where}, field {field!r}: expected [title, {second}] pairs, or lists title and {second}, found "
            f"{found!r:.80}"
        )
    return pairs
