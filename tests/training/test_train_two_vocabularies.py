"""Runs with a junior that has a vocabulary of its own: what is trained, what stops them, what they refuse."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from itertools import cycle, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runs import assert_same_run, config, evaluate_phase, evaluate_with, metrics, samples, weights
from tandemrl.config import Config, ConfigError
from tandemrl.data.loading import load_rows
from tandemrl.evals import PHASES, EvalError, Sample
from tandemrl.evals.files import read_samples
from tandemrl.evals.session import Session
from tandemrl.models.loading import load_tokenizer
from tandemrl.rewards.protocol import NO_SCORE
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.words import word_starts
from tandemrl.training.gates import TrainError
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight

KNOBS = ["selection.strategy=before_word", "train.steps=2", "train.save_every=1", "train.eval_every=0"]


def test_a_run_trains_the_senior_and_resumes(tiny_pair: Path, other_junior: Path, tmp_path: Path) -> None:
    def settings(out: str) -> Config:
        more = [f"model.junior={other_junior}", "selection.max_untranslatable=1", "rollout.temperature=1.6", *KNOBS]
        return config(tiny_pair, tmp_path / out, *more)

    out = train(settings("whole"), quiet=True)
    steps, lines = metrics(out), samples(out)
    assert len(steps) == 2
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        assert step["mismatch/mean_abs"] < 1e-5  # so the ratio is 1 before the update
        assert step["ratio"] == pytest.approx(1.0, abs=1e-6)
        assert step["tandem/handovers"] > 2
        own = [line for line in lines if line["step"] == step["step"]]
        lost = [line for line in own if line["stop_reason"] == "untranslatable"]
        assert step["tandem/untranslatable"] == step["reward/unscored"] == len(lost) / len(own)
        assert all(line["reward_parts"] == NO_SCORE.parts for line in lost)
    assert 0 < sum(line["stop_reason"] == "untranslatable" for line in lines) < len(lines) / 2
    assert any(not torch.equal(weights(out, 1)[name], tensor) for name, tensor in weights(out, 2).items())
    known = load_tokenizer(tiny_pair / "senior")
    pieces = dict.fromkeys(known.all_special_ids, b"") | token_bytes(known)
    for line in lines:
        author, tokens = np.array(line["author"]), line["tokens"]
        first = int((author < 0).sum())
        text = b"".join(pieces[token] for token in tokens[first:])
        ends = np.cumsum([0, *(len(pieces[token]) for token in tokens[first:])])
        changed = np.flatnonzero(np.diff(author[first:])) + 1
        assert {int(ends[i]) for i in changed} <= {*word_starts(text), len(text)}
    again = shutil.copytree(out, tmp_path / "again", ignore=shutil.ignore_patterns("step_2"))
    train(settings("again"), quiet=True, resume=str(again / "checkpoints" / "step_1"))
    assert_same_run(out, again, 2)


def test_too_many_untranslatable_rollouts_stop_a_run(tiny_pair: Path, other_junior: Path, tmp_path: Path) -> None:
    settings = config(tiny_pair, tmp_path / "out", f"model.junior={other_junior}", "rollout.temperature=3", *KNOBS)
    with pytest.raises(TrainError, match=r"of 16 texts are untranslatable, .*max_untranslatable=0\.01.*--junior J"):
        train(settings, quiet=True)


def test_what_needs_one_vocabulary_is_refused(tiny_pair: Path, other_junior: Path, tmp_path: Path) -> None:
    def checked(*more: str) -> str:
        settings = config(tiny_pair, tmp_path, f"model.junior={other_junior}", KNOBS[0], *more)
        return Preflight(settings).vocabularies()

    for more, refusal in {
        "selection.strategy=word": r"selection\.strategy=word: must be before_word, since .* two vocabularies",
        "loss.junior_kl_coef=0.1": r"loss\.junior_kl_coef=0\.1: must be 0, since",
        "loss.junior_weight=0.5": r"loss\.junior_weight=0\.5: must be 0, since",
        "rollout.draft_tokens=2": r"rollout\.draft_tokens=2: must be 0",
    }.items():
        with pytest.raises(ConfigError, match=refusal):
            checked(more)
    assert "the junior has 290 of its own" in checked()
    settings = config(tiny_pair, tmp_path, f"model.junior={other_junior}", KNOBS[0])
    with pytest.raises(ConfigError, match=r"pass none, and use selection\.strategy=before_word"):
        Preflight(settings, strategy=lambda step: None).vocabularies()  # type: ignore[arg-type,return-value]  # never called
    alone = config(tiny_pair, tmp_path, f"model.junior={other_junior}", "selection.strategy=solo")
    assert not Preflight(alone).prompts[0][0].junior  # the senior writes alone


def test_the_junior_s_context_is_counted_in_its_own_tokens(tiny_pair: Path, other_junior: Path, tmp_path: Path) -> None:
    short = shutil.copytree(other_junior, tmp_path / "short")
    settings = config(tiny_pair, tmp_path, f"model.junior={short}", KNOBS[0])
    prompts = Preflight(settings).prompts[0]
    longest = max(len(prompt.junior) for prompt in prompts)
    assert longest > max(len(prompt.tokens) for prompt in prompts)
    stored = json.loads((short / "config.json").read_text())
    for context in (longest + settings.rollout.max_tokens, longest + settings.rollout.max_tokens - 1):
        (short / "config.json").write_text(json.dumps(stored | {"max_position_embeddings": context}))
        if context >= longest + settings.rollout.max_tokens:
            Preflight(settings).train_data()
            continue
        with pytest.raises(ConfigError, match=rf"its {longest} tokens and .* the context of model\.junior, {context} "):
            Preflight(settings).train_data()


def check_read_by_the_junior(samples: list[Sample], folder: Path) -> None:
    """Every text costs the junior what transformers says, with the junior's own tokens and chat template."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = load_rows(["synthetic:plain:heldout:6"])
    for sample in samples[::3]:
        messages = rows[sample.problem].messages
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        tokens = torch.tensor([*prompt, *tokenizer.encode(sample.text, add_special_tokens=False)])
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)
        own = -logprobs[:-1].gather(1, tokens[1:, None])[len(prompt) - 1 :]
        assert sample.cross_entropy == pytest.approx(float(own.mean()), rel=1e-4)
        assert sample.cross_entropy_per_byte == pytest.approx(float(own.sum()) / len(sample.text.encode()), rel=1e-4)
        assert sample.acceptance is None


