"""How long a run is and what it keeps: rows, epochs, validation texts."""

from pathlib import Path

import pytest

from runs import config, lines, metrics
from tandemrl.config import load, with_steps
from tandemrl.training.loop import train

SHORT = ["train.prompts_per_step=4", "train.eval_every=1", "train.save_every=1", "rollout.max_tokens=16"]


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [(1, 64, 16), (2.5, 19, 10), (0.01, 64, 1), (15, 327_680, 1_228_800)]
)
def test_epochs_are_whole_batches(epochs: float, prompts: int, steps: int) -> None:
    given = load(overrides=[f"train.epochs={epochs}", "train.prompts_per_step=4"])
    assert with_steps(given, prompts).train.steps == steps
    assert with_steps(load(), prompts) == load()


def test_a_run_of_an_epoch_over_a_few_rows_goes_on_for_another(tiny_pair: Path, tmp_path: Path) -> None:
    first = config(tiny_pair, tmp_path, *SHORT, "data.limit=9", "train.epochs=1")
    train(first, quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    stored = load(tmp_path)
    assert (stored.train.epochs, stored.train.steps, stored.data.limit) == (1.0, 2, 9)
    train(config(tiny_pair, tmp_path, *SHORT, "data.limit=9", "train.epochs=1.5"), quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    drawn = {line["example_id"] for line in lines(tmp_path / "samples.jsonl")}
    assert len(drawn) <= 9
    # The texts of each evaluation: the senior's alone, those that pass@1 was computed from.
    for line in metrics(tmp_path):
        kept = lines(tmp_path / "eval_texts" / f"step_{line['step']}.jsonl")
        assert len(kept) == 4 * 2  # eval.train_problems, eval.train_samples
        assert sum(text["correct"] for text in kept) / 8 == pytest.approx(line["eval/pass@1"])
        assert {(text["source"], set(text["author"][0])) == ("eval", {"S"}) for text in kept} == {True}
        assert all(text["text"] for text in kept)
