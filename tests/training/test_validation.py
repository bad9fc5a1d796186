"""The held-out evaluation of a run: who writes it, and what it chooses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runs import config, metrics
from tandemrl.evals import EvalResult
from tandemrl.rollout.engine import Completion, Passes
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training import evaluation, loop
from tandemrl.training.build import build
from tandemrl.training.checkpoint import restore, save
from tandemrl.training.state import Progress, Run
from tandemrl.types import Author


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_validation_is_written_by_the_senior_alone(asynchronous, tiny_pair, tmp_path, monkeypatch):
    """In a run whose rollouts are written in tandem, and by the weights that the step has made. A step counts the
    passes of its own rollouts, and those of no evaluation."""
    generate = TorchEngine.generate
    written: dict[int, list[list[Completion]]] = {48: [], 64: []}  # rollouts, held-out problems: by their most tokens

    def recorded(self: TorchEngine, requests: Any, **settings: Any) -> list[list[Completion]]:
        groups = generate(self, requests, **settings)
        most, completions = requests[0].sampling.max_tokens, [c for group in groups for c in group]
        written[most].append(completions)
        own = sum(len(completion.tokens) for completion in completions)
        self.passes = Passes(1, 1, 1, 1, 0) if most == 64 else Passes(own, 2 * own, own, 4, 3)
        return groups

    monkeypatch.setattr(TorchEngine, "generate", recorded)
    knobs = ("train.steps=2", "train.eval_every=1", "eval.train_problems=2", f"train.async_steps={asynchronous}")
    out = loop.train(config(tiny_pair, tmp_path, *knobs), quiet=True)
    assert [set(c.author.tolist()) for call in written[64] for c in call] == [{Author.SENIOR}] * 8
    assert {int(author) for call in written[48] for c in call for author in c.author} == {Author.JUNIOR, Author.SENIOR}
    assert [{c.policy_version for c in call} for call in written[64]] == [{1}, {2}]
    for line, call in zip(metrics(out), written[64], strict=True):
        assert line["eval/length"] == sum(len(c.tokens) for c in call) / len(call)
        assert line["passes/senior"] == 2 * line["passes/junior"] == 2 * line["tokens/response"]
        assert (line["draft/acceptance"], line["draft/tokens_per_senior_pass"]) == (0.75, 0.5)
    assert len({line["passes/senior"] for line in metrics(out)}) == 2  # two steps may write equally many tokens


def evaluated(run: Run, monkeypatch: pytest.MonkeyPatch, score: float, step: int = 20) -> torch.Tensor:
    """The weights of the run after a change, evaluated with this score."""
    embedding = run.models.policy.get_input_embeddings().weight
    with torch.no_grad():
        embedding.mul_(1.5)
    macro = {"pass@1": 1 - score, "pass@2": score, "reward": 0.5, "length": 1.0, "truncation_rate": 0.0}
    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "evaluate_solo", lambda *_: EvalResult({"macro": macro}, []))
        assert evaluation.evaluate(run, step)["eval/pass@2"] == score
    return embedding.detach().clone()


def test_best_is_the_export_with_the_highest_score_also_after_a_resume(tiny_pair, tmp_path, monkeypatch):
    """By pass@2, the largest k that two samples allow; of equal ones the last."""
    settings = config(tiny_pair, tmp_path)

    def best() -> torch.Tensor:
        return load_file(tmp_path / "hf" / "best" / "model.safetensors")["model.embed_tokens.weight"]

    run = build(settings)
    restore(run, "auto")
    sync_weights(run.models.policy, run.models.engine, version=0)
    *_, third, last = (evaluated(run, monkeypatch, score) for score in (0.25, 0.75, 0.5, 0.75))
    assert not torch.equal(third, last)
    assert torch.equal(best(), last)
    card = (tmp_path / "hf" / "best" / "README.md").read_text()
    assert "| hf/best so far | `step 20, by held-out pass@2 0.7500` |" in card
    assert "| steps | `20 of " in card
    run.progress.step = 1
    save(run)

    resumed = build(settings)
    restore(resumed, "auto")
    evaluated(resumed, monkeypatch, 0.5)
    assert torch.equal(best(), last)
    highest = evaluated(resumed, monkeypatch, 1.0)
    assert torch.equal(best(), highest)


R, W = True, False
CHOICES: dict[str, tuple[list[list[tuple[bool, float]]], str | None, int, str]] = {
    "0 or 1": ([[(R, 1), (W, 0)], [(R, 1), (R, 1)], [(W, 0), (R, 1)]], None, 1, "pass@1"),
    "equal: the later": ([[(R, 1), (W, 0)], [(W, 0), (R, 1)], [(W, 0), (W, 0)]], None, 1, "pass@1"),
    "-1 or 1": ([[(R, 1), (W, -1)], [(W, -1), (W, -1)]], None, 0, "pass@1"),
    "graded below 1": ([[(W, 0.2), (W, 0.3)], [(W, 0.2), (W, 0.9)], [(W, 0.1), (W, 0.4)]], None, 1, "reward"),
    "graded from 1 on": ([[(R, 1), (R, 3)], [(R, 2.5), (R, 2)], [(R, 1), (R, 1)]], None, 1, "reward"),
    "0 or 0.5": ([[(W, 0), (W, 0)], [(W, 0), (W, 0.5)], [(W, 0), (W, 0)]], None, 1, "reward"),
    "a bonus": ([[(R, 1.5), (R, 1)], [(R, 1), (R, 1)], [(R, 1), (W, 0)]], None, 0, "reward"),
    "equal in each, below 1": ([[(W, 0.2)] * 2, [(W, 0.9)] * 2, [(W, 0.3)] * 2], None, 1, "reward"),
    "equal in each, from 1 on": ([[(R, 2)] * 2, [(R, 9)] * 2, [(R, 3)] * 2], None, 1, "reward"),
    "seen late": ([[(R, 1), (W, 0)], [(R, 1), (R, 1)], [(W, 0.1), (W, 0.3)], [(R, 1), (R, 1)]], None, 3, "reward"),
    "once seen": ([[(W, 0.1), (W, 0.3)], [(W, 0), (W, 0)]], None, 0, "reward"),
    "as told, pass@k": ([[(W, 0.2), (R, 1)], [(W, 0.9), (W, 0.8)]], "pass@k", 0, "pass@1"),
    "as told, reward": ([[(R, 1), (R, 1)], [(R, 1), (W, 0)]], "reward", 0, "reward"),
}


@pytest.fixture(scope="module")
def built(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("built")
    run = build(
        config(
            tiny_pair, out, "eval.train_samples=1", "eval.train_problems=2", "eval.max_tokens=8", "eval.profile=custom"
        )
    )
    sync_weights(run.models.policy, run.models.engine, version=0)
    return run


@pytest.mark.parametrize("name", CHOICES)
def test_best_is_chosen_by_what_the_rewards_allow(name: str, built: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two problems, a sample each, at every evaluation: is it correct, and its reward."""
    evaluations, told, step, by = CHOICES[name]
    setup, settings = built.setup, built.setup.config
    settings = replace(settings, train=replace(settings.train, select_by=told))
    run = Run(replace(setup, config=settings), built.models, Progress(built.progress.sampler, 0.0))
    monkeypatch.setattr(evaluation.checkpoint, "export", lambda *_: None)
    grade = evaluation.evals.grade
    for number, values in enumerate(evaluations):

        def graded(samples: Any, *_: Any, values: Any = values) -> Any:
            return [
                each._replace(correct=correct, score=float(score))
                for each, (correct, score) in zip(grade(samples, *_), values, strict=True)
            ]

        monkeypatch.setattr(evaluation.evals, "grade", graded)
        evaluation.evaluate(run, number)
    assert run.progress.best is not None
    assert (run.progress.best.step, run.progress.best.by) == (step, by)


