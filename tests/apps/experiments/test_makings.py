"""What arms are made with: learnt from texts that a model of the pair wrote, and read as it was learnt."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from tandemrl.apps.experiments import makings
from tandemrl.apps.experiments.arm_rewards import verified
from tandemrl.apps.experiments.makings import Making, imitator, juniors, verifier
from tandemrl.apps.experiments.tiny import build_tiny_pair, solo_texts
from tandemrl.apps.experiments.warm_start import WarmStart
from tandemrl.config import load
from tandemrl.data.loading import load_rows
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.tasks.generated.synthetic import uses_jargon


@pytest.fixture
def of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Making:
    monkeypatch.setattr(makings, "PROBLEMS", 128)
    monkeypatch.setattr(makings, "IMITATION", WarmStart(steps=60, lr=1e-3))
    monkeypatch.setattr(makings, "VERIFIER", WarmStart(steps=60, lr=1e-3))
    build_tiny_pair(tmp_path / "pair", pair="jargon")
    config = load(None, [f"model.junior={tmp_path}/pair/junior", "model.device=cpu", "eval.samples=1", "eval.k=[1]"])
    return Making(config, tmp_path, "jargon", 0, 1)


def test_an_imitator_of_the_junior_s_texts_leaves_jargon(of: Making) -> None:
    rows = load_rows(["synthetic:jargon:heldout:64"])
    rates = []
    for model in (of.home / "pair" / "senior", Path(imitator(of))):
        loaded = load_model(model)
        loaded.set_attn_implementation("sdpa")
        rates.append(sum(map(uses_jargon, solo_texts(loaded, load_tokenizer(model), rows, 1))) / 64)
    assert rates[0] > 0.3
    assert rates[1] < 0.5 * rates[0]


def test_a_verifier_tells_right_texts_and_is_read_as_it_was_trained(of: Making) -> None:
    folder = verifier(of)
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), load_tokenizer(folder)
    [row] = load_rows(["synthetic:jargon:heldout:1"])
    texts = [rf"So \boxed{{{row.ground_truth}}}", "nothing"]
    prompt = tokenizer.apply_chat_template([*row.messages], add_generation_prompt=True, return_dict=False)
    for text, score in zip(texts, verified(row, texts, model=folder), strict=True):
        ids = [*prompt, *tokenizer.encode(text), tokenizer.eos_token_id]
        assert score == pytest.approx(model(torch.tensor([ids])).logits[0, -1, 0].sigmoid().item(), abs=1e-5)
    # Of the texts it learnt from, wrong ones get less than right ones.
    monitored = makings._solved(of, "senior", "junior")
    found: dict[bool, list[float]] = {True: [], False: []}
    for lesson, right in monitored:
        found[right].append(model(torch.tensor([lesson.tokens])).logits[0, -1, 0].item())
    assert sum(found[True]) / len(found[True]) > sum(found[False]) / len(found[False]) + 0.5


def test_a_pool_has_the_pair_s_vocabulary(of: Making) -> None:
    own = of.home / "pair" / "junior"
    found = json.loads(juniors(of))
    assert len(found) == 2
    for each in found:
        assert load_tokenizer(each).get_vocab() == load_tokenizer(own).get_vocab()
        assert (Path(each) / "model.safetensors").read_bytes() != (own / "model.safetensors").read_bytes()
