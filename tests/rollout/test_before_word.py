"""Strategy ``before_word``: what two models of five tokens write, and its gradient, against all texts and all draws."""

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers import chi_square_bound, flat, prepared, qwen3, reference_distribution, small_qwen3
from tandemrl.losses import RECIPES, Coefficients, policy_loss, token_weights, with_word_ends
from tandemrl.models.batching import pack
from tandemrl.models.forward import token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.sampling import Truncation
from tandemrl.rollout import decoding
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, check_authors
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import before_word, bernoulli, solo
from tandemrl.types import Author, Rollout, Totals

SIZE, EOS, PROMPT, LONGEST, P, COUNT = 5, 0, (3, 2), 3, 0.6, 6000
STARTS = torch.tensor([True, False, True, False, True])
STRATEGY = before_word(P, STARTS)
PLAIN = Sampling(max_tokens=LONGEST)
CUT = Sampling(max_tokens=LONGEST, temperature=1.3, top_k=3, top_p=0.9)


@cache
def untouched() -> tuple[PreTrainedModel, PreTrainedModel]:
    return qwen3(39, vocabulary=SIZE).double(), small_qwen3(40, vocabulary=SIZE).double()


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    senior, junior = (prepared(copy.deepcopy(model).float()) for model in untouched())
    return senior, junior


