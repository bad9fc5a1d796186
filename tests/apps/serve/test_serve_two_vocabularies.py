"""`tandemrl serve` with a junior of another vocabulary: what the engine writes, and what needs one vocabulary."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import events, served_here, session_key
from starlette.testclient import TestClient

from fake_judge import FakeJudge, Reply
from helpers import tokenizer
from tandemrl.apps.serve import engine_server
from tandemrl.config import Config, ConfigError, SelectionConfig, load
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Request, Sampling, check_authors, replay_turns
from tandemrl.rollout.gateway.requests import OtherReader, Reader
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo
from tandemrl.selection.draws import mix64
from tandemrl.selection.whole_words import before_text_word, in_two_vocabularies, text_tables

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Mia has 3 figs and buys 4."}]
TOLD = "<|im_start|>user\nMia has 3 figs and buys 4.<|im_end|>\n<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def settings(senior: Path, junior: Path, *more: str) -> Config:
    both = [f"model.senior={senior}", f"model.junior={junior}", "model.device=cpu", "selection.strategy=before_word"]
    return load(overrides=[*both, *more])


@pytest.fixture(scope="module")
def pair(tiny_pair: Path, other_junior: Path) -> tuple[Any, Any]:
    """The tokenizers."""
    return load_tokenizer(tiny_pair / "senior"), load_tokenizer(other_junior)


@pytest.fixture(scope="module")
def engine(tiny_pair: Path, other_junior: Path, pair: tuple[Any, Any]) -> TorchEngine:
    models = [load_model(str(path)) for path in (tiny_pair / "senior", other_junior)]
    return TorchEngine(models[0], models[1], pair[0], junior_tokenizer=pair[1])


@pytest.fixture(scope="module")
def client(tiny_pair: Path, other_junior: Path) -> Iterator[TestClient]:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        served_here(settings(tiny_pair / "senior", other_junior), monkeypatch) as asking,
    ):
        yield asking


def ask(client: TestClient, path: str = CHAT, **body: Any) -> Any:
    usual: dict[str, Any] = {"prompt": "Mia has 3 figs"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = client.post(path, json=usual | {"max_tokens": 24} | body)
    assert response.status_code == 200, response.text
    return response.json()


def words_of(pair: tuple[Any, Any], prob_senior: float = 0.5) -> Strategy:
    return before_text_word(prob_senior, text_tables(pair[0]))


def reference(engine: TorchEngine, prompts: Sequence[str], pair: Any, seeds: Sequence[int], strategy: Strategy) -> Any:
    """What the engine writes after texts in which each tokenizer knows its markup."""
    prompt, read = (tuple(known(prompts[i])["input_ids"]) for i, known in enumerate(pair))
    keys = tuple(map(mix64, seeds))
    [group] = engine.generate([Request(prompt, keys, Sampling(max_tokens=24), strategy, junior_prompt=read)])
    check_authors(group, strategy)
    return group


# -------------------------------------------------------------------------------------------------- what it writes


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, TOLD), (COMPLETIONS, "Mia has 3 figs")])
def test_it_writes_what_the_engine_does_after_the_prompt_of_each(client, engine, pair, path, prompt):
    response = ask(client, path, seed=3, n=4, tandem={"prob_senior": 0.6}, return_token_ids=True)
    group = reference(engine, [prompt, prompt], pair, range(3, 7), words_of(pair, 0.6))
    for choice, wanted in zip(response["choices"], group, strict=True):
        assert choice["token_ids"] == wanted.tokens.tolist()
        assert choice["authorship"] == wanted.author.tolist()
    assert {author for choice in response["choices"] for author in choice["authorship"]} == {0, 1}
    ids = response["prompt_token_ids"] if path == CHAT else response["choices"][0]["prompt_token_ids"]
    assert ids == pair[0](prompt)["input_ids"]
    assert response["tandem"]["strategy"] == "before_word"


def test_a_chat_of_several_turns_goes_on_with_its_draws(client: TestClient, engine: TorchEngine, pair: Any) -> None:
    [first] = ask(client, f"/sessions/mine{CHAT}")["choices"]
    said = first["message"]["content"]
    turns = [*MESSAGES, {"role": "assistant", "content": said}, {"role": "user", "content": "And 2 more?"}]
    [choice] = ask(client, messages=turns, seed=2)["choices"]
    told = TOLD + said + "<|im_end|>\n<|im_start|>user\nAnd 2 more?<|im_end|>\n<|im_start|>assistant\n"
    strategy = words_of(pair)
    [wanted] = reference(engine, [told, told], pair, [2], strategy)
    assert choice["token_ids"] == wanted.tokens.tolist()
    response = ask(client, f"/sessions/mine{CHAT}", messages=turns, return_token_ids=True)
    [second] = response["choices"]
    written = tuple(first["token_ids"])
    prompt, read = tuple(response["prompt_token_ids"]), tuple(pair[1](told)["input_ids"])
    assert prompt[: len(pair[0](TOLD)["input_ids"]) + len(written)] == (*pair[0](TOLD)["input_ids"], *written)
    key = session_key("mine")
    asked = Request(prompt, (key,), Sampling(max_tokens=24), strategy, history=(written,), junior_prompt=read)
    [[whole]] = engine.generate([asked])
    assert second["token_ids"] == whole.tokens.tolist() != choice["token_ids"]
    both = [np.array(each["token_ids"]) for each in (first, second)]
    [authors] = replay_turns(strategy, [key], [both]).author.tolist()
    assert authors == [*first["authorship"], *second["authorship"]]


def test_a_stop_string_ends_a_text_of_both_authors(client: TestClient) -> None:
    texts = {choice["index"]: choice["text"] for choice in ask(client, COMPLETIONS, seed=0, n=16)["choices"]}
    texts = {seed: text for seed, text in texts.items() if len(text) > 8 and "\ufffd" not in text}
    assert len(texts) > 2
    for seed, text in [*texts.items()][:3]:
        stop = text[len(text) // 2 :][:4]
        body = {"prompt": "Mia has 3 figs", "max_tokens": 24, "seed": seed, "stop": [stop, "never"]}
        *chunks, _ = events(client.post(COMPLETIONS, json=body | {"stream": True}).content)
        parts = [part for chunk in chunks for part in chunk["choices"]]
        [whole] = ask(client, COMPLETIONS, **body)["choices"]
        for name in ("token_ids", "authorship"):
            assert [each for part in parts for each in part.get(name, ())] == whole[name]
        for said, last in ((whole["text"], whole), ("".join(part.get("text") or "" for part in parts), parts[-1])):
            assert said == text[: text.index(stop)]
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_one_author_may_write_alone(client: TestClient, engine: TorchEngine, pair: Any, other_junior: Path) -> None:
    """The senior also where two vocabularies would not do; the junior as it writes by itself."""
    prompt = pair[0]("Mia has 3 figs")["input_ids"]
    body = {"prompt": prompt, "seed": 7, "tandem": {"solo": "senior"}, "logprobs": 0, "ignore_eos": True}
    [choice] = ask(client, COMPLETIONS, **body)["choices"]
    sampling = Sampling(max_tokens=24, ignore_eos=True)
    [[wanted]] = engine.generate([Request(tuple(prompt), (mix64(7),), sampling, solo("senior"))])
    assert choice["token_ids"] == wanted.tokens.tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted.behaviour_logprobs.tolist())
    [choice] = ask(client, tandem={"solo": "junior"}, temperature=0)["choices"]
    alone = TorchEngine(load_model(str(other_junior)), None, pair[1])
    greedy = Sampling(max_tokens=len(choice["token_ids"]) * 8, temperature=0)
    [[wanted]] = alone.generate([Request(tuple(pair[1](TOLD)["input_ids"]), (0,), greedy, solo("senior"))])
    text = choice["message"]["content"]
    assert text
    assert set(choice["authorship"]) == {0}
    assert pair[1].decode(wanted.tokens, skip_special_tokens=True).startswith(text)


def test_requests_of_one_author_and_of_two_are_written_together(engine: TorchEngine, pair: Any) -> None:
    """As they are by themselves, also where one ends by a stop string."""
    prompt, read = (tuple(known(TOLD)["input_ids"]) for known in pair)
    keys, limit = tuple(map(mix64, range(3))), Sampling(max_tokens=24)
    words, tables = words_of(pair), text_tables(pair[0])
    [[free]] = engine.generate([Request(prompt, keys[:1], limit, solo("senior"))])
    stop = pair[0].decode(free.tokens[3:5])
    asked = [
        Request(prompt, keys, limit, words, junior_prompt=read),
        Request(prompt, keys[:1], Sampling(max_tokens=24, stop=(stop,)), solo("senior")),
        Request(prompt, keys, limit, in_two_vocabularies(solo("junior"), tables), junior_prompt=read),
    ]
    together, apart = engine.generate(asked), [group for one in asked for group in engine.generate([one])]
    for ours, wanted in zip(together, apart, strict=True):
        assert [one.tokens.tolist() for one in ours] == [one.tokens.tolist() for one in wanted]
        assert [one.author.tolist() for one in ours] == [one.author.tolist() for one in wanted]
    assert together[1][0].stop_reason == "stop"
    assert {author for one in together[2] for author in one.author.tolist()} == {0}


def test_a_junior_behind_an_endpoint_writes_its_words(tiny_pair, other_junior, pair, monkeypatch):
    read: list[list[int]] = []

    def answer(prompt: list[int], number: int) -> Reply:
        read.append(prompt)
        begun = "" if prompt == pair[1](TOLD)["input_ids"] else " "
        return Reply(
            body=json.dumps({"choices": [{"text": f"{begun}so so so so", "finish_reason": "length"}]}).encode()
        )

    models = Reply(body=json.dumps({"data": [{"id": "fake"}]}).encode())
    with FakeJudge(answer, path="/v1/completions", models=models) as server:
        more = [f"model.junior_endpoint.url={server.url}", "model.junior_endpoint.backoff_s=0.01"]
        with served_here(settings(tiny_pair / "senior", other_junior, *more), monkeypatch) as asking:
            choices = ask(asking, n=4, seed=1)["choices"]
            refused = asking.post(CHAT, json={"messages": MESSAGES, "presence_penalty": 1}).json()["error"]
    assert "each count the tokens of each span alone" in refused["message"]
    assert all(ids[: len(pair[1](TOLD)["input_ids"])] == pair[1](TOLD)["input_ids"] for ids in read)
    for choice in choices:
        edges = np.flatnonzero(np.diff([-1, *choice["authorship"], -1])).tolist()
        for start, end in pairwise(edges):
            if choice["authorship"][start] == 0 and end < len(choice["token_ids"]):
                assert set(pair[0].decode(choice["token_ids"][start:end]).split()) == {"so"}
    assert {author for choice in choices for author in choice["authorship"]} == {0, 1}


# -------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": [3, 4]}, "prompt: token ids belong to one vocabulary, and the junior has another; send a text"),
        (
            {"stop_token_ids": [3], "stop": "."},
            "stop_token_ids: with a junior of another vocabulary, a text ends by EOS, stop or max_tokens; leave it out",
        ),
        ({"stop_token_ids": [3]}, 'stop_token_ids: with a junior .*, or let the senior write alone: "tandem": {"solo'),
        ({"ignore_eos": True}, "ignore_eos: with a junior of another vocabulary"),
        ({"logprobs": 0}, "logprobs: the junior's words have none"),
        ({"prompt": "Mia has " * 400}, "the prompt: 2800 tokens of the junior's leave no room in its context of 2048"),
        ({"tandem": {"strategy": "word"}}, r"tandem: selection\.strategy=word: must be before_word, since"),
    ],
)
def test_what_needs_one_vocabulary_is_refused_with_the_fix(client: TestClient, body: Any, reason: str) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "Mia", "max_tokens": 2} | body)
    assert response.status_code == 400
    assert re.search(reason, response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        (["selection.strategy=word"], r"strategy=word: must be before_word, since .* two vocabularies"),
        (["selection.strategy=solo", "rollout.draft_tokens=2"], r"rollout\.draft_tokens=2: must be 0, since"),
        (["selection.strategy=solo", "rollout.engine=vllm"], r"rollout\.engine=vllm: must be torch, since"),
    ],
)
def test_the_command_refuses_it_before_models_are_loaded(tiny_pair, other_junior, monkeypatch, more, refusal):
    monkeypatch.setattr(engine_server, "load_model", lambda *path, **options: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=refusal):
        engine_server.serve(settings(tiny_pair / "senior", other_junior, *more), port=0)


def test_tools_are_told_to_both_if_the_junior_takes_them() -> None:
    known, other = copy.deepcopy(tokenizer()), copy.deepcopy(tokenizer())
    calls = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    known.chat_template = calls + "{{ messages[0]['content'] }}!"
    other.chat_template = calls + "a{{ messages[0]['content'] }}"
    body = {"messages": [{"role": "user", "content": "ab"}], "tools": TOOLS, "n": 1, "seed": 1}
    body |= {"max_tokens": 4}
    strategy = before_text_word(0.5, text_tables(known))
    settings: dict[str, Any] = dict(strategy_of=lambda _: strategy, selection=SelectionConfig(), defaults={})
    settings |= dict(template_arguments={}, calls=True, ends=())

    def read(takes_tools: bool) -> Request:
        reader = Reader(known, 64, **settings, junior=OtherReader(other, 64, takes_tools))
        return reader.read(body, "chat").requests[0]

    told = read(True)
    assert (known.decode(told.prompt), other.decode(told.junior_prompt)) == ("lookab!", "lookaab")
    with pytest.raises(ValueError, match=r"tools: the chat template of the junior, .* knows none; leave it out, or"):
        read(False)
    other.chat_template = "{{ messages[0]['content'] }}"
    assert not engine_server.other_reader(other, "served", load().model.junior_endpoint).tools
    known.model_max_length = 3
    short = engine_server.other_reader(known, "served", load().model.junior_endpoint)
    assert short[1:3] == (3, True)
    reader = Reader(known, 64, **settings, junior=short)
    with pytest.raises(ValueError, match="tokens of the junior's leave no room in its context of 3; shorten it"):
        reader.read(body, "chat")
