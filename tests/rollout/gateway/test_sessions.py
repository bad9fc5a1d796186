"""Sessions of the gateway: what goes on from what, under which key, from which ids; and what it costs."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import small_world
from helpers import EOS as EOS_SURFACE
from helpers import IDS, agent_tokenizer, prepared, qwen3
from tandemrl.config import RolloutConfig, SelectionConfig
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row, chat_tokens
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.rollout.engine import Request, Sampling, check_authors
from tandemrl.rollout.envs.environment import Answer, Environment, State
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.gateway.engine_app import Server, application
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.requests import Reader
from tandemrl.rollout.gateway.sessions import Limits, Session
from tandemrl.rollout.gateway.texts import Speaker
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo
from tandemrl.selection.draws import mix64

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
EOS, CALLS = IDS[EOS_SURFACE], small_world.CALLS[:3]  # those that can be made
WORD = SelectionConfig(strategy="word", prob_senior=0.5, max_gap_tokens=4)
SAMPLING, LIMITS = Sampling(60), Limits(60, 8, 12, 400)
ASKED: list[Any] = [{"role": "user", "content": "ab one"}]


class Sums(Environment):
    """Adds, when asked for it, and else says a word; three turns."""

    tools = (small_world.add,)

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        answer = super().reply(row, state, message)
        said = answer.messages or [{"role": "user", "content": "cd"}]
        turns = answer.state.get("turns", 0) + 1
        return replace(answer, messages=said, state={**answer.state, "turns": turns}, over=turns == 3)


SCHEMAS = Sums().tool_schemas()


@pytest.fixture(scope="module")
def words() -> Any:
    return agent_tokenizer(CALLS)


@pytest.fixture(scope="module")
def engine(words: Any) -> TorchEngine:
    models = (prepared(qwen3(seed, vocabulary=len(words), context=2304)) for seed in (0, 1))
    return TorchEngine(*models, words)


@pytest.fixture(scope="module")
def strategies(engine: TorchEngine, words: Any) -> Any:
    both = schedule_of(WORD, words, engine.vocabulary).strategy(1)
    return lambda selection: solo(selection.first) if selection.strategy == "solo" else both


@pytest.fixture(scope="module")
def reader(engine: TorchEngine, words: Any, strategies: Any) -> Reader:
    ends = frozenset({EOS})
    return Reader(words, engine.context, strategies, WORD, {}, DEFAULT_ARGUMENTS, calls=True, ends=ends)


@pytest.fixture(scope="module")
def server(engine: TorchEngine, words: Any, reader: Reader) -> Server:
    return Server(EngineThread(engine), reader, Speaker(words, "hermes", {EOS}), "pair")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    with TestClient(application(server, hosts={"127.0.0.1"}), base_url="http://127.0.0.1:8000") as asking:
        yield asking


class Asker:
    """A session and a client of it."""

    def __init__(self, client: TestClient, server: Server, key: int = 5, limits: Limits = LIMITS) -> None:
        self.session = Session(key, server.reader, SAMPLING, limits)
        server.sessions[self.session.name] = self.session
        self.client, self.path = client, f"/sessions/{self.session.name}"

    def post(self, path: str, body: Any, **headers: str) -> Any:
        return self.client.post(self.path + path, json=body, headers=headers)

    def ask(self, messages: Sequence[Any] = ASKED, path: str = CHAT, **more: Any) -> Any:
        headers = more.pop("headers", {})
        response = self.post(path, ({"messages": messages} if path == CHAT else {}) | more, **headers)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    @property
    def branches(self) -> list[tuple[int, list[int]]]:
        """The key and the own tokens of each branch."""
        return [(w.completion.key, [*np.concatenate(w.completion.turns)]) for w in self.session.written()]


@pytest.fixture
def asker(client: TestClient, server: Server) -> Asker:
    return Asker(client, server)


def play(asker: Asker, row: Row) -> None:
    """What the environment ``Sums`` does, as a program that knows OpenAI's interface only."""
    messages: list[Any] = [*row.messages]
    for _ in range(3):
        said = asker.ask(messages, tools=SCHEMAS, temperature=0.2, model="gpt-4o")["message"]
        messages.append(said)
        for call in said.get("tool_calls", ()):
            try:
                result, _ = str(small_world.add(**json.loads(call["function"]["arguments"]), row=row, state={})), 0
            except ValueError as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        messages += [] if "tool_calls" in said else [{"role": "user", "content": "cd"}]


