"""Two models with vocabularies of their own write one text: all ways in which it comes about, and its bookkeeping."""

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers import (
    VOCABULARY,
    byte_level,
    chi_square_bound,
    flat,
    prepared,
    qwen3,
    reference_distribution,
    small_qwen3,
    tokenizer,
)
from tandemrl.apps.experiments.tiny import WORD_SPLIT
from tandemrl.models.batching import pack
from tandemrl.models.forward import token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.sampling import Truncation, race_times
from tandemrl.rollout import torch_engine
from tandemrl.rollout.engine import Completion, EngineError, Request, Responder, Sampling, check_authors
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, before_word, boundaries, draws, solo, word
from tandemrl.selection.whole_words import before_text_word, text_tables
from tandemrl.types import Author, Rollout

EOS, P, COUNT, LONGEST = 0, 0.6, 3000, 3
ONE = {"<eos>": EOS, "a": 1, "b": 2, "Ġ": 3, "aĠb": 4}
OTHER = {"<eos>": EOS, "Ġ": 1, "b": 2, "a": 3, "Ġa": 4, "ab": 5, "bĠ": 6}
MERGES = [("Ġ", "a"), ("a", "b")]
PLAIN = Sampling(max_tokens=LONGEST)
CUT = Sampling(max_tokens=LONGEST, temperature=1.3, top_k=3, top_p=0.9)
PROMPT, READ = (2, 1), (5, 2)


def toy(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(vocabulary, merges, WORD_SPLIT), eos_token="<eos>")


@cache
def tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    return toy(OTHER, MERGES), toy(ONE)


@cache
def untouched() -> tuple[PreTrainedModel, PreTrainedModel]:
    return small_qwen3(143, vocabulary=len(OTHER)).double(), qwen3(43, vocabulary=len(ONE)).double()


@cache
def engine(max_rows: int = 4000) -> TorchEngine:
    junior, senior = (prepared(copy.deepcopy(model).float()) for model in untouched())
    return TorchEngine(senior, junior, tokenizers()[1], junior_tokenizer=tokenizers()[0], max_rows=max_rows)


@cache
def strategy() -> Strategy:
    return before_text_word(P, text_tables(tokenizers()[1]))


def request(sampling: Sampling, count: int = COUNT) -> Request:
    return Request(PROMPT, tuple(range(count)), sampling, strategy(), junior_prompt=READ)


@cache
def written(sampling: Sampling) -> list[Completion]:
    return flat(engine().generate([request(sampling)]))


# ------------------------------------------------------------------------------------------- all ways, step by step


class Way(dict[str, Any]):
    """A text in the making: its probability, ``text``, the tokens of both as they read them, authors, the present one's
    span of text and how many tokens it has, and whether the next token is the first after a handover."""

    def but(self, factor: float, **changes: Any) -> "Way":
        return Way(self | changes | {"p": self["p"] * factor})


def pieces(author: int) -> list[str]:
    return [surface.replace("Ġ", " ") for surface in (OTHER, ONE)[author]]


def joins(piece: str) -> bool:
    return any(c == " " and not before.isspace() for before, c in pairwise(piece))


@cache
def distribution(sampling: Sampling, author: int, own: tuple[int, ...], opening: bool) -> np.ndarray:
    """What an author draws from: no token inside of which a word begins; at first, only those that begin one."""
    prompt, surfaces = (READ, PROMPT)[author], pieces(author)
    with torch.no_grad():
        logits = untouched()[author](input_ids=torch.tensor([[*prompt, *own]]), use_cache=False).logits[0, -1].numpy()
    barred = [joins(s) or (opening and not (s[0] == " " or i == EOS)) for i, s in enumerate(surfaces)]
    return reference_distribution(np.where(barred, -np.inf, logits), sampling, prompt, own)


def ways(sampling: Sampling, way: Way) -> Iterator[Way]:
    author, own = way["author"], way["own"]
    for token, likely in enumerate(distribution(sampling, author, own[author], way["opening"])):
        if likely == 0:
            continue
        piece = pieces(author)[token]
        spaced = way["text"][-1:].isspace()
        if not way["text"] or not (token == EOS or piece[0] == " ") or spaced or way["opening"]:
            yield from longer(sampling, way.but(likely), token, piece)
            continue
        yield from longer(sampling, way.but(likely * (P if author else 1 - P)), token, piece)
        yield from handed(sampling, way.but(likely * (1 - P if author else P)))


