"""Sessions: what one program or chat asks, recorded token by token. Every session is an endpoint of its own.

A request continues the longest recorded text that its prompt begins with. Sampled ids stay as they are: the messages
that the program sends back are compared with those that it got, and only what follows them becomes tokens, which are
CONTEXT. A prompt that goes on from nothing recorded, or from where another request went on already, is a *fork*: it
begins a further branch, and the branches before it are kept.

Draws: the first request has the key of the session, and so has whatever first goes on from it. A branch has the key
(key of the session, ids of its first prompt, seed, how many branches begin with these), so it depends on no other
branch. Which of two requests at once is the first, their arrival says, since a program with one alone must get what an
environment gets. A ``seed`` other than that of the request before (-1 without one) begins a branch whatever arrives: a
program that gives its parallel requests seeds has the same keys each time. A request whose client left before the
answer was there is forgotten, and so is one that is sent again as a retry; what comes instead has the same key, and so
the same tokens.

Tokens: while a request is written, all that it may write is kept from the others. One that finds too little left waits
until another has ended. So a request is cut short by the limit of the session only if the answers reach it together.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from tandemrl.config import ConfigError
from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import messages_of
from tandemrl.rollout.decoding_rows import Part
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.rollout.gateway.fields import Refused
from tandemrl.rollout.gateway.requests import SAMPLED, Asked, Form, Reader
from tandemrl.selection.draws import mix64

ROLES = ("senior", "junior")
"""Models that a request may name to be written by one author alone; under any other name both write."""
_DECIDED = {"seed", "n", "model"}
_SAMPLED = {*SAMPLED, "presence_penalty", "frequency_penalty", "ignore_eos", "min_tokens"}
_LENGTH = ("max_completion_tokens", "max_tokens")
MAX_SESSIONS = 256
"""How many sessions a server remembers."""


class Limits(NamedTuple):
    """What a session may write: tokens, requests, tokens of a request, and tokens with the prompt."""

    tokens: int
    turns: int
    turn_tokens: int | None
    context: int


@dataclass(eq=False, slots=True)
class Asking:
    """A request of a session. ``completion`` and ``messages``, up to the answer, are there once it is delivered."""

    request: Request
    branch: "Branch"
    parent: "Asking | None"
    role: str | None
    seed: int = -1
    tools: Any = None
    completion: Completion | None = None
    messages: Sequence[Message] = ()
    cancel: Callable[[], object] = lambda: None

    @property
    def text(self) -> tuple[int, ...]:
        """All ids up to the end of the answer."""
        assert self.completion is not None
        return (*self.request.prompt, *self.completion.tokens.tolist())


@dataclass(eq=False, slots=True)
class Branch:
    """Requests, each of which goes on from the one before."""

    number: int
    key: int
    asked: list[Asking] = field(default_factory=list)


class Written(NamedTuple):
    """A branch: its first prompt, what follows as a completion of several turns, and the request of each turn."""

    prompt: tuple[int, ...]
    completion: Completion
    asked: Sequence[Asking]

    @property
    def roles(self) -> tuple[str | None, ...]:
        """Who was asked in each turn."""
        return tuple(each.role for each in self.asked)

    @property
    def messages(self) -> Sequence[Message]:
        """Those after the prompt; none, if ids were sent."""
        return self.asked[-1].messages[max(0, len(self.asked[0].messages) - 1) :]


class Session:
    """The requests of one program.

    Args:
        key: the request key of the episode.
        reader: reads requests; its ``selection`` is that of the session.
        sampling: how tokens are drawn, whatever a request says: training needs to know. Stop strings, stop ids and
            ``max_tokens`` are the request's. None: all is as the request says, also who writes.
        limits: further requests are refused.
    """

    def __init__(self, key: int, reader: Reader, sampling: Sampling | None, limits: Limits) -> None:
        self.key, self.reader, self.sampling, self.limits = key, reader, sampling, limits
        self.name, self.closed = secrets.token_urlsafe(24), False
        self._branches: list[Branch] = []
        self.last: Branch | None = None
        """The branch that was written last."""
        self._lock = threading.Lock()
        self._waiting: list[Future[None]] = []

    @property
    def _asked(self) -> list[Asking]:
        return [each for branch in self._branches for each in branch.asked]

    def begin(self, body: Mapping[str, Any], form: Form, *, retry: bool = False) -> tuple[Asked, Asking] | Future[None]:
        """Read a request, and find what it goes on from. A future: begin again once it is done (and as no retry), since
        requests that are being written may leave less than this one needs.

        Args:
            retry: whether the client says that it sends the request again, not having got an answer.

        Raises:
            Refused: the request cannot be answered, or the session may write no more.
        """
        own = dict(body.get("sampling_params") or {}) if form == "ids" else dict(body)
        role, stated = body.get("model"), next((own[name] for name in _LENGTH if own.get(name) is not None), None)
        free, tandem = self.sampling is None, body.get("tandem") or {}
        if tandem and not free:
            raise Refused("tandem: the run decides who writes; leave it out")
        if own.get("n") not in (None, 1):
            raise Refused("n: a request of a session has one answer; leave it out")
        if stated is not None and (type(stated) is not int or stated < 1):
            raise Refused(f"max_tokens: expected a whole number above 0, got {stated!r:.50}")
        seed = -1 if own.get("seed") is None else own["seed"]
        if type(seed) is not int or seed < -1:
            raise Refused(f"seed: expected a whole number from 0, got {seed!r:.50}")
        decided = _DECIDED if free else {*_DECIDED, *_SAMPLED, *_LENGTH}
        own = {name: value for name, value in own.items() if name not in decided} | ({} if free else {"max_tokens": 1})
        plain = {"sampling_params": own, "token_ids": body.get("token_ids")} if form == "ids" else own
        plain |= {"seed": 0, "tandem": {"solo": role} if role in ROLES else tandem}
        prompt = self._continued(plain) if form == "chat" else None
        asked = self.reader.read(plain, form, prompt=prompt)
        if len(asked.requests) > 1:
            raise Refused("prompt: a request of a session has one prompt")
        with self._lock:
            if self.closed:
                raise Refused("this session is closed")
            if retry:
                self._withdraw(tuple(asked.requests[0].prompt), seed)
            stated = asked.requests[0].sampling.max_tokens if free else stated
            asking = self._place(asked.requests[0], stated, role if role in ROLES else None, seed)
            if asking is None:
                self._waiting.append(Future())
                return self._waiting[-1]
        asking.tools = plain.get("tools") or None
        return replace(asked, requests=(asking.request,), seed=None), asking

    def _continued(self, body: Mapping[str, Any]) -> list[int] | None:
        """The ids of a prompt that goes on from a recorded answer, or None."""
        messages = messages_of(sound(body.get("messages")), "the request", "messages")
        tools, known = body.get("tools") or None, list[Asking]()
        for each in self._asked:
            begun = messages[: len(each.messages)]
            if each.messages and each.tools == tools and len(begun) == len(each.messages):
                known += [each] * all(map(_same, begun, each.messages))
        for each in sorted(reversed(known), key=lambda each: -len(each.messages)):
            further = messages[len(each.messages) :]
            if further and all(message["role"] != "assistant" for message in further):
                try:
                    return self.reader.continued(each.text, _named(each.messages, further), body)
                except ConfigError:  # the template has no such message after an answer
                    return None
        return None

    def _place(self, request: Request, stated: int | None, role: str | None, seed: int) -> Asking | None:
        prompt, limits = tuple(request.prompt), self.limits
        asked = self._asked
        left = limits.tokens - sum(len(each.completion.tokens) for each in asked if each.completion is not None)
        room = limits.context - len(prompt)
        used_up = {
            "rollout.max_turns": len(asked) >= limits.turns,
            "rollout.max_tokens": left < 1,
            "data.max_prompt_tokens + rollout.max_tokens + rollout.observation_tokens": room < 1,
        }
        if key := next((key for key, used in used_up.items() if used), None):
            raise Refused(f"context_length_exceeded: this session has used up {key}; end the episode here, or raise it")
        longest = min(limits.tokens, room, stated or room, limits.turn_tokens or room)
        kept = sum(each.request.sampling.max_tokens for each in asked if each.completion is None)
        if kept and longest > left - kept:
            return None
        parents = [each for each in asked if each.completion is not None and len(each.text) < len(prompt)]
        parents = [each for each in parents if prompt[: len(each.text)] == each.text]
        children = {each.parent for each in asked if each.seed == _seed_of(each.parent)}
        parent = max(parents, key=lambda each: (len(each.text), each not in children), default=None)
        history: tuple[tuple[int, ...], ...] = ()
        if parent in children or seed != _seed_of(parent):  # a first prompt has the parent None
            taken = {branch.key for branch in self._branches if branch.asked}
            keys = (mix64(self.key, _digest(prompt), seed, ordinal) for ordinal in count())
            branch = self._branch(next(key for key in keys if key not in taken))
        elif parent is None:
            branch = self._branch(self.key)
        else:
            assert parent.completion is not None
            branch, history = parent.branch, (*parent.request.history, tuple(parent.completion.tokens.tolist()))
        stop, ids = request.sampling.stop, request.sampling.stop_token_ids
        drawn = self.sampling or request.sampling
        sampling = replace(drawn, max_tokens=min(left, longest), stop=stop, stop_token_ids=ids)
        about: dict[str, Any] = {"history": history, "session": f"{self.name}/{branch.number}"}
        asking = Asking(replace(request, keys=(branch.key,), sampling=sampling, **about), branch, parent, role, seed)
        branch.asked.append(asking)
        return asking

    def _branch(self, key: int) -> Branch:
        self._branches = [branch for branch in self._branches if branch.asked]  # of others, the client left
        number = self._branches[-1].number + 1 if self._branches else 0
        self._branches.append(Branch(number, key))
        return self._branches[-1]

    def _withdraw(self, prompt: tuple[int, ...], seed: int) -> None:
        """Forget the last request with this prompt and seed, unless another goes on from it."""
        parents = {each.parent for each in self._asked}
        same = [each for each in self._asked if (tuple(each.request.prompt), each.seed) == (prompt, seed)]
        for each in [each for each in same if each not in parents][-1:]:
            each.branch.asked.remove(each)
            each.cancel()
            self._go_on()

    def _go_on(self) -> None:
        """Let those that wait for what others leave begin again."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if each.set_running_or_notify_cancel():
                each.set_result(None)

    def record(self, asking: Asking, completion: Completion, body: Mapping[str, Any], said: Message | None) -> None:
        """Record an answer, before its client can go on from it. said: its message, if it is that of a chat."""
        with self._lock:
            whole = len(completion.tokens) > 0 and completion.stop_reason != "abort"
            if whole and not self.closed and asking in asking.branch.asked:
                asking.completion, self.last = completion, asking.branch
                self._go_on()
                if said is not None:
                    asking.messages = messages_of(sound([*body["messages"], said]), "the answer", "messages")

    def drop(self, asking: Asking) -> None:
        """Forget a request that was not answered."""
        with self._lock:
            if asking.completion is None and asking in asking.branch.asked:
                asking.branch.asked.remove(asking)
                self._go_on()

    def close(self) -> None:
        """Refuse further requests, and give up those that are being answered."""
        with self._lock:
            self.closed = True
            for each in self._asked:
                each.cancel()
            self._go_on()

    @property
    def writes(self) -> bool:
        """Whether a request is not answered yet."""
        return any(each.completion is None for each in self._asked)

    def written(self) -> list[Written]:
        """The branches, in the order in which they began."""
        drops = self.reader.strategy_of(self.reader.selection).starts is not None
        answered = ((branch.key, [each for each in branch.asked if each.completion]) for branch in self._branches)
        return [_written(key, asked, drops=drops) for key, asked in answered if asked]


