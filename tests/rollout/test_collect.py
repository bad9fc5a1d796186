"""Prompts to rollouts: the engine's word is checked, and every text is scored once, whole, and in its place."""

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from helpers import EOS, IDS, prompts, tokenizer
from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import RENDERED, Prompt, Row, chat_tokens
from tandemrl.rewards.functions import Term
from tandemrl.rewards.protocol import Score
from tandemrl.rewards.scoring import Graded, Scorer
from tandemrl.rollout.collect import CompletionBatch, ResponseReader, generate, score_rollouts
from tandemrl.rollout.engine import LOST, Completion, EngineError, EngineInfo, Passes, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, bernoulli, per_group, replay
from tandemrl.selection.draws import group_of, request_key
from tandemrl.tasks.rubric.judge import grade_score
from tandemrl.types import Response, Transcript

STRATEGY = bernoulli(0.5)
SAMPLING = Sampling(max_tokens=9)


def row(index: int) -> Row:
    return Row(f"train/{index}", ({"role": "user", "content": "ab"},), "test", str(index), {})


def numbered_prompts(count: int) -> list[tuple[int, Prompt]]:
    """(number in the data set, prompt); the numbers are not the places in the batch."""
    return [(100 + 7 * i, Prompt(row(i), tuple(tokens))) for i, tokens in enumerate(prompts(count))]


