"""Logs for Inspect, read back by Inspect itself."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from runs import cli
from tandemrl.apps.experiments.tiny import train_tokenizer
from tandemrl.apps.report import ReportError
from tandemrl.apps.report.inspect_log import _logs, export_inspect
from tandemrl.apps.report.samples import SampleReader
from tandemrl.data.messages import Response, Transcript
from tandemrl.evals import Sample
from tandemrl.rewards.protocol import NO_SCORE
from tandemrl.types import Rollout

TURNS = ("is 10.", "First 5 plus 5 is 10.")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 5, "b": 5}}}
SAID = (
    {"role": "assistant", "content": "is 10.", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "10"},
    {"role": "assistant", "content": "First 5 plus 5 is 10."},
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps with an episode each, of two rollouts, and an evaluation; its last line is not whole."""
    found = train_tokenizer("plain", 0, vocab_size=320, texts=50)
    found.save_pretrained(tmp_path / "hf" / "best")
    prompt, first, said, last = (
        found.encode(text, add_special_tokens=False) for text in ("How many?", TURNS[0], "10", TURNS[1])
    )
    author = [-1] * len(prompt) + [1] + [0] * (len(first) - 1) + [-1] * len(said) + [1] * len(last)
    channels = (np.array(prompt + first + said + last), np.array(author), np.zeros(len(author)))
    response, told = Response("\n".join(TURNS), "\n".join(TURNS)), Transcript(SAID, {"hops": 2}, {"calls": 1})
    rollouts = [
        Rollout("set/3", 0, 0, 7, *channels, 0.5, {"acc": 1.0}, "eos", 2, 0, told, None, response),
        Rollout("set/3", 0, 1, 8, *channels, 0.0, NO_SCORE.parts, "length", 2, 0, told, None, response),
    ]
    lines = [json.dumps({"step": step} | each.to_json()) + "\n" for step in (1, 2) for each in rollouts]
    (tmp_path / "samples.jsonl").write_text("".join(lines) + '{"step": 3, "te')
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"senior": "/gone/senior"}}))
    sample = Sample(
        0, "set/3", "set", "solo", 0, 7, "is 10.", first, len(first), f"S{len(first)}", 1, 1.0, "eos", 1.0, True, "10"
    )
    config = {"model": "/gone/senior", "data": ["gone.jsonl"], "eval": {"samples": 1, "k": [1]}}
    stored = {
        "schema": 1,
        "phase": "pass-at-k",
        "config": config,
        "versions": {},
        "seeds": {},
        "samples": "pass-at-k.samples.jsonl",
    }
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "pass-at-k.json").write_text(json.dumps(stored | {"metrics": {"macro": {}, "by_set": {}}}))
    (tmp_path / "eval" / "pass-at-k.samples.jsonl").write_text(json.dumps(sample.to_json()) + "\n")
    return tmp_path


def test_inspect_reads_messages_calls_scores_and_authors(run: Path) -> None:
    log = pytest.importorskip("inspect_ai.log", reason="needs inspect-ai: the extra inspect")
    assert "3 logs in" in cli("export", "inspect", str(run))
    names = ["eval-pass-at-k-solo.eval", "step_000001.eval", "step_000002.eval"]
    assert sorted(path.name for path in (run / "inspect").iterdir()) == names
    evaluated, _, second = (log.read_eval_log(run / "inspect" / name) for name in names)
    scored, lost = second.samples
    assert (second.status, second.eval.config.epochs, scored.id, scored.epoch, lost.epoch) == (
        "success",
        2,
        "0/set/3",
        1,
        2,
    )
    assert [(m.role, m.text) for m in scored.messages] == [
        ("user", "How many?"), ("assistant", TURNS[0]), ("tool", "10"), ("assistant", TURNS[1])
    ]  # fmt: skip
    call, reply = scored.messages[1].tool_calls[0], scored.messages[2]
    assert (call.function, call.arguments, reply.tool_call_id, reply.function) == (
        "add",
        {"a": 5, "b": 5},
        call.id,
        "add",
    )
    (one, other), (alone,) = (scored.messages[at].metadata["spans"] for at in (1, 3))
    assert (one[0], other[0], one[1] + other[1], alone) == ("senior", "junior", TURNS[0], ["senior", TURNS[1]])
    assert {name: each.value for name, each in scored.scores.items()} == {"score": 0.5, "acc": 1.0}
    assert (lost.scores, lost.output.stop_reason, scored.metadata["state"], scored.metadata["seed"]) == (
        {},
        "max_tokens",
        {"hops": 2},
        7,
    )
    means = {each.name: (each.metrics["mean"].value, each.unscored_samples) for each in second.results.scores}
    assert means == {"score": (0.5, 1), "acc": (1.0, 1)}
    (sample,) = evaluated.samples
    assert (sample.scores["correct"].value, sample.scores["correct"].answer) == (1.0, "10")
    assert sample.messages[-1].metadata["spans"] == [["senior", "is 10."]]


def test_without_a_tokenizer_there_are_texts_but_no_authors(run: Path) -> None:
    log = pytest.importorskip("inspect_ai.log", reason="needs inspect-ai: the extra inspect")
    shutil.rmtree(run / "hf")
    notes: list[str] = []
    written = export_inspect(run, run / "out", say=notes.append)
    sample = log.read_eval_log(written[0]).samples[0]
    assert [m.metadata["spans"] for m in sample.messages if m.role == "assistant"] == [[], []]
    assert sample.messages[-1].text == TURNS[1]
    assert "tokenizer of /gone/senior was not found" in notes[0]


def test_each_condition_of_a_reader_is_a_log(run: Path) -> None:
    """Its samples have the same problem and number, by which Inspect knows them."""
    file = run / "eval" / "pass-at-k.samples.jsonl"
    line = json.loads(file.read_text())
    file.write_text("".join(json.dumps(line | {"given": given}) + "\n" for given in ("free/0", "free/100")))
    names = [name for name, *_ in _logs(run, SampleReader(run, lambda _: None, None))]
    assert names[2:] == ["eval-pass-at-k-solo-free-0", "eval-pass-at-k-solo-free-100"]


@pytest.mark.parametrize(("package", "said"), [(None, "pip install"), ("there", "no samples")])
def test_what_cannot_be_exported_is_said(tmp_path, monkeypatch, package, said):
    if package is None:
        monkeypatch.setitem(__import__("sys").modules, "inspect_ai.log", None)
    else:
        pytest.importorskip("inspect_ai.log", reason="needs inspect-ai: the extra inspect")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(ReportError, match=said):
        export_inspect(tmp_path)
