"""Conversations: chats that continue from request to request. A tandem server remembers each of them by its tokens.

A chat that begins with ``"tandem": {"conversation": "new"}`` gets an id in its response. A later request sends the id,
the messages so far as they were, and further messages after them. It continues where the turn before ended, with the
same seed, the same state of the strategy and the same counters of the draws. Its prompt is the stored token ids,
followed by those of the further messages, which become tokens as an environment's do (``rollout.envs.rendering``). So
what was written is never rendered again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandemrl.config import SelectionConfig
from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import messages_of
from tandemrl.rollout.gateway.fields import Refused

NEW = "new"
MAX_CONVERSATIONS = 256
"""How many conversations a server remembers. A new one replaces the one that was used least recently."""
WRITER = "assistant"


@dataclass(frozen=True, eq=False)
class Conversation:
    """The state of a conversation.

    seed: the seed of all its requests. selection: the selection of all its requests. tools: the tools of its first
    request. messages: what a client has to send again, as the model saw it (``data.rows.messages_of``). tokens: the ids
    of the last prompt and of the last turn, which together are the whole chat. turns: the own tokens of each turn.
    """

    id: str
    seed: int
    selection: SelectionConfig
    tools: Any
    messages: Sequence[Message] = ()
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    turns: tuple[tuple[int, ...], ...] = ()

    def further(self, messages: Sequence[Message], tools: Any) -> Sequence[Message]:
        """The messages of a request that this conversation does not have yet.

        Raises:
            Refused: the request changes or leaves out messages of the conversation, adds none or one of the assistant,
                or has other tools.
        """
        if (tools or None) != self.tools:
            raise Refused("tools: they cannot change within a conversation; its prompt tells of the first request's")
        for i, known in enumerate(self.messages):
            if [*messages[i : i + 1]] != [known]:
                raise Refused(
                    f"messages[{i}]: not what it was in conversation {self.id}. Earlier messages cannot be changed or "
                    "left out: send them as they were, or begin a new conversation"
                )
        further = messages[len(self.messages) :]
        if not further or any(message["role"] == WRITER for message in further):
            raise Refused(
                f"messages: after the {len(self.messages)} messages of conversation {self.id} at least one must "
                f"follow, and none of the role {WRITER}: only this server writes those"
            )
        return further

    def after(self, messages: Sequence[Message], prompt: Sequence[int], turn: Sequence[int]) -> "Conversation":
        """This conversation after another turn.

        Args:
            messages: all messages up to the turn, with the message of the turn itself.
            prompt: the token ids of the turn's prompt.
            turn: the own tokens of the turn.
        """
        seen, tokens = messages_of(sound(messages), self.id), np.array([*prompt, *turn], dtype=np.int32)
        return replace(self, messages=seen, tokens=tokens, turns=(*self.turns, tuple(turn)))


class Conversations:
    """The conversations that a server remembers. Only one request at a time can continue a conversation."""

    def __init__(self) -> None:
        self._known: dict[str, Conversation] = {}  # the least recently used first
        self._busy: set[str] = set()

    def take(self, id: str) -> Conversation:
        """Reserve the conversation with this id for a request, until ``give_back``, and return it.

        Raises:
            Refused: the conversation is not known, or another request continues it at the moment.
        """
        if id not in self._known:
            raise Refused(
                f"tandem.conversation: {id!r} is not known; a server remembers the {MAX_CONVERSATIONS} that were used "
                f"last. Begin anew with {NEW!r}"
            )
        if id in self._busy:
            raise Refused(f"tandem.conversation: another request goes on with {id} at this moment")
        self._busy.add(id)
        return self._known[id]

    def give_back(self, conversation: Conversation) -> None:
        """Release a conversation and remember its new state. One without any turn is not remembered."""
        self._busy.discard(conversation.id)
        if conversation.turns:
            self._known.pop(conversation.id, None)
            self._known[conversation.id] = conversation
        idle = [id for id in self._known if id not in self._busy]
        for id in idle[: max(0, len(self._known) - MAX_CONVERSATIONS)]:
            del self._known[id]
