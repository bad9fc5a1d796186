"""Pairs of a pretrained model that learns to solve word problems: minutes on a CPU core.

SmolLM2-135M-Instruct learns from the solutions of generated problems (``tasks.generated.word_problems``). The junior is
what it is after a few steps. The senior goes on from there in the same run: on solutions that are worded alike, or in
the pair ``word_problems_terse`` on solutions in a shorthand that the junior never saw.
"""

import copy
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.apps.experiments.pair import finished, store, threads
from tandemrl.apps.experiments.tiny import solo_texts
from tandemrl.apps.experiments.warm_start import Progress, WarmStart, load_trainable, shuffled, solved_rows, warm_start
from tandemrl.config import RewardConfig
from tandemrl.data.rows import SOLUTION, DataError, Row
from tandemrl.models.loading import is_local, weight_files
from tandemrl.tasks.generated.rows import generated_rows
from tandemrl.tasks.generated.word_problems import DEFAULT_COUNTS, MAX_TOKENS, uses_shorthand
from tandemrl.tasks.gsm8k.grader import gsm8k

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
MAX_PROMPT_TOKENS = 96
ROWS = 1024
"""How many problems a model learns from, in each stage. Their order is that of the seed."""
PLAIN = "word_problems"
RECIPE = WarmStart(
    batch_size=8, lr=1e-4, final_lr_fraction=1.0, warmup_steps=0, betas=(0.9, 0.95), weight_decay=0.0, eval_rows=128
)
"""What both stages have in common. Their steps are in ``STEPS``."""


STEPS: dict[str, tuple[int, int]] = {PLAIN: (10, 10), "word_problems_terse": (20, 40)}
"""For each pair, how many steps on plain solutions make the junior, and how many on the pair's then make the senior.
After ten SmolLM2 solves about a sixth of the problems, after twenty a third to a half. A longer warm start makes its
texts more alike, and groups of rollouts then differ less in reward."""


def build_pretrained_pair(
    out: Path,
    *,
    pair: str = PLAIN,
    seed: int = 0,
    steps: int | None = None,
    model: str = MODEL,
    device: str = "cpu",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train a pair into ``out/senior`` and ``out/junior``, and return the content of ``out/manifest.json``.

    Nothing is rebuilt if ``out`` already holds the same pair, seed and recipe with intact weights. Otherwise a finished
    build replaces ``out`` in one rename.

    ``source`` in the manifest says where the pretrained model is from. ``base`` says what the models can do before
    reinforcement learning: ``solo/pass@1`` of the senior, ``junior/solo/pass@1``, and ``shorthand/rate``, the share of
    the senior's texts that are in shorthand.

    Args:
        pair: one of ``STEPS``.
        steps: the number of warm-start steps of each stage. None means the pair's own.
        model: the pretrained model, by its folder or its name on the hub.
        device: where the models are trained.

    Raises:
        DataError: the pair is unknown.
        FileExistsError: ``out`` holds another pair or seed, or something else than a pair.
        ModelError: the pretrained model cannot be had.
    """
    identity = pretrained_identity(pair=pair, seed=seed, steps=steps, model=model)
    if (stored := finished(out, identity)) is not None:
        return stored
    of_junior, of_senior = (identity["recipe"][name]["steps"] for name in ("junior", "senior"))
    with threads(RECIPE.threads):
        policy, tokenizer = load_trainable(model, device=device)
        junior: list[PreTrainedModel] = []

        def note(step: int, total: int, loss: float) -> None:
            if step == of_junior:
                junior.append(copy.deepcopy(policy).eval())
            if progress is not None:
                progress(step, total, loss)

        plain, own = (
            shuffled(solved_rows(_rows(each), tokenizer, source=each, max_prompt_tokens=MAX_PROMPT_TOKENS), seed)
            for each in (PLAIN, pair)
        )
        # The senior goes on with the problems that follow the junior's, in its own style.
        before = of_junior * RECIPE.batch_size
        lessons = itertools.chain(itertools.islice(plain, before), itertools.islice(own, before, None))
        loss = warm_start(policy, lessons, replace(RECIPE, steps=of_junior + of_senior), progress=note)
        base = _skill(policy, junior[0], tokenizer, generated_rows(pair, "heldout", RECIPE.eval_rows, seed), seed)
    local = is_local(model)
    manifest = identity | {
        "source": str(Path(model).resolve()) if local else f"hub {model}@{weight_files(model)[0].parent.name}",
        "base": base | {"eval_rows": RECIPE.eval_rows, "warm_start/loss": loss},
    }
    return store(out, {"senior": (policy, tokenizer), "junior": (junior[0], tokenizer)}, manifest)


def pretrained_identity(*, pair: str, seed: int, steps: int | None = None, model: str = MODEL) -> dict[str, Any]:
    """What a manifest says of how its pair is built, but for the source of the pretrained model.

    Raises:
        DataError: the pair is unknown.
    """
    if pair not in STEPS:
        raise DataError(f"unknown pretrained pair {pair!r}; known: {', '.join(STEPS)}")

    def part(of: str, own: int) -> dict[str, Any]:
        texts = [(row.messages, row.extra_info[SOLUTION]) for row in _rows(of)]
        return {"steps": steps or own, "text_sha256": hashlib.sha256(repr(texts).encode()).hexdigest()}

    of_junior, of_senior = STEPS[pair]
    common = asdict(RECIPE)
    del common["steps"], common["vocab_size"]  # of a model that is trained from nothing
    recipe = common | {
        "model": Path(model).name,
        "rows": ROWS,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "junior": part(PLAIN, of_junior),
        "senior": part(pair, of_senior),
    }
    return json.loads(json.dumps({"schema": 1, "pair": pair, "seed": seed, "recipe": recipe}))


# --------------------------------------------------------------------------------------------------------------------


def _rows(pair: str) -> list[Row]:
    """The problems of every warm start, of which reinforcement learning and evaluation have none."""
    trained = DEFAULT_COUNTS["train"]
    return generated_rows(pair, "train", trained + ROWS, 0)[trained:]


def _skill(
    senior: PreTrainedModel, junior: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row], seed: int
) -> dict[str, float]:
    """What the models can do alone before reinforcement learning."""
    written, of_junior = (solo_texts(model, tokenizer, rows, seed, max_tokens=MAX_TOKENS) for model in (senior, junior))

    def accuracy(texts: Sequence[str]) -> float:
        return fmean(gsm8k(row, text, RewardConfig()).value == 1 for row, text in zip(rows, texts, strict=True))

    return {
        "solo/pass@1": accuracy(written),
        "junior/solo/pass@1": accuracy(of_junior),
        "shorthand/rate": fmean(map(uses_shorthand, written)),
    }
