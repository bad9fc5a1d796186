"""What rollouts cost, from the engine's counts to the line of a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import config, metrics
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import Completion, Draws, Passes
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.async_rollouts import AsyncRollouts
from tandemrl.training.loop import train
from tandemrl.training.rollouts import pass_metrics
from tandemrl.training.tracking import summary_line


def test_each_metric_is_there_where_something_was_counted() -> None:
    assert pass_metrics(Passes()) == pass_metrics(Passes(tokens=9)) == {}
    lazy = {"passes/senior": 6.0, "passes/junior": 4.0, "draft/tokens_per_senior_pass": 1.5}
    assert pass_metrics(Passes(tokens=9, senior=6, junior=4)) == lazy
    assert pass_metrics(Passes(9, 6, 4, drafted=4, accepted=3)) == lazy | {"draft/acceptance": 0.75}
    assert pass_metrics(Passes(spans=4, asks=6)) == {"tandem/asks_per_span": 1.5}
    assert pass_metrics(Passes(tokens=9, junior=9)) == {"passes/senior": 0.0, "passes/junior": 9.0}


def test_the_line_of_a_step_tells_the_acceptance() -> None:
    line = summary_line(3, 50, {"reward/mean": 0.5, "draft/acceptance": 0.934, "time/step": 2.0}, 2.0)
    assert line == "step 3/50 | reward 0.500 accepted 0.93 | 2.0s ETA 1m34s"


def test_passes_of_rollouts_in_flight_are_kept() -> None:
    channels = (np.array([4], dtype=np.int64), np.array([1], dtype=np.int8), np.zeros(1, dtype=np.float32))
    batch = CompletionBatch([], [[Completion(7, *channels, "eos")]], Draws(3, 1), Passes(5, 4, 3, 2, 1))
    engine: Any = object()  # which nobody asks

    def rollouts_of() -> AsyncRollouts:
        return AsyncRollouts(lambda: [], lambda *asked: batch, [], engine, lambda: lambda _: {})

    with rollouts_of() as rollouts:
        rollouts.start_until(2, 2)
        state = rollouts.state_dict()
    with rollouts_of() as rollouts:
        rollouts.load_state_dict(state)
        assert rollouts.take(2).passes == batch.passes


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_a_step_counts_its_own_rollouts_and_no_evaluation(
    asynchronous: int, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = TorchEngine.generate

    def counted(self: TorchEngine, requests: Any, **settings: Any) -> list[list[Completion]]:
        written = generate(self, requests, **settings)
        own = sum(len(completion.tokens) for group in written for completion in group)
        solo = requests[0].strategy.writers == "senior"
        self.passes = Passes(1, 1, 1, 1, 0) if solo else Passes(own, 2 * own, own, 4, 3)
        return written

    monkeypatch.setattr(TorchEngine, "generate", counted)
    knobs = ("train.eval_every=1", "train.save_every=3", f"train.async_steps={asynchronous}")
    lines = metrics(train(config(tiny_pair, tmp_path, *knobs), quiet=True))
    for line in lines:
        assert line["passes/senior"] == 2 * line["passes/junior"] == 2 * line["tokens/response"]
        assert (line["draft/acceptance"], line["draft/tokens_per_senior_pass"]) == (0.75, 0.5)
    assert len(lines) == 3
    assert len({line["passes/senior"] for line in lines}) > 1  # two steps may write equally many tokens
