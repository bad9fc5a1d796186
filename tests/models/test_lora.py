"""Adapters against plain weights: a merged copy, the chain rule, and the model as it was before."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import PreTrainedModel

from helpers import llama, prepared, prompts, qwen3, tokenizer, trained_adapters
from runs import assert_same_run, config, metrics, weights
from tandemrl.config import ConfigError, LoraConfig
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.models.lora import AdapterDropout, adapted_layers, adapter_free, attach, dropping, merged_parameters
from tandemrl.rollout.sync import fingerprint
from tandemrl.training.checkpoint import CheckpointError
from tandemrl.training.checkpoint.runs import export_hf
from tandemrl.training.loop import train

pytest.importorskip("peft", reason="needs the lora extra")

LORA = LoraConfig(rank=3, alpha=6.0)
DROPPED = replace(LORA, dropout=0.25)
MODELS = {"qwen3, tied": qwen3, "llama, biased": llama}

CPU = torch.device("cpu")


def adapted(plain: PreTrainedModel, lora: LoraConfig = LORA, *, random: bool = True) -> PreTrainedModel:
    """A copy of ``plain`` with adapters that do something."""
    model = attach(copy.deepcopy(plain), lora, seed=7)
    return trained_adapters(model, 1, 0.3) if random else model


def logprobs(model: PreTrainedModel) -> Tensor:
    batch = pack_tokens(prompts(5))
    return token_scores(model, batch, select=torch.ones(len(batch.tokens), dtype=torch.bool))[0]


def merged_by_hand(plain: PreTrainedModel, model: PreTrainedModel) -> PreTrainedModel:
    """W + alpha / rank · B A, matrix by matrix."""
    out = copy.deepcopy(plain)
    state = model.state_dict()
    for name, parameter in out.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" in state:
            a, b = (state[f"{layer}.lora_{x}.default.weight"] for x in "AB")
            parameter.data += LORA.alpha / LORA.rank * (b @ a)
    return out


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_merged_weights_are_the_adapted_model(make) -> None:
    plain = prepared(make())
    model = adapted(plain)
    merged = dict(merged_parameters(model))
    assert {k: v.shape for k, v in merged.items()} == {k: v.shape for k, v in plain.named_parameters()}
    assert list(merged) == [name for name, _ in plain.named_parameters()]

    by_hand = merged_by_hand(plain, model)
    for name, value in by_hand.named_parameters():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
    loaded = copy.deepcopy(plain)
    loaded.load_state_dict(merged, strict=False)
    assert (logprobs(model) - logprobs(plain)).abs().max() > 0.1
    torch.testing.assert_close(logprobs(model), logprobs(loaded), rtol=0, atol=1e-5)
    torch.testing.assert_close(logprobs(model), logprobs(by_hand), rtol=0, atol=1e-5)


def test_adapters_start_as_no_change_and_consume_no_global_randomness() -> None:
    plain = prepared(qwen3())
    before = torch.get_rng_state()
    model = adapted(plain, random=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert fingerprint(merged_parameters(model)) == fingerprint(plain.named_parameters())
    assert torch.equal(logprobs(model), logprobs(plain))
    again, other = attach(copy.deepcopy(plain), LORA, seed=7), attach(copy.deepcopy(plain), LORA, seed=8)
    assert fingerprint(again.named_parameters()) == fingerprint(model.named_parameters())
    assert fingerprint(other.named_parameters()) != fingerprint(model.named_parameters())


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_gradients_are_the_chain_rule_of_the_merged_weights(make) -> None:
    plain = prepared(make())
    model = adapted(plain)
    full = merged_by_hand(plain, model)
    logprobs(model).sum().backward()
    logprobs(full).sum().backward()
    scale = LORA.alpha / LORA.rank
    for name, layer in adapted_layers(model).items():
        gradient = full.get_submodule(name).weight.grad
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-4, atol=1e-4)
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert with_gradient == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapter_free_is_the_model_of_before_and_ends() -> None:
    plain = prepared(qwen3())
    model = adapted(plain)
    changed = logprobs(model)
    with torch.no_grad(), adapter_free(model):
        assert torch.equal(logprobs(model), logprobs(plain))
    assert torch.equal(logprobs(model), changed)
    with pytest.raises(ZeroDivisionError), adapter_free(model):
        raise ZeroDivisionError
    assert torch.equal(logprobs(model), changed)
    assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "layers.1.mlp.up_proj")])
def test_exported_adapters_are_read_by_peft(targets: tuple[str, ...], tmp_path: Path) -> None:
    from peft import PeftModel

    plain = prepared(llama())
    model = adapted(plain, replace(LORA, targets=targets))
    first, second = (
        export_hf(model, tokenizer(), tmp_path / name, "bfloat16", adapters_of="some/base")
        for name in ("first", "second")
    )
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(file.name for file in (first / "adapter").iterdir() if file.suffix != ".md") == files
    for name in files:
        assert (first / "adapter" / name).read_bytes() == (second / "adapter" / name).read_bytes()
    read = PeftModel.from_pretrained(llama(), first / "adapter")
    assert read.peft_config["default"].base_model_name_or_path == "some/base"
    tokens = torch.tensor([prompts(1, lengths=(9,))[0]])
    wanted = merged_by_hand(llama(), model)(input_ids=tokens).logits
    torch.testing.assert_close(read(input_ids=tokens).logits, wanted, atol=1e-4, rtol=0)
    merged = read.merge_and_unload()
    for name, weight in load_file(first / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(merged.get_parameter(name), weight.float(), rtol=2**-7, atol=1e-6, msg=name)


def test_inputs_that_are_split_are_dropped_as_if_they_were_not() -> None:
    inputs = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    whole, *parts = [AdapterDropout(0.5) for _ in range(3)]
    dropped = []
    for number, dropout in enumerate(parts):
        dropout.part, dropout.parts = number, len(parts)
    for dropout, mine in zip((whole, *parts), (inputs, *inputs.chunk(2, dim=-1)), strict=True):
        with dropping(nn.Sequential(nn.Linear(1, 1), dropout), (4,), CPU):
            dropped.append(dropout(mine))
    assert 0 < int((dropped[0] == 0).sum()) < inputs.numel()
    assert torch.equal(torch.cat(dropped[1:], dim=-1), dropped[0])


@pytest.mark.parametrize(
    "targets", [("nothing",), ("q_proj", "v_prjo"), ("lm_head",), ("embed_tokens",), ("all-linear", "q_proj"), ()]
)
def test_bad_targets_are_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets"):
        attach(prepared(llama()), LoraConfig(rank=2, targets=targets), seed=0)


# ------------------------------------------------------------------------------------------------------------- dropout


def test_dropout_acts_inside_of_dropping_alone_whatever_the_mode() -> None:
    """In training mode, too, in which recomputed activations put a model for good."""
    plain = prepared(qwen3())
    model, same = adapted(plain, DROPPED), adapted(plain)
    wanted = logprobs(same)
    model.train()
    assert torch.equal(logprobs(model), wanted)
    before = torch.get_rng_state()
    with dropping(model, (0, 1), CPU):
        one = logprobs(model)
        other = logprobs(model)
    with dropping(model, (0, 1), CPU):
        again = logprobs(model)
    with dropping(model, (0, 2), CPU):
        another = logprobs(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, again)
    for different in (other, another, wanted):
        assert (one - different).abs().max() > 1e-3
    assert torch.equal(logprobs(model), wanted)
    assert {k: v.shape for k, v in merged_parameters(model)} == {k: v.shape for k, v in merged_parameters(same)}


def test_an_adapters_inputs_are_dropped_and_scaled() -> None:
    """Its output is W x + alpha / rank · B A (mask · x / (1 - p)), of which the mask is read off the zeros."""
    model = adapted(prepared(qwen3()), DROPPED)
    layer = model.model.layers[0].mlp.down_proj
    inputs = torch.randn(2000, layer.in_features, generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    layer.lora_A["default"].register_forward_hook(lambda _, args, __: seen.append(args[0]))
    with torch.no_grad(), dropping(model, (3,), CPU):
        found = layer(inputs)
    mask = seen[0] != 0
    assert abs(mask.float().mean().item() - 0.75) < 0.01
    a, b = (getattr(layer, f"lora_{x}")["default"].weight for x in "AB")
    expected = layer.base_layer(inputs) + 2.0 * (mask * inputs / 0.75) @ a.T @ b.T
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_recomputed_activations_have_the_same_dropout() -> None:
    model = adapted(prepared(qwen3()), DROPPED)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        with dropping(model, (4,), CPU):
            logprobs(model).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_a_run_with_dropout_resumes_as_if_nothing_had_happened(tiny_pair: Path, tmp_path: Path) -> None:
    """The gate still sees log-probs without dropout, and the rollouts are those of the merged weights. The gradient of
    the first step, in which all else is equal, is another than without dropout."""
    lora = ("model.lora.rank=4", "train.lr=1e-2", "train.eval_every=0", "train.save_every=1")
    dropped = (*lora, "model.lora.dropout=0.3", "model.gradient_checkpointing=true")
    whole = train(config(tiny_pair, tmp_path / "whole", "train.steps=2", *dropped), quiet=True)
    first, second = metrics(whole)
    assert max(first["mismatch/mean_abs"], second["mismatch/mean_abs"]) < 1e-5
    assert first["ratio"] == 1.0  # B = 0 at the start
    assert second["ratio"] != 1.0  # of log-probs with dropout against those without
    out = shutil.copytree(whole, tmp_path / "resumed", ignore=shutil.ignore_patterns("step_2"))
    step_1 = str(out / "checkpoints" / "step_1")
    train(config(tiny_pair, out, "train.steps=2", *dropped), quiet=True, resume=step_1)
    assert_same_run(whole, out, step=2)
    without = train(config(tiny_pair, tmp_path / "without", "train.steps=1", *lora), quiet=True)
    assert metrics(without)[0]["reward/mean"] == first["reward/mean"]
    assert metrics(without)[0]["grad_norm"] != first["grad_norm"]


# ------------------------------------------------------------------------------------------------------------ in a run


def test_a_run_trains_adapters_alone(tiny_pair: Path, tmp_path: Path) -> None:
    """Beside itself; beside another junior, and resumed, in the run with dropout."""
    lora = ("model.lora.rank=4", "loss.kl_coef=0.1", "train.lr=1e-2", "train.eval_every=0", "train.save_every=1")
    lora += ("loss.entropy_coef=0.01", "model.junior=null", "rollout.draft_tokens=4")
    whole = train(config(tiny_pair, tmp_path / "whole", "train.steps=2", *lora), quiet=True)
    first, second = metrics(whole)
    assert max(step["mismatch/mean_abs"] for step in (first, second)) < 1e-5  # the engine has what was learnt
    assert first["ref_kl"] == 0  # the reference is the model without adapters
    assert second["ref_kl"] > 0

    base, trained = load_file(tiny_pair / "senior" / "model.safetensors"), weights(whole, 2)
    assert base.keys() == trained.keys()
    changed = {name for name in base if not torch.equal(base[name], trained[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    stored = FileSystemReader(whole / "checkpoints" / "step_2" / "tensors").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in stored)


def test_adapters_do_not_go_onto_other_weights(tiny_pair: Path, tmp_path: Path) -> None:
    lora = ("model.lora.rank=2", "train.eval_every=0")
    senior = tmp_path / "senior"
    shutil.copytree(tiny_pair / "senior", senior)
    settings = config(tiny_pair, tmp_path / "run", f"model.senior={senior}", "train.steps=1", *lora)
    train(settings, quiet=True)
    state = load_file(senior / "model.safetensors")
    state["model.norm.weight"] += 1
    save_file(state, senior / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="another reference"):
        train(settings, quiet=True)
