"""Words as a property of the text, and texts by two authors of two vocabularies, with real tokenizers."""

import time
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import selection_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_tokenizers import WRITING, byte_level, sentencepiece

import artefacts
from helpers import tokenizer as small_tokenizer
from real_model import smollm2
from tandemrl.selection import replay
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.whole_words import TextTables, before_text_word, text_sentence, text_tables
from tandemrl.selection.words import (
    Vocabulary,
    begin_words,
    last_word,
    read,
    spell,
    step_words,
    vocabulary_of,
    whole_characters,
    word_starts,
)

PAIRS = (("qwen3", "smollm2"), ("qwen3", "gemma3"), ("smollm2", "gemma3"))
KINDS = {
    **WRITING,
    "unicode": "été naïve ﬁn Ångström 𝔘𝔫𝔦 x² zero\u200bwidth ½ Ωmega tiếng Việt ａｂｃ \u202eback\u202c हिन्दी भाषा ไทย",
    "decomposed": "the value of x is e\u0301 and y_1 holds, so we divide o\u0308 \u1e9b\u0323 by 3.14 here \u212b",
    "control": "<|im_end|> said <|endoftext|> the <end_of_turn> user <eos> </s>\nassistant <think> <|im_start|>user {}",
}
KINDS["unspaced"] = f"{WRITING['cjk']} \\frac{{a}}{{b}} \\sqrt{{x^2}}=3 是，所以。"
"""Kinds of writing, one that NFC changes, one that has the control tokens of the models as text, one without spaces."""
LETTERS = {
    "prose": (0x61, 0x7A),
    "code": (0x21, 0x7E),
    "latex": (0x21, 0x7E),
    "emoji": (0x1F300, 0x1F64F),
    "cjk": (0x4E00, 0x9FA5),
    "rtl": (0x5D0, 0x5EA),
    "unicode": (0x1E00, 0x1EFF),
    "decomposed": (0x61, 0x7A),
    "control": (0x3C, 0x3E),
    "unspaced": (0x4E00, 0x9FA5),
}
"""A block of characters for each kind, from which words are made that no tokenizer has as a whole."""
GAPS = {" ": 0.72, "  ": 0.05, "": 0.05, "\n": 0.04, "\n    ": 0.04, "\n\n": 0.03, "\t": 0.02, "\xa0": 0.02}
GAPS |= {" \u3000": 0.01, "\u2009 ": 0.01, "\r\n  ": 0.01}


EVERY = torch.arange(256)
TABLES = TextTables(EVERY == 32, EVERY < 0, torch.ones_like(EVERY), EVERY, blank_line=EVERY < 0, newline=EVERY == 10)
BYTES = before_text_word(0.5, TABLES)
"""The strategy over a vocabulary of bytes."""


def starts_in(text: str) -> list[int]:
    """Where words begin, in characters: the definition in plain Python."""
    return [i for i, c in enumerate(text) if i == 0 or (c == " " and not text[i - 1].isspace())]


@given(st.text(st.sampled_from(" \n\t\r\x1c\x85\xa0\u1680\u2003\u2029\u202f\u205f\u3000\u200baé日🙂")), st.data())
def test_words_begin_at_spaces_after_anything_but_whitespace(text: str, data: st.DataObject) -> None:
    wanted = [len(text[:i].encode()) for i in starts_in(text)]
    whole = text.encode()
    assert word_starts(whole) == wanted
    cut = data.draw(st.integers(0, len(whole)))
    assert [*word_starts(whole[:cut]), *(cut + i for i in word_starts(whole[cut:], whole[:cut]))] == wanted
    pieces = [whole[:cut], whole[cut:]] if 0 < cut < len(whole) else [whole] if whole else []
    assert sum(begin_words(pieces)) == sum(start in (0, cut) for start in wanted)
    assert whole_characters(whole[:cut]).decode() == whole[:cut].decode(errors="ignore")
    if whole:  # each byte a token: where a word begins depends on the bytes before it
        tokens, key = torch.tensor([[*whole]]), data.draw(st.integers(0, 2**40))
        found = replay(BYTES, torch.tensor([key]), tokens, torch.tensor([len(whole)]))
        told = oracle.before_word(key, [[i in wanted for i in range(len(whole))]], 0.5, [False, True])
        assert found.author.tolist() == [told.authors]
        assert int(found.draws) == told.draws


