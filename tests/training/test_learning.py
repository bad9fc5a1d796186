"""That training learns, on several seeds: minutes each, so `make slow` runs it and CI does not."""

from pathlib import Path

import pytest

from runs import evaluate_phase
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import EvalConfig, load
from tandemrl.training.loop import train


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "gain"), [("quickstart", 0.25), ("quickstart_ppo", 0.20)])
def test_a_packaged_config_gains_on_held_out_problems(name: str, gain: float, seed: int, tmp_path: Path) -> None:
    pair = tmp_path / "tiny"
    build_tiny_pair(pair, seed=seed)
    paths = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={tmp_path}/run"]
    config = load(name, [*paths, f"train.seed={seed}", "train.threads=1"])
    train(config, quiet=True)

    def solo(model: Path) -> float:
        result = evaluate_phase(
            "pass-at-k",
            model=model,
            data=["synthetic:plain:heldout:512"],
            eval=EvalConfig(samples=4, k=(1,)),
            out=tmp_path / "eval" / model.name,
        )
        return result["metrics"]["macro"]["pass@1"]

    assert solo(tmp_path / "run" / "hf" / f"step_{config.train.steps}") - solo(pair / "senior") >= gain
