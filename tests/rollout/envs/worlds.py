"""Tokenizers with chat templates, and an engine that writes what it is told to."""

import copy
from collections.abc import Sequence
from functools import cache

import numpy as np
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import byte_level
from tandemrl.data.rows import Row
from tandemrl.rollout.engine import Completion, Responder, Turn

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = ("Ann", "Keva", '", "cited": ["')
"""Words and JSON that a small vocabulary has in one token."""
SKELETON = '<tool_call>\n{"name": "search", "arguments": {"query": "'

SYSTEM_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    '\nCall with <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|im_end|>\n{% endif %}'
)
CALLS = (
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TOOL = (
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}<tool_response>\n"
    "{{ m.content }}\n</tool_response>{{ '\n' if not loop.last and messages[loop.index0 + 1].role == 'tool' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
HERMES = (
    SYSTEM_WITH_TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + TOOL
    + "{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}" + CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5 has it: consecutive results are one message of the user."""
DROPS_THOUGHTS = HERMES.replace(
    "{{ m.content }}" + CALLS, "{{ m.content if loop.last else m.content.split('</think>')[-1] }}" + CALLS
)
"""As Qwen3: thoughts of earlier turns are left out."""
NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
JSON_RESULTS = HERMES.replace("<tool_response>\n{{ m.content }}", "<tool_response>\n{{ m.content | tojson }}")
"""As Llama 3.1: a result is a JSON string."""
LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
LLAMA_31 = (
    "{{ bos_token }}{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}"
    "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\n{% if tools is not none %}{{ 'Environment: ipython\n' }}{% endif %}"
    "Today Date: {{ date_string + '\n\n' + system }}<|eot_id|>"
    "{% if tools_in_user_message and tools is not none %}{% if messages | length == 0 %}"
    "{{ raise_exception('no first user message') }}{% endif %}{% set first = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}<|start_header_id|>user<|end_header_id|>\n\n"
    'Answer {"name": function name, "parameters": dictionary of argument name and its value}.\n\n'
    "{% for t in tools %}{{ t | tojson(indent=4) + '\n\n' }}{% endfor %}{{ first }}<|eot_id|>{% endif %}"
    "{% for m in messages %}{% if m.role in ('ipython', 'tool') %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson if m.content is iterable else m.content }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    """{{ '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}<|eot_id|>"""
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""As Llama 3.1's own: tools in the first message, one bare call in a turn, results of the role ``ipython`` as JSON."""
XML_CALLS = HERMES.replace(
    CALLS,
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>"
    "{% for name, value in call.function.arguments | items %}\n<parameter={{ name }}>\n{{ value }}\n</parameter>"
    "{% endfor %}\n</function>\n</tool_call>{% endfor %}",
)
"""As Qwen3-Coder."""
MAY_THINK = HERMES.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
)
"""As Qwen3: that thought is written if the model is told not to think."""


@cache
def tokenizer(template: str = HERMES) -> PreTrainedTokenizerFast:
    """Every byte is a token; ChatML's control tokens are special, hermes's tags and some words are added."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = byte_level({letter: i for i, letter in enumerate(alphabet)})
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*TAGS, *WORDS, SKELETON)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


@cache
def llama(template: str = LLAMA_31) -> PreTrainedTokenizerFast:
    """Every byte is a token, beside Llama's control tokens."""
    words = copy.deepcopy(tokenizer(template))
    words.add_special_tokens({"additional_special_tokens": [*LLAMA_SPECIAL]})
    words.bos_token, words.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    return words


# --------------------------------------------------------------------------------------------------------------- engine


class ScriptedEngine:
    """An engine double: row number i writes the turns of ``scripts[i]``, one after another, ended by ``<|im_end|>``."""

    def __init__(self, words: PreTrainedTokenizerFast, *, ended: bool = True) -> None:
        self._words = words
        self._ended = ended

    def play(
        self,
        scripts: Sequence[Sequence[str]],
        rows: Sequence[Row],
        responder: Responder,
        *,
        observation_tokens: int = 10**6,
    ) -> list[Completion]:
        written: list[list[list[int]]] = [[[], []] for _ in rows]  # tokens, authors

        def turn(number: int, index: int) -> None:
            tokens = self._words.encode(scripts[number][index], add_special_tokens=False)
            tokens += [self._words.eos_token_id] if self._ended else []
            written[number][0] += tokens
            written[number][1] += [1] * len(tokens)
            how = "eos" if self._ended else "length"
            responder.submit(Turn(number, rows[number], index, np.array(tokens), how))

        for number in range(len(rows)):
            turn(number, 0)
        indices, reasons = dict.fromkeys(range(len(rows)), 0), {}
        while len(reasons) < len(rows):
            for reply in responder.replies(wait=True):
                if not reply.context:
                    reasons[reply.number] = reply.stop_reason or "eos"
                elif indices[reply.number] + 1 == len(scripts[reply.number]):
                    reasons[reply.number] = "length"
                else:
                    written[reply.number][0] += reply.context
                    written[reply.number][1] += [-1] * len(reply.context)
                    indices[reply.number] += 1
                    turn(reply.number, indices[reply.number])
        return [
            Completion(
                number,
                np.array(tokens),
                np.array(authors, dtype=np.int8),
                np.zeros(len(tokens), dtype=np.float32),
                reasons[number],
                transcript=responder.transcript(number),
            )
            for number, (tokens, authors) in enumerate(written)
        ]
