"""Training with drafts is training without them."""

from pathlib import Path

import numpy as np
import pytest

from runs import config, metrics, samples, weights
from tandemrl.training.loop import train


@pytest.mark.parametrize("steps", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_with_drafts_trains_what_one_without_them_trains(tiny_pair: Path, tmp_path: Path, steps: int) -> None:
    """The rounding of log-probs apart, which a near-tie could make a token of; here there is none."""
    common = [f"train.steps={steps}", "train.eval_every=0", f"train.save_every={steps}", "rollout.max_tokens=32"]
    plain, drafted = (
        train(config(tiny_pair, tmp_path / f"drafts-{length}", *common, f"rollout.draft_tokens={length}"), quiet=True)
        for length in (0, 4)
    )
    written, other = samples(plain), samples(drafted)
    for one, two in zip(written, other, strict=True):
        np.testing.assert_allclose(one["behaviour_logprobs"], two["behaviour_logprobs"], atol=1e-4)
        assert {**one, "behaviour_logprobs": None} == {**two, "behaviour_logprobs": None}
    for one, two in zip(metrics(plain), metrics(drafted), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3, abs=1e-6)
    before, after = weights(plain, steps), weights(drafted, steps)
    for name, tensor in before.items():
        np.testing.assert_allclose(after[name], tensor, rtol=0, atol=2e-5, err_msg=name)
