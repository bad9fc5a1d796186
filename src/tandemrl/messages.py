"""Messages of a chat, and the transcript of an episode. No torch: processes that tools and rewards run in import it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message of a chat: ``role``, ``content``, and ``tool_calls`` where a tool is called; JSON values."""


def sound(value: Any) -> Any:
    """A JSON value without halves of surrogate pairs, which its texts may have and no file or request can.

    Examples:
        >>> sound({"found": ["\\ud800 1"]})
        {'found': ['? 1']}
    """
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())


@dataclass(frozen=True, slots=True)
class Transcript:
    """An episode of several turns as messages, for scorers and readers; nothing is trained on it.

    messages: what was written and what the world answered, in order, without the prompt's. state: what the environment
    kept of the episode at its end. counts: what happened in it, by name (tool calls, errors, time-outs …). All are JSON
    values.
    """

    messages: tuple[Message, ...]
    state: Any = None
    counts: Mapping[str, int | float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """``Transcript.from_json`` is its inverse."""
        return {
            "messages": [dict(message) for message in self.messages],
            "state": self.state,
            "counts": dict(self.counts),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Transcript":
        return cls(tuple(value["messages"]), value["state"], value["counts"])
