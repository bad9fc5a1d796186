"""When a run says that the senior has not learned to stop."""

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from runs import config, metrics, samples
from tandemrl.evals import EvalResult
from tandemrl.training import evaluation
from tandemrl.training.diagnostics import stopping_warning
from tandemrl.training.loop import train


@pytest.mark.parametrize(
    ("solo", "rollouts", "counts", "parts"),
    [
        (0.35, 0.01, (512, 256), True),
        (0.09, 0.0, (512, 256), False),  # within the margin
        (0.35, 0.30, (512, 256), False),
        (0.01, 0.35, (512, 256), False),  # the other way round
        (0.25, 0.0, (8, 16), False),  # 2 of 8: chance
        (0.875, 0.0, (8, 16), True),
        (1.0, 0.0, (1, 1), False),
    ],
)
def test_the_shares_part_beyond_the_margin_and_beyond_chance(solo, rollouts, counts, parts):
    values = {"eval/truncation_rate": solo, "response/truncated_at_eval": rollouts, "tandem/senior_frac": 0.5}
    said = stopping_warning(values, *counts)
    assert (said is not None) == parts
    assert stopping_warning(values | {"tandem/senior_frac": 1.0}, *counts) is None


def test_a_run_whose_senior_alone_does_not_stop_says_so_once(tiny_pair, tmp_path, monkeypatch):
    original = evaluation.evaluate_solo

    def never_ending(*arguments: Any) -> EvalResult:
        found = original(*arguments)
        return replace(found, metrics=found.metrics | {"macro": found.metrics["macro"] | {"truncation_rate": 1.0}})

    monkeypatch.setattr(evaluation, "evaluate_solo", never_ending)
    screen = io.StringIO()
    settings = ["eval.train_samples=8", "eval.train_problems=16", "train.eval_every=1", "train.steps=2"]
    train(config(tiny_pair, tmp_path, *settings), console=Console(file=screen, width=200))
    assert screen.getvalue().count("warning: the limit of tokens cuts off 100% of the held-out texts") == 1
    for line in metrics(tmp_path):
        written = [one for one in samples(tmp_path) if one["step"] == line["step"]]
        lengths = [sum(author >= 0 for author in one["author"]) for one in written]
        cut = [one["stop_reason"] == "length" or n > 64 for one, n in zip(written, lengths, strict=True)]
        assert line["response/truncated_at_eval"] == sum(cut) / len(cut) < 0.9