@given(st.text(st.sampled_from("  \n\n\r\xa0aé日"), min_size=1), st.sampled_from(["senior", "junior"]))
def test_steps_change_hands_at_the_first_word_after_a_blank_line(text: str, first: Literal["senior", "junior"]) -> None:
    senior, since, wanted = first == "senior", 0, list[int]()
    for i, character in enumerate(text):
        if i in starts_in(text):
            senior ^= "\n\n" in text[since:i]
            since = i
        wanted += [int(senior)] * len(character.encode())
    tokens = torch.tensor([[*text.encode()]])
    found = replay(text_sentence(first, TABLES), torch.zeros(1).long(), tokens, torch.tensor([tokens.shape[1]]))
    assert found.author.tolist() == [wanted]
    starts, changes = word_starts(text.encode()), (np.flatnonzero(np.diff(wanted)) + 1).tolist()
    ended = starts.index(changes[0]) if changes else len(starts) + ("\n\n" not in text[since:])
    assert step_words(text.encode(), starts) == ended
    tokenizer = byte_level()  # in which tokens hold several newlines
    tokens = torch.tensor([tokenizer.encode(text)], dtype=torch.int64)
    widths = torch.tensor([len(token_bytes(tokenizer)[token]) for token in tokens[0].tolist()])
    strategy = text_sentence(first, text_tables(tokenizer))
    found = replay(strategy, torch.zeros(1).long(), tokens, torch.tensor([tokens.shape[1]]))
    if not strategy.removed[tokens].any():
        assert found.author[0].repeat_interleave(widths).tolist() == wanted


TURNS = st.lists(st.text(st.sampled_from("  \n\n\raé"), min_size=1), min_size=1, max_size=4)


@settings(max_examples=40)
@given(TURNS, st.integers(0, 2**40), st.sampled_from(["senior", "junior"]))
def test_each_turn_begins_a_word_and_no_whitespace_before_it_counts(turns, key, first):
    begun = [[len(turn[:i].encode()) for i in starts_in(turn)] for turn in turns]
    whole = "".join(turns).encode()
    edges = np.cumsum([len(turn.encode()) for turn in turns])
    tokens, lengths = torch.tensor([[*whole]]), torch.tensor([len(whole)])
    starts = torch.isin(torch.arange(len(whole)), torch.from_numpy(edges))[None]
    places = [[i in begins for i in range(len(turn.encode()))] for turn, begins in zip(turns, begun, strict=True)]
    told = oracle.before_word(key, places, 0.5, [False, True])
    found = replay(BYTES, torch.tensor([key]), tokens, lengths, starts)
    assert found.author.tolist() == [told.authors]
    assert int(found.draws) == told.draws
    senior, last, steps = first == "senior", "", list[int]()
    for turn in turns:
        for start, end in pairwise([*starts_in(turn), len(turn)]):
            senior ^= "\n\n" in last
            last = turn[start:end]
            steps += [int(senior)] * len(last.encode())
    found = replay(text_sentence(first, TABLES), torch.zeros(1).long(), tokens, lengths, starts)
    assert found.author.tolist() == [steps]


def test_a_vocabulary_is_used_in_threads_and_keeps_no_whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, within, most = byte_level(), [0], [0]
    encode, asked = tokenizer.encode, list[str]()

    def slow(text: str, **settings: bool) -> list[int]:
        asked.append(text)
        within[0] += 1
        most[0] = max(most[0], within[0])
        time.sleep(0.001)  # lets another thread in
        within[0] -= 1
        return encode(text, **settings)

    monkeypatch.setattr(tokenizer, "encode", slow)
    vocabulary, texts = vocabulary_of(tokenizer), [f"word {i}" for i in range(20)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(vocabulary.encode, texts))
    assert most == [1]
    assert [spell(tokens, vocabulary) for tokens in found] == [text.encode() for text in texts]
    for text in ("word 1", "word " * 100, "word " * 100):
        vocabulary.encode(text)
    assert asked[20:] == ["word " * 100] * 2


