"""The supervised training that gives a tiny model its style and its skill before any reinforcement learning."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tandemrl.data.synthetic import Problem
from tandemrl.experiments.demonstrations import Lesson

Progress = Callable[[int, int, float], None]
"""A function that is called with (warm-start steps done, steps in total, loss in nats per token). The total grows if
the measured criteria ask for more steps."""


def progress_line(step: int, steps: int, loss: float, elapsed_s: float) -> str:
    """How far a warm start is, and about how long the rest takes.

    Examples:
        >>> progress_line(50, 200, 1.25, elapsed_s=10)
        'step 50 of 200, loss 1.250, about 30 s left'
        >>> progress_line(200, 200, 0.5, elapsed_s=40)
        'step 200 of 200, loss 0.500, measuring what it can do'
    """
    left = f"about {elapsed_s / step * (steps - step):.0f} s left" if step < steps else "measuring what it can do"
    return f"step {step} of {steps}, loss {loss:.3f}, {left}"


IGNORE = -100
"""The target of a place where nothing is learnt."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a model is trained, on solutions only, before any reinforcement learning.

    ``optimizer: muon`` trains the matrices inside the layers with ``Muon``, and the rest with AdamW.
    """

    steps: int = 850
    batch_size: int = 16
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    final_lr_fraction: float = 0.05
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    vocab_size: int = 400
    threads: int = 1
    eval_rows: int = 512


class WarmStartBatch(NamedTuple):
    """Right-padded inputs and next-token targets, which are ``IGNORE`` where nothing is learnt.

    ``weights`` are the weights of the targets in the mean of the loss. None means that all targets count the same.
    """

    tokens: Int64[Tensor, "n t"]
    targets: Int64[Tensor, "n t"]
    weights: Float[Tensor, "n t"] | None = None


def warm_start(
    model: Qwen3ForCausalLM,
    batches: Iterable[WarmStartBatch],
    recipe: WarmStart,
    *,
    progress: Progress | None = None,
) -> float:
    """Train a model for ``recipe.steps`` batches. Returns the last loss in nats per token."""
    optimizers = _optimizers(model, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: _lr_fraction(step, recipe)) for each in optimizers
    ]
    value = float("nan")
    model.train()
    for step, batch in zip(range(recipe.steps), batches, strict=False):
        # Padding is on the right and attention is causal, so no real token sees it and no mask is needed.
        tokens, targets = batch.tokens.to(model.device), batch.targets.to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits
        if batch.weights is None:
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        else:
            weights = batch.weights.to(model.device)
            each = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORE)
            loss = (each * weights.flatten()).sum() / weights.sum()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        value = loss.item()
        if progress is not None:
            progress(step + 1, recipe.steps, value)
    model.eval()
    return value


def solution_batch(tokenizer: PreTrainedTokenizerFast, solved: Sequence[tuple[Problem, str]]) -> WarmStartBatch:
    """A batch of solutions, in which only responses and their EOS are targets."""
    prompts: Any = tokenizer.apply_chat_template(
        [[{"role": "user", "content": problem.question}] for problem, _ in solved],
        add_generation_prompt=True,
        return_dict=False,
    )
    responses = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([text for _, text in solved])["input_ids"]]
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True)) - 1
    tokens = torch.full((len(solved), width), int(tokenizer.pad_token_id))
    targets = torch.full((len(solved), width), IGNORE)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        whole = torch.tensor(prompt + response)
        tokens[i, : len(whole) - 1] = whole[:-1]
        targets[i, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
    return WarmStartBatch(tokens, targets)


def lesson_batch(lessons: Sequence[Lesson], padding: int) -> WarmStartBatch:
    """A batch of episodes with the weights of their tokens."""
    width = max(len(lesson.tokens) for lesson in lessons) - 1
    tokens = torch.full((len(lessons), width), padding)
    targets = torch.full((len(lessons), width), IGNORE)
    weights = torch.zeros(len(lessons), width)
    for i, lesson in enumerate(lessons):
        whole, length = torch.tensor(lesson.tokens), len(lesson.tokens) - 1
        tokens[i, :length], targets[i, :length] = whole[:-1], whole[1:]
        weights[i, :length] = torch.tensor(lesson.weights[1:])
    return WarmStartBatch(tokens, targets, weights)


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal by five Newton-Schulz iterations (Jordan et al., 2024).

    A step is scaled to the size of one of AdamW's (Liu et al., "Muon is scalable for LLM training", 2025), so learning
    rates are AdamW's. The tiny models need far fewer steps with it. ``torch.optim.Muon`` iterates in bfloat16, one
    matrix at a time, which makes a step several times slower on CPUs without bfloat16 arithmetic. This one iterates in
    the dtype of the weights, over all matrices of a shape at once.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            of_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                of_shape.setdefault(parameter.shape, []).append(parameter)
            for shape, parameters in of_shape.items():
                updates = orthogonal(torch.stack([self._nesterov(each, group["momentum"]) for each in parameters]))
                scale = 0.2 * math.sqrt(max(shape)) * group["lr"]
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _nesterov(self, parameter: torch.nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        average = state.setdefault("momentum", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def orthogonal(matrices: Float[Tensor, "m rows columns"], iterations: int = 5) -> Float[Tensor, "m rows columns"]:
    """Each matrix with its singular values moved to about 1 (0.7 to 1.2), by the quintic Newton-Schulz iteration."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


# --------------------------------------------------------------------------------------------------------------------


def _optimizers(model: Qwen3ForCausalLM, recipe: WarmStart) -> list[torch.optim.Optimizer]:
    inside: list[torch.nn.Parameter] = []
    if recipe.optimizer == "muon":
        inside = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
    taken = {id(parameter) for parameter in inside}
    rest: Iterator[torch.nn.Parameter] = (each for each in model.parameters() if id(each) not in taken)
    adamw = torch.optim.AdamW(rest, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay)
    return [adamw, *([Muon(inside, lr=recipe.lr, weight_decay=recipe.weight_decay)] if inside else [])]


def _lr_fraction(step: int, recipe: WarmStart) -> float:
    """The share of the peak learning rate at a step: a linear warm-up, then a cosine down to ``final_lr_fraction``."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    floor = recipe.final_lr_fraction
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
