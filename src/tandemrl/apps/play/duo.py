"""Senior and junior, or a person in the junior's place, write a text a few tokens at a time.

Nothing is remembered between two calls: a `Draft` holds everything that the next tokens depend on. Its own tokens go to
the engine as ``Request.history``, so that strategy and draws continue where they were. A text that is written in pieces
of any length is therefore the one that a single request would have given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import SelectionConfig
from tandemrl.data.rows import chat_tokens
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_logprobs
from tandemrl.rollout.engine import Engine, Request, Sampling, StopReason
from tandemrl.rollout.schedule import schedule_of
from tandemrl.selection import Strategy, resumed
from tandemrl.selection.draws import request_key
from tandemrl.training.tracking import authored_spans
from tandemrl.types import Author


@dataclass(frozen=True)
class Draft:
    """A text that is being written.

    tokens: the tokens after the prompt. authors: the author of each of them (1 senior, 0 junior).
    """

    prompt: str
    seed: int = 0
    selection: SelectionConfig = SelectionConfig()  # noqa: RUF009  # frozen
    temperature: float = 1.0
    tokens: tuple[int, ...] = ()
    authors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.authors):
            raise ValueError(f"{len(self.tokens)} tokens with {len(self.authors)} authors")


class Token(NamedTuple):
    """A token as the page shows it. ``surprisal`` is -log junior(token) in nats, at temperature 1. A special token has
    its name in ``special`` and no ``text``."""

    id: int
    text: str
    author: int
    surprisal: float
    special: str


class Piece(NamedTuple):
    """The next tokens of a text.

    stop: why the text is over, or None if it is not. next: the author of the token after them, by the strategy.
    """

    tokens: list[Token]
    stop: StopReason | None
    next: Author


class Duo:
    """The two models behind a page.

    Args:
        junior: the model that reads every token for its surprisal. The engine may use the same model.
        longest: how many tokens the longest text may have, including the prompt.
        template_arguments: further variables of the chat template (``data.template_arguments``).
    """

    def __init__(
        self,
        engine: Engine,
        junior: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        longest: int,
        template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
    ) -> None:
        self.engine, self.junior, self.tokenizer, self.longest = engine, junior, tokenizer, longest
        self._template_arguments = template_arguments
        self._strategy = lru_cache(maxsize=32)(self._make_strategy)
        self._special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def write(self, draft: Draft, count: int) -> Piece:
        """Write the next ``count`` tokens, or fewer if the text ends.

        Raises:
            ValueError: a setting is out of range, or the prompt leaves no room; the message names it.
        """
        prompt = self._prompt(draft.prompt)
        room = self.longest - len(prompt) - len(draft.tokens)
        if room <= 0:
            if not draft.tokens:
                raise ValueError(f"the prompt has {len(prompt)} tokens; at most {self.longest - 1} leave room to write")
            return Piece([], "length", Author.SENIOR)
        [[written]] = self.engine.generate([self._request(draft, prompt, min(count, room))])
        stop = written.stop_reason if written.stop_reason != "length" or room <= count else None
        longer = replace(
            draft,
            tokens=(*draft.tokens, *written.tokens.tolist()),
            authors=(*draft.authors, *written.author.tolist()),
        )
        read = self._read(longer, len(draft.tokens), prompt, over=stop is not None)
        return Piece(read, stop, self.next_author(longer))

    def room(self, prompt: str) -> int:
        """How many tokens fit after a prompt."""
        return self.longest - len(self._prompt(prompt))

    def texts(self, drafts: Sequence[Draft], count: int) -> list[str]:
        """The texts of several drafts that are empty as yet, of at most ``count`` tokens, as scorers read them."""
        prompts = [self._prompt(draft.prompt) for draft in drafts]
        rooms = [min(count, self.longest - len(prompt)) for prompt in prompts]
        written = self.engine.generate([*map(self._request, drafts, prompts, rooms)])
        return [self.text(completion.tokens.tolist()) for [completion] in written]

    def say(self, draft: Draft, text: str) -> Piece:
        """Append what a person typed as the junior's text. It is encoded here, once."""
        self._check(draft.tokens)
        typed = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        prompt = self._prompt(draft.prompt)
        if len(prompt) + len(draft.tokens) + len(typed) > self.longest:
            raise ValueError(f"the text would be longer than {self.longest} tokens")
        authors = (*draft.authors, *[int(Author.JUNIOR)] * len(typed))
        longer = replace(draft, tokens=(*draft.tokens, *typed), authors=authors)
        return Piece(self._read(longer, len(draft.tokens), prompt), None, self.next_author(longer))

    def text(self, tokens: Sequence[int]) -> str:
        """The text of some tokens as scorers read it: without special tokens.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        self._check(tokens)
        return str(self.tokenizer.decode([*tokens], skip_special_tokens=True))

    def next_author(self, draft: Draft) -> Author:
        """Who writes the token after the draft; with ``before_word``, who proposes it."""
        keys = torch.tensor([request_key(draft.seed, 0, 0, 0)], dtype=torch.int64)
        history = [draft.tokens] if draft.tokens else []
        senior, _ = resumed(self._strategy(draft.selection), keys, [history])
        return Author.SENIOR if bool(senior) else Author.JUNIOR

    def _request(self, draft: Draft, prompt: Sequence[int], count: int) -> Request:
        sampling = Sampling(max_tokens=count, temperature=draft.temperature)
        history = (draft.tokens,) if draft.tokens else ()
        key, strategy = request_key(draft.seed, 0, 0, 0), self._strategy(draft.selection)
        return Request([*prompt, *draft.tokens], (key,), sampling, strategy, history=history)

    def _make_strategy(self, selection: SelectionConfig) -> Strategy:
        # A text is one turn, though the engine gets what is there of it as one that was written before.
        return schedule_of(selection, self.tokenizer, self.engine.vocabulary).strategy(1)._replace(turn=None)

    def _check(self, tokens: Sequence[int]) -> None:
        if not all(0 <= token < self.engine.vocabulary for token in tokens):
            raise ValueError(f"tokens: one is outside the vocabulary of {self.engine.vocabulary}")

    def _prompt(self, text: str) -> list[int]:
        asked = [{"role": "user", "content": text}]
        return [*chat_tokens(self.tokenizer, asked, "the prompt", self._template_arguments)]

    @torch.no_grad()
    def _read(self, draft: Draft, start: int, prompt: Sequence[int], *, over: bool = False) -> list[Token]:
        """The tokens from ``start`` on, as they are shown. A character made of several tokens is shown at the last one.

        Args:
            over: whether the text is over, so that no further piece completes its last character.
        """
        if start == len(draft.tokens):
            return []
        batch = pack_tokens([[*prompt, *draft.tokens]], self.junior.device)
        first = len(prompt) + start
        select = torch.arange(len(batch.tokens), device=batch.tokens.device) >= first
        surprisals = (-token_logprobs(self.junior, batch, select=select)[0])[first:].tolist()
        one_by_one = [i % 2 for i in range(len(draft.tokens))]  # so that each token is a span of its own
        texts = [text for _, text in authored_spans(draft.tokens, one_by_one, self._decode)]
        if not over:
            texts[-1] = texts[-1].rstrip("\ufffd")
        special = [self._special.get(token, "") for token in draft.tokens[start:]]
        shown = zip(draft.tokens[start:], texts[start:], draft.authors[start:], surprisals, special, strict=True)
        return [Token(*each) for each in shown]

    def _decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
