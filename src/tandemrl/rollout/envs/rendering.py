"""Renders what the environment says after an author's turn to token ids, once. (The prompt: ``data.rows.chat_tokens``.)

The markup around a message is the chat template's own. The text of the message is tokenised apart from the markup, so
that nothing the environment says can become a control token. What an author wrote is never rendered: its ids stay as
they were sampled.

The markup is what the template writes after an author's turn in a dummy conversation, with a sentinel in place of
every content.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from tandemrl.config import ConfigError
from tandemrl.data.controls import END_OF_THOUGHT, THOUGHT, controls_of
from tandemrl.data.messages import Message
from tandemrl.data.templates import DEFAULT_ARGUMENTS, template_of, template_variables
from tandemrl.rollout.envs.environment import Schema

CUT = "… [cut]"
"""The text that stands at the end of a result that was too long and is cut."""
CHARS_PER_TOKEN = 32
"""To save time, a result is cut before it is tokenised if it has more than this many characters for each token that it
may have."""

_QUESTION, _WRITTEN, _SAID = "QUESTIONofDUMMY", "WRITTENofDUMMY", "SAIDofDUMMY"
_ASKED: Message = {"role": "user", "content": _QUESTION}


class Rendered(NamedTuple):
    """Messages of the environment as the authors get them."""

    tokens: tuple[int, ...]
    messages: list[Message]
    """The messages, without what was cut off."""
    cut: int
    """How many of the messages were cut."""


class Rendering:
    """The chat template of a tokenizer, used for what the environment says between turns.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        schemas: the schemas of the tools, which the template shows to the authors.
        eos_token_ids: the ids that end a turn for the engine.
        result_tokens: a message with more tokens than this is cut; as a rule none is.
        keep_turns: accept a template that would write earlier turns differently once later ones follow. They then stay
            as they were written.
        template_arguments: further variables of the chat template (``data.template_arguments``).

    Raises:
        ConfigError: the template does not read one of these variables, it does not show tools, its turns do not end in
            an EOS token, later turns change how it writes earlier ones, or texts get other tokens apart than together;
            the message names the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        schemas: Sequence[Schema],
        *,
        eos_token_ids: Collection[int],
        result_tokens: int = sys.maxsize,
        keep_turns: bool = False,
        template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
    ) -> None:
        self._tokenizer = tokenizer
        self._name = f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r}"
        self._schemas = list(schemas)
        self._result_tokens = result_tokens
        self._keep_turns = keep_turns
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"{self._name} has no chat template; use an instruction-tuned model")
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(f"{self._name} is not a fast tokenizer; environments need one")
        self._template = template_of(tokenizer, self._schemas)
        told = {"tools": self._schemas} if self._schemas else {}
        self._variables = template_variables(tokenizer, template_arguments, self._schemas) | told
        # A copy: padding and truncation of the original change with every call, also from other threads.
        self._encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self._controls = controls_of(tokenizer, self._template)
        self._markup = lru_cache(maxsize=1024)(self._markup_of)
        self._roles: set[str] = set()
        self.prefix = self._render([_ASKED], to_write=True)
        """What the template writes up to the beginning of a turn. Response templates read it."""
        self.end_of_turn, self._end_text = self._find_end(eos_token_ids)
        self._mark = self._encode(CUT)[0]
        if hidden := [name for schema in schemas if (name := schema["function"]["name"]) not in self.prefix]:
            what = f"its chat template does not tell of tools ({hidden[0]} is not in what it writes)"
            raise ConfigError(f"{self._name}: {what}; use a model that calls tools, or a template that takes `tools`")
        self._markup((("tool" if schemas else "user", None),))

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the template writes for a turn that consists of one call, without the end of the turn.

        Raises:
            ConfigError: the template ends a turn with a call in another way than one without.
        """
        text = self._up_to_end([_ASKED, self._turn("", {"name": name, "arguments": arguments})])
        if text.startswith(self.prefix):
            return text.removeprefix(self.prefix)
        plain = self._render([_ASKED, self._turn(_WRITTEN)], to_write=False)  # begun without an empty thought
        return text[_common(plain, text) :]

    def context(self, messages: Sequence[Message], *, ended: bool) -> Rendered:
        """What follows a turn: its end, if the author did not write it, the messages, and the beginning of the next
        turn.

        Args:
            messages: the answer of the environment.
            ended: whether the last token of the turn is ``end_of_turn``.

        Raises:
            ConfigError: the template cannot show messages of these roles.
        """
        key = tuple((message["role"], message.get("name")) for message in messages)
        (first, *others), as_json = self._markup(key)
        tokens, shown, cut = [*(() if ended else (self.end_of_turn,)), *first], [], 0
        for message, piece in zip(messages, others, strict=True):
            ids, text = self._content(message["content"], as_json)
            tokens += [*ids, *piece]
            cut += text is not None
            shown.append(message if text is None else {**message, "content": text})
        return Rendered(tuple(tokens), shown, cut)

    # ------------------------------------------------------------------------------------------------------- contents

    def _content(self, text: str, as_json: bool) -> tuple[list[int], str | None]:
        """The ids of a message's content, and what is left of the text if it had to be cut, else None."""
        most = self._result_tokens * CHARS_PER_TOKEN
        ids, ends = self._encode(json.dumps(text[:most], ensure_ascii=False)[1:-1] if as_json else text[:most])
        if len(text) <= most and len(ids) <= self._result_tokens:
            return ids, None
        kept = min(len(ids), max(0, self._result_tokens - len(self._mark)))
        while 0 < kept < len(ids) and ends[kept - 1] == ends[kept]:  # the next token has the rest of the character
            kept -= 1
        left = text[: ends[kept - 1] if kept else 0]  # of one in JSON, about that
        return [*ids[:kept], *self._mark], left + CUT

    def _encode(self, text: str) -> tuple[list[int], list[int]]:
        """The ids of a text of the environment, and the offset in the text at which each of them ends.

        A control token in the text is split after its first character, and both halves are tokenised apart.
        """
        ids, ends = self._encode_pieces(text, self._controls.splits(text))
        if not self._controls.ids.isdisjoint(ids):  # it has only one character
            ids, ends = self._encode_pieces(text, range(1, len(text)))
            kept = [i for i, token in enumerate(ids) if token not in self._controls.ids]
            ids, ends = [ids[i] for i in kept], [ends[i] for i in kept]
        return ids, ends

    def _encode_pieces(self, text: str, splits: Sequence[int]) -> tuple[list[int], list[int]]:
        ids, ends = [], []
        for start, end in zip([0, *splits], [*splits, len(text)], strict=True):
            encoding = self._encoder.encode(text[start:end], add_special_tokens=False)
            ids += encoding.ids
            ends += [start + offset for _, offset in encoding.offsets]
        return ids, ends

    # --------------------------------------------------------------------------------------------------------- markup

    def _render(self, messages: Sequence[Message], *, to_write: bool) -> str:
        """The text that the template makes of messages.

        Args:
            to_write: add what the template writes up to the beginning of the next turn.
        """
        chat, how = [dict(each) for each in messages], {"add_generation_prompt": to_write, "tokenize": False}
        try:
            return self._tokenizer.apply_chat_template(chat, **how, **self._variables)
        except Exception as error:  # a program that came with a model may raise anything
            roles = ", ".join(dict.fromkeys(each["role"] for each in messages))
            what = f"its chat template failed with messages of the roles {roles}"
            raise ConfigError(f"{self._name}: {what}: {type(error).__name__}: {error}") from error

    def _turn(self, content: str, call: Mapping[str, Any] | None = None) -> Message:
        turn: dict[str, Any] = {"role": "assistant", "content": content}
        return turn if call is None else turn | {"tool_calls": [{"type": "function", "function": dict(call)}]}

    def _turn_before(self, roles: Collection[str], content: str) -> Message:
        """A dummy turn that messages of these roles may follow."""
        calls = "tool" in roles and self._schemas
        return self._turn(content, {"name": self._schemas[0]["function"]["name"], "arguments": {}} if calls else None)

    def _up_to_end(self, messages: Sequence[Message]) -> str:
        """The text of messages, the last of which is a turn, without the end of that turn."""
        written = self._render(messages, to_write=False)
        text, _, after = written.rpartition(self._end_text)
        if after.strip():
            what = f"its chat template ends a turn with {self._end_text!r}, one with a call otherwise"
            raise ConfigError(f"{self._name}: {what}: {written[-80:]!r}; use one that ends all turns alike")
        return text

    def _find_end(self, eos_token_ids: Collection[int]) -> tuple[int, str]:
        """The token that the template ends a turn with, and its text."""
        after = self._render([_ASKED, self._turn(_WRITTEN)], to_write=False).rpartition(_WRITTEN)[2]
        first = self._encoder.encode(after.lstrip(), add_special_tokens=False)
        if not first.ids or first.ids[0] not in set(eos_token_ids):
            ends = ", ".join(repr(self._tokenizer.convert_ids_to_tokens(i)) for i in sorted(eos_token_ids))
            what = f"its chat template ends a turn with {after[:40]!r}, but EOS tokens of the model are {ends}"
            raise ConfigError(f"{self._name}: {what}; set eos_token_id in the model's generation_config.json")
        start, end = first.offsets[0]
        return first.ids[0], after.lstrip()[start:end]

    def _check_role(self, role: str) -> None:
        """Check that the template shows messages of a role, and still writes earlier turns as they were written.

        Raises:
            ConfigError: it does not.
        """
        if role in self._roles:
            return
        knows = any(tag in self._template for tag in (THOUGHT, END_OF_THOUGHT))
        # Without an empty one that keeps the author from thinking.
        thoughts = knows and END_OF_THOUGHT not in self.prefix
        conversation: list[Message] = [_ASKED]
        before = self._render(conversation, to_write=True)  # now: a template may write the date
        for number in range(6):
            if number % 2 == 0:
                thought = f"{THOUGHT}\nTHOUGHTofDUMMY\n{END_OF_THOUGHT}\n\n" if thoughts and number else ""
                conversation.append(self._turn_before([role], f"{thought}{_WRITTEN}{number}"))
            else:
                conversation.append({"role": role, "content": f"{_SAID}{number}"})
            after = self._render(conversation, to_write=number % 2 == 1)
            if number % 2 and f"{_SAID}{number}" not in after:
                raise ConfigError(f"{self._name}: its chat template does not show messages of the role {role!r}")
            if not self._keep_turns and not after.startswith(before):
                same = _common(before, after)
                what = f"its chat template rewrites a turn once a message of the role {role!r} or another turn follows"
                how = f"{before[same : same + 40]!r} becomes {after[same : same + 40]!r}"
                fix = "turns then stay as they were written, with thoughts that it would leave out (Qwen3)"
                raise ConfigError(f"{self._name}: {what}: {how}. Set rollout.keep_turns=true; {fix}")
            before = after
        self._roles.add(role)

    def _markup_of(self, key: tuple[tuple[str, str | None], ...]) -> tuple[list[tuple[int, ...]], bool]:
        """The markup between the end of a turn and the beginning of the next, around messages of these roles and names:
        the ids before, between and after the contents, and whether a content is written as the inside of a JSON string.
        """
        for role, _ in key:
            self._check_role(role)
        marks, probe = [f"{_SAID}{number}END" for number in range(len(key))], '"\n\\'
        messages: list[Message] = [
            {"role": role, "content": mark + probe, **({} if name is None else {"name": name})}
            for (role, name), mark in zip(key, marks, strict=True)
        ]
        begun = [_ASKED, self._turn_before([role for role, _ in key], _WRITTEN)]
        ends = self._up_to_end(begun).count(self._end_text) + 1
        text = self._render([*begun, *messages], to_write=True)
        after = text.split(self._end_text, ends)[-1]  # the turn's is the last: it may not show its content
        for as_json, written in ((False, probe), (True, json.dumps(probe)[1:-1])):
            said = [mark + written for mark in marks]
            pieces = re.split(f"({'|'.join(map(re.escape, said)) or '(?!)'})", after)
            if pieces[1::2] == said and _WRITTEN not in after and _QUESTION not in after:
                ids = [*map(self._ids, pieces)]
                self._check_spaces(ids, after)
                return ids[::2], as_json
        roles = ", ".join(dict.fromkeys(role for role, _ in key))
        raise ConfigError(f"{self._name}: its chat template does not show messages of the roles {roles} as they are")

    def _check_spaces(self, pieces: Sequence[Sequence[int]], text: str) -> None:
        """Check that the ids of the pieces decode to the same text as the ids of the whole text.

        They differ for tokenizers that put a space in front of whatever they are given.

        Raises:
            ConfigError: they differ.
        """
        apart, together = self._tokenizer.decode([*chain(*pieces)]), self._tokenizer.decode([*self._ids(text)])
        if apart != together:
            what = f"{together!r} tokenised in pieces, as observations are, becomes {apart!r}"
            raise ConfigError(f"{self._name}: {what}; use a tokenizer that adds no spaces (prepend_scheme=never)")

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoder.encode(text, add_special_tokens=False).ids)


def _common(one: str, other: str) -> int:
    """The length of the longest common prefix of two texts."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
