"""``tandemrl legibility``: a verdict that follows from stored results, of models and of texts from elsewhere."""

import json
import shutil

import pytest

from runs import cli, put
from tandemrl.apps.report.legibility import Estimate, ReaderRecord, no_reference, verdict
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError, Prompt
from tandemrl.evals.stored import Stored, stored_samples

SMALL = ("eval.profile=tiny", "eval.bootstrap=20", "eval.draws=4", "reward.workers=1", "train.threads=1")


def judge(*arguments):
    return cli("legibility", *arguments, *SMALL)


def test_a_verdict_says_no_more_than_its_intervals():
    rates = {
        "free/0/pass@1": Estimate(0.52, 0.4, 0.6),
        "free/step/pass@1": Estimate(0.15, 0.1, 0.2),
        "free/step/gain": Estimate(-0.37, -0.5, -0.2),
        "free/100/pass@1": Estimate(0.56, 0.4, 0.7),
        "free/100/gain": Estimate(0.04, -0.1, 0.2),
        "text/cross_entropy": Estimate(5.5),
        "free/0/cross_entropy": Estimate(0.1),
    }
    assert verdict("M", ReaderRecord("R", rates, {}, [], {"problems": 64})) == (
        "Alone, R solves 52 % [40, 60] of 64 problems. After M's first step: 15 %, worse than alone. After all of its "
        "steps: 56 %, no difference shown. M's text surprises R 55x as much per token as its own."
    )
    known = {"text/cross_entropy": Estimate(0.1), "free/0/cross_entropy": Estimate(0.5)}
    less = "M's text surprises R less per token than its own: 0.2 times as much."
    assert verdict("M", ReaderRecord("R", known, {}, [], {"problems": 64})) == less


def test_a_reader_that_does_not_end_alone_is_warned_of_by_name():
    [said] = no_reference("R", 0.875)
    assert said.startswith("Alone, R is cut off in 88 % of its texts")
    assert "Raise eval.max_tokens" in said
    assert no_reference("R", 0.5) == []


@pytest.fixture(scope="module")
def page(tiny_pair, tmp_path_factory):
    out = tmp_path_factory.mktemp("legibility")
    readers = ("--reader", tiny_pair / "senior", "--reader", tiny_pair / "junior")
    said = judge(tiny_pair / "senior", *readers, "--data", "synthetic:plain:heldout:6", "--out", out)
    return out, said


def test_a_page_begins_with_the_verdicts_and_has_handoff(page):
    out, said = page
    told = json.loads((out / "legibility.json").read_text())
    html = (out / "legibility.html").read_text()
    first, second = told["verdicts"]
    assert first in said.replace("\n", " ")
    assert first.startswith("Alone, senior solves ")
    assert "surprises senior 1.0x as much per token as its own." in first
    body = html[html.index("<main>") :]
    assert body.index("Alone, senior") < body.index("Alone, junior") < body.index("<table")
    assert "<script" not in html
    assert html.count('data-of="copy-only reader"') == 2 * 9
    own, other = told["readers"]
    alone = own["rates"]["free/0/pass@1"]["mean"]
    assert own["handoff"]["tandem/pass@1"]["mean"] == own["rates"]["text/pass@1"]["mean"] == alone
    assert {"handoff/senior_first/pass@1", "tandem/truncation_rate"} <= other["handoff"].keys()
    assert {each["reader"] for each in told["labels"]} <= {"senior", "junior"}
    assert second.startswith("Alone, junior solves ")


