"""Every recipe inherits every property below: add a row to the table and to nothing here but the golden script."""

import json
from itertools import combinations, product
from pathlib import Path
from runpy import run_path

import pytest
import torch

from helpers import totals_of
from tandemrl.losses import (
    RECIPES,
    Coefficients,
    average_metrics,
    compute_advantages,
    gae,
    idle,
    policy_loss,
    reduce,
    token_weights,
)
from tandemrl.types import Batch, Totals

GOLDEN = Path(__file__).parents[1] / "golden"
EXPECTED = json.loads((GOLDEN / "losses.json").read_text())
CHANNELS = ("logprobs", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "junior_logprobs", "entropy")
EVERYTHING = {"constant": 12.0, "entropy_coef": 0.01, "kl_coef": 0.1, "junior_kl_coef": 0.05}
NO_PENALTIES = {"kl_coef": 0.0, "entropy_coef": 0.0, "junior_kl_coef": 0.0}

VALUES = {
    "recipe": list(RECIPES),
    "importance": ["none", "token", "sequence"],
    "normalise_by": ["weight", "response"],
    "junior_weight": [0.0, 0.5, 1.0],
    "junk": [7.5, float("nan"), float("-inf")],
}


def every(*names):
    """All combinations of values. Any two values meet in one that is not slow."""
    rows = list(product(*(VALUES[name] for name in names)))
    pairs = [set(combinations(zip(names, map(str, row), strict=True), 2)) for row in rows]
    quick, met = set(), set()
    while met != set().union(*pairs):
        best = max(range(len(rows)), key=lambda i: len(pairs[i] - met))
        quick.add(best)
        met |= pairs[best]
    cases = [
        pytest.param(
            *(RECIPES.get(v, v) for v in row), id="-".join(map(str, row)), marks=[pytest.mark.slow][i in quick :]
        )
        for i, row in enumerate(rows)
    ]
    return pytest.mark.parametrize(names, cases)


every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))


