"""Each process plays its own share of the episodes; together they train what one process trains."""

from pathlib import Path

import numpy as np
import pytest

import agents as small
from processes import run
from tandemrl.training.loop import train

SHORT = [*small.TOOLS, "train.steps=2", "train.lr=1e-4", "parallel.timeout_s=100"]


def _train(agents: str, out: str, *overrides: str) -> None:
    """In one of the processes."""
    train(small.config(Path(agents), Path(out), *SHORT, *overrides), quiet=True)


def test_two_processes_play_the_episodes_of_one(agents: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    _train(str(agents), str(alone))
    run(_train, 2, str(agents), str(together), "parallel.dp_shard=2")
    (metrics, samples, logprobs), (others, other_samples, other_logprobs) = map(small.record, (alone, together))
    assert samples == other_samples  # with their transcripts, rewards and counts
    np.testing.assert_allclose(logprobs, other_logprobs, rtol=0, atol=5e-5)
    for line, other in zip(metrics, others, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-5)
