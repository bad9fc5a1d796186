"""An ablation in one file: a strategy and a loss of your own, five training steps on the tiny pair, the rewards.

    python examples/ablation.py

The strategy: the senior opens, and at some token after the opening hands over to the junior for good. The loss: PPO's,
with the negative advantages cut off, so that the senior learns from what worked only.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import tandemrl
from tandemrl.files import read_json_lines
from tandemrl.selection.draws import SELECTION, stream, uniforms


class HandoverState(NamedTuple):
    """One entry per completion, so that the engine can drop and reorder rows."""

    key: Tensor
    written: Tensor
    senior: Tensor


def handover(opening: int, prob: float) -> tandemrl.Strategy:
    """The senior writes ``opening`` tokens; from then on, the junior takes over before each token with ``prob``."""

    def init(request_keys: Tensor) -> tuple[Tensor, HandoverState]:
        senior = torch.ones_like(request_keys, dtype=torch.bool)
        return senior, HandoverState(stream(request_keys, SELECTION), torch.zeros_like(request_keys), senior)

    def step(state: HandoverState, last_token: Tensor) -> tuple[Tensor, HandoverState]:
        written = state.written + 1
        takes_over = (written >= opening) & (uniforms(state.key, written) < prob)
        senior = state.senior & ~takes_over
        return senior, HandoverState(state.key, written, senior)

    return tandemrl.Strategy(init, step)


def successes_only(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, **clip: float | None) -> Tensor:
    return tandemrl.ppo_clip(logprobs, old_logprobs, advantages.clamp(min=0.0), **clip)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("overrides", nargs="*", help="config overrides, e.g. train.steps=20")
defaults = ["train.steps=5", "output_dir=runs/ablation"]
config = tandemrl.load("quickstart.yaml", [*defaults, *parser.parse_args().overrides])
if config.model.senior == "runs/tiny/senior":
    tandemrl.build_tiny_pair(Path("runs/tiny"))  # a minute, once
recipe = tandemrl.RECIPES["grpo"]._replace(name="successes_only", surrogate=successes_only)
tandemrl.train(config, resume="never", recipe=recipe, strategy=lambda step: handover(16, 0.1), quiet=True)
for _, line in read_json_lines(Path(config.output_dir, "metrics.jsonl")):
    print("step {step}: reward {reward/mean:.3f}, senior share {tandem/senior_frac:.2f}".format(**line))
