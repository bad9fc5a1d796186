"""Counterfactual handovers: exact zeros between equal models, pairing, places, and a planted place that is found."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from runs import evaluate_phase
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.apps.report.page import build_report, to_html
from tandemrl.config import EvalConfig, RewardConfig, RolloutConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import encode_prompts
from tandemrl.evals import EvalError, Sample, read_samples
from tandemrl.evals.handover import affected, effect, handover_effects, of_all_places, unit_of
from tandemrl.evals.protocol import Profile
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.factory import ModelSource, make_engine

PLAIN = "First 5 plus 3 is 8.\n\nNext 8 minus 2 is 6.\n\n\\boxed{6}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair") / "jargon"
    build_tiny_pair(folder, pair="jargon")
    return folder


@pytest.fixture(scope="module")
def effects(pair):
    """``handover_effects`` of texts, by the senior and a junior of the pair, under a grader of this test's."""
    tokenizer, [row, *_] = load_tokenizer(pair / "senior"), load_rows(["synthetic:jargon:heldout:4"])
    prompts, _ = encode_prompts([row], tokenizer, max_prompt_tokens=512)

    def found(text, grade, junior="junior", unit="step", branches=4, temperature=1.0, **further):
        source = ModelSource(str(pair / "senior"), lambda: load_model(str(pair / "senior")))
        other = ModelSource(str(pair / junior), lambda: load_model(str(pair / junior)))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        size = len(tokens)
        one = Sample(0, row.example_id, "s", "solo", 0, 99, text, tokens, size, f"S{size}", 1, 1.0, "stop")
        [done] = handover_effects(
            [one],
            prompts,
            unit_of(unit, tokenizer) if isinstance(unit, str) else unit,
            engine=make_engine(RolloutConfig(), source, other, tokenizer),
            tokenizer=tokenizer,
            profile=Profile(Sampling(max_tokens=size + 24, temperature=temperature)),
            branches=branches,
            grade=lambda some: [each._replace(score=grade(each)) for each in some],
            surprisals={0: np.arange(size, dtype=float)},
            **further,
        )
        return done.places, tokens, tokenizer

    return found


def tail(sample):
    """A reward that almost every difference in the tokens changes."""
    return float(sum(i * token for i, token in enumerate(sample.tokens)) % 97) / 97


def test_with_equal_models_every_effect_is_exactly_0(effects):
    for unit in ("step", "rest"):
        places, *_ = effects(PLAIN, tail, junior="senior", unit=unit)
        assert [place["effect"] for place in places] == [0, 0, 0]
        assert all(place["senior"] == place["junior"] for place in places)
        assert len({reward for place in places for reward in place["senior"]}) > 6  # which differ between branches
        assert all(place["low"] < 0 < place["high"] for place in places)
    other, *_ = effects(PLAIN, tail)
    assert any(place["senior"] != place["junior"] for place in other)
    assert [place["senior"] for place in other] == [place["senior"] for place in places]  # whoever the junior is


