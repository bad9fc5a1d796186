"""Lets a model behind an OpenAI-compatible endpoint act in the same environment, by HTTP instead of an engine.

Requests and replies are messages, so the model's tokens and their authors are unknown, and its samples have no authors.
The limit on its tokens is applied to the endpoint's own counts, that on the environment's tokens to characters.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tandemrl.config import Config, RolloutConfig
from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import RENDERED, Prompt, Row, with_suffix
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.evals.measures import EvalError, Sample, group_of
from tandemrl.evals.protocol import Profile, same_problems
from tandemrl.processes.calls import Caller
from tandemrl.processes.http import Client, Response, RetryableError, Service, chat_message, excerpt
from tandemrl.rollout.engine import StopReason, Turn
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, Episodes
from tandemrl.rollout.envs.parsing import checked_turn, parse_turn
from tandemrl.rollout.envs.rendering import CUT, Rendered
from tandemrl.selection.draws import request_key

CHARS_PER_TOKEN = 4
"""A rough estimate, since there is no tokenizer."""
CONCURRENCY = 16
"""How many episodes run at once."""
POLL_S = 0.02


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of a model.

    model: its name there; None means the first one that the endpoint lists. api_key_env: the environment variable with
    the key; None sends no key. The other fields are time-outs and retries, see `http.Service`.
    """

    url: str
    model: str | None = None
    api_key_env: str | None = None
    timeout_s: float = 120.0
    retries: int = 3
    backoff_s: float = 1.0

    def client(self) -> Client:
        """The HTTP client for this endpoint.

        Raises:
            EvalError: ``api_key_env`` is not set.
        """
        patience = (self.timeout_s, self.retries, self.backoff_s, CONCURRENCY)
        return Client(Service("Endpoint", "vllm serve MODEL", EvalError, self.url, self.api_key_env, *patience))


