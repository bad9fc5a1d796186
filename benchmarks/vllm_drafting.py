"""Drafting through handovers on vLLM, beside lazy mode and beside the senior alone in stock vLLM.

    python benchmarks/vllm_drafting.py --out benchmarks/results/vllm_drafting.jsonl
    python benchmarks/vllm_drafting.py --rows 8 --draft 4 --noise 0.5

The senior has 62 million parameters, the junior a tenth. What a model says depends on the last token almost alone, and
is the same for both but for what their layers add, which have random weights: the less, the more often both draw the
same token (``--noise``). Each round times every contestant once on the same prompts, in one process, on one thread: CPU
seconds from the end of the first engine step, which computes the prompts, to the last token. Ratios are taken within
a round; one JSON line per number of rows: medians and all ratios, with the acceptance. One round is not timed.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from _common import about, write_lines
from tandem_cost import Clock, boundary_table
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from tandemrl.config import RolloutConfig, VllmConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.selection import word
from tandemrl.selection.draws import request_key

VOCABULARY, SHARED = 4096, 192
"""Ids, and dimensions in which both models have the same embeddings and heads."""
SHAPES = {
    "senior": dict(hidden_size=640, intermediate_size=2560, num_hidden_layers=8, num_attention_heads=10),
    "junior": dict(hidden_size=192, intermediate_size=768, num_hidden_layers=4, num_attention_heads=3),
}
PROMPT, TOKENS = 200, 96


def model(who: str, noise: float) -> Qwen3ForCausalLM:
    """noise: what the layers add to the residual stream, relative to an initialised model's."""
    shape = SHAPES[who]
    torch.manual_seed(len(who) + shape["hidden_size"])
    made = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, num_key_value_heads=shape["num_attention_heads"], head_dim=64,
            max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, **shape,
        )
    )  # fmt: skip
    same = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for table, scale in ((made.model.embed_tokens.weight, 1.0), (made.lm_head.weight, 3 / SHARED**0.5)):
            table.zero_()
            table[:, :SHARED] = scale * torch.randn(VOCABULARY, SHARED, generator=same)
        made.model.norm.weight.fill_((SHARED / shape["hidden_size"]) ** 0.5)
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.mul_(noise)
            layer.mlp.down_proj.weight.mul_(noise)
    return made


def build(folder: Path, noise: float) -> tuple[Path, Path]:
    logging.disable_progress_bar()
    for who in SHAPES:
        model(who, noise).save_pretrained(folder / who)
        models.tokenizer().save_pretrained(folder / who)
    return folder / "senior", folder / "junior"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8", help="numbers of rows, separated by commas")
    parser.add_argument("--draft", type=int, default=8, help="tokens that the junior writes ahead")
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        measure = prepare(*build(Path(folder), options.noise), options.draft)
        for rows in map(int, options.rows.split(",")):
            line = about() | {"benchmark": "vllm_drafting", "draft": options.draft, "noise": options.noise}
            line |= {"rows": rows, "prompt": PROMPT, "tokens": TOKENS, "rounds": options.rounds}
            line |= measure(rows, options.rounds) | {"command": shlex.join(["python", *sys.argv])}
            lines.append(line)
            print(json.dumps(line), flush=True)
            if options.out is not None:
                write_lines(options.out, lines)


def prepare(senior: Path, junior: Path, draft: int) -> Any:
    """The engines, and a function (rows, rounds) -> what they cost."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from tandemrl.rollout.vllm.engine import VllmEngine

    v = VllmConfig(mode="draft", kv_cache_gb=0.5, prefix_caching=False, enforce_eager=True)
    config = RolloutConfig(engine="vllm", draft_tokens=draft, max_rows=64, vllm=v)
    context = PROMPT + TOKENS
    ours = VllmEngine.start(senior, junior, load_tokenizer(senior), config, longest=context)
    stock = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(senior), dtype="float32", max_num_seqs=64, max_model_len=context, enforce_eager=True,
            kv_cache_memory_bytes=2**29, enable_prefix_caching=False, generation_config="vllm", disable_log_stats=True,
        )
    )  # fmt: skip
    torch.set_num_threads(1)
    our_clock, stock_clock = Clock(ours.backend.llm), Clock(stock)
    strategy = word(0.5, 32, boundary_table(VOCABULARY))
    params = SamplingParams(
        max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0, flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip

    def alone(prompts: list[list[int]]) -> float:
        for i, prompt in enumerate(prompts):
            stock.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while stock.has_unfinished_requests():
            stock.step()
        return stock_clock.read(None)[1]

    def tandem(mode: Any, prompts: list[list[int]], number: int) -> float:
        ours.set_mode(mode)
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        ours.generate(
            [Request(tuple(p), (request_key(0, number, i, 0),), sampling, strategy) for i, p in enumerate(prompts)]
        )
        return our_clock.read(None)[1]

    def measure(rows: int, rounds: int) -> dict[str, Any]:
        ratios: dict[str, list[float]] = {"lazy / stock": [], "draft / stock": [], "draft / lazy": []}
        drafts = ours.passes
        for number in range(rounds + 1):
            prompts = np.random.default_rng(number).integers(2, VOCABULARY, (rows, PROMPT)).tolist()
            stock_s, lazy_s = alone(prompts), tandem("lazy", prompts, number)
            draft_s = tandem("draft", prompts, number)
            if number:
                drafts = ours.passes if number == 1 else drafts + ours.passes
                each = (lazy_s / stock_s, draft_s / stock_s, draft_s / lazy_s)
                for known, ratio in zip(ratios.values(), each, strict=True):
                    known.append(round(ratio, 3))
        medians = {name: round(statistics.median(each), 3) for name, each in ratios.items()}
        return {"cpu_ratios": medians, "each": ratios, "acceptance": drafts.acceptance, "passes": drafts._asdict()}

    return measure


if __name__ == "__main__":
    main()
