"""``train`` on several processes is ``train`` on one: same texts, same losses, same weights, whatever the mesh."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

import runs
from processes import run
from runs import metrics
from tandemrl.config import ConfigError
from tandemrl.training.loop import train

SHORT = ["train.steps=2", "train.mini_batch_prompts=2", "train.tokens_per_micro_batch=256", "rollout.max_tokens=20"]
SHORT += ["train.keep_checkpoints=1", "parallel.timeout_s=100", "eval.profile=custom", "eval.max_tokens=20"]
MESHES = {
    "dp_shard 2": (2, "parallel.dp_shard=2"),
    "dp_replicate 2": (2, "parallel.dp_replicate=2"),
    "tp 2": (2, "parallel.tp=2"),
    "sp 2": (2, "parallel.sp=2"),
    "dp_shard 2, tp 2": (4, "parallel.tp=2"),
}
SLOW = ("dp_shard 2", "dp_replicate 2", "tp 2")  # four processes do the first and the last at once
EVERYTHING = ["loss.kl_coef=0.01", "loss.junior_kl_coef=0.05", "loss.entropy_coef=0.01", "loss.kl_in_reward=true"]


def _train(pair: str, out: str, *overrides: str) -> None:
    """In one of the processes."""
    train(runs.config(Path(pair), Path(out), *SHORT, *overrides), quiet=True)


def samples(out: Path) -> list[dict[str, object]]:
    keys = ("step", "text", "tokens", "author", "reward", "index")
    return [{key: line[key] for key in keys} for line in runs.samples(out)]


def assert_same(actual: Path, expected: Path, step: int) -> None:
    assert samples(actual) == samples(expected)
    for one, other in zip(metrics(actual), metrics(expected), strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if not name.startswith(("time/", "tokens/s", "mismatch/")):
                assert one[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
        assert one["mismatch/mean_abs"] < 1e-5
    left, right = (load_file(out / "hf" / f"step_{step}" / "model.safetensors") for out in (actual, expected))
    assert left.keys() == right.keys()
    for name in left:
        # Adam divides a gradient by its own size: where that is rounding noise, so is the direction of the step
        assert (left[name] - right[name]).abs().max() < 4 * 3e-4, name
        assert (left[name] - right[name]).abs().mean() < 1e-5, name


@pytest.fixture(scope="module")
def alone(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    _train(str(tiny_pair), str(out), *EVERYTHING)
    return out


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=pytest.mark.slow) if mesh in SLOW else mesh for mesh in MESHES]
)
def test_every_mesh_trains_what_one_process_trains(tiny_pair: Path, alone: Path, tmp_path: Path, mesh: str) -> None:
    size, axes = MESHES[mesh]
    out = tmp_path / "run"
    run(_train, size, str(tiny_pair), str(out), axes, *EVERYTHING)
    assert_same(out, alone, step=2)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["parallel.dp_shard=2", "parallel.tp=2", "parallel.sp=2"])
def test_models_of_two_vocabularies_train_what_one_process_trains(tiny_pair, other_junior, tmp_path, axes):
    keys = [f"model.junior={other_junior}", "selection.strategy=before_word", "selection.max_untranslatable=1"]
    keys += ["loss.entropy_coef=0.01"]  # a gradient in every step, whatever the rewards
    _train(str(tiny_pair), str(tmp_path / "alone"), *keys)
    assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / "alone"))
    run(_train, 2, str(tiny_pair), str(tmp_path / "run"), axes, *keys)
    assert_same(tmp_path / "run", tmp_path / "alone", step=2)


def test_a_run_goes_on_with_another_number_of_processes(tiny_pair: Path, tmp_path: Path) -> None:
    """Two processes, then one, then two again: the run that one process makes."""
    pair, out, whole = str(tiny_pair), tmp_path / "run", tmp_path / "whole"
    every = ["train.save_every=1", "train.eval_every=0", "rollout.max_tokens=40"]  # some answers are right
    _train(pair, str(whole), "train.steps=3", *every)
    run(_train, 2, pair, str(out), "train.steps=1", *every)
    _train(pair, str(out), "train.steps=2", *every)
    run(_train, 2, pair, str(out), "train.steps=3", "parallel.tp=2", *every)
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
    assert any(0 < line["groups/skipped"] < 1 for line in metrics(out))  # what is left is dealt anew to the processes
    assert_same(out, whole, step=3)


def test_adapters_split_by_tp_train_what_one_process_trains(tiny_pair: Path, tmp_path: Path) -> None:
    """With dropout, and from a checkpoint of two processes to one."""
    pytest.importorskip("peft", reason="needs the lora extra")
    pair, out, whole = str(tiny_pair), tmp_path / "run", tmp_path / "whole"
    lora = ["model.lora.rank=2", "model.lora.dropout=0.2", "train.lr=1e-2", "train.eval_every=0"]
    lora += ["loss.entropy_coef=0.01"]  # a gradient in every step, whatever the rewards
    _train(pair, str(whole), "train.steps=2", *lora)
    assert all(line["grad_norm"] > 0 for line in metrics(whole))
    run(_train, 2, pair, str(out), "train.steps=1", "parallel.tp=2", *lora)
    _train(pair, str(out), "train.steps=2", *lora)
    assert samples(out) == samples(whole)
    for name in ("adapter/adapter_model.safetensors", "model.safetensors"):
        left, right = (load_file(each / "hf" / "step_2" / name) for each in (out, whole))
        assert left.keys() == right.keys()
        for key in left:
            assert (left[key] - right[key]).abs().mean() < 1e-5, key


def _refusal(pair: str, out: str) -> str:
    """In one of the processes."""
    with pytest.raises(ConfigError) as refused:
        train(runs.config(Path(pair), Path(out), "rollout.engine=vllm"), quiet=True)
    return str(refused.value)


def test_processes_without_engines_of_their_own_are_refused_before_a_step(tiny_pair: Path, tmp_path: Path) -> None:
    """``parallel.dp_shard`` is null, so that no key says how many there are."""
    for message in run(_refusal, 2, str(tiny_pair), str(tmp_path / "run")):
        assert "rollout.vllm.multiprocess=False: must be true with several processes" in message
    assert not (tmp_path / "run").exists()