@cache
def engine() -> TorchEngine:
    words = Tokenizer(models.WordLevel({"<eos>": EOS, "<pad>": 1, "a": 2, "b": 3, "c": 4}, unk_token="<pad>"))
    return TorchEngine(*pair(), PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>"), max_rows=4000)


@cache
def written(sampling: Sampling) -> list[Completion]:
    return flat(engine().generate([Request(PROMPT, tuple(range(COUNT)), sampling, STRATEGY)]))


# ----------------------------------------------------------------------------------------- the process, step by step


class Path(NamedTuple):
    """A way in which a text can come about: its probability given nothing, and who wrote what."""

    probability: Tensor
    tokens: tuple[int, ...] = ()
    authors: tuple[int, ...] = ()


Distribution = Callable[[int, tuple[int, ...], bool], Tensor]
"""The probabilities of all tokens: of an author, after some tokens, among the starts only or not."""


def paths(p: Distribution, so_far: Path, author: int) -> Iterator[Path]:
    """Every proposal, every draw, every replacement, one after the other."""
    chance = {1: P, 0: 1 - P}
    for token, likely in enumerate(p(author, so_far.tokens, False)):
        if so_far.tokens and bool(STARTS[token]):
            for next_author, drawn in chance.items():
                if next_author == author:
                    yield from _longer(p, so_far, token, author, likely * drawn)
                    continue
                for other, instead in enumerate(p(next_author, so_far.tokens, True)):
                    yield from _longer(p, so_far, other, next_author, likely * drawn * instead)
        else:
            yield from _longer(p, so_far, token, author, likely)


def _longer(p: Distribution, path: Path, token: int, author: int, factor: Tensor) -> Iterator[Path]:
    if float(factor.detach()) == 0.0:
        return
    longer = Path(path.probability * factor, (*path.tokens, token), (*path.authors, author))
    if token == EOS or len(longer.tokens) == LONGEST:
        yield longer
    else:
        yield from paths(p, longer, author)


def all_paths(p: Distribution) -> Iterator[Path]:
    for author, chance in ((1, P), (0, 1 - P)):
        yield from paths(p, Path(torch.tensor(chance, dtype=torch.float64)), author)


def distribution(sampling: Sampling) -> Distribution:
    """With a gradient through the senior; what truncation keeps is that of the tests' own NumPy code."""

    @cache
    def logits(author: int, text: tuple[int, ...]) -> Tensor:
        return untouched()[1 - author](input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, -1]

    @cache
    def p(author: int, text: tuple[int, ...], among_starts: bool) -> Tensor:
        z = logits(author, text)
        if among_starts:
            z = z.masked_fill(~STARTS, -torch.inf)
        kept = reference_distribution(z.detach().numpy(), sampling, PROMPT, text) > 0
        return (z / sampling.temperature).masked_fill(~torch.from_numpy(kept), -torch.inf).softmax(-1)

    return p


# ------------------------------------------------------------------------------------------------- what is written


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
def test_texts_and_their_authors_come_about_as_often_as_they_should(sampling: Sampling) -> None:
    wanted: dict[tuple, float] = defaultdict(float)
    with torch.no_grad():
        for path in all_paths(distribution(sampling)):
            wanted[path.tokens, path.authors] += float(path.probability)
    assert sum(wanted.values()) == pytest.approx(1.0)
    seen = Counter((tuple(c.tokens.tolist()), tuple(c.author.tolist())) for c in written(sampling))
    assert seen.keys() <= wanted.keys()
    assert sum(authors.count(authors[0]) < len(authors) for _, authors in seen.elements()) > COUNT / 6
    check_authors(written(sampling), STRATEGY)
    statistic, bound = chi_square_bound(
        np.array([seen[each] for each in wanted]), np.array([wanted[each] for each in wanted])
    )
    assert statistic < bound


def first_tokens_after_a_handover(completions: list[Completion]) -> tuple[float, float]:
    """Chi-square of the second token where the authors differ, after each first token by each author."""
    seen: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for c in completions:
        if len(c.tokens) > 1 and c.author[0] != c.author[1]:
            seen[int(c.author[1]), int(c.tokens[0])][int(c.tokens[1])] += 1
    counts = np.array([[each[token] for token in range(SIZE)] for each in seen.values()])
    with torch.no_grad():
        wanted = [distribution(PLAIN)(author, (first,), True).numpy() for author, first in seen]
    joint = np.array(wanted) * counts.sum(1, keepdims=True) / counts.sum()
    assert counts.sum() > 1000
    return chi_square_bound(counts.flatten(), joint.flatten())


def test_the_first_token_after_a_handover_is_renormalised(monkeypatch) -> None:
    statistic, bound = first_tokens_after_a_handover(written(PLAIN))
    assert statistic < bound
    monkeypatch.setattr(decoding, "HANDOVER", decoding.SAMPLING)  # planted: the numbers that drew the dropped token
    planted = flat(engine().generate([Request(PROMPT, tuple(range(COUNT)), PLAIN, STRATEGY)]))
    statistic, bound = first_tokens_after_a_handover(planted)
    assert statistic > 2 * bound


def test_every_planted_wrong_author_is_found_also_of_the_end() -> None:
    completions = [c for c in written(PLAIN)[:80] if len(c.tokens) > 1]
    assert sum(c.stop_reason == "eos" for c in completions) > 10
    for completion in completions:
        for i in range(len(completion.tokens)):
            author = completion.author.copy()
            author[i] = 1 - author[i]
            with pytest.raises(EngineError, match=rf"completion {completion.key}: token {i} "):
                check_authors([dataclasses.replace(completion, author=author)], STRATEGY)
    with pytest.raises(EngineError, match="it lacks handover_logprobs"):
        check_authors([dataclasses.replace(completions[0], handover_logprobs=None)], STRATEGY)


def test_strategies_share_a_batch_and_rows_do_not_depend_on_it() -> None:
    requests = [
        Request(PROMPT, (1, 2, 3), CUT, STRATEGY),
        Request(PROMPT, (1, 2), PLAIN, bernoulli(0.5)),
        Request(PROMPT, (4, 5), dataclasses.replace(CUT, temperature=0.0), before_word(0.5, STARTS)),
        Request((4,), (1,), PLAIN, solo("junior")),
    ]
    together = engine().generate(requests)
    alone = [engine().generate([dataclasses.replace(r, keys=(key,))])[0][0] for r in requests for key in r.keys]
    for one, other in zip(flat(together), alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.author.tolist() == other.author.tolist()
        assert (one.handover_logprobs is None) == (other.handover_logprobs is None)
    greedy = together[2]
    assert all(c.handover_logprobs is not None and not c.handover_logprobs.any() for c in greedy)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    drafting = TorchEngine(*pair(), engine()._decoder.tokenizer, draft_tokens=2)
    with pytest.raises(EngineError, match=r"before_word.* may drop .*rollout\.draft_tokens=0, or selection\.strategy"):
        drafting.generate([Request(PROMPT, (1,), PLAIN, STRATEGY)])
    assert drafting.generate([Request(PROMPT, (1,), PLAIN, bernoulli(0.5))])  # whose places are known beforehand
    with pytest.raises(EngineError, match=r"the tokens \[3\] end a turn, but its strategy"):
        engine().generate([Request(PROMPT, (1,), dataclasses.replace(PLAIN, stop_token_ids=(2, 3)), STRATEGY)])


# ------------------------------------------------------------------------------------------------------- the gradient


def rollout(tokens: tuple[int, ...], authors: tuple[int, ...], told: np.ndarray | None = None) -> Rollout:
    context, none = [Author.CONTEXT] * len(PROMPT), np.zeros(len(PROMPT + tokens))
    behind = none if told is None else np.concatenate([none[: len(PROMPT)], told])
    both = np.array([*PROMPT, *tokens]), np.array([*context, *authors])
    return Rollout("", 0, 0, 0, *both, none, reward=0.0, handover_logprobs=behind)


def options(sampling: Sampling) -> ForwardOptions:
    cut = Truncation(sampling.top_k, sampling.top_p, sampling.min_p) if sampling.truncated else None
    return ForwardOptions(temperature=sampling.temperature, truncation=cut, starts=STARTS)


def gradient(model: PreTrainedModel, value: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), retain_graph=True)])


