"""The documents of a question, which can be searched and some of which support the answer. Without torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandemrl.data.rows import DataError, Row

HEADER = "Document ID: "
"""The text before the id at the beginning of every document that is shown."""


class Document(NamedTuple):
    """A document. ``text`` is what is searched and shown. ``supporting`` says whether the answer rests on it."""

    id: str
    title: str
    text: str
    supporting: bool = False


def documents_of(row: Row) -> list[Document]:
    """The documents in ``extra_info.docs``, in order; none if there is no such entry.

    Each is an object with an ``id`` (text without white space, or a whole number), a ``text`` or else a ``title`` and a
    ``body``, and ``is_supporting``.

    Raises:
        DataError: a document is malformed, or two documents have the same id.
    """
    where = f"row {row.example_id}, field 'extra_info.docs"
    records = row.extra_info.get("docs") or []
    if not isinstance(records, Sequence) or isinstance(records, str):
        raise DataError(f"{where}': expected a list of documents, found {records!r:.80}")
    documents = [document(record, f"{where}[{number}]'") for number, record in enumerate(records)]
    for name, count in Counter(each.id for each in documents).items():
        if count > 1:
            raise DataError(f"{where}': two documents have the id {name!r}")
    return documents


def document(record: Any, where: str) -> Document:
    """A document from its fields; see `documents_of`.

    Raises:
        DataError: the record is not a document; the message begins with ``where``.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected an object, found {record!r:.80}")
    name, title = record.get("id"), record.get("title") or ""
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or len(name.split()) != 1 or name != name.strip():
        raise DataError(f"{where}: its 'id' must be a string without whitespace, or a whole number, found {name!r}")
    text = record.get("text")
    if text is None and isinstance(record.get("body"), str):
        text = with_title(title, record["body"])
    if not isinstance(text, str) or not isinstance(title, str):
        raise DataError(f"{where}: expected a string 'text', or strings 'title' and 'body', found {sorted(record)}")
    return Document(name, title, text, bool(record.get("is_supporting")))


def with_title(title: str, body: str) -> str:
    """A document as it is searched and shown: its title as a heading, then its body."""
    return f"# {title}\n{body}" if title else body


def shown(document: Document) -> str:
    """A document as an author sees it."""
    return f"{HEADER}{document.id}\n{document.text}"


def supporting_ids(row: Row) -> list[str]:
    """The ids of the documents that support the answer, in order."""
    return [each.id for each in documents_of(row) if each.supporting]


def hops(row: Row) -> int:
    """How many documents the answer takes: ``extra_info.n_hops``, or else the number of those that support it.

    Raises:
        DataError: it is not a whole number.
    """
    count = row.extra_info.get("n_hops")
    if count is None:
        return len(supporting_ids(row))
    if not isinstance(count, int) or count < 0:
        raise DataError(f"row {row.example_id}, field 'extra_info.n_hops': expected a whole number, found {count!r}")
    return count
