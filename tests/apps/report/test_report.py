"""Reports: what is found, how it is averaged, and a page that is whole, safe and says who wrote what."""

import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runs import cli
from tandemrl.apps.experiments.tiny import train_tokenizer
from tandemrl.apps.report import ReportError, build_report, headlines, write_report
from tandemrl.apps.report.page import to_html
from tandemrl.apps.report.provenance import caveats
from tandemrl.apps.report.records import discover
from tandemrl.apps.report.tables import SOLO, estimate
from tandemrl.config import ConfigError
from tandemrl.evals import EvalError, Sample, authors_of
from tandemrl.training.authored import authored_spans
from tandemrl.training.tracking import write_eval_texts
from tandemrl.types import Author, Rollout

TEXT = "First 5 plus 5 is 10.\n\nNext 10 minus 2 is 8.\n\n\\boxed{8}"
VERSIONS = {"python": "3.11", "torch": "2.13", "git_revision": "abc123", "git_dirty": False}


# ------------------------------------------------------------------------------------------------- a folder of results


def macro(values: dict[str, float]) -> dict[str, float]:
    ends = {"": 0.0, "/low": -0.01, "/high": 0.01}
    return {f"{name}{end}": value + shift for name, value in values.items() for end, shift in ends.items()}


def write_phase(folder: Path, phase: str, values: dict[str, float], samples: list[dict] = [], **config: Any) -> None:  # noqa: B006
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        "schema": 1,
        "phase": phase,
        "config": {"model": "nowhere", "data": ["nothing.jsonl"], "eval": {"samples": 4, "k": [1, 4]}} | config,
        "versions": VERSIONS,
        "seeds": {"sampling": 0},
        "metrics": {"macro": macro(values) | {"problems": 8}, "by_set": {}},
        "samples": f"{phase}.samples.jsonl",
    }
    (folder / f"{phase}.json").write_text(json.dumps(stored))
    (folder / f"{phase}.samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))


def sample(tokens: list[int], author: str, text: str, arm: str = "solo", problem: int = 0, **more: Any) -> dict:
    fixed = {"problem": problem, "example_id": f"set/{problem}", "set": "set", "arm": arm, "sample": 0, "key": 1}
    wrote = {"text": text, "tokens": tokens, "length": len(tokens), "author": author, "rounds": 1, "senior_share": 1.0}
    return fixed | wrote | {"stop_reason": "eos", "score": 1.0, "correct": True, "answer": "8"} | more


def write_run(folder: Path, steps: int = 4, offset: float = 0.0, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "reward/mean": offset + step / 100, "tandem/senior_frac": 0.5, "time/step": 2.0}
        lines.append(line | ({"eval/pass@1": 0.5 + step / 100} if step % 2 == 0 else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(json.dumps({"train": {"steps": steps, "lr": 1e-4}} | config))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model") / "senior"
    found = train_tokenizer("plain", 0, vocab_size=320, texts=50)
    found.save_pretrained(folder)
    return found, folder


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory, tokenizer: tuple[Any, Path]) -> Path:
    """Two arms and the base over three seeds, in the layout of an experiment."""
    root = tmp_path_factory.mktemp("exp")
    found, folder = tokenizer
    model = shutil.copytree(folder, root / "jargon" / "seed-0" / "pair" / "senior")
    tokens = found.encode(TEXT, add_special_tokens=False)
    author = f"S7J4S{len(tokens) - 11}"
    for seed in range(3):
        home = root / "jargon" / f"seed-{seed}"
        for arm, value in (("base", 0.5), ("grpo", 0.9), ("tandem", 0.94)):
            folder = home / "eval" / arm
            solo = {"pass@1": value + 0.02 * seed, "pass@4": 0.99, "length": 41.25}
            evil = sample(tokens, f"S{len(tokens)}", "<script>alert(1)</script>", problem=1, correct=False)
            write_phase(folder, "pass-at-k", solo, [sample(tokens, f"S{len(tokens)}", TEXT), evil], model=str(model))
            arms = [sample(tokens, author, TEXT, arm) for arm in ("senior_first", "junior_first")]
            both = {"senior_first/pass@1": value / 2, "junior_first/pass@1": value / 3, "pass@1": 0.4}
            write_phase(folder, "handoff", both, arms, model=str(model))
            write_phase(folder, "legibility", {"cross_entropy": 0.3 if arm == "tandem" else 11.0})
            if arm != "base":
                write_run(home / arm, offset=seed / 10)
    difference = {"mean": 0.02, "low": 0.01, "high": 0.03}
    contrast = {"pair": "jargon", "A": "tandem", "B": "grpo", "a": 0.7, "b": 0.5, "verdict": "A > B", "problems": 8}
    contrasts = [
        contrast | {"phase": "handoff", "metric": "senior_first/pass@1", "difference": difference},
        contrast | {"phase": "pass-at-k", "metric": "pass@1", "difference": {"mean": 0.04, "low": -0.01, "high": 0.09}},
        contrast
        | {"phase": "pass-at-k", "metric": "maj@4", "difference": {"mean": -0.04, "low": -0.06, "high": -0.02}},
    ]
    solo = (0.93, 0.95, 0.97)
    rows = [
        {"pair": "jargon", "seed": s, "arm": "tandem", "jargon_rate": 0.25, "solo/pass@1": solo[s]} for s in range(3)
    ]
    claim = {"pair": "jargon", "claim": "a < b & c", "bar": ">= 0.2", "values": [0.1, 0.3], "verdict": "fails"}
    claims = [
        claim,
        claim | {"claim": "good", "verdict": "holds"},
        claim | {"claim": "between", "verdict": "undecided"},
        claim | {"claim": "seeds", "values": [], "verdict": "not asked of one seed"},
    ]
    arms = [{"name": "grpo", "title": "GRPO"}, {"name": "tandem", "title": "tandem <GRPO>"}]
    (root / "experiment.json").write_text(json.dumps({"name": "claims", "arms": arms, "seeds": [0, 1, 2]}))
    (root / "results.json").write_text(json.dumps({"rows": rows, "contrasts": contrasts, "claims": claims}))
    return root


@pytest.fixture(scope="module")
def page(experiment: Path) -> str:
    return to_html(build_report(experiment))


class Page(HTMLParser):
    """Elements, ids and references of a page, of which every element is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.ids += [found["id"]] if "id" in found else []
        self.references += [found[name] for name in ("href", "src", "xlink:href", "action", "data") if name in found]
        self.stack += [tag] if tag not in ("meta", "link", "br", "img", "input", "hr") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        depth = len(self.stack)
        self.handle_starttag(tag, attrs)
        del self.stack[depth:]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


# ------------------------------------------------------------------------------------------------------------- records


def test_paths_that_differ_in_the_seed_are_one_arm(experiment: Path) -> None:
    (setting,) = discover(experiment).settings
    assert setting.name == "jargon"
    assert [(arm.name, arm.title) for arm in setting.arms] == [
        ("base", "before training"),
        ("grpo", "GRPO"),
        ("tandem", "tandem <GRPO>"),
    ]
    assert [(len(arm.runs), len(arm.evaluations)) for arm in setting.arms] == [(0, 9), (3, 9), (3, 9)]
    assert [arm.seeds for arm in setting.arms] == [["0", "1", "2"]] * 3
    assert setting.arms[2].extra["1"] == {"jargon_rate": 0.25, "solo/pass@1": 0.95}


def test_seeds_are_in_numeric_order_and_single_folders_have_no_setting(tmp_path: Path) -> None:
    for seed in (10, 9):
        write_run(tmp_path / f"seed-{seed}" / "mine")
    (setting,) = discover(tmp_path).settings
    assert (setting.name, setting.arms[0].seeds) == ("", ["9", "10"])
    (setting,) = discover(tmp_path / "seed-9" / "mine").settings
    assert [arm.name for arm in setting.arms] == ["mine"]


def test_a_result_file_with_a_name_of_its_own_is_an_arm(tmp_path: Path) -> None:
    for name in ("before", "after"):
        write_phase(tmp_path, "pass-at-k", {"pass@1": 0.5})
        (tmp_path / "pass-at-k.json").rename(tmp_path / f"{name}.json")
        (tmp_path / "pass-at-k.samples.jsonl").rename(tmp_path / f"{name}.samples.jsonl")
    assert [arm.name for arm in discover(tmp_path).settings[0].arms] == ["after", "before"]


def test_an_estimate_over_seeds_is_students_interval(experiment: Path) -> None:
    base, grpo, tandem = discover(experiment).settings[0].arms
    found = estimate(grpo, SOLO)
    values = np.array([0.90, 0.92, 0.94])
    half = 4.302652729911275 * values.std(ddof=1) / np.sqrt(3)  # Student's t, 2 degrees of freedom, .975
    assert found is not None
    np.testing.assert_allclose(found[:3], [0.92, 0.92 - half, 0.92 + half])
    assert {seed: value[:3] for seed, value in found.by_seed.items()}["1"] == pytest.approx((0.92, 0.91, 0.93))
    top = estimate(tandem, SOLO)
    assert top is not None
    assert top.high == 1.0  # a probability
    assert estimate(base, SOLO._replace(metric="pass@7")) is None


def test_an_empty_or_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no run .* and no evaluation"):
        build_report(tmp_path)
    with pytest.raises(ReportError, match=r"nowhere: no such folder"):
        build_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', r"metrics\.jsonl: not readable"),
        ("config.yaml", "a: [", r"config\.yaml, line 1: not readable as YAML"),
        ("tandem.json", '{"schema": 1, "phase": "tandem"}', r"tandem\.json: not an evaluation result of schema 1"),
        ("results.json", '{"contrasts": [{"phase": "x"}]}', r"results\.json: .*KeyError\('metric'\)"),
        ("experiment.json", "[]", r"experiment\.json: expected a JSON object"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises((ReportError, EvalError, ConfigError), match=message):
        build_report(tmp_path)


def test_two_files_for_one_place_are_refused(tmp_path: Path) -> None:
    write_phase(tmp_path / "a", "tandem", {"pass@1": 0.5})
    write_phase(tmp_path / "a" / "eval", "tandem", {"pass@1": 0.6})
    with pytest.raises(ReportError, match=r"a/tandem\.json and .*a/eval/tandem\.json are the same"):
        discover(tmp_path)


def test_a_run_says_how_far_it_is_and_why_it_ended(tmp_path: Path) -> None:
    """A line that is being written is left out."""
    mine = {"name": "mine.relay", "signature": "relay:0"}
    write_run(tmp_path / "run", train={"steps": 9}, functions={"strategy": mine})
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')
    assert "run is at step 4 of 9." in caveats(discover(tmp_path))
    (tmp_path / "run" / "stopped.json").write_text('{"step": 4, "reason": "GraderError: step 5, score: no judge"}')
    said = caveats(discover(tmp_path))
    assert "run stopped at step 4 of 9: GraderError: step 5, score: no judge" in said
    assert any(each.startswith("run was trained with a Python function as strategy: mine.relay.") for each in said)
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert "run stopped at step 0 of 9: GraderError: step 5, score: no judge" in caveats(discover(tmp_path))


# ---------------------------------------------------------------------------------------------------------------- page


def test_the_page_is_well_formed_and_refers_to_nothing_outside(page: str) -> None:
    """What files say is escaped."""
    for text in ("&lt;script&gt;alert(1)&lt;/script&gt;", "tandem &lt;GRPO&gt;", "a &lt; b &amp; c"):
        assert text in page
    found = Page(page)
    assert found.tags["article"] > 3
    assert found.tags["script"] == found.tags["img"] == found.tags["link"] == found.tags["iframe"] == 0
    assert len(set(found.ids)) == len(found.ids)
    assert found.references
    assert all(each[:1] == "#" and each[1:] in found.ids for each in found.references)
    inside = re.findall(r"url\(([^)]*)\)", page)
    assert all(reference.removeprefix("#") in found.ids for reference in inside)
    assert "@import" not in page
    assert "http" not in page
    assert len(page) < 500_000


def test_the_page_begins_with_a_sentence_a_table_and_a_figure(page: str) -> None:
    before = page.partition("<details>")[0]
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', before)
    assert lead == (
        "tandem &lt;GRPO&gt; against GRPO: better in handoff, senior first (+0.020); "
        "no difference shown in solo pass@1 (+0.040)."
    )
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)", before.partition("<thead>")[2].partition("</thead>")[0])
    assert heads == ["", "solo pass@1 ↑", "handoff, senior first ↑", "junior CE ↓"]
    assert before.count("<article>") == 3  # a sample per arm
    assert before.count("<figcaption>") == 1
    assert page.partition("<details>")[2].count("<article>") > 3
    assert page.index("Differences between arms") < page.index("Curves") < page.index("What this does not show")


def test_samples_show_who_wrote_what(page: str, tokenizer: tuple[Any, Path]) -> None:
    found, _ = tokenizer
    tokens = found.encode(TEXT, add_special_tokens=False)
    runs = [("senior", 0, 7), ("junior", 7, 11), ("senior", 11, len(tokens))]
    wanted = [(who, found.decode(tokens[a:b])) for who, a, b in runs]
    body = page[page.index("<h3>Handoff, senior first: the first problem</h3>") :]
    text = re.search(r'<div class="text"[^>]*>(.*?)</div>', body, flags=re.DOTALL)
    assert text is not None
    plain = text[1].replace('<span class="step">¶</span>', "¶")
    spans = re.findall(r'<span class="(senior|junior)">(.*?)</span>(\n*)', plain, flags=re.DOTALL)
    assert [(who, body + after) for who, body, after in spans] == [(w, p.replace("\n\n", "¶\n")) for w, p in wanted]
    assert "".join(body + after for _, body, after in spans).replace("¶\n", "\n\n") == TEXT
    assert "✓ correct" in page
    assert "✗ wrong" in page
    assert f"{len(tokens)} tokens, {100 * (len(tokens) - 4) / len(tokens):.0f} % senior" in page


EPISODE = {
    "messages": [
        {"role": "assistant", "content": "is 10.", "tool_calls": [{"function": {"name": "search"}}]},
        {"role": "tool", "content": "</span></div><script>alert(2)</script> \ud800 \u202e"},
        {"role": "assistant", "content": "is 8."},
    ],
    "state": {},
    "counts": {"tool_calls": 1.0, "tool_errors": 0.0},
}


def test_an_episode_shows_turns_authors_and_what_the_world_said(tmp_path: Path, tokenizer: tuple[Any, Path]) -> None:
    """The senior's turn, what the world says, and a turn of the junior's; three further tokens are the world's."""
    found, folder = tokenizer
    first, second = (found.encode(text, add_special_tokens=False) for text in ("is 10.", "is 8."))
    line = sample([*first, 5, 6, 7, *second], f"S{len(first)}C3J{len(second)}", "is 10.\nis 8.", turns=2)
    line |= {"transcript": EPISODE, "length": len(first) + len(second), "stop_reason": "turns"}
    write_phase(tmp_path, "pass-at-k", {"pass@1": 0.5}, [line])
    report = build_report(tmp_path, tokenizer=folder)
    shown = report.galleries[""][0].problems[0].shown[0][1]
    said = "</span></div><script>alert(2)</script> ? \u202e"
    assert shown.spans == [(Author.SENIOR, "is 10."), (Author.CONTEXT, said), (Author.JUNIOR, "is 8.")]
    written = [len(first), len(second)]
    assert (shown.tokens, shown.senior_share) == (sum(written), pytest.approx(written[0] / sum(written)))
    html = to_html(report)
    assert Page(html).tags["script"] == 0
    assert '<span class="observation">&lt;/span&gt;&lt;/div&gt;&lt;script&gt;' in html
    assert f"{sum(written)} tokens, {100 * written[0] / sum(written):.0f} % senior in 2 turns, out of turns" in html
    assert "1 tool calls" in html
    assert "tool errors" not in html
    write_report(report)  # a lone surrogate can be written to no file


def test_evaluated_arms_that_no_experiment_compared_are_compared(tmp_path: Path) -> None:
    once = {"samples": 1, "k": [1]}
    for arm, correct in (("base", "0000"), ("mine", "1110")):
        rows = [
            sample([1], "S1", "x", problem=number, correct=right == "1", score=float(right))
            for number, right in enumerate(correct)
        ]
        write_phase(tmp_path / arm, "pass-at-k", {"pass@1": sum(map(int, correct)) / 4}, rows, eval=once)
    (setting,) = build_report(tmp_path).records.settings
    (contrast,) = [each for each in setting.contrasts if each.metric == "pass@1"]
    assert (contrast.a, contrast.b, contrast.difference.mean) == ("mine", "base", 0.75)
    page = to_html(build_report(tmp_path))
    assert '<p class="lead">mine against base: better in solo pass@1 (+0.750).</p>' in page

    write_phase(tmp_path / "other", "pass-at-k", {"pass@1": 1.0}, [sample([1], "S1", "x", problem=9)], eval=once)
    caveats = build_report(tmp_path).caveats
    assert any(each.startswith("other and base cannot be compared: ") for each in caveats)


def test_only_shared_seeds_are_compared(tmp_path: Path) -> None:
    right = {("base", 0): "1000", ("base", 2): "0000", ("mine", 0): "1100", ("mine", 1): "1111"}
    for (arm, seed), correct in right.items():
        rows = [sample([1], "S1", "x", problem=i, correct=c == "1", score=float(c)) for i, c in enumerate(correct)]
        once = {"samples": 1, "k": [1]}
        write_phase(tmp_path / f"seed-{seed}" / arm, "pass-at-k", {"pass@1": correct.count("1") / 4}, rows, eval=once)
    built = build_report(tmp_path)
    (contrast,) = [each for each in built.records.settings[0].contrasts if each.metric == "pass@1"]
    assert contrast.difference.mean == 0.25  # of seed 0
    assert "mine and base are compared over the seeds of both only: 0." in built.caveats
    for arm, seed in (("base", 0), ("mine", 0)):
        shutil.rmtree(tmp_path / f"seed-{seed}" / arm)
    built = build_report(tmp_path)
    assert built.records.settings[0].contrasts == []
    assert "mine and base are not compared: they have no seed in common." in built.caveats


def test_runs_without_an_evaluation_are_compared_by_their_last_one(tmp_path: Path) -> None:
    for arm, right in (("grpo", 0), ("tandem", 1)):
        write_run(tmp_path / arm, eval={"train_samples": 1, "k": [1]})
        texts = [sample([7], "S1", "t", problem=i) | {"score": 0.0, "correct": i < 2 * right} for i in range(3)]
        write_eval_texts(tmp_path / arm, 4, {"eval": [Sample(**text) for text in texts]})
    built = build_report(tmp_path)
    differences = {(each.metric, each.a, each.b): each.difference.mean for each in built.records.settings[0].contrasts}
    assert differences["pass@1", "tandem", "grpo"] == pytest.approx(2 / 3)
    page = to_html(built)
    assert re.search(r"tandem against grpo: [a-z ]+ in held-out: pass@1 \(\+0\.667", page)
    assert '<th scope="row">held-out: pass@1</th><td>+0.667</td><td>[' in page


def test_without_a_tokenizer_texts_have_no_authors_and_the_page_says_so(tmp_path: Path) -> None:
    write_phase(tmp_path / "a", "pass-at-k", {"pass@1": 0.5}, [sample([1, 2], "S1J1", "five\n\nsix")])
    report = build_report(tmp_path)
    (gallery,) = report.galleries[""]
    assert gallery.problems[0].shown[0][1].spans == [(None, "five\n\nsix")]
    assert any("tokenizer of nowhere was not found" in caveat for caveat in report.caveats)
    assert 'five<span class="step">¶</span>\nsix' in to_html(report)


def test_the_junior_alone_is_a_row_of_its_own(tmp_path: Path) -> None:
    for arm in ("base", "grpo"):
        once = {"samples": 1, "k": [1]}
        write_phase(tmp_path / arm, "pass-at-k", {"pass@1": 0.25}, [sample([1], "S1", "x")], eval=once)
        write_phase(tmp_path / arm, "junior", {"pass@1": 0.523, "cross_entropy": 0.153}, [sample([1], "J1", "x")])
    report = build_report(tmp_path)
    told = headlines(report).splitlines()
    assert [line.split()[2] for line in told if line.startswith("  junior alone")] == ["0.523", "0.153"]
    assert "junior alone</th>" in to_html(report)


@pytest.mark.parametrize("export", ["best", "step_20"])
@pytest.mark.parametrize("place", ["", "eval/last"])
def test_a_moved_run_finds_the_tokenizer_in_its_own_exports(export, place, tmp_path, tokenizer):
    found, folder = tokenizer
    run = tmp_path / "moved" / "run"
    shutil.copytree(folder, run / "hf" / export)
    tokens = found.encode("is 10.", add_special_tokens=False)
    samples = [sample(tokens, f"J{len(tokens)}", "is 10.")]
    write_phase(run / place, "pass-at-k", {"pass@1": 0.5}, samples, model="/gone/tiny/senior")
    for top in (run, tmp_path):
        (gallery,) = next(iter(build_report(top).galleries.values()))
        assert gallery.problems[0].shown[0][1].spans == [(Author.JUNIOR, "is 10.")]


def test_training_samples_stand_in_where_nothing_was_evaluated(tmp_path: Path, tokenizer: tuple[Any, Path]) -> None:
    found, folder = tokenizer
    shutil.copytree(folder, tmp_path / "run" / "hf" / "best")
    prompt, response = (found.encode(text, add_special_tokens=False) for text in ("How many?", "is 10."))
    write_run(tmp_path / "run", model={"senior": "/gone/senior"})
    author = np.array([-1] * len(prompt) + [1] + [0] * (len(response) - 1))
    lines = []
    for step, reward in ((1, 0.0), (2, 0.5)):
        rollout = Rollout("set/3", 0, 0, 7, np.array(prompt + response), author, np.zeros(len(author)), reward)
        lines += [{"step": step, "text": "is 10."} | rollout.to_json()]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "te'
    (tmp_path / "run" / "samples.jsonl").write_text(text)
    (gallery,) = build_report(tmp_path).galleries[""]
    (problem,) = gallery.problems
    shown = problem.shown[0][1]
    assert (gallery.kind, problem.example_id, problem.question) == ("Training, last step", "set/3", "How many?")
    assert (shown.line["reward"], shown.line.get("correct")) == (0.5, None)
    assert [who for who, _ in shown.spans] == [Author.SENIOR, Author.JUNIOR]
    assert "".join(part for _, part in shown.spans) == "is 10."


def test_authors_that_do_not_fit_the_text_are_not_shown(tmp_path: Path, tokenizer: tuple[Any, Path]) -> None:
    write_phase(tmp_path, "pass-at-k", {"pass@1": 0.5}, [sample([1, 2], "S1", "x")])
    report = build_report(tmp_path, tokenizer=tokenizer[1])
    assert report.galleries[""][0].problems[0].shown[0][1].spans == [(None, "x")]
    assert any("does not give the texts of" in caveat for caveat in report.caveats)
    with pytest.raises(ValueError, match="run lengths"):
        authors_of("S1X2")


def test_missing_phases_and_missing_samples_leave_the_rest(tmp_path: Path) -> None:
    write_phase(tmp_path / "a", "pass-at-k", {"pass@1": 0.5})
    write_phase(tmp_path / "b", "legibility", {"cross_entropy": 0.25})
    (tmp_path / "a" / "pass-at-k.samples.jsonl").unlink()
    report = build_report(tmp_path)
    text = to_html(report)
    assert text.count('<span class="none">–</span>') == 2
    assert ">junior CE" in text
    assert "<figcaption>" not in text  # no arm has both solo and handoff
    assert "Training reward" not in text
    assert any("pass-at-k.samples.jsonl is missing" in caveat for caveat in report.caveats)


def test_differences_say_only_what_their_intervals_exclude(page: str) -> None:
    rows = {
        cells[0]: cells[1:]
        for row in re.findall(r"<tr>(.*?)</tr>", page.partition("Differences between arms</summary>")[2], re.DOTALL)
        if len(cells := re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row)) == 4 and cells[1].startswith(("+", "−"))
    }
    assert rows == {
        "handoff, senior first": ["+0.020", "[+0.010, +0.030]", "better"],
        "solo pass@1": ["+0.040", "[−0.010, +0.090]", "no difference shown"],
        "pass-at-k: maj@4": ["−0.040", "[−0.060, −0.020]", "worse"],
    }


def test_a_cross_is_for_a_claim_that_fails(page: str) -> None:
    shown = re.findall(r'<td class="text (\w+)">(.) ([\w ]+)</td>', page.partition("Claims: 1 of 4 hold</summary>")[2])
    assert shown == [
        ("wrong", "✗", "fails"),
        ("right", "✓", "holds"),
        ("meta", "–", "undecided"),
        ("meta", "–", "not asked of one seed"),
    ]


def test_caveats_point_out_few_seeds_and_unequal_configurations(tmp_path: Path) -> None:
    for seed, rate in ((0, 1e-4), (1, 3e-4)):
        path = tmp_path / "p" / f"seed-{seed}"
        write_run(path / "a", train={"lr": rate, "seed": seed, "steps": 4}, model={"senior": str(path / "pair")})
        write_phase(path / "eval" / "a", "pass-at-k", {"pass@1": 0.5}, model=str(path / "a" / "hf"))
        write_phase(path / "eval" / "b", "pass-at-k", {"pass@1": 0.5}, data=["other.jsonl"])
    write_phase(tmp_path / "p" / "seed-0" / "eval" / "a", "tandem", {"pass@1": 0.5, "score_timeouts": 2})
    caveats = build_report(tmp_path).caveats
    assert any("2 seeds (p/a, p/b)" in caveat for caveat in caveats)
    assert "The seeds of p/a differ in train: train.lr (0.0001 / 0.0003)." in caveats
    assert any(each.startswith("b and a cannot be compared: ") for each in caveats)
    assert "p/a: tandem has 1 of 2 seeds." in caveats
    assert "p/a, seed 0, tandem: 2 answers could not be scored in time and count as wrong." in caveats


# ------------------------------------------------------------------------------------------------------------- numbers


def test_characters_of_several_tokens_side_by_side_are_whole(tokenizer: tuple[Any, Path]) -> None:
    """Where each token is a span of its own, each character is in the span of its last token."""
    found, _ = tokenizer
    text = "日本語🙂é!"
    tokens = found.encode(text, add_special_tokens=False)
    spans = [part for _, part in authored_spans(tokens, [i % 2 for i in range(len(tokens))], found.decode)]
    assert [part for part in spans if part] == [*text]
    assert [i for i, part in enumerate(spans) if part] == [2, 5, 8, 12, 14, 15]  # by the lengths in UTF-8


def test_spans_join_to_the_text_with_a_decoder_that_looks_back() -> None:
    def decode(tokens: list[int]) -> str:  # like SentencePiece: no space before the first word
        return " ".join(f"w{token}" for token in tokens)

    spans = authored_spans([1, 2, 3, 4, 5], [1, 1, 0, 1, 0], decode)
    assert [text for _, text in spans] == ["w1 w2", " w3", " w4", " w5"]


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    out = tmp_path / "site" / "index.html"
    cli("report", str(tmp_path), "--out", str(out), "--title", "Mine")
    assert "<h1>Mine</h1>" in out.read_text()
