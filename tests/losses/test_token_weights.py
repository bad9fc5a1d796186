import torch

from tandemrl.losses import token_weights


def test_context_junior_senior():
    author = torch.tensor([-1, 0, 1, 1, 0], dtype=torch.int8)
    assert token_weights(author, junior_weight=0.0).tolist() == [0, 0, 1, 1, 0]
    assert token_weights(author, junior_weight=1.0).tolist() == [0, 1, 1, 1, 1]
    assert token_weights(author, junior_weight=0.25).tolist() == [0, 0.25, 1, 1, 0.25]
