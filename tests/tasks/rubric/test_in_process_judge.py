"""An engine in this process as a judge, and the judge that a config asks for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fake_judge import FakeJudge
from helpers import qwen3, tokenizer
from tandemrl.config import Config, JudgeConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import prepare
from tandemrl.rollout.engine import Completion, EngineInfo, Passes
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.tasks.rubric.in_process import EngineJudge, make_judge
from tandemrl.tasks.rubric.judge import HttpJudge, JudgeError, Messages

CONFIG = JudgeConfig(max_tokens=12, temperature=0.0, retry_temperature=1.0)
PROMPTS: list[Messages] = [[{"role": "user", "content": text}] for text in ("abc", "de", "abc", "fgh ab")]


class Echo:
    """An engine that is nobody's: it writes the prompt's ids backwards."""

    policy_version, vocabulary, has_junior = 0, 1000, False
    context = 10**6
    passes = Passes()
    info = EngineInfo("echo", "float32")

    def __init__(self, stop_reason: str = "eos") -> None:
        self.stop_reason = stop_reason
        self.requests: list = []

    def generate(self, requests, *, progress=None):
        self.requests += requests
        return [[self.complete(request, key) for key in request.keys] for request in requests]

    def _never(self, *args):
        raise AssertionError("a judge's weights are its own")

    abort = load_weights = fingerprint = close = _never

    def complete(self, request, key):
        tokens = np.array(request.prompt[::-1])
        return Completion(key, tokens, np.ones(len(tokens)), np.zeros(len(tokens), np.float32), self.stop_reason)


def test_any_engine_can_be_the_judge() -> None:
    engine = Echo()
    judge = EngineJudge(engine, tokenizer(), replace(CONFIG, temperature=0.0, retry_temperature=0.3, max_tokens=9))
    assert judge.ask([[{"role": "user", "content": "abc"}]]) == ["!cba"]  # the template ends a prompt with "!"
    judge.ask(PROMPTS, attempt=1)
    assert judge.model == "echo"
    assert [request.sampling.temperature for request in engine.requests] == [0.0] + [0.3] * 4
    assert {request.sampling.max_tokens for request in engine.requests} == {9}
    assert {request.strategy.writers for request in engine.requests} == {"senior"}
    keys = [key for request in engine.requests for key in request.keys]
    assert keys[1] == keys[3]  # one prompt, one key, wherever it stands
    assert len(set(keys)) == 4  # and another one per attempt


def test_a_torch_engine_as_the_judge_gives_the_same_replies_in_any_batch() -> None:
    judge = EngineJudge(TorchEngine(prepare(qwen3()), None, tokenizer(), max_rows=2), tokenizer(), CONFIG)
    for attempt in (0, 1, 2):
        together = judge.ask(PROMPTS, attempt=attempt)
        alone = [judge.ask([prompt], attempt=attempt)[0] for prompt in PROMPTS]
        assert together == alone
        assert together[0] == together[2]
    assert judge.ask(PROMPTS, attempt=1) != judge.ask(PROMPTS, attempt=2)


def test_prompts_that_do_not_fit_and_aborted_replies_are_errors() -> None:
    judge = EngineJudge(TorchEngine(prepare(qwen3(context=16)), None, tokenizer()), tokenizer(), CONFIG)
    with pytest.raises(JudgeError, match=r"exceed the context of 16.*judge\.max_tokens"):
        judge.ask([[{"role": "user", "content": "abcdefgh"}]])
    with pytest.raises(JudgeError, match="aborted"):
        EngineJudge(Echo("abort"), tokenizer(), CONFIG).ask(PROMPTS)


def test_a_config_asks_for_a_judge_over_http_in_this_process_or_none(tiny_pair: Path) -> None:
    assert make_judge(Config()) is None
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
