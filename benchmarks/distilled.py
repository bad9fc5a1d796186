"""Asymmetric pairs whose junior has learnt to write as its senior does: what drafts cost depends on how often both
agree.

    OMP_NUM_THREADS=1 python benchmarks/distilled.py --out runs/benchmark_models --juniors 12 7

Builds DIR/distilled/senior (60 million parameters) and, for each size, a junior of about a twelfth or a seventh of it
at three levels of agreement, DIR/distilled/junior-12-high and so on; prints one JSON line per junior. What is there is
kept.

The senior is not trained: random weights define a language of their own. Its first layer makes a distribution over the
next token out of the last one; what it and the other layers make of the whole context is scaled down, so that it
colours that distribution. The head has rank ``RANK``, so that a narrow model can say the same. A junior starts with
random layers and the senior's head, as models of a family share their words, and is distilled on one core:
KL(senior || junior) of all next-token distributions in texts of the senior's first layer. It is stored whenever, on
texts that it has not read, it draws the senior's token as often as a level asks (the library's draw, the same random
numbers). So nothing that the models say means anything, but that they agree, and where they do not, has been learnt.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from models import qwen3, tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM
from transformers.utils import logging

from tandemrl.models.sampling import draw_token
from tandemrl.selection.draws import fold_in

VOCABULARY, RANK = 512, 24
SENIOR: Mapping[str, int] = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
}
JUNIORS: Mapping[int, Mapping[str, int]] = {
    12: {
        "hidden_size": 256,
        "intermediate_size": 1280,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    7: {
        "hidden_size": 320,
        "intermediate_size": 1728,
        "num_hidden_layers": 4,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
    },
}
"""By how many times larger the senior is, about."""
LEVELS: Mapping[str, float] = {"low": 0.75, "middle": 0.85, "high": 0.92}
"""Share of tokens that the junior has to draw as the senior does."""
PEAK, COLOUR, FIRST_ATTENTION = 5.0, 0.012, 0.08
"""Standard deviation of the senior's logits; scale of what its layers beyond the first add, and of what attention in
the first adds: at 1 the last token alone would explain 0.71 of the draws, and a junior learns little of the rest."""
TEXTS, HELD_OUT, LENGTH = 72, 8, 128
"""Texts, those of them that no junior learns from, tokens of each."""
BATCH, PIECE, STEPS, EVERY = 8, 64, 220, 10
"""Texts of a step, tokens of each; most steps; after how many the junior is compared with the senior."""
EMBEDDING_LR, LR, WARM_UP, FINAL = 2e-2, 2e-3, 10, 0.02
"""Learning rates fall exponentially, to the share FINAL."""


class Texts(NamedTuple):
    """Tokens, and the senior's distribution of each but the first."""

    tokens: Int64[Tensor, "n t"]
    logprobs: Float[Tensor, "n t-1 v"]


class Pair(NamedTuple):
    """Folders of a pair, and texts as the senior writes them: token ids [TEXTS, LENGTH]."""

    senior: Path
    junior: Path
    texts: Int64[Tensor, "n t"]


def build(folder: Path, ratio: int, level: str) -> Pair:
    """The pair of a senior and the junior of a size and level, under ``folder/distilled``; built unless it is there.

    Raises:
        RuntimeError: the junior did not reach a level in ``STEPS`` steps.
    """
    home = folder / "distilled"
    _senior(home)
    stored = _about(home / f"juniors-{ratio}.json")
    if stored.get("recipe") != _recipe(ratio) or f"junior-{ratio}-{level}" not in stored["levels"]:
        _distil(home, ratio)
    texts = Texts(*torch.load(home / "texts.pt"))
    return Pair(home / "senior", home / f"junior-{ratio}-{level}", texts.tokens)


