"""Weights in, weights out: what a trainer sends is what stock vLLM's kernels compute with, packed, fused or sharded."""

import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pairs import VLLM, greedy, settable_threads
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from helpers import VOCABULARY, prompts, trained_adapters
from tandemrl.config import LoraConfig
from tandemrl.models.lora import adapted_layers, adapter_plan, attach
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import fingerprint

pytestmark = VLLM

KINDS: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "Qwen3": (Qwen3ForCausalLM, Qwen3Config, dict(head_dim=32, tie_word_embeddings=True)),
    "Llama": (LlamaForCausalLM, LlamaConfig, dict(head_dim=32, tie_word_embeddings=False, attention_bias=True)),
    "Phi3": (Phi3ForCausalLM, Phi3Config, dict(hidden_size=128, tie_word_embeddings=False)),  # fused in both worlds
}
ENGINES = [(kind, dtype) for kind in ("Qwen3", "Llama") for dtype in ("float32", "bfloat16")] + [("Phi3", "bfloat16")]
PROMPTS = prompts(4)


def trainer(kind: str, seed: int) -> PreTrainedModel:
    """A float32 model with no constant parameter."""
    model, config, changes = KINDS[kind]
    common = dict(
        vocab_size=VOCABULARY,  # not a multiple of vLLM's 64
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = model(config(**(common | changes)))
        for parameter in built.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    return built.eval()


# -------------------------------------------------------------------------------------------------------------- engines


class Stock:
    """A stock engine, and its worker's model runner."""

    def __init__(self, kind: str, dtype: str, folder: Path, **options: Any) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        self.kind, self.dtype = kind, getattr(torch, dtype)
        trainer(kind, 0).save_pretrained(folder)
        settings: dict[str, Any] = dict(max_model_len=64, kv_cache_memory_bytes=2**24, skip_tokenizer_init=True)
        settings |= dict(enforce_eager=True, disable_log_stats=True) | options
        with settable_threads():
            self.engine = LLMEngine.from_engine_args(EngineArgs(model=str(folder), dtype=dtype, **settings))

    @property
    def runner(self) -> Any:
        return self.engine.model_executor.driver_worker.worker.model_runner

    def load(self, model: PreTrainedModel) -> None:
        from tandemrl.rollout.vllm.weights import load_checkpoint_weights

        load_checkpoint_weights(self.runner, SentWeights.of(model.named_parameters()))

    def fingerprint(self) -> int:
        from tandemrl.rollout.vllm.weights import hf_parameters

        return fingerprint(hf_parameters(self.runner))

    def sent(self, model: PreTrainedModel) -> int:
        return fingerprint(model.named_parameters(), dtype=self.dtype)

    def greedy(self, given: Sequence[Sequence[int]]) -> list[list[int]]:
        self.engine.reset_prefix_cache()
        return greedy(self.engine, given, 16)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Engines by kind and dtype; they live until the session ends, because they share vLLM's process groups."""
    return cache(lambda kind, dtype: Stock(kind, dtype, tmp_path_factory.mktemp(kind)))


@torch.no_grad()
def gaps(model: PreTrainedModel, given: Sequence[Sequence[int]], written: Sequence[Sequence[int]]) -> Tensor:
    """By how much each written token's logit is below the best one."""
    found = []
    for prompt, tokens in zip(given, written, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.amax(1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)])
    return torch.cat(found)


# ----------------------------------------------------------------------------------------------------------- in and out


@pytest.mark.parametrize(("kind", "dtype"), ENGINES)
def test_an_engine_computes_with_the_weights_it_was_sent(stock, kind, dtype):
    from tandemrl.rollout.vllm.weights import hf_parameters

    running = stock(kind, dtype)
    for seed in (1, 2):
        model = trainer(kind, seed)
        wanted = dict(model.named_parameters())
        running.load(model)
        found = dict(hf_parameters(running.runner))
        assert found.keys() == wanted.keys()
        for name, parameter in wanted.items():
            assert torch.equal(found[name], parameter.to(running.dtype)), name
            assert found[name].dtype == running.dtype
            assert not hasattr(parameter, "shard_id")  # vLLM's loader annotates the tensors it is given
        assert running.fingerprint() == running.sent(model) != running.sent(trainer(kind, 0))
        written = running.greedy(PROMPTS)
        # In bfloat16 the activations are rounded, too: the engine's choice is the best one but for a fraction of the
        # logits' spread, which is above 2.
        assert gaps(model.to(running.dtype).float(), PROMPTS, written).max() < (1e-3 if dtype == "float32" else 0.3)


