"""The held-out evaluation of a run: who writes it, and what it chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runs import config, metrics
from tandemrl.evals import EvalResult
from tandemrl.rollout.engine import Completion
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training import evaluation, loop
from tandemrl.training.build import build
from tandemrl.training.checkpoint import restore, save
from tandemrl.training.state import Run
from tandemrl.types import Author


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_validation_is_written_by_the_senior_alone(
    asynchronous: int, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run whose rollouts are written in tandem, and by the weights that the step has made."""
    generate = TorchEngine.generate
    written: dict[int, list[list[Completion]]] = {48: [], 64: []}  # rollouts, held-out problems: by their most tokens

    def recorded(self: TorchEngine, requests: Any, **settings: Any) -> list[list[Completion]]:
        groups = generate(self, requests, **settings)
        written[requests[0].sampling.max_tokens].append([c for group in groups for c in group])
        return groups

    monkeypatch.setattr(TorchEngine, "generate", recorded)
    knobs = ("train.steps=2", "train.eval_every=1", "eval.train_problems=2", f"train.async_steps={asynchronous}")
    out = loop.train(config(tiny_pair, tmp_path, *knobs), quiet=True)
    assert [set(c.author.tolist()) for call in written[64] for c in call] == [{Author.SENIOR}] * 8
    assert {int(author) for call in written[48] for c in call for author in c.author} == {Author.JUNIOR, Author.SENIOR}
    assert [{c.policy_version for c in call} for call in written[64]] == [{1}, {2}]
    for line, call in zip(metrics(out), written[64], strict=True):
        assert line["eval/length"] == sum(len(c.tokens) for c in call) / len(call)


def evaluated(run: Run, monkeypatch: pytest.MonkeyPatch, score: float) -> torch.Tensor:
    """The weights of the run after a change, evaluated with this score."""
    embedding = run.models.policy.get_input_embeddings().weight
    with torch.no_grad():
        embedding.mul_(1.5)
    macro = {"pass@1": 1 - score, "pass@2": score, "length": 1.0, "truncation_rate": 0.0}
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "evaluate_solo", lambda *_: EvalResult({"macro": macro}, []))
        assert evaluation.evaluate(run, 20)["eval/pass@2"] == score
    return embedding.detach().clone()


def test_best_is_the_export_with_the_highest_score_also_after_a_resume(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pass@2, the largest k that two samples allow; of equal ones the first."""
    settings = config(tiny_pair, tmp_path)

    def best() -> torch.Tensor:
        return load_file(tmp_path / "hf" / "best" / "model.safetensors")["model.embed_tokens.weight"]

    run = build(settings)
    records = restore(run, "auto")
    sync_weights(run.models.policy, run.models.engine, version=0)
    first, second, *_ = (evaluated(run, monkeypatch, score) for score in (0.25, 0.75, 0.5, 0.75))
    assert not torch.equal(first, second)
    assert torch.equal(best(), second)
    card = (tmp_path / "hf" / "best" / "README.md").read_text()
    assert "| best held-out score so far | `0.7500` |" in card
    assert "| steps | `20 of " in card
    run.progress.step = 1
    save(run, records)

    resumed = build(settings)
    restore(resumed, "auto")
    evaluated(resumed, monkeypatch, 0.5)
    assert torch.equal(best(), second)
    highest = evaluated(resumed, monkeypatch, 1.0)
    assert torch.equal(best(), highest)
