"""Log-probs and entropies straight from hidden states and the LM head: [t, v] logits never exist."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor

from tandemrl.models.sampling import Truncation, kept_tokens

REMOVED = -1e30  # logit of a truncated token: probability 0 like -inf, but p·logit stays 0 and not NaN
TAKEN_OVER = 1  # events that are not the drawing of a token from the whole vocabulary
WORD_END = 2
MIN_WORD_END_PROB = 1e-37  # relative to that of the best token; below it, the log-prob of an end stays constant
LOGITS_PER_CHUNK = 2**25  # float32 logits per buffer: 128 MiB; two buffers are alive at once, without truncation


class ForwardOptions(NamedTuple):
    """How a model scores tokens: the distribution that the tokens were drawn from, and how it is computed."""

    temperature: float = 1.0
    """The distribution is ``softmax(logits / temperature)``."""
    truncation: Truncation | None = None
    """Tokens that the truncation removes have probability 0, except the scored token itself, which is always kept."""
    vocabulary: int | None = None
    """How many token ids the engine sampled from, if the model has more logits. None means all of the model's."""
    autocast: torch.dtype | None = None
    """The compute dtype of the matrix products. None means the model's, or the one given to ``sharding.shard``."""
    activation_offload: bool = False
    """Whether to keep in host memory what the layers save for backward."""
    starts: Tensor | None = None
    """True at the ids that the first token after a handover is drawn from (``Strategy.starts``)."""
    removed: Tensor | None = None
    """True at the ids that are never drawn (``Strategy.removed``)."""


PLAIN = ForwardOptions()
"""Temperature 1, no truncation, the model's own dtype."""


