"""Seconds per GRPO step of TRL's GRPOTrainer with transformers' generation: the peer of `step_time.py`.

    TRL_VENV/bin/python benchmarks/peers/trl.py --model runs/tiny/senior --threads 1

Runs in an environment that has TRL and not this library; takes the flags that `step_time.py` passes on, and prints one
JSON line with the same names. A step is one optimiser step on --completions fresh completions, from `on_step_begin` to
`on_step_end`. Its phases, in wall seconds:

| phase | what |
|---|---|
| generate | tokenise the prompts, `model.generate`, decode |
| reward | the reward function |
| forward, backward | log-probs and entropy of the policy; their gradients |
| optim | from the last backward to the end of the step: clipping, AdamW, learning rate |
| other | the rest: padding, advantages, the arithmetic of the loss, metrics |
| update | forward + backward + optim |

`update` leaves out `other`, which `step_time.py` counts in its own update. Gradient checkpointing, TRL's default, is
off and attention is SDPA: the least work that TRL can do. Without --allow-eos every completion has --max-tokens tokens,
of which --lengths then keeps some, as `step_time.py` does.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).parent))  # where this file would be taken for the library
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from _common import about, cpu_seconds, digit_fraction, given_lengths, prompt_texts, wait_for_turn
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PHASES = ("generate", "reward", "forward", "backward", "optim")
UPDATE = ("forward", "backward", "optim")


def main() -> None:
    options = parser().parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    with redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:  # the trainer prints its metrics
        line = measure(options, folder)
    print(json.dumps(line))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="HF folder")
    p.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    p.add_argument("--completions", type=int, default=32, help="completions per step")
    p.add_argument("--micro-batch", type=int, default=32, help="completions per forward and backward")
    p.add_argument("--max-tokens", type=int, default=128)
    p.add_argument("--lengths", choices=["equal", "lognormal"], default="equal")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=3, help="first steps left out of the statistics")
    p.add_argument("--lr", type=float, default=1e-6)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--prompts", type=int, default=64, help="distinct prompts")
    p.add_argument("--allow-eos", action="store_true", help="completions end at EOS: the work then varies")
    p.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # wait_for_turn before every step
    return p


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Train for ``options.steps`` steps; the result line."""
    start = time.perf_counter()
    stopwatch = Stopwatch(options.device, wait_for_turn if options.turns else lambda: None)
    trainer = Trainer(
        stopwatch,
        options,
        model=options.model,
        args=settings(options, folder),
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(options.prompts)}),
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[stopwatch],
    )
    init_s = time.perf_counter() - start
    start = time.perf_counter()
    trainer.train()
    train_s = time.perf_counter() - start

    steps = stopwatch.steps
    counted = steps[options.warmup :] or steps
    mean = {name: statistics.mean(step.get(name, 0.0) for step in counted) for name in (*PHASES, "step", "response")}
    mean["other"] = mean["step"] - sum(mean[name] for name in PHASES)
    mean["update"] = sum(mean[name] for name in UPDATE)
    generated = options.completions * options.max_tokens
    logs = [line for line in trainer.state.log_history if "loss" in line]
    return about("trl") | {
        "strategy": "solo",
        "model": Path(options.model).name,
        "params": sum(p.numel() for p in trainer.model.parameters()),
        "dtype": options.dtype,
        "device": options.device,
        **{k: getattr(options, k) for k in ("group_size", "completions", "micro_batch", "max_tokens", "lengths")},
        "steps": len(steps),
        "warmup": options.warmup,
        "allow_eos": options.allow_eos,
        "s_per_step": round(mean["step"], 4),
        "split_s": {name: round(mean[name], 4) for name in (*PHASES, "other", "update")},
        "s_per_step_median": round(statistics.median(step["step"] for step in counted), 4),
        "s_per_step_all": [round(step["step"], 4) for step in steps],
        "cpu_s_per_step_all": [round(step["step"] * step["cpu"], 4) for step in steps],
        "cores_used": round(statistics.mean(step["cpu"] for step in counted), 2),
        "cores_others": round(statistics.mean(step["others"] for step in counted), 2),
        "gen_tokens_per_s": None if options.allow_eos else round(generated / mean["generate"], 1),
        "mean_len": round(mean["response"] / options.completions, 1),
        "update_tokens_per_s": round(
            statistics.median(step["response"] / sum(step[name] for name in UPDATE) for step in counted), 1
        ),
        "init_s": round(init_s, 2),
        "train_s": round(train_s, 2),
        "reward_last": logs[-1]["reward"],
        "load1": round(os.getloadavg()[0], 2),
    }


def settings(options: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        use_cpu=options.device == "cpu",
        bf16=options.dtype == "bfloat16",
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.completions // options.micro_batch,
        num_generations=options.group_size,
        max_completion_length=options.max_tokens,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens
        temperature=1.0,
        generation_kwargs=None if options.allow_eos else {"min_new_tokens": options.max_tokens},
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        gradient_checkpointing=False,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=options.seed,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
    )


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [digit_fraction(text) for text in completions]


class Stopwatch(TrainerCallback):
    """Wall seconds per phase and step, and what the step had of the machine."""

    def __init__(self, device: str, wait: Callable[[], None]) -> None:
        self.turn = wait
        self.steps: list[dict[str, float]] = []
        self.now: dict[str, float] = {}
        self.begin = (0.0, 0.0, 0.0)
        self.last_backward = 0.0
        self.wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def time(self) -> float:
        self.wait()
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self.time()
        yield
        self.now[name] = self.now.get(name, 0.0) + self.time() - start

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.turn()
        self.now = {}
        self.begin = (self.time(), *cpu_seconds())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        end = (self.time(), *cpu_seconds())
        wall, used, busy = (b - a for a, b in zip(self.begin, end, strict=True))
        times = {"step": wall, "cpu": used / wall, "others": max(0.0, busy - used) / wall}
        self.steps.append(self.now | times | {"optim": end[0] - self.last_backward})


class Trainer(GRPOTrainer):
    """GRPOTrainer under a stopwatch, with completions cut to given lengths. Nothing else is changed."""

    def __init__(self, stopwatch: Stopwatch, options: argparse.Namespace, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.stopwatch, self.options = stopwatch, options
        backward = self.accelerator.backward

        def timed(*args: Any, **kwargs: Any) -> None:
            with stopwatch.phase("backward"):
                backward(*args, **kwargs)
            stopwatch.last_backward = time.perf_counter()

        self.accelerator.backward = timed

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.phase("generate"):
            return super()._generate(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completions, logprobs = super()._generate_single_turn(*args, **kwargs)
        o = self.options
        lengths = given_lengths(o.lengths, len(completions), o.max_tokens, seed=o.seed, step=len(self.stopwatch.steps))
        cut = [ids[:length] for ids, length in zip(completions, lengths, strict=True)]
        self.stopwatch.now["response"] = float(sum(map(len, cut)))
        return cut, logprobs

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self.stopwatch.phase("forward"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)


if __name__ == "__main__":
    main()