def test_what_cannot_be_read_in_another_vocabulary() -> None:
    known = {"one": byte_level(), "other": sentencepiece()}
    one, other = map(vocabulary_of, known.values())
    span, before = " of  x\n    is", other.encode("the value")
    found = read(span.encode(), other, b"the value")
    assert found is not None
    assert [*before, *found] == list(other.encode("the value" + span))
    joined = Vocabulary({0: span.encode()}, lambda text: [0] * bool(text))
    grown = Vocabulary({0: b"the of", 1: b"the"}, lambda text: [0] if " " in text else [1])
    cut = " 日".encode()[:-1]
    for text, earlier, reader in (
        (b"of x", b"the value", other),  # it goes on with a word
        (cut, b"the value", other),
        (" a▁b".encode(), b"the value", other),  # read as another text
        (span.encode(), b"", joined),  # the second word begins inside its token
        (span.encode(), b"the", joined),
        (b" of", b"the", grown),  # what is before it would be another token
    ):
        assert read(text, reader, earlier) is None
    assert spell(one.encode(span), one) == span.encode()
    assert spell([*one.encode(span), known["one"].eos_token_id], one) is None


@cache
def vocabularies() -> dict[str, tuple[Any, Vocabulary]]:
    from transformers import AutoTokenizer

    tokenizers = {
        "qwen3": artefacts.tokenizer("qwen3"),
        "gemma3": artefacts.tokenizer("gemma3"),
        "smollm2": AutoTokenizer.from_pretrained(smollm2()),
    }
    return {name: (tokenizer, vocabulary_of(tokenizer)) for name, tokenizer in tokenizers.items()}


def made_up(kind: str, random: np.random.Generator) -> str:
    pieces = random.choice(np.array(KINDS[kind].split(" ")), int(random.integers(15, 40))).tolist()
    low, high = LETTERS[kind]
    for i in np.flatnonzero(random.random(len(pieces)) < 0.2):
        pieces[i] += "".join(map(chr, random.integers(low, high + 1, int(random.integers(1, 6)))))
    gaps = random.choice(np.array(list(GAPS)), len(pieces), p=list(GAPS.values())).tolist()
    if kind == "unspaced":
        gaps = random.choice(["", "\n"], len(pieces)).tolist()
    return "".join(part for pair in zip(pieces, gaps, strict=True) for part in pair).rstrip()


class Written(NamedTuple):
    """One text by two authors: in the tokens of each of them, whose are they (index 1 is the senior).

    A refusal ends it; then ``text`` is the span that was refused.
    """

    text: str
    tokens: tuple[list[int], list[int]]
    authors: tuple[list[int], list[int]]
    handovers: int
    refused: bool = False


def write(text: str, key: int, pair: Sequence[Vocabulary], wrong: int | None = None) -> Written:
    """Runs of words by one author each; the other one reads them in the context of its own tokens of what is before.

    ``wrong``: the word that its author does not write. The last one is the end of the text.
    """
    starts = [*starts_in(text), len(text)]
    told = oracle.before_word(key, [[1] * len(starts)], 0.5, [False, True]).authors
    if wrong is not None:
        told[wrong] = 1 - told[wrong]
    done, first = Written("", ([], []), ([], []), -1), 0
    while first < len(starts) - 1:
        author, last = told[first], first
        while last < len(starts) - 1 and told[last] == author:
            last += 1
        span = list(pair[author].encode(text[starts[first] : starts[last]]))
        spelled = spell(span, pair[author])
        assert spelled is not None
        part, before = spelled.decode(), done.text.encode()  # an author may normalise what it writes
        found = reading(spelled, pair[1 - author], before)
        if found is None:
            return done._replace(text=part, refused=True)
        assert sum(begin_words([pair[1 - author].pieces[token] for token in found], before)) == last - first
        for who, tokens in ((author, span), (1 - author, found)):
            done.tokens[who].extend(tokens)
            done.authors[who].extend([author] * len(tokens))
        done = done._replace(text=done.text + part, handovers=done.handovers + 1)
        first = last
    for authors in done.authors:
        authors.append(told[-1])
    return done


def reading(span: bytes, reader: Vocabulary, before: bytes) -> tuple[int, ...] | None:
    """What is read after the whole text, which is what is read after its last word."""
    found = read(span, reader, before)
    assert found == read(span, reader, last_word(before))
    return found


