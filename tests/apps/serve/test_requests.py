"""What a request says of who writes, and the conversations that it may continue."""

import copy
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from clients import DEFAULT, strategy_of, written

from helpers import EOS as EOS_SURFACE
from helpers import IDS, tokenizer
from tandemrl.rollout.gateway.address import hosts_of
from tandemrl.rollout.gateway.asgi import is_ours
from tandemrl.rollout.gateway.conversations import Conversation, Conversations
from tandemrl.rollout.gateway.fields import Refused
from tandemrl.rollout.gateway.requests import Asked, Reader
from tandemrl.selection.draws import mix64

EOS = IDS[EOS_SURFACE]
OPENING: list[Any] = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de f"}]


def read(body: dict[str, Any], known: Conversation | None = None) -> Asked:
    how: dict[str, Any] = dict(strategy_of=strategy_of, selection=DEFAULT, defaults={}, template_arguments={})
    words = copy.deepcopy(tokenizer())
    words.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    return Reader(words, 64, **how, calls=True, ends={EOS}).read(
        body, "chat" if "messages" in body else "text", known=known
    )


def test_a_request_without_a_seed_gets_one() -> None:
    one, two = (read({"prompt": "a"}).seed for _ in range(2))
    assert 0 <= one != two < 2**53
    assert read({"prompt": "a", "seed": -1}).seed >= 0  # none, as in vLLM
    for seed in (0, 3, 2**63 - 1024):
        asked = read({"prompt": ["a", "b"], "seed": seed, "n": 2})
        assert asked.seed == seed
        assert [request.keys for request in asked.requests] == [(mix64(seed), mix64(seed + 1))] * 2


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs: expected nothing, since"),
        ({"response_format": {"type": "json_object"}}, "response_format: expected text"),
        ({"tool_choice": "required"}, "tool_choice: expected none or auto"),
        ({"prompt": ["a", "b"]}, "send `seed`"),
        ({"tandem": {"p": 1}}, "tandem.p: unknown field; known: strategy, prob_senior"),
        ({"tandem": {"strategy": "words"}}, "tandem.strategy: expected one of word, word_aligned"),
        ({"tandem": {"solo": "senior", "prob_senior": 0.5}}, "tandem.solo: one author"),
        ({"tandem": {"max_gap_tokens": 2**70}}, "tandem.max_gap_tokens: expected a whole number from 1 to 2147483648"),
    ],
)
def test_what_no_tandem_server_can_do_is_refused(body: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused) as refused:
        read({"prompt": "a"} | body)
    assert reason in str(refused.value)


def test_a_page_whose_name_was_bound_to_this_machine_is_not_answered() -> None:
    """DNS rebinding: the Host is the name of the page."""
    names = hosts_of("gpu-7.example", ["pair"])
    ours = ("127.0.0.1:8000", "localhost", "[::1]:8000", "192.0.2.7", "gpu-7.example:80", socket.gethostname())
    assert [host for host in ours if not is_ours(host, names)] == []
    others = ("evil.example:8000", "127.0.0.1.evil.example", "[evil.example]:8000")
    assert [host for host in others if is_ours(host, names)] == []


# -------------------------------------------------------------------------------------------------------- conversations


def talk(selection: Any = DEFAULT, **message: Any) -> tuple[Conversation, list[Any]]:
    """A conversation of one turn, and the messages that go on with it."""
    said = {"role": "assistant", "content": "ab"} | message
    begun = Conversation("conv-3", 3, selection, None)
    one = begun.after([*OPENING, said], written(4), [*written(5), EOS])
    return one, [*OPENING, said, {"role": "user", "content": "c"}]


def edited(messages: Sequence[Any], at: int, **changes: Any) -> list[Any]:
    return [message | changes if i == at else message for i, message in enumerate(messages)]


@pytest.mark.parametrize(
    ("edit", "body", "reason"),
    [
        (lambda m: edited(m, 0, content="abd"), {}, "messages[0]: not what it was in conversation conv-"),
        (lambda m: edited(m, 2, content="abc"), {}, "messages[2]: not what it was"),
        (lambda m: m[1:], {}, "messages[0]: not what it was"),
        (lambda m: m[:3], {}, "messages: after the 3 messages of conversation conv-"),
        (lambda m: [*m, {"role": "assistant", "content": "d"}], {}, "only this server writes those"),
        (lambda m: "ab", {}, "messages[0]: not what it was"),
        (lambda m: m, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: they cannot change"),
        (lambda m: m, {"seed": 4}, "a conversation keeps those of its first request"),
        (lambda m: m, {"tandem": {"prob_senior": 0.25}}, "a conversation keeps those of its first request"),
        (lambda m: m, {"n": 2}, "n: only 1 is possible in a conversation"),
    ],
)
def test_a_history_that_was_not_is_refused(edit: Any, body: dict[str, Any], reason: str) -> None:
    known, messages = talk()
    with pytest.raises(Refused) as refused:
        read({"messages": edit(messages)} | body, known)
    assert reason in str(refused.value)
    assert known.further(messages, None) == messages[-1:]


def test_a_conversation_is_written_by_one_request_at_a_time() -> None:
    table = Conversations()
    more = [{**message, "more": "x"} for message in OPENING]  # nobody needs it again
    talk = Conversation("conv-1", 1, DEFAULT, None).after(more, [2], [3])
    assert [*talk.messages] == OPENING
    table.give_back(talk)
    table.take(talk.id)
    with pytest.raises(Refused, match="another request goes on with conv-"):
        table.take(talk.id)
    table.give_back(talk)
    assert table.take(talk.id) is talk
