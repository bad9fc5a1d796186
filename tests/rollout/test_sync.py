"""Weights arrive, or it is noticed: every changed, moved or dropped number changes the checksum."""

import weakref
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import prepared, prompts, qwen3, requests, small_qwen3, tokenizer
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.models.loading import prepare
from tandemrl.rollout import sync
from tandemrl.rollout.engine import EngineError, Sampling
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo
from tandemrl.selection.draws import mix64


def tandem(kind: type[TorchEngine] = TorchEngine, *, dtype: torch.dtype = torch.float32) -> TorchEngine:
    senior = prepare(qwen3(0).to(dtype))
    return kind(senior, prepare(small_qwen3().to(dtype)), tokenizer())


# ------------------------------------------------------------------------------------------------------------- checksum


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(5, 7, generator=generator), "b": torch.randn(7, generator=generator), "c": torch.zeros(3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_any_changed_element_changes_the_fingerprint(dtype):
    given = {name: value.to(dtype) for name, value in tensors().items()}
    original = fingerprint(given.items())
    assert fingerprint((name, value.clone()) for name, value in given.items()) == original
    for name, value in given.items():
        for index in range(value.numel()):
            bits = value.clone().flatten().view(torch.uint8)
            size = value.element_size()
            if value.flatten()[index]:
                bits[index * size] ^= 1  # the smallest change there is
            else:
                bits[index * size + size - 1] ^= 0x40  # zero becomes two
            changed = given | {name: bits.view(dtype).reshape(value.shape)}
            assert fingerprint(changed.items()) != original, (name, index)


def test_moved_numbers_and_swapped_names_change_the_fingerprint():
    given = tensors()
    original = fingerprint(given.items())
    assert fingerprint((given | {"a": given["a"].flip(0)}).items()) != original
    assert fingerprint((given | {"a": given["a"].flip(1)}).items()) != original
    assert fingerprint([("a", given["b"]), ("b", given["a"]), ("c", given["c"])]) != original
    assert fingerprint(list(given.items())[:-1]) != original  # even a tensor of zeros is missed
    assert fingerprint([]) == 0


def test_the_fingerprint_is_the_weighted_sum_of_the_words():
    """Against NumPy, in parts and at once."""
    values = torch.randn(2 * sync._PART + 5, generator=torch.Generator().manual_seed(0))
    words = np.append(values.numpy(), np.float32(0)).view(np.uint64)
    with np.errstate(over="ignore"):
        words = words + (words >> np.uint64(32))
        expected = int((words * (2 * np.arange(len(words), dtype=np.uint64) + 1)).sum(dtype=np.uint64))
    signed = expected - 2**64 if expected >= 2**63 else expected
    assert fingerprint([("a", values)]) == mix64(signed, *b"a")


def test_changes_of_high_bits_alone_are_noticed():
    """In a sum of 64-bit words, what overflows is lost: an even number of changed sign bits would cancel out."""
    values = torch.randn(4, 2**17, generator=torch.Generator().manual_seed(0))
    negated = values.clone()
    negated[:, 1::2] *= -1
    assert fingerprint([("a", negated)]) != fingerprint([("a", values)])
    values = values.bfloat16()
    negated = values.clone()
    negated[:, 3::4] *= -1
    assert fingerprint([("a", negated)]) != fingerprint([("a", values)])
    swapped, places = values.clone().flatten(), [3, 3 + 4 * 2**15]
    swapped[places] = swapped[places[::-1]]
    assert swapped[3] != values.flatten()[3]
    assert fingerprint([("a", swapped.view_as(values))]) != fingerprint([("a", values)])


# ----------------------------------------------------------------------------------------------------------------- sync


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_arrive_and_the_junior_is_untouched(dtype):
    engine = tandem(dtype=dtype)
    trainer = prepared(qwen3(9))
    senior, junior = engine.fingerprint("senior"), engine.fingerprint("junior")
    agreed = sync_weights(trainer, engine, 1)
    assert agreed == engine.fingerprint() != senior
    assert engine.fingerprint("junior") == junior
    assert engine.policy_version == 1
    for name, parameter in engine.senior.named_parameters():
        assert torch.equal(parameter, dict(trainer.named_parameters())[name].to(dtype)), name


def test_after_a_sync_the_engine_writes_with_the_new_weights():
    engine = tandem()
    trainer = prepared(qwen3(9))
    batch = requests(prompts(3), Sampling(max_tokens=10), solo("senior"))
    old = [group[0] for group in engine.generate(batch)]
    sync_weights(trainer, engine, 5)
    new = [group[0] for group in engine.generate(batch)]
    assert [c.tokens.tolist() for c in old] != [c.tokens.tolist() for c in new]
    for prompt, completion in zip(prompts(3), new, strict=True):
        packed = pack_tokens([[*prompt, *completion.tokens.tolist()]])
        logprobs, *_ = token_scores(trainer, packed, select=packed.positions >= len(prompt))
        torch.testing.assert_close(
            logprobs[len(prompt) :].detach(), torch.from_numpy(completion.behaviour_logprobs), rtol=0, atol=5e-5
        )
        assert completion.policy_version == 5


def test_training_on_does_not_change_the_engine():
    """The weights are copied, not shared: a later optimiser step must not leak into running rollouts."""
    engine = tandem()
    trainer = prepared(qwen3(9))
    agreed = sync_weights(trainer, engine, 1)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(1.0)
    assert engine.fingerprint() == agreed
    assert sync_weights(trainer, engine, 2) != agreed


class Deaf(TorchEngine):
    """Reports the new version and keeps the old weights."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.policy_version = version


class Forgetful(TorchEngine):
    """Loads the weights and keeps the old version."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, self.policy_version)


class OneOff(TorchEngine):
    """Gets one number of one tensor wrong, by one bit."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        parameter = dict(self.senior.named_parameters())["model.layers.1.self_attn.k_norm.weight"]
        parameter.data.view(torch.int32)[3] ^= 1


@pytest.mark.parametrize("kind", [Deaf, Forgetful, OneOff])
def test_weights_that_did_not_arrive_are_noticed(kind):
    engine = tandem(kind)
    with pytest.raises(EngineError, match=r"weights did not reach the engine: version \d+ \(sent 7\).* stale policy"):
        sync_weights(prepared(qwen3(9)), engine, 7)


def test_weights_are_gathered_one_by_one(monkeypatch):
    """Each is in the engine, and nobody holds it, before the next one is gathered."""
    engine, trainer, gathered = tandem(), prepared(qwen3(9)), list[weakref.ref[Tensor]]()
    own = dict(engine.senior.named_parameters())

    def copies(model):
        last = None
        for name, parameter in model.named_parameters():
            assert last is None or torch.equal(own[last[0]], last[1])
            assert sum(each() is not None for each in gathered) <= 1
            last = name, parameter
            gathered.append(weakref.ref(whole := parameter.detach().clone()))
            yield name, whole

    monkeypatch.setattr(sync, "merged_parameters", copies)
    sync_weights(trainer, engine, 1)
    assert len(gathered) == len(own)


def test_an_engine_whose_load_was_cut_off_writes_nothing(monkeypatch):
    engine, trainer = tandem(), prepared(qwen3(9))
    batch = requests(prompts(1), Sampling(max_tokens=3), solo("senior"))

    def cut_off(model):
        yield from list(model.named_parameters())[:3]
        raise ConnectionError("a rank is gone")

    monkeypatch.setattr(sync, "merged_parameters", cut_off)
    with pytest.raises(ConnectionError):
        sync_weights(trainer, engine, 1)
    with pytest.raises(EngineError, match="some are old and some new; load all of them again"):
        engine.generate(batch)
    monkeypatch.undo()
    sync_weights(trainer, engine, 1)
    assert engine.generate(batch)
