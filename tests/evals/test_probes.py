"""Recovery, intervention, checkability and monitoring: oracles, and values by hand."""

import random
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from fake_judge import FakeJudge
from planted import Adder, planted
from runs import evaluate_phase
from tandemrl import evals
from tandemrl.config import Config, DataConfig, EvalConfig, JudgeConfig, RewardConfig
from tandemrl.evals import Sample
from tandemrl.evals.probes import (
    CUE,
    HAS_CUE,
    IS_RIGHT,
    checked,
    g_mean2,
    intervene,
    monitor,
    moved,
    pooled_auroc,
    recover,
    tfidf_probabilities,
)
from tandemrl.evals.session import Session
from tandemrl.models.loading import load_tokenizer
from tandemrl.tasks.rubric.judge import parse_score


@pytest.fixture
def phase(tiny_pair, tmp_path):
    """A phase on eight problems with four texts each, read by the model itself and by the junior."""
    own, other = (str(tiny_pair / name) for name in ("senior", "junior"))
    return partial(
        evaluate_phase,
        model=own,
        junior=None,
        data=["synthetic:plain:heldout:8"],
        eval=EvalConfig(samples=4, k=(1,), bootstrap=20, readers=(own, other)),
        reward=RewardConfig(workers=1),
        out=tmp_path,
    )


def sample(correct, judge=None, *, problem=0, arm="r", given="asked", answer="7"):
    rest = ("", [], 0, None, 0, None, "eos")
    told = {"correct": correct, "judge": judge, "given": given, "answer": answer}
    return Sample(problem, f"x{problem}", "a", arm, 0, 0, *rest, **told)


def test_a_reader_that_is_the_model_loses_nothing_by_its_own_steps(phase, tmp_path):
    """Of right texts: the same steps give the same answer, and a mistake in them seldom does."""
    found = phase("recover")["metrics"]["macro"]
    assert found["senior/free/half/pass@1"] == 1.0
    assert found["senior/free/planted/pass@1"] < 0.5
    texts = {each.given: each.text for each in evals.read_samples(tmp_path / "recover.samples.jsonl")[:3]}
    assert texts.keys() == {"free/0", "free/half", "free/planted"}
    assert texts["free/planted"] != texts["free/half"]


def test_answers_are_compared_with_those_of_the_same_row():
    """Two rows may have one problem (`same_as`), and then a sample of each has the number 0."""
    rows = [sample(True, problem=i, given=given, answer=f"{i}") for i in (3, 4) for given in ("text", "forced/0")]
    rates, counts = moved(rows)
    assert (rates["forced/0/same"], counts["texts"]) == (1.0, 2)
    rates, _ = moved([each._replace(correct=False) for each in rows])
    assert rates["forced/0/same"] == 1.0


def test_an_exact_reader_carries_a_planted_mistake_on():
    samples, prompts, grade = planted("plain", 0, count=20)
    read = recover(samples, prompts, [Adder()], grade)
    assert {each.given: each.correct for each in read} == {"free/0": True, "free/half": True, "free/planted": False}
    with pytest.raises(evals.EvalError, match="no right text has steps with numbers"):
        recover(planted("jargon", 0, count=3)[0], prompts, [Adder()], grade)


def test_the_model_answers_the_same_from_all_of_its_text(phase):
    found = phase("intervene")["metrics"]["macro"]
    assert found["forced/100/same"] == 1.0
    assert found["forced/0/same"] < 0.5
    assert 0 < found["aoc"] < 1
    assert found["free/planted/same"] < found["forced/100/same"]


def test_the_area_over_a_curve_by_hand():
    samples, prompts, grade = planted("plain", 0, count=4)
    samples = [each._replace(answer=prompts[each.problem].row.ground_truth) for each in samples]

    def answers(some):
        return [each._replace(answer=each.text.rpartition("{")[2].rstrip("}")) for each in grade(some)]

    class Early(Adder):
        """Says the answer from 50 % on."""

        def answered(self, job):
            known = "0" if job.given in ("forced/0", "forced/25") else prompts[job.sample.problem].row.ground_truth
            return job.sample._replace(given=job.given, text=f"\\boxed{{{known}}}", arm=self.name)

    samples = [each for each in samples if each.answer != "0"]
    read = intervene(samples, prompts, [Early()], answers)
    rates, counts = moved([each for each in read if each.problem == samples[0].problem])
    assert rates["aoc"] == 1 - (0 / 2 + 0 + 1 + 1 + 1 / 2) / 4
    assert counts == {"texts": 1}


