"""Senior and junior, or a person in the junior's place, write a text a few tokens at a time.

A `Draft` holds everything that the next tokens depend on. A single request writes the text, and waits until more of it
is asked for. Where another draft is asked for, it begins anew, and writes the same text again, by its seed. After what
a person inserts, a new request goes on from the text up to there. In one vocabulary, strategy and draws continue where
they were (``Request.history``). With two, each model reads that text in its own tokens, as a longer prompt.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
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
from tandemrl.models.loading import context_of
from tandemrl.rollout.call import CallEngine, Finished, NewTokens
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.engine import Request, Sampling, StopReason
from tandemrl.rollout.gateway.texts import Authors
from tandemrl.rollout.schedule import schedule_of
from tandemrl.selection import Strategy
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.draws import request_key
from tandemrl.selection.words import begin_words, vocabulary_of, whole_characters
from tandemrl.training.authored import authored_spans
from tandemrl.types import Author, Response


@dataclass(frozen=True)
class Draft:
    """A text that is being written.

    tokens: the tokens after the prompt. authors: the author of each of them (1 senior, 0 junior; in an episode, -1 for
    what neither wrote). given: where what a person inserted last ends. With two vocabularies, the models go on from
    there with new draws.
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


FURTHER = 64
"""With two vocabularies: how many tokens more than were asked for a piece may have, so that it ends with a word."""


PLACES, BRANCHES = 32, 12
"""Of `Duo.handovers`: at how many words the models are handed over, and how often each of them goes on there."""


