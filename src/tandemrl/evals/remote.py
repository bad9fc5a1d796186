"""Lets a model behind an OpenAI-compatible endpoint act in the same environment, by HTTP instead of an engine.

Requests and replies are messages, so the model's tokens and their authors are unknown, and its samples have no authors.
The limit on its tokens is applied to the endpoint's own counts, that on the environment's tokens to characters.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tandemrl.config import RolloutConfig
from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import RENDERED, Row, with_suffix
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.evals.measures import EvalError, Sample, group_of
from tandemrl.evals.protocol import Profile, same_problems
from tandemrl.evals.session import Session
from tandemrl.processes.calls import Caller
from tandemrl.processes.http import Response, RetryableError, chat_message, excerpt
from tandemrl.rollout.engine import StopReason, Turn
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, Episodes, make_caller
from tandemrl.rollout.envs.parsing import checked_turn, parse_turn
from tandemrl.rollout.envs.rendering import CUT, Rendered
from tandemrl.selection.draws import request_key

CHARS_PER_TOKEN = 4
"""A rough estimate, since there is no tokenizer."""


def play(session: Session, *, progress: Callable[[int], None]) -> list[Sample]:
    """Run ``eval.samples`` episodes of every row, in the order of the rows, all of them turn by turn.

    Args:
        progress: called with the number of new tokens.

    Raises:
        EvalError: the endpoint fails or gives no usable reply, or a row has a rendered prompt instead of messages.
        EngineError: the environment is broken.
    """
    config, profile, (prompts, _) = session.config, session.profile, session.prompts
    assert session.remote is not None
    assert session.environment is not None  # refused in evaluate
    count, remote = (
        config.eval.samples,
        _Remote(session.environment, config.rollout, make_caller(config, session.passed)),
    )
    keys = [request_key(config.eval.seed, 0, problem, i) for problem in range(len(prompts)) for i in range(count)]
    episodes = [_Episode(number, prompts[number // count].row, key) for number, key in enumerate(keys)]
    for episode in episodes:
        if episode.row.extra_info.get(RENDERED):
            raise EvalError(f"row {episode.row.example_id}: its prompt is rendered, and an endpoint takes messages")
        opening = with_suffix(episode.row, remote.opening(episode.row).messages, config.data.prompt_suffix)
        episode.conversation = [*map(dict, opening)]
        if episode.conversation[-1]["role"] == "assistant":
            raise EvalError(f"row {episode.row.example_id}: its prompt ends in a begun answer; endpoints do not go on")
    table, left = Episodes(remote), episodes
    with closing(session.remote.client()) as client, remote:
        while left:
            bodies = [_body(each, session.model, remote, profile, config.data.template_arguments) for each in left]
            said = client.post_all("/chat/completions", bodies, _said)
            for episode, each in zip(left, said, strict=True):
                remote.written[episode.number] = episode.hear(each, remote)
                how: StopReason = "length" if each.cut else "eos"
                table.submit(Turn(episode.number, episode.row, len(episode.said) - 1, np.empty(0, np.int64), how))
            progress(sum(each.tokens for each in said))
            answered = 0
            while answered < len(left):
                for reply in table.replies(wait=True):
                    episode, answered = episodes[reply.number], answered + 1
                    episode.answer(table.transcript(reply.number).messages)
                    own = reply.stop_reason
                    episode.stop_reason = own or episode.limit(bool(reply.context), remote, profile.sampling.max_tokens)
            left = [episode for episode in left if episode.stop_reason is None]
    same = same_problems(prompts, episodes=True)
    return [_sample(episode, count, table, same[episode.number // count]) for episode in episodes]


# ----------------------------------------------------------------------------------------------------------- the model


class _Said(NamedTuple):
    """A turn of the model. calls: as the endpoint takes them again in the conversation."""

    content: str
    calls: list[dict[str, Any]]
    tokens: int
    cut: bool


def _body(
    episode: "_Episode", model: str, remote: "_Remote", profile: Profile, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    sampling, left = profile.sampling, profile.sampling.max_tokens - episode.tokens
    own = {name: value for name, value in arguments.items() if value is not None}
    optional = {
        "tools": remote.tools or None,
        "chat_template_kwargs": None if arguments == DEFAULT_ARGUMENTS else own or None,
        "top_k": sampling.top_k or None,
        "seed": (episode.key + len(episode.said)) % 2**31 if sampling.temperature > 0 else None,
    }
    return {
        "model": model,
        "messages": episode.conversation,
        "max_completion_tokens": min(left, remote.turn_tokens or left),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _said(response: Response) -> _Said:
    """What a chat completion says. This is a `http.Read`."""
    message, whole = chat_message(response), response.json()
    try:
        calls = [_call(call) for call in message.get("tool_calls") or ()]
        cut = whole["choices"][0].get("finish_reason") == "length"
        return _Said(sound(message.get("content") or ""), calls, int(whole["usage"]["completion_tokens"]), cut)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"it does not say what it wrote and how many tokens (usage.completion_tokens): {error!r}"
        raise RetryableError(f"{what} in {excerpt(response.body)}") from None


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as endpoints take it, with what is missing empty and without what else it holds."""
    function = call.get("function") or {}
    name, arguments = function.get("name") or "", function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "id": sound(str(call.get("id") or "")),
        "type": "function",
        "function": {"name": sound(str(name)), "arguments": sound(text)},
    }


