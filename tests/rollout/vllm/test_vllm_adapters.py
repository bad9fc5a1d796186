"""A senior that is adapters on the junior's own weights in vLLM, against models whose weights are merged."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pairs import LENGTHS, VLLM, assert_sound, flat, logprob_errors, mixed, model, start_engine
from torch import nn
from transformers import PreTrainedModel

from helpers import assert_same_but_for_ties, prepared, prompts, tokenizer, trained_adapters
from runs import config, metrics, samples
from tandemrl.config import LoraConfig
from tandemrl.models.lora import adapter_plan, attach, merged_parameters
from tandemrl.rollout.engine import EngineError, Request, Sampling
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.build import shares_base
from tandemrl.training.loop import train

pytest.importorskip("peft", reason="needs the lora extra")

pytestmark = VLLM

KINDS = {
    "senior": LoraConfig(rank=3, alpha=6.0, dropout=0.4),  # tied
    "Llama": LoraConfig(rank=2, alpha=3.0, targets=("k_proj", "up_proj", "down_proj")),  # biased; parts of fused ones
}


def policy(kind: str, seed: int, *, base: PreTrainedModel | None = None, scale: float = 0.05) -> PreTrainedModel:
    """What a trainer holds: a float32 model with adapters that have learnt something."""
    return trained_adapters(attach(prepared(base or model(kind)), KINDS[kind], seed=5).train(), seed, scale)


def merged(kind: str, trained: PreTrainedModel) -> PreTrainedModel:
    """An untouched transformers model with the same function."""
    whole = copy.deepcopy(model(kind))
    for name, tensor in merged_parameters(trained):
        whole.get_parameter(name).data.copy_(tensor)
    return whole


@pytest.fixture(scope="module")
def shared(engines) -> Callable[[str], Any]:
    """An engine of each kind."""

    @cache
    def start(kind: str) -> Any:
        folder, plan = engines.folder(kind), adapter_plan(model(kind), KINDS[kind])
        options: dict[str, Any] = dict(longest=640, kv_cache_gb=0.1, enforce_eager=True, draft_tokens=4)
        return engines.keep(start_engine(folder, folder, adapters=plan, **options))

    return start


def runners(engine: Any) -> tuple[Any, Any]:
    """Of the senior and the junior."""
    both = engine.llm.model_executor.driver_worker.worker.model_runner.runners
    return both[1], both[0]


def batch() -> list[Request]:
    return mixed(prompts(14, lengths=LENGTHS), Sampling(max_tokens=16), seed=1)


def assert_writes_what_merged_weights_write(engine: Any, kind: str, trained: PreTrainedModel) -> None:
    given, both = batch(), (merged(kind, trained), model(kind))
    written = engine.generate(given)
    assert_sound(given, written)
    exact = tuple(copy.deepcopy(each).double() for each in both)  # merged or not, float32 rounds by up to 7e-5
    assert logprob_errors(exact, given, written).max() < 1e-4
    wanted = flat(TorchEngine(*(prepared(m) for m in both), tokenizer()).generate(given))
    assert_same_but_for_ties(given, flat(written), wanted, exact, most=1 / len(given))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_write_what_merged_weights_write(shared, kind: str) -> None:
    """Before the first sync they are no change; each sync replaces the one before; drafts change nothing."""
    engine = shared(kind)
    assert engine.info.adapters
    first, second = policy(kind, 1), policy(kind, 2)
    for version, (trained, mode) in enumerate([(first, "lazy"), (second, "draft")], start=1):
        engine.call_workers("tandem_mode", mode)
        checksum = sync_weights(trained, engine, version)
        assert checksum == fingerprint(trained.named_parameters()) == engine.fingerprint()
        assert_writes_what_merged_weights_write(engine, kind, trained)
        assert (engine.passes.accepted > 0) == (mode == "draft")
        assert engine.fingerprint("junior") == fingerprint(model(kind).named_parameters())
    assert sync_weights(first, engine, 3) != checksum


def test_what_is_not_the_trainers_does_not_go_unseen(shared) -> None:
    engine, trained = shared("senior"), policy("senior", 1)
    sync_weights(trained, engine, 1)
    before = engine.fingerprint()
    with pytest.raises(EngineError, match="28 names differ"):
        sync_weights(prepared(model("senior")), engine, 2)
    sent = {name: p for name, p in trained.named_parameters() if ".lora_" in name}
    name = next(iter(sent))
    with pytest.raises(EngineError, match=f"{name}: it was not sent"):
        engine.load_weights([each for each in sent.items() if each[0] != name], 2)
    with pytest.raises(EngineError, match=r"shape \(3, 63\), expected \(3, 64\)"):
        engine.load_weights((sent | {name: sent[name][:, 1:]}).items(), 2)
    assert engine.fingerprint() == before
    with pytest.raises(EngineError, match="weights did not reach the engine"):
        sync_weights(policy("senior", 1, base=model("another seed")), engine, 2)

    senior, junior = (runner.get_model() for runner in runners(engine))
    senior.model.layers[1].mlp.gate_up_proj.adapters.pieces[-1][1].data[-1, -1] += 1e-3
    assert engine.fingerprint() != before
    sync_weights(trained, engine, 3)
    senior.model.norm.weight.data[0] += 1.0  # of the junior, too
    with pytest.raises(EngineError, match="weights did not reach the engine"):
        sync_weights(trained, engine, 4)
    senior.model.norm.weight.data[0] -= 1.0
    kept = senior.model.norm.weight
    senior.model.norm.weight = nn.Parameter(kept.clone(), requires_grad=False)
    with pytest.raises(EngineError, match=r"model\.norm\.weight of the senior is no longer the junior's"):
        engine.fingerprint()
    senior.model.norm.weight = kept
    kernel, down = junior.model.layers[0].mlp.down_proj.cpu_linear, senior.model.layers[0].mlp.down_proj
    down.cpu_linear = lambda *inputs: kernel(*inputs)
    with pytest.raises(EngineError, match=r"down_proj of the senior computes with another kernel"):
        engine.fingerprint()
    down.cpu_linear = kernel
    sync_weights(trained, engine, 5)


@pytest.mark.parametrize(
    ("settings", "one_base"),
    [
        ((), True),
        (("rollout.vllm.junior_dtype=float32",), True),
        (("rollout.vllm.junior_dtype=bfloat16",), False),
        (("rollout.vllm.junior_quantization=fp8",), False),
        (("model.device=cuda", "rollout.vllm.junior_device=cuda:1"), False),
    ],
)
def test_the_base_is_shared_where_it_can_be(settings: tuple[str, ...], one_base: bool, tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    common = ["rollout.engine=vllm", "model.lora.rank=2", f"model.junior={pair}/senior", *settings]
    assert shares_base(config(pair, tmp_path / "out", *common)) == one_base
    other = config(pair, tmp_path / "out", *common, f"model.junior={pair}/junior")
    assert not shares_base(other)


def test_a_run_with_adapters_is_the_same_with_either_engine(tiny_pair: Path, tmp_path: Path) -> None:
    common = [
        f"model.junior={tiny_pair}/senior", "model.lora.rank=2", "model.lora.dropout=0.1", "train.lr=1e-2",
        "model.device=cpu", "train.steps=2", "train.eval_every=0", "train.save_every=2",
        "rollout.vllm.kv_cache_gb=0.05",
    ]  # fmt: skip
    torch_run, vllm_run = (
        train(config(tiny_pair, tmp_path / engine, *common, f"rollout.engine={engine}"), quiet=True)
        for engine in ("torch", "vllm")
    )
    for ours, theirs in zip(metrics(torch_run), metrics(vllm_run), strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"]
        assert theirs["mismatch/mean_abs"] < 1e-4
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    for one, two in zip(samples(torch_run), samples(vllm_run), strict=True):
        assert {**one, "behaviour_logprobs": None} == {**two, "behaviour_logprobs": None}
