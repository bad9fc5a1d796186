"""What only a GPU can show: passes, engine and whole runs on CUDA, against the CPU. Skipped where there is none."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import assert_differ_by_a_tie, flat, llama, prepared, prompts, qwen3, requests, strategies, tokenizer
from runs import SMALL, assert_same_run, config, evaluate_with, metrics, samples
from tandemrl.evals import PHASES
from tandemrl.models import attention
from tandemrl.models.batching import pack
from tandemrl.models.forward import token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.trainable import use_liger
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.loop import train
from tandemrl.types import Rollout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LIGER = pytest.param(
    "liger", marks=pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs the liger extra")
)


def on_cuda(model: PreTrainedModel) -> PreTrainedModel:
    return prepared(model).to("cuda")


def rollouts() -> list[Rollout]:
    """Groups of three that share a prompt of 40 tokens, with responses of many lengths by two authors."""
    rng = np.random.default_rng(0)
    prompt, lengths = rng.integers(2, 72, (2, 40)), [1, 9, 33, 64, 5, 70]
    made = []
    for i, length in enumerate(lengths):
        tokens = np.concatenate([prompt[i // 3], rng.integers(2, 72, length)])
        author = np.concatenate([np.full(40, -1), rng.integers(0, 2, length)]).astype(np.int8)
        made.append(Rollout(str(i // 3), i // 3, i % 3, 0, tokens, author, np.zeros(len(tokens)), reward=0.0))
    return made


def passes(model: PreTrainedModel, autocast: torch.dtype | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a packed batch, and the gradients of a weighted sum of them and of entropies; moved to the CPU."""
    batch = pack(rollouts(), model.device)
    options = ForwardOptions(temperature=0.8, autocast=autocast)
    logprobs, entropy, *_ = token_scores(model, batch, select=batch.author >= 0, options=options)
    weight = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(11)).to(model.device)
    (weight * logprobs + weight.flip(0) * entropy).sum().backward()
    grads = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return logprobs.detach().cpu(), grads