def replayed(tokenizer: Any, keys: Sequence[int], rows: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The authors and the number of draws of each row of tokens."""
    longest, strategy = max(map(len, rows)), before_text_word(0.5, text_tables(tokenizer))
    tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    found = replay(strategy, torch.tensor(keys), tokens, torch.tensor([len(row) for row in rows]))
    return [a[: len(row)] for a, row in zip(found.author.tolist(), rows, strict=True)], found.draws.tolist()


@pytest.mark.parametrize("count", [180, pytest.param(10_000, marks=pytest.mark.slow)])
def test_two_vocabularies_write_one_text_and_replay_knows_its_authors(count: int, record_property: Any) -> None:
    known = vocabularies()
    gemma = known["gemma3"][1]  # it has one token for "> </", where a word begins
    assert read(b"<q> </q>", gemma, b"") is None
    assert read(b"<q> <q>", gemma, b"") is not None
    figures: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    rows: dict[str, list[tuple[int, list[int], list[bool], list[int], int]]] = {name: [] for name in known}
    for i in range(count):
        turn, kind = i // len(KINDS), list(KINDS)[i % len(KINDS)]  # each kind has every pair, both ways
        names = PAIRS[turn % 3][:: 1 if turn // 3 % 2 else -1]
        pair, sums = [known[name][1] for name in names], figures[kind]
        text = made_up(kind, np.random.default_rng(i))
        wrong = (-1, len(starts_in(text)), i % len(starts_in(text)))[turn // 6 % 3]  # none, that of the end, any
        done = write(text, i, pair, None if wrong < 0 else wrong)
        sums["texts"] += 1
        if done.refused:  # by the tokenizer that normalises alone, and of what it would change
            assert (kind, "qwen3" in names) == ("decomposed", True)
            assert not unicodedata.is_normalized("NFC", done.text)
            continue
        text, starts = done.text, starts_in(done.text)
        places = {len(text[:start].encode()) for start in starts}
        for name, vocabulary, tokens, authors in zip(names, pair, done.tokens, done.authors, strict=True):
            assert known[name][0].decode(tokens, clean_up_tokenization_spaces=False) == text  # byte-exact
            assert tokens == list(vocabulary.encode(text))  # as if one author had written it all
            pieces = [vocabulary.pieces[token] for token in tokens]
            begins = begin_words(pieces)
            assert sum(begins) == len(places)
            ended = [*tokens, known[name][0].eos_token_id]
            rows[name].append((i, ended, [*begins, True], authors, wrong))  # the end of a text ends a word
            edges = np.cumsum([0, *map(len, pieces)]).tolist()
            changes = [edges[j] for j in range(1, len(tokens)) if authors[j] != authors[j - 1]]
            assert len(changes) == done.handovers
            assert places.issuperset(changes)
        sums.update(written=1, bytes=len(text.encode()), words=len(places), handovers=done.handovers)
    ends = 0
    for name, texts in rows.items():
        keys, ended, begun, recorded, wrongs = zip(*texts, strict=True)
        found, draws = replayed(known[name][0], keys, ended)
        assert draws == [sum(each) for each in begun]
        for begins, authors, told, wrong in zip(begun, found, recorded, wrongs, strict=True):
            word = np.cumsum(begins) - 1  # of each token
            assert np.equal(authors, told).tolist() == (word != wrong).tolist()
        ends += sum(wrong == sum(each) - 1 for each, wrong in zip(begun, wrongs, strict=True))
    assert ends > count / 10
    for kind, sums in figures.items():
        rates = {
            "texts": sums["texts"],
            "words per 100 bytes": round(100 * sums["words"] / sums["bytes"], 2),
            "handovers per text": round(sums["handovers"] / sums["written"], 2),
            "untranslatable": round(1 - sums["written"] / sums["texts"], 3),
        }
        record_property(kind, rates)
        if kind == "unspaced":
            assert rates["handovers per text"] < 1
            continue
        assert rates["words per 100 bytes"] > 6, rates
        assert rates["handovers per text"] > 4, rates
        assert (0 < rates["untranslatable"] < 2 / 3) == (kind == "decomposed")  # a third of the pairs is without Qwen


def test_encoding_a_text_does_not_change_how_others_encode_prompts() -> None:
    """Whether special tokens are text is a state of a tokenizer, which another thread may be using."""
    shared = small_tokenizer()
    before = shared.encode("a<eos>", add_special_tokens=False)
    as_text = vocabulary_of(shared).encode("a<eos>")
    assert before[-1] == shared.eos_token_id != as_text[-1]
    assert shared.backend_tokenizer.encode("a<eos>", add_special_tokens=False).ids == before
