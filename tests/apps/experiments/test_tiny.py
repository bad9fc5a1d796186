import itertools
import json
import math
import re
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tandemrl.apps.experiments import tiny
from tandemrl.apps.experiments.agents import lessons
from tandemrl.apps.experiments.tiny import PairError, build_tiny_pair, build_tiny_readers, train_tokenizer
from tandemrl.apps.experiments.warm_start import Muon, WarmStart
from tandemrl.data.rows import DataError
from tandemrl.tasks.generated.synthetic import PAIRS, examples

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def few_problems():
    """A barely trained pair is measured on few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.WARM_STARTS, "plain", {"base": WarmStart(eval_rows=4)})
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A barely trained pair, with what its progress callback was told."""
    out = tmp_path_factory.mktemp("tiny") / "pair"
    seen = []
    manifest = build_tiny_pair(out, steps=STEPS, progress=lambda *event: seen.append(event))
    return out, manifest, seen


@pytest.fixture(scope="module")
def tokenizer(built):
    return AutoTokenizer.from_pretrained(built[0] / "senior")


def test_two_builds_are_equal_and_leave_global_state_alone(built, tmp_path):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = build_tiny_pair(tmp_path / "pair", steps=STEPS)
    assert again == built[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_warm_start_learns(built):
    _, manifest, seen = built
    assert [(done, steps) for done, steps, _ in seen] == [(i, STEPS) for i in range(1, STEPS + 1)]
    assert seen[0][2] == pytest.approx(math.log(manifest["vocab_size"]), rel=0.1)  # uniform at first
    assert seen[-1][2] < seen[0][2] - 1.0
    assert manifest["base"]["warm_start/loss"] == seen[-1][2]


def test_a_pair_that_differs_is_built_anew(built, tmp_path):
    out = tmp_path / "pair"
    shutil.copytree(built[0], out)
    second = build_tiny_pair(out, steps=2)
    assert json.loads((out / "manifest.json").read_text()) == second
    assert second["sha256"] != built[1]["sha256"]


def test_refuses_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="choose another folder"):
        build_tiny_pair(tmp_path, steps=1)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("pair", PAIRS)
def test_every_word_of_a_pair_is_one_token(pair):
    """Of both stages, whatever comes before it; so that a jargon solution is as long as a plain one."""
    tokenizer = train_tokenizer(pair, 0, vocab_size=tiny.WARM_STARTS[pair]["base"].vocab_size)
    for stage in ("base", "senior") if PAIRS[pair].senior else ("base",):
        texts = [text for _, text in itertools.islice(examples(pair, 1, stage=stage), 300)]
        words = {word for text in texts for word in re.findall(r"(?<!\\)\b ?[A-Za-z]+\b", text)}
        assert len(words) >= 9
        assert {word for word in words if len(tokenizer(word)["input_ids"]) != 1} == set()
        assert max(map(len, tokenizer(texts)["input_ids"])) + 1 <= 62  # of 64


@pytest.mark.parametrize("text", ["Tom has 5 nuts", "naïve 語 🙂\t x\r\n", "a  b\n\n\n c", "\\frac{1}{2} <|im_end|>"])
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_tokens_end_a_step_and_keep_digits_apart(tokenizer):
    assert tokenizer.tokenize("First 15 plus 5 is 20.\n\nNext 20") == [
        *("First", "Ġ", "1", "5", "Ġplus", "Ġ", "5", "Ġis", "Ġ", "2", "0", ".ĊĊ"),
        *("Next", "Ġ", "2", "0"),
    ]
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and len(token) > 1]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_agents_learn_their_episodes_and_a_junior_of_its_own_fewer(tmp_path, monkeypatch):
    """With a loss that weighs what the world says by a tenth: held against a plain computation."""
    recipe = WarmStart(steps=3, batch_size=4, eval_rows=4)
    monkeypatch.setitem(tiny.WARM_STARTS, "hops", {"base": recipe, "junior": replace(recipe, steps=2)})
    seen = []
    manifest = build_tiny_pair(tmp_path / "pair", pair="hops", progress=lambda *event: seen.append(event))
    assert [event[:2] for event in seen] == [(i, 5) for i in range(1, 6)]
    assert seen[3][2] == pytest.approx(seen[0][2])  # the junior begins anew: as the base did, on the same episodes
    assert manifest["sha256"]["senior"] != manifest["sha256"]["junior"]
    assert set(manifest["base"]) == {"solo/pass@1", "junior/solo/pass@1", "eval_rows", "warm_start/loss"}
    assert manifest["recipe"]["junior"]["steps"] == 2

    tokenizer = train_tokenizer("hops", 0, vocab_size=1)
    model = tiny.new_model(tokenizer, 0)
    total = weight = 0.0
    for lesson in itertools.islice(lessons(tokenizer, "hops", 0), 4):
        with torch.no_grad():
            logprobs = model(torch.tensor([lesson.tokens])).logits[0].log_softmax(-1)
        for place in range(1, len(lesson.tokens)):
            total -= lesson.weights[place] * logprobs[place - 1, lesson.tokens[place]].item()
            weight += lesson.weights[place]
    assert seen[0][2] == pytest.approx(total / weight, rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ criteria


@pytest.fixture
def measured(monkeypatch):
    """A jargon pair of two steps a stage, whose senior is as good after each round as a test says."""
    recipe = WarmStart(steps=2, batch_size=2, vocab_size=480, eval_rows=4)
    monkeypatch.setitem(tiny.WARM_STARTS, "jargon", {"base": recipe, "senior": recipe})
    monkeypatch.setitem(tiny.CRITERIA, "jargon", {"jargon/pass@1": (0.88, 1.0)})

    def skills(*values: float) -> None:
        found = iter(values)
        monkeypatch.setattr(tiny, "_skill", lambda *args: {"jargon/pass@1": next(found)})

    return skills


def test_the_senior_is_trained_until_its_criteria_hold(measured, tmp_path):
    seen = []
    measured(0.88)
    once = build_tiny_pair(tmp_path / "once", pair="jargon")
    measured(0.87, 0.9)
    twice = build_tiny_pair(tmp_path / "twice", pair="jargon", progress=lambda *event: seen.append(event[:2]))
    assert [[each["jargon/pass@1"] for each in built["rounds"]] for built in (once, twice)] == [[0.88], [0.87, 0.9]]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4), (5, 6), (6, 6)]
    assert once["sha256"]["junior"] == twice["sha256"]["junior"]
    assert once["sha256"]["senior"] != twice["sha256"]["senior"]
    assert twice["criteria"] == {"jargon/pass@1": [0.88, 1.0]}
    assert twice["unmet"] == []


