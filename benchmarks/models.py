"""Pairs of models with random weights for cost benchmarks: what a model says is nothing, what it costs is real.

    python benchmarks/models.py --out DIR [--names tiny mid kv]

Builds DIR/NAME/senior and DIR/NAME/junior (Qwen3, the same architecture under different seeds, a byte-level tokenizer
whose vocabulary the model pads) and prints one JSON line per pair. A pair that is already there is kept.

| name | parameters | bound by |
|---|---|---|
| tiny | 0.4 million | the overhead of each operation |
| mid | 63 million | reading weights |
| kv | 6 million | reading the KV cache: at 8 rows of 1,500 tokens it is many times the weights |
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

EOS, PAD = "<|im_end|>", "<|endoftext|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONTEXT = 8192
ROWS, TOKENS = 8, 1500
"""The batch at which ``kv_over_weights`` is stated."""
SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 96,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "mid": {
        "vocab_size": 32768,
        "hidden_size": 512,
        "intermediate_size": 1488,
        "num_hidden_layers": 15,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "kv": {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 32,
    },
}
QWEN3: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""The published shapes of Qwen3, for GPUs. What is missing is the same for all."""


def build(name: str, directory: Path) -> tuple[Path, Path]:
    """HF folders of the senior and the junior, built under ``directory/name`` unless the same pair is already there."""
    senior, junior = (directory / name / who for who in ("senior", "junior"))
    about = directory / name / "about.json"
    wanted = describe(name)
    if about.is_file() and json.loads(about.read_text()) == wanted:
        return senior, junior
    logging.disable_progress_bar()
    building = directory / f".{name}.building-{os.getpid()}"
    for seed, who in enumerate(("senior", "junior")):
        model(name, seed).save_pretrained(building / who)
        tokenizer().save_pretrained(building / who)
    (building / "about.json").write_text(json.dumps(wanted) + "\n")
    shutil.rmtree(directory / name, ignore_errors=True)
    building.rename(directory / name)
    return senior, junior


def model(name: str, seed: int) -> Qwen3ForCausalLM:
    """A new model in float32. The default initialisation makes nearly uniform next-token distributions."""
    published = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128}
    return qwen3(seed, tie_word_embeddings=True, **(SIZES[name] if name in SIZES else published | dict(QWEN3[name])))


def qwen3(seed: int, **shape: Any) -> Qwen3ForCausalLM:
    """A new model of any shape, for the tokenizer of this file."""
    config = Qwen3Config(
        **shape,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        result = Qwen3ForCausalLM(config)
    result.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return result


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([PAD, EOS, *alphabet])}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, model_max_length=CONTEXT, chat_template=TEMPLATE
    )


def describe(name: str) -> dict[str, Any]:
    """Architecture, parameters, and how the KV cache compares with the weights, all in float32."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model(name, 0).parameters())
    size = SIZES[name]
    kv_bytes = 2 * size["num_hidden_layers"] * size["num_key_value_heads"] * size["head_dim"] * 4
    return {
        "model": name,
        "parameters": parameters,
        "weight_bytes": 4 * parameters,
        "kv_bytes_per_token": kv_bytes,
        f"kv_over_weights_{ROWS}x{TOKENS}": round(ROWS * TOKENS * kv_bytes / (4 * parameters), 2),
        "context": CONTEXT,
        "chat_template": TEMPLATE,
        **size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark_models"))
    parser.add_argument("--names", nargs="+", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args()
    for name in options.names:
        build(name, options.out)
        print(json.dumps(describe(name)), flush=True)


if __name__ == "__main__":
    main()
