"""How often the junior would have drawn the senior's token, against the draws made one by one."""

import numpy as np
import pytest
import torch

from helpers import (
    VOCABULARY,
    prepared,
    qwen3,
    raced_token,
    reference_distribution,
    reference_logits,
    sampling_key,
    tokenizer,
)
from helpers import prompts as some_prompts
from tandemrl import evals
from tandemrl.data.rows import Prompt, Row
from tandemrl.evals import protocol, reading
from tandemrl.evals.protocol import Profile
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.torch_engine import TorchEngine

PROMPTS = [Prompt(Row(f"p/{i}", (), "p", "", {}), ids) for i, ids in enumerate(some_prompts(4))]


def written(senior, sampling):
    engine = TorchEngine(prepared(senior), None, tokenizer())
    arms, profile = protocol.strategies("legibility", tokenizer()), Profile(sampling)
    return evals.generate_samples(
        arms, engine=engine, tokenizer=tokenizer(), prompts=PROMPTS, profile=profile, samples=2, seed=3
    )


def nearly(model, scale=0.02):
    """With noise on every weight: it draws the same tokens now and then."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator)
    return model


def by_hand(junior, sample, sampling, vocabulary=None):
    """One draw at a time, from the full logits of an untouched model and the published generator."""
    text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
    prompt = PROMPTS[sample.problem].tokens
    same = []
    for i, logits in enumerate(reference_logits(junior, prompt, text)[:, :vocabulary]):
        if sampling.temperature == 0:
            token = int(np.argmax(logits))
        else:
            token = raced_token(reference_distribution(logits, sampling, (), ()), sampling_key(sample.key, i))
        same.append(token == text[i])
    return float(np.mean(same)) if same else None


@pytest.mark.parametrize(
    ("settings", "vocabulary"),
    [
        ({}, None),
        ({}, VOCABULARY - 40),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, None),
        ({"temperature": 1.3, "min_p": 0.1}, None),
        ({"temperature": 0.0}, None),
    ],
)
def test_acceptance_is_the_share_of_draws_that_the_junior_makes_too(settings, vocabulary, monkeypatch):
    monkeypatch.setattr(reading, "LOGITS_PER_CHUNK", 2 * 7 * VOCABULARY)
    sampling = Sampling(max_tokens=24, **settings)
    senior, junior = qwen3(0), nearly(qwen3(0))
    samples = written(senior, sampling)
    read = reading.read_texts(samples, PROMPTS, [prepared(junior)], reading.by_junior(sampling, vocabulary))
    wanted = [by_hand(junior, sample, sampling, vocabulary) for sample in samples]
    assert [sample.acceptance for sample in read] == wanted
    assert 0 < np.mean(wanted) < 1
    without = reading.read_texts(samples, PROMPTS, [prepared(junior)], reading.by_junior())
    assert [sample.cross_entropy for sample in without] == [sample.cross_entropy for sample in read]
    assert all(sample.acceptance is None for sample in without)
