"""What a request asks for: who writes, from which seed, how often. `asked` reads the rest of it.

A request may have a field ``"tandem": {...}``. It holds ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of
``strategy``, ``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first``, which then replace the server's values.
For a chat it may also hold ``conversation``, which continues a chat from request to request (see ``conversations``).
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from tandemrl.apps.serve.conversations import NEW, Conversation, Refused
from tandemrl.config import SelectionConfig
from tandemrl.config.strategies import KINDS
from tandemrl.selection import Who
from tandemrl.selection.draws import mix64

MAX_SAMPLES = 1024
"""How many completions of a prompt one request may ask for, and how many prompts it may have."""
MAX_WHOLE = 2**31
"""The largest whole number of a selection."""
SEED_BITS = 53  # of a seed that we choose, so that JSON readers with doubles only can keep it


class ParsedRequest(NamedTuple):
    """Who writes what a request asks for.

    selection: who writes. seed: the seed of its first sample. samples: how many completions each prompt gets (``n``).
    show_prompt: whether the client wants the prompt's token ids.
    """

    selection: SelectionConfig
    seed: int
    samples: int
    show_prompt: bool
    conversation: Conversation | None = None
    """The conversation before the request, or a new one; None if the request is not part of a conversation."""

    @property
    def history(self) -> tuple[tuple[int, ...], ...]:
        """The own tokens of each earlier turn."""
        return () if self.conversation is None else self.conversation.turns

    def key(self, index: int) -> int:
        """The key of the choice ``index``. Sample i of every prompt has the seed ``seed + i``."""
        return mix64(self.seed + index % self.samples)


def parse(body: Mapping[str, Any], default: SelectionConfig, known: Conversation | None = None) -> ParsedRequest:
    """Read who writes, and refuse what no tandem server can do.

    Args:
        body: the JSON body of the request.
        default: the server's selection.
        known: the conversation that the request continues.

    Raises:
        Refused: a field is not possible in tandem decoding. The message names it and what it should be.
    """
    field = body.get
    if field("prompt_logprobs") is not None:
        raise Refused("prompt_logprobs: a prompt has no author; leave it out")
    if field("response_format") not in (None, {"type": "text"}):
        raise Refused("response_format: only text, since grammars are not applied")
    if field("tool_choice") not in (None, "none", "auto"):
        raise Refused("tool_choice: only none and auto; a forced call needs a grammar, and these are not applied")
    tandem = {} if field("tandem") is None else field("tandem")
    selection = selection_of(tandem, default if known is None else known.selection)
    samples = _whole(body, "n", 1, 1, MAX_SAMPLES)
    seed = None if field("seed") == -1 else _whole(body, "seed", None, 0, 2**63 - samples)
    conversation = known
    if known is not None:
        seed = known.seed if seed is None else seed
        if (seed, selection) != (known.seed, known.selection):
            raise Refused("seed, tandem: a conversation keeps those of its first request; leave them out")
    if seed is None:
        if _prompts(field("prompt")) > 1:
            raise Refused(
                "prompt: several prompts in one request share its seed, so equal prompts would get equal completions; "
                "send `seed` if you want that, else one request per prompt"
            )
        seed = secrets.randbits(SEED_BITS)
    if conversation_of(body) == NEW:
        conversation = Conversation.begin(seed, selection, body)
    if conversation is not None:
        for name, usual in {"n": 1, "add_generation_prompt": True, "continue_final_message": False}.items():
            if field(name) not in (None, usual):
                raise Refused(f"{name}: only {json.dumps(usual)} is possible in a conversation")
    return ParsedRequest(selection, seed, samples, bool(field("return_token_ids")), conversation)


_FIELDS: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "prob_senior": (int, float),
    "max_gap_tokens": (int,),
    "chunk_size": (int,),
    "first": (str,),
    "solo": (str,),
    "conversation": (str,),
}


def selection_of(overrides: Any, default: SelectionConfig) -> SelectionConfig:
    """The selection of a request: the server's, with the values that the request gives.

    The strategies themselves check whether values are in range.

    Args:
        overrides: the field ``tandem`` of the request.
        default: the server's selection.

    Raises:
        Refused: a field is unknown, has the wrong type, or names an unknown strategy or author.
    """
    if not isinstance(overrides, dict):
        raise Refused(f"tandem: expected an object with any of {', '.join(_FIELDS)}")
    for name, value in overrides.items():
        if name not in _FIELDS:
            raise Refused(f"tandem: unknown field {name!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise Refused(f"tandem.{name}: expected {_FIELDS[name][-1].__name__}, got {json.dumps(value)}")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:  # the workers compute with 64 bits and die of more
            raise Refused(f"tandem.{name}: expected at most {MAX_WHOLE}, got {value}")
    for name, allowed in {"strategy": (*KINDS,), "first": get_args(Who), "solo": get_args(Who)}.items():
        if overrides.get(name, allowed[0]) not in allowed:
            raise Refused(f"tandem.{name}: {overrides[name]!r} is none of {', '.join(allowed)}")
    overrides = {name: value for name, value in overrides.items() if name != "conversation"}
    if "solo" in overrides:
        if len(overrides) > 1:
            raise Refused("tandem.solo: one author writes everything; leave the other fields out")
        overrides = {"strategy": "solo", "first": overrides["solo"]}
    if "prob_senior" in overrides:
        overrides["prob_senior"] = float(overrides["prob_senior"])
    return replace(default, **overrides)


def conversation_of(body: Mapping[str, Any]) -> str | None:
    """``NEW`` or the id of the conversation that a request names; None if it names none."""
    tandem = body.get("tandem")
    id = tandem.get("conversation") if isinstance(tandem, dict) else None
    return id if isinstance(id, str) else None


def _whole(body: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    """A whole number of a request, or ``default`` if it has none.

    "3" and true are refused, since the authors depend on the exact number.

    Args:
        body: the JSON body of the request.
        name: the field.
        default: the value if the field is missing or null.
        low: the smallest possible number.
        high: the largest possible number.

    Raises:
        Refused: the value is not a whole number from ``low`` to ``high``.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Refused(f"{name}: expected a whole number from {low} to {high}, got {json.dumps(value)}")
    return value


def _prompts(prompt: Any) -> int:
    """How many prompts a completion request has. A list of numbers is one tokenised prompt."""
    return len(prompt) if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt) else 1
