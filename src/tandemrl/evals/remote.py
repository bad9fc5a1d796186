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

from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import RENDERED, Row, with_suffix
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.evals.measures import EvalError, Sample, group_of
from tandemrl.evals.protocol import Profile, same_problems
from tandemrl.evals.session import Session
from tandemrl.processes.http import Response, RetryableError, chat_message, excerpt
from tandemrl.rollout.engine import Reply, StopReason, Turn
from tandemrl.rollout.envs.environment import Schema
from tandemrl.rollout.envs.episodes import Acting, Episodes, make_caller
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
    count, caller = config.eval.samples, make_caller(config, session.passed)
    remote = _Remote(session.environment, config.rollout, caller)
    remote.episodes = []
    for number in range(len(prompts) * count):
        problem, sample = divmod(number, count)
        row, key = prompts[problem].row, request_key(config.eval.seed, 0, problem, sample)
        if row.extra_info.get(RENDERED):
            raise EvalError(f"row {row.example_id}: its prompt is rendered, and an endpoint takes messages")
        opening = with_suffix(row, remote.opening(row).messages, config.data.prompt_suffix)
        if opening[-1]["role"] == "assistant":
            raise EvalError(f"row {row.example_id}: its prompt ends in a begun answer; endpoints do not go on")
        remote.episodes.append(_Episode(number, row, key, [*map(dict, opening)]))
    table, left = Episodes(remote), remote.episodes
    with closing(session.remote.client()) as client, closing(remote):
        while left:
            bodies = [_body(each, session.model, remote, profile, config.data.template_arguments) for each in left]
            for episode, said in zip(left, client.post_all("/chat/completions", bodies, _said), strict=True):
                episode.said.append(said)
                how: StopReason = "length" if said.cut else "eos"
                table.submit(Turn(episode.number, episode.row, len(episode.said) - 1, np.empty(0, np.int64), how))
            progress(sum(episode.said[-1].tokens for episode in left))
            replies = list[Reply]()
            while len(replies) < len(left):
                replies += table.replies(wait=True)
            for reply in replies:
                remote.end(reply, profile.sampling.max_tokens)
            left = [episode for episode in left if episode.stop_reason is None]
    same = same_problems(prompts, episodes=True)
    return [_sample(episode, count, table, same[episode.number // count]) for episode in remote.episodes]


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
    body = {
        "model": model,
        "messages": episode.conversation,
        "max_completion_tokens": min(left, remote.config.turn_tokens or left),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "tools": remote.tools or None,
        "chat_template_kwargs": None if arguments == DEFAULT_ARGUMENTS else own or None,
        "top_k": sampling.top_k or None,
        "seed": (episode.key + len(episode.said)) % 2**31 if sampling.temperature > 0 else None,
    }
    return {name: value for name, value in body.items() if value is not None}


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
    the ids of the last turn's calls, in the order in which they are answered. told: how many characters the environment
    said.
    """

    number: int
    row: Row
    key: int
    conversation: list[dict[str, Any]] = field(default_factory=list)
    said: list[_Said] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    told: int = 0
    stop_reason: str | None = None

    @property
    def tokens(self) -> int:
        return sum(said.tokens for said in self.said)

    def hear(self, schemas: Mapping[str, Schema]) -> Message:
        """Add the model's last turn to the conversation, and return it as the environment gets it."""
        content, calls, *_ = self.said[-1]
        if calls:
            read = checked_turn({"tool_calls": [*map(_parsed, calls)]}, schemas)
        else:  # an endpoint without a parser of calls: they are in the text
            read = parse_turn(content, schemas)
            if "tool_calls" in read and "invalid_calls" not in read:
                content, calls = read["content"], [*map(_call, read["tool_calls"])]
        calls = [{**call, "id": call["id"] or f"call_{len(self.said)}_{i}"} for i, call in enumerate(calls)]
        self.calls = [call["id"] for call in calls]  # one that cannot be read has no id: all are answered in words
        self.conversation.append({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        found = {key: read[key] for key in ("tool_calls", "invalid_calls", "invalid_after") if key in read}
        return {"role": "assistant", "content": content, **found}

    def answer(self, messages: Sequence[Message]) -> None:
        """Add the environment's answers to the conversation, that of each call under the call's id."""
        self.told += sum(len(message["content"]) for message in messages)
        answers = [str(message["content"]) for message in messages if message["role"] == "tool"]
        for i, call in enumerate(self.calls if answers else ()):
            content = answers[min(i, len(answers) - 1)]  # a crash is the answer to all
            self.conversation.append({"role": "tool", "tool_call_id": call, "content": content})
        if not self.calls:
            self.conversation += [{"role": "user", "content": text} for text in answers]
        self.conversation += [dict(message) for message in messages if message["role"] != "tool"]


def _parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call whose arguments are parsed from their JSON text. A text that is not JSON stays."""
    function = dict(call["function"])
    with suppress(ValueError, RecursionError):
        function["arguments"] = json.loads(function["arguments"] or "{}")
    return {"type": "function", "function": function}


def _sample(episode: _Episode, samples: int, table: Episodes, same_as: str | None) -> Sample:
    transcript = table.transcript(episode.number)
    written = [message for message in transcript.messages if message["role"] == "assistant"]
    calls = [[json.dumps(call["function"], ensure_ascii=False) for call in m.get("tool_calls", ())] for m in written]
    texts = ["\n".join([m["content"], *own]).strip() for m, own in zip(written, calls, strict=True)]
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


# ------------------------------------------------------------------------------------------------------ the environment


class _Remote(Acting):
    """An environment in which turns are messages from the beginning."""

    episodes: list[_Episode]

    def message(self, turn: Turn) -> Message:
        return self.episodes[turn.number].hear(self.schemas)

    def heard(self, turn: Turn, messages: Sequence[Message]) -> tuple[Rendered, tuple[int, ...]]:
        """The messages, cut where they are too long. The token id is a dummy that says that the episode goes on."""
        most = self.config.result_tokens * CHARS_PER_TOKEN
        cut = [len(each["content"]) > most for each in messages]
        shown = [
            {**each, "content": each["content"][:most] + CUT} if long else each
            for each, long in zip(messages, cut, strict=True)
        ]
        self.episodes[turn.number].answer(shown)
        return Rendered((0,), shown, sum(cut)), ()

    def end(self, reply: Reply, max_tokens: int) -> None:
        """Note why an episode is over, if it is: as the environment says, or by a limit."""
        episode = self.episodes[reply.number]
        if reply.stop_reason is not None:
            episode.stop_reason = reply.stop_reason
        elif not reply.context:
            episode.stop_reason = "length" if episode.said[-1].cut else "eos"
        elif episode.tokens >= max_tokens or episode.told > self.config.observation_tokens * CHARS_PER_TOKEN:
            episode.stop_reason = "length"
