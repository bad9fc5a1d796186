"""The tokenizers of the tiny agents: closed vocabularies of whole words. An episode takes about a hundred tokens.

A name is one token wherever it stands, since the space belongs to the word before it. The beginnings and ends of calls
and documents are one or two tokens. Anything else is encoded as bytes, so any text can be encoded. Authors can hand
over: tokens that begin with a space (for ``word``) stand before what a turn decides, and a note ends a step.
"""

import re
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandemrl.data.documents import HEADER
from tandemrl.tasks.generated import calculator, synthetic
from tandemrl.tasks.generated.hops import ALIASES, JARGON, SYSTEM

EOS, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"

# A call in pieces, as hermes writes it. The second piece begins with a space: authors can change before what is asked.
CALL = '<tool_call>\n{"name":'
SEARCH = ' "retrieve_documents", "arguments": {"query": "'
SEARCHED = '"}}\n</tool_call>'
COMPLETE = ' "complete", "arguments": {"reasoning": "", "final_answer": "'
CITED = '", "cited_doc_ids": ["'
NEXT = '", "'
COMPLETED = '"]}}\n</tool_call>'

CALCULATE = ' "calculator", "arguments": {"expression": "'
BOX, BOXED = "\\boxed{", "}"

_CALCULATOR_PIECES = (
    *(CALL, CALCULATE, SEARCHED, BOX, BOXED, "user\n", "assistant\n", "tool\n", " Tools:", " calculator", "\n"),
    *(*synthetic.NAMES, *(f" {noun}" for noun in synthetic.NOUNS)),
    *(f"{verb} " for verb in (*synthetic.GAIN_VERBS, *synthetic.LOSS_VERBS)),
    *(" has ", ", ", ". How many?", " + ", " - ", "-", *"0123456789"),
)
_PIECES = (
    *(CALL, SEARCH, SEARCHED, COMPLETE, CITED, NEXT, COMPLETED),
    *("system\n", "user\n", "assistant\n", "tool\n", SYSTEM, " Tools:", " retrieve_documents", " complete"),
    *("Who is the ", "Who is ", " of the ", " of ", "'s ", " is ", "?", ".\n\n", ".", "\n"),
    *(HEADER, "[", "] ", *"0123456789"),
)

# The tools are told by name: a model of this size learns from demonstrations what they take.
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- if loop.first and tools %} Tools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}<tool_call>
{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def hops_tokenizer(pair: str = "hops") -> PreTrainedTokenizerFast:
    """The tokenizer of a pair of agents; both pairs that search have the same."""
    known = _CALCULATOR_PIECES if pair in calculator.PAIRS else (*_PIECES, *ALIASES, *JARGON)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def surface(text: str) -> str:
        return "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text))

    pieces = sorted(known, key=lambda piece: (-len(piece), piece))  # the longest match first
    specials = (PAD, START, EOS)
    surfaces = dict.fromkeys((*specials, *sorted(to_bytes.alphabet()), *map(surface, pieces)))
    vocabulary = {token: index for index, token in enumerate(surfaces)}
    # No merges: what the split leaves whole is looked up as it is, and what is not found is spelt in bytes.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = Regex("|".join(map(re.escape, pieces)))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(whole, behavior="isolated"), to_bytes])
    return tiny_tokenizer(backend, CHAT_TEMPLATE, additional_special_tokens=[START])


def tiny_tokenizer(backend: Tokenizer, chat_template: str, **more: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a tiny pair."""
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        chat_template=chat_template,
        model_max_length=2048,
        **more,
    )
