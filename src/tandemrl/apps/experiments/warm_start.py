"""The supervised training that gives a model its style and its skill before any reinforcement learning."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.data.loading import load_rows
from tandemrl.data.rows import SOLUTION, DataError, Row, encode_prompts
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.files import write_directory
from tandemrl.models.loading import load_model, load_tokenizer, no_progress_bars

Progress = Callable[[int, int, float], None]
"""A function that is called with (warm-start steps done, steps in total, loss in nats per token). The total grows if
the measured criteria ask for more steps."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How a model is trained, on solutions only, before any reinforcement learning.

    ``optimizer: muon`` trains the matrices inside the layers with ``Muon``, and the rest with AdamW. The learning rate
    rises linearly over ``warmup_steps``, then falls by a cosine to ``final_lr_fraction`` of ``lr``; 1 keeps it.
    ``vocab_size`` is that of a tokenizer that is trained, too.
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


class Lesson(NamedTuple):
    """A text to learn from, as token ids with their loss ``weights``: 0 in the prompt, 1 in what an author writes."""

    row: Row | None
    """Whose text it is, if it is one of a data set."""
    tokens: list[int]
    weights: list[float]


def solution_lesson(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], solution: str, row: Row | None = None
) -> Lesson:
    """A solution and its EOS, after the token ids of a prompt."""
    response = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return Lesson(row, [*prompt, *response], [0.0] * len(prompt) + [1.0] * len(response))


def load_trainable(path: str | Path, *, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM in float32, as ``warm_start`` trains it, and its tokenizer.

    Raises:
        ModelError: they cannot be loaded, or later training could not use them (see `load_model`).
    """
    model = load_model(path, device=device)
    model.set_attn_implementation("sdpa")  # batches here are rectangles, for which attention needs no layout
    return model, load_tokenizer(path)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a model and its tokenizer into a folder."""
    with no_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_start(
    model: PreTrainedModel, lessons: Iterator[Lesson], recipe: WarmStart, *, progress: Progress | None = None
) -> float:
    """Train a model for ``recipe.steps`` batches of the next lessons. Returns the last loss in nats per token."""
    optimizers = _optimizers(model, recipe)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: _lr_fraction(step, recipe)) for each in optimizers
    ]
    value = float("nan")
    model.train()
    for step in range(recipe.steps):
        batch = list(itertools.islice(lessons, recipe.batch_size))
        # Padding is on the right and attention is causal, so no real token sees it and no mask is needed.
        tokens, weights = (
            pad_sequence([torch.tensor(each) for each in of_each], batch_first=True).to(model.device)
            for of_each in ([lesson.tokens for lesson in batch], [lesson.weights for lesson in batch])
        )
        logits, learnt = model(input_ids=tokens[:, :-1], use_cache=False).logits, weights[:, 1:].flatten()
        each = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (each * learnt).sum() / learnt.sum()
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


def train_on_solutions(
    model: str | Path,
    sources: Sequence[str],
    out: Path,
    recipe: WarmStart,
    *,
    seed: int,
    max_prompt_tokens: int,
    device: str = "cpu",
    progress: Progress | None = None,
) -> tuple[int, int, float]:
    """Train a causal LM on the solutions of data sources into the folder ``out``, which appears in one rename.

    Returns:
        from how many rows it has learnt, how many were left out (see `solved_rows`), and its last loss.

    Args:
        model: a folder or hub id.
        sources: see `load_rows`.
        seed: decides the order of the rows.

    Raises:
        DataError: the data cannot be used, or a row has no solution.
        FileExistsError: ``out`` exists.
        ModelError: the model cannot be used.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists, and a run may rely on it: choose another folder")
    rows = {source: load_rows([source]) for source in sources}
    policy, tokenizer = load_trainable(model, device=device)
    solved = [
        each
        for source, found in rows.items()
        for each in solved_rows(found, tokenizer, source=source, max_prompt_tokens=max_prompt_tokens)
    ]
    loss = warm_start(policy, shuffled(solved, seed), recipe, progress=progress)

    write_directory(out, lambda folder: save(policy, tokenizer, folder))
    return (len(solved), sum(map(len, rows.values())) - len(solved), loss)


def solved_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, *, source: str, max_prompt_tokens: int
) -> list[Lesson]:
    """The prompts of rows, as reinforcement learning encodes them, with the solutions that the rows have.

    Rows whose prompt is longer than ``max_prompt_tokens`` are left out.

    Args:
        source: where the rows are from, for an error.

    Raises:
        DataError: a row has no solution, or the prompts cannot be encoded (see `encode_prompts`).
    """
    for row in rows:
        found = row.extra_info.get(SOLUTION)
        if not isinstance(found, str) or not found.strip():
            raise DataError(
                f"{source}, row {row.example_id}, extra_info.{SOLUTION}: expected a solution as text, found {found!r}; "
                "a warm start learns from solutions: add them under this key, as verl's GSM8K has them"
            )
    prompts, _ = encode_prompts(
        rows, tokenizer, max_prompt_tokens=max_prompt_tokens, template_arguments=DEFAULT_ARGUMENTS
    )
    return [solution_lesson(tokenizer, each.tokens, each.row.extra_info[SOLUTION], each.row) for each in prompts]


def shuffled(lessons: Sequence[Lesson], seed: int) -> Iterator[Lesson]:
    """Yield lessons without end, in a new order in every epoch.

    Raises:
        DataError: there are none.
    """
    if not lessons:
        raise DataError("there is no text to learn from: the model that was to write them solved none; train it longer")
    rng = random.Random(f"warm-start/{seed}")
    while True:
        yield from rng.sample(lessons, len(lessons))


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


def _optimizers(model: PreTrainedModel, recipe: WarmStart) -> list[torch.optim.Optimizer]:
    inside: list[torch.nn.Parameter] = []
    if recipe.optimizer == "muon":
        layers: Any = model.get_decoder().layers
        inside = [parameter for parameter in layers.parameters() if parameter.ndim == 2]
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
