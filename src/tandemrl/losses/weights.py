"""How much each token counts in the loss, by who wrote it.

The losses treat senior and junior differently in one other place: ``policy_loss`` adds the λ_jun term over the junior's
tokens if ``junior_kl_coef`` is not 0. Everywhere else they use ``author`` only to tell responses from context
(``reduce``, ``totals``, ``token_rewards``). The trainer counts the same weights per rollout
(``training/experience.py``).
"""

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from tandemrl.types import Author


def token_weights(author: Int8[Tensor, " t"], *, junior_weight: float) -> Float[Tensor, " t"]:
    """The loss weight of every token: 0 for context, ``junior_weight`` for the junior's, 1 for the senior's.

    ``junior_weight=0`` is tandem GRPO (arXiv 2606.28166); ``junior_weight=1`` is plain GRPO on every response token.

    Examples:
        >>> token_weights(torch.tensor([-1, 0, 1], dtype=torch.int8), junior_weight=0.25).tolist()
        [0.0, 0.25, 1.0]
    """
    senior = (author == Author.SENIOR).to(torch.float32)
    junior = (author == Author.JUNIOR).to(torch.float32)
    return senior + junior_weight * junior
