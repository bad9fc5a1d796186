"""Training with a judge over real HTTP: three steps of a tiny model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fake_judge import FakeJudge, Reply
from runs import lines, put
from tandemrl.config import Config, load
from tandemrl.tasks.math.prime import extract_answer
from tandemrl.training.checkpoint import CheckpointError
from tandemrl.training.loop import train
from tandemrl.training.preflight import NotHereError, Preflight

SMALL = ["model.device=cpu", "model.dtype=float32", "model.gradient_checkpointing=false", "train.threads=1"]
SMALL += ["train.steps=3", "train.eval_first=false", "train.prompts_per_step=4", "train.mini_batch_prompts=4"]
SMALL += ["train.lr=1e-3", "rollout.group_size=4", "data.max_prompt_tokens=256", "eval.bootstrap=0"]
SMALL += ["rollout.engine=torch", "rollout.vllm.sleep=false", "reward.workers=1", "reward.timeout_s=60"]


def text_of(sample: dict) -> str:
    """As the judge reads it: with special tokens, but the end token."""
    return sample["text"].strip()


def changed(before: Path, after: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (before, after))
    return any(not torch.equal(a[name], b[name]) for name in a)


def policy(pair: Path, source: Path, out: Path, url: str | None, *extra: str) -> Config:
    own = [f"model.senior={pair}/senior", f"data.train={source}", "train.eval_every=0", "rollout.max_tokens=48"]
    judge = [f"judge.url={url or 'null'}", "judge.mode=addon", "judge.weight=0.5", "judge.backoff_s=0.01"]
    return load("rrm_policy", [*SMALL, *own, *judge, "judge.concurrency=3", f"output_dir={out}", *extra])


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Word problems that the tiny pair writes about, as rows for a judge."""
    from tandemrl.data.loading import load_rows

    rows = [
        {
            "data_source": "polaris_tinyv",
            "prompt": list(row.messages),
            "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
            "extra_info": {"index": i, "question": f"question {i}", "criteria": f"criteria {i}"},
        }
        for i, row in enumerate(load_rows(["synthetic:plain:train:12"]))
    ]
    return put(tmp_path_factory.mktemp("problems") / "polaris.jsonl", *rows)


def score_of(response: str) -> int:
    """What the fake judge gives, out of 10: any function of the response that varies."""
    return sum(response.encode()) % 11


def with_answers_of_a_first_step(problems: Path, pair: Path, folder: Path) -> Path:
    """The same problems, whose ground truth is what the pair answers: to each second one, what it wrote first."""
    keys = ["train.steps=1", "judge.url=null", "reward.scorers.*=prime"]
    first = train(policy(pair, problems, folder / "first", None, *keys), quiet=True)
    answers: dict[str, str] = {}
    for sample in lines(first / "samples.jsonl"):
        answers.setdefault(sample["example_id"], extract_answer(text_of(sample)))
    rows = lines(problems)
    for row in rows[::2]:
        answer = answers.get(f"polaris_tinyv/{row['extra_info']['index']}")
        row["reward_model"]["ground_truth"] = answer or row["reward_model"]["ground_truth"]
    return put(folder / "answered.jsonl", *rows)


def test_addon_trains_for_three_steps_with_a_judge_over_http(tiny_pair: Path, problems: Path, tmp_path: Path) -> None:
    def judged(prompt: str, number: int) -> str | Reply:
        if number % 7 == 0:
            return Reply(503, b"busy")
        return f"Well.\nTotal Score: {score_of(prompt.partition('Answer:')[2].strip())}/10"

    problems = with_answers_of_a_first_step(problems, tiny_pair, tmp_path)
    with FakeJudge(judged, models=("rrm",)) as judge:
        out = train(policy(tiny_pair, problems, tmp_path / "out", judge.url), quiet=True)
        judge.models = ("another",)
        with pytest.raises(CheckpointError, match="another judge"):
            train(policy(tiny_pair, problems, tmp_path / "out", judge.url, "train.steps=4"), quiet=True)
    metrics, samples = lines(out / "metrics.jsonl"), lines(out / "samples.jsonl")
    assert len(samples) == 3 * 16
    asked = 0
    for sample in samples:
        parts = sample["reward_parts"]
        if parts["rule"]:
            assert (sample["reward"], parts["judge_asked"]) == (1.0, 0.0)
        else:
            asked += 1
            assert sample["reward"] == pytest.approx(0.5 * score_of(text_of(sample)) / 10)
            assert parts["judge_asked"] == 1.0
    assert 0 < asked < 48, [sample["text"] for sample in samples]
    for prompt in judge.prompts:
        number = prompt.partition("question ")[2].split()[0]
        assert f"criteria {number}\n" in prompt
    assert judge.most_at_once <= 3
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert sum(line["reward/judge_asked"] for line in metrics) * 16 == pytest.approx(asked)
    assert changed(tiny_pair / "senior", out / "hf" / "step_3")
    with FakeJudge(judged, models=("rrm",)) as moved:  # the same judge at another address may go on
        changes = ["train.steps=4", "judge.concurrency=2", "judge.timeout_s=30"]
        train(policy(tiny_pair, problems, tmp_path / "out", moved.url, *changes), quiet=True)
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_dry_run_does_not_wait_for_a_server(tiny_pair: Path, problems: Path, tmp_path: Path) -> None:
    waits = policy(tiny_pair, problems, tmp_path / "out", "http://127.0.0.1:9/v1", "judge.wait_s=100")
    with pytest.raises(NotHereError, match=r"train waits for http://127.*:9/v1 up to judge\.wait_s=100"):
        Preflight(waits, downloads=False).endpoint()
