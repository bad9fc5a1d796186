"""OpenAI's requests, read for an engine: who writes, from which seed, after which token ids, how.

What would change a response and cannot be done is refused. The names and meanings of the fields are vLLM's. A request
may have a field ``"tandem": {...}``. It holds ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of ``strategy``,
``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first``, which then replace the server's values.
"""

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from tandemrl.config import SelectionConfig
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.config.strategies import KINDS
from tandemrl.data.messages import Message, sound
from tandemrl.data.rows import chat_tokens, messages_of
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.rollout.endpoint_partner import body_of
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.envs.environment import Schema
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.rollout.gateway import fields
from tandemrl.rollout.gateway.fields import FLAG, NUMBER, OBJECT, Kind, Refused, whole
from tandemrl.selection import Strategy
from tandemrl.selection.draws import mix64

MAX_SAMPLES = 1024
"""How many completions of a prompt one request may ask for, and how many prompts it may have."""
MAX_RENDERINGS = 32
"""How many sets of tools and variables of the template a server is ready for at once."""
SEED_BITS = 53  # of a seed that we choose, so that JSON readers with doubles only can keep it
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields whose defaults a model's generation config says."""
_PENALTIES = ("presence_penalty", "frequency_penalty")
Form = Literal["chat", "text", "ids"]
"""What goes in and out: messages (``/v1/chat/completions``), texts (``/v1/completions``) or token ids
(``/inference/v1/generate``)."""


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    return isinstance(function.get("parameters") or {}, dict)


_ANYTHING = Kind(lambda value: True, "anything")  # what reads it refuses it
_IDS = Kind(lambda ids: isinstance(ids, list) and all(type(each) is int for each in ids), "a list of token ids")
_OWN_LOGPROB = Kind(lambda value: value == 0, "0, since only the written token's is known")
_FIELDS: dict[str, Kind] = {
    **dict.fromkeys(("model", "prompt", "messages"), _ANYTHING),
    **dict.fromkeys(("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), FLAG),
    **dict.fromkeys(
        ("add_special_tokens", "add_generation_prompt", "continue_final_message", "return_token_ids"), FLAG
    ),
    **dict.fromkeys(("stream_options", "chat_template_kwargs", "tandem"), OBJECT),
    **dict.fromkeys((*SAMPLED, *_PENALTIES), NUMBER),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), whole(1, 2**31)),
    "top_k": whole(-1, 2**31),
    "n": whole(1, MAX_SAMPLES),
    "seed": whole(-1, 2**63 - MAX_SAMPLES),
    "stop": Kind(
        lambda stop: all(isinstance(each, str) and each for each in (stop if isinstance(stop, list) else [stop])),
        "a string or a list of strings, none of them empty",
    ),
    "stop_token_ids": _IDS,
    "response_format": Kind(lambda value: value == {"type": "text"}, "text, since grammars are not applied"),
    "tool_choice": Kind(lambda value: value in ("none", "auto"), "none or auto, since grammars are not applied"),
    "tools": Kind(
        lambda tools: isinstance(tools, list) and all(map(_is_tool, tools)),
        'a list of {"type": "function", "function": {"name": …, "parameters": {…}}}',
    ),
    "logprobs": _OWN_LOGPROB,
    "top_logprobs": _OWN_LOGPROB,
    "prompt_logprobs": Kind(lambda value: False, "nothing, since a prompt has no author"),  # 0 asks for them
}
_WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "priority", "request_id", "parallel_tool_calls"),
    *("safety_identifier", "prompt_cache_key", "cache_salt", "include_reasoning", "routed_experts_prompt_start"),
}
_TANDEM = {"strategy": fields.one_of(*KINDS), **fields.SELECTION, "solo": fields.AUTHOR}


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
    """A request: one ``Request`` per prompt, with a key for each sample. Sample i of every prompt has the seed
    ``seed + i``."""

    form: Form
    body: Mapping[str, Any]
    requests: tuple[Request, ...]
    seed: int | None
    """None in a session."""
    selection: SelectionConfig
    style: TextStyle
    tools: Mapping[str, Schema] = field(default_factory=dict)
    """The schemas of the tools by name, if the text may hold calls of them."""

    def wants(self, name: str) -> bool:
        """Whether a field of the body is stated, and neither false nor empty. 0 log-probs are the token's own."""
        value = self.body.get(name)
        return value not in (None, []) and value is not False