class HeadSettings(NamedTuple):
    """What ``linear_logprobs`` has to know about the LM head beside the weight that it is given."""

    rows: int
    """How many rows the whole LM head has, over all tensor-parallel ranks."""
    options: ForwardOptions = PLAIN
    group: dist.ProcessGroup | None = None
    """The tensor-parallel ranks that share the rows of the head, if they do. Rank i holds the i-th of equal parts; the
    last part may be smaller."""

    @property
    def part(self) -> int:
        """How many rows each rank holds, except that the last one may hold fewer."""
        return self.rows if self.group is None else -(-self.rows // self.group.size())

    @property
    def first(self) -> int:
        """The token id of the first row that this rank holds."""
        return 0 if self.group is None else self.part * self.group.rank()

    def chunks(self, count: int) -> list[slice]:
        """The chunks of ``count`` tokens whose logits are in memory together, the same on every rank of ``group``."""
        return _slices(count, self.part if self.options.truncation is None else self.rows)


def linear_logprobs(
    hidden: Float[Tensor, "i h"],
    weight: Float[Tensor, "v h"],
    bias: Float[Tensor, " v"] | None,
    targets: Int64[Tensor, " i"],
    settings: HeadSettings,
    events: Int8[Tensor, " i"] | None = None,
) -> tuple[Float[Tensor, " i"], Float[Tensor, " i"]]:
    """The log-prob of each target under softmax(hidden Wᵀ / T), and the entropy of that distribution (nats, float32).

    The logits are computed in chunks of tokens and recomputed in backward. With z the scaled logits, p = softmax(z) and
    H the entropy: ∂logp_y/∂z = 1_y − p and ∂H/∂z = −p(log p + H). Ranks that share the vocabulary exchange only sums
    over it (Megatron-LM, arXiv 1909.08053, section 3), and with truncation also the logits of a chunk.

    Args:
        hidden: the last hidden state before each target.
        weight: the rows of the LM head that this rank holds.
        bias: their biases, if the head has any.
        targets: token ids, over the whole vocabulary.
        settings: the size of the whole head, and how to compute.
        events: what gets the log-prob. 0: the target. ``TAKEN_OVER``: the target, where logits outside of
            ``options.starts`` were removed before truncation. ``WORD_END``: that any token of ``options.starts`` is
            drawn; the best of them counts as not truncated, and the target as nothing. None: 0 everywhere. With P the
            probability of the starts, ∂logP/∂z = p·1_starts/P − p.
    """
    return _LinearLogprobs.apply(hidden, weight, bias, targets, settings, events)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, settings, events):
        ctx.set_materialize_grads(False)
        ctx.settings = settings
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy, logprobs, events)
        weight, bias = _cast(weight, bias, settings.options.autocast)
        for rows in settings.chunks(hidden.shape[0]):
            event = None if events is None else events[rows]
            z = _logits(hidden[rows], weight, bias, targets[rows], settings, event)
            largest = z.amax(-1)
            if settings.group is not None:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=settings.group)
            z.sub_(largest[:, None])
            here, mine = _local(targets[rows], z.shape[1], settings)
            target = torch.where(mine, z.gather(1, here[:, None]).squeeze(1), 0.0)
            p = z.exp()
            if event is not None:
                ends = (event == WORD_END).nonzero().squeeze(1)
                inside = p[ends].masked_fill_(~_starts(settings, z), 0.0).sum(-1)
                target[ends] = inside  # a sum over ranks, unlike a logit; its logarithm is taken below
            sums = torch.stack([p.sum(-1), p.mul_(z).sum(-1), target])
            if settings.group is not None:
                dist.all_reduce(sums, group=settings.group)
            del p, z  # before the next chunk's are made
            log_sum = sums[0].log()
            normaliser[rows] = largest + log_sum
            entropy[rows] = log_sum - sums[1] / sums[0]
            if event is not None:
                sums[2, ends] = sums[2, ends].clamp_(min=MIN_WORD_END_PROB).log_()
            logprobs[rows] = sums[2] - log_sum
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, normaliser, entropy, logprobs, events = ctx.saved_tensors
        settings, like = ctx.settings, weight
        grad_hidden = torch.empty_like(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None  # frozen under adapters
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        weight, bias = _cast(weight, bias, settings.options.autocast)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        for rows in settings.chunks(hidden.shape[0]):
            x = hidden[rows].to(weight.dtype)
            event = None if events is None else events[rows]
            logp = _logits(x, weight, bias, targets[rows], settings, event).sub_(normaliser[rows, None])
            g = grad_logprobs[rows, None]
            if event is not None:
                ends = (event == WORD_END).nonzero().squeeze(1)
                inside = (logp[ends] - logprobs[rows][ends, None]).exp_().masked_fill_(~_starts(settings, logp), 0.0)
            if grad_entropy is None:
                grad = logp.exp_().mul_(-g)
            else:
                slope = (logp + entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(g).neg_()
                grad = logp.exp_().mul_(slope)
                del slope
            here, mine = _local(targets[rows], grad.shape[1], settings)
            if event is not None:
                mine[ends] = False
                grad[ends] += inside.mul_(g[ends])
            grad.scatter_add_(1, here[:, None], torch.where(mine[:, None], g, 0.0))
            if settings.options.temperature != 1.0:
                grad.div_(settings.options.temperature)
            grad = grad.to(weight.dtype)
            grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            if grad_weight is not None:
                _add_outer(grad_weight, grad, x)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            del grad, logp  # before the next chunk's are made
        if settings.group is not None:
            dist.all_reduce(grad_hidden, group=settings.group)
        grad_weight, grad_bias = (None if g is None else g.to(like.dtype) for g in (grad_weight, grad_bias))
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _slices(count: int, width: int) -> list[slice]:
    size = max(1, LOGITS_PER_CHUNK // width)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """The LM head in the compute dtype. It is cast once per pass, not once per chunk."""
    return (weight, bias) if dtype is None else (weight.to(dtype), None if bias is None else bias.to(dtype))


def _local(targets: Tensor, rows: int, settings: HeadSettings) -> tuple[Int64[Tensor, " r"], Bool[Tensor, " r"]]:
    """The row of each target among those of this rank, and whether this rank holds it. If it does not, the row is 0."""
    here = targets - settings.first
    mine = (here >= 0) & (here < rows)
    return torch.where(mine, here, 0), mine


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: HeadSettings, events: Tensor | None
) -> Float[Tensor, "r v"]:
    """The scaled, masked and truncated logits of this rank's part of the vocabulary, in a new tensor."""
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float()
    options, first, rows = settings.options, settings.first, weight.shape[0]
    if options.vocabulary is not None and options.vocabulary < first + rows:
        logits[:, max(0, options.vocabulary - first) :] = REMOVED
    if options.temperature != 1.0:
        logits.div_(options.temperature)
    if options.removed is not None:
        logits.masked_fill_(_share(options.removed, settings, logits), REMOVED)
    if events is not None:
        taken = (events == TAKEN_OVER).nonzero().squeeze(1)
        logits[taken] = logits[taken].masked_fill_(~_starts(settings, logits), REMOVED)
    if options.truncation is not None:
        whole = _gathered(logits, settings)
        if events is not None:
            best = whole.masked_fill(~_starts(settings._replace(group=None), whole), -torch.inf).argmax(-1)
            targets = torch.where(events == WORD_END, best, targets)
        keep = kept_tokens(whole, options.truncation).scatter_(1, targets[:, None], True)
        logits.masked_fill_(~keep[:, first : first + rows], REMOVED)
    return logits


def _starts(settings: HeadSettings, logits: Tensor) -> Bool[Tensor, " v"]:
    """Which of the logits of this rank's part of the vocabulary are those of ``options.starts``."""
    assert settings.options.starts is not None
    return _share(settings.options.starts, settings, logits)


def _share(table: Tensor, settings: HeadSettings, logits: Tensor) -> Bool[Tensor, " v"]:
    """The part of a table of ids that is about these logits."""
    part = table[settings.first : settings.first + logits.shape[1]].to(logits.device)
    return F.pad(part, (0, logits.shape[1] - len(part)))


def _gathered(logits: Tensor, settings: HeadSettings) -> Float[Tensor, "r v"]:
    """The logits of the whole vocabulary, gathered from all ranks. Truncation depends on all of a token's."""
    if settings.group is None:
        return logits
    own = F.pad(logits, (0, settings.part - logits.shape[1]), value=REMOVED)
    parts = [torch.empty_like(own) for _ in range(settings.group.size())]
    dist.all_gather(parts, own.contiguous(), group=settings.group)
    return torch.cat(parts, dim=1)


def _add_outer(total: Float[Tensor, "v h"], grad: Float[Tensor, "r v"], hidden: Float[Tensor, "r h"]) -> Any:
    """total += gradᵀ hidden, without allocating another tensor of the size of ``total``."""
    if total.dtype == grad.dtype:
        return total.addmm_(grad.T, hidden)
    for columns in _slices(grad.shape[1], hidden.shape[1]):
        total[columns].add_(grad[:, columns].T @ hidden)  # += would copy the columns onto themselves
    return total
