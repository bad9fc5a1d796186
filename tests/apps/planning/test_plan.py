"""The plan of a run elsewhere: what it says adds up, and what cannot fit is refused with keys that help."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import yaml
from transformers import GPT2Config

from runs import UNDECIDED, launch_of
from tandemrl.apps.experiments.agents import hops_tokenizer
from tandemrl.apps.experiments.tiny import SHAPE, WARM_STARTS
from tandemrl.apps.planning.plan import (
    DEVICES,
    GIB,
    Plan,
    PlanError,
    architecture,
    hours_of,
    kv_bytes,
    packaged,
    parameters,
    plan,
)
from tandemrl.config import ConfigError, load, packaged_configs
from tandemrl.models.attention import ModelError


def _named(path: Path) -> set[str]:
    model = yaml.safe_load(path.read_text())["model"]
    return {model[key] for key in ("senior", "junior", "critic") if model.get(key, "???") != "???"}


def test_every_model_of_a_packaged_config_is_known() -> None:
    assert set().union(*map(_named, packaged_configs().values())) <= packaged().keys()


@pytest.mark.parametrize(
    ("model", "count"),  # as the model cards have them
    [
        ("Qwen/Qwen3-0.6B", 596_049_920),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
    ],
)
def test_packaged_shapes_have_the_published_numbers_of_parameters(model: str, count: int) -> None:
    assert parameters(architecture(model)) == count


@pytest.mark.parametrize("pair", ["tiny", "tiny-hops", "tiny-calculator"])
def test_the_tiny_pairs_are_those_that_are_made(pair: str) -> None:
    vocabulary = WARM_STARTS["plain"]["base"].vocab_size if pair == "tiny" else len(hops_tokenizer(pair[5:]))
    for who in ("senior", "junior"):
        shape = packaged()[f"runs/{pair}/{who}"]
        assert shape["vocab_size"] == vocabulary
        assert shape.items() >= {name: value for name, value in SHAPE.items() if name != "initializer_range"}.items()


def test_an_unknown_model_is_named_and_nothing_is_downloaded() -> None:
    with pytest.raises(ModelError, match=r"nobody/has-this: its config\.json is neither"):
        architecture("nobody/has-this")


def test_the_plan_of_a_tiny_run_adds_up() -> None:
    config = load("quickstart")
    found = plan(config, 1, "h100")
    shape = architecture(config.model.senior)
    count = parameters(shape)
    sizes = {item.name: item.size for item in found.items}
    assert sizes["policy: weights, float32"] == sizes["engine, junior: weights, float32"] == 4 * count
    assert 0 <= sizes["policy: optimiser"] - 8 * count < 1024  # and a step counter for each parameter
    rows, length = found.cache.rows, found.cache.length
    assert found.cache.size == rows * length * 2 * kv_bytes(shape, 4)
    assert kv_bytes(GPT2Config(), 4) == 2 * 12 * 768 * 4  # without grouped heads
    assert (rows, length >= config.longest_sequence) == (256, True)
    found.require_fit()
    text = str(found)
    assert "plan of 1 process(es) on h100, per process" in text
    keys = ["selection.strategy=before_word", "model.junior_endpoint.url=http://localhost:8000/v1"]
    served = plan(load("quickstart", keys), 1, "h100")  # the junior's weights are elsewhere
    assert {item.name for item in found.items} - {item.name for item in served.items} == {
        "engine, junior: weights, float32"
    }
    assert 2 * served.cache.size == found.cache.size


VLLM = ["model.junior=null", "model.device=cuda", "rollout.engine=vllm", "rollout.vllm.kv_cache_gb=1"]


def planned(*more: str) -> tuple[dict[str, int], Plan]:
    """The bytes of the engine of quickstart by device."""
    found = plan(load("quickstart", [*VLLM, *more]), 1, "h100")
    sizes = Counter[str]()
    for item in found.items:
        sizes[item.where] += item.size * item.name.startswith("engine")
    return dict(+sizes), found


def test_adapters_on_the_junior_are_no_second_copy() -> None:
    own, adapted = (planned("rollout.engine=torch", f"model.lora.rank={rank}")[0][""] for rank in (0, 8))
    assert own - adapted == 4 * parameters(architecture("runs/tiny/senior"))


def test_what_cannot_fit_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("quickstart")
    monkeypatch.setitem(DEVICES, "small", 0.7 * plan(config, 1, "h100").peaks[""])
    with pytest.raises(PlanError, match=r"a process needs .* on small; what can help: .*train\.tokens_per_micro_batch"):
        plan(config, 1, "small").require_fit()
    with pytest.raises(ConfigError, match="--device h1000: expected one of a100-40"):
        plan(config, 1, "h1000")


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_configs())
def test_every_packaged_config_fits_the_cards_that_its_head_names(name: str) -> None:
    ranks, axes = launch_of(name)
    found = plan(load(name, [*UNDECIDED.get(name, []), *axes]), ranks, "h100")
    found.require_fit()


def test_what_vllm_has_on_other_cards_is_planned_there() -> None:
    shape = architecture("runs/tiny/senior")
    count, kept = 4 * parameters(shape), kv_bytes(shape, 4)
    small = "rollout.vllm.kv_cache_gb=0.01"
    both, beside = planned(small)
    apart, found = planned(small, "rollout.vllm.junior_device=cuda:1")
    assert both[""] - apart[""] == count
    size = int(0.01 * GIB)
    blocks = size // (16 * kept)  # of the senior's alone, and the junior has as many
    assert apart["cuda:1"] == apart[""] - size + 16 * blocks * kept
    per_row = math.ceil(found.cache.length / 16)
    assert (found.cache.rows, beside.cache.rows) == (blocks // per_row, blocks // 2 // per_row)
    assert found.peaks["cuda:1"] == apart["cuda:1"]
    assert f"{apart['cuda:1'] / 2**20:,.2f} MiB  at most on the device (cuda:1); limit: " in str(found)
    with pytest.raises(PlanError, match=r"on h100 \(cuda:1\); what can help"):
        found._replace(memory=1.03 * apart["cuda:1"], items=[i for i in found.items if i.where]).require_fit()
    assert both[""] - planned(small, "rollout.tensor_parallel=2")[0][""] == count  # half of either model
    elsewhere = [small, "rollout.vllm.multiprocess=true", "rollout.tensor_parallel=2"]
    split, _ = planned(*elsewhere, "rollout.vllm.devices='0,1'")
    assert planned(*elsewhere, "rollout.vllm.devices='2,3'")[0] == {"each of rollout.vllm.devices": split[""]}


def test_hours_come_from_the_steps_of_a_measured_run_without_its_first(tmp_path: Path) -> None:
    lines = [{"step": step, "time/step": seconds} for step, seconds in ((1, 90.0), (2, 30.0), (3, 50.0), (4, 36.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    config = load("quickstart", ["train.steps=500"])
    assert hours_of(config, str(tmp_path)) == "time: 500 steps of 36 s (median of 3) are 5 hours"
    with pytest.raises(ConfigError, match=r"--times-of nowhere: .*name the folder of a training run"):
        hours_of(config, "nowhere")
