"""Whole evaluation phases on tiny Qwen3 models: files, resumption, what a reader makes of the texts."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fake_judge import FakeJudge
from helpers import (
    EOS,
    IDS,
    VOCABULARY,
    noisy,
    prepared,
    qwen3,
    raced_token,
    reference_distribution,
    reference_logits,
    sampling_key,
    small_qwen3,
    text,
    with_head_bias,
)
from helpers import prompts as some_prompts
from helpers import tokenizer as tokenizer_of_letters
from runs import evaluate_phase, evaluate_with
from tandemrl import evals
from tandemrl.apps.experiments.tiny import new_model, train_tokenizer
from tandemrl.config import (
    Config,
    ConfigError,
    EvalConfig,
    JudgeConfig,
    ModelConfig,
    RewardConfig,
    SelectionConfig,
)
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError, Prompt, Row, encode_prompts
from tandemrl.evals import EvalError, Sample, files, measures, protocol, reading, session, suite
from tandemrl.evals.protocol import Profile
from tandemrl.models.loading import prepare
from tandemrl.models.sampling import DRAW
from tandemrl.rewards.protocol import GraderError
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection.draws import request_key
from tandemrl.tasks.rubric.judge import JudgeError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("plain", 0, vocab_size=320, texts=200)


@pytest.fixture(scope="module")
def pair(tokenizer, tmp_path_factory):
    """Untrained models: senior and junior have different random weights."""
    folder = tmp_path_factory.mktemp("pair")
    for seed, name in enumerate(("senior", "junior")):
        new_model(tokenizer, seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def phase(pair, tmp_path):
    """``evaluate_phase`` on three problems with two samples of at most ten tokens each."""
    return partial(
        evaluate_phase,
        model=str(pair / "senior"),
        junior=str(pair / "junior"),
        data=["synthetic:plain:heldout:4"],
        eval=EvalConfig(profile="custom", max_tokens=10, samples=2, k=(1, 2), bootstrap=20),
        reward=RewardConfig(workers=1),
        out=tmp_path / "eval",
        limit=3,
    )


def test_what_grades_nothing_needs_no_ground_truths(phase, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"data_source": "mine", "prompt": "How many?"}\n')
    unscored = {name: phase(name, data=[str(file)])["metrics"]["macro"] for name in ("legibility", "drift")}
    assert [metrics["samples"] for metrics in unscored.values()] == [2, 2]
    for name in ("pass-at-k", "tandem", "junior"):
        with pytest.raises(DataError, match=r"rows\.jsonl, line 1, field 'ground_truth'"):
            phase(name, data=[str(file)])


def test_with_equal_weights_handing_over_changes_no_text(phase, pair, tmp_path):
    """The same keys in every phase and arm: a junior that is the senior writes what the senior would have written."""
    texts = {}
    for name in ("pass-at-k", "tandem", "handoff"):
        phase(name, junior=str(pair / "senior"))
        samples = evals.read_samples(tmp_path / "eval" / f"{name}.samples.jsonl")
        texts |= {(name, arm): [s.tokens for s in samples if s.arm == arm] for arm in {s.arm for s in samples}}
    assert len(texts) == 4
    assert all(tokens == texts["pass-at-k", "solo"] for tokens in texts.values())


def test_another_configuration_is_refused_by_name(phase, pair, tmp_path):
    out = tmp_path / "one.json"
    phase("tandem", out=out)
    with pytest.raises(EvalError, match=r"prob_senior: 0\.5 there, 0\.25 now"):
        phase("tandem", out=out, selection=SelectionConfig(prob_senior=0.25))
    with pytest.raises(EvalError, match=r"eval\.seed: 17 there, 18 now"):
        phase("tandem", out=out, eval=EvalConfig(profile="custom", max_tokens=10, samples=2, k=(1, 2), seed=18))
    with pytest.raises(EvalError, match="holds the phase tandem"):
        phase("handoff", out=out)
    shutil.copytree(pair, tmp_path / "pair")
    phase("pass-at-k", model=str(tmp_path / "pair" / "senior"))
    shutil.copytree(pair / "junior", tmp_path / "pair" / "senior", dirs_exist_ok=True)
    with pytest.raises(EvalError, match="digests"):
        phase("pass-at-k", model=str(tmp_path / "pair" / "senior"))
    out.write_text("{")
    with pytest.raises(EvalError, match="not readable"):
        phase("tandem", out=out)


def test_rewards_of_no_use_are_refused_before_anything_is_written(phase, tmp_path, monkeypatch):
    def generate(*arguments):
        raise AssertionError("texts were written")

    monkeypatch.setattr(suite, "_write", generate)
    typo = RewardConfig(scorers={"synthetic": "boxed"})
    with pytest.raises(ConfigError, match=r"reward\.scorers\.synthetic=boxed: no row matches.* synthetic/plain"):
        phase("pass-at-k", reward=typo)
    with pytest.raises(ConfigError, match=r"reward\.scorers\.synthetic"):
        phase("pass-at-k", reward=typo, stated={"reward.scorers.synthetic"})
    with pytest.raises(GraderError, match="no_such_module"):
        phase("pass-at-k", reward=RewardConfig(scorers={"synthetic/*": "no_such_module:score"}))
    with pytest.warns(UserWarning, match="no row matches"), pytest.raises(AssertionError, match="were written"):
        phase("pass-at-k", reward=typo, stated=())  # of a config for other data


def test_non_finite_numbers_are_refused(tmp_path):
    result = evals.EvalResult({"macro": {"score": math.nan}, "by_set": {}}, [])
    with pytest.raises(EvalError, match="not finite"):
        files.write_result(tmp_path / "tandem.json", "tandem", {}, result, seeds={})
    assert list(tmp_path.iterdir()) == []


def test_a_junior_is_required_and_must_share_the_vocabulary(phase, tmp_path):
    with pytest.raises(EvalError, match="needs a junior"):
        phase("tandem", junior=None)
    with pytest.raises(EvalError, match="unknown phase"):
        phase("solo")
    other = train_tokenizer("plain", 1, vocab_size=300, texts=50)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(EvalError, match="needs one vocabulary"):
        phase("drift", junior=str(tmp_path / "other"))


# ----------------------------------------------------------------------------------------------------------- legibility


def texts_for(prompts, lengths, vocabulary):
    """Random texts; those of even problems end in EOS (id 2)."""
    rng = np.random.default_rng(0)
    samples = []
    for problem, (item, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens = rng.integers(3, vocabulary, size=length).tolist()
        ended = problem % 2 == 0
        tokens = [*tokens[:-1], 2] if ended else tokens
        row, how = item.row, "eos" if ended else "length"
        written = ("", tokens, length, f"S{length}", 1, 1.0, how)
        samples.append(Sample(problem, row.example_id, row.data_source, "solo", 0, problem, *written))
    return samples


@pytest.mark.parametrize("limit", ["max_position_embeddings", "sliding_window"])
def test_texts_over_what_the_junior_sees_are_dropped_and_counted(tokenizer, limit):
    """As are those of nothing but EOS."""
    prompts, _ = encode_prompts(load_rows(["synthetic:plain:heldout:5"]), tokenizer, max_prompt_tokens=200)
    junior = new_model(tokenizer, 0)
    longest = len(prompts[1].tokens)
    samples = texts_for(prompts, [5, 21, 5, 2, 1], vocabulary=len(tokenizer))
    if limit == "sliding_window":
        shape = junior.config.to_dict() | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
        junior = Qwen3ForCausalLM(Qwen3Config(**shape | {"sliding_window": longest + 21}))
    setattr(junior.config, limit, longest + 21)
    fits = reading.read_texts(samples, prompts, [prepare(junior)], reading.by_junior())
    assert fits[1].cross_entropy is not None
    setattr(junior.config, limit, longest + 20)
    read = reading.read_texts(samples, prompts, [junior], reading.by_junior())
    assert [i for i, sample in enumerate(read) if sample.cross_entropy is None] == [1, 4]
    macro = evals.summarise(read, measures.legible, bootstrap=10, seed=0)["macro"]
    assert (macro["samples"], macro["dropped"], macro["problems"]) == (5, 2, 5)
    kept = [sample.cross_entropy for sample in read if sample.cross_entropy is not None]
    assert macro["cross_entropy"] == pytest.approx(sum(kept) / 3)
    with pytest.raises(EvalError, match="none of its 5 problems"):
        evals.summarise(samples, measures.legible, bootstrap=10, seed=0)


PROMPTS = [Prompt(Row(f"p/{i}", (), "p", "", {}), ids) for i, ids in enumerate(some_prompts(4))]


def written(senior, sampling):
    engine = TorchEngine(prepared(senior), None, tokenizer_of_letters())
    arms, profile = protocol.strategies("legibility", tokenizer_of_letters()), Profile(sampling)
    return evals.generate_samples(
        arms, engine=engine, tokenizer=tokenizer_of_letters(), prompts=PROMPTS, profile=profile, samples=2, seed=3
    )


def by_hand(junior, sample, sampling, vocabulary=None):
    """One draw at a time, from the full logits of an untouched model and the published generator."""
    text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
    prompt = PROMPTS[sample.problem].tokens
    same = []
    for i, logits in enumerate(reference_logits(junior, prompt, text)[:, :vocabulary]):
        if sampling.temperature == 0:
            token = int(np.argmax(logits))
        else:
            token = raced_token(reference_distribution(logits, sampling, (), ()), sampling_key(sample.key, i))
        same.append(token == text[i])
    return float(np.mean(same)) if same else None


@pytest.mark.parametrize(
    ("settings", "vocabulary"),
    [
        ({}, None),
        ({}, VOCABULARY - 40),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, None),
        ({"temperature": 1.3, "min_p": 0.1}, None),
        ({"temperature": 0.0}, None),
    ],
)
def test_acceptance_is_the_share_of_draws_that_the_junior_makes_too(settings, vocabulary, monkeypatch):
    monkeypatch.setattr(reading, "LOGITS_PER_CHUNK", 2 * 7 * VOCABULARY)
    sampling = Sampling(max_tokens=24, **settings)
    senior, junior = qwen3(0), noisy(qwen3(0), 0.02)
    samples = written(senior, sampling)
    read = reading.read_texts(samples, PROMPTS, [prepared(junior)], reading.by_junior(sampling, vocabulary))
    wanted = [by_hand(junior, sample, sampling, vocabulary) for sample in samples]
    assert [sample.acceptance for sample in read] == wanted
    assert 0 < np.mean(wanted) < 1
    without = reading.read_texts(samples, PROMPTS, [prepared(junior)], reading.by_junior())
    assert [sample.cross_entropy for sample in without] == [sample.cross_entropy for sample in read]
    assert all(sample.acceptance is None for sample in without)


def test_a_junior_that_is_the_senior_accepts_all(phase, pair, tmp_path):
    written = phase("pass-at-k")
    copy = phase("legibility", junior=str(pair / "senior"), out=tmp_path / "copy")["metrics"]
    assert copy["macro"]["acceptance"] == copy["macro"]["acceptance/high"] == 1.0
    assert copy["by_set"]["synthetic/plain"]["acceptance"] == 1.0
    drawn = phase("legibility", out=tmp_path / "drawn")
    assert 0 < drawn["metrics"]["macro"]["acceptance"] < 1
    del written["config"]["draw"]  # as before there was a name for how tokens are drawn
    (tmp_path / "eval" / "pass-at-k.json").write_text(json.dumps(written))
    assert phase("legibility") == drawn  # of texts that were written anew
    with pytest.raises(EvalError, match=rf"draw: None there, {DRAW} now"):
        phase("pass-at-k")


# ------------------------------------------------------------------------------------------------- all phases at once


@pytest.fixture
def everything(pair, tmp_path, monkeypatch):
    """``evaluate_with`` on three problems; its files do not depend on the state of this checkout."""
    monkeypatch.setattr(files, "versions", lambda: {"git_revision": "here"})
    return partial(
        evaluate_with,
        model=str(pair / "senior"),
        junior=str(pair / "junior"),
        data=["synthetic:plain:heldout:4"],
        eval=EvalConfig(profile="custom", max_tokens=10, samples=2, k=(1, 2), bootstrap=20),
        reward=RewardConfig(workers=1),
        limit=3,
    )


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


SOLO_AND_PAIR = ("pass-at-k", "tandem", "handoff", "legibility", "drift", "junior")


def test_all_phases_write_what_each_writes_alone_and_load_everything_once(everything, phase, tmp_path, monkeypatch):
    loaded = []
    load = session.load_model
    with monkeypatch.context() as patch:
        patch.setattr(session, "load_model", lambda path, **options: loaded.append(path) or load(path, **options))
        results = everything(out=tmp_path / "all")
    assert tuple(results) == SOLO_AND_PAIR
    assert len(loaded) == len(set(loaded)) == 2
    for name in SOLO_AND_PAIR:
        assert phase(name, out=tmp_path / "alone" / name) == results[name]
        written = contents(tmp_path / "alone" / name)
        if name not in ("legibility", "drift"):  # alone, these write the solo texts and do not grade them
            assert written == {file: contents(tmp_path / "all")[file] for file in written}

    def fail(*args, **kwargs):
        raise AssertionError("loaded again")

    for name in ("load_model", "load_rows"):
        monkeypatch.setattr(session, name, fail)
    assert everything(out=tmp_path / "all") == results


class Killed(BaseException):
    """Nothing in the library catches this."""


def test_a_killed_run_ends_with_the_files_of_an_uninterrupted_one(everything, tmp_path):
    """Killed at the first or at the last word of a phase: nothing of it is there, and all of those before."""
    everything(out=tmp_path / "whole")
    for at, end in (("handoff: tokens", False), ("drift: texts", True)):

        def kill(what, done, total, at=at, end=end):
            if what == at and (done == total or not end):
                raise Killed

        out = tmp_path / f"killed in {at[:5]}"
        with pytest.raises(Killed):
            everything(out=out, progress=kill)
        finished = SOLO_AND_PAIR[: SOLO_AND_PAIR.index(at.partition(":")[0])]
        assert {file.name.partition(".")[0] for file in out.glob("*")} == set(finished)
        everything(out=out)
        assert contents(out) == contents(tmp_path / "whole")


def test_the_junior_alone_is_what_an_evaluation_of_it_says(phase, pair, tmp_path):
    """Its texts and pass@k are those of the junior as the model, and it reads them as legibility does."""
    alone = phase("junior")["metrics"]["macro"]
    texts = evals.read_samples(tmp_path / "eval" / "junior.samples.jsonl")
    (tmp_path / "eval").rename(tmp_path / "first")
    of_it = {name: phase(name, model=str(pair / "junior"))["metrics"]["macro"] for name in ("pass-at-k", "legibility")}
    wanted = evals.read_samples(tmp_path / "eval" / "pass-at-k.samples.jsonl")
    assert [each.tokens for each in texts] == [each.tokens for each in wanted]
    assert {each.author[:1] for each in texts if each.length} == {"J"}
    assert {name: alone[name] for name in ("pass@1", "pass@2", "length")} == {
        name: of_it["pass-at-k"][name] for name in ("pass@1", "pass@2", "length")
    }
    assert alone["cross_entropy"] == pytest.approx(of_it["legibility"]["cross_entropy"])
    assert alone["senior_share"] == 0


def test_without_a_junior_only_the_solo_phases_are_run(everything, tmp_path):
    assert list(everything(out=tmp_path / "out", junior=None)) == ["pass-at-k"]
    left = evals.left_out(Config())
    assert list(left) == [name for name in evals.PHASES if name not in ("pass-at-k", "intervene", "entropy")]
    readers = EvalConfig(readers=("R",))
    pair_and_judge = Config(model=ModelConfig(junior="J"), judge=JudgeConfig(url="U"), eval=readers)
    assert evals.left_out(pair_and_judge) == {"judge-legibility": "needs judge.prompt=legibility"}
    served = evals.left_out(replace(pair_and_judge, eval=EvalConfig(readers=("R@http://127.0.0.1:1/v1",))))
    assert list(served) == ["judge-legibility", "surprise", "checkable", "monitor"]
    assert served["monitor"].startswith(
        "needs log-probs, which the endpoint of reader R@http://127.0.0.1:1/v1 does not"
    )
    assert list(evals.left_out(replace(pair_and_judge, judge=JudgeConfig(url="U", prompt="tinyv")))) == [
        "verified",
        "judge-legibility",
    ]
    with FakeJudge(lambda prompt, number: "Total Score: 5/10") as fake:
        judge = JudgeConfig(url=fake.url, prompt="reasoning")
        assert list(everything(out=tmp_path / "judged", junior=None, judge=judge)) == ["pass-at-k", "verified"]
    with pytest.raises(EvalError, match=r"one\.json is one file for 6 phases"):
        everything(out=tmp_path / "one.json")


# -------------------------------------------------------------------------------------------------------------- handoff


def handoff_by_hand(models, prompt, key, senior_writes, max_tokens):
    """The published protocol as a loop: one token at a time, a full forward of the author's model alone, and the turn
    ends where the text of the response has just got a blank line. Returns tokens and authors."""
    tokens, authors = [], []
    while len(tokens) < max_tokens and IDS[EOS] not in tokens:
        with torch.no_grad():
            logits = models[senior_writes](input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
        token = raced_token(logits.softmax(-1).numpy(), sampling_key(key, len(tokens)))
        before, after = text(tokens), text([*tokens, token])
        tokens.append(token)
        authors.append(int(senior_writes))
        new_pairs = {i for i in range(len(after)) if after[i : i + 2] == "\n\n" and i + 2 > len(before)}
        senior_writes ^= bool(new_pairs)
    return tokens, authors


def test_handoff_is_the_protocol_token_by_token():
    senior, junior = qwen3(0), small_qwen3(1)
    for model in (senior, junior):  # blank lines are rare in random text; with a bias they are common
        with_head_bias(model).lm_head.bias.data[[IDS["Ċ"], IDS["ĊĊ"], IDS[".Ċ"]]] += 7.0
    prompts = [Prompt(Row(f"p/{i}", (), "p", "", {}), ids) for i, ids in enumerate(some_prompts(4))]
    written = evals.generate_samples(
        protocol.strategies("handoff", tokenizer_of_letters()),
        engine=TorchEngine(prepared(senior), prepared(junior), tokenizer_of_letters()),
        tokenizer=tokenizer_of_letters(),
        prompts=prompts,
        profile=Profile(Sampling(max_tokens=20)),
        samples=2,
        seed=11,
    )
    assert [sample.arm for sample in written] == ["senior_first"] * 8 + ["junior_first"] * 8
    for sample in written:
        key = request_key(11, 0, sample.problem, sample.sample)
        models = {True: senior, False: junior}
        first = sample.arm == "senior_first"
        tokens, authors = handoff_by_hand(models, prompts[sample.problem].tokens, key, first, 20)
        assert (sample.tokens, sample.author) == (tokens, measures.author_runs(np.array(authors)))
        assert sample.stop_reason == ("eos" if IDS[EOS] in tokens else "length")
    assert sum(sample.rounds for sample in written) > 3 * len(written)


# ---------------------------------------------------------------------------------------------------------------- drift


def log_softmax64(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("per_chunk", [7, 1000])
def test_drift_is_that_of_full_logits(per_chunk, monkeypatch):
    """Two architectures, an LM head with a bias, more logits on one side, in chunks of any size. What the environment
    says is read and does not count; the EOS at the end is not read."""
    senior, junior = with_head_bias(qwen3(0, tied=False)), small_qwen3(1, vocabulary=VOCABULARY + 8)
    monkeypatch.setattr(reading, "LOGITS_ON_CPU", VOCABULARY * per_chunk)
    prompts = [Prompt(Row(f"p/{i}", (), "p", "", {}), ids) for i, ids in enumerate(some_prompts(5))]
    samples = [each._replace(author="S2C1J6") for each in texts_for(prompts, [9] * 5, VOCABULARY)]
    found = reading.read_texts(samples, prompts, [prepared(senior), prepared(junior)], reading.by_both)
    legible = reading.read_texts(samples, prompts, [prepared(junior)], reading.by_junior())
    for prompt, sample, read, alone in zip(prompts, samples, found, legible, strict=True):
        text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
        p, q = (
            log_softmax64(reference_logits(model, prompt.tokens, text)[:, :VOCABULARY]) for model in (senior, junior)
        )
        written = [i for i in range(len(text)) if i != 2]  # the environment's is context
        tokens = [text[i] for i in written]
        kl = (np.exp(p) * (p - q)).sum(-1)[written]
        wanted = -p[written, tokens].mean(), -q[written, tokens].mean(), kl.mean()
        assert (read.surprisal, read.cross_entropy, read.kl) == pytest.approx(wanted, abs=2e-5)
        assert read.unlikely_rate == np.mean(np.exp(q[written, tokens]) < 0.01)
        of_all = log_softmax64(reference_logits(junior, prompt.tokens, text))
        assert alone.cross_entropy == pytest.approx(-of_all[written, tokens].mean(), abs=2e-5)


def test_legibility_and_drift_read_the_solo_texts(phase, tmp_path, monkeypatch):
    """Also alone, and the junior's cross-entropy is the same in both."""
    alone = {name: phase(name, out=tmp_path / "alone")["metrics"] for name in ("legibility", "drift")}
    phase("pass-at-k")

    def fail(*args, **kwargs):
        raise AssertionError("generated again")

    with monkeypatch.context() as patch:
        patch.setattr(session, "make_engine", fail)
        beside = {name: phase(name)["metrics"] for name in alone}
        with pytest.raises(AssertionError, match="generated again"):  # other samples than pass@k's
            phase("legibility", out=tmp_path / "eval" / "other.json", limit=2)
    assert beside == alone
    stored = evals.read_samples(tmp_path / "eval" / "legibility.samples.jsonl")
    assert all(sample.score is not None for sample in stored)
    legibility, macro = (beside[name]["macro"] for name in alone)
    by_problem = {}
    for sample in evals.read_samples(tmp_path / "eval" / "drift.samples.jsonl"):
        by_problem.setdefault(sample.problem, []).append(sample.cross_entropy - sample.surprisal)
    assert macro["excess"] == pytest.approx(np.mean([np.mean(each) for each in by_problem.values()]))
    for name in ("surprisal", "cross_entropy", "kl", "unlikely_rate", "excess"):
        assert macro[f"{name}/low"] <= macro[name] <= macro[f"{name}/high"]
    assert macro["kl"] > 0.01
    assert macro["cross_entropy"] == pytest.approx(legibility["cross_entropy"], abs=1e-6)
    assert (macro["samples"], macro["dropped"], macro["problems"]) == (6, 0, 3)


