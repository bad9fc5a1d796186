"""Runs with ``before_word``: both log-probs of every handover agree with the engine's, also with what else trains."""

import json
from pathlib import Path

import pytest

from runs import config, metrics
from tandemrl.training.loop import train

MORE = [
    "train.async_steps=1",
    "train.mini_batch_prompts=2",
    "loss.kl_coef=0.1",
    "loss.kl_in_reward=true",
    "loss.junior_kl_coef=0.1",
    "loss.junior_weight=0.5",
    "loss.importance=sequence",
    "rollout.top_k=20",
    "rollout.allow_truncated=true",
]


@pytest.mark.parametrize(
    "more", [["loss.recipe=gspo"], MORE, ["loss.word_ends=false"]], ids=["gspo", "more", "without"]
)
def test_a_run_trains_the_ends_of_words(more: list[str], tiny_pair: Path, tmp_path: Path) -> None:
    knobs = ["selection.strategy=before_word", "train.steps=2", "train.eval_every=0", "data.eval=[]", *more]
    out = train(config(tiny_pair, tmp_path, *knobs), quiet=True)
    steps = metrics(out)
    assert len(steps) == 2
    for step in steps:
        assert step["tandem/handovers"] > 0.5
        assert step.get("mismatch/writer_mean_abs", step["mismatch/mean_abs"]) < 1e-4
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    ends = [sum(x != 0 for x in line["handover_logprobs"]) for line in lines]
    assert sum(ends) > 10
    assert all(len(line["handover_logprobs"]) == len(line["tokens"]) for line in lines)
