"""Other models that read a model's texts: they get a part of one and go on from there, or say how it surprises them.

A reader of the same vocabulary reads the text's own token ids, any other one the text. It draws from the keys of the
text that it reads, at the same places. So a reader that is the model itself writes what the model wrote.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from tandemrl.data.rows import RENDERED, Prompt, chat_tokens
from tandemrl.evals.measures import Sample, author_runs
from tandemrl.evals.protocol import sampling_for, strategies
from tandemrl.evals.reading import by_junior, read_texts, read_tokens
from tandemrl.models.loading import differing_entries
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import Request, generate_verified
from tandemrl.selection.words import Vocabulary, vocabulary_of
from tandemrl.types import Author

ANSWER_TOKENS = 16
"""How many tokens a reader has to end an answer that is begun for it."""
_ANSWER = re.compile(rb"\s*\S[^\n]*(?:\s*</answer>)?")


class Job(NamedTuple):
    """What a reader gets of a text, and goes on from.

    sample: the model's. given: the name of the condition. part: what the reader reads. cue: the begin of an answer,
    which then has to follow; "" for a free continuation. own: the reader's own text that ``part`` is of, if it is not
    the model's.
    """

    sample: Sample
    given: str
    part: str
    cue: str = ""
    own: Sample | None = None


@dataclass
class Reader:
    """A model that reads. session: in which it is the model. model_tokenizer: that of the model whose texts it reads,
    or None if that is not known. endpoint: where the reader is served; it then writes, and says nothing of surprise.
    meter: see ``phases.Texts``."""

    name: str
    session: Any
    model_tokenizer: Any = None
    endpoint: EndpointJunior | None = None
    meter: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda done: None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.session.tokenizer)

    @cached_property
    def shared(self) -> bool:
        """Whether the model's token ids are the reader's."""
        return self.model_tokenizer is not None and not differing_entries(self.model_tokenizer, self.session.tokenizer)

    @cached_property
    def prompts(self) -> dict[tuple[str, str], Prompt]:
        """The prompts as the reader reads them, by set and example; those that are too long are missing."""
        return {(prompt.row.data_source, prompt.row.example_id): prompt for prompt in self.session.prompts[0]}

    def prompt_of(self, sample: Sample) -> Prompt | None:
        return self.prompts.get((sample.set, sample.example_id))

    def ids(self, sample: Sample, part: str, *, own: bool = False) -> list[int]:
        """The beginning of a text in the reader's tokens: the text's own, if they are that (``own``: they are)."""
        if part and (own or self.shared):
            tokens = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
            if (count := self._within(tokens, part)) is not None:
                return tokens[:count]
        return list(self.vocabulary.encode(part))

    def _within(self, tokens: Sequence[int], part: str) -> int | None:
        """How many tokens are in a part; None if they do not begin with it. One across its end is not in it."""
        pieces = [self.vocabulary.pieces.get(token, b"") for token in tokens]
        wanted, whole = part.encode(), b"".join(pieces)
        return sum(end <= len(wanted) for end in accumulate(map(len, pieces))) if whole.startswith(wanted) else None

    def _answer(self, tokens: Sequence[int]) -> int:
        """How many tokens an answer has that was begun: those of the first line that is not empty. A model that does
        not stop goes on, as with another problem, whose answer is not meant."""
        pieces = [self.vocabulary.pieces.get(token, b"") for token in tokens]
        found, starts = _ANSWER.match(b"".join(pieces)), accumulate(map(len, pieces[:-1]), initial=0)
        return len(tokens) if found is None else sum(start < found.end() for start in starts)

    def write(self, jobs: Sequence[Job]) -> list[Sample]:
        """What the reader makes of parts of texts, not graded, in one call of the engine. A sample is the part and what
        follows; after a cue only the line. Jobs that do not fit into the reader's context are left out; equal ones are
        done once.

        The part counts towards the limit on tokens only if it is in the model's own."""
        session, profile = self.session, self.session.profile
        engine = self.endpoint or session.engine(session.phases[0])
        solo = strategies("pass-at-k", session.tokenizer)["solo"]
        requests: dict[tuple[Any, ...], Request] = {}
        places: list[tuple[Job, tuple[Any, ...]]] = []
        for job in jobs:
            if (prompt := self.prompt_of(job.sample)) is None:
                continue
            read = self.ids(job.own or job.sample, job.part, own=job.own is not None)
            read += self.vocabulary.encode(job.cue) if job.cue else ()
            sampling = sampling_for(profile, prompt)
            left = engine.context - len(prompt.tokens) - len(read)
            if job.cue:
                room = ANSWER_TOKENS
            elif self.shared:  # what the model had
                room = max(1, sampling.max_tokens - len(read))
            else:  # in other tokens, a text may have more than its model was allowed
                room = max(ANSWER_TOKENS, min(sampling.max_tokens, left))
            if room > left:
                continue
            place = (job.sample.problem, job.sample.key, room, *read)
            history = (tuple(read),) if read else ()
            sampling, key = replace(sampling, max_tokens=room), (job.sample.key,)
            requests[place] = Request((*prompt.tokens, *read), key, sampling, solo, history=history)
            places.append((job, place))
        found = dict(zip(requests, self._complete(engine, [*requests.values()]), strict=True))
        response_reader = ResponseReader(session.tokenizer)
        opened = {key: response_reader.opened(prompt.tokens, prompt.row) for key, prompt in self.prompts.items()}
        written = []
        for job, place in places:
            read, (own, stop_reason) = [*place[3:]], found[place]
            if job.cue and (answer := self._answer(own)) < len(own) - (stop_reason == "eos"):
                own, stop_reason = own[:answer], "stop"
            response = response_reader.of_turns([[*read, *own]], [*read, *own])
            who = np.array([Author.SENIOR] * len(read) + [Author.JUNIOR] * len(own), dtype=np.int8)
            written.append(
                job.sample._replace(
                    arm=self.name,
                    given=job.given,
                    text=response.text,
                    plain=None if response.plain == response.text else response.plain,
                    opened=opened[job.sample.set, job.sample.example_id],
                    tokens=[*read, *own],
                    author=author_runs(who),
                    length=len(own),
                    rounds=1 + bool(read and own),
                    senior_share=len(read) / max(1, len(who)),
                    stop_reason=stop_reason,
                )
            )
        return written

    def _complete(self, engine: Any, requests: Sequence[Request]) -> list[tuple[list[int], str]]:
        """The tokens that follow each prompt, and why they end. Those of an endpoint are the tokens of its text."""
        if self.endpoint is None:
            if not requests:
                return []
            meter = self.meter(f"{self.name}: tokens", sum(each.sampling.max_tokens for each in requests))
            completions, _ = generate_verified(engine, requests, requests[0].strategy, progress=meter)
            return [(completion.tokens.tolist(), completion.stop_reason) for [completion] in completions]
        said = self.endpoint.complete([(each.prompt, each.sampling, each.keys[0]) for each in requests])
        eos = self.session.tokenizer.eos_token_id
        return [
            ([*self.vocabulary.encode(text), *([eos] if ended else [])], "eos" if ended else "length")
            for text, ended in said
        ]

    def read(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the reader's cross-entropies of their whole texts, where it can read them."""
        out = list(samples)
        known = {i: prompt for i, each in enumerate(samples) if (prompt := self.prompt_of(each)) is not None}
        if self.endpoint is None:
            texts = [samples[i]._replace(problem=number) for number, i in enumerate(known)]
            for i, each in zip(known, self._read(texts, [*known.values()]), strict=True):
                out[i] = each._replace(problem=samples[i].problem)
        return out

    def ask(self, texts: Sequence[tuple[Sample, str]], question: str) -> list[Sample]:
        """The samples with P(yes), against no, as ``judge``: what the reader answers to a question about a text that
        follows its problem. None where it cannot be asked."""
        arguments = self.session.config.data.template_arguments
        chats = []
        for sample, text in texts:
            prompt = self.prompt_of(sample)
            turns = [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
            asked = prompt is not None and text.strip() and not prompt.row.extra_info.get(RENDERED)
            where = f"row {sample.example_id}"
            messages = [*prompt.row.messages, *turns] if asked and prompt is not None else []
            tokens = chat_tokens(self.session.tokenizer, messages, where, arguments) if messages else ()
            chats.append(Prompt(prompt.row, tuple(tokens)) if prompt is not None and tokens else None)
        samples = [sample for sample, _ in texts]
        both = []
        for word in ("Yes", "No"):
            said = self.vocabulary.encode(word)
            both.append(
                self._log_probs([(sample, chat, (), said) for sample, chat in zip(samples, chats, strict=True)])
            )
        return self._judged(
            samples, [None if a is None or b is None else float(expit(a - b)) for a, b in zip(*both, strict=True)]
        )

    def expect(self, texts: Sequence[tuple[Sample, str]]) -> list[Sample]:
        """The samples with the probability, as ``judge``, that the reader gives to the rest of a text after a part."""
        asked = []
        for sample, part in texts:
            plain = sample.response.plain
            ids = self.ids(sample, plain)
            count = self._within(ids, part)
            both = (self.ids(sample, part), self.vocabulary.encode(plain[len(part) :]))
            known, rest = both if count is None else (ids[:count], ids[count:])
            asked.append((sample, self.prompt_of(sample), known, rest))
        found = [None if value is None else math.exp(value) for value in self._log_probs(asked)]
        return self._judged([sample for sample, _ in texts], found)

    def _judged(self, samples: Sequence[Sample], values: Sequence[float | None]) -> list[Sample]:
        return [each._replace(arm=self.name, judge=value) for each, value in zip(samples, values, strict=True)]

    def _log_probs(
        self, asked: Sequence[tuple[Sample, Prompt | None, Sequence[int], Sequence[int]]]
    ) -> list[float | None]:
        """The log-probs of tokens after a prompt and other tokens; None where there is no prompt, or no room for it."""
        known = [(i, *each) for i, each in enumerate(asked) if each[1] is not None and each[3]]
        texts = [
            sample._replace(problem=n, tokens=[*part, *rest], author=f"C{len(part)}S{len(rest)}", stop_reason="stop")
            for n, (_, sample, _, part, rest) in enumerate(known)
        ]
        prompts = [prompt for _, _, prompt, _, _ in known if prompt is not None]
        found: list[float | None] = [None] * len(asked)
        for (i, *_, rest), read in zip(known, self._read(texts, prompts), strict=True):
            found[i] = None if read.cross_entropy is None else -read.cross_entropy * len(rest)
        return found

    def _read(self, texts: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Sample]:
        model, context = self.session.load(self.session.model), self.session.profile.context
        return read_texts(texts, prompts, [model], by_junior(), context=context)

    def by_token(self, sample: Sample) -> list[tuple[str, float]]:
        """The tokens of a text in the reader's vocabulary, each with its surprisal in nats; none if it is too long."""
        prompt, own = self.prompt_of(sample), self.in_own_tokens(sample)._replace(problem=0)
        if prompt is None or self.endpoint is not None:
            return []
        read = [*read_tokens([own], [prompt], [self.session.load(self.session.model)], by_junior())]
        nats = read[0][1]["cross_entropy"].tolist() if read else []
        texts = self.session.tokenizer.batch_decode([[token] for token in own.tokens[: len(nats)]])
        return [*zip(texts, nats, strict=True)]

    def in_own_tokens(self, sample: Sample) -> Sample:
        """A text of the model in the reader's tokens."""
        ids = self.ids(sample, sample.response.plain)
        ids += [self.session.tokenizer.eos_token_id] if sample.stop_reason == "eos" else []
        return sample._replace(tokens=ids, author=f"S{len(ids)}" if ids else "", length=len(ids), arm=self.name)