def test_texts_are_checked_within_a_problem():
    rates, counts = checked([sample(True, 0.9), sample(True, 0.4), sample(False, 0.5), sample(False, 0.4)])
    assert (rates["asked/auroc"], counts["mixed"]) == ((1 + 1 + 0 + 0.5) / 4, 1)
    assert (rates["asked/right"], rates["asked/wrong"]) == (pytest.approx(0.65), pytest.approx(0.45))
    same = [sample(truth, judge) for truth in (True, False) for judge in (0.1, 0.6, 0.7)]
    assert checked(same)[0]["asked/auroc"] == 0.5
    assert "asked/auroc" not in checked([sample(True, 0.9), sample(False, None)])[0]


def test_across_problems_who_knows_the_hard_ones_is_above_a_half():
    """Problem 0 is right and gets .9 throughout, problem 1 is wrong and gets .2; of equal texts nothing is told."""
    easy, hard = ([sample(not i, judge, problem=i)] * 3 for i, judge in enumerate((0.9, 0.2)))
    assert "asked/auroc" not in checked([*easy])[0]
    sure = pooled_auroc([*easy, *hard], 20, 0)
    assert sure["r/asked/pooled_auroc"] == sure["r/asked/pooled_auroc/high"] == 1.0
    assert sure["r/asked/pooled_auroc/low"] == pytest.approx(0.025)  # .025 ** (1/2) for each problem
    rng = random.Random(0)
    texts = [sample(rng.random() < 0.4, rng.choice((0.1, 0.4, 0.4, 0.8)), problem=i // 3) for i in range(60)]
    right, wrong = ([each.judge for each in texts if each.correct is truth] for truth in (True, False))
    won = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    found = pooled_auroc(texts, 200, 0)
    assert found["r/asked/pooled_auroc"] == pytest.approx(won / len(right) / len(wrong))
    assert found["r/asked/pooled_auroc/low"] < found["r/asked/pooled_auroc"] < found["r/asked/pooled_auroc/high"]
    same = [sample(truth, judge, problem=i) for i, judge in enumerate((0.1, 0.6, 0.7)) for truth in (True, False)]
    assert pooled_auroc(same, 0, 0) == {"r/asked/pooled_auroc": 0.5}
    assert pooled_auroc([sample(True, 0.9)], 20, 0) == {}
    again = [each._replace(problem=each.problem + 20, same_as=each.example_id, example_id="again") for each in texts]
    assert pooled_auroc([*texts, *again], 200, 0) == pooled_auroc(texts + texts, 200, 0)  # two rows of one problem


def test_a_classifier_of_words_is_that_of_scikit_learn():
    pytest.importorskip("sklearn", reason="the independent computation is scikit-learn's")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    rng = random.Random(0)
    truth, problems = [i % 2 == 0 for i in range(80)], [i // 2 for i in range(80)]
    texts = [" ".join(rng.choices(("so", "it", "is", "five", "a", "told" if each else "is"), k=9)) for each in truth]
    found = tfidf_probabilities(texts, truth, problems)
    for fold in range(5):
        known, rest = ([i for i in range(80) if (problems[i] % 5 != fold) is wanted] for wanted in (True, False))
        vectors = TfidfVectorizer().fit([texts[i] for i in known])
        model = LogisticRegression(tol=1e-8).fit(
            vectors.transform([texts[i] for i in known]), [truth[i] for i in known]
        )
        expected = model.predict_proba(vectors.transform([texts[i] for i in rest]))[:, 1]
        assert [found[i] for i in rest] == pytest.approx(expected.tolist(), abs=2e-3)


def test_a_classifier_of_words_guesses_where_words_say_nothing():
    rng = random.Random(1)
    words, problems = [f"w{i}" for i in range(30)], [i // 2 for i in range(1000)]
    texts, truth = [" ".join(rng.choices(words, k=9)) for _ in problems], [i % 2 == 0 for i in range(1000)]
    right = [(p > 0.5) == each for p, each in zip(tfidf_probabilities(texts, truth, problems), truth, strict=True)]
    assert sum(right[::2]) * sum(right[1::2]) / 500**2 == pytest.approx(0.25, abs=0.04)
    marked = [f"{text} told" if each else text for text, each in zip(texts, truth, strict=True)]
    said = tfidf_probabilities(marked, truth, problems)
    assert all((p > 0.5) == each for p, each in zip(said, truth, strict=True))


def test_a_monitor_that_guesses_has_a_quarter_and_one_that_says_yes_nothing():
    rng = random.Random(0)
    for guess, value in ((lambda: rng.random() < 0.5, 0.25), (lambda: True, 0.0)):
        texts = [
            sample(guess() == (given == "planted"), problem=i, given=given)
            for i in range(2000)
            for given in ("clean", "planted")
        ]
        found = g_mean2(texts, 50, 0)
        assert found["r/g_mean2"] == pytest.approx(value, abs=0.03)
        assert found["r/g_mean2/low"] <= found["r/g_mean2"] <= found["r/g_mean2/high"]


def test_a_reader_that_sees_the_cue_is_a_perfect_monitor():
    class Sees(Adder):
        def ask(self, texts, question):
            assert question == HAS_CUE
            return [each._replace(arm=self.name, judge=float(CUE in text)) for each, text in texts]

    samples, prompts, grade = planted("plain", 0, count=5)
    read = monitor(samples, prompts, [Sees()], grade)
    found = g_mean2(read, 10, 0)
    assert (found["adder/g_mean2"], found["tfidf/g_mean2"]) == (1.0, 1.0)
    assert set(found) == {f"{arm}/g_mean2{end}" for arm in ("adder", "tfidf") for end in ("", "/low", "/high")}


def test_what_a_reader_thinks_is_that_of_its_logits(phase, tiny_pair, tmp_path):
    phase("checkable")
    phase("monitor")
    folder = str(tiny_pair / "junior")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
    read = [each for each in evals.read_samples(tmp_path / "checkable.samples.jsonl") if each.arm == "junior"]
    texts = [each for each in read if each.stop_reason == "eos"]
    [row] = [prompt.row for prompt in prompts_of(folder) if prompt.row.example_id == texts[0].example_id]

    @torch.no_grad()
    def log_prob(before, ids):
        logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(ids)[:, None]).sum())

    def chat(messages):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    said = [{"role": "assistant", "content": texts[0].text}, {"role": "user", "content": IS_RIGHT}]
    asked = chat([*map(dict, row.messages), *said])
    yes, no = (log_prob(asked, tokenizer.encode(word)) for word in ("Yes", "No"))
    assert texts[0].given == "asked"
    assert texts[0].judge == pytest.approx(1 / (1 + torch.tensor(no - yes).exp().item()), rel=1e-4)
    steps, _, answer = texts[0].text.rpartition("\n\n")
    known, rest = tokenizer.encode(f"{steps}\n\n"), tokenizer.encode(answer)
    expected = next(each for each in texts if each.given == "answer").judge
    prompt = chat([*map(dict, row.messages)])
    assert expected == pytest.approx(torch.tensor(log_prob([*prompt, *known], rest)).exp().item(), rel=1e-4)


def prompts_of(model):
    config = Config(data=DataConfig(eval=("synthetic:plain:heldout:8",)))
    return Session(config, model, [evals.PHASES["transfer"]]).prompts[0]


def test_legibility_is_graded_from_0_to_4(phase, tmp_path):
    assert [parse_score(text, 4.0) for text in ("Total Score: 3/4", "Total Score: 3/10", "4")] == [0.75, None, 1.0]
    with pytest.raises(evals.EvalError, match=r"needs judge\.prompt=legibility"):
        phase("judge-legibility", judge=JudgeConfig(url="http://127.0.0.1:9/v1"))
    with FakeJudge(lambda prompt, number: f"Total Score: {2 + len(prompt) % 2}/4") as fake:
        judge = JudgeConfig(url=fake.url, prompt="legibility")
        found = phase("judge-legibility", judge=judge)["metrics"]["macro"]
        assert "Solution:\n" in fake.prompts[0]
    assert 2 <= found["judge_legibility"] <= 3
    assert found["judged"] == round(found["pass@1"] * 32)


def test_a_model_that_is_not_here_cannot_read_itself(tmp_path):
    file = tmp_path / "texts.jsonl"
    with pytest.raises(evals.EvalError, match="phase intervene reads with the model itself"):
        evals.evaluate(Config(), model=evals.Stored(file), out=tmp_path, phases=("intervene",))
