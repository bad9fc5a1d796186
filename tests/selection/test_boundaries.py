import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import regex
import torch
from selection_tokenizers import TEXT, WRITING, byte_level, sentencepiece
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

import artefacts
from tandemrl.selection import Strategy, before_word, replay, sentence, word, word_aligned
from tandemrl.selection.boundaries import start_table, step_tables, word_boundary_table, word_start_tables

SMALL = {"byte-level": byte_level, "sentencepiece": sentencepiece}
REAL = ("qwen3", "llama3_1", "gemma3")
"""Published tokenizers."""
TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in REAL)], indirect=True
)
# Words as `WordTables` defines them, in a regular expression; and a narrower, everyday notion.
WORD = regex.compile(r"[\p{L}\p{M}\p{N}\p{Pc}\p{Pd}\p{Cf}.,:;'’·&@/\\]+")
EVERYDAY_WORD = regex.compile(r"\w+(?:['’.,:-]\w+)*")


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return SMALL[request.param]() if request.param in SMALL else artefacts.tokenizer(request.param)


def ids(table: torch.Tensor) -> set[int]:
    return set(table.nonzero().flatten().tolist())


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
    return text


def raw(tokenizer: Any, index: int) -> str:
    """The text of a token between two others, from the tokenizer's own decoder."""
    anchor = tokenizer.convert_tokens_to_ids("a")
    return decode(tokenizer, [anchor, index, anchor])[1:-1]


@TOKENIZERS
def test_word_boundaries_are_the_leading_space_tokens(tokenizer: Any) -> None:
    table = word_boundary_table(tokenizer)
    assert table.dtype == torch.bool
    assert len(table) == len(tokenizer)
    byte_piece = tokenizer.convert_tokens_to_ids("<0x20>")  # a space, but not the mark of a word
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    plain = set(range(len(tokenizer))) - special - {byte_piece}
    assert ids(table) == {index for index in plain if raw(tokenizer, index).startswith(" ")}
    assert 20 < len(ids(table)) < 0.6 * len(tokenizer)


def test_special_tokens_and_maltese_letters_begin_no_word() -> None:
    special, plain = byte_level().convert_tokens_to_ids(["Ġ<|special\n\n", "<think>\n\n"])  # of the added tokens
    assert step_tables(byte_level()).contains[plain]
    assert not word_boundary_table(byte_level())[special]
    assert not any(table[special] for table in step_tables(byte_level()))
    assert not any(table[special] for table in word_start_tables(byte_level()))
    assert not word_boundary_table(sentencepiece())[sentencepiece().convert_tokens_to_ids("Ġa")]


@TOKENIZERS
def test_tables_are_the_decoded_text(tokenizer: Any) -> None:
    steps, words = step_tables(tokenizer), word_start_tables(tokenizer)
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    texts = {index: raw(tokenizer, index) for index in range(len(tokenizer)) if index not in special}
    assert ids(steps.contains) == {index for index, text in texts.items() if "\n\n" in text}
    assert ids(steps.ends_newline) == {index for index, text in texts.items() if text.endswith("\n")}
    assert ids(steps.starts_newline) == {index for index, text in texts.items() if text.startswith("\n")}
    assert ids(words.ends_in_space) == {index for index, text in texts.items() if re.search(r"\s\Z", text)}
    outside = {i for i, text in texts.items() if text and text[-1] != "\ufffd" and not WORD.fullmatch(text[-1])}
    assert ids(words.ends_outside_word) == outside
    assert all(ids(table) for table in steps)
    assert ids(words.ends_in_space) < outside


def test_size_pads_to_the_models_vocabulary() -> None:
    tokenizer = byte_level()
    table = word_boundary_table(tokenizer, size=1000)
    assert len(table) == 1000
    assert ids(table) == ids(word_boundary_table(tokenizer))
    assert all(len(t) == 1000 for t in (*step_tables(tokenizer, size=1000), *word_start_tables(tokenizer, size=1000)))
    assert len(word_boundary_table(tokenizer, size=10)) == len(tokenizer)  # never shorter than the ids that exist


def test_tables_follow_a_tokenizer_that_grows_and_are_not_shared() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level().backend_tokenizer.to_str()))
    table = step_tables(tokenizer).contains
    table.fill_(False)
    before = step_tables(tokenizer).contains
    assert before.any()
    tokenizer.add_tokens([AddedToken("x\n\nx", special=False)])
    after = step_tables(tokenizer).contains
    assert ids(after) == ids(before) | {len(tokenizer) - 1}


