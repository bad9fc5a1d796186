"""The tiny senior/junior pair: a Qwen3 of 0.28 million parameters that learns word problems in a minute on a CPU core.

Every claim of the library can be tried on it without a GPU or a download. The senior and the junior start as the same
sloppy model (see ``tasks.generated.synthetic``); the ``jargon`` senior is then trained further. They have a real chat
template, tokenizer and file layout, so that what runs on the pair runs on a large model.
The pairs ``hops`` and ``hops_jargon`` are agents that search in generated worlds (``tasks.generated.hops``), those of
``calculator`` have sums worked out (``tasks.generated.calculator``). The junior of ``hops`` and of ``calculator`` was
trained for half as long.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandemrl.apps.experiments.agents import EOS, PAD, START, hops_tokenizer, lessons, solo_episodes, tiny_tokenizer
from tandemrl.apps.experiments.pair import PairError, finished, store, threads, unpack
from tandemrl.apps.experiments.warm_start import Lesson, Progress, WarmStart, save, solution_lesson, warm_start
from tandemrl.config import load
from tandemrl.data.rows import DataError, Row
from tandemrl.files import write_directory
from tandemrl.tasks.generated import hops
from tandemrl.tasks.generated.rows import AGENTS, generated_rows
from tandemrl.tasks.generated.synthetic import Stage, examples, leaves_out, slips, uses_jargon

SPECIAL_TOKENS = (PAD, START, EOS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's pre-tokeniser: a word takes its leading space, a digit stands alone, punctuation takes the newlines after it.
WORD_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


SHAPE: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that every vLLM backend accepts
    "intermediate_size": 288,
    "initializer_range": 0.04,
}
"""The fields of the Qwen3 configuration. The vocabulary is the tokenizer's."""
READERS: tuple[tuple[int, Mapping[str, Any]], ...] = (
    (290, SHAPE | {"hidden_size": 64, "intermediate_size": 192}),
    (480, SHAPE | {"num_hidden_layers": 3}),
    (350, SHAPE | {"hidden_size": 128, "intermediate_size": 384}),
)
"""The vocabulary sizes and shapes of readers."""
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
"""At temperature 1, from the whole distribution."""

Part = Stage | Literal["junior"]
"""What is trained for a pair: the base, a senior that continues from the base, or a junior that starts anew."""

_MUON = WarmStart(steps=600, optimizer="muon")
_JARGON_STAGES: dict[Part, WarmStart] = {
    "base": replace(_MUON, steps=500, vocab_size=480, eval_rows=1024),
    "senior": replace(_MUON, steps=500, lr=4e-3, vocab_size=480),
}
WARM_STARTS: dict[str, dict[Part, WarmStart]] = {
    "plain": {"base": WarmStart()},
    "jargon": _JARGON_STAGES,
    "jargon_two_tokenizers": _JARGON_STAGES | {"junior": replace(_MUON, vocab_size=290)},
    "repair": {"base": replace(_MUON, eval_rows=1024)},
    "shorthand": _JARGON_STAGES | {"senior": replace(_JARGON_STAGES["senior"], steps=250)},
    "hops": {"base": WarmStart(steps=800), "junior": WarmStart(steps=400)},
    "hops_jargon": {"base": WarmStart(steps=800), "senior": WarmStart(steps=700)},
    "calculator": {"base": WarmStart(steps=400), "junior": WarmStart(steps=200)},
}
"""For each pair, how the base of both models is trained, how the senior continues if it does, and how the junior is
trained if it is not the base. Where its ``vocab_size`` is another, the junior has a tokenizer of its own, which was
trained on texts of the base alone. It does not apply to agents, whose vocabulary is closed."""


