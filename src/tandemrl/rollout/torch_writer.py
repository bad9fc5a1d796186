"""Spans that a model of this process writes alone, token by token."""

from collections.abc import Collection, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tandemrl.models.sampling import race_times
from tandemrl.rollout.decoding_rows import Decoder, Row, Shaping, sample, sampling_parameters, shaped
from tandemrl.rollout.kv_cache import KVCache, extend, prefill
from tandemrl.rollout.partner import Job, Writer, Written
from tandemrl.rollout.spans import SpanRules, draw_keys
from tandemrl.selection.whole_words import TextTables


class TorchWriter(Writer):
    """A `partner.Writer`. The keys and values of a row stay until it is dropped; what another author has written is
    read when the row is gone on with.

    Args:
        decoder: with the model as model 1.
        tables: of its vocabulary.
    """

    def __init__(self, decoder: Decoder, tables: TextTables) -> None:
        self._decoder, self._rules, self._cache = decoder, SpanRules(tables), KVCache()
        self._place: dict[int, int] = {}
        """By number: the row of the cache."""
        self._size = 0
        self._read: dict[int, list[int]] = {}
        """By number: the tokens that the cache holds."""
        self._unread: dict[int, list[int]] = {}
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: object) -> bool:
        return number in self._jobs

    def admit(self, prompts: Mapping[Row, Sequence[int]]) -> None:
        distinct = {id(prompt): [*prompt] for prompt in prompts.values()}
        if not distinct:
            return
        of = {name: i for i, name in enumerate(distinct)}
        places = range(self._size, self._size + len(prompts))
        prefilled = prefill(self._decoder.models[1], [*distinct.values()])
        self._cache.put(places, prefilled, [of[id(prompt)] for prompt in prompts.values()])
        for place, (row, prompt) in zip(places, prompts.items(), strict=True):
            self._place[row.number], self._read[row.number] = place, list(prompt[:-1])
        self._size += len(prompts)

    def begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            number, tokens, read = job.row.number, list(job.tokens), self._read[job.row.number]
            if tokens[: len(read)] != read or len(read) == len(tokens):  # the end of it was cut
                same = (a == b for a, b in zip(read, tokens[:-1], strict=False))
                del read[next((k for k, equal in enumerate(same) if not equal), len(tokens) - 1) :]
            self._unread[number], self._jobs[number] = tokens[len(read) :], job

    def step(self, *, wait: bool) -> dict[int, Written]:
        if not self._jobs:
            return {}
        jobs = [*self._jobs.items()]
        rows, spans = [job.row for _, job in jobs], [job.span for _, job in jobs]
        logits = self._rules.masked(self._logits([*self._jobs]), spans)
        parameters, shaping = sampling_parameters(rows).to(logits.device), Shaping.of(row.request for row in rows)
        race = race_times(draw_keys(spans).to(logits.device), self._decoder.vocabulary)
        tokens, logprobs = (x.cpu() for x in sample(logits, race, parameters, None, shaping))
        over = self._rules.advance(spans, tokens)
        ends = dict[int, float]()
        if over:
            mass = self._rules.word_ends(shaped(logits[over], parameters[over], None, shaping))
            ends = dict(zip(over, torch.where(parameters[over, 0] > 0, mass, 0.0).tolist(), strict=True))
        found = {}
        for i, ((number, job), token, logprob) in enumerate(zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True)):
            if i in ends:
                found[number] = Written([], [], ends[i])
            else:
                whole = token in self._decoder.eos or job.span.written == job.room
                found[number], self._unread[number] = Written([token], [logprob], None, whole), [token]
            if found[number].whole:
                del self._jobs[number]
        return found

    def _logits(self, numbers: Sequence[int]) -> Float[Tensor, "k v"]:
        """The logits of some rows, after the model has read all that it had not yet."""
        chunks, starts = [self._unread[n] for n in numbers], [len(self._read[n]) for n in numbers]
        places = [self._place[n] for n in numbers]
        hidden = extend(self._decoder.models[1], self._cache, places, starts, chunks)
        for number, chunk in zip(numbers, chunks, strict=True):
            self._read[number] += chunk
        return self._decoder.heads[1](hidden)[:, : self._decoder.vocabulary].float()

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        self._jobs = {number: job for number, job in self._jobs.items() if number in live}
        self._place = {n: place for n, place in self._place.items() if n in live or n in waiting}
        self._read = {number: self._read[number] for number in self._place}
        if 8 * (self._size - len(self._place)) >= max(1, self._size):  # rarely, since all is copied
            width = max(map(len, self._read.values()), default=0)
            self._cache.keep(torch.tensor([*self._place.values()], dtype=torch.int64), width)
            self._place, self._size = {n: i for i, n in enumerate(self._place)}, len(self._place)
