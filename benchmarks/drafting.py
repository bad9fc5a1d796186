"""Drafts through handovers in the reference engine, beside its own single tokens: what a senior costs that is twelve
times its junior.

    OMP_NUM_THREADS=1 python benchmarks/drafting.py --threads 1 --out benchmarks/results/drafting.jsonl

Prints one JSON line per level of agreement and batch size, with the seconds to write --max-tokens tokens in every row
(EOS does not stop), temperature 1:

- solo: the senior alone, token by token;
- tandem: strategy `word` (p 0.5, K 32), token by token: both models read every token;
- tandem N, tandem auto: the same with `rollout.draft_tokens`;
- solo 8: the senior alone, its junior drafts.

The senior has twelve layers, random and peaked; the junior is its first under the same head. What the other eleven
add is scaled, and so is how often both draw the same token: `acceptance`, as the engine counts it. No model learns
anything, but what both draw is drawn. CPU seconds stand beside wall seconds: on one thread they leave out the time that
other processes took.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _common import about, write_lines
from decoding import alternate
from models import tokenizer
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tandemrl.models.loading import prepare
from tandemrl.rollout.engine import Passes, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.draws import request_key

VOCABULARY = 1024
LEVELS = {"high": 0.015, "middle": 0.05, "low": 0.1}
"""Scale of what the layers beyond the junior's add."""
DRAFTS = (4, 8, "auto")
PAIRS = [
    ("tandem", "solo"),
    *((f"tandem {length}", other) for length in DRAFTS for other in ("solo", "tandem")),
    ("solo 8", "solo"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=list(LEVELS))
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    lines = []
    for level in options.levels:
        senior, junior = pair(LEVELS[level])
        for rows in options.rows:
            running, passes = contestants(senior, junior, options)
            found = alternate(running, rows, options.rounds, PAIRS)
            line = about() | {
                "benchmark": "drafting",
                "level": level,
                "senior_parameters": sum(p.numel() for p in senior.parameters()),
                "junior_parameters": sum(p.numel() for p in junior.parameters()),
                "rows": rows,
                "prompt_tokens": options.prompt,
                "max_tokens": options.max_tokens,
                "rounds": options.rounds,
                "acceptance": {name: each.acceptance and round(each.acceptance, 3) for name, each in passes.items()},
                "tokens_per_senior_pass": {name: round(each.tokens / each.senior, 2) for name, each in passes.items()},
                **found,
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
    if options.out is not None:
        write_lines(options.out, lines)


def pair(scale: float) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Senior and junior, in float32."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=640,
        intermediate_size=1920,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        senior = Qwen3ForCausalLM(config)
        senior.generation_config = GenerationConfig(eos_token_id=tokenizer().eos_token_id)
        senior.lm_head.weight.normal_(std=3 / config.hidden_size**0.5)  # logits of standard deviation 3
        senior.model.embed_tokens.weight.normal_(std=0.3)
        for layer in senior.model.layers[1:]:
            for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
                added.weight.mul_(scale)
    junior = copy.deepcopy(senior)
    junior.model.layers = junior.model.layers[:1]
    junior.config.num_hidden_layers = 1
    return prepare(senior), prepare(junior)


def contestants(
    senior: PreTrainedModel, junior: PreTrainedModel, options: argparse.Namespace
) -> tuple[dict[str, Callable[[int, int], None]], dict[str, Passes]]:
    """Name -> function of (rows, round) that writes ``rows`` completions; and what the calls of each have cost."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, VOCABULARY, (max(options.rows), options.prompt), generator=generator).tolist()
    sampling = Sampling(max_tokens=options.max_tokens, ignore_eos=True)
    boundary = torch.rand(VOCABULARY, generator=generator) < 0.7
    passes: dict[str, Passes] = {}

    def run(name: str, engine: TorchEngine, strategy: Strategy, rows: int, number: int) -> None:
        keyed = ((prompt, request_key(number, 0, i, 0)) for i, prompt in enumerate(prompts[:rows]))
        engine.generate([Request(tuple(prompt), (key,), sampling, strategy) for prompt, key in keyed])
        passes[name] = passes.get(name, Passes()) + engine.passes

    def contestant(name: str, draft_tokens: int | str, strategy: Strategy) -> Callable[[int, int], None]:
        engine = TorchEngine(senior, junior, tokenizer(), draft_tokens=draft_tokens)
        return partial(run, name, engine, strategy)

    both, alone = word(0.5, 32, boundary), solo("senior")
    running = {"solo": contestant("solo", 0, alone), "tandem": contestant("tandem", 0, both)}
    running |= {f"tandem {length}": contestant(f"tandem {length}", length, both) for length in DRAFTS}
    return running | {"solo 8": contestant("solo 8", 8, alone)}, passes


if __name__ == "__main__":
    main()