def random_batch(seed=0, sequences=7):
    """Packed tensors as ``loss_of`` takes them, without weights and totals. Sequence 2 is all junior."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (sequences,), generator=generator)
    ids = torch.arange(sequences).repeat_interleave(lengths)
    author = torch.randint(-1, 2, ids.shape, generator=generator, dtype=torch.int8)
    author[(ids == 2) & (author == 1)] = 0
    old = -3 * torch.rand(ids.shape, generator=generator, dtype=torch.float64)
    channels = dict.fromkeys(CHANNELS)
    for name in channels:
        noise = torch.randn(ids.shape, generator=generator, dtype=torch.float64)
        channels[name] = torch.where(author >= 0, old + 0.4 * noise, 0.0)
    advantages = torch.randn(sequences, generator=generator, dtype=torch.float64)[ids]
    return {**channels, "advantages": advantages, "author": author, "sequence_ids": ids, "num_sequences": sequences}


def weighted(batch, junior_weight):
    weights = token_weights(batch["author"], junior_weight=junior_weight)
    counts = totals_of(weights, batch["author"], batch["sequence_ids"], num_sequences=batch["num_sequences"])
    return {**batch, "weights": weights, "totals": counts}


def loss_of(recipe, given, **coefficients):
    """``policy_loss`` of the tensors by name."""
    own = {name: given[name] for name in ("logprobs", "weights", "totals", "entropy")}
    channels = {name: value for name, value in given.items() if name not in (*own, "num_sequences")}
    blank = torch.zeros_like(given["sequence_ids"])
    lengths = torch.bincount(given["sequence_ids"], minlength=given["num_sequences"])
    batch = Batch(tokens=blank, positions=blank, lengths=lengths, **channels)
    return policy_loss(recipe, batch, **own, coefficients=Coefficients(**coefficients))


def loss_and_gradient(recipe, batch, *, importance=None, **options):
    recipe = recipe._replace(importance=importance or recipe.importance, importance_cap=1.5)
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss, metrics = loss_of(recipe, {**batch, "logprobs": logprobs}, **{**EVERYTHING, **options})
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, metrics


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def micro_batch(batch, keep):
    """The sequences ``keep`` of a batch, renumbered; totals stay global."""
    inside = torch.isin(batch["sequence_ids"], keep)
    part = {
        key: value[inside] if isinstance(value, torch.Tensor) and value.dim() == 1 else value
        for key, value in batch.items()
    }
    _, part["sequence_ids"] = torch.unique(part["sequence_ids"], return_inverse=True)
    return {**part, "num_sequences": len(keep)}, inside


def golden_batch():
    channels = EXPECTED["channels"]
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.float64)  # noqa: E731
    lengths = torch.tensor([len(row) for row in EXPECTED["authors"]])
    return {
        **{name: flat(channels[name.removesuffix("_logprobs").replace("logprobs", "new")]) for name in CHANNELS},
        "author": flat(EXPECTED["authors"]).to(torch.int8),
        "sequence_ids": torch.arange(len(lengths)).repeat_interleave(lengths),
        "num_sequences": len(lengths),
        "values": flat(channels["values"]),
    }


def golden_advantages(recipe, batch):
    """From rewards to per-token advantages with the library, as a trainer does it."""
    ids, senior = batch["sequence_ids"], batch["author"] == 1
    rewards = torch.tensor(EXPECTED["rewards"], dtype=torch.float64)
    if recipe.advantage is not None:
        counts = torch.bincount(ids, senior.double(), minlength=len(rewards))
        return compute_advantages(recipe, rewards, torch.tensor(EXPECTED["groups"]), counts)[ids]
    last = torch.cumsum(torch.bincount(ids), 0) - 1
    per_token = torch.zeros(len(ids), dtype=torch.float64).index_copy(0, last, rewards)
    settings = EXPECTED["gae"]
    return gae(per_token, batch["values"], senior, ids, gamma=settings["gamma"], lam=settings["lam"])[0]


# ---- golden numbers --------------------------------------------------------------------------------------------------


def test_golden_file_is_what_its_script_computes():
    computed = json.loads(json.dumps(run_path(str(GOLDEN / "losses.py"))["golden"]()))
    assert computed.keys() == EXPECTED.keys()
    for fresh, stored in zip(computed["losses"], EXPECTED["losses"], strict=True):
        assert fresh.pop("gradient") == pytest.approx(stored["gradient"], abs=1e-9)
        assert fresh.pop("loss") == pytest.approx(stored["loss"], abs=1e-9)
        assert fresh.items() <= stored.items()
    assert computed["gae"]["advantages"] == [pytest.approx(row, abs=1e-9) for row in EXPECTED["gae"]["advantages"]]
    for key in ("authors", "groups", "rewards", "constant", "channels"):
        assert computed[key] == EXPECTED[key]
    assert computed["advantages"] == {k: pytest.approx(v, abs=1e-9) for k, v in EXPECTED["advantages"].items()}


@every_recipe
def test_golden_advantages(recipe):
    batch = golden_batch()
    others = {"dr_grpo": "group_centred", "rloo": "leave_one_out", "reinforce_pp": "whitened"}
    name = others.get(recipe.name, "group_normalised")
    if recipe.name == "ppo":
        expected = torch.tensor([a for row in EXPECTED["gae"]["advantages"] for a in row], dtype=torch.float64)
    else:
        expected = torch.tensor(EXPECTED["advantages"][name], dtype=torch.float64)[batch["sequence_ids"]]
    assert torch.allclose(golden_advantages(recipe, batch), expected, atol=1e-9)


@pytest.mark.parametrize(
    "row", EXPECTED["losses"], ids=lambda r: f"{r['recipe']}-{r['junior_weight']}-{r['normalise_by']}-{r['extras']}"
)
def test_golden_loss_and_gradient(row):
    recipe = RECIPES[row["recipe"]]
    batch = golden_batch()
    batch["advantages"] = golden_advantages(recipe, batch)
    del batch["values"]
    options = {"importance": row["extras"]} if row["extras"] else NO_PENALTIES
    loss, gradient, _ = loss_and_gradient(
        recipe, weighted(batch, row["junior_weight"]), normalise_by=row["normalise_by"], **options
    )
    assert loss.item() == pytest.approx(row["loss"], rel=0, abs=1e-9)
    assert gradient.tolist() == pytest.approx(row["gradient"], abs=1e-9)


# ---- properties of every recipe --------------------------------------------------------------------------------------


@every("recipe", "importance", "normalise_by", "junior_weight")
def test_any_split_into_micro_batches_gives_the_same(recipe, importance, normalise_by, junior_weight):
    batch = weighted(random_batch(), junior_weight)
    options = {"importance": importance, "normalise_by": normalise_by}
    whole, gradient, metrics = loss_and_gradient(recipe, batch, **options)
    for split in ([[0, 1, 2, 3], [4, 5, 6]], [[2], [0, 6], [1, 3, 4, 5]], [[s] for s in range(7)]):
        parts = [micro_batch(batch, torch.tensor(keep)) for keep in split]
        total, pieces, sums = torch.zeros(()).double(), torch.zeros_like(gradient), dict.fromkeys(metrics, 0.0)
        for part, inside in parts:
            loss, piece, part_metrics = loss_and_gradient(recipe, part, **options)
            total, pieces[inside] = total + loss, piece
            sums = {name: sums[name] + part_metrics[name] for name in sums}
        assert close(total, whole)
        assert close(pieces, gradient)
        assert all(close(sums[name], metrics[name]) for name in metrics)


@every("recipe", "importance", "junk")
def test_tokens_of_weight_zero_change_nothing(recipe, importance, junk):
    batch = weighted(random_batch(), 0.0)
    options = {"importance": importance, "junior_kl_coef": 0.0}
    loss, gradient, metrics = loss_and_gradient(recipe, batch, **options)
    ignored = batch["weights"] == 0
    spoiled = {
        key: torch.where(ignored, junk, batch[key]) for key in (*CHANNELS, "advantages") if key != "junior_logprobs"
    }
    loss2, gradient2, metrics2 = loss_and_gradient(recipe, {**batch, **spoiled, "junior_logprobs": None}, **options)
    assert torch.equal(loss, loss2)
    assert torch.equal(gradient, gradient2)
    assert all(torch.equal(metrics[name], metrics2[name]) for name in metrics2)
    assert (gradient[ignored] == 0).all()


@every("recipe", "importance", "normalise_by")
def test_what_the_world_says_changes_nothing(recipe, importance, normalise_by):
    """Context in the middle of a sequence, with every term of the loss, the junior's tokens trained on as well."""
    batch = weighted(random_batch(), 0.5)
    options = {"importance": importance, "normalise_by": normalise_by}
    loss, gradient, metrics = loss_and_gradient(recipe, batch, **options)
    world = batch["author"] == -1
    spoiled = {key: torch.where(world, float("nan"), batch[key]) for key in (*CHANNELS, "advantages")}
    loss2, gradient2, metrics2 = loss_and_gradient(recipe, {**batch, **spoiled}, **options)
    assert (batch["weights"][world] == 0).all()
    assert (gradient[world] == 0).all()
    assert torch.equal(loss, loss2)
    assert torch.equal(gradient, gradient2)
    assert all(torch.equal(metrics[name], metrics2[name]) for name in metrics)
    kept = {k: v[~world] if isinstance(v, torch.Tensor) and v.dim() == 1 else v for k, v in batch.items()}
    loss3, gradient3, _ = loss_and_gradient(recipe, kept, **options)
    assert close(loss, loss3)
    assert close(gradient[~world], gradient3)


