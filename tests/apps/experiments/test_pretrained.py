"""Warm starts on rows with solutions, pairs of a pretrained model, and their experiment."""

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import real_model
from runs import cli, evaluate_phase
from tandemrl.apps.experiments import pretrained
from tandemrl.apps.experiments.arms import EXPERIMENTS, Experiment
from tandemrl.apps.experiments.experiment import run_experiment
from tandemrl.apps.experiments.pretrained import MAX_PROMPT_TOKENS, RECIPE, build_pretrained_pair
from tandemrl.apps.experiments.tiny import train_tokenizer
from tandemrl.apps.experiments.warm_start import Lesson, shuffled, solution_lesson, solved_rows
from tandemrl.config import load
from tandemrl.data.rows import SOLUTION, DataError, Row
from tandemrl.tasks.generated.word_problems import MAX_TOKENS, PAIRS, generate

STEPS = 2
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers that stands for the pretrained model, with a tokenizer of its own."""
    rows = generate("word_problems", "train", 400, 0)
    texts = [text for row in rows for text in (f"user\n{row.messages[0]['content']}", row.extra_info[SOLUTION])]
    tokenizer = train_tokenizer("plain", 0, vocab_size=320, texts=10).train_new_from_iterator(texts, 700)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        llama = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fetched(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The hub cannot be reached, and its cache has the model."""
    cache = tmp_path_factory.mktemp("cache")
    repo = cache / f"models--{pretrained.MODEL.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(model, repo / "snapshots" / COMMIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        patch.setattr(pretrained, "RECIPE", replace(RECIPE, eval_rows=4))
        yield


class Built(NamedTuple):
    folder: Path
    manifest: dict[str, Any]


@pytest.fixture(scope="module")
def built(fetched: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Built]:
    """Both pairs, each after so few steps that they have learnt next to nothing."""
    found = {}
    for pair in PAIRS:
        out = tmp_path_factory.mktemp(pair) / "pair"
        found[pair] = Built(out, build_pretrained_pair(out, pair=pair, steps=STEPS))
    return found


