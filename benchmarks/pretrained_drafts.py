"""Drafts on a real model: a senior of SmolLM2-135M, and as junior its first layers, trained on what it writes.

    OMP_NUM_THREADS=1 python benchmarks/pretrained_drafts.py --pair runs/smollm2/word_problems/seed-0/pair

The senior is that of a pair of `make smollm2`, before reinforcement learning. The junior starts as a copy of its
embeddings, its first --layers layers and its head, and learns from --texts texts that the senior wrote for problems
which nothing else uses. It is kept in --out/junior.

Prints one JSON line per number of rows: CPU seconds, on one thread, of the senior alone and of a tandem (`word`,
p 0.5), without and with drafts (`rollout.draft_tokens=auto`), on held-out problems with 8 completions each. Texts end
where they end, and are the same with drafts. The four take turns in every round, with other random numbers in each;
ratios are taken within a round.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"TOKENIZERS_PARALLELISM": "false"}

import torch
from _common import about, cpu_seconds, ratios, write_lines
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.apps.experiments.warm_start import Solved, WarmStart, load_trainable, solution_batches, warm_start
from tandemrl.data.rows import Prompt, Row, encode_prompts
from tandemrl.files import write_directory
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Completion, Passes, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.tasks.generated.rows import generated_rows
from tandemrl.tasks.generated.word_problems import DEFAULT_COUNTS, MAX_TOKENS
from tandemrl.training.host_memory import keep_freed_memory

GROUP = 8
"""Completions per prompt."""
WARM_STARTED = 1024
"""The problems after those of training, which the pair's warm start has used."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", type=Path, required=True, help="folder with senior/")
    parser.add_argument("--layers", type=int, default=6, help="of the junior")
    parser.add_argument("--texts", type=int, default=1024, help="from which the junior learns")
    parser.add_argument("--steps", type=int, default=200, help="of 8 texts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained_drafts"))
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "pretrained_drafts.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `tandemrl train` does
    tokenizer = load_tokenizer(options.pair / "senior")
    senior = load_model(options.pair / "senior")
    if not (options.out / "junior").is_dir():
        distil(senior, tokenizer, options)
    lines = []
    for rows in options.rows:
        mine, busy = cpu_seconds()
        start = time.perf_counter()
        line = {"benchmark": "pretrained_drafts", "rows": rows, **about(), **measure(senior, tokenizer, rows, options)}
        wall, used = time.perf_counter() - start, cpu_seconds()
        line["cores_others"] = round(max(0.0, used[1] - busy - (used[0] - mine)) / wall, 2)
        line["junior"] = json.loads((options.out / "junior" / "distilled.json").read_text())
        line["command"] = shlex.join(["python", *sys.argv])
        lines.append(line)
        print(json.dumps(line), flush=True)
        write_lines(options.results, lines)


def distil(senior: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> None:
    """Train the senior's first layers on texts of the senior into --out/junior."""
    start = time.process_time()
    junior, _ = load_trainable(options.pair / "senior")
    junior.model.layers = junior.model.layers[: options.layers]
    junior.config.num_hidden_layers = options.layers
    first, prompts = DEFAULT_COUNTS["train"] + WARM_STARTED, options.texts // 2
    problems = generated_rows("word_problems", "train", first + prompts, 0)[first:]
    engine = TorchEngine(senior, None, tokenizer, max_rows=64)
    solved = [
        Solved(prompt.tokens, tokenizer.decode(completion.tokens, skip_special_tokens=True))
        for prompt, group in zip(*written(engine, tokenizer, problems, 2, solo("senior"), 0), strict=True)
        for completion in group
        if completion.stop_reason == "eos"
    ]
    recipe = WarmStart(steps=options.steps, batch_size=8, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)
    loss = warm_start(
        junior,
        solution_batches(tokenizer, solved, recipe.batch_size, 0),
        recipe,
        progress=lambda step, steps, loss: print(f"step {step} of {steps}, loss {loss:.3f}", file=sys.stderr),
    )
    about_it = {
        "layers": options.layers,
        "parameters": sum(p.numel() for p in junior.parameters()),
        "senior_parameters": sum(p.numel() for p in senior.parameters()),
        "texts": len(solved),
        "steps": options.steps,
        "loss": round(loss, 4),
        "cpu_s": round(time.process_time() - start),
    }

    def fill(folder: Path) -> None:
        junior.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "distilled.json").write_text(json.dumps(about_it) + "\n")

    write_directory(options.out / "junior", fill)


def written(
    engine: TorchEngine,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Row],
    group: int,
    strategy: Strategy,
    number: int,
) -> tuple[list[Prompt], list[list[Completion]]]:
    """The prompts, and so many completions of each; ``number`` decides the random numbers."""
    prompts, _ = encode_prompts(problems, tokenizer, max_prompt_tokens=1000)
    sampling = Sampling(max_tokens=MAX_TOKENS)
    requests = [
        Request(list(prompt.tokens), tuple(request_key(0, number, i, j) for j in range(group)), sampling, strategy)
        for i, prompt in enumerate(prompts)
    ]
    return prompts, engine.generate(requests)


def measure(
    senior: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: int, options: argparse.Namespace
) -> dict[str, Any]:
    """CPU seconds of the four contestants in every round, and how often drafts were accepted."""
    junior = load_model(options.out / "junior")
    tandem = word(0.5, 32, word_boundary_table(tokenizer, senior.get_output_embeddings().weight.shape[0]))
    engines = [TorchEngine(senior, junior, tokenizer, max_rows=rows, draft_tokens=drafts) for drafts in (0, "auto")]
    contestants = {
        f"{who}{drafting}": (engine, strategy)
        for who, strategy in (("solo", solo("senior")), ("tandem", tandem))
        for drafting, engine in zip(("", " with drafts"), engines, strict=True)
    }
    problems = generated_rows("word_problems", "heldout", -(-rows // GROUP), 0)
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    passes = dict.fromkeys(contestants, Passes())
    texts: dict[str, list[Any]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(-1, options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always goes first
            engine, strategy = contestants[name]
            start = time.process_time()
            _, found = written(engine, tokenizer, problems, min(rows, GROUP), strategy, number + 1)
            if number >= 0:  # the first one warms up
                cpu[name].append(time.process_time() - start)
                passes[name] += engine.passes
                texts[name].append([completion.tokens.tolist() for group in found for completion in group])
    for who in ("solo", "tandem"):
        assert texts[who] == texts[f"{who} with drafts"], f"{who}: drafts changed a text"
    accepted = {name: each.acceptance for name, each in passes.items() if each.acceptance is not None}
    return {
        "rounds": options.rounds,
        "tokens_per_cpu_s": {
            name: round(passes[name].tokens / options.rounds / statistics.median(each), 2) for name, each in cpu.items()
        },
        "cpu_ratios": ratios(
            cpu, [("solo with drafts", "solo"), ("tandem with drafts", "tandem"), ("tandem with drafts", "solo")]
        ),
        "acceptance": {name: round(value, 3) for name, value in accepted.items()},
        "passes_per_token": {
            name: {"senior": round(each.senior / each.tokens, 3), "junior": round(each.junior / each.tokens, 3)}
            for name, each in passes.items()
        },
        "cpu_s": {name: [round(x, 3) for x in each] for name, each in cpu.items()},
    }


if __name__ == "__main__":
    main()
