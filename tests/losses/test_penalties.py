import math

import pytest
import torch

from tandemrl.losses import adapt_kl_coef, gae, kl, kl_penalty, overlong_penalty, token_rewards

KINDS = ["k1", "k2", "k3"]


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    policy, reference = double(0.5, 0.3, 0.2).log(), double(0.2, 0.2, 0.6).log()
    exact = (policy.exp() * (policy - reference)).sum()
    assert (policy.exp() * kl(policy, reference, kind=kind)).sum().item() == pytest.approx(exact.item())


@pytest.mark.parametrize("kind", KINDS)
def test_kl_gradcheck(kind):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    ref = torch.randn(9, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda y: kl(y, ref, kind=kind), (x,))


def test_kl_is_finite_at_minus_infinity():
    x = double(-math.inf, -1.0).requires_grad_()
    out = kl(x, double(-1.0, -math.inf), kind="k3")
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


def test_kl_penalty_is_that_of_trained_tokens():
    weights = double(0, 1, 0, 0, 0.5)
    old, ref = double(0, -1.0, -9.0, math.nan, -2.0), double(0, -1.5, 0.0, 0, -1.0)
    assert kl_penalty(old, ref, weights).tolist() == pytest.approx([0, 0.5, 0, 0, -0.5])


@pytest.mark.parametrize(("length", "expected"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)])
def test_overlong_table(length, expected):
    assert overlong_penalty(torch.tensor([length]), max_tokens=20, buffer=4).item() == expected


@pytest.mark.parametrize("buffer", [0, 21])
def test_overlong_refuses_an_impossible_buffer(buffer):
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_tokens=20, buffer=buffer)


def test_token_rewards_put_the_outcome_at_the_last_response_token():
    author = torch.tensor([-1, 1, 0, -1, -1, 1, -1, -1], dtype=torch.int8)
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])  # 1 ends in context (a tool's output), 2 has no response
    rewards = token_rewards(double(3.0, -1.0, 7.0), author, ids)
    assert rewards.tolist() == [0, 0, 3.0, 0, 0, -1.0, 0, 0]


def test_token_rewards_sum_to_the_rewards_with_the_kl_in_them():
    ids = torch.tensor([0, 0, 0, 1, 1])
    author = torch.tensor([-1, 1, 1, 1, 0], dtype=torch.int8)
    weights = double(0, 1, 1, 1, 0)
    old, ref = double(0, -1.0, -2.0, -0.5, -9.0), double(0, -1.5, -1.0, -0.25, math.nan)
    penalty = 0.1 * kl_penalty(old, ref, weights)
    assert penalty.tolist() == pytest.approx([0, 0.05, -0.1, -0.025, 0])
    rewards = token_rewards(double(1.0, 2.0), author, ids, penalty=penalty)
    assert rewards.tolist() == pytest.approx([0, -0.05, 1.1, 0.025, 2.0])
    advantages, _ = gae(rewards, torch.zeros_like(rewards), weights > 0, ids)  # of the first action: the sum
    assert [advantages[1].item(), advantages[3].item()] == pytest.approx([1.05, 2.025])


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(0.0, 0.196), (0.04, 0.196), (0.045, 0.198), (0.05, 0.2), (0.0525, 0.201), (0.06, 0.204), (5.0, 0.204)],
)
def test_adaptive_kl_hand_computed(measured, expected):
    assert adapt_kl_coef(0.2, measured, target=0.05) == pytest.approx(expected, rel=1e-12)