# -------------------------------------------------------------------------------------------------------------- refused


KEY = "model.layers.1.self_attn.k_proj.weight"
WRONG = {
    "missing": (lambda w: {n: each for n, each in w.items() if n != KEY}, rf"e\.g\. {KEY}: it was not sent"),
    "a part of the vocabulary": (
        lambda w: w | {"model.embed_tokens.weight": w["model.embed_tokens.weight"][:-1]},
        r"embed_tokens\.weight: shape \(71, 64\), expected \(72, 64\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_weights_that_do_not_match_are_refused_and_nothing_changes(stock, wrong):
    from tandemrl.rollout.vllm.weights import load_checkpoint_weights

    running = stock("Qwen3", "float32")
    running.load(trainer("Qwen3", 1))
    before = running.fingerprint(), running.greedy(PROMPTS)
    spoil, message = WRONG[wrong]
    weights = spoil(dict(trainer("Qwen3", 2).named_parameters()))
    with pytest.raises(EngineError, match=message):
        load_checkpoint_weights(running.runner, SentWeights.of(weights.items()))
    assert (running.fingerprint(), running.greedy(PROMPTS)) == before


def test_gathered_weights_are_held_a_layer_at_a_time(stock):
    """In one process, as a trainer of several processes gathers them."""
    from tandemrl.rollout.vllm.weights import load_checkpoint_weights

    running, model = stock("Qwen3", "bfloat16"), trainer("Qwen3", 5)
    running.load(trainer("Qwen3", 1))
    gathered: list[tuple[weakref.ref[torch.Tensor], int]] = []
    most = 0

    def gather() -> Any:
        nonlocal most
        for name, parameter in model.named_parameters():
            whole = parameter.detach().clone()
            gathered.append((weakref.ref(whole), whole.numel()))
            most = max(most, sum(size for alive, size in gathered if alive() is not None))
            yield name, whole

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    load_checkpoint_weights(running.runner, SentWeights(shapes, gather()))
    assert running.fingerprint() == running.sent(model)
    sizes = [size for _, size in gathered]
    assert most < sum(sizes) / 2
    assert most <= max(sizes) + max(
        sum(p.numel() for p in layer.parameters()) for layer in model.get_submodule("model.layers")
    )


@pytest.mark.parametrize("layer", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_a_layer_that_cannot_be_read_is_refused_by_name(stock, layer, monkeypatch):
    running = stock("Llama", "float32")
    monkeypatch.setattr(running.runner.get_model().get_submodule(layer), "quant_method", SimpleNamespace())
    with pytest.raises(EngineError, match=rf"{layer} is quantised"):
        running.fingerprint()
    with pytest.raises(EngineError, match=rf"{layer} is quantised"):
        running.load(trainer("Llama", 1))
    monkeypatch.undo()
    norm = running.runner.get_model().model.norm
    monkeypatch.setattr(norm.weight, "weight_loader", lambda parameter, weight: None, raising=False)
    with pytest.raises(EngineError, match=r"model\.norm\.weight is of a kind \(RMSNorm\)"):
        running.fingerprint()


def test_a_tied_head_with_an_outdated_copy_of_the_embedding_is_noticed(stock):
    """Stock ``reload_weights`` leaves one behind where a CPU's kernel packs the head, which not every one does."""
    running, model = stock("Qwen3", "bfloat16"), trainer("Qwen3", 4)
    running.load(model)
    head = running.runner.get_model().lm_head
    packed = head.weight.detach().clone()
    head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    assert running.fingerprint() == running.sent(model)
    running.runner.get_model().model.embed_tokens.weight.data[7, 3] += 1.0
    with pytest.raises(EngineError, match="lm_head is tied to the embedding, but computes with another copy"):
        running.fingerprint()
    running.load(model)
    assert running.fingerprint() == running.sent(model)


def _scaled(pack: Any, self: Any, layer: Any) -> None:
    layer.weight.data = 1.004 * layer.weight.data  # hardly more than bfloat16 rounds
    pack(self, layer)


def _stale(pack: Any, self: Any, layer: Any) -> None:
    old = layer.cpu_linear  # right in all columns but one
    pack(self, layer)
    layer.cpu_linear = old


@pytest.mark.parametrize(("wrong", "dtype"), [(_scaled, "float32"), (_stale, "bfloat16")])
def test_a_layer_that_packs_another_weight_than_it_was_given_is_read(stock, dtype, wrong, monkeypatch) -> None:
    running, model = stock("Llama", dtype), trainer("Llama", 7)
    layer = running.runner.get_model().model.layers[1].mlp.down_proj
    method, pack = layer.quant_method, type(layer.quant_method).process_weights_after_loading
    other = model.model.layers[1].mlp.down_proj.weight.detach().to(running.dtype, copy=True)
    other[:, 1] += 1.0
    layer.cpu_linear = lambda x, _, bias: torch.nn.functional.linear(x, other, bias)

    def faulty(self: Any, layer: Any) -> None:
        wrong(pack, self, layer) if self is method else pack(self, layer)

    monkeypatch.setattr(type(method), "process_weights_after_loading", faulty)
    running.load(model)
    assert running.fingerprint() != running.sent(model)
    monkeypatch.undo()
    running.load(model)
    assert running.fingerprint() == running.sent(model)


# --------------------------------------------------------------------------------------------------- to other processes


def test_weights_travel_through_a_file(stock, tmp_path, monkeypatch):
    """In shared memory, or elsewhere if that is full."""
    from tandemrl.rollout.vllm import weights as vllm_weights

    running, model = stock("Llama", "bfloat16"), trainer("Llama", 8)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for shared in (vllm_weights.SHARED_MEMORY, tmp_path / "missing"):
        monkeypatch.setattr(vllm_weights, "SHARED_MEMORY", shared)
        with vllm_weights.written_weights(SentWeights.of(model.named_parameters()), running.dtype) as path:
            read = vllm_weights.read_weights(path)
            assert os.stat(path).st_mode & 0o077 == 0  # for this user only
            assert not list(tmp_path.iterdir())  # it has no name
        named = dict(read)
        assert named.keys() == dict(model.named_parameters()).keys() == read.shapes.keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(named[name], parameter.to(running.dtype)), name  # mapped: they outlive the name
        vllm_weights.load_checkpoint_weights(running.runner, SentWeights.of(named.items()))
        assert running.fingerprint() == running.sent(model)


# -------------------------------------------------------------------------------------------------- tensor parallelism


class Ranks:
    """A tensor-parallel group whose ranks are threads. They take turns: vLLM's CPU kernels share scratch memory."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.building, self._local = world_size, 0, threading.local()
        self._shards: list[Any] = [None] * world_size
        self._barrier, self._turn = threading.Barrier(world_size, timeout=60), threading.Lock()

    @property
    def rank_in_group(self) -> int:
        """The rank of the calling thread, or of the model that is being built."""
        return getattr(self._local, "rank", self.building)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        self._shards[self.rank_in_group] = shard
        self._wait()
        whole = torch.cat(self._shards, dim)
        self._wait()
        return whole

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def run(self, task: Callable[[int], Any]) -> list[Any]:
        """``task(rank)`` on every rank."""

        def work(rank: int) -> Any:
            self._local.rank = rank
            with self._turn:
                try:
                    return task(rank)
                except BaseException:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, range(self.world_size)))


@pytest.fixture
def sharded(stock, monkeypatch, tmp_path) -> Any:
    """The ranks of a model, loaded without an engine: (group, a runner per rank)."""
    stock("Qwen3", "float32")  # starts what the model classes need
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def start(kind: str, dtype: str, world_size: int) -> tuple[Ranks, list[Any]]:
        group, runners = Ranks(world_size), []
        monkeypatch.setattr(parallel_state, "_TP", group)
        trainer(kind, 0).save_pretrained(tmp_path)
        for rank in range(world_size):
            group.building = rank
            args = EngineArgs(model=str(tmp_path), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True)
            config = args.create_engine_config()
            with set_current_vllm_config(config):
                model = get_model(vllm_config=config)

            runner = Mock(spec=GPUModelRunner, vllm_config=config, model_config=config.model_config, lora_config=None)
            runner.get_model = lambda model=model: model
            runner.reload_weights = partial(GPUModelRunner.reload_weights, runner)
            runners.append(runner)
        return group, runners

    return start


@pytest.mark.parametrize(("kind", "world_size"), [("Qwen3", 4), ("Phi3", 2)])
def test_adapters_are_split_as_their_layers_are(sharded, kind, world_size):
    """What the ranks' adapters add up to is B A x of the whole ones, be a layer fused or split."""
    pytest.importorskip("peft", reason="needs the lora extra")
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from tandemrl.rollout.vllm.weights import adapted_parameters, load_adapters, use_adapters

    group, juniors = sharded(kind, "float32", world_size)
    lora = LoraConfig(rank=3, alpha=6.0)
    plan, seniors = adapter_plan(trainer(kind, 0), lora), []
    for rank, junior in enumerate(juniors):
        group.building, config = rank, junior.vllm_config
        config.compilation_config.static_forward_context.clear()  # of layers by name, which the senior's have, too
        use_adapters(junior.get_model(), plan, SimpleNamespace(vllm_config=config))
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
        seniors.append(SimpleNamespace(get_model=lambda model=model: model, vllm_config=config))
    generator = torch.Generator().manual_seed(0)
    for seed in (1, 2):
        trained = trained_adapters(attach(trainer(kind, 0), lora, seed), seed, 1.0)
        wanted = dict(trained.named_parameters())
        for rank, senior in enumerate(seniors):
            group.building = rank
            load_adapters(senior.get_model(), SentWeights.of((n, p) for n, p in wanted.items() if ".lora_" in n))
        for found in group.run(lambda rank: dict(adapted_parameters(seniors[rank], juniors[rank]))):
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())

    deltas = {name: 2.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
              for name, layer in adapted_layers(trained).items()}  # fmt: skip
    layer, replicas = "model.layers.1.", max(1, world_size // 2)
    if kind == "Phi3":
        query, key, value = deltas[layer + "self_attn.qkv_proj"].split([128, 64, 64])  # four heads share two
        gate, up = deltas[layer + "mlp.gate_up_proj"].chunk(2)
    else:
        query, key, value = (deltas[f"{layer}self_attn.{part}_proj"] for part in "qkv")
        gate, up = (deltas[f"{layer}mlp.{part}_proj"] for part in ("gate", "up"))
    inputs = torch.randn(5, query.shape[1], generator=generator)
    wide = torch.randn(5, 96, generator=generator)
    down = torch.zeros(5, len(deltas[layer + "mlp.down_proj"]))
    for rank, senior in enumerate(seniors):
        here = senior.get_model().model.layers[1]
        own = [delta.chunk(world_size)[rank] for delta in (query, gate, up)]
        heads = [delta.chunk(world_size // replicas)[rank // replicas] for delta in (key, value)]
        for added_to, rows in ((here.self_attn.qkv_proj, [own[0], *heads]), (here.mlp.gate_up_proj, own[1:])):
            wanted_here = inputs @ torch.cat(rows).T
            found_here = added(added_to, inputs, wanted_here.shape[1])
            torch.testing.assert_close(found_here, wanted_here, rtol=1e-4, atol=1e-4)
        down += added(here.mlp.down_proj, wide.chunk(world_size, 1)[rank], down.shape[1])
    torch.testing.assert_close(down, wide @ deltas[layer + "mlp.down_proj"].T, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def added(layer: Any, inputs: Tensor, outputs: int) -> Tensor:
    """What a rank's adapters add to a layer's output."""
    return layer.adapters(inputs, torch.zeros(len(inputs), outputs))


def test_a_rank_whose_own_copy_is_outdated_is_noticed(sharded):
    """Two ranks hold every key head, and all ranks hold the norms."""
    from tandemrl.rollout.vllm.weights import hf_parameters

    group, runners = sharded("Llama", "float32", 4)
    read = lambda: group.run(lambda rank: fingerprint(hf_parameters(runners[rank])))  # noqa: E731
    assert read() == [fingerprint(trainer("Llama", 0).named_parameters())] * 4
    attention = runners[3].get_model().model.layers[0].self_attn
    attention.qkv_proj.bias.data[-1] += 1.0  # of the last value head: ranks 2 and 3
    runners[1].get_model().model.norm.weight.data[0] += 1.0
    first, second, third, fourth = read()
    assert first == third == fingerprint(trainer("Llama", 0).named_parameters())
    assert len({first, second, fourth}) == 3
