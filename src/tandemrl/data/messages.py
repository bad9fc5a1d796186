"""Messages of a chat, and the transcript of an episode.

The module does not import torch, so that the processes of tools and rewards can import it quickly.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message of a chat, made of JSON values: ``role``, ``content``, and ``tool_calls`` where a tool is called."""


def sound(value: Any) -> Any:
    """A copy of a JSON value in which "?" replaces every lone half of a surrogate pair.

    Python strings may hold such halves, but UTF-8 cannot encode them, so no file or HTTP request can carry them.

    Examples:
        >>> sound({"found": ["\\ud800 1"]})
        {'found': ['? 1']}
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode of several turns as messages, for scorers and readers; nothing is trained on it.

    messages: what the authors wrote and what the environment answered, in order, without the messages of the prompt.
    state: the state of the environment at the end of the episode. counts: how often each kind of event happened in it
    (tool calls, errors, time-outs …), by name. All are JSON values.
    """

    messages: tuple[Message, ...]
    state: Any = None
    counts: Mapping[str, int | float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict; ``Transcript.from_json`` is its inverse."""
        return {
            "messages": [dict(message) for message in self.messages],
            "state": self.state,
            "counts": dict(self.counts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Transcript":
        return cls(tuple(value["messages"]), value["state"], value["counts"])
