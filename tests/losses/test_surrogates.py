import math

import pytest
import torch

from helpers import totals_of
from tandemrl.losses import (
    cispo,
    importance_weights,
    log_ratio,
    ppo_clip,
    reduce,
    reinforce,
    sequence_old_logprobs,
    value_loss,
)

IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1])
AUTHOR = torch.tensor([-1, 1, 1, -1, 1, 0, 1], dtype=torch.int8)
SENIOR = (AUTHOR == 1).double()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "expected", "slope"),
    [  # clip range [0.8, 1.28]; slope = d loss / d logprob
        (1.0, 2.0, None, -2.0, -2.0),
        (1.25, 2.0, None, -2.5, -2.5),
        (1.5, 2.0, None, -2.56, 0.0),
        (0.5, 2.0, None, -1.0, -1.0),
        (0.5, -2.0, None, 1.6, 0.0),
        (1.5, -2.0, None, 3.0, 3.0),
        (4.0, -2.0, None, 8.0, 8.0),
        (4.0, -2.0, 3.0, 6.0, 0.0),
        (1.5, -2.0, 3.0, 3.0, 3.0),
        (4.0, 2.0, 3.0, -2.56, 0.0),
    ],
)
def test_ppo_clip_table(ratio, advantage, dual, expected, slope):
    logprobs = double(-1.0 + math.log(ratio)).requires_grad_()
    loss = ppo_clip(logprobs, double(-1.0), double(advantage), clip_low=0.2, clip_high=0.28, dual_clip=dual)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert logprobs.grad.item() == pytest.approx(slope)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    ratio, advantages = double(0.1, 1.0, 9.0), double(1.0, -2.0, 3.0)
    logprobs = double(-0.5, -0.5, -0.5).requires_grad_()
    loss = cispo(logprobs, logprobs.detach() - ratio.log(), advantages, clip_low=None, clip_high=4.0)
    loss.sum().backward()
    assert torch.allclose(logprobs.grad, -double(0.1, 1.0, 5.0) * advantages)
    assert torch.allclose(loss, -double(0.1, 1.0, 5.0) * advantages * -0.5)


@pytest.mark.parametrize(
    "surrogate",
    [
        lambda new, old, adv: ppo_clip(new, old, adv, clip_low=0.2, clip_high=0.28),
        lambda new, old, adv: ppo_clip(new, old, adv, clip_low=0.2, clip_high=0.2, dual_clip=3.0),
        lambda new, old, adv: reinforce(new, old, adv),
        lambda new, old, adv: value_loss(new, old, adv, clip=0.5),
        lambda new, old, adv: value_loss(new, old, adv, clip=None),
    ],
)
def test_gradcheck(surrogate):
    new, old, advantages = randn(12, seed=3).requires_grad_(), randn(12, seed=4), 2 * randn(12, seed=5)
    assert torch.autograd.gradcheck(lambda x: surrogate(x, old, advantages), (new,))


@pytest.mark.parametrize("clips", [{"clip_low": 3.0, "clip_high": 3.0}, {"clip_low": 3e-4, "clip_high": 4e-4}])
@pytest.mark.parametrize("junior_weight", [0.0, 0.5, 1.0])
def test_gspo_gradient_is_that_of_the_clipped_sequence_ratio(clips, junior_weight):
    weights = SENIOR + junior_weight * (AUTHOR == 0)
    new, old = randn(7, seed=6).requires_grad_(), randn(7, seed=6) + 0.2 * randn(7, seed=7)
    advantages = double(1.5, -0.5)
    counts = totals_of(weights, AUTHOR, IDS, num_sequences=2)
    x = ppo_clip(new, sequence_old_logprobs(new, old, weights, IDS, num_sequences=2), advantages[IDS], **clips)
    loss = reduce(x, weights, AUTHOR, IDS, num_sequences=2, totals=counts, reduction="sequence_mean_token_mean")
    (gradient,) = torch.autograd.grad(loss, new)

    direct = double(0.0)[0]
    for s in range(2):  # the objective of the paper, differentiated as it stands
        mine = s == IDS
        w = weights[mine]
        ratio = ((w * (new - old)[mine]).sum() / w.sum()).exp()
        clipped = ratio.clamp(1 - clips["clip_low"], 1 + clips["clip_high"])
        direct = direct - torch.minimum(ratio * advantages[s], clipped * advantages[s]) / 2
    (expected,) = torch.autograd.grad(direct, new)
    assert loss.item() == pytest.approx(direct.item())
    assert torch.allclose(gradient, expected, atol=1e-12)


def test_importance_weights_by_token_and_sequence():
    difference = double(5, 0.1, 3.0, 5, -0.4, 5, 0.3)
    old, behaviour = difference + 1, torch.ones(7).double()
    arguments = (old.requires_grad_(), behaviour, SENIOR, IDS)
    by_token = importance_weights(*arguments, num_sequences=2, level="token", cap=2.0)
    expected = [1, math.exp(0.1), 2, 1, math.exp(-0.4), 1, math.exp(0.3)]
    assert by_token.tolist() == pytest.approx(expected)
    by_sequence = importance_weights(*arguments, num_sequences=2, level="sequence", cap=2.0)
    s = math.exp(-0.1)
    assert by_sequence.tolist() == pytest.approx([1, 2, 2, 1, s, 1, s])
    assert not by_token.requires_grad
    assert not by_sequence.requires_grad


def test_log_ratio_clamps_infinities_and_shows_nan():
    inf, nan = math.inf, math.nan
    clamped = log_ratio(double(-inf, 0, 300, 1, nan), double(0, -inf, 0, 0.5, 0))
    assert clamped[:4].tolist() == [-20, 20, 20, 0.5]
    assert clamped[4].isnan()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.2, 0.5 * 0.8**2), (2.0, 0.5), (-3.0, 8.0)],  # old value 0, return 1, clip 0.5
)
def test_value_loss_takes_the_worse_of_raw_and_clipped(value, expected):
    loss = value_loss(double(value), double(0.0), double(1.0), clip=0.5)
    assert loss.item() == pytest.approx(expected)


def test_ranges_that_would_be_ignored_are_refused():
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="reinforce"):
        reinforce(x, x, x, clip_high=0.2)
    with pytest.raises(ValueError, match="cispo"):
        cispo(x, x, x, clip_low=None, clip_high=4.0, dual_clip=3.0)
    with pytest.raises(ValueError, match=r"dual_clip=0\.5"):
        ppo_clip(x, x, x, clip_low=0.2, clip_high=0.2, dual_clip=0.5)