# ------------------------------------------------------------------------------------------------------------- verified


def test_verified_needs_a_judge_of_reasoning(phase):
    with pytest.raises(EvalError, match=r"phase verified needs a judge; give judge\.url="):
        phase("verified")
    with pytest.raises(EvalError, match=r"phase verified needs judge\.prompt=rubric or reasoning; tinyv"):
        phase("verified", judge=JudgeConfig(url="http://127.0.0.1:9/v1", prompt="tinyv"))
    with pytest.raises(JudgeError, match="failed 1 time"):
        phase("verified", judge=JudgeConfig(url="http://127.0.0.1:9/v1", retries=0))
    with FakeJudge(lambda prompt, number: "", models=("J",)) as fake:  # an untrained senior is never right
        result = phase("verified", judge=JudgeConfig(url=fake.url, prompt="reasoning"))
    assert (result["metrics"]["macro"]["judged"], result["config"]["judge"]["model"]) == (0, "J")


def test_verified_over_http_counts_what_the_judge_accepts(tiny_pair, phase, tmp_path):
    def judged(prompt, number):
        return f"Total Score: {10 if len(prompt) % 2 else 5}/10"

    with FakeJudge(judged, models=("rrm",)) as fake:
        own = {"model": str(tiny_pair / "senior"), "data": ["synthetic:plain:heldout:12"], "limit": None}
        verified = partial(phase, **own, eval=EvalConfig(samples=4, k=(1, 4), bootstrap=20))
        alone = verified("pass-at-k")
        result = verified("verified", judge=JudgeConfig(url=fake.url, prompt="reasoning"))
        requests = len(fake.bodies)
        assert verified("verified", judge=JudgeConfig(url=fake.url, prompt="reasoning", timeout_s=9.0)) == result
        assert len(fake.bodies) == requests  # a finished phase is not judged again
    samples, written = (
        evals.read_samples(tmp_path / "eval" / f"{name}.samples.jsonl") for name in ("verified", "pass-at-k")
    )
    assert [sample.text for sample in samples] == [sample.text for sample in written]
    right = [sample for sample in samples if sample.correct]
    assert 0 < requests <= len(right)  # equal texts are shown once
    assert {sample.judge for sample in right} == {0.5, 1.0}
    assert [sample.verified for sample in samples] == [sample.judge == 1.0 for sample in samples]
    macro = result["metrics"]["macro"]
    assert macro["pass@1"] == alone["metrics"]["macro"]["pass@1"] == pytest.approx(len(right) / 48)
    assert macro["verified_pass@1"] == pytest.approx(sum(sample.verified for sample in samples) / 48)
