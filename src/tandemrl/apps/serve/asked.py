"""OpenAI's requests, read for an engine: prompts as token ids, sampling, strategy.

What would change a response and cannot be done is refused. The names and meanings of the fields are vLLM's.
"""

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandemrl.apps.serve.conversations import Conversation, Refused
from tandemrl.apps.serve.requests import MAX_SAMPLES, ParsedRequest
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.data.messages import sound
from tandemrl.data.rows import chat_tokens, messages_of
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.rollout.endpoint_partner import body_of
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.rollout.envs.tools import Schema
from tandemrl.selection import Strategy

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields whose defaults a model's generation config says."""
_PENALTIES = ("presence_penalty", "frequency_penalty")
_READ = {
    *("model", "prompt", "messages", "n", "seed", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "response_format"),
    *("tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "logprobs"),
    *("top_logprobs", "add_special_tokens", "return_token_ids", "tandem"),
    *SAMPLED,
    *_PENALTIES,
}
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "priority", "request_id", "parallel_tool_calls"),
    *("safety_identifier", "prompt_cache_key", "cache_salt", "include_reasoning", "routed_experts_prompt_start"),
}


class OtherReader(NamedTuple):
    """What it takes to prompt a junior with a vocabulary of its own.

    context: how many of its own tokens it can read. tools: whether its chat template takes tools. endpoint: where it is
    served, if it is not in this process.
    """

    tokenizer: Any
    context: int
    tools: bool
    endpoint: JuniorEndpointConfig | None = None