def prompts(pair: Pair, count: int, length: int) -> list[list[int]]:
    """What the senior might have written: texts, one after the other, in a random order."""
    generator = torch.Generator().manual_seed(0)
    pieces = -(-length // pair.texts.shape[1])
    chosen = torch.randint(0, len(pair.texts), (count, pieces), generator=generator)
    return [pair.texts[row].flatten()[:length].tolist() for row in chosen]


def describe(folder: Path, ratio: int, level: str) -> dict[str, Any]:
    """Of a pair that was built: parameters, and how the junior was distilled."""
    stored = _about(folder / "distilled" / f"juniors-{ratio}.json")
    return {
        "senior_parameters": _parameters(SENIOR),
        "junior_parameters": _parameters(JUNIORS[ratio]),
        **stored["levels"][f"junior-{ratio}-{level}"],
    }


def _senior(home: Path) -> None:
    """Write the senior and its texts, unless they are there; the juniors of another senior go."""
    if _about(home / "senior.json").get("recipe") == _recipe(None):
        return
    shutil.rmtree(home, ignore_errors=True)
    senior = _model(SENIOR, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        senior.lm_head.weight.copy_(_head(SENIOR["hidden_size"], generator))
        senior.model.embed_tokens.weight.normal_(std=0.3, generator=generator)
        first, *others = senior.model.layers
        first.self_attn.o_proj.weight.mul_(FIRST_ATTENTION)
        for layer in others:
            for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
                added.weight.mul_(COLOUR)
    texts = _texts(senior, generator)
    _save(senior, home / "senior")
    torch.save(tuple(texts), home / "texts.pt")
    logprobs = texts.logprobs.float()
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean().item()
    (home / "senior.json").write_text(json.dumps({"recipe": _recipe(None), "entropy": round(entropy, 3)}) + "\n")


@torch.no_grad()
def _texts(senior: Qwen3ForCausalLM, generator: torch.Generator) -> Texts:
    """Written by the senior's first layer and its head, at a twelfth of the cost; read by all of it."""
    layers = senior.model.layers
    senior.model.layers, senior.config.num_hidden_layers = layers[:1], 1
    written = [torch.randint(2, VOCABULARY, (TEXTS, 1), generator=generator)]
    cache = None
    for _ in range(LENGTH - 1):
        out = senior(input_ids=written[-1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        written.append(torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator))
    senior.model.layers, senior.config.num_hidden_layers = layers, len(layers)
    tokens = torch.cat(written, 1)
    read = [senior(input_ids=rows[:, :-1], use_cache=False).logits.log_softmax(-1).half() for rows in tokens.split(8)]
    return Texts(tokens, torch.cat(read))


def _distil(home: Path, ratio: int) -> None:
    """Write the juniors of a size at all levels."""
    texts = Texts(*torch.load(home / "texts.pt"))
    junior = _model(JUNIORS[ratio], seed=ratio)
    with torch.no_grad():
        junior.model.embed_tokens.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(ratio))
        junior.lm_head.weight.copy_(_projected(_head(SENIOR["hidden_size"], torch.Generator().manual_seed(0)), ratio))
    words = junior.model.embed_tokens.weight
    rest = [parameter for parameter in junior.parameters() if parameter is not words]
    groups = [{"params": [words], "lr": EMBEDDING_LR}, {"params": rest, "lr": LR}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, _decay(step)))
    generator = torch.Generator().manual_seed(ratio)
    missing, levels, start, away = dict(LEVELS), {}, time.process_time(), 0.0
    for step in range(1, STEPS + 1):
        rows = torch.randint(HELD_OUT, TEXTS, (BATCH,), generator=generator)
        at = int(torch.randint(0, LENGTH - PIECE, (1,), generator=generator))
        theirs = texts.logprobs[rows, at : at + PIECE].float()
        ours = junior(input_ids=texts.tokens[rows, at : at + PIECE], use_cache=False).logits.log_softmax(-1)
        loss = (theirs.exp() * (theirs - ours)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(junior.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY:
            continue
        since = time.process_time()
        agreement = _agreement(junior, texts)
        print(f"1:{ratio}, step {step}: loss {loss.item():.3f}, agreement {agreement:.3f}", flush=True)
        for level in [level for level, wanted in missing.items() if agreement >= wanted]:
            del missing[level]
            name = f"junior-{ratio}-{level}"
            _save(junior, home / name)
            spent = round(since - start - away, 1)
            levels[name] = {"agreement": round(agreement, 3), "distilled_steps": step, "distilled_cpu_s": spent}
            stored = {"recipe": _recipe(ratio), "levels": levels}
            (home / f"juniors-{ratio}.json").write_text(json.dumps(stored) + "\n")
        away += time.process_time() - since
        if not missing:
            break
    if missing:
        raise RuntimeError(f"the junior of 1:{ratio} agrees in {agreement:.3f} after {STEPS} steps: {missing} missing")


@torch.no_grad()
def _agreement(junior: Qwen3ForCausalLM, texts: Texts) -> float:
    """How often both draw the same token in the texts that are held out."""
    theirs = texts.logprobs[:HELD_OUT].float().flatten(0, 1).log_softmax(-1)
    ours = junior(input_ids=texts.tokens[:HELD_OUT, :-1], use_cache=False).logits.log_softmax(-1).flatten(0, 1)
    keys = fold_in(torch.zeros(len(ours), dtype=torch.int64), torch.arange(len(ours)))
    return (draw_token(theirs, keys) == draw_token(ours, keys)).float().mean().item()


def _decay(step: int) -> float:
    return FINAL ** (step / STEPS)


def _head(width: int, generator: torch.Generator) -> Float[Tensor, "v d"]:
    """Of rank ``RANK``; a hidden state of root mean square 1 gives logits of standard deviation ``PEAK``."""
    words = torch.randn(VOCABULARY, RANK, generator=generator)
    return PEAK / (RANK * width) ** 0.5 * words @ torch.randn(RANK, width, generator=generator)


def _projected(head: Float[Tensor, "v d"], ratio: int) -> Float[Tensor, "v e"]:
    """The senior's head for a narrower model: its words in ``RANK`` of the junior's dimensions."""
    words, sizes, _ = torch.linalg.svd(head, full_matrices=False)
    narrow = torch.zeros(VOCABULARY, JUNIORS[ratio]["hidden_size"])
    narrow[:, :RANK] = words[:, :RANK] * sizes[:RANK]
    return narrow


def _model(shape: Mapping[str, int], seed: int) -> Qwen3ForCausalLM:
    return qwen3(seed, **shape, vocab_size=VOCABULARY, head_dim=64, tie_word_embeddings=False)


def _parameters(shape: Mapping[str, int]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _model(shape, 0).parameters())


def _recipe(ratio: int | None) -> dict[str, Any]:
    """What makes the senior and its texts, or a size of juniors."""
    of_senior = {"shape": dict(SENIOR), "constants": [VOCABULARY, RANK, PEAK, COLOUR, FIRST_ATTENTION, TEXTS, LENGTH]}
    if ratio is None:
        return of_senior
    constants = [HELD_OUT, BATCH, PIECE, STEPS, EVERY, EMBEDDING_LR, LR, WARM_UP, FINAL]
    return of_senior | {"junior": dict(JUNIORS[ratio]), "levels": dict(LEVELS), "distillation": constants}


def _about(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {"levels": {}}


def _save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """In one rename, so that what is there is whole."""
    logging.disable_progress_bar()
    building = folder.with_name(f".{folder.name}-{os.getpid()}")
    model.save_pretrained(building)
    tokenizer().save_pretrained(building)
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark_models"))
    parser.add_argument("--juniors", type=int, nargs="+", choices=list(JUNIORS), default=list(JUNIORS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for ratio in options.juniors:
        for level in LEVELS:
            build(options.out, ratio, level)
            print(json.dumps({"ratio": ratio, "level": level, **describe(options.out, ratio, level)}), flush=True)


if __name__ == "__main__":
    main()
