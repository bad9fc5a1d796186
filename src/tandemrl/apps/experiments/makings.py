"""What arms are made with beside their pair: an override names it, and it is built for the first arm that does."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from tandemrl import evals
from tandemrl.apps.experiments import tiny
from tandemrl.apps.experiments.warm_start import (
    Lesson,
    WarmStart,
    load_trainable,
    save,
    shuffled,
    solved_rows,
    warm_start,
)
from tandemrl.config import Config
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import SOLUTION
from tandemrl.files import write_directory
from tandemrl.models.critic import load_critic
from tandemrl.models.loading import load_tokenizer

POOL_SIZE, POOL_SEED = 2, 5000
"""How many further juniors a pool has, and the first of their seeds, which no reader has."""
PROBLEMS = 2048
"""How many training problems a model solves, once each, for what is learnt from its texts."""
IMITATION = WarmStart(steps=200, lr=1e-3)
VERIFIER = WarmStart(steps=300, lr=1e-3, weight_decay=0.0)


class Making(NamedTuple):
    """A pair and seed, with the folder that has its ``pair``. config: that of its evaluations."""

    config: Config
    home: Path
    pair: str
    seed: int
    steps: int | None


def juniors(of: Making) -> str:
    """A list of further juniors, of the pair's vocabulary, but of other sizes and seeds."""
    read, seed = _tokenizer(of, "junior"), POOL_SEED + 10 * of.seed
    build = partial(tiny.build_tiny_readers, of.home / "pool", pair=of.pair, seed=seed, steps=of.steps)
    return json.dumps([*map(str, build(count=POOL_SIZE, tokenizer=read))])


def imitator(of: Making) -> str:
    """The senior after supervised training on right texts of the junior."""
    if not (out := of.home / "imitator").is_dir():
        policy, tokenizer = load_trainable(of.home / "pair" / "senior", device=of.config.model.device)
        right = [lesson for lesson, correct in _solved(of, "junior", "senior") if correct]
        warm_start(policy, shuffled(right, of.seed), IMITATION)
        write_directory(out, partial(save, policy, tokenizer))
    return str(out)


def verifier(of: Making) -> str:
    """The junior with a head that says whether a text of the senior before training is right: the first round of
    prover-verifier games (Kirchner et al., arXiv 2407.13692), by logistic regression. It reads the end of a text."""
    if not (out := of.home / "verifier").is_dir():
        model = load_critic(of.home / "pair" / "junior", device=of.config.model.device)
        model.set_attn_implementation("sdpa")
        optimizer = torch.optim.AdamW(model.parameters(), lr=VERIFIER.lr, weight_decay=VERIFIER.weight_decay)
        lessons = shuffled(
            [Lesson(None, each.tokens, [float(right)]) for each, right in _solved(of, "senior", "junior")], of.seed
        )
        for _ in range(VERIFIER.steps):
            batch = [next(lessons) for _ in range(VERIFIER.batch_size)]
            tokens = pad_sequence([torch.tensor(each.tokens) for each in batch], batch_first=True)
            ends = torch.tensor([len(each.tokens) - 1 for each in batch])
            values = model(tokens.to(model.device)).logits[torch.arange(len(batch)), ends, 0]
            right = torch.tensor([each.weights[0] for each in batch]).to(model.device)
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(values, right).backward()
            optimizer.step()
        write_directory(out, partial(save, model, _tokenizer(of, "junior")))
    return str(out)


MAKINGS: Mapping[str, Callable[[Making], str]] = {
    "{juniors}": juniors,
    "{imitator}": imitator,
    "{verifier}": verifier,
}


def _tokenizer(of: Making, author: str) -> PreTrainedTokenizerFast:
    tokenizer = load_tokenizer(of.home / "pair" / author)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def _solved(of: Making, author: str, reader: str) -> list[tuple[Lesson, bool]]:
    """Texts of one model of the pair to training problems in the tokens of the other one, each with whether it is
    right."""
    source, config = f"synthetic:{of.pair}:train:{PROBLEMS}", of.config
    once = replace(config.eval, samples=1, k=(1,), bootstrap=0)
    config = replace(config, data=replace(config.data, eval=(source,)), eval=once)
    with TemporaryDirectory() as folder:
        evals.evaluate(config, model=of.home / "pair" / author, out=folder, phases=["pass-at-k"])
        samples = evals.read_samples(Path(folder) / "pass-at-k.samples.jsonl")
    rows = {row.example_id: row for row in load_rows([source])}
    written = [each for each in samples if each.response.plain.strip()]
    texts = [replace(rows[each.example_id], extra_info={SOLUTION: each.response.plain}) for each in written]
    most = config.data.max_prompt_tokens
    lessons = solved_rows(texts, _tokenizer(of, reader), source=source, max_prompt_tokens=most)
    return [(lesson, bool(each.correct)) for lesson, each in zip(lessons, written, strict=True)]
