"""Evaluation: bookkeeping on a fake engine with canned text, and whole phases on a tiny random Qwen3."""

import json
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from fake_judge import FakeJudge
from tandemrl import evals
from tandemrl.config import EvalConfig, JudgeConfig, RewardConfig
from tandemrl.data.rows import Prompt, Row, encode_prompts, load_rows
from tandemrl.evals import PROFILES, EvalError, Profile, Sample, evaluate, run_phase, sampling_for
from tandemrl.model import ModelError, prepare
from tandemrl.rollout.engine import Completion, EngineError, Sampling
from tandemrl.rollout.envs.rubric import JudgeError, JudgePool
from tandemrl.selection import bernoulli, replay, sentence, solo
from tandemrl.selection.boundaries import StepTables
from tandemrl.selection.draws import request_key
from tandemrl.tiny import new_model, train_tokenizer

WORDS = ("<eos>", "step", "\n\n", "\n", "right", "wrong", "half")
EOS, STEP, BLANK, NEWLINE, RIGHT, WRONG, HALF = range(len(WORDS))


class WordTokenizer:
    """One word per id; decoding joins them and leaves EOS out."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(WORDS[token] for token in tokens if token != EOS)


class CannedEngine:
    """Writes ``texts[prompt's first id]``, one after the other over its samples, by authors from the strategy."""

    policy_version, vocabulary, has_junior = 0, len(WORDS), True

    def __init__(self, texts, stop_reasons=None):
        self.texts, self.stop_reasons, self.requests = texts, stop_reasons or {}, []

    def generate(self, requests, *, progress=None):
        self.requests += requests
        return [[self.complete(request, i, key) for i, key in enumerate(request.keys)] for request in requests]

    def complete(self, request, index, key):
        texts = self.texts[request.prompt[0]]
        tokens = np.array(texts[index % len(texts)], dtype=np.int64)
        author = replay(
            request.strategy, torch.tensor([key]), torch.from_numpy(tokens)[None], torch.tensor([len(tokens)])
        ).author[0]
        stop = self.stop_reasons.get(request.prompt[0], "eos" if len(tokens) and tokens[-1] == EOS else "length")
        return Completion(key, tokens, author.numpy().astype(np.int8), np.zeros(len(tokens), np.float32), stop)


class FakeScore(NamedTuple):
    value: float
    parts: dict[str, float]
    answer: str | None


class FakeScorer:
    """The last word is the answer; "half" earns a format score that is not an accuracy."""

    def score(self, items):
        return [self.mark(row, text) for row, text in items]

    def mark(self, row, text):
        answer = (text.split() or [None])[-1]
        right = answer == row.ground_truth
        return FakeScore(1.0 if right else 0.1 * (answer == "half"), {"acc": float(right)}, answer)


def prompt(number, source="a", length=1):
    row = Row(f"{source}/{number}", ({"role": "user", "content": "?"},), source, "right", {})
    return Prompt(row, (number, *[STEP] * (length - 1)))


def run(engine, prompts, arms=None, samples=4, k=(1, 2, 4), **changes):
    settings = dict(profile=PROFILES["tiny"], seed=17, bootstrap=50) | changes
    return evaluate(
        arms or {"solo": solo("senior")},
        engine=engine,
        tokenizer=WordTokenizer(),
        prompts=prompts,
        scorer=FakeScorer(),
        samples=samples,
        k=k,
        **settings,
    )


# ------------------------------------------------------------------------------------------------------------- metrics


def test_solo_metrics_of_one_set():
    texts = {
        0: [[RIGHT, EOS], [WRONG, EOS], [WRONG, EOS], [HALF, EOS]],  # one of four
        1: [[STEP, RIGHT, EOS]] * 4,  # all
    }
    macro = run(CannedEngine(texts), [prompt(0), prompt(1)]).metrics["macro"]
    assert macro["pass@1"] == (0.25 + 1) / 2
    assert macro["pass@2"] == (0.5 + 1) / 2
    assert macro["pass@4"] == 1.0
    assert macro["maj@4"] == 0.5  # problem 0: "wrong" has two of four votes
    assert macro["score"] == pytest.approx(((1 + 0.1) / 4 + 1) / 2)
    assert macro["length"] == 2.5
    assert (macro["senior_share"], macro["rounds"], macro["truncation_rate"]) == (1.0, 1.0, 0.0)
    assert (macro["problems"], macro["samples"], macro["unfinished"]) == (2, 8, 0)
    assert macro["pass@1/low"] == 0.25
    assert macro["pass@1/high"] == 1.0


def test_without_resamples_there_are_no_intervals():
    engine = CannedEngine({0: [[RIGHT, EOS], [WRONG, EOS]]})
    with_intervals = run(engine, [prompt(0)]).metrics["macro"]
    without = run(engine, [prompt(0)], bootstrap=0).metrics["macro"]
    assert without == {name: v for name, v in with_intervals.items() if not name.endswith(("/low", "/high"))}
    assert len(without) < len(with_intervals)


def test_macro_is_the_mean_over_sets_not_over_problems():
    texts = {i: [[RIGHT, EOS]] for i in range(3)} | {3: [[WRONG, EOS]]}
    prompts = [*(prompt(i, "large") for i in range(3)), prompt(3, "small")]
    metrics = run(CannedEngine(texts), prompts).metrics
    assert metrics["by_set"]["large"]["pass@1"] == 1.0
    assert metrics["by_set"]["small"]["pass@1"] == 0.0
    assert metrics["macro"]["pass@1"] == 0.5  # pooled, it would be 0.75
    assert metrics["macro"]["problems"] == 4


def test_truncation_and_empty_texts_are_counted():
    texts = {0: [[STEP, STEP]], 1: [[]]}
    macro = run(CannedEngine(texts, {1: "eos"}), [prompt(0), prompt(1)]).metrics["macro"]
    assert macro["truncation_rate"] == 0.5
    assert macro["unfinished"] == 4
    assert macro["pass@4"] == 0.0


def test_keys_depend_on_seed_step_position_and_sample_only():
    engine = CannedEngine({0: [[RIGHT]], 1: [[RIGHT]]})
    arms = {"a": bernoulli(0.5), "b": bernoulli(0.1)}
    result = run(engine, [prompt(1), prompt(0)], arms=arms, samples=2, k=(1,), seed=3, step=7)
    expected = [request_key(3, 7, problem, sample) for problem in (0, 1) for sample in (0, 1)]
    assert [sample.key for sample in result.samples] == expected * 2
    assert [sample.arm for sample in result.samples] == ["a"] * 4 + ["b"] * 4


def test_handoff_trace_token_by_token():
    """Blank lines hand over, as one token or as two newlines; both orders are graded, and averaged per problem."""
    ids = torch.arange(len(WORDS))
    tables = StepTables(
        contains=ids == BLANK,
        ends_newline=(ids == BLANK) | (ids == NEWLINE),
        starts_newline=(ids == BLANK) | (ids == NEWLINE),
    )
    arms = {"senior_first": sentence("senior", tables), "junior_first": sentence("junior", tables)}
    text = [STEP, STEP, BLANK, STEP, NEWLINE, NEWLINE, RIGHT, EOS]
    result = run(CannedEngine({0: [text]}), [prompt(0)], arms=arms, samples=1, k=(1,))
    senior_first, junior_first = result.samples
    assert senior_first.author == "S3J3S2"
    assert junior_first.author == "J3S3J2"
    assert senior_first.rounds == junior_first.rounds == 3
    macro = result.metrics["macro"]
    assert macro["senior_first/senior_share"] == 5 / 8
    assert macro["junior_first/senior_share"] == 3 / 8
    assert macro["senior_share"] == 0.5
    assert macro["pass@1"] == macro["senior_first/pass@1"] == macro["junior_first/pass@1"] == 1.0
    assert macro["samples"] == 2
    assert macro["problems"] == 1


def test_chains_of_many_rounds_are_reported_and_not_cut():
    ids = torch.arange(len(WORDS))
    tables = StepTables(ids == BLANK, ids == BLANK, ids == BLANK)
    texts = {0: [[BLANK] * 149 + [RIGHT], [BLANK] * 150 + [RIGHT]]}
    result = run(CannedEngine(texts), [prompt(0)], arms={"senior_first": sentence("senior", tables)}, samples=2, k=(1,))
    assert [sample.rounds for sample in result.samples] == [150, 151]
    assert result.metrics["macro"]["above_150_rounds"] == 1
    assert result.metrics["macro"]["rounds"] == 150.5
    assert result.metrics["macro"]["unfinished"] == 2


def test_the_mean_over_arms_is_taken_problem_by_problem():
    """One arm solves problem 0, the other problem 1: each problem has the mean 0.5, so the interval has no width."""

    class ArmEngine(CannedEngine):
        def complete(self, request, index, key):
            junior_starts = not bool(request.strategy.init(torch.tensor([key]))[0])
            self.texts = {0: [[WRONG if junior_starts else RIGHT]], 1: [[RIGHT if junior_starts else WRONG]]}
            return super().complete(request, index, key)

    arms = {"senior": solo("senior"), "junior": solo("junior")}
    macro = run(ArmEngine({}), [prompt(0), prompt(1)], arms=arms, samples=1, k=(1,)).metrics["macro"]
    assert (macro["pass@1/low"], macro["pass@1"], macro["pass@1/high"]) == (0.5, 0.5, 0.5)
    assert macro["senior/pass@1"] == 0.5
    assert macro["senior/pass@1/low"] < macro["senior/pass@1/high"]


# --------------------------------------------------------------------------------------------------------- fail closed


def test_wrong_authors_are_refused():
    class LyingEngine(CannedEngine):
        def complete(self, request, index, key):
            completion = super().complete(request, index, key)
            completion.author[0] ^= 1
            return completion

    with pytest.raises(EngineError, match="author"):
        run(LyingEngine({0: [[RIGHT, EOS]]}), [prompt(0)])


def test_missing_completions_are_refused():
    class LazyEngine(CannedEngine):
        def generate(self, requests, *, progress=None):
            return [group[:-1] for group in super().generate(requests)]

    with pytest.raises(EngineError, match="returned completions of the keys"):
        run(LazyEngine({0: [[RIGHT, EOS]]}), [prompt(0)])


def test_aborted_and_empty_evaluations_are_refused():
    with pytest.raises(EngineError, match="aborted"):
        run(CannedEngine({0: [[RIGHT]]}, {0: "abort"}), [prompt(0)])
    with pytest.raises(EvalError, match="no prompts"):
        run(CannedEngine({}), [])


@pytest.mark.parametrize("k", [(), (0,), (1, 5)])
def test_k_out_of_range_is_refused(k):
    with pytest.raises(EvalError, match=r"eval\.samples \(4\)"):
        run(CannedEngine({0: [[RIGHT]]}), [prompt(0)], k=k)


# ------------------------------------------------------------------------------------------------------------ profiles


def test_paper_profile_is_the_published_one():
    paper = PROFILES["paper"]
    assert paper.sampling == Sampling(max_tokens=3000, temperature=0.7, top_p=0.8, top_k=20)
    assert (paper.context, paper.reserve) == (4096, 8)


@pytest.mark.parametrize(("length", "budget"), [(1, 3000), (1088, 3000), (1089, 2999), (4087, 1)])
def test_response_budget_is_what_the_context_leaves(length, budget):
    assert sampling_for(PROFILES["paper"], prompt(0, length=length)).max_tokens == budget
    assert sampling_for(PROFILES["tiny"], prompt(0, length=length)).max_tokens == 64


def test_a_prompt_without_room_is_refused():
    with pytest.raises(EvalError, match="row a/0: its prompt of 4088 tokens"):
        sampling_for(PROFILES["paper"], prompt(0, length=4088))


def test_requests_carry_the_profile_and_its_budget():
    engine = CannedEngine({0: [[RIGHT]]})
    profile = Profile(Sampling(max_tokens=50, temperature=0.7), context=40, reserve=8)
    run(engine, [prompt(0, length=10)], profile=profile)
    assert engine.requests[0].sampling == Sampling(max_tokens=22, temperature=0.7)


def test_custom_profile_reads_the_config_and_named_ones_refuse_overrides():
    custom = EvalConfig(profile="custom", temperature=0.5, top_p=0.9, top_k=5, max_tokens=9, context=20)
    profile = evals.profile_of(custom)
    assert profile == Profile(Sampling(max_tokens=9, temperature=0.5, top_p=0.9, top_k=5), context=20)
    assert evals.profile_of(EvalConfig(temperature=0.5)) == PROFILES["tiny"]
    with pytest.raises(EvalError, match="profile=custom"):
        evals.profile_of(EvalConfig(profile="paper", context=128))


# -------------------------------------------------------------------------------------------------- phases, for real


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
    """``run_phase`` on three problems with two samples of at most ten tokens each."""
    return partial(
        run_phase,
        model=str(pair / "senior"),
        junior=str(pair / "junior"),
        data=["synthetic:plain:heldout:4"],
        eval=EvalConfig(profile="custom", max_tokens=10, samples=2, k=(1, 2), bootstrap=20),
        reward=RewardConfig(workers=1),
        out=tmp_path / "eval",
        limit=3,
    )


def finite(value):
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("name", [name for name in evals.PHASES if name != "verified"])
def test_result_file_has_the_schema(phase, tmp_path, name):
    result = phase(name)
    file = tmp_path / "eval" / f"{name}.json"
    assert json.loads(file.read_text()) == result
    assert list(result) == ["schema", "phase", "config", "versions", "seeds", "metrics", "samples"]
    assert (result["schema"], result["phase"], result["samples"]) == (1, name, f"{name}.samples.jsonl")
    assert {"torch", "transformers", "tandemrl", "python"} <= result["versions"].keys()
    assert set(result["metrics"]) == {"macro", "by_set"}
    assert list(result["metrics"]["by_set"]) == ["synthetic/plain"]
    assert finite(result["metrics"])
    wanted = "cross_entropy" if name == "legibility" else "pass@1"
    for metrics in (result["metrics"]["macro"], result["metrics"]["by_set"]["synthetic/plain"]):
        assert metrics[f"{wanted}/low"] <= metrics[wanted] <= metrics[f"{wanted}/high"]
    assert result["metrics"]["macro"]["prompts_dropped"] == 0

    samples = evals.read_samples(file.with_name(result["samples"]))
    arms = 2 if name == "handoff" else 1
    assert len(samples) == result["metrics"]["macro"]["samples"] == 3 * 2 * arms
    for sample in samples:
        assert sample.length == len(sample.tokens) <= 10
        runs = sample.author.replace("S", " 1:").replace("J", " 0:").split()
        authors = [int(who) for who, count in (run.split(":") for run in runs) for _ in range(int(count))]
        assert len(authors) == sample.length
        assert np.mean(authors) == pytest.approx(sample.senior_share)


def test_with_equal_weights_handing_over_changes_no_text(phase, pair, tmp_path):
    """The same keys in every phase and arm: a junior that is the senior writes what the senior would have written."""
    texts = {}
    for name in ("pass-at-k", "tandem", "handoff"):
        phase(name, junior=str(pair / "senior"))
        samples = evals.read_samples(tmp_path / "eval" / f"{name}.samples.jsonl")
        texts |= {(name, arm): [s.tokens for s in samples if s.arm == arm] for arm in {s.arm for s in samples}}
    assert len(texts) == 4
    assert all(tokens == texts["pass-at-k", "solo"] for tokens in texts.values())


def test_a_finished_phase_is_skipped(phase, monkeypatch):
    first = phase("handoff")

    def fail(*args, **kwargs):
        raise AssertionError("the phase ran again")

    monkeypatch.setattr(evals, "load_model", fail)
    monkeypatch.setattr(evals, "load_rows", fail)
    assert phase("handoff") == first


def test_another_configuration_is_refused_by_name(phase, pair, tmp_path):
    out = tmp_path / "one.json"
    phase("tandem", out=out)
    with pytest.raises(EvalError, match=r"prob_senior: 0\.5 there, 0\.25 now"):
        phase("tandem", out=out, prob_senior=0.25)
    with pytest.raises(EvalError, match=r"eval\.seed: 17 there, 18 now"):
        phase("tandem", out=out, eval=EvalConfig(profile="custom", max_tokens=10, samples=2, k=(1, 2), seed=18))
    with pytest.raises(EvalError, match="holds the phase tandem"):
        phase("handoff", out=out)
    out.write_text("{")
    with pytest.raises(EvalError, match="not readable"):
        phase("tandem", out=out)


def test_changed_weights_are_another_configuration(phase, pair, tokenizer, tmp_path):
    copy = tmp_path / "model"
    for seed in (5, 6):
        new_model(tokenizer, seed).save_pretrained(copy)
        tokenizer.save_pretrained(copy)
        if seed == 5:
            phase("pass-at-k", model=str(copy))
    with pytest.raises(EvalError, match="digests"):
        phase("pass-at-k", model=str(copy))


def test_the_junior_does_not_matter_to_pass_at_k(phase):
    assert phase("pass-at-k") == phase("pass-at-k", junior=None)


@pytest.mark.parametrize("failing", ["write_text", "grade"])
def test_a_failure_leaves_no_result(phase, tmp_path, monkeypatch, failing):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(evals, failing, fail)
        with pytest.raises(OSError, match="disk full"):
            phase("pass-at-k")
    assert not (tmp_path / "eval" / "pass-at-k.json").exists()
    assert phase("pass-at-k")["metrics"]["macro"]["samples"] == 6


def test_a_failure_while_the_file_is_written_leaves_no_part_of_it(phase, tmp_path, monkeypatch):
    """The samples are complete, the result was not renamed into place: the phase is not finished."""
    rename = evals.write_text.__globals__["os"].replace

    def fail(source, target):
        if str(target).endswith(".json"):
            raise OSError("killed")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="killed"):
            phase("pass-at-k")
    assert not (tmp_path / "eval" / "pass-at-k.json").exists()
    assert phase("pass-at-k")["schema"] == 1