class Token(NamedTuple):
    """A token as the page shows it. ``surprisal`` is -log junior(token) in nats, at temperature 1. A special token has
    its name in ``special`` and no ``text``.

    A junior with a vocabulary of its own reads the text in tokens of its own, and ``surprisal`` is that of those which
    end inside this one. It is None where it cannot read the text, and for special tokens, of which it has others.
    """

    id: int
    text: str
    author: int
    surprisal: float | None
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

    apart: whether the junior has a vocabulary of its own. Then the texts are in the senior's tokens.

    Args:
        junior: the model that reads every token for its surprisal. The engine may use the same model.
        tokenizer: that of both, or of the senior.
        longest: how many tokens the longest text may have, including the prompt.
        template_arguments: further variables of the chat template (``data.template_arguments``).
        junior_tokenizer: that of a junior with a vocabulary of its own. Its chat template gets the default arguments.
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
        junior_tokenizer: PreTrainedTokenizerBase | None = None,
        ends: Collection[int] = (),
    ) -> None:
        self.engine, self.junior, self.tokenizer, self.longest = engine, junior, tokenizer, longest
        self.apart, self._junior_tokenizer = junior_tokenizer is not None, junior_tokenizer
        self._pieces = token_bytes(tokenizer) if self.apart else {}
        self._reader = None if junior_tokenizer is None else vocabulary_of(junior_tokenizer)
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
        """Write the next ``count`` tokens, or fewer if the text ends. With two vocabularies, a piece ends with a word.

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
        end = most = len(known) + count
        try:
            text.write(end + 1)
            while self.apart and len(text.tokens) > end < most + FURTHER and not self._begins_word(text, end):
                end += 1
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
            ValueError: there is no room for it, or a junior with a vocabulary of its own cannot read the text.
        """
        self._check(draft.tokens)
        typed = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        prompt = self._prompt(draft.prompt)
        if len(prompt) + len(draft.tokens) + len(typed) > self.longest:
            raise ValueError(f"the text would be longer than {self.longest} tokens")
        longer = draft.longer(typed, [int(Author.JUNIOR)] * len(typed))
        longer = replace(longer, given=len(longer.tokens))
        if self.apart:
            self._junior_prompt(draft.prompt, longer.tokens)  # refuses what the junior cannot read
        return Piece(self._read(longer, len(draft.tokens), prompt), None)

    def handovers(self, draft: Draft, row: Row, grade: Grade) -> list[dict[str, Any]]:
        """What handing over to the junior at words of a text does to the reward (`handover_effects`), at `PLACES` of
        them at most, evenly spread. A branch may become `FURTHER` tokens longer than the text.

        Raises:
            ValueError: a token is outside the vocabulary, or this page has no such texts.
        """
        self._check(draft.tokens)
        if self.apart or self.turns:
            raise ValueError("handovers are of single texts in one vocabulary; use tandemrl eval with such a pair")
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
        schedule = schedule_of(selection, self.tokenizer, self.engine.vocabulary, by_text=self.apart)
        return schedule.strategy(1)._replace(turn=None)

    def _text_of(self, draft: Draft, prompt: Sequence[int]) -> LazyText:
        """What goes on from what a person inserted last, or from the prompt. With two vocabularies it does so as from a
        longer prompt, without a history."""
        begun, strategy = draft.begun, self._strategy(draft.selection)
        if self._lazy is None or self._lazy.begun != begun:
            request = Request(
                [*prompt, *begun.tokens],
                (request_key(draft.seed, 0, draft.given if self.apart else 0, 0),),
                Sampling(max_tokens=self.longest - len(prompt) - draft.given, temperature=draft.temperature),
                strategy,
                history=(begun.tokens,) if begun.tokens and not self.apart else (),
                junior_prompt=() if strategy.removed is None else self._junior_prompt(draft.prompt, begun.tokens),
            )
            self._free_engine()
            self._lazy = LazyText(self.engine, begun, request)
        return self._lazy

    def _free_engine(self) -> None:
        """Give up the text that is being written, if there is one: an engine writes for one call at a time."""
        if self._lazy is not None:
            self._lazy.close()
            self._lazy = None

    def _begins_word(self, text: LazyText, place: int) -> bool:
        """Whether the token at a place begins a word."""
        return begin_words([self._pieces.get(token, b"") for token in text.tokens[: place + 1]])[-1]

    def _check(self, tokens: Sequence[int]) -> None:
        if not all(0 <= token < self.engine.vocabulary for token in tokens):
            raise ValueError(f"tokens: one is outside the vocabulary of {self.engine.vocabulary}")

    def _prompt(self, text: str) -> list[int]:
        asked = [{"role": "user", "content": text}]
        return [*chat_tokens(self.tokenizer, asked, "the prompt", self._template_arguments)]

    def _junior_prompt(self, text: str, tokens: Sequence[int] = ()) -> list[int]:
        """The prompt, and the text of some ``tokens`` after it, in the vocabulary that a junior has for itself.

        Raises:
            ValueError: they are too long, or the text cannot be read.
        """
        asked, limit = [{"role": "user", "content": text}], context_of(self.junior.config)
        ids = [*chat_tokens(self._junior_tokenizer, asked, "the prompt", DEFAULT_ARGUMENTS)]
        if tokens:
            known = self._reading(b"".join(self._pieces.get(token, b"") for token in tokens))
            if known is None:
                raise ValueError(
                    "text: the junior cannot read it in its vocabulary; insert other characters, or first let the two "
                    "complete the last one"
                )
            ids += known
        if len(ids) >= limit:
            raise ValueError(f"the prompt has {len(ids)} tokens of the junior's, whose context is {limit}; shorten it")
        return ids

    def _reading(self, text: bytes) -> list[int] | None:
        """A text in the vocabulary that a junior has for itself; None if it cannot be expressed there."""
        assert self._reader is not None
        try:
            ids = [*self._reader.encode(text.decode())]
        except UnicodeDecodeError:  # a poor model has written half a character
            return None
        return ids if b"".join(self._reader.pieces.get(token, b"") for token in ids) == text else None

    @torch.no_grad()
    def _read(self, draft: Draft, start: int, prompt: Sequence[int], *, over: bool = False) -> list[Token]:
        """The tokens from ``start`` on, as they are shown. A character made of several tokens is shown at the last one.

        Args:
            over: whether the text is over, so that no further piece completes its last character.
        """
        if start == len(draft.tokens):
            return []
        surprisals: Sequence[float | None] = (
            self._surprisals_by_text(draft, start)
            if self.apart
            else self._surprisals([*prompt, *draft.tokens], len(prompt) + start)
        )
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

    def _surprisals_by_text(self, draft: Draft, start: int) -> list[float | None]:
        """The surprisals of the tokens from ``start`` on, by what a junior with a vocabulary of its own reads."""
        assert self._reader is not None
        pieces = [self._pieces.get(token, b"") for token in draft.tokens]
        edges, text = [*accumulate(map(len, pieces))], whole_characters(b"".join(pieces))
        told = len(whole_characters(text[: edges[start - 1]])) if start else 0
        found: list[float | None] = [0.0 if piece else None for piece in pieces[start:]]
        ids, prompt = self._reading(text), self._junior_prompt(draft.prompt)
        if ids is None or len(prompt) + len(ids) > context_of(self.junior.config):
            return [None] * len(found)
        ends = [*accumulate(len(self._reader.pieces[token]) for token in ids)]
        new = bisect_left(ends, told + 1)
        if new < len(ids):
            for end, value in zip(ends[new:], self._surprisals([*prompt, *ids], len(prompt) + new), strict=True):
                place = max(bisect_left(edges, end) - start, 0)
                found[place] = (found[place] or 0.0) + value
        return found
