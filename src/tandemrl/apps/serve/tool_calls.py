"""Which parser of tool calls fits a chat template, by vLLM's name of it."""

import re
from collections.abc import Sequence


def tool_call_parser_of(chosen: str | None, chat_template: str, vllm_args: Sequence[str]) -> str | None:
    """The parser of tool calls that a server reads replies with. None leaves it to ``vllm_args``.

    If nobody chose one, it is ``hermes`` if the chat template knows tools, and ``llama3_json`` if it writes bare calls
    with parameters, as Llama's.

    Args:
        chosen: the parser that the user chose, or None.
        chat_template: the chat template of the senior.
        vllm_args: the options of ``vllm serve``.
    """
    told = any(arg.startswith("--tool-call-parser") for arg in vllm_args)
    knows_tools = re.search(r"\btools\b", chat_template) is not None
    bare = '"parameters": ' in chat_template and "<tool_call>" not in chat_template
    return chosen or (("llama3_json" if bare else "hermes") if knows_tools and not told else None)