class TextStyle(NamedTuple):
    """How tokens become text. ``stop`` and ``stop_token_ids`` end it, and are left out of it unless ``keep_stop``."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    skip_special: bool = True


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: one ``Request`` per prompt, with a key for each sample."""

    chat: bool
    parsed: ParsedRequest
    requests: tuple[Request, ...]
    style: TextStyle
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with the number of tokens."""
    logprobs: bool = False
    tools: Mapping[str, Schema] | None = None
    """The schemas of the tools by name, if the text may hold calls of them."""
    raw: bool = False
    """Whether the response has token ids and no text."""


class Reader:
    """Reads requests for one pair of models.

    Args:
        tokenizer: the tokenizer of both, or that of the senior.
        context: how many tokens prompt and completion may have together.
        defaults: values of ``SAMPLED`` for requests that do not state them.
        template_arguments: further variables of the chat template.
        calls: whether tool calls can be read in a text; else requests with tools are refused.
        ends: the token ids that end a turn.
        junior: the junior, if it has a vocabulary of its own. Its chat template gets the default arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int,
        *,
        defaults: Mapping[str, float],
        template_arguments: Mapping[str, Any],
        calls: bool,
        ends: Collection[int],
        junior: OtherReader | None = None,
    ) -> None:
        self.tokenizer, self.context, self.calls, self.junior = tokenizer, context, calls, junior
        self.defaults, self.template_arguments, self.ends = defaults, template_arguments, ends

    def read(
        self,
        body: Mapping[str, Any],
        parsed: ParsedRequest,
        strategy: Strategy,
        *,
        chat: bool,
        ids: Sequence[int] | None = None,
        session: str | None = None,
    ) -> Asked:
        """Read the body of a request.

        Args:
            parsed: who writes.
            strategy: that of its selection.
            chat: whether it is a chat, or a plain completion.
            ids: the prompt of a chat that goes on, instead of its messages.
            session: what it is part of, if it is no conversation (see ``rollout.engine.Request``).

        Raises:
            Refused, DataError, ConfigError, EngineError: a field cannot be done, or is no value of its kind; names it.
        """
        for name, value in body.items():
            if name not in _READ | _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
                raise Refused(f"{name}: not possible with this server; leave it out")
        tools = self._tools(body) if chat else {}
        if ids is not None:
            prompts = [[*ids]]
        else:
            prompts = [self.chat_ids(body, body["tools"] if tools else ())] if chat else self.prompts(body)
        if len(prompts) > MAX_SAMPLES:
            raise Refused(f"prompt: at most {MAX_SAMPLES} are possible in a request")
        sampling = self._sampling(body, max(map(len, prompts)), chat=chat)
        by_junior: Sequence[Sequence[int]] = [()] * len(prompts)
        if strategy.removed is not None:
            by_junior = self._read_by_junior(body, body["tools"] if tools else (), chat=chat)
            if self.junior is not None and self.junior.endpoint is not None:
                body_of(sampling, self.junior.endpoint.leave_out)  # refuses what cannot be asked of it
        keys = tuple(map(parsed.key, range(parsed.samples)))
        style = TextStyle(
            sampling.stop,
            sampling.stop_token_ids,
            _flag(body, "include_stop_str_in_output", False),
            _flag(body, "skip_special_tokens", True),
        )
        stream = _flag(body, "stream", False)
        session = session if parsed.conversation is None else parsed.conversation.id
        more: dict[str, Any] = {"history": parsed.history, "session": session}
        return Asked(
            chat,
            parsed,
            tuple(
                Request(tuple(each), keys, sampling, strategy, junior_prompt=tuple(read), **more)
                for each, read in zip(prompts, by_junior, strict=True)
            ),
            style,
            stream,
            stream and bool(_mapping(body, "stream_options").get("include_usage")),
            _logprobs(body, chat=chat),
            tools or None,
        )

    def of_tokens(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request for vLLM's ``/inference/v1/generate`` as one for a completion. Its sampling is as it says: it knows
        no defaults of the model, and ends where the context does.

        Raises:
            Refused: it is none.
        """
        ids, sampling = body.get("token_ids"), _mapping(body, "sampling_params")
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise Refused("token_ids: expected a list of token ids")
        if body.get("stream"):
            raise Refused("stream: not possible here; leave it out")
        if sampling.get("logprobs") not in (None, 0, 1):
            raise Refused("sampling_params.logprobs: only the written token's is known; ask for 1")
        plain = dict.fromkeys(SAMPLED, 1.0) | {"top_k": 0, "min_p": 0.0, "max_tokens": self.context - len(ids)}
        given = {name: value for name, value in sampling.items() if value is not None}
        given |= {} if sampling.get("logprobs") is None else {"logprobs": 0}
        rest = {name: value for name, value in body.items() if name not in ("token_ids", "sampling_params")}
        return {**rest, **plain, **given, "prompt": ids}

    def chat_ids(self, body: Mapping[str, Any], tools: Any = (), *, to_answer: bool = True) -> list[int]:
        """The token ids of a chat."""
        arguments = {**self.template_arguments, **_mapping(body, "chat_template_kwargs")}
        if body.get("chat_template") is not None:
            raise Refused("chat_template: not possible with this server; leave it out")
        return self._rendered(self.tokenizer, body, arguments, tools, to_answer=to_answer)

    def after(self, conversation: Conversation, body: Mapping[str, Any]) -> list[int]:
        """The token ids of the next prompt of a conversation, with the further messages of a request.

        Raises:
            Refused, DataError, ConfigError: it does not go on with it, or the chat template cannot.
        """
        further = messages_of(sound(conversation.further(body)), "the request", "messages")
        tools = [*self._tools(body).values()]
        arguments = {**self.template_arguments, **_mapping(body, "chat_template_kwargs")}
        limits = {"result_tokens": sys.maxsize, "keep_turns": True}
        how = dict[str, Any](eos_token_ids=self.ends, template_arguments=arguments, **limits)
        rendering = Rendering(self.tokenizer, tools, **how)
        written = conversation.tokens.tolist()
        return [*written, *rendering.context(further, ended=written[-1] == rendering.end_of_turn).tokens]

    def _rendered(
        self, tokenizer: Any, body: Mapping[str, Any], arguments: Any, tools: Any, *, to_answer: bool = True
    ) -> list[int]:
        """The ids of a chat. The answer continues a last message of the assistant, unless the body says not to."""
        said, continued = messages_of(sound(body.get("messages")), "the request", "messages"), None
        if body.get("continue_final_message") is not None:
            continued = _flag(body, "continue_final_message", False)
        if continued and (said[-1]["role"] != "assistant" or body.get("add_generation_prompt")):
            raise Refused(
                "continue_final_message: the last message must be the assistant's, and add_generation_prompt not true"
            )
        how: dict[str, Any] = {"to_answer": to_answer or bool(continued), "continued": continued}
        return [*chat_tokens(tokenizer, said, "messages", arguments, sound([*tools]), **how)]

    def _tools(self, body: Mapping[str, Any]) -> dict[str, Schema]:
        given = body.get("tools") or []
        if not isinstance(given, list) or not all(_is_tool(tool) for tool in given):
            raise Refused('tools: expected a list of {"type": "function", "function": {"name": …, "parameters": {…}}}')
        if not given or body.get("tool_choice") == "none":
            return {}
        if not self.calls:
            raise Refused("tools: the chat template of the senior knows none; leave them out")
        if strict := [tool["function"]["name"] for tool in given if tool["function"].get("strict")]:
            raise Refused(f"tools: {strict[0]} is strict, which needs structured outputs, and grammars are not applied")
        return {tool["function"]["name"]: _with_parameters(tool) for tool in given}

    def _read_by_junior(self, body: Mapping[str, Any], tools: Sequence[Any], *, chat: bool) -> list[list[int]]:
        """The prompts of a request as a junior with a vocabulary of its own reads them.

        Raises:
            Refused, DataError: the request asks for something that needs one vocabulary, or the prompt does not suit
                the junior.
        """
        assert self.junior is not None  # else there are no strategies of two vocabularies
        tokenizer, context, takes_tools, _ = self.junior
        alone = 'leave it out, or let the senior write alone: "tandem": {"solo": "senior"}'
        for name in ("stop_token_ids", "ignore_eos"):
            if body.get(name):
                why = "with a junior of another vocabulary, a text ends by EOS, stop or max_tokens"
                raise Refused(f"{name}: {why}; {alone}")
        if _logprobs(body, chat=chat):
            raise Refused(f"logprobs: the junior's words have none, being drawn in another vocabulary; {alone}")
        if tools and not takes_tools:
            raise Refused(f"tools: the chat template of the junior, which has another vocabulary, knows none; {alone}")
        if chat:
            ids = [self._rendered(tokenizer, body, DEFAULT_ARGUMENTS, tools)]
        else:
            ids = self.prompts(body, by_junior=True)
        if (longest := max(map(len, ids))) >= context:
            raise Refused(
                f"the prompt: {longest} tokens of the junior's leave no room in its context of {context}; shorten it"
            )
        return ids

    def prompts(self, body: Mapping[str, Any], *, by_junior: bool = False) -> list[list[int]]:
        """The token ids of each prompt of a completion.

        Args:
            by_junior: in the vocabulary of the junior, which has its own.

        Raises:
            Refused: a prompt is neither a text nor token ids, or is empty; or there are token ids for a junior with a
                vocabulary of its own.
        """
        tokenizer = self.junior.tokenizer if by_junior and self.junior is not None else self.tokenizer
        prompt = body.get("prompt")
        several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        special = _flag(body, "add_special_tokens", True)
        ids = []
        for each in several:
            if isinstance(each, str):
                each = tokenizer(sound(each), add_special_tokens=special, verbose=False)["input_ids"]
            elif by_junior and isinstance(each, list):
                raise Refused("prompt: token ids belong to one vocabulary, and the junior has another; send a text")
            if not isinstance(each, list) or not each or any(type(token) is not int for token in each):
                raise Refused("prompt: expected a text or token ids, or a list of those, none of them empty")
            ids.append(each)
        return ids

    def _sampling(self, body: Mapping[str, Any], longest: int, *, chat: bool) -> Sampling:
        room = self.context - longest
        asked = body.get("max_completion_tokens") if chat else None
        asked = body.get("max_tokens") if asked is None else asked
        asked = (room if chat else 16) if asked is None else asked
        if type(asked) is not int or (asked < 1 and room >= 1):
            raise Refused(f"max_tokens: expected a whole number from 1, got {json.dumps(asked)}")
        if asked > room or room < 1:
            raise Refused(
                f"max_tokens: the context (max_model_len) is {self.context} tokens; {longest} of the prompt and "
                f"{max(asked, 1)} to write are too many"
            )
        values = {name: _number(body, name, self.defaults.get(name)) for name in (*SAMPLED, *_PENALTIES)}
        if values["top_k"] == -1:  # off, in vLLM
            values["top_k"] = 0
        stop = body.get("stop")
        stops = [stop] if isinstance(stop, str) else stop or []
        ids = body.get("stop_token_ids") or []
        if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
            raise Refused("stop: expected a string or a list of strings, none of them empty")
        if not isinstance(ids, list) or any(type(each) is not int for each in ids):
            raise Refused("stop_token_ids: expected a list of token ids")
        try:
            return Sampling(
                max_tokens=asked,
                stop=tuple(stops),
                stop_token_ids=tuple(ids),
                ignore_eos=_flag(body, "ignore_eos", False),
                **{name: value for name, value in values.items() if value is not None},
            )
        except ValueError as error:
            raise Refused(str(error).removeprefix("sampling.")) from None


def _with_parameters(tool: Schema) -> Schema:
    """A schema that says what the parameters are, if there are none, too."""
    function = tool["function"]
    stated = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    return {**tool, "function": {**function, "parameters": stated}}


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters") or {}, dict)


def _logprobs(body: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether log-probs are asked for. Only those of the written tokens are known."""
    asked, most = body.get("logprobs"), body.get("top_logprobs") or 0
    if chat:
        asked = asked or None
    else:
        most = asked or 0
    if most:
        raise Refused("logprobs, top_logprobs: only the written token's is known; ask for 0")
    return asked is not None


def _mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise Refused(f"{name}: expected an object, got {json.dumps(value)}")
    return value or {}


def _flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name}: expected true or false, got {json.dumps(value)}")
    return default if value is None else value


def _number(body: Mapping[str, Any], name: str, default: float | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    kinds: Sequence[type] = (int,) if name == "top_k" else (int, float)
    if type(value) not in kinds or not math.isfinite(value):
        raise Refused(f"{name}: expected a number, got {json.dumps(value)}")
    return value if name == "top_k" else float(value)