# ---------------------------------------------------------------------------------------------------------- warm start


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def trained_by_hand(model: Path, solved: list[list[Row]]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights after each step of the published recipe, with one sequence at a time and no padding."""
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for batch in solved:
        total, count = torch.zeros(()), 0
        for row in batch:
            prompt = tokenizer.apply_chat_template([*row.messages], add_generation_prompt=True, return_dict=False)
            solution = row.extra_info[SOLUTION]
            response = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            logprobs = policy(torch.tensor([[*prompt, *response]])).logits[0].log_softmax(-1)
            for place, token in enumerate(response, len(prompt) - 1):
                total = total - logprobs[place, token]
            count += len(response)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        yield {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}


def drawn(model: Path, pair: str, batches: int) -> list[list[Row]]:
    """What a pair learns from in its first steps."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = generate(pair, "train", 2048 + 1024, 0)[2048:]  # what follows the problems of reinforcement learning
    stream = shuffled(solved_rows(rows, tokenizer, source=pair, max_prompt_tokens=MAX_PROMPT_TOKENS), 0)
    found = [[lesson.row for lesson in itertools.islice(stream, 8)] for _ in range(batches)]
    assert all(row in rows for batch in found for row in batch)
    return found  # type: ignore[return-value]  # each has its row


def test_junior_and_senior_are_what_a_plain_loop_gives(built: dict[str, Built], model: Path) -> None:
    plain, terse = (drawn(model, pair, 2 * STEPS) for pair in PAIRS)
    for pair, batches in (("word_problems", plain), ("word_problems_terse", [*plain[:STEPS], *terse[STEPS:]])):
        states = list(trained_by_hand(model, batches))
        for name, expected in (("junior", states[STEPS - 1]), ("senior", states[-1])):
            found = weights(built[pair].folder / name)
            assert all(torch.allclose(tensor, expected[key], atol=2e-6) for key, tensor in found.items())
        assert max((states[-1][key] - states[STEPS - 1][key]).abs().max() for key in found) > 1e-4


def test_a_finished_pair_is_kept_and_a_damaged_one_is_not(built: dict[str, Built], tmp_path: Path) -> None:
    out, manifest = built["word_problems"]
    assert manifest["source"] == f"hub {pretrained.MODEL}@{COMMIT}"
    assert build_pretrained_pair(out, steps=STEPS, progress=pytest.fail) == manifest
    with pytest.raises(FileExistsError, match="seed 0, which runs may rely on"):
        build_pretrained_pair(out, seed=1, steps=STEPS)
    with pytest.raises(FileExistsError, match="holds the word_problems pair"):
        build_pretrained_pair(out, pair="word_problems_terse", steps=STEPS)
    with pytest.raises(DataError, match="known: word_problems, word_problems_terse"):
        build_pretrained_pair(tmp_path / "x", pair="plain")
    copied = tmp_path / "pair"
    shutil.copytree(out, copied)
    (copied / "junior" / "model.safetensors").write_bytes(b"torn")
    assert build_pretrained_pair(copied, steps=STEPS) == manifest
    assert weights(copied / "junior").keys() == weights(out / "junior").keys()


def test_only_responses_and_their_eos_are_learnt(model: Path) -> None:
    """Also where the tokenizer puts a token before every text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    eos, prompt, response = tokenizer.eos_token_id, tokenizer("a b")["input_ids"], tokenizer("#### 3")["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.eos_token} $A", special_tokens=[(tokenizer.eos_token, eos)]
    )
    assert tokenizer("#")["input_ids"][0] == eos
    weights = [0.0] * len(prompt) + [1.0] * (len(response) + 1)
    assert solution_lesson(tokenizer, prompt, "#### 3") == (None, [*prompt, *response, eos], weights)


def test_every_row_is_learnt_once_in_every_epoch() -> None:
    stream = shuffled([Lesson(None, [i], [1.0]) for i in range(6)], 0)
    firsts = [lesson.tokens[0] for lesson in itertools.islice(stream, 12)]
    assert sorted(firsts[:6]) == sorted(firsts[6:]) == list(range(6))
    assert firsts[:6] != firsts[6:]
    with pytest.raises(DataError, match="no text to learn from"):
        next(shuffled([], 0))


def test_the_command_learns_from_gsm8k_as_it_is_published(model: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "train.jsonl", tmp_path / "out"
    lines = [{"question": f"Tom has {i} apples?", "answer": f"He has {i}.\n#### {i}"} for i in range(4)]
    lines.append({"question": "apples " * 300, "answer": "#### 1"})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--model", str(model), "--data", str(data), "--out", str(out), "--steps", "3", "--batch-size", "2"]
    assert "3 steps on 4 solutions (1 left out), loss" in cli(
        "model", "warm-start", *options, "--max-prompt-tokens", "200", "--device", "cpu"
    )
    before, after = weights(model), weights(out)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert "choose another folder" in cli("model", "warm-start", *options, fails=2)
    other = [*options[:-6], "--out", str(tmp_path / "new"), "--data", "synthetic:plain:train:2"]
    assert "synthetic:plain:train:2, row synthetic/plain/train/0, extra_info.answer" in cli(
        "model", "warm-start", *other, fails=2
    )


# ---------------------------------------------------------------------------------------------------------- experiment


def test_the_experiment_runs_from_the_pair_to_the_report(
    fetched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Experiment(
        "small",
        EXPERIMENTS["smollm2"].only(("grpo", "tandem")).arms,
        pairs=("word_problems_terse",),
        contrasts=(("tandem", "grpo"), ("grpo", "base")),
        seeds=(0,),
        config="smollm2",
        overrides=(
            "train.steps=1",
            "train.prompts_per_step=2",
            "rollout.group_size=2",
            "rollout.max_tokens=8",
            "data.limit=8",
        ),
        pair_steps=1,
        problems=2,
        samples=1,
        evaluation="smollm2",
    )
    said: list[str] = []
    results = run_experiment(small, tmp_path, workers=1, say=said.append)
    rows = [row for row in results["rows"] if row["arm"] != "junior"]
    assert [row["arm"] for row in rows] == ["base", "grpo", "tandem"]
    for row in rows:
        assert row["shorthand_rate"] in (0, 0.5, 1)
        assert {"solo/pass@1", "handoff/pass@1", "junior_ce"} <= row.keys()
        assert row.keys().isdisjoint({"jargon_rate", "handoff/repairs"})
    home = tmp_path / "word_problems_terse" / "seed-0"
    configs = {arm: load(home / arm / "config.yaml") for arm in ("grpo", "tandem")}
    assert {arm: config.model.junior for arm, config in configs.items()} == {
        "grpo": None,
        "tandem": f"{home}/pair/junior",
    }
    monkeypatch.setattr(pretrained, "load_trainable", pytest.fail)  # the pair is there
    run_experiment(small, tmp_path, workers=1, say=said.append)


@pytest.mark.slow
def test_smollm2_learns_and_is_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "RECIPE", replace(RECIPE, eval_rows=8))
    losses: list[float] = []
    pair = tmp_path / "pair"
    manifest = build_pretrained_pair(
        pair, steps=1, model=str(real_model.smollm2()), progress=lambda step, steps, loss: losses.append(loss)
    )
    assert manifest["parameters"] == 134_515_008
    assert losses[1] < losses[0] < 2.5
    tokenizer = AutoTokenizer.from_pretrained(pair / "senior")
    solutions = [row.extra_info[SOLUTION] for pair in PAIRS for row in generate(pair, "train", None, 0)]
    assert max(len(tokenizer(text)["input_ids"]) for text in solutions) < MAX_TOKENS
    result = evaluate_phase(
        "pass-at-k",
        data=["synthetic:word_problems:heldout:4"],
        model=pair / "senior",
        out=tmp_path / "eval",
        eval=load("smollm2", ["eval.samples=1", "eval.k=[1]"]).eval,
    )
    assert 0 <= result["metrics"]["macro"]["pass@1"] <= 1
    assert result["metrics"]["macro"]["length"] <= MAX_TOKENS
