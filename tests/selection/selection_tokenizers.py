"""Two small tokenizers trained on the spot: byte-level BPE with a Qwen-like pre-tokeniser, and a SentencePiece-like."""

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXT = (
    "Let's find the value of x, where 3.14 times x is 1,000. We don't know it (yet): a well-known step comes first.\n\n"
    "Step 1: divide both sides by 3.14. This gives x = 1000/3.14, i.e. about 318.47; that isn't an integer!\n"
    "Step 2: is it below 400? Yes. So \\frac{x}{2} < 200 and $\\sqrt{x} \\approx 17.85$.\n\n\n"
    "    indented_code = foo(bar[0], baz) # comment\n"
    "The naïve café owner said: “It’s time, isn’t it? We’ll see; it’s Grüße aus Straßburg”, "
    "then left… 日本語の文章です。次の文。\n\n"
    "Therefore, the unbelievably internationalised answer is **318.47**.\n \nDone.\n"
)

WRITING = {
    "prose": "the value isn't 3.14, well-known — “naïve” (or so) it's Ωmega don't Straße \n\nSo then;",
    "code": "def f(x): \n    return x[0] + 1 # ok \n\tif a==b: \n        for i in range(10): print(i) 'a  b'",
    "latex": "\\frac{a}{b} = \\sqrt {x^2} + $ y_1 $ \\left( \\begin{aligned} & c \\\\ \\end{aligned} \\text{ if }",
    "emoji": "👩‍👩‍👧 ok 🙂🙂 🇩🇪 go ✈️ 🏳️‍🌈 é",
    "cjk": "日本語の文章です。 次の文 数学，答案是 3。 한국어 문장 입니다 x = 2",
    "rtl": "שלום עולם , هذا نص عربي . (12) ٣٤ x = 5",
}
"""Kinds of writing, from pieces of which texts are made; pieces are parted by spaces."""


@cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>\n\n", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("Ġ<|special\n\n", special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False, name_or_path="tiny-bpe"
    )


@cache
def sentencepiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([TEXT.replace("\n", "")] * 3, trainer)
    # The trainer knows no byte pieces; "Ġa" is a Maltese piece, not a space.
    state = json.loads(tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    for surface in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁▁", "Ġa", "\n\n"]:
        vocabulary.setdefault(surface, len(vocabulary))
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        name_or_path="tiny-sp",
    )
