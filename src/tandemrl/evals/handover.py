"""Where exactly does a text stop being legible? Counterfactual handovers.

At chosen places of a senior's text the junior writes the next unit (a step, a word, or all that is left), the senior
the rest; in as many other branches the senior writes on alone. Both kinds get the same random numbers (branch j of a
place has one key), so their rewards are paired: the effect of the handover is the mean difference, junior - senior.
Common random numbers help as long as the branches' tokens are the same; with equal models they are throughout, and
every effect is exactly 0. A place is one prompt for all of its branches, so the shared prefix is computed once.

With the unit ``word``, places are halved: all get a quarter of the branches, the half with the largest differences as
many again, and half of these the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr, t
from transformers import PreTrainedTokenizerBase

from tandemrl.data.rows import Prompt
from tandemrl.evals.measures import Sample
from tandemrl.evals.protocol import Profile, sample_of, sampling_for
from tandemrl.evals.stats import Interval
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.engine import Completion, Engine, Request, generate_verified
from tandemrl.selection import Strategy, first_step, replay, sentence, solo
from tandemrl.selection.boundaries import StepTables, step_tables, word_boundary_table
from tandemrl.selection.draws import mix64
from tandemrl.types import Author, Metrics

Grade = Callable[[Sequence[Sample]], list[Sample]]
BRANCH = 0x8A2D
"""Among the words of a key, what tells the branches of a text from the text."""


class Unit(NamedTuple):
    """What the junior writes at a place. steps: the tables of what the text is cut into. junior: the strategy of the
    branches in which it writes. rounds: how many branches a place has after each round, as shares of all."""

    steps: StepTables
    junior: Strategy
    rounds: tuple[float, ...]

    def places(self, text: Sequence[int]) -> list[int]:
        """The positions in a text at which a unit begins, the first token's among them."""
        tokens = torch.tensor([text], dtype=torch.int64)
        author = replay(sentence("senior", self.steps), torch.zeros(1).long(), tokens, torch.tensor([len(text)])).author
        return [0, *(1 + np.flatnonzero(np.diff(author[0].numpy()))).tolist()] if len(text) else []


def unit_of(name: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None) -> Unit:
    """The unit of a name: ``step``, up to a blank line; ``word``, up to and with the first token that begins a word
    (as the strategy ``word`` changes authors); ``rest``, of a step and all that follow."""
    if name == "word":
        begins = word_boundary_table(tokenizer, vocabulary)
        steps = StepTables(begins, torch.zeros_like(begins), torch.zeros_like(begins))
    else:
        steps = step_tables(tokenizer, vocabulary)
    junior = solo("junior") if name == "rest" else first_step("junior", steps)
    return Unit(steps, junior, (0.25, 0.5, 1.0) if name == "word" else (1.0,))


