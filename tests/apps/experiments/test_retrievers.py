"""The benchmark of retrievers, on random models that call tools now and then."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import agent_tokenizer, qwen3, small_qwen3
from tandemrl.apps.experiments.arms import ExperimentError
from tandemrl.apps.experiments.retrievers import Benchmark, run_retrievers
from tandemrl.evals import EvalError, read_samples
from tandemrl.evals.compare import CompareError, compare

CALLS = [
    '<tool_call>{"name": "retrieve_documents", "arguments": {"query": "ab"}}</tool_call>',
    '<tool_call>{"name": "retrieve_documents", "arguments": {"query": "cd", "top_n": 1}}</tool_call>',
    '<tool_call>{"name": "complete", "arguments": '
    '{"reasoning": "", "final_answer": "ab", "cited_doc_ids": ["1"]}}</tool_call>',
]
SMALL = (
    *("rollout.max_tokens=40", "rollout.turn_tokens=12", "rollout.observation_tokens=120", "rollout.max_turns=3"),
    *("eval.profile=custom", "eval.max_tokens=40", "eval.bootstrap=10", "data.max_prompt_tokens=200"),
    "train.threads=1",
)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Benchmark:
    out = tmp_path_factory.mktemp("agents")
    words = agent_tokenizer(CALLS)
    for name, model in (("one", qwen3), ("two", small_qwen3)):
        model(vocabulary=len(words)).save_pretrained(out / name)
        words.save_pretrained(out / name)
    docs = [{"id": str(i), "title": "", "text": text, "is_supporting": i == 1} for i, text in enumerate(("ab", "cd"))]
    prompt = [{"role": "system", "content": "go"}, {"role": "user", "content": "who"}]
    line = {"prompt": prompt, "data_source": "musique", "reward_model": {"ground_truth": '["ab"]'}}
    rows = [line | {"extra_info": {"docs": docs, "n_hops": 1, "index": i}} for i in range(3)]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Benchmark(
        models=(f"{out}/one", f"{out}/two"),
        data=(f"{out}/rows.jsonl",),
        overrides=SMALL,
        problems=2,
    )


def test_models_by_retrievers(benchmark: Benchmark, tmp_path: Path) -> None:
    results = run_retrievers(benchmark, tmp_path / "out", say=lambda line: None)
    places = [(row["pair"], row["arm"]) for row in results["rows"]]
    assert places == [("one", "hops"), ("one", "golden"), ("two", "hops"), ("two", "golden")]
    searched: list[bool] = []
    for row in results["rows"]:
        home = tmp_path / "out" / row["pair"] / "eval" / row["arm"]
        samples = read_samples(home / "pass-at-k.samples.jsonl")
        assert len(samples) == 4
        assert row["solo/recall"] == pytest.approx(sum(sample.parts["recall"] for sample in samples) / 4)
        searches = [any(each["role"] == "tool" for each in sample.transcript["messages"]) for sample in samples]
        if row["arm"] == "golden":  # whatever is asked, it finds the one supporting document
            assert [sample.parts["recall"] for sample in samples] == [*map(float, searches)]
        searched += searches
    assert any(searched)
    assert not all(searched)
    assert {(c["pair"], c["A"], c["B"]) for c in results["contrasts"]} == {
        ("one", "golden", "hops"),
        ("two", "golden", "hops"),
    }
    recall = [c for c in results["contrasts"] if c["metric"] == "recall"]
    assert [c["difference"]["mean"] for c in recall] == pytest.approx([c["a"] - c["b"] for c in recall])
    assert "retrieval recall" in (tmp_path / "out" / "report.html").read_text()
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("pass-at-k.json")}
    assert run_retrievers(benchmark, tmp_path / "out", say=lambda line: None)["rows"] == results["rows"]
    assert {file: file.stat().st_mtime_ns for file in files} == files
    homes = [tmp_path / "out" / "one" / "eval" / name for name in benchmark.retrievers]
    with pytest.raises(CompareError, match="retrieval"):
        compare(*homes)
    with pytest.raises(EvalError, match="max_turns"):
        run_retrievers(replace(benchmark, overrides=(*SMALL, "rollout.max_turns=2")), tmp_path / "out")
    assert "max_turns=2" not in (tmp_path / "out" / "experiment.json").read_text()
    (tmp_path / "hops").mkdir()
    (tmp_path / "hops" / "experiment.json").write_text('{"name": "hops"}')
    with pytest.raises(ExperimentError, match="hops holds the experiment hops; choose another folder"):
        run_retrievers(benchmark, tmp_path / "hops")
    assert (tmp_path / "hops" / "experiment.json").read_text() == '{"name": "hops"}'