class CountingScorer(Scorer):
    """Scores a text by its length, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Row, str]]] = []

    def terms_of(self, row: Row) -> tuple[Term, ...]:
        return ()

    def graded(self, items: Any, transcripts: Any = None, **_: Any) -> list[Graded]:
        self.calls.append([(row, response.plain) for row, response in items])
        lengths = [float(len(text)) for _, text in self.calls[-1]]
        return [Graded(Score(length, {"acc": 0.0, "chars": length}, None)) for length in lengths]


class Parrot:
    """An engine that writes the tokens 2, 3, 4, … of different lengths, with honest channels unless ``spoil``-ed."""

    policy_version = 6
    vocabulary = 1000
    context = 10**6
    has_junior = True
    passes = Passes()
    info = EngineInfo("parrot", "float32")

    def __init__(self, spoil: Callable[[list[list[Completion]]], None] | None = None) -> None:
        self.spoil = spoil
        self.seen: list[Request] = []

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        self.seen += requests
        written = [
            [self.completion(key, 3 + i + s, request.strategy) for s, key in enumerate(request.keys)]
            for i, request in enumerate(requests)
        ]
        if self.spoil is not None:
            self.spoil(written)
        return written

    def completion(self, key: int, length: int, strategy: Strategy) -> Completion:
        tokens = np.append(np.arange(2, 1 + length), IDS[EOS])
        told = replay(strategy, torch.tensor([key]), torch.from_numpy(tokens)[None], torch.tensor([length]))
        logprobs = -0.25 * np.arange(1, length + 1, dtype=np.float32)
        return Completion(key, tokens, told.author[0].numpy(), logprobs, "eos", policy_version=6)

    def abort(self, keys: Iterable[int] | None = None) -> None: ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def close(self) -> None: ...

    def fingerprint(self, who: Literal["senior", "junior"] = "senior") -> int:
        return 0


def collect(engine: Parrot | TorchEngine, given: list[tuple[int, Prompt]], **changes: int) -> CompletionBatch:
    settings = dict(group_size=3, seed=4, step=2) | changes
    return generate(engine, given, strategy=STRATEGY, sampling=SAMPLING, **settings)


# -------------------------------------------------------------------------------------------------------------- writing


def test_requests_carry_the_prompts_ids_and_the_keys_of_their_examples():
    engine = Parrot()
    given = numbered_prompts(4)
    written = collect(engine, given)
    assert [request.prompt for request in engine.seen] == [prompt.tokens for _, prompt in given]
    for (example, _), request in zip(given, engine.seen, strict=True):
        assert request.keys == tuple(request_key(4, 2, example, sample) for sample in range(3))
        assert request.strategy is STRATEGY
        assert request.sampling is SAMPLING
    assert written.prompts == [prompt for _, prompt in given]
    assert [len(group) for group in written.completions] == [3] * 4


def test_a_group_with_shared_draws_has_keys_that_name_it():
    engine, [first, second] = Parrot(), numbered_prompts(2)
    given = [first, second, first]  # an example that is drawn twice is two groups
    generate(engine, given, strategy=per_group(STRATEGY), sampling=SAMPLING, group_size=3, seed=4, step=2)
    keys = torch.tensor([request.keys for request in engine.seen])
    assert len(keys.unique()) == 9
    named = group_of(keys)
    assert bool((named == named[:, :1]).all())
    assert len(named.unique()) == 3


def flip_an_author(written: list[list[Completion]]) -> None:
    author = written[3][2].author.copy()
    author[-1] = 1 - author[-1]
    written[3][2] = dataclasses.replace(written[3][2], author=author)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda written: written[1].pop(), "request 1"),
        (lambda written: written.pop(), "3 groups for 4 requests"),
        (lambda written: written.insert(0, written.pop(1)), "request 0"),
        (lambda written: written[2].reverse(), "request 2"),
        (flip_an_author, "token 7 is recorded as written by"),
    ],
)
def test_what_an_engine_gets_wrong_is_refused(spoil, match):
    with pytest.raises(EngineError, match=match):
        collect(Parrot(spoil), numbered_prompts(4))


# -------------------------------------------------------------------------------------------------------------- scoring


def test_a_reward_that_compares_is_not_called_for_the_only_text_that_is_left():
    def spread(completions: list[str], **_: Any) -> list[float]:
        return [statistics.stdev(map(len, completions))] * len(completions)

    written = collect(Parrot(), numbered_prompts(2))
    lose = lambda completion: dataclasses.replace(completion, stop_reason=LOST[0])  # noqa: E731
    written.completions[0][:2] = map(lose, written.completions[0][:2])
    written.completions[1][:1] = map(lose, written.completions[1][:1])
    with Scorer(RewardConfig(), functions={"spread": spread}) as scorer:
        groups = score_rollouts(written, scorer, tokenizer())
    assert [[rollout.scored for rollout in group.rollouts] for group in groups] == [[False] * 3, [False, True, True]]


def test_rollouts_have_the_score_of_their_own_text():
    given = numbered_prompts(4)
    written = collect(Parrot(), given)
    scorer = CountingScorer()
    groups = score_rollouts(written, scorer, tokenizer())
    assert [group.example_id for group in groups] == [f"train/{i}" for i in range(4)]
    for g, group in enumerate(groups):
        prompt = given[g][1].tokens
        for index, rollout in enumerate(group.rollouts):
            completion = written.completions[g][index]
            n = len(prompt)
            assert (rollout.example_id, rollout.group, rollout.index) == (f"train/{g}", g, index)
            assert (rollout.key, rollout.stop_reason, rollout.policy_version) == (completion.key, "eos", 6)
            assert rollout.tokens.tolist() == [*prompt, *completion.tokens]
            assert rollout.author.tolist() == [-1] * n + completion.author.tolist()
            assert rollout.behaviour_logprobs.tolist() == [0.0] * n + completion.behaviour_logprobs.tolist()
            assert rollout.response_tokens == len(completion.tokens)
            # One character a token, and EOS is not part of the text.
            assert rollout.reward == len(completion.tokens) - 1
            assert rollout.reward_parts == {"acc": 0.0, "chars": rollout.reward}


# --------------------------------------------------------------------------------------------- what rewards read of ids

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opened | default('') }}{% endif %}"
)


@pytest.fixture
def thinker() -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer())
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|im_start|>", "<|im_end|>"]})
    made.add_tokens(["<done>"])
    made.chat_template = CHATML
    return made


def completion(ids: list[int], author: list[int], stop: Any = "eos", transcript: Any = None) -> Completion:
    return Completion(0, np.array(ids), np.array(author), np.zeros(len(ids)), stop, transcript=transcript)


def test_special_tokens_stay_and_the_ends_of_both_authors_go(thinker: PreTrainedTokenizerFast) -> None:
    end, close, done = thinker.eos_token_id, *thinker.convert_tokens_to_ids(["</think>", "<done>"])
    a, b = thinker.convert_tokens_to_ids(["a", "b"])
    reader = ResponseReader(thinker, ends=[done])
    for last in (end, done):  # the senior's, the junior's
        assert reader.of(completion([a, close, b, last], [1] * 4)) == Response(
            "a</think>b", "ab", "", (a, close, b, last)
        )
    assert reader.of(completion([a, close], [1] * 2, "length")).text == "a</think>"
    assert ResponseReader(thinker).of(completion([a, done], [1, 0])).text == "a"  # known from the completion
    turns = completion([a, done, b, b, close, end], [1, 0, -1, 1, 1, 1], transcript=Transcript(()))
    assert reader.of(turns) == Response("a\nb</think>", "a\nb", "", tuple(turns.tokens))


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_what_the_template_opens_is_told(thinker: PreTrainedTokenizerFast, opened: str) -> None:
    asked = [{"role": "user", "content": "a\nAssistant: b"}, {"role": "assistant", "content": "a"}]
    ids = chat_tokens(thinker, [*asked, asked[0]], "row", {"opened": opened})
    assert ResponseReader(thinker).opened(ids) == opened
    text = "User: a\nAssistant: b.\n<think>"
    rendered = Row("r", ({"role": "user", "content": text},), "x", "1", {RENDERED: True})
    assert ResponseReader(thinker).opened(thinker.encode(text, add_special_tokens=False), rendered) == " b.\n<think>"


def test_a_trained_judge_s_thought_that_the_template_opens_may_not_be_over() -> None:
    row = Row("r", (), "grade", "0.7", {})
    cut = Response("Total Score: 7/10", "Total Score: 7/10", "<think>\n")
    assert grade_score(row, cut.text).value == 1.0
    assert score_text(row, cut).value == 0.0  # cut off before its end
    whole = "It is 3/10?</think>Total Score: 7/10"
    assert score_text(row, Response(whole, whole.replace("</think>", ""), "<think>\n")).value == 1.0