def handover_effects(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    unit: Unit,
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    profile: Profile,
    branches: int,
    grade: Grade,
    surprisals: Mapping[int, np.ndarray],
    places: Mapping[int, Sequence[int]] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Sample]:
    """The texts, each with the effects of handing over at its places (``Sample.places``).

    A place has ``at`` (the number of tokens before it), ``senior`` and ``junior`` (the rewards of the branches, paired
    by their random numbers), ``effect`` with ``low`` and ``high`` (`effect`), and ``surprisal``: the mean, in nats, of
    the junior's over the unit before the place, which it has to follow; None at the beginning and if it is unknown.

    Args:
        branches: how many of either kind a place gets.
        surprisals: the junior's at each token of a text, by the position of the text.
        places: the chosen places of each text, by its position; None: where any unit begins.
        progress: called with the number of further texts.
    """
    reader, out = ResponseReader(tokenizer), []
    for number, one in enumerate(samples):
        prompt, text = prompts[one.problem], one.tokens[:-1] if one.stop_reason == "eos" else one.tokens
        sampling, begins, done = sampling_for(profile, prompt), unit.places(text), 0
        live = begins if places is None else [*places[number]]
        rewards: dict[int, tuple[list[float], list[float]]] = {at: ([], []) for at in live}
        for share in unit.rounds:
            if done:  # who differs most stays
                effects = {at: abs(fmean(np.subtract(*rewards[at]))) for at in live}
                live.sort(key=effects.__getitem__, reverse=True)
                live = sorted(live[: (len(live) + 1) // 2])
            most = max(done + 1, round(branches * share))
            for who, strategy in enumerate((solo("senior"), unit.junior)):
                requests = [
                    Request(
                        (*prompt.tokens, *text[:at]),
                        tuple(mix64(one.key, BRANCH, at, branch) for branch in range(done, most)),
                        replace(sampling, max_tokens=sampling.max_tokens - at),
                        strategy,
                    )
                    for at in live
                ]
                written, _ = generate_verified(engine, requests, strategy)
                whole = [_after(text[:at], each) for at, group in zip(live, written, strict=True) for each in group]
                ended = (sample_of(one.problem, prompt, "", 0, each, reader.of(each, one.opened)) for each in whole)
                scores = iter([float(each.score or 0.0) for each in grade([*ended])])
                for at in live:
                    rewards[at][who].extend(islice(scores, most - done))
            done = most
        read, found = surprisals.get(number), []
        for at, (senior, junior) in rewards.items():
            begin, ends = max((each for each in begins if each < at), default=at), effect(senior, junior)
            before = None if read is None or begin == at else float(np.mean(read[begin:at]))
            of_place = {"at": at, "effect": ends.mean, "low": ends.low, "high": ends.high, "surprisal": before}
            found.append(of_place | {"senior": senior, "junior": junior})
        out.append(one._replace(places=found))
        progress(1)
    return out


def effect(senior: Sequence[float], junior: Sequence[float], level: float = 0.95) -> Interval:
    """The mean difference of paired rewards, junior - senior, with Student's interval.

    A pair of +1 and -1 (times the largest difference, if that is more) is added before the interval is computed, so
    that a few branches that all agree do not make it vanish (Agresti and Min, 2005, doi 10.1002/sim.1781, for 0/1).

    Examples:
        >>> [round(bound, 2) for bound in effect([1, 1, 1, 1], [0, 0, 0, 0])]
        [-1.0, -1.0, 0.12]
    """
    difference = np.subtract(junior, senior)
    largest = max(1.0, float(np.abs(difference).max()))
    padded = np.array([*difference, -largest, largest])
    half = t.ppf((1 + level) / 2, len(padded) - 1) * padded.std(ddof=1) / np.sqrt(len(padded))
    low, high = np.clip(padded.mean() + np.array([-half, half]), -largest, largest)
    mean = float(difference.mean())
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))


def affected(problem: Sequence[Sample], k: Sequence[int] = ()) -> tuple[Metrics, Metrics]:
    """The rates and counts of one problem's texts. ``effect``: the mean over the places of a text; ``worst_effect``:
    the lowest one; ``harmful_places``: the share of places at which the interval of the effect is below 0."""
    texts = [one.places for one in problem if one.places]
    rates: Metrics = {}
    if texts:
        rates["effect"] = fmean(fmean(each["effect"] for each in text) for text in texts)
        rates["worst_effect"] = fmean(min(each["effect"] for each in text) for text in texts)
        rates["harmful_places"] = fmean(fmean(each["high"] < 0 for each in text) for text in texts)
    counts: Metrics = {"texts": len(problem), "places": sum(map(len, texts)), "dropped": len(problem) - len(texts)}
    return rates, counts | {"branches": 2 * sum(len(each["senior"]) for text in texts for each in text)}


def of_all_places(samples: Sequence[Sample]) -> Metrics:
    """Over all places: ``paired_variance``, the variance of the paired differences as a share of what it would be with
    other random numbers, and ``surprisal_correlation`` of harm and surprisal (Spearman), where they are defined."""
    places = [place for one in samples for place in one.places or () if len(place["senior"]) > 1]
    pairs = [np.array([place["senior"], place["junior"]]) for place in places]
    paired = sum(float(np.var(pair[1] - pair[0], ddof=1)) for pair in pairs)
    apart = sum(float(np.var(pair, axis=1, ddof=1).sum()) for pair in pairs)
    found = {"paired_variance": paired / apart} if apart else {}
    both = np.array([(-each["effect"], each["surprisal"]) for each in places if each["surprisal"] is not None])
    if len(both) > 2 and (both.std(axis=0) > 0).all():
        found["surprisal_correlation"] = float(spearmanr(*both.T).statistic)
    return found


def _after(before: Sequence[int], completion: Completion) -> Completion:
    """A completion with the senior's tokens before it."""
    count = len(before)
    return replace(
        completion,
        tokens=np.concatenate([np.array(before, dtype=completion.tokens.dtype), completion.tokens]),
        author=np.concatenate([np.full(count, Author.SENIOR, completion.author.dtype), completion.author]),
        behaviour_logprobs=np.pad(completion.behaviour_logprobs, (count, 0)),
    )
