"""A pool of juniors: every rollout is that of an engine with its junior alone, and which one depends on its key."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Completion, EngineError, Request, Responder, Sampling
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.junior_pool import JuniorPool
from tandemrl.rollout.sync import fingerprint
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import bernoulli
from tandemrl.selection.draws import request_key


@pytest.fixture(scope="module")
def juniors(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """That of the pair, and another one with other weights."""
    other = tmp_path_factory.mktemp("other")
    model = AutoModelForCausalLM.from_pretrained(tiny_pair / "junior")
    with torch.no_grad():
        model.model.norm.weight *= 0.3
    model.save_pretrained(other)
    load_tokenizer(tiny_pair / "junior").save_pretrained(other)
    return [str(tiny_pair / "junior"), str(other)]


def pool(senior: str, junior: str | None, juniors: list[str], **given: Any) -> JuniorPool:
    where = f"{JuniorPool.__module__}:{JuniorPool.__name__}"
    config = RolloutConfig(engine=where, engine_parameters={"juniors": juniors}, **given)
    first = None if junior is None else ModelSource(junior, partial(load_model, junior))
    engine = make_engine(config, ModelSource(senior, partial(load_model, senior)), first, load_tokenizer(senior))
    assert isinstance(engine, JuniorPool)
    return engine


def written(completions: list[list[Completion]]) -> list[list[tuple[list[int], list[int]]]]:
    return [[(each.tokens.tolist(), each.author.tolist()) for each in row] for row in completions]


def test_each_rollout_has_one_of_the_juniors(tiny_pair: Path, juniors: list[str]) -> None:
    senior, tokenizer = str(tiny_pair / "senior"), load_tokenizer(tiny_pair / "senior")
    prompts = [tokenizer.encode(text) for text in ("Ann has 3 apples.", "Bob has 12 pears and 4 plums.")]
    requests = [
        Request(prompt, tuple(request_key(0, 1, i, n) for n in range(16)), Sampling(max_tokens=12), bernoulli(0.5))
        for i, prompt in enumerate(prompts)
    ]
    engine = pool(senior, juniors[0], juniors[1:])
    found = written(engine.generate(requests))
    alone = [
        written(TorchEngine(load_model(senior), load_model(each), tokenizer).generate(requests)) for each in juniors
    ]
    of = [[[row[i][j] for row in alone].index(found[i][j]) for j in range(16)] for i in range(2)]
    differ = [alone[0][i][j] != alone[1][i][j] for i in range(2) for j in range(16)]
    assert sum(differ) > 20
    assert 4 < sum(of[0] + of[1]) < 28
    some = [Request(requests[1].prompt, requests[1].keys[3:9], requests[1].sampling, bernoulli(0.5))]
    assert written(engine.generate(some)) == [found[1][3:9]]  # whatever else is written
    assert engine.passes.tokens == sum(len(tokens) for tokens, _ in found[1][3:9])

    whole = load_model(senior)
    weights = {name: each * 1.5 for name, each in whole.named_parameters()}
    engine.load_weights(weights.items(), 7)
    assert engine.fingerprint() == fingerprint(weights.items())
    again = engine.generate(requests)
    assert {each.policy_version for row in again for each in row} == {7}
    assert all(len(row) == 16 for row in again)
    assert written(again) != found
    assert engine.fingerprint("junior") != pool(senior, juniors[1], juniors[:1]).fingerprint("junior")
    with pytest.raises(EngineError, match=r"single responses; use rollout\.engine=torch"):
        engine.generate(requests, responder=Mock(spec=Responder))


def test_a_pool_that_cannot_be_is_refused(tiny_pair: Path, juniors: list[str], other_junior: Path) -> None:
    senior = str(tiny_pair / "senior")
    with pytest.raises(ConfigError, match=r"engine_parameters\.juniors: nothing to draw; name models there"):
        pool(senior, juniors[0], [])
    with pytest.raises(ConfigError, match="nothing to draw"):
        pool(senior, None, juniors)
    with pytest.raises(ConfigError, match="has another vocabulary than the senior; leave it out"):
        pool(senior, juniors[0], [str(other_junior)])