def test_a_linear_session_has_the_tokens_of_the_environment(client, server, engine, words, strategies) -> None:
    """Authors and log-probs, too, of episodes with calls, wrong calls and talk."""
    config = RolloutConfig(max_tokens=60, turn_tokens=12, observation_tokens=100, max_turns=3, keep_turns=True)
    row, calls = Row("r", tuple(ASKED), "own", "ab", {}), 0
    with EpisodeRunner(Sums(), words, config, eos_token_ids=[EOS]) as runner:
        prompt = chat_tokens(words, ASKED, "", DEFAULT_ARGUMENTS, runner.tools)
        for key in (2, 4, 24, 33, 7):
            request = runner.episode(Request(tuple(prompt), (key,), SAMPLING, strategies(WORD)), row)
            [[wanted]] = engine.generate([request], responder=runner.episodes())
            asker = Asker(client, server, key)
            play(asker, row)
            [branch] = asker.session.written()
            begun, found = branch.prompt, branch.completion
            assert [*begun] == [*prompt]
            assert found.key == key
            for name in ("tokens", "author", "behaviour_logprobs"):
                np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-5, err_msg=name)
            check_authors([replace(found, transcript=wanted.transcript)], strategies(WORD))
            assert branch.roles == (None,) * len(wanted.turns) == (None,) * 3
            calls += sum("tool_calls" in message for message in wanted.transcript.messages)
    assert calls >= 4


def test_what_comes_back_changed_by_a_client_is_known_all_the_same(asker: Asker) -> None:
    first = asker.ask()
    said = {"role": "assistant", "content": f" {first['message']['content']}\n", "refusal": None}
    asker.ask([*ASKED, said, *ASKED], stream=False)
    [(_, completion, asked)] = asker.session.written()
    assert len(completion.turns) == len(asked) == 2
    assert completion.turns[0].tolist() == first["token_ids"]


def test_an_answer_that_is_used_twice_begins_a_branch_of_its_own(asker: Asker, engine, strategies) -> None:
    """The branch has the ids up to there as its prompt, and a key that depends on them alone."""
    first = asker.ask()
    further = [*ASKED, first["message"], *ASKED]
    one, two, three = (asker.ask(further) for _ in range(3))
    main, *forks = asker.session.written()
    assert main.completion.turns[1].tolist() == one["token_ids"]
    assert [fork.prompt for fork in forks] == [forks[0].prompt] * 2
    assert len({main.completion.key, *(fork.completion.key for fork in forks)}) == 3
    for fork, choice in zip(forks, (two, three), strict=True):
        [[wanted]] = engine.generate([Request(fork.prompt, (fork.completion.key,), Sampling(12), strategies(WORD))])
        assert fork.completion.tokens.tolist() == choice["token_ids"] == wanted.tokens.tolist()
        check_authors([fork.completion], strategies(WORD))
    assert forks[0].prompt[: len(main.prompt) + len(first["token_ids"])] == (*main.prompt, *first["token_ids"])


def test_rewritten_history_is_context(asker: Asker, words: Any) -> None:
    first = asker.ask()
    asker.ask([*ASKED, first["message"], *ASKED])
    changed = [*ASKED, {"role": "assistant", "content": "<eos> short"}, *ASKED]
    asker.ask(changed)
    asker.ask([{"role": "system", "content": "x"}, *ASKED])
    main, rewritten, other = asker.session.written()
    assert len(main.completion.turns) == 2
    assert rewritten.prompt == (*chat_tokens(words, changed, "", DEFAULT_ARGUMENTS),)
    assert rewritten.prompt.count(EOS) == 1  # that of the template: text becomes no control token
    assert (rewritten.completion.author >= 0).all()
    assert len({w.completion.key for w in (main, rewritten, other)}) == 3


def test_parallel_requests_differ_and_each_has_its_branch(client: TestClient, server: Server) -> None:
    asker = Asker(client, server, limits=Limits(72, 8, 12, 400))
    with ThreadPoolExecutor(6) as pool:
        told = [*pool.map(lambda i: asker.ask([{"role": "user", "content": f"ab {i % 3}"}])["token_ids"], range(6))]
    branches = asker.branches
    assert sorted(own for _, own in branches) == sorted(told)
    assert len({key for key, _ in branches}) == 6
    assert sum(key == 5 for key, _ in branches) == 1