@dataclass(frozen=True)
class Reader:
    """Reads requests for one pair of models."""

    tokenizer: Any
    """The tokenizer of both, or that of the senior."""
    context: int
    """How many tokens prompt and completion may have together."""
    strategy_of: Callable[[SelectionConfig], Strategy]
    """Makes the strategy of a selection, or raises ``ValueError``."""
    selection: SelectionConfig
    """That of requests which name none."""
    defaults: Mapping[str, float]
    """Values of ``SAMPLED`` for requests that do not state them."""
    template_arguments: Mapping[str, Any]
    """Further variables of the chat template."""
    calls: bool
    """Whether tool calls can be read in a text; else requests with tools are refused."""
    ends: Collection[int]
    """The token ids that end a turn."""
    junior: OtherReader | None = None
    """The junior, if it has a vocabulary of its own. Its chat template gets the default arguments."""
    _renderings: dict[str, Rendering] = field(default_factory=dict, compare=False)
    """By tools and variables of the template; the last ones."""

    def read(
        self,
        body: Mapping[str, Any],
        form: Form,
        *,
        session: str | None = None,
        prompt: Sequence[int] | None = None,
    ) -> Asked:
        """Read the body of a request.

        Args:
            session: what it is part of (see ``rollout.engine.Request``).
            prompt: the ids of its messages, if they are known.

        Raises:
            Refused, DataError, ConfigError, EngineError: a field cannot be done, or is no value of its kind; names it.
        """
        if form == "ids":
            body = _of_tokens(body)
        chat = form == "chat"
        _check(body, chat=chat)
        selection = selection_of(body.get("tandem") or {}, self.selection)
        try:
            strategy = self.strategy_of(selection)
        except ValueError as error:
            raise Refused(f"tandem: {error}") from None
        tools = self._tools(body) if chat else {}
        prompts = self.prompts(body, chat=chat, shown=bool(tools)) if prompt is None else [[*prompt]]
        if len(prompts) > MAX_SAMPLES:
            raise Refused(f"prompt: at most {MAX_SAMPLES} are possible in a request")
        seed = _seed(body, len(prompts))
        sampling = self._sampling(body, max(map(len, prompts)), fill=form != "text")
        keys = tuple(mix64(seed + i) for i in range(body.get("n") or 1))
        keep_stop, skip_special = body.get("include_stop_str_in_output"), body.get("skip_special_tokens")
        style = TextStyle(sampling.stop, sampling.stop_token_ids, bool(keep_stop), skip_special is not False)
        asked = Asked(form, body, (), seed, selection, style, tools)
        read: Sequence[Sequence[int]] = [()] * len(prompts)
        if strategy.removed is not None:
            read = self._read_by_junior(asked, sampling)
        both = zip(prompts, read, strict=True)
        how: dict[str, Any] = {"keys": keys, "sampling": sampling, "strategy": strategy, "session": session}
        requests = (Request(tuple(p), junior_prompt=tuple(j), **how) for p, j in both)
        return replace(asked, requests=tuple(requests))

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """The token ids of a chat or of a text, for ``/tokenize``.

        Raises:
            Refused, DataError, ConfigError: see `read`.
        """
        chat = "messages" in body
        _check(body, chat=chat)
        [ids] = self.prompts(body, chat=chat, shown=bool(body.get("tools")))
        return ids

    def prompts(
        self, body: Mapping[str, Any], *, chat: bool, shown: bool = False, by_junior: bool = False
    ) -> list[list[int]]:
        """The token ids of the chat of a request, or of each of its prompts. The answer to a chat continues a last
        message of the assistant, unless the body says not to.

        Args:
            shown: whether the prompt tells of the tools.
            by_junior: in the vocabulary of the junior, which has its own.
        """
        tokenizer = self.junior.tokenizer if by_junior and self.junior is not None else self.tokenizer
        if not chat:
            return [*_plain_prompts(body, tokenizer, by_junior=by_junior)]
        said = messages_of(sound(body.get("messages")), "the request", "messages")
        continued, begun = body.get("continue_final_message"), body.get("add_generation_prompt")
        if continued and (said[-1]["role"] != "assistant" or begun):
            raise Refused(
                "continue_final_message: the last message must be the assistant's, and add_generation_prompt not true"
            )
        how: dict[str, Any] = {"to_answer": begun is not False or bool(continued), "continued": continued}
        arguments, tools = DEFAULT_ARGUMENTS if by_junior else self._arguments(body), body["tools"] if shown else ()
        return [[*chat_tokens(tokenizer, said, "messages", arguments, sound([*tools]), **how)]]

    def _arguments(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.template_arguments, **(body.get("chat_template_kwargs") or {})}

    def continued(self, written: Sequence[int], further: Sequence[Message], body: Mapping[str, Any]) -> list[int]:
        """The ids of a text that ends with a turn, and of further messages of a request.

        Raises:
            ConfigError: the chat template does not show them after a turn.
        """
        schemas, arguments = [*self._tools(body).values()], self._arguments(body)
        named = json.dumps([schemas, arguments], sort_keys=True)
        if named not in self._renderings:
            if len(self._renderings) == MAX_RENDERINGS:
                del self._renderings[next(iter(self._renderings))]
            self._renderings[named] = Rendering(
                self.tokenizer, schemas, eos_token_ids=self.ends, template_arguments=arguments, keep_turns=True
            )
        rendering = self._renderings[named]
        return [*written, *rendering.context(further, ended=written[-1] == rendering.end_of_turn).tokens]

    def _tools(self, body: Mapping[str, Any]) -> dict[str, Schema]:
        """The schemas of the tools by name, which say what the parameters are if there are none, too."""
        given = body.get("tools") or []
        if not given or body.get("tool_choice") == "none":
            return {}
        if not self.calls:
            raise Refused("tools: the chat template of the senior knows none; leave them out")
        schemas: dict[str, Schema] = {}
        for tool in given:
            function = tool["function"]
            if function.get("strict"):
                raise Refused(f"tools: {function['name']} is strict, which needs structured outputs, i.e. grammars")
            parameters = {"type": "object", "properties": {}} | (function.get("parameters") or {})
            schemas[function["name"]] = {**tool, "function": {**function, "parameters": parameters}}
        return schemas

    def _read_by_junior(self, asked: Asked, sampling: Sampling) -> list[list[int]]:
        """The prompts of a request as a junior with a vocabulary of its own reads them.

        Raises:
            Refused, DataError: the request asks for something that needs one vocabulary, or the prompt does not suit
                the junior. EngineError: it cannot be asked of the junior's endpoint.
        """
        assert self.junior is not None  # else there are no strategies of two vocabularies
        ends = "with a junior of another vocabulary, a text ends by EOS, stop or max_tokens"
        needs_one = dict.fromkeys(("stop_token_ids", "ignore_eos"), ends)
        needs_one["logprobs"] = "the junior's words have none, being drawn in another vocabulary"
        refused = {name: why for name, why in needs_one.items() if asked.wants(name)}
        if asked.tools and not self.junior.tools:
            refused["tools"] = "the chat template of the junior, which has another vocabulary, knows none"
        for name, why in refused.items():
            raise Refused(f'{name}: {why}; leave it out, or let the senior write alone: "tandem": {{"solo": "senior"}}')
        if self.junior.endpoint is not None:
            body_of(sampling, self.junior.endpoint.leave_out)  # refuses what cannot be asked of it
        ids = self.prompts(asked.body, chat=asked.form == "chat", shown=bool(asked.tools), by_junior=True)
        if (longest := max(map(len, ids))) >= self.junior.context:
            raise Refused(
                f"the prompt: {longest} tokens of the junior's leave no room in its context of {self.junior.context}; "
                "shorten it"
            )
        return ids

    def _sampling(self, body: Mapping[str, Any], longest: int, *, fill: bool) -> Sampling:
        """How tokens are drawn. ``fill``: whether a request without a limit may fill the context."""
        room = self.context - longest
        stated = body.get("max_completion_tokens") or body.get("max_tokens")
        asked = stated or (room if fill else 16)
        if asked > room or room < 1:
            raise Refused(
                f"max_tokens: the context (max_model_len) is {self.context} tokens; {longest} of the prompt and "
                f"{max(asked, 1)} to write are too many"
            )
        given = {name: body[name] for name in (*SAMPLED, *_PENALTIES) if body.get(name) is not None}
        values = {name: v if name == "top_k" else float(v) for name, v in {**self.defaults, **given}.items()}
        values["top_k"] = max(0, values.get("top_k", 0))  # -1: off, in vLLM
        stop = body.get("stop") or ()
        try:
            return Sampling(
                max_tokens=asked,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_token_ids=tuple(body.get("stop_token_ids") or ()),
                ignore_eos=bool(body.get("ignore_eos")),
                **values,  # type: ignore[arg-type]  # top_k is whole
            )
        except ValueError as error:
            raise Refused(str(error).removeprefix("sampling.")) from None


