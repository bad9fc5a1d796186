import hashlib
import json
from collections import Counter

import pytest

from runs import put
from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.rewards.scoring import Scorer
from tandemrl.tasks.math.rows import BENCHMARK_ROWS, BOXED_SUFFIX, build_benchmark, build_deepscaler


def problems(count, start=0):
    return [{"problem": f"Problem {i}?", "answer": str(i)} for i in range(start, start + count)]


def questions(count):
    return [{"id": i, "question": f"Question {i}?", "answer": i} for i in range(count)]


AMC24 = [{"problem": f"B {i}?", "answer": str(i), "exam": f"2024 AMC 12{'AB'[i % 2]}"} for i in range(45)]
AMC24_UNGRADED = [
    {"problem": "?", "answer": answer, "exam": "2024 AMC 12A"}
    for answer in (r"(0, \frac{1}{2})", r"[\frac{3}{4}, \frac{7}{8}]", r"\frac{\pi}{2} - 2\alpha", "D")
]
AMC25_UNGRADED = [{"question": "?", "answer": answer} for answer in ("4{:}30", "k")]
COPIES = {
    "aime24": [{"problem": f"P{i}?", "solution": rf"It is \boxed{{{i:03}}}, not \boxed{{9}}"} for i in range(30)],
    "aime25": problems(30),
    "aime_2026": problems(30),
    "amc23": questions(40),
    "2024_AMC12": AMC24_UNGRADED[:1] + AMC24 + AMC24_UNGRADED[1:],
    "amc12-2025-non-figure": questions(20) + AMC25_UNGRADED + questions(16),
    "MATH-500": problems(500),
    "minervamath": questions(272),
    "olympiad": [
        {"problem": f"P{i}?", "reward_model": {"ground_truth": str(i), "style": "rule"}, "prompt": None}
        for i in range(581)
    ],
}


@pytest.fixture
def copies(tmp_path):
    folder = tmp_path / "copies"
    for name, records in COPIES.items():
        put(folder / f"{name}.jsonl", *records)
    return folder


# ---- DeepScaleR ----------------------------------------------------------------------------------------------------


def test_deepscaler_has_the_published_counts_and_split(tmp_path):
    records = problems(40_309)
    records[5:5] = [{"problem": "?", "answer": ""}, {"problem": "?", "answer": None}]
    source = tmp_path / "deepscaler.json"
    source.write_text(json.dumps(records))
    manifest = build_deepscaler(source, tmp_path / "out")
    assert {name: split["rows"] for name, split in manifest["splits"].items()} == {"train": 39_309, "heldout": 1000}
    assert manifest["dropped"] == {"no answer": 2}
    assert manifest["shared_prompts"] == {}
    assert manifest["source_sha256"] == {str(source): hashlib.sha256(source.read_bytes()).hexdigest()}

    held, train = (load_rows([str(tmp_path / "out" / f"{name}.parquet")]) for name in ("heldout", "train"))
    positions = [row.extra_info["index"] for row in held]
    # pandas 3.1.1: pd.DataFrame(index=range(40309)).sample(n=1000, random_state=0).index
    assert positions[:8] == [31695, 393, 3110, 34805, 16940, 271, 28459, 22421]
    assert (positions[-3:], sum(positions)) == ([18927, 2800, 14747], 20_242_157)
    assert sorted([*positions, *(row.extra_info["index"] for row in train)]) == list(range(40_309))
    assert all(row.ground_truth == str(row.extra_info["index"]) for row in held)  # the position after the drops
    assert {row.data_source for row in held + train} == {"deepscaler"}
    assert held[0].messages == ({"role": "user", "content": f"Problem 31695?{BOXED_SUFFIX}"},)


# ---- evaluation sets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARK_ROWS)
def test_every_evaluation_set_has_the_published_count_and_is_gradable(name, copies, tmp_path):
    manifest = build_benchmark(name, copies, tmp_path / "out", alone=False)
    assert manifest["splits"]["test"]["rows"] == BENCHMARK_ROWS[name]
    rows = load_rows([str(tmp_path / "out" / name / "test.parquet")])
    assert {row.data_source for row in rows} == {name}
    assert [row.extra_info["index"] for row in rows] == list(range(BENCHMARK_ROWS[name]))
    assert all(row.messages[0]["content"].endswith(BOXED_SUFFIX) for row in rows)
    with Scorer(RewardConfig()) as scorer:
        assert scorer.score([(rows[0], rf"\boxed{{{rows[0].ground_truth}}}")])[0].value == 1.0


def test_aime24_takes_the_first_box_of_the_solution(copies, tmp_path):
    build_benchmark("aime24", copies / "aime24.jsonl", tmp_path)
    rows = load_rows([str(tmp_path / "aime24" / "test.parquet")])
    assert [row.ground_truth for row in rows][:3] == ["000", "001", "002"]
    put(copies / "aime24.jsonl", *COPIES["aime24"][:29], {"problem": "p", "solution": r"It is \fbox{7}."})
    with pytest.raises(DataError, match=r"aime24\.jsonl, line 30, field 'solution': no \\boxed"):
        build_benchmark("aime24", copies, tmp_path)


def test_amc_leaves_out_six_answers_and_names_its_parts(copies, tmp_path):
    manifest = build_benchmark("amc23_25", copies, tmp_path)
    assert manifest["dropped"] == {record["answer"]: 1 for record in AMC24_UNGRADED + AMC25_UNGRADED}
    assert len(manifest["source_sha256"]) == 3
    rows = load_rows([str(tmp_path / "amc23_25" / "test.parquet")])
    subsets = [row.extra_info["subset"] for row in rows]
    assert Counter(subsets) == {"amc23": 40, "amc24_12A": 23, "amc24_12B": 22, "amc25": 36}
    assert not {row.ground_truth for row in rows} & {record["answer"] for record in AMC24_UNGRADED + AMC25_UNGRADED}
