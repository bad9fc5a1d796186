"""Senior and junior, or a person in the junior's place, write a text a few tokens at a time.

A `Draft` holds everything that the next tokens depend on. A single request writes the text, and waits until more of it
is asked for. Where another draft is asked for, it begins anew, and writes the same text again, by its seed. After what
a person inserts, a new request goes on from the text up to there, with strategy and draws where they were
(``Request.history``).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import SelectionConfig
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Prompt, Row, chat_tokens
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.evals import Sample
from tandemrl.evals.handover import Grade, handover_effects, unit_of
from tandemrl.evals.protocol import Profile
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.rollout.call import CallEngine, Finished, NewTokens
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.engine import Request, Sampling, StopReason
from tandemrl.rollout.gateway.texts import Authors
from tandemrl.rollout.schedule import schedule_of
from tandemrl.selection import Strategy
from tandemrl.selection.draws import request_key
from tandemrl.training.authored import authored_spans
from tandemrl.types import Author, Response


@dataclass(frozen=True)
class Draft:
    """A text that is being written.

    tokens: the tokens after the prompt. authors: the author of each of them (1 senior, 0 junior; in an episode, -1 for
    what neither wrote). given: where what a person inserted last ends.
    """

    prompt: str
    seed: int = 0
    selection: SelectionConfig = SelectionConfig()  # noqa: RUF009  # frozen
    temperature: float = 1.0
    tokens: tuple[int, ...] = ()
    authors: tuple[int, ...] = ()
    given: int = 0

    @property
    def begun(self) -> "Draft":
        """The part up to where what a person inserted last ends."""
        return replace(self, tokens=self.tokens[: self.given], authors=self.authors[: self.given])

    def longer(self, tokens: Sequence[int], authors: Sequence[int]) -> "Draft":
        return replace(self, tokens=(*self.tokens, *tokens), authors=(*self.authors, *authors))


PLACES, BRANCHES, FURTHER = 32, 12, 64
"""Of `Duo.handovers`: at how many words the models are handed over, how often each of them goes on there, and how many
tokens longer than the text that may become."""


class Token(NamedTuple):
    """A token as the page shows it. ``surprisal`` is -log junior(token) in nats, at temperature 1. A special token has
    its name in ``special`` and no ``text``.
    """

    id: int
    text: str
    author: int
    surprisal: float
    special: str


class Piece(NamedTuple):
    """The next tokens of a text. ``stop`` says why the text is over; None if it is not."""

    tokens: list[Token]
    stop: StopReason | None


class LazyText:
    """A completion that is written no further than it is asked for, in a call that stays open.

    begun: the draft before its first token. stop: why it ended; None as long as it has not.
    """

    def __init__(self, engine: CallEngine, begun: Draft, request: Request) -> None:
        self.begun, self.tokens, self.authors = begun, list[int](), list[int]()
        self.stop: StopReason | None = None
        self._authors = Authors(request.strategy, request.keys[0], request.history)
        self._call = engine.open()
        try:
            [self._number] = self._call.submit([request])
        except BaseException:
            self.close()  # else nobody could open another call
            raise

    def write(self, count: int) -> None:
        """Write ``count`` tokens in all, or to the end.

        Raises:
            EngineError: the engine cannot write it.
        """
        while len(self.tokens) < count and self.stop is None:
            for event in self._call.step():
                if isinstance(event, NewTokens):
                    self.tokens += event.tokens
                    self.authors += self._authors.of(event.tokens)
                elif isinstance(event, Finished):
                    [completion] = self._call.take([event.number])
                    self.stop = completion.stop_reason

    def close(self) -> None:
        """Give it up, so that the engine is free."""
        self._call.close()


class Duo:
    """The two models behind a page.

    Args:
        junior: the model that reads every token for its surprisal. The engine may use the same model.
        tokenizer: that of both.
        longest: how many tokens the longest text may have, including the prompt.
        template_arguments: further variables of the chat template (``data.template_arguments``).
        ends: the ids that end a text, whoever writes it.
    """

    def __init__(
        self,
        engine: CallEngine,
        junior: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        longest: int,
        template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
        ends: Collection[int] = (),
    ) -> None:
        self.engine, self.junior, self.tokenizer, self.longest = engine, junior, tokenizer, longest
        self._lazy: LazyText | None = None
        """The text that is being written."""
        self._template_arguments = template_arguments
        self._reader_of_responses = ResponseReader(tokenizer, ends)
        self._strategy = lru_cache(maxsize=32)(self._make_strategy)
        self._special = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    @property
    def turns(self) -> bool:
        """Whether a text has several turns."""
        return False

    def write(self, draft: Draft, count: int) -> Piece:
        """Write the next ``count`` tokens, or fewer if the text ends.

        Raises:
            ValueError: a setting is out of range, or the prompt leaves no room; the message names it.
        """
        self._check(draft.tokens)
        prompt = self._prompt(draft.prompt)
        if len(prompt) + len(draft.tokens) >= self.longest:
            if not draft.tokens:
                raise ValueError(f"the prompt has {len(prompt)} tokens; at most {self.longest - 1} leave room to write")
            return Piece([], "length")
        known, text = [*draft.tokens[draft.given :]], self._text_of(draft, prompt)
        end = len(known) + count
        try:
            text.write(end + 1)
        except BaseException:  # of the device, too
            self._free_engine()
            raise
        if text.tokens[: len(known)] != known:
            raise ValueError("tokens: not what the two write with these settings; generate the text anew")
        stop = text.stop if len(text.tokens) <= end else None
        longer = draft.begun.longer(text.tokens[:end], text.authors[:end])
        return Piece(self._read(longer, len(draft.tokens), prompt, over=stop is not None), stop)

    def answered(self, draft: Draft) -> tuple[Response, Transcript | None] | None:
        """The text of a draft, as scorers read it, and the transcript of an episode. None if that is not over.

        Raises:
            ValueError: a token is outside the vocabulary.
        """
        self._check(draft.tokens)
        opened = self._reader_of_responses.opened(self._prompt(draft.prompt))
        return self._reader_of_responses.of_turns([draft.tokens], draft.tokens, opened), None

    def say(self, draft: Draft, text: str) -> Piece:
        """Append what a person typed as the junior's text. It is encoded here, once.

        Raises:
            ValueError: there is no room for it.
        """
        self._check(draft.tokens)
        typed = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        prompt = self._prompt(draft.prompt)
        if len(prompt) + len(draft.tokens) + len(typed) > self.longest:
            raise ValueError(f"the text would be longer than {self.longest} tokens")
        longer = draft.longer(typed, [int(Author.JUNIOR)] * len(typed))
        return Piece(self._read(longer, len(draft.tokens), prompt), None)

    def handovers(self, draft: Draft, row: Row, grade: Grade) -> list[dict[str, Any]]:
        """What handing over to the junior at words of a text does to the reward (`handover_effects`), at `PLACES` of
        them at most, evenly spread. A branch may become `FURTHER` tokens longer than the text.

        Raises:
            ValueError: a token is outside the vocabulary, or this page has no such texts.
        """
        self._check(draft.tokens)
        if self.turns:
            raise ValueError("handovers are of single texts, not of episodes")
        prompt, text = self._prompt(draft.prompt), [*draft.tokens]
        while text and text[-1] in self._special:
            text.pop()
        unit = unit_of("word", self.tokenizer, self.engine.vocabulary)
        begins = unit.places(text)
        chosen = [begins[i * len(begins) // min(PLACES, len(begins))] for i in range(min(PLACES, len(begins)))]
        most = min(self.longest - len(prompt), len(text) + FURTHER)
        opened, key = self._reader_of_responses.opened(prompt), request_key(draft.seed, 0, 0, 0)
        whole = Sample(0, "", "", "", 0, key, "", text, len(text), None, 0, None, "length", opened=opened)
        self._free_engine()
        [found] = handover_effects(
            [whole],
            [Prompt(row, tuple(prompt))],
            unit,
            engine=self.engine,
            tokenizer=self.tokenizer,
            profile=Profile(Sampling(max_tokens=most, temperature=draft.temperature)),
            branches=BRANCHES,
            grade=grade,
            surprisals={},
            places={0: chosen},
        )
        return [{name: each[name] for name in ("at", "effect", "low", "high")} for each in found.places or ()]

    def _make_strategy(self, selection: SelectionConfig) -> Strategy:
        # A text is one turn, though the engine gets what is there of it as one that was written before.
        return schedule_of(selection, self.tokenizer, self.engine.vocabulary).strategy(1)._replace(turn=None)

    def _text_of(self, draft: Draft, prompt: Sequence[int]) -> LazyText:
        """What goes on from what a person inserted last, or from the prompt."""
        begun = draft.begun
        if self._lazy is None or self._lazy.begun != begun:
            request = Request(
                [*prompt, *begun.tokens],
                (request_key(draft.seed, 0, 0, 0),),
                Sampling(max_tokens=self.longest - len(prompt) - draft.given, temperature=draft.temperature),
                self._strategy(draft.selection),
                history=(begun.tokens,) if begun.tokens else (),
            )
            self._free_engine()
            self._lazy = LazyText(self.engine, begun, request)
        return self._lazy

    def _free_engine(self) -> None:
        """Give up the text that is being written, if there is one: an engine writes for one call at a time."""
        if self._lazy is not None:
            self._lazy.close()
            self._lazy = None

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
        surprisals = self._surprisals([*prompt, *draft.tokens], len(prompt) + start)
        one_by_one = [i % 2 for i in range(len(draft.tokens))]  # so that each token is a span of its own
        decode: Any = partial(self.tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        texts = [text for _, text in authored_spans(draft.tokens, one_by_one, decode)]
        if not over:
            texts[-1] = texts[-1].rstrip("\ufffd")
        special = [self._special.get(token, "") for token in draft.tokens[start:]]
        shown = zip(draft.tokens[start:], texts[start:], draft.authors[start:], surprisals, special, strict=True)
        return [Token(*each) for each in shown]

    def _surprisals(self, ids: Sequence[int], first: int) -> list[float]:
        """-log junior(token) of the tokens from ``first`` on."""
        batch = pack_tokens([ids], self.junior.device)
        select = torch.arange(len(batch.tokens), device=batch.tokens.device) >= first
        return (-token_scores(self.junior, batch, select=select)[0])[first:].tolist()
