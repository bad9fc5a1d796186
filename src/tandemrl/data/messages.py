"""Messages of a chat, what authors wrote as rewards read it, and the transcript of an episode.

The module does not import torch, so that the processes of tools and rewards can import it quickly.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message of a chat, made of JSON values: ``role``, ``content``, and ``tool_calls`` where a tool is called."""


THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The fields in which a message may have a thought of the assistant."""
MEDIA = (
    *("images", "image", "videos", "video", "audios", "audio", "multi_modal_data", "multi_modal_inputs", "mm_data"),
    *("decoded_image", "pixel_values"),
)
"""The names under which data sets and libraries keep what is no text."""
_UNREAD = (*MEDIA, "content_parts", "files", "function_call", "refusal")


def first_filled(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first of the fields that holds anything, or None."""
    return next((name for name in names if fields.get(name) not in (None, "", [], {}, ())), None)


def text_of(message: Mapping[str, Any]) -> str | None:
    """The content of a message as text, or None. Parts are joined by line breaks, as vLLM's server joins them.

    Raises:
        ValueError: it has something other than text, which no prompt could show.
    """
    if unread := first_filled(message, _UNREAD):
        raise ValueError(f"{unread!r} does not reach the prompt, which is text; leave it out")
    content = message.get("content")
    if not isinstance(content, list | tuple):
        if not isinstance(content, str | None):
            raise ValueError(f"expected a text or a list of text parts, found {content!r:.200}")
        return content
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, Mapping) else None
        text = part if isinstance(part, str) else part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise ValueError(f"only parts of the type text are possible, found {kind or part!r:.200}")
        texts.append(text)
    return "\n".join(texts)


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
    (tool calls, errors, time-outs …), by name. answer: what is scored instead of what the authors wrote. All are JSON
    values.
    """

    messages: tuple[Message, ...]
    state: Any = None
    counts: Mapping[str, int | float] = field(default_factory=dict)
    answer: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict; ``Transcript.from_json`` is its inverse."""
        told = {"messages": [dict(each) for each in self.messages], "state": self.state, "counts": dict(self.counts)}
        return told if self.answer is None else told | {"answer": self.answer}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Transcript":
        return cls(tuple(value["messages"]), value["state"], value["counts"], value.get("answer"))


@dataclass(frozen=True, slots=True)
class Response:
    """What the authors wrote after a prompt, as rewards, judges and files get it; turns are joined by line breaks.

    text: as written, with special tokens, without the tokens that end a turn and padding. plain: without any special
    token, as verl, TRL and verifiers decode it. opened: what the chat template writes of the response at the end of the
    prompt, such as ``<think>``. ids: the token ids after the prompt; None if they are not known.
    """

    text: str
    plain: str
    opened: str = ""
    ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, text: "str | Response") -> "Response":
        """A text of which nothing else is known."""
        return text if isinstance(text, Response) else cls(text, text)

    def to_json(self) -> dict[str, str]:
        """The texts as fields of a line of ``samples.jsonl``."""
        plain = {} if self.plain == self.text else {"plain": self.plain}
        return {"text": self.text, **plain, **({"opened": self.opened} if self.opened else {})}

    @classmethod
    def from_json(cls, line: Mapping[str, Any], ids: Sequence[int] | None = None) -> "Response":
        """The response in such a line."""
        text = line["text"]
        return cls(text, line.get("plain", text), line.get("opened", ""), None if ids is None else tuple(ids))
