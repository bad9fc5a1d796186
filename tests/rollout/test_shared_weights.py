"""A senior that is adapters on the junior's own weights, against one whose weights are merged."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from helpers import llama, prepared, prompts, qwen3, requests, tokenizer, trained_adapters
from runs import config
from tandemrl.config import LoraConfig
from tandemrl.models.lora import AdapterDropout, adapted_alias, attach
from tandemrl.rollout.engine import Completion, EngineError, Sampling
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import bernoulli
from tandemrl.training.build import build

pytest.importorskip("peft", reason="needs the lora extra")

LORA = LoraConfig(rank=3, alpha=6.0, dropout=0.4)


class Listener(TorchEngine):
    """Remembers the names of the weights that came last."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        came = dict(weights)
        self.came = set(came)
        super().load_weights(came.items(), version)


def shared(base: PreTrainedModel, **options: object) -> Listener:
    return Listener(adapted_alias(base, LORA, seed=0), base, tokenizer(), **options)


learn = partial(trained_adapters, scale=0.05)


def write(engine: TorchEngine) -> list[Completion]:
    batch = requests(prompts(20), Sampling(max_tokens=40, temperature=0.8), bernoulli(0.5))
    return [completion for group in engine.generate(batch) for completion in group]


def addresses(model: nn.Module) -> dict[str, int]:
    return {n.replace("base_layer.", ""): p.data_ptr() for n, p in model.named_parameters() if ".lora_" not in n}


@pytest.mark.parametrize(("make", "draft_tokens"), [(qwen3, 0), (llama, 4)])  # tied; biased
def test_both_write_what_they_write_with_merged_weights(make, draft_tokens: int) -> None:
    base = prepared(make())
    policy = learn(attach(prepared(make()), LORA, seed=5).train(), seed=1)
    one, other = shared(base, draft_tokens=draft_tokens), TorchEngine(prepared(make()), base, tokenizer())
    before = write(one)
    for engine in (one, other):
        sync_weights(policy, engine, 1)
    pairs = list(zip(write(one), write(other), strict=True))
    same = [(a, b) for a, b in pairs if a.tokens.tolist() == b.tokens.tolist()]
    assert len(same) >= len(pairs) - 1  # a rounded logit
    for a, b in same:
        assert a.author.tolist() == b.author.tolist()
        assert np.abs(a.behaviour_logprobs - b.behaviour_logprobs).max() < 1e-4
    assert [c.tokens.tolist() for c in before] != [a.tokens.tolist() for a, _ in pairs]
    assert (one.passes.accepted > 0) == (draft_tokens > 0)


def test_adapters_alone_travel_and_the_base_is_one_storage() -> None:
    engine = shared(prepared(qwen3()))
    policy = learn(attach(prepared(qwen3()), LORA, seed=5), seed=1)
    assert engine.info.adapters
    junior, before = engine.fingerprint("junior"), engine.fingerprint()
    first = sync_weights(policy, engine, 1)
    assert first == engine.fingerprint() == fingerprint(policy.named_parameters()) != before
    assert engine.came == {name for name, _ in policy.named_parameters() if ".lora_" in name}
    assert sync_weights(learn(policy, seed=2), engine, 2) != first
    assert engine.fingerprint("junior") == junior == fingerprint(prepared(qwen3()).named_parameters())
    assert addresses(engine.senior) == addresses(engine.models[0])
    assert not any(isinstance(module, AdapterDropout) for module in engine.senior.modules())


def test_another_base_does_not_go_unseen() -> None:
    engine = shared(prepared(qwen3()))
    with pytest.raises(EngineError, match="weights did not reach the engine"):
        sync_weights(attach(prepared(qwen3(9)), LORA, seed=5), engine, 1)
    with pytest.raises(EngineError, match="28 names differ"):
        sync_weights(prepared(qwen3()), engine, 1)
    engine.models[0].get_parameter("model.norm.weight").data[0] += 1  # of the senior, too
    with pytest.raises(EngineError, match="weights did not reach the engine"):
        sync_weights(attach(prepared(qwen3()), LORA, seed=5), engine, 1)


@pytest.mark.parametrize(
    ("settings", "one_base"),
    [
        (("model.lora.rank=2", "model.junior={link}/senior"), "the trainer's"),
        (("model.lora.rank=2", "model.junior=null", "model.dtype=bfloat16"), "the engine's"),
        (("model.lora.rank=2",), None),
        (("model.junior=null",), None),
        (("model.lora.rank=2", "model.junior=null", "selection.strategy=solo"), None),
    ],
)
def test_the_base_is_shared_where_it_can_be(settings, one_base, tiny_pair, tmp_path):
    link = tmp_path / "pair"
    link.symlink_to(tiny_pair)
    run = build(config(tiny_pair, tmp_path / "out", *(setting.format(link=link) for setting in settings)))
    policy, engine = run.models.policy, run.models.engine
    assert isinstance(engine, TorchEngine)
    assert engine.info.adapters == (one_base is not None)
    senior, junior, trained = (addresses(m) if m is not None else {} for m in (engine.senior, engine.junior, policy))
    assert (senior == junior) == (one_base is not None)
    assert (junior == trained) == (one_base == "the trainer's")
    sync_weights(policy, engine, 1)


def test_a_senior_in_bfloat16_has_the_positions_of_the_policy(tiny_pair: Path, tmp_path: Path) -> None:
    """RoPE's frequencies in 16 bits would be wrong by whole turns after some hundred tokens."""
    models = build(config(tiny_pair, tmp_path / "run", "model.dtype=bfloat16")).models
    policy, engine = (dict(model.named_buffers()) for model in (models.policy, models.engine.senior))
    assert policy.keys() == engine.keys()
    for name, buffer in policy.items():
        assert engine[name].dtype == torch.float32
        assert torch.equal(engine[name], buffer)
