"""The critic against untouched transformers models: values, gradients, heads, refusals."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packing import assert_equal_gradients, everything, sequences
from transformers import AutoModelForTokenClassification, PreTrainedModel

from helpers import gpt2, llama, qwen3
from tandemrl.losses import value_loss
from tandemrl.models.attention import ModelError
from tandemrl.models.batching import pack_tokens
from tandemrl.models.critic import load_critic, token_values, value_head
from tandemrl.types import Batch

MODELS: dict[str, Callable[[], PreTrainedModel]] = {"qwen3": qwen3, "llama": llama, "gpt2": gpt2}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A causal LM as ``NAME`` and a critic with a trained head as ``NAME-critic``."""
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            if name.endswith("-critic"):
                critic = AutoModelForTokenClassification.from_pretrained(folder(name[: -len("-critic")]), num_labels=1)
                _, head = value_head(critic)
                generator = torch.Generator().manual_seed(7)
                for parameter in head.parameters():
                    parameter.data = torch.randn(parameter.shape, generator=generator)
                critic.save_pretrained(root / name)
            else:
                MODELS[name]().save_pretrained(root / name)
        return root / name

    return folder


def direct_values(path: Path, given: list[list[int]]) -> tuple[PreTrainedModel, torch.Tensor]:
    """V before each token by one plain forward per sequence of stock transformers; 0 before the first."""
    model = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    rows = [model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1, 0] for tokens in given]
    return model, torch.cat([torch.cat([row.new_zeros(1), row]) for row in rows])


def loss_of(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Made-up returns, the same for a sequence in any batch."""
    returns = 2 * torch.sin(batch.tokens + 0.3 * batch.positions)
    return value_loss(values, returns + 1, returns).sum()


@every_model
@pytest.mark.parametrize("lengths", [[9], [1, 5, 2, 17, 9, 17, 40, 3]], ids=["one", "several buckets"])
def test_values_and_gradients_are_those_of_separate_sequences(name, lengths, folders):
    given = sequences(lengths)
    reference, wanted = direct_values(folders(f"{name}-critic"), given)
    critic = load_critic(folders(f"{name}-critic"))
    batch = pack_tokens(given)
    values = token_values(critic, batch, select=everything(batch))
    torch.testing.assert_close(values, wanted, rtol=0, atol=1e-5)

    loss_of(values, batch).backward()
    loss_of(wanted, batch).backward()
    assert_equal_gradients(*({key: p.grad for key, p in each.named_parameters()} for each in (critic, reference)))


@every_model
def test_a_causal_lm_becomes_a_critic_that_knows_nothing(name, folders):
    before = torch.get_rng_state()
    critic = load_critic(folders(name))
    assert torch.equal(torch.get_rng_state(), before)
    batch = pack_tokens(sequences([9, 4]))
    assert (token_values(critic, batch, select=everything(batch)) == 0).all()
    assert {p.dtype for p in critic.parameters()} == {torch.float32}
    assert not critic.training
    assert all(module.p == 0 for module in critic.modules() if isinstance(module, torch.nn.Dropout))
    body = dict(MODELS[name]().base_model.named_parameters())
    assert body
    assert all(torch.equal(critic.base_model.get_parameter(key), value) for key, value in body.items())


def test_a_saved_critic_keeps_its_head_bitwise(folders, tmp_path):
    critic = load_critic(folders("qwen3-critic"))
    critic.save_pretrained(tmp_path)
    assert "tandemrl" not in (tmp_path / "config.json").read_text()
    again = load_critic(tmp_path)
    state = again.state_dict()
    assert state.keys() == critic.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in critic.state_dict().items())
    assert value_head(again)[1].weight.abs().sum() > 0


def test_refusals(folders, tmp_path):
    two = AutoModelForTokenClassification.from_pretrained(folders("qwen3"), num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ModelError, match="could not be loaded"):
        load_critic(tmp_path / "two")
    shutil.copytree(folders("gpt2"), tmp_path / "torn")
    state = {k: v for k, v in MODELS["gpt2"]().state_dict().items() if "ln_f" not in k and k != "lm_head.weight"}
    from safetensors.torch import save_file

    save_file(state, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"2 weights are missing there, the first is transformer\.ln_f\.bias"):
        load_critic(tmp_path / "torn")
