"""The critic of PPO: a transformer with one number per token, V(s), run packed like the policy."""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandemrl.distributed.world import WHOLE, Shards
from tandemrl.models.attention import Layout, ModelError
from tandemrl.models.forward import channel_of, gathering, part_of, prefix_states
from tandemrl.models.head import PLAIN, ForwardOptions
from tandemrl.models.loading import check_folder, no_progress_bars, prepare, refusal, resolve_device
from tandemrl.types import Batch


def load_critic(path: str | Path, *, device: str = "cpu") -> PreTrainedModel:
    """A value model in eval mode, float32, on ``device``, wired to this library's attention, without dropout.

    Args:
        path: a causal LM, whose body is taken and whose first values are all 0, or a saved critic, whose head is kept.

    Raises:
        ModelError: not loadable, weights are missing, not one value per token, or an architecture that ``prepare``
            refuses.
    """
    check_folder(path)
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a causal LM has no value head; that is no news
    try:
        with no_progress_bars(), torch.random.fork_rng(devices=[]):  # transformers draws a missing head
            model, report = AutoModelForTokenClassification.from_pretrained(
                path, dtype=torch.float32, num_labels=1, output_loading_info=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise refusal("critic", path, error) from None
    finally:
        transformers_logging.set_verbosity(level)
    model.to(resolve_device(device))
    without_dropout(model)
    name, head = value_head(model)
    missing = {str(key) for key in report["missing_keys"]}
    if body := sorted(key for key in missing if not key.startswith(f"{name}.")):
        raise ModelError(f"critic {str(path)!r}: {len(body)} weights are missing there, the first is {body[0]}")
    weight, bias = head.weight.detach().clone(), None if head.bias is None else head.bias.detach().clone()
    with torch.no_grad():  # a probe through a head of zeros would prove nothing
        head.weight.copy_(torch.linspace(-1, 1, head.in_features))
        prepare(model, name=f"critic {str(path)!r}", head=head)
        head.weight.copy_(torch.zeros_like(weight) if missing else weight)
        if bias is not None:
            head.bias.copy_(torch.zeros_like(bias) if missing else bias)
    return model


def without_dropout(model: nn.Module) -> None:
    """Switch dropout off, in place: token classifiers have it before their head."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The linear map from a hidden state to its value, and its name.

    Raises:
        ModelError: there is none.
    """
    for name in ("score", "classifier"):  # what transformers calls it, by architecture
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear) and head.out_features == 1:
            return name, head
    raise ModelError(f"{type(model).__name__} has no linear head with one output; it cannot be a critic")


def token_values(
    model: PreTrainedModel,
    batch: Batch,
    *,
    select: Bool[Tensor, " t"],
    options: ForwardOptions = PLAIN,
    shards: Shards = WHOLE,
) -> Float[Tensor, " t"]:
    """V of the state in which each selected token was chosen: what is expected of the rest, read before the token.

    Entries that are not selected, and the first token of a sequence, are 0.0.

    Args:
        options, shards: as for ``forward.token_logprobs``. Of the options only those of computing matter, and all
            processes of ``shards.tensor`` have the whole head.

    Returns:
        float32; entry i describes token i, from the hidden state of token i - 1.
    """
    index = (select & (batch.positions > 0)).nonzero().squeeze(1)
    part = part_of(batch, index, shards.sequence)
    values = gathering(packed_values, model)(part.tokens, part.positions, part.layout, part.prefixes, options)
    return channel_of(values, part, batch, shards.sequence)


def packed_values(
    model: PreTrainedModel,
    tokens: Int64[Tensor, " k"],
    positions: Int64[Tensor, " k"],
    layout: Layout,
    prefixes: Int64[Tensor, " i"],
    options: ForwardOptions,
) -> Float[Tensor, " i"]:
    """Value after token ``prefixes[i]``: all that a pass does with the critic's parameters. The head is float32."""
    hidden = prefix_states(model, tokens, positions, layout, prefixes, options)
    _, head = value_head(model)
    bias = None if head.bias is None else head.bias.float()
    return F.linear(hidden.float(), head.weight.float(), bias).squeeze(1).clone()  # FSDP warns of a view
