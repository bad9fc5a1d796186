"""That training learns, on several seeds: minutes each, so `make slow` runs it and CI does not."""

from pathlib import Path
from statistics import fmean

import pytest

from foreign_pair import build_foreign_pair
from runs import evaluate_phase, metrics
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


@pytest.mark.slow
def test_a_tandem_senior_of_a_foreign_pair_learns_and_still_stops(tmp_path: Path) -> None:
    """The junior ends nearly all texts, so the reward of the rollouts hides a senior that never stops. A scorer that
    overlooks stray `<answer>` tags is enough to make it forget (means of ten seeds: truncation .23, pass@1 .75)."""
    build_foreign_pair(tmp_path)
    paths = [f"model.{name}={tmp_path}/{name}" for name in ("senior", "junior")]
    paths += [f"data.train=[{tmp_path}/train.jsonl]", f"data.eval=[{tmp_path}/heldout.jsonl]"]
    settings = ["rollout.max_tokens=96", "train.steps=20", "train.prompts_per_step=16", "train.lr=3e-4"]
    settings += ["train.eval_every=20", "train.save_every=20", "train.threads=1"]
    last = []
    for seed in range(5):
        out = tmp_path / f"seed-{seed}"
        train(load(None, [*paths, *settings, f"train.seed={seed}", f"output_dir={out}"]), quiet=True)
        last.append(metrics(out)[-1])
    assert fmean(line["eval/truncation_rate"] for line in last) <= 0.05
    assert fmean(line["eval/pass@1"] for line in last) >= 0.84
