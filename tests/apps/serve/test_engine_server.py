"""The server over an engine of the library, here the torch engine: what it writes, says, refuses and waits for."""

import copy
import importlib.util
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from clients import DEFAULT, authors, events, session_key, strategy_of
from starlette.applications import Starlette
from starlette.testclient import TestClient
from typer.testing import CliRunner

from helpers import EOS as EOS_SURFACE
from helpers import IDS, VOCABULARY, llama, prepared, qwen3, tokenizer
from tandemrl.apps.serve import engine_server
from tandemrl.cli.main import app as command
from tandemrl.rollout import decoding
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, check_authors
from tandemrl.rollout.envs.parsing import call_format_of
from tandemrl.rollout.gateway import engine_app, engine_thread
from tandemrl.rollout.gateway.address import listen, run, url_of
from tandemrl.rollout.gateway.engine_app import Server, application
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.requests import Asked, Reader, TextStyle
from tandemrl.rollout.gateway.sessions import NamedSessions
from tandemrl.rollout.gateway.texts import Chunks, Speaker, TextStream, text_of
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo
from tandemrl.selection.draws import mix64

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
EOS = IDS[EOS_SURFACE]
TURNS = """{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor -%}
{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}!{% endif %}"""
MESSAGES = [{"role": "user", "content": "ab cd"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": {"type": "string"}}}}}]


@pytest.fixture(scope="module")
def words() -> Any:
    with_turns = copy.deepcopy(tokenizer())
    with_turns.chat_template = TURNS
    return with_turns


@pytest.fixture(scope="module")
def engine(words: Any) -> TorchEngine:
    return TorchEngine(prepared(qwen3()), prepared(llama()), words)


def serving(engine: Any, words: Any, **options: Any) -> Any:
    api_key = options.pop("api_key", None)
    settings: dict[str, Any] = dict(strategy_of=strategy_of, selection=DEFAULT, defaults={}, template_arguments={})
    settings |= dict(calls=True, ends=frozenset({EOS}))
    reader = Reader(words, engine.context, **settings | options)
    server = Server(EngineThread(engine), reader, Speaker(words, "hermes", {EOS}), "pair", NamedSessions(reader))
    return application(server, hosts={"127.0.0.1"}, api_key=api_key)


@pytest.fixture(scope="module")
def client(engine: TorchEngine, words: Any) -> Iterator[TestClient]:
    with TestClient(serving(engine, words), base_url="http://127.0.0.1:8000") as asking:
        yield asking


def ask(client: TestClient, path: str = COMPLETIONS, **body: Any) -> Any:
    usual: dict[str, Any] = {"prompt": "ab cd"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = client.post(path, json=usual | {"max_tokens": 12, "ignore_eos": True} | body)
    assert response.status_code == 200, response.text
    return response.json()


def reference(engine: TorchEngine, prompt: Sequence[int], seed: int, strategy: Strategy | None = None, **s: Any) -> Any:
    sampling = Sampling(**{"max_tokens": 12, "ignore_eos": True} | s)
    [[wanted]] = engine.generate([Request(tuple(prompt), (mix64(seed),), sampling, strategy or strategy_of(DEFAULT))])
    return wanted


# -------------------------------------------------------------------------------------------------- what it writes


def test_a_completion_is_what_the_engine_writes_under_the_key_of_the_seed(client, engine, words) -> None:
    response = ask(client, seed=3, logprobs=0)
    [choice] = response["choices"]
    wanted = reference(engine, words("ab cd")["input_ids"], 3)
    assert choice["token_ids"] == wanted.tokens.tolist()
    assert choice["authorship"] == wanted.author.tolist() == authors(3, choice["token_ids"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(wanted.behaviour_logprobs.tolist())
    assert choice["text"] == words.decode(wanted.tokens, skip_special_tokens=True)
    assert (choice["finish_reason"], response["usage"]["completion_tokens"]) == ("length", 12)
    assert response["tandem"]["senior_frac"] == pytest.approx(np.mean(choice["authorship"]))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"min_p": 0.05, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5},
    ],
)
def test_sampling_is_the_engines(client, engine, words, sampling: dict[str, float]) -> None:
    [choice] = ask(client, seed=4, **sampling)["choices"]
    assert choice["token_ids"] == reference(engine, words("ab cd")["input_ids"], 4, **sampling).tokens.tolist()
    if sampling == {"temperature": 0.0}:
        [other] = ask(client, seed=4, tandem={"solo": "junior"}, **sampling)["choices"]
        assert other["authorship"] == [0] * 12
        assert other["token_ids"] != choice["token_ids"]


def test_a_generation_config_says_the_sampling_of_requests_that_do_not(engine, words, tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 1}')
    defaults = engine_server.sampling_defaults(str(tmp_path))
    assert defaults == {"temperature": 0.5, "top_k": 7}
    assert engine_server.sampling_defaults(str(tmp_path / "none")) == {}
    with TestClient(serving(engine, words, defaults=defaults), base_url="http://127.0.0.1") as asking:
        [choice] = ask(asking, seed=6, top_k=-1)["choices"]
    expected = reference(engine, words("ab cd")["input_ids"], 6, temperature=0.5).tokens.tolist()
    assert choice["token_ids"] == expected
    off = {"temperature": 0.5, "top_k": -1}  # as in vLLM
    with TestClient(serving(engine, words, defaults=off), base_url="http://127.0.0.1") as asking:
        [choice] = ask(asking, seed=6)["choices"]
    assert choice["token_ids"] == expected


def test_prompts_and_samples_are_counted_as_vllm_does(client, engine, words) -> None:
    choices = ask(client, prompt=["ab", [5, 6, 7]], n=2, seed=9)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    prompts = [words("ab")["input_ids"]] * 2 + [[5, 6, 7]] * 2
    for choice, prompt, seed in zip(choices, prompts, (9, 10, 9, 10), strict=True):
        assert choice["token_ids"] == reference(engine, prompt, seed).tokens.tolist()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stop", [None, "text", "id"])
def test_a_stream_tells_what_the_whole_response_tells(client: TestClient, path: str, stop: str | None) -> None:
    body: dict[str, Any] = {"n": 2, "seed": 5, "max_tokens": 20, "stream_options": {"include_usage": True}}
    free = ask(client, path, **body)["choices"][0]
    if stop == "text":
        body["stop"] = [(free.get("text") or free["message"]["content"])[4:7]]
    elif stop == "id":
        body["stop_token_ids"] = [free["token_ids"][6]]
    whole = ask(client, path, **body)
    usual = {"prompt": "ab cd"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = client.post(path, json=usual | {"ignore_eos": True, "stream": True} | body)
    *chunks, usage, done = events(response.content)
    assert done == "data: [DONE]"
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        assert [author for part in parts for author in part.get("authorship", ())] == choice["authorship"]
        text = "".join(part.get("text") or part.get("delta", {}).get("content") or "" for part in parts)
        assert text == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
        ended = [(part["finish_reason"], part["stop_reason"]) for part in parts if part["finish_reason"]]
        assert ended == [(choice["finish_reason"], choice["stop_reason"])]
        assert len([part for part in parts if part.get("token_ids")]) > 2  # as it is written
    summaries = [chunk["tandem"] for chunk in chunks if "tandem" in chunk]
    assert (len(summaries), summaries[-1]) == (2, whole["tandem"])
    if stop is not None:
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert len(whole["choices"][0]["token_ids"]) < 20


def test_a_session_writes_what_one_request_would(client: TestClient, engine, words) -> None:
    """Over three turns, the second of them streamed; strategy and counters go on, also after what was refused."""
    messages: list[Any] = [*MESSAGES]
    ids = [*words("ab cd")["input_ids"], EOS, IDS["!"]]
    strategy, turns = strategy_of(replace(DEFAULT, prob_senior=0.6)), list[tuple[int, ...]]()
    asked = {"max_tokens": 10, "temperature": 0.7, "tandem": {"prob_senior": 0.6}, "return_token_ids": True}
    for number in range(3):
        body = {"messages": messages, **asked}
        for refused in ({"n": 2}, {"temperature": -1}, {"max_tokens": 10**6}):
            assert client.post(f"/sessions/mine{CHAT}", json=body | refused).status_code == 400
        if number == 1:
            chunks = events(client.post(f"/sessions/mine{CHAT}", json=body | {"stream": True}).content)[:-1]
            parts = [part for chunk in chunks for part in chunk["choices"]]
            own = [token for part in parts for token in part.get("token_ids", ())]
            authorship = [author for part in parts for author in part.get("authorship", ())]
            said = {"role": "assistant", "content": "".join(part["delta"].get("content", "") for part in parts)}
        else:
            response = ask(client, f"/sessions/mine{CHAT}", **body, ignore_eos=False)
            [choice] = response["choices"]
            said, own, authorship = choice["message"], choice["token_ids"], choice["authorship"]
            assert response["prompt_token_ids"] == ids
            assert response["tandem"].keys() == {"senior_frac", "strategy", "version"}
        sampling = Sampling(max_tokens=10, temperature=0.7)
        [[wanted]] = engine.generate(
            [Request(tuple(ids), (session_key("mine"),), sampling, strategy, history=tuple(turns))]
        )
        check_authors([wanted], strategy, [turns])
        assert (own, authorship) == (wanted.tokens.tolist(), wanted.author.tolist())
        turns.append(tuple(own))
        ids += [*own, *([] if own[-1] == EOS else [EOS]), *words("ef")["input_ids"], EOS, IDS["!"]]
        messages += [said, {"role": "user", "content": "ef"}]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long_is_refused(engine, words, announced, monkeypatch):
    monkeypatch.setattr(engine_app, "MAX_BODY", 1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()
    with TestClient(serving(engine, words), base_url="http://127.0.0.1") as asking:
        for path in (COMPLETIONS, CHAT, GENERATE, "/detokenize"):
            pieces = body if announced else (body[i : i + 100] for i in range(0, len(body), 100))
            response = asking.post(path, content=pieces, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "the body of a request may have at most 1000 bytes"


# ---------------------------------------------------------------------------------------------- token ids in and out


def test_token_ids_in_and_out_with_log_probs(client: TestClient, engine: TorchEngine) -> None:
    """What the client of `verifiers` reads: `renderers.client.generate`."""
    sampling = {"max_tokens": 9, "seed": 3, "temperature": 0.5, "stop_token_ids": [EOS], "logprobs": 1}
    body = {"model": "pair", "token_ids": [5, 6, 7], "sampling_params": sampling | {"skip_special_tokens": False}}
    response = client.post(GENERATE, json=body, headers={"X-Session-ID": "one"})
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    strategy, key = strategy_of(DEFAULT), (mix64(3),)
    wanted = Sampling(max_tokens=9, temperature=0.5, stop_token_ids=(EOS,))
    [[one]] = engine.generate([Request((5, 6, 7), key, wanted, strategy)])
    assert choice["token_ids"] == one.tokens.tolist()
    assert choice["authorship"] == one.author.tolist()
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [each["logprob"] for each in content] == pytest.approx(one.behaviour_logprobs.tolist())
    assert choice["finish_reason"] == ("length" if one.stop_reason == "length" else "stop")
    assert response.json()["tandem"]["seed"] == 3
    [card] = client.get("/v1/models").json()["data"]
    assert card["max_model_len"] == engine.context


def test_the_next_turn_of_a_session_computes_its_new_tokens(client, engine, monkeypatch):
    """A chat, and token ids under a header that says whose they are; without either, all is computed anew."""
    computed, read = list[int](), decoding.extend

    def counted(model: Any, cache: Any, rows: Any, starts: Any, chunks: Any) -> Any:
        computed.append(sum(map(len, chunks)))
        return read(model, cache, rows, starts, chunks)

    monkeypatch.setattr(decoding, "extend", counted)
    ids, headers = [2, 3, 4], {"X-Session-ID": "one"}
    for number in range(3):
        sampling = {"max_tokens": 5, "seed": 4, "ignore_eos": True, "routed_experts_prompt_start": number}  # verifiers'
        body = {"token_ids": ids, "sampling_params": sampling}
        response = client.post(GENERATE, json=body, headers=headers if number else {})
        ids = [*ids, *response.json()["choices"][0]["token_ids"], 7, 8]
    assert computed == [2, 2]  # of both models: the last token before the new ones, which the first step reads
    messages: list[Any] = [*MESSAGES]
    told = ask(client, f"/sessions/two{CHAT}", messages=messages)
    messages += [told["choices"][0]["message"], *MESSAGES]
    ask(client, f"/sessions/two{CHAT}", messages=messages)
    assert len(computed) == 4


def test_token_ids_without_limits_and_by_one_author(engine: TorchEngine, words: Any) -> None:
    """The sampling is what the request says, not what the model's generation config does."""
    with TestClient(serving(engine, words, defaults={"temperature": 0.1}), base_url="http://127.0.0.1") as asking:
        body = {"token_ids": [5, 6], "sampling_params": {"seed": 1}, "tandem": {"solo": "junior"}}
        [choice] = asking.post(GENERATE, json=body).json()["choices"]
    sampling = Sampling(max_tokens=engine.context - 2)
    [[one]] = engine.generate([Request((5, 6), (mix64(1),), sampling, solo("junior"))])
    assert choice["token_ids"] == one.tokens.tolist()
    assert (choice["logprobs"], {*choice["authorship"]}) == (None, {0})


# -------------------------------------------------------------------------------------------------- texts and calls


class Letters:
    """A tokenizer of bytes: half characters are tokens, and 0 is special."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token or not skip_special_tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("text", "style", "shown", "stop"),
    [
        ("héllo €", {}, "héllo €", None),
        ("ab\0", {"skip_special": False}, "ab\0", None),
        ("abcde", {"stop": ("cde",)}, "ab", "cde"),
        ("abcde", {"stop": ("cde",), "keep_stop": True}, "abcde", "cde"),
        ("ab!", {"stop_token_ids": (33,)}, "ab", 33),
        ("ab!", {"stop_token_ids": (33,), "keep_stop": True}, "ab!", 33),
        ("€cd", {"stop": ("d", "€c")}, "", "€c"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_of_a_text_are_the_text(text: str, style: dict[str, Any], shown: str, stop: Any, size: int) -> None:
    tokens, wanted = list(text.encode()), TextStyle(**style)
    assert text_of(Letters(), tokens, wanted) == (shown, stop)
    stream = TextStream(Letters(), wanted)
    told = "".join(stream.add(tokens[i : i + size]) for i in range(0, len(tokens), size))
    assert (shown.startswith(told), len(told)) == (True, stream.told)
    assert "\ufffd" not in told


def chunks(speaker: Speaker, asked: Asked) -> Chunks:
    return Chunks(speaker, asked, 0, Request((2,), (0,), Sampling(), solo("senior")), 0)


@pytest.mark.parametrize(
    ("reason", "text", "told"),
    [("eos", "ab", ("stop", None)), ("length", "ab!", ("length", None)), ("failed", "ab!", ("error", "failed"))],
)
def test_the_end_of_a_text_is_told_and_is_no_text(reason: Any, text: str, told: Any) -> None:
    tokens = np.frombuffer(b"ab!", dtype=np.uint8).astype(np.int64)
    one = Completion(0, tokens, np.ones(3), np.zeros(3), reason)
    speaker, asked = Speaker(Letters(), "hermes", {33}), Asked("text", {}, (), 0, DEFAULT, TextStyle())
    choice = speaker.choice(asked, 0, one)
    stream = chunks(speaker, asked)
    parts = [*(stream.further([token], [0.0]) for token in tokens.tolist()), stream.last(choice)]
    parts = [part for each in parts for part in each["choices"]]
    assert choice["text"] == "".join(part["text"] for part in parts) == text
    for ended in (choice, parts[-1]):
        assert (ended["finish_reason"], ended["stop_reason"]) == told


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('so <tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>', "so", '{"at": "é"}'),
        ('<tool_call>{"name": "jump", "arguments": {}}</tool_call>', None, None),  # nobody has it: it is text
        ("look", None, None),
    ],
)
def test_calls_are_read_as_they_are_written(text: str, content: Any, arguments: Any) -> None:
    schema = {"type": "function", "function": {"name": "look", "parameters": TOOLS[0]["function"]["parameters"]}}
    asked = Asked("chat", {}, (), 0, DEFAULT, TextStyle(), tools={"look": schema})
    tokens = np.frombuffer(text.encode() + b"\0", dtype=np.uint8).astype(np.int64)
    one = Completion(0, tokens, np.ones(len(tokens)), np.zeros(len(tokens)), "eos")
    speaker = Speaker(Letters(), "hermes")
    choice, told = speaker.choice(asked, 0, one), chunks(speaker, asked)
    assert told.further(tokens.tolist(), [0.0] * len(tokens))["choices"][0]["delta"] == {}
    [last] = told.last(choice)["choices"]
    for said, reason in ((choice["message"], choice["finish_reason"]), (last["delta"], last["finish_reason"])):
        if arguments is None:
            assert (said["content"], said.get("tool_calls"), reason) == (text, None, "stop")
            continue
        [call] = said["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": arguments}
        assert (said["content"], reason, call["type"]) == (content, "tool_calls", "function")


def test_a_prompt_tells_of_tools_and_results(client: TestClient, words) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "e"},
    ]
    got = ask(client, CHAT, messages=messages, tools=TOOLS, return_token_ids=True)["prompt_token_ids"]
    assert got == words.encode("lookab\ncd<eos><eos>e<eos>!", add_special_tokens=False)
    plain = messages[:1]
    hidden = ask(client, CHAT, messages=plain, tools=TOOLS, tool_choice="none", return_token_ids=True)
    assert hidden["prompt_token_ids"] == words.encode("ab\ncd<eos>!", add_special_tokens=False)
    unseen = client.post(CHAT, json={"messages": messages, "tools": TOOLS, "tool_choice": "none"})
    assert "does not show 'look'" in unseen.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_text_of_a_chat_is_no_control_token_and_a_begun_answer_goes_on(client: TestClient, words, path: str) -> None:
    def prompt(messages: list[Any], **body: Any) -> list[int]:
        name = "prompt_token_ids" if path == CHAT else "tokens"
        usual = {"max_tokens": 2, "return_token_ids": True} if path == CHAT else {}
        return client.post(path, json={"messages": messages, **usual, **body}).json()[name]

    eos = words.convert_tokens_to_ids("<eos>")
    ids = prompt([{"role": "user", "content": "ab<eos>cd"}])
    assert ids.count(eos) == 1
    assert ids == [*(i for each in ("ab<", "eos>cd", "<eos>!") for i in words.encode(each, add_special_tokens=False))]
    begun = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    for body in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert prompt(begun, **body) == words.encode("ab<eos>cd", add_special_tokens=False)
    assert prompt(begun, continue_final_message=False) == words.encode("ab<eos>cd<eos>!", add_special_tokens=False)


# -------------------------------------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        *(
            (COMPLETIONS, {"prompt": "ab", "max_tokens": 2} | body, reason)
            for body, reason in (
                ({"prompt": ""}, "prompt: expected a text or token ids"),
                ({"prompt": [VOCABULARY]}, "a prompt token is outside the vocabulary"),
                ({"max_tokens": 10**6}, "max_tokens: the context (max_model_len) is"),
                ({"max_tokens": 0}, "max_tokens: expected a whole number from 1 to"),
                ({"temperature": -1}, "temperature must be"),
                ({"temperature": float("nan")}, "temperature: expected a number"),
                ({"stop": [""]}, "stop: expected a string or a list"),
                ({"stop_token_ids": [-1]}, "stop_token_ids [-1] are outside"),
                ({"logprobs": 1}, "only the written token's is known"),
                ({"logit_bias": {"1": 2}}, "logit_bias: not possible with this server"),
            )
        ),
        *(
            (CHAT, {"messages": MESSAGES, "max_tokens": 2} | body, reason)
            for body, reason in (
                ({"messages": []}, "field 'messages': expected a non-empty string or a list"),
                ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of the type text"),
                ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools: expected a"),
                ({"tools": [{**TOOLS[0], "function": {"name": "f", "strict": True}}]}, "needs structured outputs"),
                ({"chat_template_kwargs": {"thoughts": True}}, "the chat template of tokenizer"),
                ({"continue_final_message": True}, "continue_final_message: the last message must be the assistant's"),
                ({"tandem": {"conversation": "new"}}, "tandem.conversation: requests of one session go on"),
            )
        ),
        *(
            (GENERATE, {"token_ids": [2], "sampling_params": {"max_tokens": 2}} | body, reason)
            for body, reason in (
                ({"stream": True}, "stream: expected false, since it is not possible here"),
                ({"sampling_params": []}, "sampling_params: expected an object"),
                ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs: expected 1, since only the written"),
            )
        ),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(client: TestClient, path: str, body: Any, reason: str) -> None:
    headers = {"content-type": "application/json"}
    response = client.post(path, content=json.dumps(body), headers=headers)  # NaN, too
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, 400, "Bad Request")
    assert reason in error["message"]


def test_other_models_hosts_and_routes(client: TestClient) -> None:
    for body in (b"[1]", b"\xff", b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"):
        response = client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert response.json()["error"]["message"] == "the body: expected a JSON object"
    missing = client.post(COMPLETIONS, json={"model": "nope", "prompt": "a"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "NotFoundError")
    assert missing.json()["error"]["message"] == "The model `nope` does not exist. This server has `pair`."
    assert ask(client, model="pair")["model"] == "pair"
    assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 400
    assert client.post("/v1/responses", json={}).json()["error"]["message"].startswith("/v1/responses: a tandem server")
    assert client.post("/tokenize", json={"prompt": "a"}, headers={"host": "evil.example"}).status_code == 400
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "pair"
    assert client.get("/health").status_code == 200
    ids = client.post("/tokenize", json={"prompt": "ab cd"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "ab cd"}
    assert client.post("/detokenize", json={"tokens": [10**9]}).status_code == 400
    rendered = client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert rendered == [*ids, EOS]


def test_a_key_opens_it(engine: TorchEngine, words: Any) -> None:
    with TestClient(serving(engine, words, api_key="s3cret"), base_url="http://127.0.0.1") as asking:
        body = {"prompt": "ab", "max_tokens": 2}
        for headers in ({}, {"authorization": "Bearer s3cre"}, {"authorization": "s3cret"}):
            for path in (COMPLETIONS, f"/sessions/mine{COMPLETIONS}"):
                assert asking.post(path, json=body, headers=headers).status_code == 401
        assert asking.post(COMPLETIONS, json=body, headers={"authorization": "Bearer s3cret"}).status_code == 200
        assert asking.get("/health").status_code == 200


# -------------------------------------------------------------------------------------------------- the engine's thread


class Slow:
    """An engine whose steps wait until they may go on."""

    def __init__(self, own: TorchEngine) -> None:
        self.own, self.check, self.vocabulary, self.context = own, own.check, own.vocabulary, own.context
        self.joined: list[int] = []
        self.aborted: set[int] = set()
        self.begun, self.steps = threading.Event(), threading.Semaphore(0)

    def go_on(self) -> None:
        self.steps.release(1000)

    def wait_for(self, requests: int) -> None:
        """Wait until so many have joined."""
        self.steps.release()
        while len(self.joined) < requests:
            time.sleep(0.01)

    def forget(self) -> None:
        """It keeps nothing."""

    @contextmanager
    def open(self) -> Any:
        with self.own.open() as call:
            step, submit, abort = call.step, call.submit, call.abort

            def slow() -> Any:
                self.begun.set()
                assert self.steps.acquire(timeout=60)
                return step()

            def joins(requests: Sequence[Request]) -> list[int]:
                self.joined.append(call.written)
                return submit(requests)

            def ends(numbers: Iterable[int]) -> None:
                self.aborted |= {*numbers}
                abort(numbers)

            call.step, call.submit, call.abort = slow, joins, ends
            yield call


def request_of(seed: int, samples: int = 1) -> Request:
    return Request((2, 3), tuple(mix64(seed + i) for i in range(samples)), Sampling(max_tokens=4), strategy_of(DEFAULT))


def test_what_comes_later_joins_the_open_call_and_is_told_apart(engine: TorchEngine) -> None:
    slow = Slow(engine)
    thread = EngineThread(slow)
    told: dict[tuple[int, int], list[int]] = {}

    def hear(seed: int) -> Any:
        return lambda number, tokens, logprobs: told.setdefault((seed, number), []).extend(tokens)

    first = thread.submit([request_of(1)])
    assert slow.begun.wait(60)
    others = [thread.submit([request_of(seed), request_of(seed + 1)], hear(seed)) for seed in (10, 20, 30)]
    thread.cancel(others[1])  # it has not begun
    slow.go_on()
    [one] = first.done.result(60)
    for job, seed in ((others[0], 10), (others[2], 30)):
        for number, completion in enumerate(job.done.result(60)):
            assert told.pop((seed, number)) == completion.tokens.tolist()
    assert told == {}
    assert slow.joined == [0, 1, 1]  # after the first token of the first one
    thread.close()
    assert one.tokens.tolist() == engine.generate([request_of(1)])[0][0].tokens.tolist()


def test_requests_that_are_about_to_come_join_before_the_first_step(engine: TorchEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine_thread, "GAP_S", 60.0)
    slow = Slow(engine)
    thread = EngineThread(slow, clients=lambda: 3)
    jobs = [thread.submit([request_of(1)])]
    slow.wait_for(1)
    jobs += [thread.submit([request_of(seed)]) for seed in (10, 20)]
    slow.go_on()
    for job, seed in zip(jobs, (1, 10, 20), strict=True):
        [one] = job.done.result(60)
        assert one.tokens.tolist() == engine.generate([request_of(seed)])[0][0].tokens.tolist()
    assert slow.joined == [0, 0, 0]
    thread.close()


def test_a_job_that_nobody_waits_for_is_aborted_and_not_another_of_its_key(engine: TorchEngine) -> None:
    slow = Slow(engine)
    thread = EngineThread(slow)
    gate = thread.submit([request_of(0)])
    assert slow.begun.wait(60)
    twin, other = thread.submit([request_of(1)]), thread.submit([request_of(1, samples=2)])
    slow.wait_for(3)
    thread.cancel(other)
    slow.go_on()
    gate.done.result(60)
    twin.done.result(60)
    assert slow.aborted == {*other.numbers}
    assert twin.done.result()[0].stop_reason != "abort"
    thread.cancel(other)  # it has ended
    thread.close()
    with pytest.raises(EngineError, match="outside the vocabulary"):
        thread.submit([request_of(1), replace(request_of(1), prompt=(10**6,))])


@pytest.mark.parametrize("error", [EngineError("it is broken"), RuntimeError("no memory")])
def test_a_call_that_fails_fails_the_requests_in_it_and_no_later_one(words, engine, caplog, error):
    class Breaks(Slow):
        broken: Exception | None = error

        @contextmanager
        def open(self) -> Any:
            with super().open() as call:
                step = call.step

                def breaks() -> Any:
                    if self.broken is not None and len(self.joined) < 2:  # it waits for the other request
                        time.sleep(0.01)
                        return []
                    if self.broken is not None and call.written:
                        raise self.broken
                    return step()

                call.step = breaks
                yield call

    breaks = Breaks(engine)
    breaks.go_on()
    message = str(error) if isinstance(error, EngineError) else "the engine failed: RuntimeError: no memory"
    with TestClient(serving(breaks, words), base_url="http://127.0.0.1") as asking, ThreadPoolExecutor() as pool:
        body = {"prompt": "ab cd", "max_tokens": 12, "ignore_eos": True}
        one, streamed = (pool.submit(asking.post, COMPLETIONS, json=body | {"stream": s}) for s in (False, True))
        failed = {"message": message, "type": "Internal Server Error", "param": None, "code": 500}
        assert (one.result().status_code, one.result().json()) == (500, {"error": failed})
        assert [each for each in events(streamed.result().content) if "error" in each] == [{"error": failed}]
        assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]
        breaks.broken = None
        [choice] = ask(asking, seed=3)["choices"]
    assert choice["token_ids"] == reference(engine, words("ab cd")["input_ids"], 3).tokens.tolist()


def test_connections_stay_open_longer_than_clients_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.append(self.config))
    with socket.socket() as listening:
        run(Starlette(), listening)
    assert served[0].timeout_keep_alive > 2 * httpx.Limits().keepalive_expiry


# -------------------------------------------------------------------------------------------------- the command

BOTH = ["serve", "--senior", "S", "--junior", "J"]


@pytest.mark.parametrize("installed", [True, False])
def test_vllm_serves_where_it_is_and_torch_elsewhere(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    calls: list[str] = []
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: (installed or None) if name == "vllm" else found(name, *rest)
    )
    monkeypatch.setattr(engine_server, "serve", lambda config, **keywords: calls.append(config.rollout.engine))
    assert CliRunner().invoke(command, BOTH).exit_code == 0
    assert calls == ["vllm" if installed else "torch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--", "--max-model-len", "4"], "'--max-model-len' has no effect here: the keys that are read are model"),
        (["train.steps=4"], "has no effect here: the keys that are read are model.*, rollout.*, selection.*"),
        (["--engine", "vllm", "selection.strategy=before_word"], "rollout.engine=vllm: must be torch with selection."),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(words, tmp_path, options, message):
    words.save_pretrained(tmp_path)
    result = CliRunner().invoke(command, ["serve", "--senior", str(tmp_path), "--junior", str(tmp_path), *options])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())


def test_tool_calls_are_read_where_a_template_knows_tools() -> None:
    formats = {
        "{{ tools | length }}": "hermes",
        "{{ messages }} {{ stools }}": None,
        "{{ tools }} {{- '\"parameters\": ' }}": "json",
        "{{ tools }} {{ '\"parameters\": ' }}<tool_call>": "hermes",
    }
    assert {template: call_format_of(template) for template in formats} == formats


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use; choose another one with --port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", port) as listening:
        assert url_of("127.0.0.1", listening) == f"http://127.0.0.1:{port}"
        assert url_of("::1", listening) == f"http://[::1]:{port}"
    with pytest.raises(EngineError, match=r"--host 192\.0\.2\.1 --port"):  # an address of documentation, nobody's
        listen("192.0.2.1", port)


@pytest.mark.parametrize("form", ["chat", "text"])
def test_log_probs_name_the_bytes_of_parts_of_characters(words: Any, form: Any) -> None:
    written = [IDS[each] for each in ("a", "Ã", "©", "Ġb", "c")]
    speaker = Speaker(words, "hermes")
    whole = speaker.logprobs(form, written, [0.0] * 5)
    if form == "chat":
        assert b"".join(bytes(token["bytes"]) for token in whole["content"]) == "aé bc".encode()
        return
    assert whole["text_offset"] == [0, 1, 1, 2, 4]
    stream = TextStream(words, TextStyle())
    pieces = [speaker.logprobs("text", [token], [0.0], stream)["text_offset"] for token in written]
    assert [*chain(*pieces)] == whole["text_offset"]
