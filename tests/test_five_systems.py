"""The five systems' workflows: the commands of the page, on rows as each system publishes them, with tiny models."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from fake_judge import FakeJudge
from helpers import qwen3
from runs import cli, metrics, put, samples
from tandemrl.apps.experiments.agents import hops_tokenizer
from tandemrl.config import load, packaged_configs
from tandemrl.data.loading import load_rows

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "coming_from.md"
TOY = [
    *("model.device=cpu", "model.dtype=float32", "model.gradient_checkpointing=false", "rollout.engine=torch"),
    *("rollout.vllm.sleep=false", "rollout.vllm.multiprocess=false", "rollout.vllm.junior_device=null"),
    *("parallel.sp=1", "data.max_prompt_tokens=600", "data.monitor=[]", "rollout.max_tokens=12"),
    *("rollout.max_rows=16", "rollout.group_size=4", "reward.workers=1", "reward.timeout_s=60"),
    *("train.steps=1", "train.prompts_per_step=4", "train.mini_batch_prompts=4", "train.tokens_per_micro_batch=4096"),
    *("train.threads=1", "train.eval_every=1", "train.eval_first=false", "train.save_every=1"),
    *("train.critic_warmup_steps=0", "eval.train_problems=2", "eval.profile=custom", "eval.max_tokens=12"),
    "eval.bootstrap=10",
]
AGENT = [
    "data.max_prompt_tokens=900",
    "rollout.max_tokens=40",
    "rollout.turn_tokens=20",
    "rollout.observation_tokens=60",
    "rollout.tool_workers=1",
]


def problems(count: int) -> list[tuple[str, str]]:
    """Questions that the tiny pair can read, with their answers."""
    return [(row.messages[0]["content"], row.ground_truth) for row in load_rows([f"synthetic:plain:train:{count}"])]


def verl(source: str, ground_truth: str, asked: str, index: int, **extra: Any) -> dict[str, Any]:
    """A row in verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": "train", "index": index, **extra},
    }


def published(name: str, folder: Path) -> Path:
    """A copy of a data set with the columns that it is published with."""
    asked = problems(8)
    rubric = [{"question": q, "criteria": f"It finds {a}.", "MODEL_ANSWER": f"\\boxed{{{a}}}"} for q, a in asked]
    match name:
        case "deepscaler":  # agentica-org/DeepScaleR-Preview-Dataset
            file = folder / "deepscaler.json"
            folder.mkdir()
            file.write_text(json.dumps([{"problem": q, "answer": a, "solution": ""} for q, a in asked]))
            return file
        case "countdown":  # Jiayi-Pan/Countdown-Tasks-3to4
            put(folder / "countdown.parquet", *({"target": 10 + i, "nums": [i + 1, 4, 5]} for i in range(16)))
            return folder / "countdown.parquet"
        case "polaris":  # Youliang/rrm
            for split in ("train", "test"):
                rows = [verl("polaris_tinyv", a, q, i, **rubric[i]) for i, (q, a) in enumerate(asked)]
                put(folder / f"{split}_polaris.parquet", *rows)
        case "rrm":
            for split in ("train", "test"):
                rows = [verl("grade", str(i / 8), f"Mark: {q}", i) for i, (q, _) in enumerate(asked)]
                put(folder / f"{split}_rrm.parquet", *rows)
        case "musique":  # the authors' archive
            for split in ("train", "dev"):
                rows = [
                    {
                        "id": f"2hop__{i}_{split}",
                        "question": f"Where is {i}?",
                        "answer": "here",
                        "answer_aliases": [],
                        "answerable": True,
                        "paragraphs": [
                            {"idx": j, "title": f"T{j}", "paragraph_text": f"It is {j}.", "is_supporting": j < 2}
                            for j in range(4)
                        ],
                        "question_decomposition": [],
                    }
                    for i in range(8)
                ]
                put(folder / f"musique_ans_v1.0_{split}.jsonl", *rows)
        case "eurus":  # PRIME-RL/Eurus-2-RL-Data
            for split in ("train", "validation"):
                rows = [verl("numina_olympiads", a, q, i) for i, (q, a) in enumerate(asked)]
                put(folder / f"{split}.parquet", *rows)
    return folder


def workflows() -> list[Any]:
    """The cells of the page that build and train, each as its commands."""
    table = PAGE.read_text().partition("## The five systems' commands")[2]
    cells = [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("|")]
    found = [re.findall(r"`([^`]+)`", cell) for cell in cells if "train --config" in cell]
    return [pytest.param(each, id=re.findall(r"--config (\w+)", each[-1])[0]) for each in found]


@pytest.fixture
def here(tmp_path: Path, tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    agents = tmp_path / "agents"
    qwen3(vocabulary=len(hops_tokenizer()), context=2048, head_dim=32).save_pretrained(agents)
    hops_tokenizer().save_pretrained(agents)
    (tmp_path / "pair").symlink_to(tiny_pair)
    return tmp_path


def test_every_system_has_its_commands() -> None:
    named = {param.id for param in workflows()}
    assert {"deepscaler_tandem", "deepscaler_grpo", "countdown", "rrm_policy", "musique_grpo", "tinyzero"} <= named
    assert named <= packaged_configs().keys()


@pytest.mark.parametrize("commands", workflows())
def test_a_system_s_workflow_on_its_own_columns(commands: list[str], here: Path) -> None:
    assert len(commands) <= 3
    with FakeJudge(lambda prompt, number: "Total Score: 7/10") as judge:
        ours = [each[each.index("tandemrl") :] for each in commands if "tandemrl" in each]  # a judge's server is not
        *builds, train = [shlex.split(each)[1:] for each in ours]
        name = train[2]
        whole = load(name, [word for word in ("train.steps=1", "model.senior=SFT") if name.startswith("rrm")])
        if not builds:  # the row above has built it
            builds = [["data", "build", "deepscaler", "--out", "data/deepscaler"]]
        for build in builds:
            if build[2] == "eval-all":  # benchmarks, which are watched only
                continue
            if "--source" in build:
                del build[build.index("--source") :][:2]
            if "countdown" in build:
                build += ["--train", "12", "--test", "4"]
            strict = {"eurus": ["--max-tokens", "0"]}.get(build[2], [])
            if build[2] in ("deepscaler", "musique", "eurus"):
                strict += ["--expect-rows", "0"]
            cli(*build, "--source", str(published(build[2], here / "published")), *strict)
        agent = whole.rollout.environment != "single"
        keys = [*TOY, f"model.senior={'agents' if agent else 'pair/senior'}", *(AGENT if agent else [])]
        if whole.judge.url is not None:
            keys.append(f"judge.url={judge.url}")
        given = [word for word in train if not word.startswith(("judge.", "model.", "train.", "parallel."))]
        cli(*given, *keys)
        out = Path(whole.output_dir)
        [line] = metrics(out)
        written = [each for each in samples(out) if each.get("phase", "train") == "train"]
        assert len(written) == 16
        assert line["reward/unscored"] == 0
        sources = {row.data_source for row in load_rows([str(file) for file in whole.data.train])}
        assert {each["example_id"].partition("/")[0] for each in written} <= sources
    if agent:
        short = ["eval.profile=custom", "eval.max_tokens=12", *AGENT]
        found = ["--model", f"{out}/hf/best", "--config", str(out), "--limit", "2", "--out", "evaluated"]
        cli("eval", "qa", *found, *short)
        [result] = Path("evaluated").glob("*.json")
        measured = json.loads(result.read_text())["metrics"]["macro"]
        assert measured["problems"] == 2
        assert 0 <= measured["em"] <= measured["f1"] <= 1