def longer(sampling: Sampling, way: Way, token: int, piece: str) -> Iterator[Way]:
    author = way["author"]
    mine = (*way["own"][author], token)
    own = (way["own"][0], mine) if author else (mine, way["own"][1])
    if token == EOS:
        yield finished(way.but(1, own=own), "eos")
        return
    way = way.but(1, own=own, text=way["text"] + piece, span=way["span"] + piece, count=way["count"] + 1, opening=False)
    if way["count"] == way["room"]:
        yield finished(way, "length")
    else:
        yield from ways(sampling, way)


def handed(sampling: Sampling, way: Way) -> Iterator[Way]:
    """The other author goes on, after it has read the span. If the senior has no token left, the text ends."""
    author = way["author"]
    read = tuple(tokenizers()[1 - author].encode(way["span"]))
    if author:
        senior, own = (
            way["senior"] + [(t, 1) for t in way["own"][1][-way["count"] :]],
            (way["own"][0] + read, way["own"][1]),
        )
    else:
        senior, own = way["senior"] + [(t, 0) for t in read], (way["own"][0], way["own"][1] + read)
    way = way.but(1, senior=senior[:LONGEST], own=own, author=1 - author, span="", count=0, opening=True)
    way["room"] = LONGEST - len(senior)
    if way["room"] <= 0:
        yield way.but(1, end="length")
    else:
        yield from ways(sampling, way)


def finished(way: Way, end: str) -> Way:
    tokens = way["own"][1][-way["count"] - (end == "eos") :] if way["author"] else tokenizers()[0].encode(way["span"])
    if not way["author"]:
        tokens = [*tokenizers()[1].encode(way["span"]), *[EOS] * (end == "eos")]
    if len(way["senior"]) + len(tokens) > LONGEST:
        end = "length"
    return way.but(1, senior=(way["senior"] + [(t, way["author"]) for t in tokens])[:LONGEST], end=end)


def all_ways(sampling: Sampling) -> Iterator[Way]:
    for author, chance in ((1, P), (0, 1 - P)):
        start = {"text": "", "own": ((), ()), "senior": [], "span": "", "count": 0, "room": LONGEST, "opening": False}
        yield from ways(sampling, Way(start | {"p": chance, "author": author}))


@pytest.mark.parametrize("sampling", [PLAIN, CUT], ids=["plain", "cut"])
def test_texts_and_their_authors_come_about_as_often_as_they_should(sampling: Sampling) -> None:
    wanted: dict[tuple, float] = defaultdict(float)
    for way in all_ways(sampling):
        tokens, authors = zip(*way["senior"], strict=True)
        wanted[tokens, authors, way["end"]] += way["p"]
    assert sum(wanted.values()) == pytest.approx(1.0)
    check_authors(written(sampling), strategy())
    seen = Counter((tuple(c.tokens.tolist()), tuple(c.author.tolist()), c.stop_reason) for c in written(sampling))
    assert seen.keys() <= wanted.keys()
    assert sum(len(set(authors)) == 2 for _, authors, _ in seen.elements()) > COUNT / 6
    assert not any(ONE["aĠb"] in tokens for tokens, *_ in seen)
    both = np.array([seen[each] for each in wanted]), np.array([*wanted.values()])
    statistic, bound = chi_square_bound(*both)
    assert statistic < bound