@every("recipe", "importance", "normalise_by")
def test_junior_weight_one_is_plain_training_on_every_response_token(recipe, importance, normalise_by):
    batch = random_batch()
    options = {"importance": importance, "normalise_by": normalise_by, "junior_kl_coef": 0.0}
    tandem = loss_and_gradient(recipe, weighted(batch, 1.0), **options)
    batch["author"] = torch.where(batch["author"] >= 0, 1, -1).to(torch.int8)
    plain = loss_and_gradient(recipe, weighted(batch, 0.0), **options)
    assert torch.equal(tandem[0], plain[0])
    assert torch.equal(tandem[1], plain[1])


@every("recipe", "importance")
def test_no_senior_token_is_zero_loss_and_zero_gradient(recipe, importance):
    batch = random_batch()
    batch["author"] = batch["author"].clamp(max=0)
    loss, gradient, metrics = loss_and_gradient(recipe, weighted(batch, 0.0), importance=importance, junior_kl_coef=0.0)
    assert loss.item() == 0
    assert (gradient == 0).all()
    averages = average_metrics(metrics, Totals(0.0, 0.0, 0.0))
    assert all(value.isfinite() for value in averages.values())


@every("recipe", "junior_weight")
def test_first_step_is_the_reinforce_gradient(recipe, junior_weight):
    batch = weighted(random_batch(), junior_weight)
    batch["old_logprobs"] = batch["logprobs"]
    _, gradient, metrics = loss_and_gradient(recipe, batch, **NO_PENALTIES)
    logprobs = batch["logprobs"].clone().requires_grad_()
    keys = ("weights", "author", "sequence_ids")
    reinforce = reduce(
        -batch["advantages"] * logprobs,
        *(batch[key] for key in keys),
        num_sequences=batch["num_sequences"],
        totals=batch["totals"],
        reduction=recipe.reduction,
        constant=12.0,
    )
    (expected,) = torch.autograd.grad(reinforce, logprobs)
    assert close(gradient, expected)
    means = average_metrics(metrics, batch["totals"])
    assert [means[name].item() for name in ("ratio", "clip_fraction", "approx_kl")] == pytest.approx([1, 0, 0])


@every_recipe
def test_nan_at_a_trained_token_reaches_the_loss(recipe):
    batch = weighted(random_batch(), 0.0)
    first = int(batch["weights"].argmax())
    batch["logprobs"] = batch["logprobs"].index_fill(0, torch.tensor([first]), float("nan"))
    assert loss_of(recipe, batch, **EVERYTHING)[0].isnan()


