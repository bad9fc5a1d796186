"""Episodes on the page of `tandemrl play`, of an environment and of a program."""

from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the play extra")
from starlette.testclient import TestClient

from helpers import EOS, IDS, agent_tokenizer, prepared, qwen3, small_qwen3
from small_world import CALLS, Talk
from tandemrl.apps.play.app import application, draft_of
from tandemrl.apps.play.episodes import EpisodeDuo
from tandemrl.apps.play.problems import Problems
from tandemrl.config import SelectionConfig, load
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.episodes import make_episode_runner
from tandemrl.rollout.gateway.source import openai_agent
from tandemrl.rollout.torch_engine import TorchEngine

LIMITS = ["rollout.max_tokens=40", "rollout.turn_tokens=8", "rollout.observation_tokens=60", "rollout.keep_turns=true"]
ROWS = [Row("r0", ({"role": "system", "content": "cde"}, {"role": "user", "content": "ab one"}), "own", "ab", {})]


async def talk(row: Row, client: Any) -> float:
    """What ``Talk`` does, as a program."""
    messages, heard = [*row.messages], 0
    for _ in range(3):
        whole = {"skip_special_tokens": False}
        answer = await client.chat.completions.create(model="any", messages=messages, extra_body=whole)
        content = answer.choices[0].message.content
        heard += len(content.strip())
        messages += [{"role": "assistant", "content": content}]
        messages += [{"role": "user", "content": f"{len(content.strip())} {row.ground_truth}"}]
    return heard % 5 / 5


def test_an_episode_is_shown_by_author_with_what_was_said_between() -> None:
    """The same of an environment and of a program that does what it does."""
    words, shown = agent_tokenizer(CALLS), []
    senior, junior = (prepared(model(vocabulary=len(words))) for model in (qwen3, small_qwen3))
    for acted_in in (Talk(), openai_agent(talk, scores=True)):
        config = load(None, LIMITS)
        runner = make_episode_runner(config, words, environment=acted_in, eos_token_ids=[IDS[EOS]])
        assert runner is not None
        problems = Problems(config, ROWS, acted_in)
        how: dict[str, Any] = {"runner": runner, "config": config, "rows": problems.rows, "longest": 256}
        duo = EpisodeDuo(TorchEngine(senior, junior, words), junior, words, **how)
        client = TestClient(application(duo, problems, about={}), base_url="http://127.0.0.1")
        begun = client.post("/begin", json={}).json()
        assert (begun["problems"], "turn" in begun["strategies"]) == (["ab one"], True)
        draft: dict[str, Any] = {"prompt": "ab one", "seed": 3, "selection": {"strategy": "turn"}}
        tokens, stop = list[dict[str, Any]](), None
        while stop is None:
            so_far = {"tokens": [each["id"] for each in tokens], "authors": [each["author"] for each in tokens]}
            piece = client.post("/write", json=draft | so_far | {"count": 7}).json()
            tokens, stop = tokens + piece["tokens"], piece["stop"]
            verdict = client.post("/grade", json=draft | so_far).json()["verdict"]
            assert verdict is None  # it is not over
        so_far = {"tokens": [each["id"] for each in tokens], "authors": [each["author"] for each in tokens]}
        _, one = duo._episode(draft_of(draft | so_far, SelectionConfig(), turns=True))
        assert (so_far["tokens"], so_far["authors"]) == (one.tokens.tolist(), one.author.tolist())
        spans = [author for i, author in enumerate(so_far["authors"]) if so_far["authors"][:i][-1:] != [author]]
        assert ([author < 0 for author in spans], {*spans}) == ([False, True, False, True, False], {-1, 0, 1})
        assert "ab" in "".join(each["text"] for each in tokens if each["author"] == -1)
        verdict = client.post("/grade", json=draft | so_far).json()["verdict"]
        assert verdict["correct"] == (acted_in.score(ROWS[0], one.transcript) == 1)
        shown.append((tokens, stop))
        assert "inserted" in client.post("/say", json=draft | {"text": "a"}).json()["error"]
        other = client.post("/write", json=draft | so_far | {"seed": 4, "count": 1})
        assert (other.status_code, "anew" in other.json()["error"]) == (400, True)
    assert shown[0] == shown[1]