@pytest.mark.parametrize("planted", [False, True])
def test_no_two_tokens_of_a_text_come_from_one_number(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted:  # the junior draws from the senior's streams, at its own count of tokens
        share_the_streams(monkeypatch)
    drawn: dict[int, set[int]] = defaultdict(set)

    def recorded(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
        drawn[vocabulary] |= set(keys.tolist())
        return race_times(keys, vocabulary)

    monkeypatch.setattr(torch_engine, "race_times", recorded)
    engine().generate([request(Sampling(max_tokens=16), 200)])
    assert min(len(drawn[len(names)]) for names in (ONE, OTHER)) > 40
    assert bool(drawn[len(ONE)] & drawn[len(OTHER)]) == planted


def share_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "JUNIOR_SAMPLING", draws.SAMPLING)
    monkeypatch.setattr(draws, "JUNIOR_HANDOVER", draws.HANDOVER)


def rollout(c: Completion) -> Rollout:
    none, context = np.zeros(len(PROMPT)), np.full(len(PROMPT), Author.CONTEXT)
    assert c.handover_logprobs is not None
    channels = ((PROMPT, c.tokens), (context, c.author), (none, c.behaviour_logprobs), (none, c.handover_logprobs))
    tokens, author, logprobs, told = (np.concatenate(pair) for pair in channels)
    return Rollout("", 0, 0, 0, tokens, author, logprobs, 0.0, handover_logprobs=told)


def test_engine_and_trainer_agree_on_the_senior_s_log_probs() -> None:
    for sampling in (PLAIN, CUT):
        rollouts = [rollout(c) for c in written(sampling)]
        batch = pack(rollouts)
        assert batch.word_ends is not None
        assert len(batch.word_ends.places) > 200
        cut = Truncation(sampling.top_k, sampling.top_p, sampling.min_p) if sampling.truncated else None
        tables = {"starts": strategy().starts, "removed": strategy().removed}
        options = ForwardOptions(temperature=sampling.temperature, truncation=cut, **tables)
        senior = engine().senior
        with torch.no_grad():
            scores = token_scores(senior, batch, select=batch.author >= 0, options=options)
            unmasked = token_scores(senior, batch, select=batch.author >= 0, options=options._replace(removed=None))
        mine = batch.author == Author.SENIOR
        assert scores.differences(batch, mine).abs().max() < 1e-5
        assert unmasked.differences(batch, mine).abs().max() > 1e-2


# ------------------------------------------------------------------------------------------------------ longer texts


def spied(partner: Any, kept: dict[int, list[tuple[bytes, bytes]]]) -> Any:
    """The same partner, of which is kept what it was asked and told."""
    asked, (ask, spans) = dict[int, bytes](), (partner.ask, partner.spans)

    def asks(jobs: Any) -> None:
        asked.update({job.row.number: job.text for job in jobs})
        ask(jobs)

    def told(*, wait: bool) -> Any:
        found = spans(wait=wait)
        for span in found:
            kept.setdefault(span.number, []).append((asked[span.number], span.text))
        return found

    partner.ask, partner.spans = asks, told
    return partner


def test_a_text_is_what_both_wrote_and_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(Sampling(max_tokens=24), 100)
    kept: dict[int, list[tuple[bytes, bytes]]] = {}
    made = engine()._make_partner
    assert made is not None
    monkeypatch.setattr(engine(), "_make_partner", lambda words: spied(made(words), kept))
    completions = flat(engine().generate([asked]))
    check_authors(completions, strategy())
    own = tokenizers()[1]
    for number, completion in enumerate(completions):
        assert completion.stop_reason in ("eos", "length")
        text = own.decode(completion.tokens, skip_special_tokens=True).encode()
        for before, span in kept.get(number, []):
            whole = before + span
            assert text.startswith(whole) or (completion.stop_reason == "length" and whole.startswith(text))
    switched = [c for c in completions if len(set(c.author.tolist())) == 2]
    assert len(switched) > 10
    narrow = TorchEngine(engine().senior, engine().junior, own, junior_tokenizer=tokenizers()[0], max_rows=3)
    few = dataclasses.replace(asked, keys=asked.keys[:24])
    again = flat(narrow.generate([few, dataclasses.replace(asked, strategy=solo("senior"), keys=(99,))]))
    assert [c.tokens.tolist() for c in completions[:24]] == [c.tokens.tolist() for c in again[:-1]]
    assert [c.author.tolist() for c in completions[:24]] == [c.author.tolist() for c in again[:-1]]
    passes = narrow.passes
    assert passes.tokens == sum(len(c.tokens) for c in again)
    assert 0 < passes.junior < passes.tokens


@cache
def longer_texts() -> list[Completion]:
    return flat(engine().generate([request(Sampling(max_tokens=40), 60)]))


@pytest.mark.parametrize("limit", ["max_position_embeddings", "sliding_window"])
def test_a_text_ends_where_the_junior_sees_no_more_of_it(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    junior, senior = (prepared(copy.deepcopy(model).float()) for model in untouched())
    setattr(junior.config, limit, 9)
    if limit == "sliding_window":
        junior.config.use_sliding_window = junior.model.has_sliding_layers = True
        junior.config.layer_types = ["sliding_attention"]
        for module in junior.modules():
            if hasattr(module, "sliding_window"):
                module.sliding_window = 9
    narrow = TorchEngine(senior, junior, tokenizers()[1], junior_tokenizer=tokenizers()[0], max_rows=8)
    made, partners = narrow._make_partner, list[Any]()
    assert made is not None
    monkeypatch.setattr(narrow, "_make_partner", lambda words: partners.append(made(words)) or partners[-1])
    found = flat(narrow.generate([request(Sampling(max_tokens=40), 60)]))
    check_authors(found, strategy())
    assert not partners[0].readers  # nobody decodes a text that has ended
    assert not len(partners[0]._writer)
    short = [c for c in found if c.stop_reason == "length" and len(c.tokens) < 40]
    assert len(short) > 8
    whole = {c.key: c.tokens.tolist() for c in longer_texts()}
    for completion in short:
        assert len(whole[completion.key]) > len(completion.tokens)
        assert whole[completion.key][: len(completion.tokens)] == completion.tokens.tolist()


def test_what_cannot_be_expressed_ends_a_text_and_is_named() -> None:
    known = tokenizer()  # with the bytes of é as two tokens, and a padding token
    models = prepared(qwen3(5)), prepared(small_qwen3(6, vocabulary=len(OTHER)))
    both = TorchEngine(*models, known, junior_tokenizer=tokenizers()[0])
    rule = before_text_word(P, text_tables(known))
    made = [Request((3,), tuple(range(80)), Sampling(max_tokens=20), rule, junior_prompt=READ)]
    found = flat(both.generate(made))
    lost = [c for c in found if c.stop_reason == "untranslatable"]
    assert 5 < len(lost) < 75
    check_authors(found, rule)
    for completion in lost:
        texts = [boundaries.token_bytes(known).get(token) for token in completion.tokens.tolist()]
        written = b"".join(each for each in texts if each is not None)
        assert completion.author[-1] == 1
        assert None in texts or not set(written.decode(errors="replace")) <= set("ab ")


def test_a_stop_string_ends_the_same_text_wherever_it_is_completed() -> None:
    """By the senior, inside of what the junior writes, or by both together."""
    plain = Sampling(max_tokens=16)
    stops, decode = ("a ", " a", "bb b"), tokenizers()[1].decode
    whole = flat(engine().generate([request(plain, 400)]))
    cut = flat(engine().generate([request(dataclasses.replace(plain, stop=stops), 400)]))
    ends = Counter[tuple[int, ...]]()
    for one, other in zip(whole, cut, strict=True):
        texts = [decode(one.tokens[: n + 1]) for n in range(len(one.tokens))]
        hits = [n for n, text in enumerate(texts, start=1) if any(stop in text for stop in stops)]
        assert other.tokens.tolist() == one.tokens[: hits[0] if hits else None].tolist()
        assert other.author.tolist() == one.author[: len(other.tokens)].tolist()
        assert other.stop_reason == ("stop" if hits else one.stop_reason)
        if hits:
            ends[tuple(other.author[-2:].tolist())] += 1
    assert min(ends[ways] for ways in ((0, 0), (0, 1), (1, 0), (1, 1))) > 5


def test_what_cannot_be_done_is_refused_by_name() -> None:
    by_ids = before_word(P, boundaries.start_table(tokenizers()[1]))
    one = TorchEngine(prepared(qwen3(5)), prepared(small_qwen3(6)), tokenizer())
    for running, asked, reason in (
        (engine(), {"strategy": by_ids}, r"two vocabularies, .* use selection\.strategy=before_word, or a junior of"),
        (engine(), {"strategy": solo("junior")}, "two vocabularies"),
        (engine(), {"junior_prompt": ()}, "set junior_prompt"),
        (engine(), {"sampling": dataclasses.replace(PLAIN, stop_token_ids=(1,))}, "leave out stop ids"),
        (one, {"strategy": before_text_word(P, text_tables(tokenizer()))}, "this engine has one; use before_word"),
    ):
        with pytest.raises(EngineError, match=reason):
            running.generate([dataclasses.replace(request(PLAIN, 1), **asked)])
    assert one.generate([dataclasses.replace(request(PLAIN, 1), strategy=word(P, 3, torch.ones(VOCABULARY) > 0))])
    assert engine().generate([dataclasses.replace(request(PLAIN, 1), strategy=solo("senior"))])
    stopped = request(dataclasses.replace(PLAIN, stop=("a",)), 1)
    with pytest.raises(EngineError, match=r"stop strings in an environment .* leave them out"):
        engine().generate([stopped], responder=Mock(spec=Responder))
    with pytest.raises(EngineError, match="cannot draft"):
        TorchEngine(engine().senior, engine().junior, tokenizers()[1], junior_tokenizer=tokenizers()[0], draft_tokens=2)
