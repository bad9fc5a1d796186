"""Training on rewards that a verifier gives, from built data to metrics: Countdown, and code with trivial tests."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrl.config import load
from tandemrl.data.builders import build_countdown
from tandemrl.data.eurus import build_eurus
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Row, encode_prompts
from tandemrl.training.loop import train

STEPS = 3


def taught(pair: Path, out: Path, answers: Mapping[str, Sequence[str]], rows: Sequence[Row], *, steps: int) -> Path:
    """The tiny senior, trained until it gives one of a row's ``answers`` (by its id), each about as often."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "senior")
    model = AutoModelForCausalLM.from_pretrained(pair / "senior")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    prompts, dropped = encode_prompts(rows, tokenizer, max_prompt_tokens=2000)
    assert dropped == 0
    rng = random.Random(0)
    for _ in range(steps):
        batch = []
        for row, tokens, _ in rng.choices(prompts, k=4):
            answer = tokenizer.encode(rng.choice(answers[row.example_id]), add_special_tokens=False)
            batch.append((list(tokens), [*answer, tokenizer.eos_token_id]))
        width = max(len(prompt) + len(answer) for prompt, answer in batch)
        inputs, labels = torch.zeros(4, width, dtype=torch.long), torch.full((4, width), -100)
        for i, (prompt, answer) in enumerate(batch):
            inputs[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        logits = model(input_ids=inputs).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def trained(config: str, senior: Path, data: Path, out: Path, *overrides: str) -> list[dict[str, float]]:
    """Three steps on a CPU; returns the metrics of each."""
    settings = [
        *(f"model.senior={senior}", "model.junior=null", "model.dtype=float32", "model.device=cpu"),
        *("model.gradient_checkpointing=false", f"data.train={data}/train.parquet", f"data.eval={data}/test.parquet"),
        *("data.max_prompt_tokens=800", "rollout.group_size=8", "selection.strategy=word", f"output_dir={out}"),
        *("rollout.engine=torch", "rollout.vllm.sleep=false", "rollout.vllm.multiprocess=false"),
        *("train.prompts_per_step=4", "train.mini_batch_prompts=null", "train.tokens_per_micro_batch=8192"),
        *(
            f"train.steps={STEPS}",
            "train.lr=1e-3",
            "train.threads=1",
            "train.eval_every=3",
            "train.eval_first=false",
            "eval.max_tokens=48",
        ),
        *("eval.train_problems=2", "eval.bootstrap=10", "rollout.max_tokens=48"),
    ]
    train(load(config, [*settings, *overrides]), quiet=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def rewards(out: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in (out / "samples.jsonl").read_text().splitlines()]


def test_countdown_trains_on_built_data(tiny_pair: Path, tmp_path: Path) -> None:
    problems = [([2, 3], 6), ([4, 5], 9), ([9, 7], 2), ([8, 2], 4)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"target": t, "nums": n}) + "\n" for n, t in problems * 2))
    build_countdown(source, tmp_path / "data", template="instruct", counts={"train": 4, "test": 4})
    rows = load_rows([str(tmp_path / "data" / "train.parquet")])
    answers = {}
    for row, ((a, b), _) in zip(rows, problems, strict=True):
        given = [f"<answer> {a} {operation} {b} </answer>" for operation in "+-*/"]  # one of them is right
        answers[row.example_id] = [*given, "I give up."]
    senior = taught(tiny_pair, tmp_path / "senior", answers, rows, steps=60)

    steps = trained("countdown", senior, tmp_path / "data", tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert set(rewards(tmp_path / "run")) == {0.01, 0.02, 1.01}
    for line in steps:
        assert 0.01 < line["reward/mean"] < 1.01
        assert line["grad_norm"] > 0


def test_code_trains_on_built_data_with_trivial_tests(tiny_pair: Path, tmp_path: Path) -> None:
    source = tmp_path / "eurus"
    source.mkdir()
    truth = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["1\n", "2\n"]})
    for split in ("train", "validation"):
        lines = [
            {
                "data_source": "codecontests",
                "prompt": [{"role": "user", "content": f"{split} {index}: print what you read."}],
                "ability": "code",
                "reward_model": {"style": "rule", "ground_truth": truth},
            }
            for index in range(4)
        ]
        (source / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_eurus(source, tmp_path / "data", max_tokens=0, expect_rows=0)
    rows = load_rows([str(tmp_path / "data" / "train.parquet")])
    # They pass two, one, none and none of the tests.
    programs = ["print(input())", "print(input())", "print(1)", "print(3)", "print("]
    answers = {row.example_id: [f"```python\n{program}\n```" for program in programs] for row in rows}
    senior = taught(tiny_pair, tmp_path / "senior", answers, rows, steps=100)

    steps = trained("eurus", senior, tmp_path / "data", tmp_path / "run", "loss.kl_coef=0", "loss.kl_in_reward=false")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert set(rewards(tmp_path / "run")) == {0.0, 0.5, 1.0}
    for line in steps:
        assert 0 < line["reward/mean"] < 1
        assert line["grad_norm"] > 0