def play(
    client: Client,
    model: str,
    rows: Sequence[Row],
    *,
    config: Config,
    environment: Environment,
    caller: Caller,
    profile: Profile,
    samples: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Run ``samples`` episodes of every row, in the order of the rows.

    Args:
        caller: runs the environment; it is closed at the end.
        progress: called with the number of new tokens.

    Raises:
        EvalError: the endpoint fails or gives no usable reply, or a row has a rendered prompt instead of messages.
        EngineError: the environment is broken.
    """
    remote = _Remote(environment, config.rollout, caller)
    keys = [request_key(seed, 0, problem, sample) for problem in range(len(rows)) for sample in range(samples)]
    episodes = [_Episode(number, rows[number // samples], key) for number, key in enumerate(keys)]
    for episode in episodes:
        if episode.row.extra_info.get(RENDERED):
            raise EvalError(f"row {episode.row.example_id}: its prompt is rendered, and an endpoint takes messages")
        opening = remote.opening(episode.row).messages
        episode.conversation = [*map(dict, with_suffix(episode.row, opening, config.data.prompt_suffix))]
        if episode.conversation[-1]["role"] == "assistant":
            raise EvalError(f"row {episode.row.example_id}: its prompt ends in a begun answer; endpoints do not go on")
        episode.opening = len(episode.conversation)
    table, asked = Episodes(remote), dict[Future[_Said], _Episode]()
    with ThreadPoolExecutor(CONCURRENCY) as pool, remote:

        def ask(episode: _Episode) -> None:
            body = _body(episode, model, remote, profile, config.data.template_arguments)
            asked[pool.submit(client.post, "/chat/completions", body, _said)] = episode

        try:
            for episode in episodes:
                ask(episode)
            while any(episode.stop_reason is None for episode in episodes):
                for done in wait(asked, timeout=POLL_S, return_when=FIRST_COMPLETED).done if asked else ():
                    episode = asked.pop(done)
                    _hear(episode, done.result(), remote, table)
                    if progress is not None:
                        progress(episode.said[-1].tokens)
                for reply in table.replies(wait=not asked):
                    episode = episodes[reply.number]
                    _answer(episode, table.transcript(reply.number).messages)
                    episode.stop_reason = _stop(episode, reply.stop_reason, bool(reply.context), remote, profile)
                    if episode.stop_reason is None:
                        ask(episode)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    same = same_problems([Prompt(row, ()) for row in rows], episodes=True)
    return [_sample(episode, samples, table, same[episode.number // samples]) for episode in episodes]


# ----------------------------------------------------------------------------------------------------------- the model


class _Said(NamedTuple):
    message: Mapping[str, Any]
    cut: bool
    tokens: int


def _body(
    episode: "_Episode", model: str, remote: "_Remote", profile: Profile, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    sampling = profile.sampling
    own = {name: value for name, value in arguments.items() if value is not None}
    left = sampling.max_tokens - sum(said.tokens for said in episode.said)
    return {
        "model": model,
        "messages": episode.conversation,
        **({"tools": remote.tools} if remote.tools else {}),
        **({} if arguments == DEFAULT_ARGUMENTS or not own else {"chat_template_kwargs": own}),
        "max_completion_tokens": min(left, remote.turn_tokens or left),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **({"top_k": sampling.top_k} if sampling.top_k else {}),
        **({"seed": (episode.key + len(episode.said)) % 2**31} if sampling.temperature > 0 else {}),
    }


def _said(response: Response) -> _Said:
    """The content of a chat completion. This is a `http.Read`."""
    message, whole = chat_message(response), response.json()
    content, calls = message.get("content"), message.get("tool_calls")
    usage = whole.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(content, str | None) or not isinstance(calls, list | None):
        raise RetryableError(f"not a message of an assistant: {excerpt(response.body)}")
    if not isinstance(tokens, int) or tokens < 0:
        raise RetryableError(
            f"it does not say how many tokens it wrote (usage.completion_tokens): {excerpt(response.body)}"
        )
    return _Said(message, whole["choices"][0].get("finish_reason") == "length", tokens)


# -------------------------------------------------------------------------------------------------------- an episode


@dataclass
class _Episode:
    """One episode.

    conversation: the messages as they are sent to the endpoint, of which the first ``opening`` are the prompt. said:
    the model's replies, one for each turn. calls: the ids of the last turn's calls, in the order in which they are
    answered. heard: how many messages of the transcript were sent to the model.
    """

    number: int
    row: Row
    key: int
    conversation: list[dict[str, Any]] = field(default_factory=list)
    said: list[_Said] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    opening: int = 0
    heard: int = 0
    stop_reason: str | None = None


def _hear(episode: _Episode, said: _Said, remote: "_Remote", table: Episodes) -> None:
    """Pass a turn of the model to the environment."""
    episode.said.append(said)
    content, written = sound(said.message.get("content") or ""), said.message.get("tool_calls")
    unread: Sequence[str] = ()
    if not written:  # an endpoint without a parser of calls: they are in the text
        read = parse_turn(content, remote.schemas)
        written, unread = read.get("tool_calls"), read.get("invalid_calls", ())
        content = read["content"] if written and not unread else content
    raw = [_call(call, f"call_{len(episode.said)}_{i}") for i, call in enumerate(written or ())]
    calls = {"tool_calls": raw} if raw and not unread else {}
    episode.conversation.append({"role": "assistant", "content": content, **calls})
    fit: list[str] = []
    faulty: list[str] = []
    message: dict[str, Any] = {"role": "assistant", "content": content}
    for call in raw:
        each = checked_turn({"tool_calls": [_parsed(call)]}, remote.schemas)
        (fit if "tool_calls" in each else faulty).append(call["id"])
        for key in ("tool_calls", "invalid_calls"):
            message.setdefault(key, []).extend(each.get(key, ()))
    if unread:
        message.setdefault("invalid_calls", []).extend(unread)
    episode.calls = [] if unread else fit + faulty  # a call that cannot be read has no id: all are answered in words
    remote.written[episode.number] = {key: value for key, value in message.items() if value or key == "content"}
    how: StopReason = "length" if said.cut else "eos"
    table.submit(Turn(episode.number, episode.row, len(episode.said) - 1, np.empty(0, np.int64), how))


def _answer(episode: _Episode, messages: Sequence[Message]) -> None:
    """Append the environment's answers to the conversation, that of each call under the call's id."""
    new = [message for message in messages[episode.heard :] if message["role"] != "assistant"]
    episode.heard = len(messages)
    answers = [str(message["content"]) for message in new if message["role"] == "tool"]
    for i, call in enumerate(episode.calls if answers else ()):
        content = answers[min(i, len(answers) - 1)]  # a crash is the answer to all
        episode.conversation.append({"role": "tool", "tool_call_id": call, "content": content})
    if not episode.calls:
        episode.conversation += [{"role": "user", "content": text} for text in answers]
    episode.conversation += [dict(message) for message in new if message["role"] != "tool"]


def _stop(episode: _Episode, reason: str | None, goes_on: bool, remote: "_Remote", profile: Profile) -> str | None:
    """Why an episode is over, or None if it is not."""
    if reason is not None:
        return reason
    later = episode.conversation[episode.opening :]
    heard = sum(len(each["content"]) for each in later if each["role"] != "assistant")
    written = sum(each.tokens for each in episode.said)
    if goes_on:
        over = written >= profile.sampling.max_tokens or heard > remote.observation_tokens * CHARS_PER_TOKEN
        return "length" if over else None
    return "length" if episode.said[-1].cut else "eos"


def _call(call: Any, name: str) -> dict[str, Any]:
    """A call in a form that the endpoint accepts in the conversation, whatever the model wrote."""
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function") if isinstance(call.get("function"), Mapping) else {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    given = call.get("id")
    return {
        "id": sound(given) if isinstance(given, str) and given else name,
        "type": "function",
        "function": {"name": sound(str(function.get("name", ""))), "arguments": sound(text)},
    }


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are parsed from their JSON text. A text that is not JSON stays."""
    function = dict(call["function"])
    with suppress(ValueError, RecursionError):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": function}


def _sample(episode: _Episode, samples: int, table: Episodes, same_as: str | None) -> Sample:
    transcript = table.transcript(episode.number)
    written = [message for message in transcript.messages if message["role"] == "assistant"]
    texts = ["\n".join([message["content"], *map(_text, message.get("tool_calls", ()))]).strip() for message in written]
    return Sample(
        problem=episode.number // samples,
        example_id=episode.row.example_id,
        set=episode.row.data_source,
        arm="solo",
        sample=episode.number % samples,
        key=episode.key,
        text="\n".join(texts),
        tokens=[],
        length=sum(said.tokens for said in episode.said),
        author=None,
        rounds=0,
        senior_share=None,
        stop_reason=str(episode.stop_reason),
        turns=len(episode.said),
        transcript=transcript.to_json(),
        group=group_of(episode.row.extra_info),
        same_as=same_as,
    )


def _text(call: Mapping[str, Any]) -> str:
    return json.dumps(call["function"], ensure_ascii=False)


# ------------------------------------------------------------------------------------------------------ the environment


class _Remote(EpisodeRunner):
    """An episode runner without a tokenizer, in which the turns are messages from the beginning."""

    junior_rendering = None

    def __init__(self, environment: Environment, rollout: RolloutConfig, caller: Caller) -> None:
        self.environment, self.name = environment, type(environment).__name__
        self.tools = environment.tool_schemas()
        self.schemas = {schema["function"]["name"]: schema for schema in self.tools}
        self.max_turns, self.turn_tokens = rollout.max_turns, rollout.turn_tokens
        self.observation_tokens = rollout.observation_tokens
        self.tool_timeout_s = rollout.tool_timeout_s
        self.caller = caller
        self.rendering = _Cutting(rollout)  # type: ignore[assignment]  # what `Episodes` needs of one
        self.written: dict[int, Message] = {}

    def message(self, turn: Turn) -> Message:
        return self.written.pop(turn.number)


class _Cutting:
    """Takes the place of a `Rendering`: it cuts contents that are too long, and leaves them as text."""

    end_of_turn = -1

    def __init__(self, rollout: RolloutConfig) -> None:
        self._most = rollout.result_tokens * CHARS_PER_TOKEN

    def context(self, messages: Sequence[Message], *, ended: bool) -> Rendered:
        """The messages, cut where they are too long. The token ids are dummies that say that the episode goes on."""
        long = [len(message["content"]) > self._most for message in messages]
        shown = [
            {**message, "content": message["content"][: self._most] + CUT} if cut else message
            for message, cut in zip(messages, long, strict=True)
        ]
        return Rendered((0,), shown, sum(long))