# -------------------------------------------------------------------------------------------------------- an episode


@dataclass
class _Episode:
    """One episode.

    conversation: the messages as they are sent to the endpoint. said: the model's replies, one for each turn. calls:
    the ids of the last turn's calls, in the order in which they are answered. heard: how many messages of the
    transcript were sent to the model. told: how many characters the environment said.
    """

    number: int
    row: Row
    key: int
    conversation: list[dict[str, Any]] = field(default_factory=list)
    said: list[_Said] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    heard: int = 0
    told: int = 0
    stop_reason: str | None = None

    @property
    def tokens(self) -> int:
        return sum(said.tokens for said in self.said)

    def hear(self, said: _Said, remote: "_Remote") -> Message:
        """Add a turn of the model to the conversation, and return it as the environment gets it."""
        self.said.append(said)
        content, calls = said.content, said.calls
        if calls:
            read = checked_turn({"tool_calls": [*map(_parsed, calls)]}, remote.schemas)
        else:  # an endpoint without a parser of calls: they are in the text
            read = parse_turn(content, remote.schemas)
            if "tool_calls" in read and "invalid_calls" not in read:
                content, calls = read["content"], [*map(_call, read["tool_calls"])]
        calls = [{**call, "id": call["id"] or f"call_{len(self.said)}_{i}"} for i, call in enumerate(calls)]
        self.calls = [call["id"] for call in calls]  # one that cannot be read has no id: all are answered in words
        self.conversation.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        found = {key: read[key] for key in ("tool_calls", "invalid_calls", "invalid_after") if key in read}
        return {"role": "assistant", "content": content, **found}

    def answer(self, messages: Sequence[Message]) -> None:
        """Add the environment's answers to the conversation, that of each call under the call's id.

        Args:
            messages: all of the transcript.
        """
        new = [message for message in messages[self.heard :] if message["role"] != "assistant"]
        self.heard, self.told = len(messages), self.told + sum(len(message["content"]) for message in new)
        answers = [str(message["content"]) for message in new if message["role"] == "tool"]
        for i, call in enumerate(self.calls if answers else ()):
            content = answers[min(i, len(answers) - 1)]  # a crash is the answer to all
            self.conversation.append({"role": "tool", "tool_call_id": call, "content": content})
        if not self.calls:
            self.conversation += [{"role": "user", "content": text} for text in answers]
        self.conversation += [dict(message) for message in new if message["role"] != "tool"]

    def limit(self, goes_on: bool, remote: "_Remote", max_tokens: int) -> str | None:
        """Why an episode that the environment would continue, or not, is over; None if it is not."""
        if not goes_on:
            return "length" if self.said[-1].cut else "eos"
        return (
            "length" if self.tokens >= max_tokens or self.told > remote.observation_tokens * CHARS_PER_TOKEN else None
        )


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
        length=episode.tokens,
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
        self.rendering = _Cutting(rollout.result_tokens)  # type: ignore[assignment]  # what `Episodes` needs of one
        self.written: dict[int, Message] = {}

    def message(self, turn: Turn) -> Message:
        return self.written.pop(turn.number)


class _Cutting(NamedTuple):
    """Takes the place of a `Rendering`: it cuts contents that are too long, and leaves them as text."""

    result_tokens: int
    end_of_turn: int = -1

    def context(self, messages: Sequence[Message], *, ended: bool) -> Rendered:
        """The messages, cut where they are too long. The token ids are dummies that say that the episode goes on."""
        most = self.result_tokens * CHARS_PER_TOKEN
        shown = [
            {**each, "content": each["content"][:most] + CUT} if len(each["content"]) > most else each
            for each in messages
        ]
        return Rendered((0,), shown, sum(len(each["content"]) > most for each in messages))