def check_handed_over(written: Sequence[Sample], pair: Path) -> None:
    """Between two words the author changes exactly where there is a blank line."""
    pieces = token_bytes(load_tokenizer(pair / "senior"))
    assert {sample.arm for sample in written} == {"senior_first", "junior_first"}
    changes = 0
    for sample in written:
        runs = [(who, int(count)) for who, count in re.findall(r"([SJ])(\d+)", sample.author)]
        order = "SJ" if sample.arm == "senior_first" else "JS"
        assert [who for who, _ in runs] == [*islice(cycle(order), len(runs))]
        at, written_by = 0, list[bytes]()
        for _, count in runs:
            written_by.append(b"".join(pieces.get(token, b"") for token in sample.tokens[at : at + count]))
            at += count
        for number, span in enumerate(written_by):
            words = [span[i:j] for i, j in pairwise([*word_starts(span, b"a" * bool(number)), len(span)])]
            assert [b"\n\n" in word for word in words[:-1]] == [False] * (len(words) - 1)
            assert number == len(written_by) - 1 or b"\n\n" in words[-1]
        changes += len(runs) - 1
    assert changes > len(written)


def test_tandem_is_evaluated_and_what_reads_tokens_is_refused(tiny_pair, other_junior, tmp_path):
    both = {"data": ["synthetic:plain:heldout:6"], "model": tiny_pair / "senior", "junior": other_junior}
    small = config(tiny_pair, tmp_path, "eval.samples=2", "eval.k=[1]", "selection.max_untranslatable=1")
    found = evaluate_with(**both, out=tmp_path / "all", eval=small.eval, selection=small.selection)
    assert set(found) == {"pass-at-k", "tandem", "handoff", "legibility", "junior"}
    macro = found["tandem"]["metrics"]["macro"]
    assert 0.2 < macro["senior_share"] < 0.8
    assert macro["rounds"] > 3
    lost = [s for s in read_samples(tmp_path / "all" / "tandem.samples.jsonl") if s.stop_reason == "untranslatable"]
    assert macro["untranslatable"] == len(lost)
    assert macro["unscored"] == 0
    assert not any(s.correct or s.score is not None for s in lost)
    assert found["tandem"]["config"]["strategy"] == small.selection.strategy
    check_read_by_the_junior(read_samples(tmp_path / "all" / "legibility.samples.jsonl"), other_junior)
    check_handed_over(read_samples(tmp_path / "all" / "handoff.samples.jsonl"), tiny_pair)
    with pytest.raises(EvalError, match=r"phase drift needs one vocabulary, .*; use tandem, or a junior of"):
        evaluate_phase("drift", **both, out=tmp_path / "drift", eval=small.eval)


def test_vllm_evaluates_the_senior_alone(tiny_pair, other_junior, tmp_path, monkeypatch):
    given = config(tiny_pair, tmp_path, f"model.junior={other_junior}", "rollout.engine=vllm")
    alone, both = (PHASES[name] for name in ("pass-at-k", "tandem"))
    session = Session(given, tiny_pair / "senior", [alone, both])
    assert "rollout.engine=vllm: must be torch, since" in (session.refusal(both) or "")
    monkeypatch.setattr("tandemrl.evals.session.make_engine", lambda rollout, senior, junior, *rest, **named: junior)
    assert session.engine(alone) is None  # which has no junior
