import pytest
import torch

from helpers import totals_of
from tandemrl.losses import reduce

AUTHOR = torch.tensor([-1, 1, 0, 1, -1, 0, 0, -1, 1], dtype=torch.int8)
WEIGHTS = torch.tensor([0, 1, 0, 1, 0, 0, 0, 0, 1.0])
IDS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
X = torch.tensor([9, 1, 9, 3, 9, 9, 9, 9, 8.0])


def value(x=X, weights=WEIGHTS, counts=None, **kwargs):
    counts = totals_of(weights, AUTHOR, IDS, num_sequences=3) if counts is None else counts
    return reduce(x, weights, AUTHOR, IDS, num_sequences=3, totals=counts, **kwargs)


def test_totals_count_trained_sequences_response_tokens_and_weight():
    counts = totals_of(WEIGHTS, AUTHOR, IDS, num_sequences=3)
    assert [float(c) for c in counts] == [2, 6, 3]
    halved = totals_of(torch.where(AUTHOR == 0, 0.5, WEIGHTS), AUTHOR, IDS, num_sequences=3)
    assert [float(c) for c in halved] == [3, 6, 4.5]


@pytest.mark.parametrize(
    ("reduction", "normalise_by", "expected"),
    [
        ("token_mean", "weight", 12 / 3),
        ("token_mean", "response", 12 / 6),
        ("sequence_mean_token_mean", "weight", (4 / 2 + 8) / 2),
        ("sequence_mean_token_mean", "response", (4 / 3 + 8) / 2),
        ("sequence_mean_token_sum", "weight", 12 / 2),
        ("token_sum_constant", "weight", 12 / (2 * 5)),
    ],
)
def test_hand_computed(reduction, normalise_by, expected):
    assert float(value(reduction=reduction, normalise_by=normalise_by, constant=5.0)) == pytest.approx(expected)


def test_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="constant=None"):
        value(reduction="token_sum_constant")
    with pytest.raises(ValueError, match=r"constant=0\.0"):
        value(reduction="token_sum_constant", constant=0.0)
