"""A junior behind an OpenAI-compatible endpoint: it is asked for text with ``POST /completions``, one request per row.

The server knows nothing of words. What it writes is cut before the first word of the senior. An answer that does not
begin with a word is asked for again, with another seed, which draws from the same distribution as a mask would. The
prompt goes out as token ids, so that no text becomes a control token. Control tokens of the junior come as text, by
which they are known.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

from transformers import PreTrainedTokenizerBase

from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.processes.http import Client, Response, RetryableError, Service, excerpt
from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import EngineError, Request, Sampling
from tandemrl.rollout.relay import Job, Partner, Said
from tandemrl.selection.draws import mix64
from tandemrl.selection.words import Vocabulary, spell, step_words, vocabulary_of, word_starts

SECTION = "model.junior_endpoint"
START = "vllm serve MODEL, or llama-server -m MODEL.gguf"
TOKENS_PER_WORD, TOKENS_MORE, WORDS_PER_STEP = 4, 8, 12
"""How many tokens are asked for at first, for each word and on top; twice as many each time that they do not do. How
many words the rest of a step has is not known, so a number is assumed."""
NEUTRAL = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "skip_special_tokens": False},
    **{"samplers": ["temperature", "min_p", "top_k", "top_p"], "mirostat": 0, "dynatemp_range": 0.0},
}
"""What switches off all else that a server may do. The last three are llama.cpp's, which would cut before it divides by
the temperature, and takes a repetition penalty, among others, from its model's file."""
_FIELDS = f". If the server refuses a field, name it in {SECTION}.leave_out"
_CUT = "\ufffd"  # what a server makes of the bytes of a character that is not complete


def client_of(endpoint: JuniorEndpointConfig) -> Client:
    """The client of a junior's endpoint.

    Raises:
        EngineError: ``api_key_env`` is not set.
    """
    assert endpoint.url is not None
    return Client(Service.of(endpoint, SECTION, START, EngineError))


def served(endpoint: JuniorEndpointConfig) -> str:
    """The name of the model that a junior's endpoint serves.

    Raises:
        EngineError: the endpoint is down, or does not serve the model of the config.
    """
    with closing(client_of(endpoint)) as client:
        return client.model(endpoint.model)


class EndpointJunior:
    """Makes the partners of an engine's calls; a `relay.MakePartner`.

    model: its name there. context: how many tokens it can read, as the endpoint says, or else the tokenizer. control:
    its control tokens, as text.

    Raises:
        EngineError: the endpoint is down, or does not serve the model.
    """

    def __init__(self, endpoint: JuniorEndpointConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.endpoint, self.vocabulary = endpoint, vocabulary_of(tokenizer)
        self.client = client_of(endpoint)
        self.model = self.client.model(endpoint.model)
        self.context = self.client.get("/models", _contexts).get(self.model, tokenizer.model_max_length)
        pieces = self.vocabulary.pieces
        self.control = tuple(surface for surface, token in tokenizer.get_vocab().items() if token not in pieces)
        self.pool = ThreadPoolExecutor(endpoint.concurrency)

    def __call__(self, senior: Vocabulary) -> "EndpointPartner":
        """The partner of a call."""
        return EndpointPartner(senior, self)

    @property
    def fingerprint(self) -> int:
        """Of the name of the served model: what can be known of its weights."""
        return int.from_bytes(hashlib.sha256(self.model.encode()).digest()[:7], "big")

    def say(self, job: Job, prompt: Sequence[int]) -> Said:
        """What the junior says, once an answer begins with a word.

        Args:
            prompt: what it reads before its turn.

        Raises:
            EngineError: the endpoint fails.
        """
        row, text = job.row, job.text or b""
        if (read := _encoded(text, self.vocabulary)) is None:
            return Said(row.number, b"", "untranslatable")
        attempts, told = self.endpoint.attempts, body_of(row.request.sampling, self.endpoint.leave_out)
        turn = row.index + len(row.request.history)
        for attempt in range(attempts):
            seed = mix64(row.key, turn, len(text), attempt) & 0x7FFFFFFF
            if (said := self._attempt(job, [*prompt, *read], told, seed)) is not None:
                return said._replace(asks=attempt + 1)
        return Said(row.number, b"", "failed", attempts)

    def complete(self, asked: Sequence[tuple[Sequence[int], Sampling, int]]) -> list[tuple[str, bool]]:
        """What it writes after prompts, each with a sampling and a seed: the text, and whether it ended it itself.

        Raises:
            EngineError: the endpoint fails.
        """
        bodies = [
            {"model": self.model, "prompt": [*prompt], "max_tokens": sampling.max_tokens, "seed": seed & 0x7FFFFFFF}
            | body_of(sampling, self.endpoint.leave_out)
            for prompt, sampling, seed in asked
        ]
        return self.client.post_all("/completions", bodies, self.answer)

    def answer(self, response: Response) -> tuple[str, bool]:
        """A text completion, and whether the model ended it itself; a `http.Read`."""
        try:
            choice = response.json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError):
            text = reason = None
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise RetryableError(f"not a completion: {excerpt(response.body)}")
        if reason == "length":
            return text, False
        # Some servers (llama.cpp with --special) show the token that ended it, too.
        return text.removesuffix(next((token for token in self.control if text.endswith(token)), "")), True

    def _attempt(self, job: Job, prompt: Sequence[int], told: dict[str, Any], seed: int) -> Said | None:
        """What it says, or None if what comes is not usable."""
        number, before, room, asked_words = job.row.number, job.text or b"", job.room, job.span.words
        text, spent, asked = "", 0, TOKENS_PER_WORD * (asked_words or WORDS_PER_STEP) + TOKENS_MORE
        while spent < room:
            more = [*prompt, *self.vocabulary.encode(text)]
            asked = min(asked, room - spent, self.context - len(more))
            if asked <= 0:
                break
            body = {"model": self.model, "prompt": more, "max_tokens": asked, "seed": seed + spent, **told}
            answer, ended = self.client.post("/completions", body, self.answer)
            spent, asked, known = spent + asked, 2 * asked, text
            text += answer if ended else answer.rstrip(_CUT)
            try:
                written = text.encode()
            except UnicodeEncodeError:  # half of a surrogate pair
                return None
            if _CUT in text or (before and text and not text.startswith(" ")):
                return None
            starts = word_starts(written, before)
            words = step_words(written, starts) if asked_words is None else asked_words
            own = written[: starts[words]] if len(starts) > words else written
            if any(token in own.decode() for token in self.control):
                return Said(number, b"", "untranslatable")
            if len(starts) > words:
                return Said(number, own, "word")
            if ended:
                whole = len(starts) == words and not text[-1:].isspace()  # the end is a proposal, and is dropped
                return Said(number, written, "word" if whole else "eos")
            if text == known and (not text or spent < room):
                return None
        return Said(number, text.encode(), "length")

    def close(self) -> None:
        """Give up what is still asked for. What the server is just answering is waited for."""
        self.client.give_up()
        self.pool.shutdown(cancel_futures=True)
        self.client.close()


