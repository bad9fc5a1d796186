"""A small Llama pair that shares nothing with the library's own tiny pairs: neither architecture, tokenizer, chat
template, task nor scorer. Its task is the largest of three digits, and Search-R1's scorer reads ``<answer>``."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = 1
TEMPLATE = (
    "{% for m in messages %}{{ '[U]' if m['role'] == 'user' else '[A]' }}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
Digits = tuple[int, int, int]


def build_foreign_pair(folder: Path, seed: int = 11) -> None:
    """Write ``senior``, ``junior``, ``train.jsonl`` and ``heldout.jsonl``. Both models err in about half of their
    texts, since a third of the steps that they have learned from is wrong."""
    draw = random.Random(seed)
    corpus = [(question(digits), solution(digits, 0.3, draw)) for digits in _some_digits(400, draw)]
    tokenizer = _tokenizer(["\n".join(pair) for pair in corpus])
    problems = list(itertools.product(range(1, 10), repeat=3))
    draw.shuffle(problems)
    heldout, train = problems[:200], problems[200:]
    for name, part in (("train", train), ("heldout", heldout)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(_row(i, p))}\n" for i, p in enumerate(part)))
    for name, steps, noise, model_seed in (("senior", 500, 0.35, 1), ("junior", 400, 0.35, 2)):
        model = _trained(tokenizer, train, steps, noise, model_seed)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def question(digits: Digits) -> str:
    return "Largest of {}, {} and {}?".format(*digits)


def solution(digits: Digits, noise: float, draw: random.Random) -> str:
    """A solution in steps, of which each is wrong with the probability ``noise``, or right by chance."""
    best, lines = digits[0], [f"Start with {digits[0]}."]
    for digit in digits[1:]:
        kept = max(best, digit)
        if draw.random() < noise:
            kept = draw.choice([best, digit, draw.randint(1, 9)])
        lines.append(f"Compare {best} with {digit}, keep {kept}.")
        best = kept
    return "\n\n".join(lines) + f"\n\n<answer>{best}</answer>"


def _some_digits(count: int, draw: random.Random) -> list[Digits]:
    return [(draw.randint(1, 9), draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]


def _row(index: int, digits: Digits) -> dict[str, object]:
    return {
        "data_source": "searchr1_own",
        "prompt": [{"role": "user", "content": question(digits)}],
        "ability": "qa",
        "reward_model": {"style": "rule", "ground_truth": {"target": [str(max(digits))]}},
        "extra_info": {"index": index},
    }


def _tokenizer(corpus: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=["<s>", "</s>", "[U]", "[A]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def _trained(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Digits], steps: int, noise: float, seed: int, batch: int = 32
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            bos_token_id=0,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        texts = []
        for _ in range(batch):
            digits = draw.choice(problems)
            texts.append((f"[U]{question(digits)}[A]", f"{solution(digits, noise, draw)}</s>"))
        prompts, answers = ([tokenizer(text)["input_ids"] for text in side] for side in zip(*texts, strict=True))
        longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
        tokens = torch.full((batch, longest), EOS)
        labels = torch.full((batch, longest), -100)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            end = len(prompt) + len(answer)
            tokens[i, :end] = torch.tensor([*prompt, *answer])
            labels[i, len(prompt) : end] = torch.tensor(answer)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
        optimizer.zero_grad()
        model(tokens, labels=labels).loss.backward()
        optimizer.step()
    return model
