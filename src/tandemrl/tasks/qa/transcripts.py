"""Reads from a transcript which documents an episode retrieved, and how it was completed. Without torch."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandemrl.data.documents import HEADER
from tandemrl.data.messages import Message

COMPLETE = "complete"
"""The tool whose call ends an episode; its arguments are the result."""
_HEADERS = re.compile(rf"^{HEADER}(\S+)", re.MULTILINE)


class Completed(NamedTuple):
    """The arguments of a call of ``complete``. An argument is None if it is missing or of the wrong type."""

    reasoning: Any = None
    final_answer: str | None = None
    cited_doc_ids: tuple[str, ...] | None = None

    @property
    def share(self) -> float:
        """The share of the arguments that are not None."""
        return sum(argument is not None for argument in self) / len(self)


def retrieved_ids(messages: Sequence[Message]) -> set[str]:
    """The ids of all documents that tools showed.

    A tool's message counts only if it begins with a document, so that an error message that repeats the author's own
    words does not count.
    """
    shown = [str(message.get("content")) for message in messages if message.get("role") == "tool"]
    return {name for text in shown if text.startswith(HEADER) for name in _HEADERS.findall(text)}


def completed(messages: Sequence[Message]) -> Completed:
    """The last call of ``complete`` in a transcript. Without such a call, all arguments are None."""
    for message in reversed(messages):
        for call in reversed(message.get("tool_calls") or ()):
            function = call.get("function") or {}
            if function.get("name") == COMPLETE:
                return _completed(function.get("arguments"))
    return Completed()


def _completed(arguments: Any) -> Completed:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    if not isinstance(arguments, Mapping):
        arguments = {}
    answer, cited = arguments.get("final_answer"), arguments.get("cited_doc_ids")
    if isinstance(cited, str):
        cited = cited.split(",")
    return Completed(
        arguments.get("reasoning"),
        str(answer) if isinstance(answer, str | int | float) else None,
        tuple(str(each).strip() for each in cited) if isinstance(cited, list | tuple) else None,
    )