def test_a_branch_is_the_text_up_to_its_place_and_what_was_written_there(effects):
    seen = []
    places, tokens, tokenizer = effects(PLAIN, lambda one: seen.append(one) or 0.0, branches=2)
    begins = [0, *(len(tokenizer.encode(PLAIN[: PLAIN.index(word)])) for word in ("Next", "\\boxed"))]
    assert [place["at"] for place in places] == begins
    assert [place["surprisal"] for place in places] == [
        None,
        np.arange(begins[1]).mean(),
        np.arange(begins[1], begins[2]).mean(),
    ]
    assert len(seen) == 2 * 2 * 3
    for i, one in enumerate(seen):
        at = begins[i % 6 // 2]
        assert one.tokens[:at] == tokens[:at]
        assert len(one.tokens) <= len(tokens) + 24  # the limit is that of the whole text
        assert one.text == tokenizer.decode(one.tokens, skip_special_tokens=True)
        after = one.author.removeprefix(f"S{at}")
        assert ("J" in one.author) == (i >= 6)
        if i >= 6 and at:
            assert after.startswith("J")
            assert after.count("J") == 1
    [chosen], *_ = effects(PLAIN, tail, places={0: begins[1:2]})
    assert chosen == effects(PLAIN, tail)[0][1]  # the same branches, whatever else is asked


def test_words_are_halved(effects, pair):
    places, *_ = effects(PLAIN, tail, unit="word", branches=8)
    counts = [len(place["senior"]) for place in places]
    many = len(places)
    assert many > 10
    assert sorted(counts) == [2] * (many // 2) + [4] * ((many + 1) // 2 - (many + 3) // 4) + [8] * ((many + 3) // 4)
    first = [abs(np.mean(np.subtract(p["junior"], p["senior"])[:2])) for p in places]
    assert min(x for x, n in zip(first, counts, strict=True) if n > 2) >= max(
        x for x, n in zip(first, counts, strict=True) if n == 2
    )
    assert all(len(place["junior"]) == len(place["senior"]) for place in places)


def test_the_interval_is_students_over_the_pairs_and_one_of_each_sign():
    senior, junior = [1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1]
    padded = np.array([-1, 0, 0, -1, -1, 1, 1, -1])
    low, high = t.interval(0.95, 7, loc=padded.mean(), scale=padded.std(ddof=1) / np.sqrt(8))
    assert effect(senior, junior) == pytest.approx((-2 / 6, low, high))
    assert effect([0.0], [0.0]).mean == 0
    assert effect([3.0] * 9, [0.0] * 9)[:2] == (-3, -3)


def test_measures_are_of_all_places_and_say_what_pairing_saves():
    def place(value, surprisal, senior=(1.0, 0.0), junior=(1.0, 0.0)):
        ends = {"effect": value, "low": value - 0.1, "high": value + 0.1}
        return {"at": 0, **ends, "surprisal": surprisal, "senior": [*senior], "junior": [*junior]}

    def text(*places):
        return Sample(0, "a", "s", "solo", 0, 0, "", [1], 1, "S1", 1, 1.0, "eos", places=[*places])

    one = text(place(0.0, None), place(-0.5, 2.0), place(-1.0, 5.0), place(0.05, 1.0))
    rates, counts = affected([one, text()])
    assert rates == pytest.approx({"effect": -1.45 / 4, "worst_effect": -1.0, "harmful_places": 0.5})
    assert counts == {"texts": 2, "places": 4, "dropped": 1, "branches": 16}
    assert of_all_places([one]) == {"paired_variance": 0, "surprisal_correlation": pytest.approx(1.0)}
    apart = text(place(0, 0, (1, 0, 1, 0), (1, 1, 0, 0)))  # independent
    assert of_all_places([apart]) == {"paired_variance": pytest.approx(1.0)}


def test_the_phase_stores_places_and_the_report_shows_them(pair, tmp_path):
    settings = {
        "model": str(pair / "senior"),
        "junior": str(pair / "junior"),
        "data": ["synthetic:jargon:heldout:2"],
        "eval": EvalConfig(samples=1, k=(1,), bootstrap=10, branches=2),
        "reward": RewardConfig(workers=1),
        "out": tmp_path / "eval",
    }
    result = evaluate_phase("handover-effect", **settings)
    assert (result["config"]["branches"], result["config"]["handover"]) == (2, "step")
    assert "branches" not in result["config"]["eval"]  # solo texts do not depend on them
    assert result["metrics"]["macro"]["places"] >= 4
    samples = read_samples(tmp_path / "eval" / "handover-effect.samples.jsonl")
    assert all(one.places[0]["at"] == 0 and one.places[0]["surprisal"] is None for one in samples)
    assert all(place["surprisal"] > 0 for one in samples for place in one.places[1:])
    assert evaluate_phase("handover-effect", **settings) == result
    with pytest.raises(EvalError, match="branches: 2 there, 3 now"):
        evaluate_phase(
            "handover-effect", **settings | {"eval": EvalConfig(samples=1, k=(1,), bootstrap=10, branches=3)}
        )
    page = to_html(build_report(tmp_path / "eval"))
    assert page.count('class="heat"') == sum(2 * len(one.places[1:]) for one in samples)
    assert f"before the first: {samples[0].places[0]['effect']:+.2f}" in page


@pytest.mark.slow
def test_a_planted_place_is_found(pair):
    """The script's measure, for one seed and few problems: the junior cannot go on where a number is in jargon only."""
    file = Path(__file__).parents[2] / "benchmarks" / "handover_effect.py"
    spec = importlib.util.spec_from_file_location("planted", file)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.auroc([2, 3], [1, 2]) == 0.875
    figures = script.measure(pair, seed=0, problems=4, branches=6)
    print(json.dumps(figures))
    assert figures["effect AUROC against plain"] >= 0.9
