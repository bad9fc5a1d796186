"""Which scorer a data source gets: the table of names, suffixes, a user's own, and compatibility."""

from dataclasses import replace

import pytest

from scored import score_text
from tandemrl.config import ConfigError, RewardConfig, load
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.protocol import GraderError
from tandemrl.rewards.routing import SCORERS, RowKind, check_rewards, reward_names, terms_of


def row(source, gold="7"):
    return Row("r", ({"role": "user", "content": "?"},), source, gold, {})


def name_of(source, **options):
    (term,) = terms_of(row(source), RewardConfig(**options))
    assert term.name in SCORERS
    return term.name


def test_the_first_that_matches_decides_and_capitals_count():
    """Suffixes before the table, in which some names are written in two ways."""
    wanted = {
        **{"openai/gsm8k": "gsm8k", "gsm8k_tinyv": "judge", "polaris_mathverify": "math", "numina_x_prime": "prime"},
        **{"MATH": "prime", "math": "boxed", "lighteval/MATH": "boxed", " Grade ": "grade", "HardVerify-Math": "judge"},
        **{"synthetic/plain": "boxed", "synthetic/word_problems:2": "gsm8k", "synthetic/hops:3": "musique"},
        **{"openai/openai_humaneval": "code", "Jiayi-Pan/Countdown-Tasks-3to4": "countdown", "math_dapo_x": "dapo"},
    }
    assert {source: name_of(source) for source in wanted} == wanted


def test_compat_verl_routes_as_verl_does():
    verl = {
        "openai/gsm8k": "gsm8k",
        "lighteval/MATH": "hendrycks",
        "DigitalLearningGmbH/MATH-lighteval": "hendrycks",
        "HuggingFaceH4/MATH-500": "hendrycks",
        "math": "dapo",
        "aime2024": "dapo",
        "math_dapo": "dapo",
        "numina_cn_k12": "prime",
        "taco": "code",
    }
    assert {source: name_of(source, compat="verl") for source in verl} == verl


def test_a_users_choice_comes_first_and_capitals_count():
    scorers = {"math500": "hendrycks", "My*": "prime", "*_tinyv": "boxed"}
    assert name_of("math500", scorers=scorers) == "hendrycks"
    assert name_of("MATH500", scorers=scorers) == "hendrycks"
    assert name_of("MyData", scorers=scorers) == "prime"
    assert name_of("x_tinyv", scorers=scorers) == "boxed"
    with pytest.raises(DataError, match="no scorer"):
        name_of("mydata", scorers=scorers)


def test_a_fallback_scores_what_nothing_else_knows():
    assert name_of("bird songs", fallback="prime") == "prime"
    assert name_of("math500", fallback="prime") == "boxed"
    assert name_of("birds_tinyv", fallback="prime") == "judge"
    assert name_of("bird songs", fallback="prime", scorers={"bird*": "gsm8k"}) == "gsm8k"
    assert name_of("math", fallback="prime", compat="verl") == "dapo"
    assert score_text(row("bird songs"), r"\boxed{7}", RewardConfig(fallback="prime")).value == 1.0
    with pytest.raises(DataError, match=r"bird songs.*reward\.fallback=prime"):
        name_of("bird songs")
    with pytest.raises(GraderError, match=r"reward\.fallback: 'pirme' is neither"):
        check_rewards([RowKind("math500")], RewardConfig(fallback="pirme"))
    assert reward_names(RewardConfig(fallback="my.module:f + prime", scorers={"a": "prime"})) == [
        "prime",
        "my.module:f",
    ]


# ---- rewards of no use -----------------------------------------------------------------------------------------------

SOURCES = [RowKind("synthetic/plain", "math"), RowKind("openai/gsm8k", "math")]


@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        (
            {"synthetic": "boxed"},
            r"scorers\.synthetic=boxed: no row matches.*gsm8k, synthetic/plain; did you mean synth",
        ),
        ({"Synthetic/*": "boxed"}, "no row matches"),  # a capital letter: matched as written
        ({"openai/gsm8k": "gsm8k", "my/*": "boxed"}, r"reward\.scorers\.my/\*=boxed"),
        ({"*": "boxed", "openai/gsm8k": "gsm8k"}, r"openai/gsm8k=gsm8k: no row matches it first"),
        ({"ability:maths": "boxed"}, r"ability:maths=boxed: .* the abilities are math; did you mean math\?"),
        ({"ability:mat*": "boxed", "ability:math": "prime"}, "ability:math=prime: no row matches it first"),
        ({"synthetic/*": "boxed", "*": "boxed", "ability:math": "prime"}, "no row matches it first"),
    ],
)
def test_a_pattern_that_is_never_used_is_refused(scorers, message):
    with pytest.raises(ConfigError, match=message):
        check_rewards(SOURCES, RewardConfig(scorers=scorers))


def test_an_ability_chooses_the_scorer_by_the_same_rules():
    scorers = {"ability:code": "integer", "ability:Math*": "prime", "ability:math": "hendrycks"}

    def name_of_kind(source, ability):
        (term,) = terms_of(replace(row(source), ability=ability), RewardConfig(scorers=scorers))
        return term.name

    assert name_of_kind("synthetic/plain", "math") == "hendrycks"
    assert name_of_kind("synthetic/plain", "Math/algebra") == "prime"
    assert name_of_kind("synthetic/plain", "MATH") == "hendrycks"
    assert name_of_kind("synthetic/plain", "") == "boxed"
    assert name_of_kind("code", "code") == "integer"
    config = load(overrides=["reward.scorers.ability:math=prime", "reward.scorers.my/data=boxed"])
    assert config.reward.scorers == {"ability:math": "prime", "my/data": "boxed"}


def test_weights_and_functions_of_no_use_are_refused():
    def brevity(row, text):
        return 0.0

    with pytest.raises(ConfigError, match=r"reward\.weights\.boxde: no reward of that name; did you mean boxed\?"):
        check_rewards(SOURCES, RewardConfig(weights={"boxde": 2.0}, scorers={"synthetic/*": "boxed"}))
    with pytest.raises(ConfigError, match="reward brevity: scores no row"):
        check_rewards(SOURCES, RewardConfig(scorers={"*": "boxed"}), {"brevity": brevity})
    for name in ("boxed", "acc", "mean", "two words"):
        with pytest.raises(GraderError, match=f"reward '{name}' is"):
            check_rewards(SOURCES, RewardConfig(), {name: brevity})


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("boxed + boxed", "two rewards are called boxed"),
        ("math:sqrt + cmath:sqrt", "two rewards are called sqrt"),
        ("boxed +", "'' is neither"),
    ],
)
def test_a_sum_that_does_not_add_up_is_refused(rewards, message):
    with pytest.raises(GraderError, match=message):
        terms_of(row("x"), RewardConfig(scorers={"x": rewards}))


def test_a_reward_that_is_weighed_may_not_take_the_place_of_a_part():
    for name in ("acc", "mean", "length"):
        with pytest.raises(GraderError, match=f"my:{name}: {name} is a metric or a part of every score"):
            terms_of(row("x"), RewardConfig(scorers={"x": f"my:{name}"}, weights={name: 2.0}))