def assert_close_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    assert ours
    for name, wanted in theirs.items():
        off = (ours[name] - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert off < tolerance, f"{name}: {off:.2e}"


# --------------------------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("build", [qwen3, llama], ids=["qwen3", "llama"])
def test_a_pass_in_float32_is_that_of_the_cpu(build):
    model = prepared(build())
    wanted, gradients = passes(model)
    found, ours = passes(on_cuda(build()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-5)
    assert_close_gradients(ours, gradients, 1e-4)


BF16 = torch.bfloat16


def with_liger() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """For a process of its own: Liger changes transformers' modules for good."""
    return passes(use_liger(on_cuda(qwen3(head_dim=32))), BF16)


@pytest.mark.parametrize("how", ["flash", "rectangles", LIGER])
def test_a_pass_in_bfloat16_is_near_that_of_float32(how, elsewhere, monkeypatch):
    """Which kernels were used is asserted as well: a pass of 16 bits takes torch's varlen attention."""
    calls = []
    if how == "rectangles":
        monkeypatch.setattr(attention, "_has_flash", lambda *_: False)
    else:
        flash = attention.varlen_attn

        def counted(*arguments, **options):
            calls.append(1)
            return flash(*arguments, **options)

        monkeypatch.setattr(attention, "varlen_attn", counted)
    wanted, gradients = passes(prepared(qwen3(head_dim=32)))
    found, ours = elsewhere.submit(with_liger).result() if how == "liger" else passes(on_cuda(qwen3(head_dim=32)), BF16)
    assert how == "liger" or bool(calls) == (how != "rectangles")
    assert (found - wanted).abs().mean() < 0.03
    assert_close_gradients(ours, gradients, 0.1)


# --------------------------------------------------------------------------------------------------------------- engine


@pytest.mark.parametrize("name", strategies())
def test_the_engine_writes_what_it_writes_on_the_cpu(name):
    """Tokens and authors, but for races that rounding decides."""
    senior, junior = qwen3(), llama(vocabulary=72)
    batch = requests(prompts(8), Sampling(max_tokens=24), strategies()[name], samples=2)
    wanted = flat(TorchEngine(prepared(senior), prepared(junior), tokenizer(), max_rows=8).generate(batch))
    ours = TorchEngine(on_cuda(senior), on_cuda(junior), tokenizer(), max_rows=8)
    same = 0
    for i, (one, other) in enumerate(zip(flat(ours.generate(batch)), wanted, strict=True)):
        if not np.array_equal(one.tokens, other.tokens):
            assert_differ_by_a_tie(one, other, batch[i // 2], (senior, junior))
            continue
        same += 1
        assert np.array_equal(one.author, other.author)
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, rtol=0, atol=1e-4)
    assert same >= 14


@pytest.mark.parametrize("draft_tokens", [3, "auto"])
def test_drafts_change_nothing(draft_tokens):
    senior, junior = qwen3(), llama(vocabulary=72)
    batch = requests(prompts(8), Sampling(max_tokens=32), strategies()["word"], samples=2)
    plain, drafting = (
        TorchEngine(on_cuda(senior), on_cuda(junior), tokenizer(), max_rows=8, draft_tokens=tokens)
        for tokens in (0, draft_tokens)
    )
    pairs = zip(flat(plain.generate(batch)), flat(drafting.generate(batch)), strict=True)
    same = [np.array_equal(a.tokens, b.tokens) and np.array_equal(a.author, b.author) for a, b in pairs]
    assert sum(same) >= 14


# ----------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def finished(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "run"
    return train(config(tiny_pair, out, "model.device=cuda"), quiet=True)


def test_a_run_is_that_of_the_cpu(tiny_pair: Path, finished: Path, tmp_path: Path) -> None:
    """Texts and authors of the first step, and its update; later steps may differ by races that rounding decides."""
    on_cpu = train(config(tiny_pair, tmp_path, "model.device=cpu"), quiet=True)
    first = [[s for s in samples(out) if s["step"] == 1] for out in (finished, on_cpu)]
    written = [[(s["example_id"], s["tokens"], s["author"]) for s in each if "tokens" in s] for each in first]
    assert written[0]
    assert written[0] == written[1]
    ours, theirs = metrics(finished)[0], metrics(on_cpu)[0]
    for name in ("loss", "grad_norm", "entropy", "reward/mean"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    assert all(line["mismatch/mean_abs"] < 1e-5 for line in metrics(finished))


@pytest.mark.parametrize("ppo", [False, True], ids=["grpo", "ppo"])
def test_with_deterministic_kernels_a_resumed_run_is_the_uninterrupted_one(ppo, tiny_pair, tmp_path):
    given = ["model.device=cuda", "train.deterministic=true", *(KNOBS["critic"] if ppo else ())]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert not run_elsewhere(tiny_pair, whole, *given)
    assert not run_elsewhere(tiny_pair, parts, *given, "train.steps=2")
    run_elsewhere(tiny_pair, parts, *given)
    assert_same_run(whole, parts, step=3)


def run_elsewhere(pair: Path, out: Path, *extra: str) -> str:
    """Train in a process of its own, since what is asked for here holds for a whole process; its warnings."""
    code = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}; import runs; from pathlib import Path; "
    code += "from tandemrl.training.loop import train; "
    code += f"train(runs.config(Path({str(pair)!r}), Path({str(out)!r}), *{extra!r}), quiet=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return "\n".join(line for line in done.stderr.splitlines() if "deterministic" in line)


KNOBS: dict[str, Sequence[str]] = {
    "bfloat16": ["model.dtype=bfloat16", "model.gradient_checkpointing=true"],
    "activation offload": ["model.dtype=bfloat16", "model.activation_offload=true"],
    "optimiser offload": ["parallel.offload_optimizer=true"],
    "lora": ["model.lora.rank=4"],
    "drafts": ["rollout.draft_tokens=auto"],
    "kl": ["loss.kl_coef=0.05", "selection.strategy=solo", "model.junior=null"],
    "several updates": ["train.mini_batch_prompts=2", "loss.importance=token"],
    "critic": ["loss.recipe=ppo", "train.critic_lr=1e-3"],
    "ahead": ["train.async_steps=1", "train.max_logprob_mismatch=1"],
    "profiled": ["train.profile=true"],
}


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_of_a_gpu_trains(name: str, tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.steps=2", "train.eval_every=0", *KNOBS[name])
    out = train(config(tiny_pair, tmp_path, "model.device=cuda", *extra), quiet=True)
    limit = {"bfloat16": 2e-2, "activation offload": 2e-2, "ahead": 1.0}.get(name, 1e-4)
    assert all(line.get("mismatch/mean_abs", 0.0) <= limit for line in metrics(out))


@pytest.mark.vllm
@pytest.mark.parametrize("extra", [(), ("rollout.vllm.sleep=true",), ("rollout.vllm.multiprocess=true",)])
def test_a_run_on_vllm_passes_its_gates(extra: Sequence[str], tiny_pair: Path, tmp_path: Path) -> None:
    """Weights go in and are read back after each step, the junior replays; asleep between rollouts, by handles."""
    pytest.importorskip("vllm.version", reason="needs the vllm extra")
    given = ["model.device=cuda", "model.dtype=bfloat16", "rollout.engine=vllm", "train.eval_every=0", *extra]
    run_elsewhere(tiny_pair, tmp_path, *given)
    assert all(line["mismatch/mean_abs"] <= 2e-2 for line in metrics(tmp_path))


NEED_MORE = ("verified", "legibility")
"""Phases for which more must be given: a judge, readers."""


def test_every_phase_of_an_evaluation(tiny_pair: Path, tmp_path: Path) -> None:
    phases = evaluate_with(
        data=["synthetic:plain:heldout:8"],
        model=tiny_pair / "senior",
        junior=tiny_pair / "junior",
        device="cuda",
        out=tmp_path,
        phases=(given := tuple(phase for phase in PHASES if phase not in NEED_MORE)),
    )
    assert set(phases) == set(given)


def test_torchrun_with_one_process_trains_on_the_gpu_of_its_local_rank(tiny_pair: Path, tmp_path: Path) -> None:
    """One process has no process group; several need several GPUs."""
    models = [f"model.{who}={tiny_pair}/{who}" for who in ("senior", "junior")]
    given = [*SMALL, *models, f"output_dir={tmp_path}", "model.device=cuda", "train.steps=2"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--no-python"]
    command = [sys.executable, "-c", "from tandemrl.cli.main import main; main()", "train", "--config", "quickstart"]
    done = subprocess.run(
        [*launch, *command, *given],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path)) == 2