def test_parallel_requests_share_the_tokens_of_their_session(client: TestClient, server: Server) -> None:
    """Each is as alone if all together fit, though each might have taken everything; else what is written is less."""
    bodies = [{"messages": [{"role": "user", "content": f"ab {i}"}], "seed": i, "max_tokens": 24} for i in range(4)]
    wide = Limits(400, 8, None, 400)
    alone = [Asker(client, server, limits=wide).post(CHAT, body).json()["choices"][0]["token_ids"] for body in bodies]
    enough = sum(map(len, alone))
    for tokens, turn in ((enough, None), (enough - 1, None), (enough - 1, 5), (enough + 24 * 3, None)):
        asker = Asker(client, server, limits=Limits(tokens, 8, turn, 400))
        with ThreadPoolExecutor(4) as pool:
            responses = [*pool.map(lambda body: asker.post(CHAT, body), bodies)]  # noqa: B023
        assert sum(len(own) for _, own in asker.branches) <= tokens
        found = [each.json()["choices"][0]["token_ids"] if each.status_code == 200 else [] for each in responses]
        assert found == [each[:turn] for each in alone] or tokens < enough
        assert all(own == whole[: len(own)] for own, whole in zip(found, alone, strict=True))


def test_seeds_give_parallel_requests_keys_that_no_arrival_changes(client: TestClient, server: Server) -> None:
    """First requests, equal ones, and those that go on from one answer; what has the seed of the request before, goes
    on from it. What has none is as it is without them."""
    told = []
    for order in ((0, 1, 2), (2, 0, 1)):
        asker, answers = Asker(client, server, limits=Limits(200, 9, 12, 400)), dict[Any, Any]()
        for i in order:
            answers[i] = asker.ask(**({} if i == 2 else {"seed": i}))
        assert asker.ask(seed=0, headers={"x-stainless-retry-count": "1"}) == answers[0]
        for i in order:
            answers["on", i] = asker.ask([*ASKED, answers[2]["message"], *ASKED], **({} if i == 2 else {"seed": i}))
        asker.ask([*ASKED, answers[0]["message"], *ASKED], seed=0)
        told.append((sorted(asker.branches), {i: each["token_ids"] for i, each in answers.items()}))
        lengths = {w.completion.key: len(w.completion.turns) for w in asker.session.written()}
        assert (lengths[5], sorted(lengths.values())) == (2, [1, 1, 1, 2, 2])
    assert told[0] == told[1]
    assert "expected a whole number from 0" in asker.post(CHAT, {"messages": ASKED, "seed": "x"}).text


def test_a_retry_gets_the_same_answer_and_is_no_branch(asker: Asker) -> None:
    first = asker.ask()
    again = asker.ask(headers={"x-stainless-retry-count": "1"})
    assert again["token_ids"] == first["token_ids"]
    assert len(asker.branches) == 1
    further = [*ASKED, first["message"], *ASKED]
    one = asker.ask(further)
    assert asker.ask(further, headers={"x-stainless-retry-count": "2"})["token_ids"] == one["token_ids"]
    other = asker.ask(headers={"x-stainless-retry-count": "1"})  # the program went on from the first
    assert other["token_ids"] != first["token_ids"]
    assert [key for key, _ in asker.branches] == [5, asker.session.written()[1].completion.key]


def test_a_request_that_its_client_gave_up_is_forgotten(asker: Asker) -> None:
    asked, asking = asker.session.begin({"messages": ASKED}, "chat")
    asker.session.drop(asking)
    assert asker.session.written() == []
    first = asker.ask()
    assert asker.session.written()[0].completion.key == 5 == asked.requests[0].keys[0]
    assert first["token_ids"] == asker.branches[0][1]


def test_what_takes_the_place_of_a_branch_has_its_key_and_no_other(asker: Asker) -> None:
    """Else two of the same prompt would have the same tokens."""
    begun = [asker.session.begin({"messages": ASKED}, "chat")[1] for _ in range(3)]
    asker.session.drop(begun[1])
    _, again = asker.session.begin({"messages": ASKED}, "chat")
    assert [each.branch.key == again.branch.key for each in begun] == [False, True, False]


