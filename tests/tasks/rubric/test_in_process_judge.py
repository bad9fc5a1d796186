"""An engine in this process as a judge, and the judge that a config asks for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fake_judge import FakeJudge
from helpers import qwen3, tokenizer
from tandemrl.config import Config, JudgeConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import prepare
from tandemrl.rollout.engine import Completion, Request
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.tasks.rubric.in_process import EngineJudge, make_judge
from tandemrl.tasks.rubric.judge import HttpJudge, JudgeError, Messages

CONFIG = JudgeConfig(max_tokens=12, temperature=0.0, retry_temperature=1.0)
PROMPTS: list[Messages] = [[{"role": "user", "content": text}] for text in ("abc", "de", "abc", "fgh ab")]


def test_a_torch_engine_as_the_judge_gives_the_same_replies_in_any_batch() -> None:
    judge = EngineJudge(TorchEngine(prepare(qwen3()), None, tokenizer(), max_rows=2), tokenizer(), CONFIG)
    replies = []
    for retries in (0, 1, 2):
        judge.config = replace(CONFIG, retries=retries)
        replies.append(judge.ask(PROMPTS, lambda _: False))
        assert replies[-1] == [judge.ask([prompt], lambda _: False)[0] for prompt in PROMPTS]
        assert replies[-1][0] == replies[-1][2]
    assert judge.ask(PROMPTS) == replies[0]
    assert replies[1] != replies[2]
    others = judge.ask(PROMPTS, lambda reply: reply != replies[0][1])
    assert [a == b for a, b in zip(others, replies[0], strict=True)] == [b != replies[0][1] for b in replies[0]]


def test_prompts_that_do_not_fit_and_aborted_replies_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = EngineJudge(TorchEngine(prepare(qwen3(context=16)), None, tokenizer()), tokenizer(), CONFIG)
    with pytest.raises(JudgeError, match=r"exceed the context of 16.*judge\.max_tokens"):
        judge.ask([[{"role": "user", "content": "abcdefgh"}]])
    generate = judge.engine.generate

    def aborted(requests: Sequence[Request]) -> list[list[Completion]]:
        return [[replace(one, stop_reason="abort") for one in each] for each in generate(requests)]

    monkeypatch.setattr(judge.engine, "generate", aborted)
    with pytest.raises(JudgeError, match="aborted"):
        judge.ask([[{"role": "user", "content": "a"}]])


def test_a_config_asks_for_a_judge_over_http_in_this_process_or_none(tiny_pair: Path) -> None:
    with FakeJudge(lambda prompt, _: "True") as fake:
        judge = make_judge(Config(judge=JudgeConfig(url=fake.url)))
        assert isinstance(judge, HttpJudge)
        assert judge.ask(PROMPTS) == ["True"] * 4
    local = make_judge(Config(judge=JudgeConfig(model=str(tiny_pair / "senior"), max_tokens=4)))
    assert isinstance(local, EngineJudge)
    assert local.model == str(tiny_pair / "senior")
    assert len(local.ask(PROMPTS)) == 4
    with pytest.raises(ModelError, match="nowhere"):
        make_judge(Config(judge=JudgeConfig(model="./nowhere")))
