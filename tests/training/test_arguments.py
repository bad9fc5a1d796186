"""What is passed to ``train`` in Python: its short forms work, and what cannot work is refused before any weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.runs import config
from torch import Tensor

import tandemrl.training.build as build_module
from tandemrl.config import ConfigError, FunctionRecord, load
from tandemrl.config.compatibility import check
from tandemrl.config.schema import FunctionsConfig
from tandemrl.losses import RECIPES, Recipe, ppo_clip
from tandemrl.selection import Strategy, annealed, bernoulli, chunk, linear, solo, try_strategy
from tandemrl.selection.strategies import turn
from tandemrl.training.arguments import tried_recipe, try_strategies
from tandemrl.training.loop import train


def mean_clip(*tensors: Tensor, **clips: Any) -> Tensor:
    return ppo_clip(*tensors, **clips).mean()


def detached(*tensors: Tensor, **clips: Any) -> Tensor:
    return ppo_clip(*tensors, **clips).detach()


def of_the_old(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **clips: Any) -> Tensor:
    return ppo_clip(old_logprobs, old_logprobs, advantages, **clips) + 0 * logprobs


def divided(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **clips: Any) -> Tensor:
    return logprobs / advantages


def no_keywords(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -advantages * logprobs


def spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    return rewards.std()


def without_epsilon(rewards: Tensor, group_ids: Tensor) -> Tensor:
    return torch.stack([(rewards[i] - 0.5) / rewards[group_ids == g].std() for i, g in enumerate(group_ids)])


GRPO = RECIPES["grpo"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (ppo_clip, r"recipe=.*ppo_clip.* is a function; expected a Recipe .*_replace\(surrogate=FUNCTION\)"),
        ({"name": "grpo"}, "is a dict; expected a Recipe or the name of one"),
        ("gropo", r"loss\.recipe=gropo: must be one of grpo, dr_grpo, .*; did you mean grpo\?"),
        (GRPO._replace(surrogate=mean_clip), r"the surrogate returned a float32 tensor of shape \[\]; .*\.mean\(\)"),
        (GRPO._replace(surrogate=detached), "a loss without a gradient"),
        (GRPO._replace(surrogate=of_the_old), "gradient of the surrogate .* is 0"),
        (GRPO._replace(surrogate=divided), "the surrogate or its gradient is not finite at advantages"),
        (GRPO._replace(surrogate=no_keywords), r"the surrogate function failed: TypeError: .*no_keywords.*surrogate\("),
        (GRPO._replace(advantage=lambda rewards: rewards), r"the advantage function failed: TypeError.*as advantage\("),
        (GRPO._replace(advantage=spread), r"the advantage function returned a float32 tensor of shape \[\]; .*\[6\]"),
        (GRPO._replace(advantage=without_epsilon), "expected finite numbers, also for a group with equal rewards"),
        (GRPO._replace(reduction="mean"), "reduction='mean': must be one of token_mean"),
        (GRPO._replace(clip_low="0.2"), r"clip_low='0\.2': must be None or in \[0, 1\]"),
        (GRPO._replace(overlong_share=2.0), r"overlong_share=2\.0: must be in \[0, 1\)"),
    ],
)
def test_a_recipe_that_cannot_train_is_refused_before_any_weight(
    recipe: Any, message: str, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "load_trained", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=message):
        train(config(tiny_pair, tmp_path), recipe=recipe, quiet=True)


OWN = FunctionsConfig(recipe=FunctionRecord("own"))
"""As in the config of a run to which a recipe was passed."""


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (RECIPES["rloo"], ["train.mini_batch_prompts=4"], r"^train\.mini_batch_prompts=4: must be null with rloo,"),
        (RECIPES["rloo"]._replace(name="mine"), ["train.mini_batch_prompts=8"], "must be null with mine"),
        (GRPO, ["loss.recipe=ppo", "rollout.group_size=1"], r"^rollout\.group_size=1: must be at least 2: a group of"),
        (GRPO, ["loss.recipe=ppo", "train.critic_warmup_steps=1"], r"^train\.critic_warmup_steps=1: must be 0 unless"),
        (GRPO, ["loss.recipe=ppo", "model.critic=x"], r"^model\.critic=x: must be null unless the recipe has a critic"),
    ],
)
def test_the_config_has_to_suit_the_recipe_that_trains(recipe: Recipe, overrides: list[str], message: str) -> None:
    settings = replace(load(overrides=overrides), functions=OWN)
    check(settings)  # which cannot know the recipe
    with pytest.raises(ConfigError, match=message):
        tried_recipe(recipe, settings)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss.recipe=rloo"], r"loss\.normalise_by=response: must be weight with rloo and its reduction sequence_"),
        (["loss.reduction=token_sum_constant"], r"must be weight with grpo and its reduction token_sum_constant"),
        (["loss.importance_cap=3"], r"loss\.importance_cap=3\.0: must be null with grpo and without importance"),
    ],
)
def test_a_key_that_the_recipe_does_not_read_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tried_recipe(None, load(overrides=[*overrides, "loss.normalise_by=response"]))


# ---------------------------------------------------------------------------------------------------------- strategies


class Count(NamedTuple):
    count: Tensor


def parity(keys: Tensor) -> tuple[Tensor, Count]:
    return keys % 2 == 0, Count(keys)


def step(state: Count, token: Tensor) -> tuple[Tensor, Count]:
    return (state.count + token) % 2 == 0, Count(state.count + token)


def in_place(state: Count, token: Tensor) -> tuple[Tensor, Count]:
    state.count.add_(token)
    return state.count % 2 == 0, state


def random(state: Count, token: Tensor) -> tuple[Tensor, Count]:
    return torch.rand(len(token)) < 0.5, state


def of_the_batch(state: Count, token: Tensor) -> tuple[Tensor, Count]:
    return token == token.max(), state


GOOD = Strategy(parity, step)
TABLE = torch.zeros(50, dtype=torch.bool)


def test_the_library_s_strategies_and_a_good_one_pass_their_trial() -> None:
    for strategy in (GOOD, bernoulli(0.5), chunk(3), solo(), solo("junior"), turn(0.5)):
        try_strategy(strategy, 100)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy(lambda keys: keys > 0, step), "init failed on 4 rows: ValueError: too many values"),  # type: ignore[arg-type, return-value]
        (Strategy(lambda keys: (keys, Count(keys)), step), r"init returned a int64 tensor .* expected a bool tensor"),
        (Strategy(lambda keys: (keys[:1] > 0, Count(keys)), step), r"a bool tensor of shape \[1\], .* for 4 rows"),
        (Strategy(lambda keys: (keys > 0, {"count": keys}), step), "a dict for 4 rows; expected .* a NamedTuple"),
        (Strategy(lambda keys: (keys > 0, Count(keys.sum())), step), r", a int64 tensor of shape \[\] for"),
        (Strategy(parity, lambda s, t: (t > 0, Count(s.count.float()))), "types and shapes that it had before"),
        (Strategy(parity, in_place), "step changed its arguments in place"),
        (Strategy(parity, random), "gave other authors the second time; take random numbers from tandemrl.selection"),
        (Strategy(parity, of_the_batch), "the authors of a row change with the rows beside it"),
        (Strategy(parity, lambda s, t: (TABLE[t], s)), "step failed on 4 rows: IndexError"),
        (Strategy(parity, step, writers="senior"), "writers='senior' promises its author alone"),
        (Strategy(parity, step, turn=lambda state: state.count > 0), "turn failed"),  # type: ignore[arg-type, return-value]
    ],
)
def test_a_strategy_that_breaks_its_contract_is_named(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        try_strategy(strategy, 100)


def of_the_step(step: int) -> Strategy:
    return bernoulli(float(step))


def at_five(step: int) -> Strategy:
    return bernoulli(0.5) if step != 5 else GOOD._replace(step=random)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda: bernoulli(0.5), "at step 1: TypeError: .*takes 0 positional arguments.* called with the step, from 1"),
        (lambda step: 0.5, "at step 1: returned 0.5, a float; expected a Strategy"),
        (of_the_step, r"of_the_step at step 3: ValueError: prob_senior must be in \[0, 1\], got 3"),
        (lambda step: None if step > 1 else bernoulli(0.5), "at step 3: returned None, a NoneType"),
        (annealed(bernoulli, linear(1.0, -0.5, steps=2)), "ValueError: prob_senior must be in"),
        (GOOD._replace(step=random), "^strategy: the same keys and tokens gave other authors"),
        (0.5, "at step 1: TypeError: 'float' object is not callable; it is called with the step, from 1"),
        (bernoulli, r"strategy=bernoulli makes strategies; call it, as .*, or pass its name, 'bernoulli'$"),
        ("wrod", r"selection\.strategy=wrod: must be one of .*; did you mean word\?"),
    ],
)
def test_strategies_that_cannot_work_are_refused_before_any_weight(
    strategy: Any, message: str, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "load_trained", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(ConfigError, match=message) as raised:
        train(config(tiny_pair, tmp_path), strategy=strategy, quiet=True)
    assert "\n" not in str(raised.value)


def test_the_strategy_of_the_last_step_is_tried_too() -> None:
    with pytest.raises(ConfigError, match=r"at_five at step 5: the same keys"):
        try_strategies(at_five, 5, 100)
