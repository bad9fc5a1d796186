"""What a request says of who writes, and the sessions of a server."""

import copy
import socket
from typing import Any

import pytest
from clients import DEFAULT, strategy_of

from helpers import EOS as EOS_SURFACE
from helpers import IDS, tokenizer
from tandemrl.rollout.gateway.address import hosts_of
from tandemrl.rollout.gateway.asgi import is_ours
from tandemrl.rollout.gateway.fields import Refused
from tandemrl.rollout.gateway.requests import Asked, Reader
from tandemrl.rollout.gateway.sessions import NamedSessions
from tandemrl.selection.draws import mix64

EOS = IDS[EOS_SURFACE]


def reader() -> Reader:
    how: dict[str, Any] = dict(strategy_of=strategy_of, selection=DEFAULT, defaults={}, template_arguments={})
    words = copy.deepcopy(tokenizer())
    words.chat_template = (
        "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    return Reader(words, 64, **how, calls=True, ends={EOS})


def read(body: dict[str, Any]) -> Asked:
    return reader().read(body, "text")


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


def test_a_server_remembers_the_sessions_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrl.rollout.gateway.sessions.MAX_SESSIONS", 2)
    known = NamedSessions(reader())
    writing, one, two = known["writing"], known["one"], known["two"]  # the first goes, as nothing is asked in it
    assert known["writing"] is not writing
    known["writing"].begin({"prompt": "a"}, "text")
    assert (known["two"] is two, known["one"] is one) == (True, False)
    assert [*known] == ["writing", "one"]
    assert len({session.key for session in known.values()}) == 2