Criteria = Mapping[str, tuple[float, float]]
"""Measures of what the models can do before reinforcement learning, each with the range in which it must be."""
_JARGON = {"jargon/pass@1": (0.88, 1.0), "plain/pass@1": (0.3, 0.55), "jargon/rate": (0.45, 0.75)}
CRITERIA: dict[str, Criteria] = {
    "jargon": _JARGON,
    "jargon_two_tokenizers": _JARGON,
    "repair": {"solo/pass@1": (0.4, 0.58), "slips/repaired": (0.07, 0.25)},
    "shorthand": {"shorthand/rate": (0.05, 0.3), "shorthand/gain": (-0.12, 0.12)},
    "hops_jargon": {"jargon/gain": (0.0, 1.0)},
}
"""What makes a pair fit for its experiment, measured on held-out problems. The last stage of the warm start is repeated
until all of it holds. A jargon senior must be so much better in jargon than in plain words that plain GRPO has a reason
to keep it; where it is hardly better, training drops the jargon on some seeds and machines, and nothing is compared. A
senior's shorthand is to be rare, and no better or worse than its full texts.
For ``hops_jargon`` no margin has been measured."""

MAX_ROUNDS = 3
"""How often the last stage of a warm start is trained before a pair is refused."""


def build_tiny_pair(
    out: Path,
    *,
    pair: str = "plain",
    seed: int = 0,
    steps: int | None = None,
    device: str = "cpu",
    train: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Put a pair into ``out/senior`` and ``out/junior``, and return the content of ``out/manifest.json``.

    The pair is unpacked if it comes with the library (``pair.unpack``), else it is trained. The same seed, machine and
    thread count give the same weights, which are rounded to bfloat16 and stored in float32. Nothing is done if ``out``
    already holds the same pair, seed and recipe with intact weights. Otherwise a finished pair replaces ``out`` in one
    rename.

    ``base`` in the manifest says what the models can do before reinforcement learning: ``solo/pass@1`` of the senior,
    and ``junior/solo/pass@1`` if the junior is another model. For a senior that was trained further in jargon it also
    has ``jargon/rate``, the accuracy of its texts with and without jargon, ``jargon/pass@1`` and ``plain/pass@1`` (0 if
    it wrote no such text), and their difference, ``jargon/gain``; for one with a shorthand, the same of this.
    ``criteria`` are the ranges in which these must be (``CRITERIA``), ``rounds`` what was measured each time the last
    stage had been trained, and ``unmet`` what is still out of range.

    Args:
        pair: the name of the pair.
        steps: the number of warm-start steps of every stage, once, without criteria. None means the pair's recipe.
        device: where the models are trained.
        train: train it, also if it comes with the library.

    Raises:
        DataError: the pair is unknown.
        FileExistsError: ``out`` holds another pair or seed, or something else than a tiny pair.
        PairError: the criteria are not met. The manifest and the models are kept, so the same call raises it at once.
    """
    recipes = _recipes(pair, steps)
    base = recipes["base"]
    identity = pair_identity(pair=pair, seed=seed, steps=steps)
    if (stored := finished(out, identity)) is not None:
        return _accepted(stored, out)
    if not train and (unpacked := unpack(identity, out)) is not None:
        return unpacked

    total, done = sum(recipe.steps for recipe in recipes.values()), 0

    def learn(model: Qwen3ForCausalLM, part: Part, stream: Iterator[Lesson]) -> float:
        nonlocal done
        start, done = done, done + recipes[part].steps
        note = progress or (lambda *event: None)
        return warm_start(
            model, stream, recipes[part], progress=lambda step, _, loss: note(start + step, max(total, done), loss)
        )

    def untrained(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
        return new_model(tokenizer, seed).to(device)

    with threads(base.threads):
        tokenizer = of_junior = train_tokenizer(pair, seed, vocab_size=base.vocab_size)
        senior = junior = untrained(tokenizer)
        for last in (part for part in recipes if part != "junior"):
            junior = senior if last == "base" else copy.deepcopy(senior)
            stream = _lessons(tokenizer, pair, seed, last)
            loss = learn(senior, last, stream)
        if "junior" in recipes:
            if recipes["junior"].vocab_size != base.vocab_size:
                of_junior = train_tokenizer(pair, seed, vocab_size=recipes["junior"].vocab_size, part="junior")
            junior = untrained(of_junior)
            learn(junior, "junior", _lessons(of_junior, pair, seed, "junior"))
        rows = generated_rows(pair, "heldout", base.eval_rows, seed)
        rounds: list[dict[str, float]] = []
        while True:
            _round_to_bfloat16(senior, junior)
            rounds.append(_skill((senior, tokenizer), (junior, of_junior), rows, seed))
            found, ranges = rounds[-1], identity["criteria"].items()
            unmet = [f"{low:g} <= {name} <= {top:g}" for name, (low, top) in ranges if not low <= found[name] <= top]
            if not unmet or len(rounds) == MAX_ROUNDS:
                break
            loss = learn(senior, last, stream)

    manifest = identity | {
        "base": rounds[-1] | {"eval_rows": base.eval_rows, "warm_start/loss": loss},
        "rounds": rounds,
        "unmet": unmet,
    }
    return _accepted(store(out, {"senior": (senior, tokenizer), "junior": (junior, of_junior)}, manifest), out)


def pair_identity(*, pair: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """What a manifest says of how its pair is built. Two pairs with the same values differ by rounding at most."""

    def of(part: Part, recipe: WarmStart) -> dict[str, Any]:
        """The hyperparameters, and a fingerprint of the texts."""
        texts: Any = lessons if pair in AGENTS else examples
        arguments = (hops_tokenizer(pair), pair, seed) if pair in AGENTS else (pair, seed)
        sample = repr(list(itertools.islice(texts(*arguments, stage="base" if part == "junior" else part), 64)))
        return asdict(recipe) | {"text_sha256": hashlib.sha256(sample.encode()).hexdigest()}

    learnt = {part: of(part, recipe) for part, recipe in _recipes(pair, steps).items()}
    identity = {
        "schema": 2,
        "pair": pair,
        "seed": seed,
        "recipe": learnt.pop("base") | {"model": SHAPE} | learnt,
        "criteria": CRITERIA.get(pair, {}) if steps is None else {},
    }
    return json.loads(json.dumps(identity))


def train_tokenizer(
    pair: str, seed: int, *, vocab_size: int, texts: int = 2000, part: Part = "senior"
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the pair's chats. It encodes any text, and ".\\n\\n" is one token.

    Agents have a tokenizer that is not trained.

    Args:
        vocab_size: the greatest size of the vocabulary, including special tokens.
        texts: how many solutions of each stage it is trained on.
        part: who has it; the junior saw the texts of the base alone.
    """
    if pair in AGENTS:
        return hops_tokenizer(pair)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    stages: Sequence[Stage] = ("base", "senior") if part == "senior" and part in WARM_STARTS[pair] else ("base",)
    chats = itertools.chain.from_iterable(itertools.islice(examples(pair, seed, stage=each), texts) for each in stages)
    bpe.train_from_iterator(
        (part for problem, text in chats for part in (f"user\n{problem.question}", f"assistant\n{text}")), trainer
    )
    return tiny_tokenizer(bpe, CHAT_TEMPLATE)


def build_tiny_readers(
    out: Path,
    *,
    pair: str,
    seed: int = 0,
    count: int,
    steps: int | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Train readers for a pair into ``out/reader-1`` …: models that learnt the base's texts alone, each of another size
    and seed and with a tokenizer of its own (`READERS`, in turn), or with this one. Those that are there are kept.

    Raises:
        DataError: the pair is unknown, or of agents.
    """
    if pair in AGENTS:
        raise DataError(f"no readers for {pair}: agents act in an environment; give plain, jargon or repair")
    recipe, folders = _recipes(pair, steps)["base"], [out / f"reader-{number}" for number in range(1, count + 1)]
    for number, folder in enumerate(folders):
        if folder.exists():
            continue
        own, (vocabulary, shape) = seed + 1 + number, READERS[number % len(READERS)]
        with threads(recipe.threads):
            read = tokenizer or train_tokenizer(pair, own, vocab_size=vocabulary, part="junior")
            model = new_model(read, own, shape)
            note = partial(_note, progress, number * recipe.steps, count * recipe.steps)
            warm_start(model, _lessons(read, pair, own, "base"), recipe, progress=note)
        out.mkdir(parents=True, exist_ok=True)
        write_directory(folder, partial(save, model, read))
    return folders


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int, shape: Mapping[str, Any] = SHAPE) -> Qwen3ForCausalLM:
    """An untrained Qwen3 in float32."""
    ends: Any = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(vocab_size=len(tokenizer), bos_token_id=None, dtype="float32", **ends, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(**SAMPLING, **ends)
    return model


@torch.no_grad()
def solo_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], seed: int, *, max_tokens: int = 64
) -> list[str]:
    """Sample one text per row at temperature 1, from the whole distribution."""
    encoded: Any = tokenizer.apply_chat_template(
        [[dict(message) for message in row.messages] for row in rows],
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )
    prompts = encoded.to(model.device)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        generate: Any = model.generate  # torch types attributes of modules as tensors
        written = generate(**prompts, **SAMPLING, max_new_tokens=max_tokens)
    return tokenizer.batch_decode(written[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)


# --------------------------------------------------------------------------------------------------------------------


def _note(progress: Progress | None, done: int, total: int, step: int, _: int, loss: float) -> None:
    if progress is not None:
        progress(done + step, total, loss)


_Model = tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]


def _skill(senior: _Model, junior: _Model, rows: Sequence[Row], seed: int) -> dict[str, float]:
    """What the models can do alone before reinforcement learning. The junior counts only if it is another model."""
    config = AGENTS.get(rows[0].data_source.removeprefix("synthetic/"))
    jargon = hops.uses_jargon if config else uses_jargon

    def written(model: _Model) -> list[tuple[str, bool]]:
        """The texts of a model, each with whether it is right."""
        if config:
            episodes = solo_episodes(*model, rows, seed, config=load(config))
            return [(episode.text, bool(episode.correct)) for episode in episodes]
        texts = solo_texts(*model, rows, seed)
        return [(text, text.endswith(f"\\boxed{{{row.ground_truth}}}")) for row, text in zip(rows, texts, strict=True)]

    def accuracy(found: Sequence[tuple[str, bool]]) -> float:
        return fmean([correct for _, correct in found] or [0])

    found = written(senior)
    skill = {"solo/pass@1": accuracy(found)}
    if junior[0] is not senior[0]:
        skill["junior/solo/pass@1"] = accuracy(written(junior))
    for style, of in (("jargon", jargon), ("shorthand", leaves_out)):
        if style in rows[0].data_source and junior[0] is not senior[0]:
            own, plain = (accuracy([each for each in found if of(each[0]) == used]) for used in (True, False))
            skill |= {f"{style}/rate": fmean(of(text) for text, _ in found), f"{style}/pass@1": own}
            skill |= {"plain/pass@1": plain, f"{style}/gain": own - plain}
    if rows[0].data_source.endswith("repair"):
        skill["slips/repaired"] = fmean([slip.repaired for text, _ in found for slip in slips(text)] or [0])
    return skill


def _lessons(tokenizer: PreTrainedTokenizerFast, pair: str, seed: int, part: Part) -> Iterator[Lesson]:
    """Yield what is learnt for a part, without end."""
    stage: Stage = "base" if part == "junior" else part
    if pair in AGENTS:
        yield from lessons(tokenizer, pair, seed, stage=stage)
    for problem, text in examples(pair, seed, stage=stage):
        asked = [{"role": "user", "content": problem.question}]
        prompt: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        yield solution_lesson(tokenizer, prompt, text)


@torch.no_grad()
def _round_to_bfloat16(*models: Qwen3ForCausalLM) -> None:
    """So that a pair can be stored in half of the bytes without another model coming out."""
    for model in models:
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def _accepted(manifest: dict[str, Any], out: Path) -> dict[str, Any]:
    if manifest["unmet"]:
        measured = ", ".join(f"{name} {manifest['base'][name]:.3f}" for name in manifest["criteria"])
        raise PairError(
            f"{out}: the {manifest['pair']} pair of seed {manifest['seed']} is refused after {len(manifest['rounds'])} "
            f"rounds: {measured}; unmet: {'; '.join(manifest['unmet'])}. Use another seed"
        )
    return manifest


def _recipes(pair: str, steps: int | None) -> dict[Part, WarmStart]:
    if pair not in WARM_STARTS:
        raise DataError(f"unknown tiny pair {pair!r}; known: {', '.join(WARM_STARTS)}")
    recipes = WARM_STARTS[pair]
    return recipes if steps is None else {part: replace(recipe, steps=steps) for part, recipe in recipes.items()}