def body_of(sampling: Sampling, leave_out: Collection[str]) -> dict[str, Any]:
    """How an endpoint is asked to sample. What is not sent would be as the server likes: vLLM takes the
    ``generation_config.json`` of its model, llama.cpp what is in its GGUF file, or else top_k=40 and min_p.

    Raises:
        EngineError: a setting that is not neutral is to be left out.
    """
    s = sampling
    if set_anyway := [name for name in ("top_k", "min_p") if name in leave_out and getattr(s, name)]:
        raise EngineError(
            f"{set_anyway[0]}={getattr(s, set_anyway[0])}: {SECTION}.leave_out keeps it from the endpoint; sample "
            "without it, or remove it there"
        )
    more = {"top_k": s.top_k, "min_p": s.min_p} | NEUTRAL
    sent = {name: value for name, value in more.items() if name not in leave_out}
    return {"temperature": s.temperature, "top_p": s.top_p, **sent}


class EndpointPartner(Partner):
    """A `Partner`: what is asked for in one call of ``generate``."""

    def __init__(self, senior: Vocabulary, junior: EndpointJunior) -> None:
        super().__init__(senior)
        self._junior, self._total, self._failed = junior, 0, 0
        self._prompts: dict[int, Sequence[int]] = {}
        """By number: what the junior reads before its turn."""
        self._waiting: dict[Future[Said], int] = {}

    def __len__(self) -> int:
        return 0  # how many the server takes is not known

    def extend(self, requests: Sequence[Request]) -> None:
        for request in requests:
            body_of(request.sampling, self._junior.endpoint.leave_out)
        self._total += sum(len(request.keys) for request in requests)

    def admit(self, prompts: Mapping[Row, Sequence[int]]) -> None:
        self._prompts |= {row.number: prompt for row, prompt in prompts.items()}

    def ask(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            number = job.row.number
            self._waiting[self._junior.pool.submit(self._junior.say, job, self._prompts[number])] = number

    def read_turn(self, row: Row, text: bytes) -> bool:
        if (read := _encoded(text, self._junior.vocabulary)) is not None and row.number in self._prompts:
            self._prompts[row.number] = [*self._prompts[row.number], *read, *row.junior_context]
        return read is not None

    def spans(self, *, wait: bool) -> list[Said]:
        if wait and self._waiting:
            futures.wait(self._waiting, return_when=futures.FIRST_COMPLETED)
        done = [future for future in self._waiting if future.done()]
        return [self._said(future, self._waiting.pop(future)) for future in done]

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        super().keep(live, waiting)
        self._prompts = {n: prompt for n, prompt in self._prompts.items() if n in live or n in waiting}
        for future in [future for future, number in self._waiting.items() if number not in live]:
            future.cancel()
            del self._waiting[future]

    def _said(self, future: Future[Said], number: int) -> Said:
        """What a request came to.

        Raises:
            EngineError: too many have failed.
        """
        try:
            said = future.result()
            why = f"no answer began with a word in {said.asks} attempts"
        except EngineError as error:
            said, why = Said(number, b"", "failed"), str(error)
        if said.end == "failed":
            self._failed += 1
            rate = self._junior.endpoint.max_failure_rate
            if self._failed > max(rate * self._total, float(rate > 0)):
                self.keep((), ())
                raise EngineError(
                    f"{self._failed} of {self._total} rollouts got no words from the junior, more than "
                    f"{SECTION}.max_failure_rate={rate:g}; the last one: {why}" + (_FIELDS if "HTTP 4" in why else "")
                )
        return said


def _encoded(text: bytes, vocabulary: Vocabulary) -> Sequence[int] | None:
    """A text as tokens of the junior; None if it cannot be expressed in them."""
    try:
        tokens = vocabulary.encode(text.decode())
    except UnicodeDecodeError:
        return None
    return tokens if spell(tokens, vocabulary) == text else None


def _contexts(response: Response) -> dict[str, int]:
    """How many tokens each listed model can read, if vLLM or llama.cpp says so; a `http.Read`. `Client.model` has
    checked the list."""
    found = {}
    for each in [] if response.status == 404 else response.json()["data"]:
        told = {**(each.get("meta") or {}), **each}
        lengths = [told.get(name) for name in ("max_model_len", "n_ctx", "n_ctx_train")]
        if known := [length for length in lengths if isinstance(length, int) and length > 0]:
            found[each["id"]] = known[0]
    return found