def test_a_pair_that_never_meets_its_criteria_is_refused_and_stays_so(measured, tmp_path, monkeypatch):
    measured(0.5, 0.6, 0.875)
    refused = r"refused after 3 rounds: jargon/pass@1 0\.875; unmet: 0\.88 <= jargon/pass@1 <= 1\. Use another seed"
    with pytest.raises(PairError, match=refused):
        build_tiny_pair(tmp_path / "pair", pair="jargon")
    with pytest.raises(PairError, match=refused):
        build_tiny_pair(tmp_path / "pair", pair="jargon", progress=pytest.fail)
    monkeypatch.setitem(tiny.CRITERIA, "jargon", {"jargon/pass@1": (0.8, 1.0)})
    measured(0.81)
    assert len(build_tiny_pair(tmp_path / "pair", pair="jargon")["rounds"]) == 1  # other criteria: another pair


def test_muon_moves_a_matrix_by_its_orthogonal_momentum():
    """Two steps, held against the update rule in plain NumPy, with weight decay."""
    weight = torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    expected, average = weight.detach().double().numpy().copy(), 0.0
    optimizer = Muon([weight], lr=0.1, weight_decay=0.5)
    for step in range(2):
        gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(2 + step))
        weight.grad = gradient
        optimizer.step()
        average = 0.95 * average + 0.05 * gradient.double().numpy()
        x = 0.05 * gradient.double().numpy() + 0.95 * average
        x /= (x**2).sum() ** 0.5
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * 0.2 * 6**0.5 * x
    assert weight.detach().numpy() == pytest.approx(expected, abs=1e-5)


# ------------------------------------------------------------------------------------------------------------ packaged


def test_packing_and_unpacking_keeps_every_weight(built, tmp_path, monkeypatch):
    out, manifest, _ = built
    monkeypatch.setattr("tandemrl.apps.experiments.pair.PACKAGED", tmp_path)
    runpy.run_path(str(Path(__file__).parents[3] / ".ci" / "pack_pair.py"))["pack"](out, tmp_path)
    monkeypatch.setattr(tiny, "warm_start", lambda *args, **more: pytest.fail("trained"))
    assert build_tiny_pair(tmp_path / "pair", steps=STEPS) == manifest
    for name in ("senior", "junior"):
        assert (tmp_path / "pair" / name / "tokenizer.json").read_text() == (out / name / "tokenizer.json").read_text()
    with pytest.raises(pytest.fail.Exception, match="trained"):
        build_tiny_pair(tmp_path / "other", seed=1, steps=STEPS)


def test_readers_differ_in_size_seed_and_tokenizer_and_finished_ones_are_kept(tmp_path):
    seen = []
    folders = build_tiny_readers(
        tmp_path / "readers", pair="jargon", count=2, steps=2, progress=lambda *event: seen.append(event)
    )
    assert [folder.name for folder in folders] == ["reader-1", "reader-2"]
    assert [event[:2] for event in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    shapes = [AutoConfig.from_pretrained(folder) for folder in folders]
    assert [(each.hidden_size, each.num_hidden_layers) for each in shapes] == [(64, 2), (96, 3)]
    sizes = [len(AutoTokenizer.from_pretrained(folder)) for folder in folders]
    assert sizes[0] <= 290 < sizes[1] <= 480
    assert "Blorp" not in "".join(AutoTokenizer.from_pretrained(folders[1]).get_vocab())
    build_tiny_readers(tmp_path / "readers", pair="jargon", count=2, steps=2, progress=lambda *event: 1 / 0)
    with pytest.raises(DataError, match="no readers for hops"):
        build_tiny_readers(tmp_path / "readers", pair="hops", count=1)
