"""A junior behind an OpenAI-compatible endpoint: it is asked for text with ``POST /completions``, one request per row.

The server knows nothing of words. What it writes is cut before the first word of the senior. An answer that does not
begin with a word is asked for again, with another seed, which draws from the same distribution as a mask would. The
prompt goes out as token ids, so that no text becomes a control token.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.distributed.watchdog import stamp
from tandemrl.processes.http import Client, PermanentError, Response, RetryableError, Service, excerpt
from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import EngineError, Passes, Request
from tandemrl.rollout.partner import Ask, Span
from tandemrl.selection.draws import mix64
from tandemrl.selection.words import Vocabulary, spell, vocabulary_of, word_starts

SECTION = "model.junior_endpoint"
TOKENS_PER_WORD, TOKENS_MORE = 4, 8
"""How many tokens are asked for at first, for each word and on top; twice as many each time that they do not do."""
_CUT = "\ufffd"  # what a server makes of the bytes of a character that is not complete


def client_of(endpoint: JuniorEndpointConfig) -> Client:
    """The client of a junior's endpoint.

    Raises:
        EngineError: ``api_key_env`` is not set.
    """
    assert endpoint.url is not None
    e = endpoint
    patience = (e.timeout_s, e.retries, e.backoff_s, e.concurrency)
    return Client(Service(SECTION, "vllm serve MODEL", EngineError, endpoint.url, e.api_key_env, *patience))


class EndpointJunior:
    """Makes the partners of an engine's calls; a `partner.MakePartner`.

    Raises:
        EngineError: the endpoint is down, or does not serve the model.
    """

    def __init__(self, endpoint: JuniorEndpointConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.endpoint, self.vocabulary = endpoint, vocabulary_of(tokenizer)
        self.client = client_of(endpoint)
        self.model = self.client.model(endpoint.model)
        self.pool = ThreadPoolExecutor(endpoint.concurrency)

    def __call__(self, requests: Sequence[Request], total: int) -> "EndpointPartner":
        return EndpointPartner(self, total)


class Answer(NamedTuple):
    """A completion, and whether the model ended it itself."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes one span, in a thread."""

    client: Client
    model: str
    vocabulary: Vocabulary
    attempts: int
    request: Request
    key: int
    ask: Ask

    def __call__(self) -> Span:
        """The span.

        Raises:
            EngineError: the endpoint fails.
        """
        ask = self.ask
        try:
            read = self.vocabulary.encode(ask.text.decode())
        except UnicodeDecodeError:
            return Span(ask.number, b"", "untranslatable")
        if spell(read, self.vocabulary) != ask.text:
            return Span(ask.number, b"", "untranslatable")
        for attempt in range(self.attempts):
            if (span := self._attempt([*self.request.junior_prompt, *read], attempt)) is not None:
                return span
        return Span(ask.number, b"", "failed")

    def _attempt(self, prompt: Sequence[int], attempt: int) -> Span | None:
        """The span, or None if what comes is not usable."""
        number, before, room, words = self.ask
        seed = mix64(self.key, len(before), attempt) & 0x7FFFFFFF
        text, spent, asked = "", 0, TOKENS_PER_WORD * words + TOKENS_MORE
        while spent < room:
            asked = min(asked, room - spent)
            more = [*prompt, *self.vocabulary.encode(text)]
            answer = self.client.post("/completions", self._body(more, asked, seed + spent), _answer)
            spent, asked, known = spent + asked, 2 * asked, text
            text += answer.text if answer.ended else answer.text.rstrip(_CUT)
            try:
                written = text.encode()
            except UnicodeEncodeError:  # half of a surrogate pair
                return None
            if _CUT in text or (before and text and not text.startswith(" ")):
                return None
            starts = word_starts(written, before)
            if len(starts) > words:
                return Span(number, written[: starts[words]], "word")
            if answer.ended:
                whole = len(starts) == words and not text[-1:].isspace()  # the end is a proposal, and is dropped
                return Span(number, written, "word" if whole else "eos")
            if text == known:
                return None
        return Span(number, text.encode(), "length")

    def _body(self, prompt: Sequence[int], tokens: int, seed: int) -> dict[str, Any]:
        s = self.request.sampling
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "seed": seed}
        body |= {"temperature": s.temperature, "top_p": s.top_p}
        return body | ({"top_k": s.top_k} if s.top_k else {}) | ({"min_p": s.min_p} if s.min_p else {})


class EndpointPartner:
    """A `Partner`: the spans of one call of ``generate``."""

    counts = True

    def __init__(self, junior: EndpointJunior, total: int) -> None:
        self._junior, self._total, self._failed = junior, total, 0
        self._rows: dict[int, Row] = {}
        self._waiting: dict[Future[Span], int] = {}

    @property
    def passes(self) -> Passes:
        return Passes()  # what the server does is not known

    def admit(self, rows: Sequence[Row]) -> None:
        self._rows |= {row.number: row for row in rows}

    def ask(self, asks: Sequence[Ask]) -> None:
        junior = self._junior
        for ask in asks:
            row, attempts = self._rows[ask.number], junior.endpoint.attempts
            writer = Writer(junior.client, junior.model, junior.vocabulary, attempts, row.request, row.key, ask)
            self._waiting[junior.pool.submit(writer)] = ask.number

    def spans(self, *, wait: bool) -> list[Span]:
        while True:
            done = [future for future in self._waiting if future.done()]
            if done or not wait or not self._waiting:
                break
            _wait(self._waiting)
        return [self._span(future, self._waiting.pop(future)) for future in done]

    def forget(self, numbers: Iterable[int]) -> None:
        ended = set(numbers)
        for future in [future for future, number in self._waiting.items() if number in ended]:
            future.cancel()
            del self._waiting[future]

    def _span(self, future: "Future[Span]", number: int) -> Span:
        """What a request came to.

        Raises:
            EngineError: too many have failed.
        """
        try:
            span, why = future.result(), f"no answer began with a word in {self._junior.endpoint.attempts} attempts"
        except EngineError as error:
            span, why = Span(number, b"", "failed"), str(error)
        if span.end == "failed":
            self._failed += 1
            rate = self._junior.endpoint.max_failure_rate
            if self._failed > max(rate * self._total, float(rate > 0)):
                self.forget(self._waiting.values())
                raise EngineError(
                    f"{self._failed} of {self._total} rollouts got no words from the junior, more than "
                    f"{SECTION}.max_failure_rate={rate:g}; the last one: {why}"
                )
        return span


def _wait(futures: Mapping["Future[Span]", int]) -> None:
    wait(futures, timeout=1.0, return_when=FIRST_COMPLETED)
    stamp()


def _answer(response: Response) -> Answer:
    """A text completion; a `http.Read`."""
    if response.status == 404:
        raise PermanentError(f"HTTP 404: {excerpt(response.body)}; the address must end where /completions begins")
    try:
        choice = response.json()["choices"][0]
        text, reason = choice["text"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError):
        text = reason = None
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise RetryableError(f"not a completion: {excerpt(response.body)}")
    return Answer(text, reason == "stop")