@pytest.mark.parametrize("tables", [word_boundary_table, step_tables, word_start_tables])
def test_a_tokenizer_without_boundaries_is_refused_by_name(tables: Any) -> None:
    model = models.WordLevel({"a": 0, "##b": 1, "<s>": 2}, unk_token="<s>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<s>", name_or_path="acme/wordless"
    )
    with pytest.raises(ValueError, match="acme/wordless"):
        tables(tokenizer)


def handoffs(tokenizer: Any, strategy: Strategy, rows: list[list[int]]) -> Iterator[tuple[str, int]]:
    """(text, character position) of every handoff."""
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    author = replay(strategy, torch.arange(len(rows)), tokens, torch.tensor([len(row) for row in rows])).author
    for row, authors in zip(rows, author.tolist(), strict=True):
        text = decode(tokenizer, row)
        for i in range(1, len(row)):
            if authors[i] != authors[i - 1]:
                left = decode(tokenizer, row[:i])
                yield text, len(left.rstrip("\ufffd"))


def split_words(pattern: regex.Pattern, places: list[tuple[str, int]]) -> list[str]:
    return [m[0] for text, at in places for m in pattern.finditer(text) if m.start() < at < m.end()]


@TOKENIZERS
@pytest.mark.parametrize("gap", [1, 8])
def test_word_aligned_never_hands_over_inside_a_word(tokenizer: Any, gap: int) -> None:
    strategy = word_aligned(0.5, gap, word_start_tables(tokenizer))
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    places = list(handoffs(tokenizer, strategy, [text] * 30))
    assert len(places) > 90
    assert split_words(WORD, places) == []
    assert split_words(EVERYDAY_WORD, places) == []
    # The same text with `word`, which the paper trains, does split words: the check above can fail.
    plain = list(handoffs(tokenizer, word(0.5, 8, word_boundary_table(tokenizer)), [text] * 30))
    assert split_words(EVERYDAY_WORD, plain)


@TOKENIZERS
def test_word_aligned_never_hands_over_inside_a_word_whatever_the_tokens(tokenizer: Any) -> None:
    """Uniformly random tokens: no tokenizer would write these, a model may."""
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    plain = torch.tensor([index for index in range(len(tokenizer)) if index not in special])
    generator = torch.Generator().manual_seed(0)
    rows = plain[torch.randint(0, len(plain), (40, 120), generator=generator)].tolist()
    strategy = word_aligned(0.5, 2, word_start_tables(tokenizer))
    places = list(handoffs(tokenizer, strategy, rows))
    assert len(places) > 40
    assert split_words(WORD, places) == []


@TOKENIZERS
@pytest.mark.parametrize("kind", WRITING)
def test_before_word_hands_over_before_words_only(tokenizer: Any, kind: str, record_property: Any) -> None:
    table, random = start_table(tokenizer), np.random.default_rng(0)
    pieces = np.array(WRITING[kind].split(" "))
    texts = [" ".join(random.choice(pieces, 40)) for _ in range(50)]
    rows = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    places = list(handoffs(tokenizer, before_word(0.5, table), rows))
    assert all(text[at] == " " and (at == 0 or not text[:at].endswith("\ufffd")) for text, at in places)
    begun = sum(int(table[row].sum()) for row in rows)
    record_property("words per 100 bytes", 100 * begun / sum(len(text.encode()) for text in texts))
    record_property("handovers per text", len(places) / len(texts))
    assert begun > 20 * len(texts)
    assert len(places) > 7 * len(texts)
    if kind == "prose":  # with `word`, the paper's, the places are others: the check above can fail
        after = list(handoffs(tokenizer, word(0.5, 32, word_boundary_table(tokenizer)), rows))
        assert not all(text[at] == " " for text, at in after)


@TOKENIZERS
def test_special_tokens_end_words(tokenizer: Any) -> None:
    table, begins = start_table(tokenizer, len(tokenizer) + 3), word_boundary_table(tokenizer, len(tokenizer) + 3)
    ends = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    assert set(table.nonzero().flatten().tolist()) == ends | set(begins.nonzero().flatten().tolist())
    assert tokenizer.eos_token_id in ends
    assert not begins[tokenizer.eos_token_id]  # the cached table is as it was


@TOKENIZERS
def test_sentence_hands_over_exactly_after_blank_lines(tokenizer: Any) -> None:
    strategy = sentence("senior", step_tables(tokenizer))
    text = TEXT.replace("\n\n\n", "\n\n")
    row = tokenizer.encode(text, add_special_tokens=False)
    places = [at for _, at in handoffs(tokenizer, strategy, [row])]
    ends = [m.end() for m in regex.finditer("\n\n", text)]
    assert len(places) == len(ends) == 3
    # A token may hold more than the blank line: the handoff comes after the whole token.
    assert all(0 <= at - end <= 4 and not text[end:at].strip() for at, end in zip(places, ends, strict=True))