def _check(body: Mapping[str, Any], *, chat: bool) -> None:
    for name, value in body.items():
        if name not in _FIELDS and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise Refused(f"{name}: not possible with this server; leave it out")
    fields.check(body, _FIELDS | ({"logprobs": FLAG} if chat else {}))


def _of_tokens(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request for vLLM's ``/inference/v1/generate`` as one for a completion. Its sampling is as it says: it knows no
    defaults of the model, and ends where the context does.

    Raises:
        Refused: it is none.
    """
    not_here = Kind(lambda value: value is False, "false, since it is not possible here")
    fields.check(body, {"token_ids": _IDS, "sampling_params": OBJECT, "stream": not_here})
    sampling = {name: value for name, value in (body.get("sampling_params") or {}).items() if value is not None}
    own = Kind(lambda value: value in (0, 1), "1, since only the written token's is known")
    fields.check(sampling, {"logprobs": own}, "sampling_params.")
    if "logprobs" in sampling:
        sampling["logprobs"] = 0
    plain = dict.fromkeys(SAMPLED, 1.0) | {"top_k": 0, "min_p": 0.0}
    rest = {name: value for name, value in body.items() if name not in ("token_ids", "sampling_params")}
    return {**rest, **plain, **sampling, "prompt": body.get("token_ids")}


def _plain_prompts(body: Mapping[str, Any], tokenizer: Any, *, by_junior: bool) -> Iterator[list[int]]:
    """Yield the token ids of each prompt of a completion."""
    prompt, special = body.get("prompt"), body.get("add_special_tokens") is not False
    several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    for each in several:
        if isinstance(each, str):
            each = tokenizer(sound(each), add_special_tokens=special, verbose=False)["input_ids"]
        elif by_junior and isinstance(each, list):
            raise Refused("prompt: token ids belong to one vocabulary, and the junior has another; send a text")
        if not each or not _IDS.holds(each):
            raise Refused("prompt: expected a text or token ids, or a list of those, none of them empty")
        yield each


def _seed(body: Mapping[str, Any], prompts: int) -> int:
    """The seed of the first sample."""
    seed = body.get("seed")
    if seed not in (None, -1):  # -1: none, as in vLLM
        return int(seed)
    if prompts > 1:
        raise Refused(
            "prompt: several prompts in one request share its seed, so equal prompts would get equal completions; send "
            "`seed` if you want that, else one request per prompt"
        )
    return secrets.randbits(SEED_BITS)


def selection_of(tandem: Mapping[str, Any], default: SelectionConfig) -> SelectionConfig:
    """The selection of a request: ``default``, with the values that the field ``tandem`` gives.

    Raises:
        Refused: a field is unknown or of another kind.
    """
    if "conversation" in tandem:
        where = "ask /sessions/NAME/v1 instead of /v1, with a name of your own"
        raise Refused(f"tandem.conversation: requests of one session go on from each other; {where}")
    fields.check(tandem, _TANDEM, "tandem.", only=True)
    given = {name: value for name, value in tandem.items() if value is not None}
    if "solo" in given:
        if len(given) > 1:
            raise Refused("tandem.solo: one author writes everything; leave the other fields out")
        given = {"strategy": "solo", "first": given["solo"]}
    return fields.with_selected(default, given)