def test_a_stream_goes_on_as_any_answer(asker: Asker) -> None:
    lines = asker.post(CHAT, {"messages": ASKED, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    asker.ask([*ASKED, {"role": "assistant", "content": content}, *ASKED])
    [(key, own)] = asker.branches
    assert key == 5
    turns = asker.session.written()[0].completion.turns
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert (turns[0].tolist(), own[: len(told)], len(turns)) == (told, told, 2)


def test_token_ids_go_on_by_their_ids(asker: Asker, engine, strategies) -> None:
    """As the training client of verifiers asks."""
    ids, sampling = (
        [2, 3, 4],
        {"temperature": 0.3, "logprobs": 1, "stop_token_ids": [EOS], "skip_special_tokens": False},
    )
    for _ in range(3):
        choice = asker.ask((), GENERATE, token_ids=ids, sampling_params=sampling)
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in choice["token_ids"]]
        ids = [*ids, *choice["token_ids"], 7, 8]
    [(begun, completion, _)] = asker.session.written()
    assert [*begun, *completion.tokens, 7, 8] == ids
    first, second, _ = (turn.tolist() for turn in completion.turns)
    later = Request((*begun, *first, 7, 8), (5,), Sampling(12), strategies(WORD), history=(tuple(first),))
    assert engine.generate([later])[0][0].tokens.tolist() == second


def test_roles_write_alone_in_one_session(asker: Asker) -> None:
    drafted = asker.ask(model="junior")
    judged = asker.ask([{"role": "user", "content": "ef"}], model="senior")
    assert ({*drafted["authorship"]}, {*judged["authorship"]}) == ({0}, {1})
    both = asker.ask([{"role": "user", "content": "ef"}, judged["message"], *ASKED])
    assert [w.roles for w in asker.session.written()] == [("junior",), ("senior", None)]
    assert {*asker.session.written()[1].completion.turns[1]} == {*both["token_ids"]}
    cards = asker.client.get(f"{asker.path}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["pair", "senior", "junior"]
    assert {card["max_model_len"] for card in cards} == {400}


def test_what_a_session_may_not_do(client: TestClient, server: Server, asker: Asker) -> None:
    for limits, key in (
        (Limits(60, 2, 12, 400), "rollout.max_turns"),
        (Limits(13, 9, 12, 400), "rollout.max_tokens"),
        (Limits(60, 9, 12, 30), "data.max_prompt_tokens"),
    ):
        small, messages, response = Asker(client, server, 9, limits), [*ASKED], None
        for _ in range(9):
            response = small.post(CHAT, {"messages": messages, "max_tokens": 10**6})
            if response.status_code != 200:
                break
            messages += [response.json()["choices"][0]["message"], *ASKED]
        assert response is not None
        assert response.status_code == 400
        assert f"has used up {key}" in response.json()["error"]["message"]
        total = sum(len(own) for _, own in small.branches)
        assert total <= limits.tokens
    for body, message in (
        ({"n": 2}, "a request of a session has one answer"),
        ({"tandem": {"solo": "senior"}}, "the run decides who writes"),
        ({"max_tokens": 0}, "expected a whole number above 0"),
        ({"response_format": {"type": "json_object"}}, "grammars are not applied"),
    ):
        refused = asker.post(CHAT, {"messages": ASKED} | body)
        assert (refused.status_code, message in refused.text) == (400, True), refused.text
    asker.session.close()
    assert "is closed" in asker.post(CHAT, {"messages": ASKED}).text
    assert client.post(f"/sessions/{'x' * 32}{CHAT}", json={"messages": ASKED}).status_code == 410
    assert asker.branches == []


def test_a_second_turn_computes_its_new_tokens_alone(client: TestClient, server: Server, computed: list[int]) -> None:
    asker = Asker(client, server, limits=Limits(60, 8, 12, server.thread.engine.context))
    ids = [token % 60 + 2 for token in range(2000)]
    for further in ([], [7, 8, 9], [8, 9]):
        ids += further
        ids += asker.ask((), GENERATE, token_ids=ids, sampling_params={})["token_ids"]
    assert computed[2:] == [3] * 2 + [2] * 2  # of both models: the new ones, but one that the first step reads
    assert computed[:2] == [1999] * 2


def test_a_branch_key_is_a_hash_of_the_episode_the_prompt_and_its_ordinal(client, server) -> None:
    """So that draws depend neither on what else is asked nor on the order."""
    keys = []
    for order in ((0, 1, 2), (2, 1, 0)):
        asker = Asker(client, server)
        asker.ask()
        prompts = [[{"role": "user", "content": f"cd {i}"}] for i in range(3)]
        told = {i: asker.ask(prompts[i])["token_ids"] for i in order}
        keys.append({tuple(told[i]): key for (key, _), i in zip(asker.branches[1:], order, strict=True)})
    assert keys[0] == keys[1]
    assert mix64(5) not in keys[0].values()
