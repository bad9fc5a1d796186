"""Every Liger kernel that ``model.liger`` reaches compiles for GPUs, on a machine that has none.

A model runs forward and backward on the CPU with Liger's modules, and each kernel that would be launched is compiled to
machine code for its arguments instead: what it writes stays undefined, so no numbers are compared here. `make
release-check` runs this in an environment of its own.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandemrl.models.compile import LIGER_FAMILIES, LIGER_KERNELS

liger = pytest.importorskip("liger_kernel.transformers", reason="needs the liger extra")
triton = pytest.importorskip("triton", reason="liger-kernel brings it")

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32"}
ARCHITECTURES = (80, 90)
OPTIONS = ("num_warps", "num_stages", "num_ctas")
Launch = tuple[Any, tuple[tuple[str, str], ...], tuple[tuple[str, Any], ...], tuple[tuple[str, int], ...]]


def launch_of(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    """(kernel, types of the arguments, values of the constants, options of the compiler)."""
    chosen = {name: options.pop(name) for name in OPTIONS if name in options}
    bound = inspect.signature(kernel.fn).bind(*arguments, **options)
    bound.apply_defaults()
    types, constants = {}, {}
    for parameter in kernel.params:
        value = bound.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            types[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = f"*{TYPES[value.dtype]}"
        elif isinstance(value, bool | int | float):
            types[parameter.name] = {bool: "i1", int: "i32", float: "fp32"}[type(value)]
        else:
            raise AssertionError(f"{kernel.fn.__name__}: {parameter.name} is a {type(value).__name__}")
    return kernel, tuple(types.items()), tuple(constants.items()), tuple(chosen.items())


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[Launch, None]:
    """Every launch from now on, once; nothing is launched."""
    seen: dict[Launch, None] = {}

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen[launch_of(kernel, arguments, options)] = None

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", record)
    return seen


def model_of(family: str) -> PreTrainedModel:
    """One layer with the sizes of a model of 0.6 billion parameters."""
    config, kind = FAMILIES[family]
    sizes: dict[str, Any] = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=1, num_attention_heads=16)
    model: PreTrainedModel = kind(config(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=64))
    return model


@pytest.mark.parametrize("family", LIGER_FAMILIES)
def test_every_kernel_compiles(family: str, launches: dict[Launch, None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    apply: Callable[..., None] = getattr(liger, f"apply_liger_kernel_to_{family}")
    module = inspect.getmodule(type(model))
    for name, value in vars(module).items():  # Liger replaces names there: put them back afterwards
        monkeypatch.setattr(module, name, value)
    apply(**LIGER_KERNELS, model=model)
    for compute in (torch.float32, torch.bfloat16):  # as in training: float32 weights under autocast
        with torch.autocast("cpu", dtype=compute, enabled=compute != torch.float32):
            model(input_ids=torch.arange(8)[None]).logits.float().sum().backward()
    with torch.no_grad():  # as in the engine
        model.to(torch.bfloat16)(input_ids=torch.arange(8)[None])
    names = {kernel.fn.__name__ for kernel, *_ in launches}
    assert len(names) >= 5, names  # forward and backward of RMSNorm and of SwiGLU, and RoPE, which is one for both
    assert {"bf16", "fp32"} <= {kind.strip("*") for _, types, *_ in launches for _, kind in types}
    for kernel, types, constants, options in launches:
        for architecture in ARCHITECTURES:
            source = triton.compiler.ASTSource(kernel, dict(types), constexprs=dict(constants))
            target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
            compiled = triton.compile(source, target=target, options=dict(options))
            assert f".target sm_{architecture}" in compiled.asm["ptx"], kernel.fn.__name__
            assert compiled.asm["cubin"][:4] == b"\x7fELF", kernel.fn.__name__