def test_the_base_point_is_in_the_record_and_can_be_best(tiny_pair, tmp_path, capsys):
    """With a learning rate that ruins the model; the run says what chose its best, and a resume changes nothing."""
    knobs = ["train.eval_first=true", "train.steps=2", "train.eval_every=1", "train.save_every=1"]
    settings = config(tiny_pair, tmp_path / "a", *knobs, "train.lr=1.0", "eval.train_problems=8")
    out = loop.train(settings)
    first, *steps = metrics(out)
    assert (first["step"], [line["step"] for line in steps]) == (0, [1, 2])
    assert {"eval/pass@1", "eval/reward", "time/eval"} <= first.keys()
    assert not {"reward/mean", "time/step"} & first.keys()
    assert first["eval/pass@2"] > max(line["eval/pass@2"] for line in steps)
    best = load_file(out / "hf" / "best" / "model.safetensors")
    base = load_file(tiny_pair / "senior" / "model.safetensors")
    assert all(torch.equal(best[name], base[name]) for name in best)
    said = f"step 0, by held-out pass@2 {first['eval/pass@2']:.4f}"
    assert f"hf/best: {said}" in capsys.readouterr().out
    assert said in (out / "hf" / "step_2" / "README.md").read_text()
    assert (out / "eval_texts" / "step_0.jsonl").is_file()
    more = config(tiny_pair, tmp_path / "a", *knobs, "train.lr=1.0", "eval.train_problems=8", "train.save_every=2")
    loop.train(more, resume=str(out / "checkpoints" / "step_1"), quiet=True)
    assert [line["step"] for line in metrics(out)] == [0, 1, 2]
    assert "# a, step 0" in (out / "hf" / "best" / "README.md").read_text()