# ---- single recipes and options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"ratio_level": "seq"}, {}),
        ({"reduction": "mean"}, {}),
        ({"importance": "sentence"}, {}),
        ({}, {"normalise_by": "tokens"}),
        ({}, {"kl_kind": "k4"}),
    ],
)
def test_unknown_choices_are_refused(change, options):
    with pytest.raises((ValueError, TypeError)):  # TypeError comes from run-time type checks, where they are on
        loss_of(RECIPES["grpo"]._replace(**change), weighted(random_batch(), 0.0), **options)


def test_junior_kl_pulls_the_senior_on_junior_tokens_only():
    batch = weighted(random_batch(), 0.0)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    options = {**NO_PENALTIES, "junior_kl_coef": 0.3}
    loss, gradient, metrics = loss_and_gradient(RECIPES["grpo"], batch, **options)
    junior = batch["author"] == 0
    ratio = (batch["logprobs"] - batch["junior_logprobs"])[junior].exp()
    response = (batch["author"] >= 0).sum()
    assert (gradient[~junior] == 0).all()
    assert torch.allclose(gradient[junior], 0.3 * (ratio - 1) / response)
    assert torch.allclose(loss, 0.3 * metrics["junior_kl"] / response)
    assert torch.allclose(average_metrics(metrics, batch["totals"])["junior_kl"], metrics["junior_kl"] / response)


def test_metrics_are_detached_weighted_sums():
    batch = weighted(random_batch(), 0.5)
    batch["logprobs"] = batch["logprobs"].requires_grad_()
    _, metrics = loss_of(RECIPES["grpo"]._replace(importance="token"), batch)
    assert not any(value.requires_grad for value in metrics.values())
    weights, ratio = batch["weights"], (batch["logprobs"] - batch["old_logprobs"]).exp().detach()
    trained = weights > 0
    assert torch.allclose(metrics["ratio"], (weights * ratio)[trained].sum())
    assert torch.allclose(metrics["clip_fraction"], weights[trained & ((ratio - 1).abs() > 0.2)].sum().double())
    assert torch.allclose(metrics["approx_kl"], (weights * (ratio - 1 - ratio.log()))[trained].sum())
    assert torch.allclose(metrics["entropy"], (weights * batch["entropy"])[trained].sum())
    assert set(metrics) == {"ratio", "clip_fraction", "approx_kl", "entropy", "ref_kl", "importance", "junior_kl"}
    means = average_metrics(metrics, batch["totals"])
    assert torch.allclose(means["entropy"], metrics["entropy"] / weights.sum())


@pytest.mark.parametrize(
    ("coefficient", "channel"),
    [("kl_coef", "ref_logprobs"), ("entropy_coef", "entropy"), ("junior_kl_coef", "junior_logprobs")],
)
def test_a_coefficient_without_its_channel_is_refused(coefficient, channel):
    batch = weighted(random_batch(), 0.0)
    batch[channel] = None
    with pytest.raises(ValueError, match=channel):
        loss_of(RECIPES["grpo"], batch, **{coefficient: 0.1})


@every("recipe", "normalise_by")
def test_an_idle_rollout_has_no_part_in_loss_or_gradient(recipe, normalise_by):
    """Whatever its ratios are: only its counts stay, in the totals. Sequence 2 has no weight."""
    batch = weighted(random_batch(), junior_weight=0.0)
    ids, count = batch["sequence_ids"], batch["num_sequences"]
    advantages = torch.linspace(-1.0, 1.0, count, dtype=torch.float64)
    advantages[3:5] = 0.0
    counts = torch.bincount(ids, batch["weights"].double(), minlength=count)
    found = idle(recipe, advantages, counts)
    if recipe.advantage is None:  # a critic's are per token
        assert not found.any()
        return
    assert found.nonzero().squeeze(1).tolist() == [2, 3, 4]
    assert idle(recipe, advantages * torch.nan, counts).nonzero().squeeze(1).tolist() == [2]  # a fault must be seen
    assert not idle(recipe._replace(surrogate=lambda *a, **k: a[0]), advantages, counts).any()
    for term in NO_PENALTIES:
        assert not idle(recipe, advantages, counts, Coefficients(**{term: 0.01})).any()
    batch |= {"advantages": advantages[ids]}
    part, inside = micro_batch(batch, (~found).nonzero().squeeze(1))
    for importance in ("none", "token", "sequence"):
        options = {"importance": importance, "normalise_by": normalise_by, **NO_PENALTIES}
        loss, gradient, _ = loss_and_gradient(recipe, batch, **options)
        left, rest, _ = loss_and_gradient(recipe, part, **options)
        assert close(loss, left)
        assert close(gradient[inside], rest)
        assert not gradient[~inside].any()