def test_texts_of_an_unknown_model_are_judged_as_they_are(page, tiny_pair, tmp_path):
    """The same texts from a file, in other lines, and by their text: what readers make of them is the same."""
    out, _ = page
    lines = [json.loads(line) for line in (out / "pass-at-k.samples.jsonl").read_text().splitlines()]
    some = [{"example_id": line["example_id"], "response": line["text"]} for line in reversed(lines)]
    some[0]["finish_reason"] = "length"
    file = put(tmp_path / "texts.jsonl", *some)
    arguments = ("Opus", "--responses", file, "--reader", tiny_pair / "junior", "--data", "synthetic:plain:heldout:6")
    judge(*arguments, "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "legibility.json").read_text())
    before = json.loads((out / "legibility.json").read_text())["readers"][1]["rates"]
    [reader] = told["readers"]
    for name in ("free/0/pass@1", "free/50/pass@1", "forced/100/pass@1", "copy/75/pass@1", "text/cross_entropy"):
        assert reader["rates"][name]["mean"] == pytest.approx(before[name]["mean"]), name
    assert told["verdicts"][0].startswith("Alone, junior")
    assert (reader["rates"]["text/truncation_rate"]["mean"], reader["handoff"]) == (pytest.approx(1 / 6), {})
    judge(*arguments, "--match", "truncation", "--out", tmp_path / "out")
    matched = json.loads((tmp_path / "out" / "legibility.json").read_text())
    assert (told["problems"], matched["problems"], matched["match"]) == (6, 5, "truncation")


def test_without_ground_truths_only_surprise_is_measured(tiny_pair, tmp_path):
    texts = ("First 3 plus 2 is 5.\n\n\\boxed{5}", "Blorp vam yab.")
    rows = [{"example_id": f"q{i}", "prompt": f"Tom has {i}. How many?", "response": x} for i, x in enumerate(texts)]
    file = put(tmp_path / "texts.jsonl", *rows)
    said = judge("M", "--responses", file, "--reader", tiny_pair / "junior", "--out", tmp_path / "out")
    assert "M's text surprises junior" in said
    assert "no ground truths" in said
    [reader] = json.loads((tmp_path / "out" / "legibility.json").read_text())["readers"]
    assert not [name for name in reader["rates"] if "pass@1" in name]
    assert reader["counts"] == {"texts": 2, "labelled": 0, "dropped": 0, "problems": 2}
    assert [example for example, _ in reader["texts"]] == ["texts/2", "texts/1"]  # the more surprising one first
    first = reader["texts"][1][1]
    assert "".join(text for text, _ in first) == texts[0]
    assert all(nats >= 0 for _, nats in first)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("M", "--data", "synthetic:plain:heldout:2"), "give --reader MODEL"),
        (("M", "--reader", "R", "--data", "synthetic:plain:heldout:2", "--match", "length"), "not one of"),
        (
            ("M", "--reader", "R@http://a/v1", "--reader", "R@http://b/v1", "--data", "synthetic:plain:heldout:2"),
            "needs readers that differ",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(arguments, fault):
    assert fault in cli("legibility", *arguments, fails=2)


def stored(tmp_path, *lines, limit=None, rows=4):
    file = put(tmp_path / "texts.jsonl", *lines)
    prompts = [Prompt(row, ()) for row in load_rows([f"synthetic:plain:heldout:{rows}"])]
    return stored_samples(Stored(file), [each.row for each in prompts], prompts[:limit], 0)


def test_responses_belong_to_rows_by_name_index_or_place(tmp_path):
    name = "synthetic/plain/heldout/"
    by_name = stored(tmp_path, *({"example_id": f"{name}{i}", "response": f"{i}"} for i in (3, 0, 1)), limit=2)
    assert [(each.problem, each.text) for each in by_name] == [(0, "0"), (1, "1")]
    ends = ("stop", "length", "max_tokens", "MAX_TOKENS")
    found = stored(tmp_path, *({"text": "a b", "stop_reason": end, "length": "many"} for end in ends))
    assert [each.stop_reason for each in found] == ["stop", "length", "length", "length"]
    assert {each.length for each in found} == {2}
    told = [{"plain": True, "opened": 3}, {"plain": "a"}, {"text": None, "response": "b", "plain": "a"}]
    read = [stored(tmp_path, {"text": "a</s>"} | one)[0].response for one in told]
    assert [(each.plain, each.opened) for each in read] == [("a</s>", ""), ("a", ""), ("b", "")]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([{"index": -1, "response": "7"}], "line 1: no row -1"),
        ([{"index": 4, "response": "7"}], "line 1: no row 4"),
        ([{"index": True, "response": "7"}], "line 1: no row True"),
        ([{"index": 0, "response": "7"}, {"response": "8"}], "line 2: either every line has an example_id or index"),
        ([{"response": "7"}] * 5, "line 5: more lines than the 4 rows; name one by example_id"),
        ([{"example_id": 3, "response": "7"}], "line 1: no row 3"),
        ([{"response": "7", "text": "7"}], "line 1: expected the response"),
    ],
)
def test_a_response_without_its_row_is_refused(tmp_path, lines, fault):
    with pytest.raises(DataError, match=fault):
        stored(tmp_path, *lines)


def test_texts_beyond_a_readers_context_are_counted_on_the_page(tiny_pair, tmp_path):
    """Of all conditions the same texts: a reader with room for short texts only."""
    short = tmp_path / "short"
    shutil.copytree(tiny_pair / "junior", short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 150}))
    file, long = tmp_path / "texts.jsonl", "First 3 plus 2 is 5.\n\n"
    file.write_text("".join(json.dumps({"response": long * n + "\\boxed{5}"}) + "\n" for n in (1, 1, 1, 30)))
    readers = ("--reader", short, "--reader", tiny_pair / "junior")
    judge("M", "--responses", file, *readers, "--data", "synthetic:plain:heldout:4", "--out", tmp_path / "out")
    told = json.loads((tmp_path / "out" / "legibility.json").read_text())
    first, second = told["readers"]
    assert (first["counts"]["problems"], first["counts"]["dropped"], second["counts"]["dropped"]) == (3, 1, 0)
    assert told["notes"] == ["1 of 4 texts are too long for short's context, or empty; it is measured on the others."]
    assert "of 3 problems" in told["verdicts"][0]
    assert "1 of 4 texts" in (tmp_path / "out" / "legibility.html").read_text()