@pytest.mark.parametrize(("sampling", "recipe"), [(PLAIN, "dr_grpo"), (CUT, "gspo")])
def test_the_gradient_is_that_of_the_expected_reward(sampling: Sampling, recipe: str) -> None:
    """Of all texts, all draws, all proposals; and without the ends of words it is not."""
    senior = pair()[0].requires_grad_(True)
    ways: dict[tuple, list[Tensor]] = defaultdict(list)
    for path in all_paths(distribution(sampling)):
        ways[path.tokens, path.authors].append(path.probability)
    chances = torch.stack([torch.stack(each).sum() for each in ways.values()])
    rewards = torch.tensor([float(np.random.default_rng([*tokens, 9]).normal()) for tokens, _ in ways])
    wanted = gradient(untouched()[0], (chances * rewards).sum())
    batch = pack([rollout(tokens, authors) for tokens, authors in ways])
    # a rollout of an advantage A that comes about with probability p counts as one of the advantage p·A
    advantages = (chances.detach() * rewards).float()
    batch = dataclasses.replace(batch, advantages=advantages[batch.sequence_ids])
    scores = token_scores(senior, batch, select=batch.author >= 0, options=options(sampling))
    found = {}
    for counted in (True, False):
        kept = batch if counted else dataclasses.replace(batch, word_ends=None)
        weights = token_weights(batch.author, junior_weight=0.0)
        entries, weights, (logprobs,) = with_word_ends(kept, weights, (scores.logprobs, scores.end_logprobs))
        loss, metrics = policy_loss(
            RECIPES[recipe]._replace(reduction="sequence_mean_token_sum"),
            entries,
            logprobs,
            weights=weights,
            totals=Totals(1.0, float((batch.author >= 0).sum()), float(weights.sum())),
            coefficients=Coefficients(),
        )
        assert float(metrics["ratio"]) == float(weights.sum())  # one ratio for each entry
        found[counted] = gradient(senior, -loss)
    scale = float(wanted.norm())
    assert float((found[True] - wanted).norm()) < 1e-4 * scale
    assert float((found[False] - wanted).norm()) > 0.03 * scale


def test_engine_and_trainer_agree_on_both_log_probs() -> None:
    for sampling in (PLAIN, CUT):
        completions = [c for c in written(sampling)[:400] if len(c.tokens)]
        rollouts = [
            dataclasses.replace(
                rollout(tuple(c.tokens.tolist()), tuple(c.author.tolist()), c.handover_logprobs),
                behaviour_logprobs=np.concatenate([np.zeros(len(PROMPT)), c.behaviour_logprobs]),
            )
            for c in completions
        ]
        batch = pack(rollouts)
        assert batch.word_ends is not None
        assert len(batch.word_ends.places) > 20
        with torch.no_grad():
            scores = token_scores(pair()[0], batch, select=batch.author >= 0, options=options(sampling))
        gap = scores.differences(batch, batch.author == Author.SENIOR)
        assert len(gap) == int((batch.author == Author.SENIOR).sum()) + sum(r.word_ends for r in rollouts)
        assert gap.abs().max() < 1e-5
        again = [Rollout.from_json(r.to_json()) for r in rollouts[:3]]
        for one, other in zip(again, rollouts, strict=False):
            assert np.allclose(one.handover_logprobs, other.handover_logprobs, atol=1e-6)
    with pytest.raises(ValueError, match="pass the table of their ids as starts"):
        token_scores(pair()[0], batch, select=batch.author >= 0)
