import pytest
import torch

from tandemrl.losses import token_weights


def test_context_junior_senior():
    author = torch.tensor([-1, 0, 1, 1, 0], dtype=torch.int8)
    assert token_weights(author, junior_weight=0.0).tolist() == [0, 0, 1, 1, 0]
    assert token_weights(author, junior_weight=1.0).tolist() == [0, 1, 1, 1, 1]
    assert token_weights(author, junior_weight=0.25).tolist() == [0, 0.25, 1, 1, 0.25]


@pytest.mark.parametrize("junior_weight", [-0.1, 1.1, float("nan")])
def test_refuses_a_weight_outside_the_unit_interval(junior_weight):
    with pytest.raises(ValueError, match="junior_weight"):
        token_weights(torch.zeros(1, dtype=torch.int8), junior_weight=junior_weight)