def test_non_finite_numbers_are_refused(tmp_path):
    result = evals.EvalResult({"macro": {"score": math.nan}, "by_set": {}}, [])
    with pytest.raises(EvalError, match="not finite"):
        evals.write_result(tmp_path / "tandem.json", "tandem", {}, result, seeds={})
    assert list(tmp_path.iterdir()) == []


def test_a_junior_is_required_and_must_share_the_vocabulary(phase, tmp_path):
    with pytest.raises(EvalError, match="needs a junior"):
        phase("tandem", junior=None)
    with pytest.raises(EvalError, match="unknown phase"):
        phase("solo")
    other = train_tokenizer("plain", 1, vocab_size=300, texts=50)
    other.save_pretrained(tmp_path / "other")
    for name in ("tandem", "handoff", "legibility"):
        with pytest.raises(ModelError, match="vocabular"):
            phase(name, junior=str(tmp_path / "other"))


# ----------------------------------------------------------------------------------------------------------- legibility


def texts_for(prompts, lengths, vocabulary):
    """Random texts; those of even problems end in EOS (id 2)."""
    rng = np.random.default_rng(0)
    samples = []
    for problem, (item, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens = rng.integers(3, vocabulary, size=length).tolist()
        ended = problem % 2 == 0 and length > 0
        tokens = [*tokens[:-1], 2] if ended else tokens
        samples.append(
            Sample(
                problem=problem,
                example_id=item.row.example_id,
                set=item.row.data_source,
                arm="solo",
                sample=0,
                key=problem,
                text="",
                tokens=tokens,
                length=length,
                author=f"S{length}",
                rounds=1,
                senior_share=1.0,
                stop_reason="eos" if ended else "length",
            )
        )
    return samples


def test_legibility_is_the_cross_entropy_that_transformers_computes(tokenizer, pair):
    prompts, _ = encode_prompts(load_rows(["synthetic:plain:heldout:5"]), tokenizer, max_prompt_tokens=200)
    samples = texts_for(prompts, [7, 12, 1, 30, 2], vocabulary=len(tokenizer))
    read = evals.read_legibility(samples, prompts, prepare(Qwen3ForCausalLM.from_pretrained(pair / "junior")))

    reference = Qwen3ForCausalLM.from_pretrained(pair / "junior", attn_implementation="eager").eval()
    for sample, found in zip(samples, read, strict=True):
        text = [token for token in sample.tokens if token != 2]
        ids = torch.tensor([*prompts[sample.problem].tokens, *text])
        labels = ids.clone()
        labels[: len(prompts[sample.problem].tokens)] = -100
        if not text:  # nothing but EOS
            assert found.cross_entropy is None
            continue
        with torch.no_grad():
            wanted = reference(input_ids=ids[None], labels=labels[None]).loss.item()
        assert found.cross_entropy == pytest.approx(wanted, abs=1e-5)


def test_texts_over_the_juniors_context_are_dropped_and_counted(tokenizer):
    prompts, _ = encode_prompts(load_rows(["synthetic:plain:heldout:3"]), tokenizer, max_prompt_tokens=200)
    junior = new_model(tokenizer, 0)
    longest = len(prompts[1].tokens)
    samples = texts_for(prompts, [5, 21, 5], vocabulary=len(tokenizer))
    junior.config.max_position_embeddings = longest + 21
    fits = evals.read_legibility(samples, prompts, prepare(junior))
    assert fits[1].cross_entropy is not None
    junior.config.max_position_embeddings = longest + 20
    read = evals.read_legibility(samples, prompts, junior)
    assert read[1].cross_entropy is None
    macro = evals.summarise(read, evals.legible, bootstrap=10, seed=0)["macro"]
    assert (macro["samples"], macro["dropped"], macro["problems"]) == (3, 1, 3)
    kept = [sample.cross_entropy for sample in read if sample.cross_entropy is not None]
    assert macro["cross_entropy"] == pytest.approx(sum(kept) / 2)
    with pytest.raises(EvalError, match="none of its 3 problems"):
        evals.summarise(samples, evals.legible, bootstrap=10, seed=0)


def test_legibility_reads_the_pass_at_k_samples_and_writes_the_same_ones_without(phase, tmp_path, monkeypatch):
    alone = phase("legibility", out=tmp_path / "alone")
    phase("pass-at-k")

    class NoEngine:
        def __init__(self, *args, **kwargs):
            raise AssertionError("generated again")

    with monkeypatch.context() as patch:
        patch.setattr(evals, "TorchEngine", NoEngine)
        beside = phase("legibility")
        with pytest.raises(AssertionError, match="generated again"):  # other samples than pass@k's
            phase("legibility", out=tmp_path / "eval" / "other.json", limit=2)
    assert beside["metrics"] == alone["metrics"]
    stored = evals.read_samples(Path(tmp_path / "eval" / beside["samples"]))
    assert all(sample.score is not None for sample in stored)


# ------------------------------------------------------------------------------------------------------------- verified


class Marker:
    """Gives the number after "mark"; a response that says "mark x" never gets one."""

    model = "marker"

    def __init__(self):
        self.asked = []

    def ask(self, prompts, *, attempt=0):
        texts = [prompt[-1]["content"].rpartition("mark ")[2].split()[0] for prompt in prompts]
        self.asked += texts
        return [f"Total Score: {text}/10" for text in texts]


def marked(problem, text, correct, name="a"):
    return Sample(problem, f"{name}/{problem}", name, "solo", 0, 0, text, [], 0, "", 0, 1.0, "eos", 0.0, correct, "4")


def test_a_correct_sample_is_verified_if_the_judge_accepts_its_reasoning():
    prompts = [prompt(0), prompt(1)]
    marks = [("10", True), ("9", True), ("10", False), ("x", True)] + [("10", True)] * 3 + [("9.5", True)]
    samples = [marked(i // 4, f"mark {mark}", correct) for i, (mark, correct) in enumerate(marks)]
    judge = Marker()
    read = evals.verify(samples, prompts, JudgePool(judge, JudgeConfig(prompt="reasoning", retries=0)))
    assert [sample.verified for sample in read] == [True, False, False, False, True, True, True, False]
    assert [sample.judge for sample in read] == [1.0, 0.9, None, None, 1.0, 1.0, 1.0, 0.95]
    assert [sample.correct for sample in read] == [sample.correct for sample in samples]
    macro = evals.summarise(read, partial(evals.accepted, k=(1, 2, 4)), bootstrap=20, seed=0)["macro"]
    # problem 0: 3 of 4 correct, 1 verified; problem 1: 4 correct, 3 verified
    assert (macro["pass@1"], macro["pass@4"]) == ((3 / 4 + 1) / 2, 1.0)
    assert (macro["verified_pass@1"], macro["verified_pass@4"]) == ((1 / 4 + 3 / 4) / 2, 1.0)
    assert macro["verified_pass@2"] == (1 / 2 + 1) / 2  # 1 - C(3,2)/C(4,2), and 1 - C(1,2)/C(4,2)
    assert macro["rejected_rate"] == (2 / 4 + 1 / 4) / 2
    assert (macro["judged"], macro["judge_failures"], macro["samples"]) == (7, 1, 8)
    assert macro["verified_pass@1/low"] <= macro["verified_pass@1"] <= macro["verified_pass@1/high"]

    lenient = evals.verify(samples, prompts, JudgePool(Marker(), JudgeConfig(prompt="reasoning", accept=0.9)))
    assert [sample.verified for sample in lenient] == [True, True, False, False, True, True, True, True]


def test_without_correct_samples_the_judge_is_not_asked():
    judge = Marker()
    read = evals.verify([marked(0, "mark 10", False)], [prompt(0)], JudgePool(judge, JudgeConfig(prompt="reasoning")))
    assert (read[0].verified, judge.asked) == (False, [])


def test_verified_needs_a_judge_of_reasoning(phase, pair):
    with pytest.raises(EvalError, match=r"phase verified needs a judge; give judge\.url="):
        phase("verified")
    with pytest.raises(EvalError, match=r"judge\.prompt=tinyv compares answers"):
        phase("verified", judge=JudgeConfig(url="http://127.0.0.1:9/v1", prompt="tinyv"))
    with pytest.raises(JudgeError, match="failed 1 time"):
        phase("verified", judge=JudgeConfig(url="http://127.0.0.1:9/v1", retries=0))
    # a judge in this process; the untrained senior is never right, so there is nothing to read
    result = phase("verified", judge=JudgeConfig(model=str(pair / "junior"), prompt="reasoning"))
    assert result["metrics"]["macro"]["judged"] == 0
    assert result["config"]["judge"]["model"] == str(pair / "junior")


def test_verified_over_http_counts_what_the_judge_accepts(tiny_pair, tmp_path):
    def judged(prompt, number):
        return f"Total Score: {10 if len(prompt) % 2 else 5}/10"

    with FakeJudge(judged, models=("rrm",)) as fake:
        verified = partial(
            run_phase,
            model=str(tiny_pair / "senior"),
            junior=None,
            data=["synthetic:plain:heldout:12"],
            eval=EvalConfig(samples=4, k=(1, 4), bootstrap=20),
            reward=RewardConfig(workers=1),
            out=tmp_path / "eval",
        )
        alone = verified("pass-at-k")
        result = verified("verified", judge=JudgeConfig(url=fake.url, prompt="reasoning"))
        requests = len(fake.bodies)
        assert verified("verified", judge=JudgeConfig(url=fake.url, prompt="reasoning", timeout_s=9.0)) == result
        assert len(fake.bodies) == requests  # a finished phase is not judged again
    samples = evals.read_samples(tmp_path / "eval" / "verified.samples.jsonl")
    assert [sample.text for sample in samples] == [
        sample.text for sample in evals.read_samples(tmp_path / "eval" / "pass-at-k.samples.jsonl")
    ]
    right = [sample for sample in samples if sample.correct]
    assert 0 < requests <= len(right)  # equal texts are shown once
    assert {sample.judge for sample in right} == {0.5, 1.0}
    assert all(sample.verified == (sample.judge == 1.0) for sample in right)
    assert not any(sample.verified for sample in samples if not sample.correct)
    macro = result["metrics"]["macro"]
    assert macro["pass@1"] == alone["metrics"]["macro"]["pass@1"] == pytest.approx(len(right) / 48)
    assert macro["verified_pass@1"] == pytest.approx(sum(bool(sample.verified) for sample in samples) / 48)
    assert macro["rejected_rate"] == pytest.approx(macro["pass@1"] - macro["verified_pass@1"])
    assert result["config"]["judge"]["model"] == "rrm"
