"""What rollouts cost, from the engine's counts to the line of a step."""

from pathlib import Path
from typing import Any

import pytest

from runs import config, metrics
from tandemrl.rollout.engine import Completion, Passes
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.loop import train


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
