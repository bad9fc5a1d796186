"""Random models that call tools now and then, and small runs in which they do."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import runs
import small_world
from helpers import agent_tokenizer, qwen3, small_qwen3
from tandemrl.config import Config, load

SMALL = [
    "train.threads=1",
    "train.steps=3",
    "train.prompts_per_step=2",
    "train.save_every=1",
    "train.keep_checkpoints=9",
    "train.eval_every=0",
    "train.lr=1e-2",
    "train.tokens_per_micro_batch=256",
    "rollout.group_size=3",
    "rollout.max_tokens=30",
    "rollout.turn_tokens=12",
    "rollout.observation_tokens=48",
    "rollout.result_tokens=12",
    "rollout.max_turns=3",
    "rollout.tool_workers=1",
    "data.max_prompt_tokens=24",
    "reward.workers=1",
]
TOOLS = [
    "rollout.environment=tools",
    "rollout.tools=[small_world:add]",
    "reward.scorers={own: small_world:sums_for_letters}",
]


def make_agents(out: Path) -> Path:
    """``senior``, ``junior`` and ``rows.jsonl`` in a folder."""
    tokenizer = agent_tokenizer(small_world.CALLS)
    for name, model in (("senior", qwen3), ("junior", small_qwen3)):
        model(vocabulary=len(tokenizer)).save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)
    rows = [
        {"prompt": f"{word} one", "data_source": "own", "reward_model": {"ground_truth": word}}
        for word in ("ab", "cde", "f", "ghi")
    ]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def overrides(agents: Path, out: Path, *extra: str) -> list[str]:
    rows = f"[{agents}/rows.jsonl]"
    models = [f"model.senior={agents}/senior", f"model.junior={agents}/junior"]
    return [*SMALL, *models, f"data.train={rows}", f"data.eval={rows}", f"output_dir={out}", *extra]


def config(agents: Path, out: Path, *extra: str) -> Config:
    return load(None, overrides(agents, out, *extra))


def record(out: Path, *, after: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]], np.ndarray]:
    """What two equal runs share from some step on: metrics, samples, and the engine's log-probs (of tokens and of
    handovers), which are equal up to rounding: the rows that are decoded together are those whose tools have
    answered."""
    metrics = [
        {name: value for name, value in line.items() if not name.startswith("mismatch/")}
        for line in runs.timeless(out)
        if line["step"] > after
    ]
    samples = [line for line in runs.samples(out) if line["step"] > after]
    of_engine = ("behaviour_logprobs", "handover_logprobs")
    texts = [each for line in samples for each in (line, *line.get("branches", ()))]
    logprobs = np.concatenate([each.pop(name) for each in texts for name in of_engine if name in each])
    return metrics, samples, logprobs


def assert_same_episodes(a: Path, b: Path, *, after: int = 0) -> None:
    """Both were trained without the engine's log-probs, so that not even weights differ."""
    (metrics, samples, logprobs), (*others, other_logprobs) = record(a, after=after), record(b, after=after)
    assert [metrics, samples] == others
    np.testing.assert_allclose(logprobs, other_logprobs, rtol=0, atol=1e-5)
    step = metrics[-1]["step"]
    left, right = runs.weights(a, step), runs.weights(b, step)
    assert all(bool((left[name] == right[name]).all()) for name in left)
