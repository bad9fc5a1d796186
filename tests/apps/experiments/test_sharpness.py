"""Sampling entropy against distributions that transformers gives, and its match against a temperature that is known."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandemrl import evals
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.sharpness import FITTED, match_entropy, temper
from tandemrl.config import Config, load
from tandemrl.data.rows import Row
from tandemrl.evals.measures import is_headline
from tandemrl.evals.reading import by_itself
from tandemrl.evals.session import Session
from tandemrl.rollout.engine import Sampling


def settings(*overrides: str) -> Config:
    of_eval = ("eval.profile=custom", "eval.max_tokens=24", "eval.bootstrap=0", "eval.k=[1]", "eval.samples=1")
    return load(None, ["data.eval=[synthetic:plain:heldout:8]", "model.device=cpu", *of_eval, *overrides])


def logits_of(model: Path, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(model, dtype="float32")(torch.tensor([tokens])).logits[0]


def test_the_entropy_is_that_of_what_was_drawn_from(tiny_pair: Path, tmp_path: Path) -> None:
    senior, config = tiny_pair / "senior", settings("eval.temperature=0.7", "eval.top_k=5")
    found = evals.evaluate(config, model=senior, out=tmp_path, phases=["entropy"], limit=3)
    samples = evals.read_samples(tmp_path / "entropy.samples.jsonl")
    prompts, _ = Session(config, senior, [evals.PHASES["entropy"]]).prompts
    for sample in samples:
        prompt = [*prompts[sample.problem].tokens]
        text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
        best = logits_of(senior, prompt + text)[len(prompt) - 1 : -1].topk(5).values / 0.7
        by_hand = torch.distributions.Categorical(logits=best).entropy().mean().item()
        assert sample.entropy == pytest.approx(by_hand, abs=1e-4)
    assert isinstance(prompts[0].row, Row)
    mean = sum(sample.entropy or 0 for sample in samples) / 3
    assert found["entropy"]["metrics"]["macro"]["entropy"] == pytest.approx(mean)
    assert is_headline("entropy")


def test_a_token_that_rounding_has_truncated_is_read() -> None:
    logits, drawn = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1])
    found = by_itself(Sampling(temperature=0.0))([logits], drawn, drawn)
    assert found["entropy"].item() == 0
    assert found["cross_entropy"].item() == pytest.approx(math.log(1 + math.e + 1 / math.e))


def test_a_model_is_brought_to_the_entropy_of_another_one(tiny_pair: Path, tmp_path: Path) -> None:
    """The other one is the same model at a known temperature, which is found again."""
    senior, target = tiny_pair / "senior", tmp_path / "target"
    temper(senior, 1.4, target)
    tokens = [3, 1, 4, 1, 5]
    assert torch.allclose(logits_of(target, tokens), logits_of(senior, tokens) / 1.4, atol=1e-4)
    out = match_entropy(settings(), senior, target, tmp_path / "run" / "matched")
    fitted = json.loads((out / FITTED).read_text())
    assert fitted["temperature"] == pytest.approx(1.4, abs=0.02)
    assert fitted["entropy"] == pytest.approx(fitted["target_entropy"], rel=0.03)
    assert torch.allclose(logits_of(out, tokens), logits_of(senior, tokens) / fitted["temperature"], atol=1e-4)
    temper(senior, 100.0, tmp_path / "noise")
    with pytest.raises(ExperimentError, match=r"at no temperature between 0\.25 and 4 .*; leave out the arm"):
        match_entropy(replace(settings()), senior, tmp_path / "noise", tmp_path / "other")
