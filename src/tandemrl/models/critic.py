"""The critic of PPO: a transformer that gives one number V(s) per token. It runs on packed batches like the policy."""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tandemrl.models.attention import ModelError
from tandemrl.models.forward import Part, channel_of, part_of, prefix_states, with_gathered_parameters
from tandemrl.models.head import PLAIN, ForwardOptions
from tandemrl.models.loading import from_files, prepare, refuse_missing, resolve_device
from tandemrl.processes.world import WHOLE, Shards
from tandemrl.types import Batch


def load_critic(path: str | Path, *, device: str = "cpu") -> PreTrainedModel:
    """Load a value model in float32 and eval mode, with this library's attention and without dropout.

    Args:
        path: a causal LM or a saved critic. Of a causal LM the body is taken, and the new head gives values of 0. A
            saved critic keeps its head.

    Raises:
        ModelError: the model cannot be loaded, weights are missing, it does not give one value per token, or
            ``prepare`` refuses its architecture.
    """
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a causal LM has no value head; that is no news
    try:
        with torch.random.fork_rng(devices=[]):  # transformers draws a missing head
            model, missing = from_files(
                AutoModelForTokenClassification, path, "critic", dtype=torch.float32, num_labels=1
            )
    finally:
        transformers_logging.set_verbosity(level)
    model.to(resolve_device(device))
    without_dropout(model)
    name, head = value_head(model)
    refuse_missing("critic", path, [key for key in missing if not key.startswith(f"{name}.")])
    own = {key: torch.zeros_like(value) if missing else value.clone() for key, value in head.state_dict().items()}
    with torch.no_grad():  # a probe through a head of zeros would prove nothing
        head.weight.copy_(torch.linspace(-1, 1, head.in_features))
    prepare(model, name=f"critic {str(path)!r}", head=head)
    head.load_state_dict(own)
    return model


def without_dropout(model: nn.Module) -> None:
    """Switch dropout off, in place. Token classifiers have it before their head."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The linear map from a hidden state to its value, and its name.

    Raises:
        ModelError: the model has no such map.
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
    """The value V of the state in which each selected token was chosen, that is of the prefix before the token.

    Entries that are not selected, and the first token of a sequence, are 0.0.

    Args:
        select: True at the tokens that get a value.
        options: as for ``forward.token_scores``. The temperature, the truncation and the vocabulary are not used.
        shards: as for ``forward.token_scores``, but every process of ``shards.tensor`` has the whole head.

    Returns:
        The values in float32. Entry i describes token i, and is computed from the hidden state of token i - 1.
    """
    index = (select & (batch.positions > 0)).nonzero().squeeze(1)
    part = part_of(batch, index, shards.sequence)
    values = with_gathered_parameters(packed_values, model)(part, options)
    return channel_of(values, part, batch.tokens.shape[0], shards.sequence)


def packed_values(model: PreTrainedModel, part: Part, options: ForwardOptions) -> Float[Tensor, " i"]:
    """The value after each token ``part.prefixes[i]``. The head computes in float32.

    This function holds everything that a pass does with the critic's parameters (see ``with_gathered_parameters``).
    """
    hidden = prefix_states(model, part, options)
    _, head = value_head(model)
    bias = None if head.bias is None else head.bias.float()
    return F.linear(hidden.float(), head.weight.float(), bias).squeeze(1).clone()  # FSDP warns of a view