class NamedSessions(dict[str, Session]):
    """The sessions of a server by the names that clients give them. A new name begins one, whose key is the name's. The
    ``MAX_SESSIONS`` that were used last are remembered, and all that write."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._limits = reader, Limits(2**31, 2**31, None, reader.context)

    def __getitem__(self, name: str) -> Session:
        key = mix64(_digest([*name.encode()]))
        session = self.pop(name) if name in self else Session(key, self._reader, None, self._limits)
        self[name] = session
        idle = [other for other, each in self.items() if other != name and not each.writes]
        for other in islice(idle, max(0, len(self) - MAX_SESSIONS)):
            del self[other]
        return session


def _written(key: int, asked: Sequence[Asking], *, drops: bool) -> Written:
    """drops: whether the strategy of both authors drops proposals, so that every text has ``handover_logprobs``."""
    parts = []
    for before, each in pairwise([None, *asked]):
        assert each is not None
        assert each.completion is not None
        if before is not None:
            parts.append(Part.of(each.request.prompt[len(before.text) :], -1))
        one = each.completion
        told = one.handover_logprobs
        parts.append(
            Part(one.tokens, one.author, one.behaviour_logprobs, np.zeros(len(one.tokens)) if told is None else told)
        )
    tokens, author, logprobs, handovers = map(np.concatenate, zip(*parts, strict=True))
    last = asked[-1].completion
    assert last is not None
    reason, version = last.stop_reason, last.policy_version
    completion = Completion(key, tokens, author, logprobs, reason, version, None, handovers if drops else None)
    return Written(tuple(asked[0].request.prompt), completion, asked)


def _seed_of(parent: Asking | None) -> int:
    return -1 if parent is None else parent.seed


def _digest(ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).digest()[:8], "big")


def _same(one: Message, other: Message) -> bool:
    """Whether a message that came back is the one that was sent. Clients change names of calls and white space."""
    (said, calls), (again, called) = (
        (str(each["content"]).strip(), [call["function"] for call in each.get("tool_calls") or ()])
        for each in (one, other)
    )
    same = said == again or bool(calls and not (said and again))
    return one["role"] == other["role"] and same and calls == called


def _named(known: Sequence[Message], further: Sequence[Message]) -> list[Message]:
    """Messages with the name of the tool, which OpenAI's have in the call alone."""
    calls = {call.get("id"): call["function"]["name"] for each in known for call in each.get("tool_calls") or ()}
    name = {i: calls.get(each.get("tool_call_id")) for i, each in enumerate(further) if each["role"] == "tool"}
    return [{"name": name[i], **each} if name.get(i) else each for i, each in enumerate(further)]
