"""Easy Countdown, learnt by a tiny model from scratch: TinyZero's PPO with a critic, and RL-GRPO's GRPO.

    python examples/countdown.py --json benchmarks/results/countdown.json

Two or three numbers up to 20 have to make a target up to 40. A model of 0.2 million parameters is first taught, for a
few hundred steps, to write expressions in the given numbers, of which one in three is right and the others are any.
Then both recipes go on from it, with their rewards, losses and updates per batch; batches, learning rates and lengths
are a tiny model's. No held-out problem has numbers and target of one for training. About two minutes of one core; the
same command goes on where it was killed.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import tandemrl
from tandemrl.apps.experiments.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, new_model
from tandemrl.files import read_json_lines, versions, write_text
from tandemrl.tasks.countdown import rows as arithmetic

RIGHT = 1 / 3
"""Share of the demonstrations that reach the target."""
COUNTS = {2: {"train": 300, "heldout": 128}, 3: {"train": 1000, "heldout": 128}}
"""Problems by how many numbers they have."""
COMMON = [
    *("model.device=cpu", "selection.strategy=solo", "data.max_prompt_tokens=32", "rollout.max_tokens=16"),
    *("loss.entropy_coef=0.001", "train.lr=5e-4", "train.betas=[0.9,0.95]", "train.threads=1", "train.save_every=10"),
    *("eval.profile=custom", "eval.max_tokens=16", "eval.train_problems=256", "train.eval_every=10"),
]
ARMS = {
    # TinyZero: one rollout per prompt, four updates per batch, GAE with gamma = lambda = 1, KL in the reward.
    "ppo": [
        *("loss.recipe=ppo", "loss.lam=1.0", "loss.kl_in_reward=true", "loss.kl_coef=0.001", "train.critic_lr=1e-3"),
        *("rollout.group_size=1", "train.prompts_per_step=128", "train.mini_batch_prompts=32", "train.steps=100"),
    ],
    # RL-GRPO: groups of eight, four updates per batch, the mean over sequences of their token means, no KL.
    "grpo": [
        *("loss.recipe=grpo", "loss.reduction=sequence_mean_token_mean", "loss.dual_clip=0", "reward.countdown=cohlem"),
        *("rollout.group_size=8", "train.prompts_per_step=16", "train.mini_batch_prompts=4", "train.steps=100"),
    ],
}


def question(puzzle: arithmetic.Puzzle) -> str:
    task = puzzle.ground_truth
    return f"numbers {' '.join(map(str, task['numbers']))} target {task['target']}"


def answered(expression: str) -> str:
    """An expression as a response, a space between all tokens."""
    return f"<answer> {expression.replace('(', '( ').replace(')', ' )')} </answer>"


def any_expression(numbers: Sequence[int], rng: random.Random) -> str:
    """Each number once, in any order, with any operations."""
    a, b, *rest = rng.sample([str(number) for number in numbers], len(numbers))
    pair = f"{a} {rng.choice('+-*/')} {b}"
    if not rest:
        return pair
    sides = rng.sample([f"({pair})", rest[0]], 2)
    return f" {rng.choice('+-*/')} ".join(sides)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A token per number, operation, bracket and tag."""
    words = ["user", "assistant", "numbers", "target", "<answer>", "</answer>", *"+-*/()", *map(str, range(41)), "?"]
    vocabulary = {word: i for i, word in enumerate((*SPECIAL_TOKENS, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    padding, start, end = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        pad_token=padding,
        additional_special_tokens=[start],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def split_puzzles(seed: int) -> dict[str, list[arithmetic.Puzzle]]:
    """By split; the scorer of Countdown marks all, and results are by how many numbers there are."""
    splits: dict[str, list[arithmetic.Puzzle]] = {"train": [], "heldout": []}
    for size, counts in COUNTS.items():
        draw = arithmetic.countdowns(seed, sizes=(size,), max_number=20, targets=(1, 40))
        for split, puzzles in arithmetic.distinct(draw, counts).items():
            splits[split] += [each._replace(data_source=f"countdown/{size}") for each in puzzles]
    return splits


def teach(puzzles: Sequence[arithmetic.Puzzle], seed: int, steps: int) -> tuple[Qwen3ForCausalLM, Any, float]:
    """A new model that has seen demonstrations; the last loss, in nats per token."""
    tokenizer, rng = word_tokenizer(), random.Random(seed)
    model = new_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))

    def demonstrations() -> Iterator[tuple[list[int], list[int]]]:
        while True:
            puzzle = rng.choice(puzzles)
            right = rng.random() < RIGHT
            text = str(puzzle.solution) if right else any_expression(puzzle.ground_truth["numbers"], rng)
            chat = [{"role": "user", "content": question(puzzle)}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            yield prompt, [*tokenizer.encode(answered(text)), tokenizer.eos_token_id]

    source, loss = demonstrations(), torch.zeros(())
    for step in range(steps):
        batch = [next(source) for _ in range(32)]
        width = max(len(prompt) + len(response) for prompt, response in batch)
        tokens, targets = torch.zeros(32, width, dtype=torch.long), torch.full((32, width), -100)
        for i, (prompt, response) in enumerate(batch):
            whole = torch.tensor(prompt + response)
            tokens[i, : len(whole)] = whole
            targets[i, len(prompt) : len(whole)] = whole[len(prompt) :]
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval(), tokenizer, loss.item()


def skill(config: tandemrl.Config, model: Path, out: Path) -> dict[str, float]:
    """What the model's answers to the held-out problems are worth, by size; intervals are over problems."""
    config = replace(config, eval=replace(config.eval, samples=4, k=(1, 4)))
    metrics = tandemrl.evaluate(config, model=model, out=out, phases=["pass-at-k"])["pass-at-k"]["metrics"]
    names = ("pass@1", "pass@1/low", "pass@1/high", "pass@4", "uses_numbers")
    values = {f"countdown/{size}": metrics["by_set"][f"countdown/{size}"] for size in COUNTS}
    return {f"{source}/{name}": found[name] for source, found in values.items() for name in names}


def shown(values: dict[str, float]) -> str:
    return ", ".join(f"{size} numbers pass@1 {values[f'countdown/{size}/pass@1']:.3f}" for size in COUNTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides for both runs, e.g. train.steps=20")
    parser.add_argument("--out", type=Path, default=Path("runs/countdown-tiny"), help="where everything goes")
    parser.add_argument("--json", type=Path, help="where the result goes, too")
    parser.add_argument("--seed", type=int, default=0, help="of data, model and runs")
    parser.add_argument("--teach", type=int, default=1500, help="supervised steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    puzzles = split_puzzles(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    for split, content in puzzles.items():
        asked = [[{"role": "user", "content": question(each)}] for each in content]
        rows = [
            arithmetic.record_of_puzzle(each, "chat", split=split, index=i, messages=messages)
            for i, (each, messages) in enumerate(zip(content, asked, strict=True))
        ]
        (args.out / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    senior, lesson = args.out / "senior", args.out / "taught.json"
    asked_for = {"steps": args.teach, "right": RIGHT, "seed": args.seed}
    if not lesson.is_file():
        model, tokenizer, loss = teach(puzzles["train"], args.seed, args.teach)
        model.save_pretrained(senior)
        tokenizer.save_pretrained(senior)
        write_text(lesson, json.dumps(asked_for | {"loss": loss, "parameters": model.num_parameters()}))
    taught = json.loads(lesson.read_text())
    if {name: taught[name] for name in asked_for} != asked_for:
        parser.error(f"{args.out} holds a model that was taught otherwise ({taught}): give another --out")
    paths = [f"model.senior={senior}", f"data.train={args.out}/train.jsonl", f"data.eval={args.out}/heldout.jsonl"]
    settings = [*COMMON, *paths, f"train.seed={args.seed}", *args.overrides]
    result: dict[str, Any] = {
        "schema": 1,
        "command": " ".join(["python examples/countdown.py", *args.overrides]),
        "seed": args.seed,
        "versions": versions(),
        "problems": COUNTS,
        "taught": taught,
        "before": skill(tandemrl.load(overrides=settings), senior, args.out / "before"),
        "arms": {},
    }
    print(f"before: {shown(result['before'])}", flush=True)
    for arm, overrides in ARMS.items():
        config = tandemrl.load(overrides=[*COMMON, *paths, *overrides, *args.overrides, f"output_dir={args.out}/{arm}"])
        tandemrl.train(config, quiet=True)
        lines = [line for _, line in read_json_lines(args.out / arm / "metrics.jsonl")]
        last = args.out / arm / "hf" / f"step_{config.train.steps}"
        result["arms"][arm] = {
            "overrides": overrides,
            "after": skill(config, last, args.out / arm / "eval"),
            "curve": {line["step"]: line["eval/pass@1"] for line in lines if "eval/pass@1" in line},
            "reward": {line["step"]: line["reward/mean"] for line in lines if line["step"] % 10 in (0, 1)},
            "seconds": sum(line["time/step"] for line in lines),
        }
        print(f"{arm}: {shown(result['arms'][arm]['after'])}", flush=True)
    for file in filter(None, (args.out / "countdown.json", args.json)):
        write_text(file, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
