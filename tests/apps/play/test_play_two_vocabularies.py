"""A text by a pair of two vocabularies, in pieces, on the page of `tandemrl play`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette", reason="needs the play extra")
from transformers import AutoModelForCausalLM

from tandemrl.apps.play.duo import Draft, Duo, Piece
from tandemrl.apps.play.problems import EXAMPLE
from tandemrl.config import SelectionConfig
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo
from tandemrl.selection.draws import request_key
from tandemrl.selection.whole_words import before_text_word, text_tables

WORDS = SelectionConfig(strategy="before_word", prob_senior=0.6)
ALONE = SelectionConfig(strategy="solo")
ASKED = "Mia has 3 figs and buys 4."
TOLD = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def duo(tiny_pair: Path, other_junior: Path) -> Duo:
    senior, junior = load_model(str(tiny_pair / "senior")), load_model(str(other_junior))
    known, own = load_tokenizer(tiny_pair / "senior"), load_tokenizer(other_junior)
    engine = TorchEngine(senior, junior, known, junior_tokenizer=own)
    return Duo(engine, junior, known, longest=128, junior_tokenizer=own)


def own(duo: Duo) -> Any:
    return duo._junior_tokenizer


def whole(duo: Duo, strategy: Strategy, seed: int) -> Completion:
    """The text of a single request, as far as there is room."""
    prompt, read = (tuple(known(TOLD)["input_ids"]) for known in (duo.tokenizer, own(duo)))
    sampling = Sampling(max_tokens=duo.longest - len(prompt))
    duo._free_engine()
    [[found]] = duo.engine.generate(
        [Request(prompt, (request_key(seed, 0, 0, 0),), sampling, strategy, junior_prompt=read)]
    )
    return found


def longer(draft: Draft, piece: Piece) -> Draft:
    return draft.longer([token.id for token in piece.tokens], [token.author for token in piece.tokens])


def in_pieces(duo: Duo, draft: Draft, counts: Sequence[int]) -> list[Piece]:
    pieces = [duo.write(draft, counts[0])]
    while pieces[-1].stop is None:
        draft = longer(draft, pieces[-1])
        pieces.append(duo.write(draft, counts[len(pieces) % len(counts)]))
    return pieces


@pytest.mark.parametrize("selection", [WORDS, ALONE], ids=["before_word", "solo"])
def test_pieces_of_any_length_make_the_text_of_one_request(duo: Duo, selection: SelectionConfig) -> None:
    strategy = solo() if selection == ALONE else before_text_word(0.6, text_tables(duo.tokenizer))
    expected = whole(duo, strategy, 7)
    for counts in ([4], [1, 16, 3]):
        pieces = in_pieces(duo, Draft(ASKED, 7, selection), counts)
        tokens = [token for piece in pieces for token in piece.tokens]
        assert [token.id for token in tokens] == expected.tokens.tolist()
        assert [token.author for token in tokens] == expected.author.tolist()
        assert pieces[-1].stop == expected.stop_reason
        for piece, after in pairwise(pieces):
            assert after.tokens[0].text.startswith((" ", "\n")) or after.tokens[0].special
            assert piece.tokens
    assert set(expected.author.tolist()) == ({1} if selection == ALONE else {0, 1})


def test_after_a_person_the_two_go_on_from_a_text_that_each_reads(duo: Duo) -> None:
    draft = longer(Draft(ASKED, 7, WORDS), duo.write(Draft(ASKED, 7, WORDS), 4))
    typed = " which makes é seven"
    piece = duo.say(draft, typed)
    assert "".join(token.text for token in piece.tokens) == typed
    assert {token.author for token in piece.tokens} == {0}
    assert None not in [token.surprisal for token in piece.tokens]
    after = longer(draft, piece)
    after = replace(after, given=len(after.tokens))
    pieces = in_pieces(duo, after, [2, 5])
    text = str(duo.tokenizer.decode(draft.tokens)) + typed
    own_tokens = tuple(duo.tokenizer(TOLD)["input_ids"]) + after.tokens
    request = Request(
        own_tokens,
        (request_key(7, 0, after.given, 0),),
        Sampling(max_tokens=duo.longest - len(own_tokens)),
        before_text_word(0.6, text_tables(duo.tokenizer)),
        junior_prompt=tuple(own(duo)(TOLD + text)["input_ids"]),
    )
    duo._free_engine()
    [[expected]] = duo.engine.generate([request])
    tokens = [token for piece in pieces for token in piece.tokens]
    assert [token.id for token in tokens] == expected.tokens.tolist()
    assert [token.author for token in tokens] == expected.author.tolist()
    assert pieces[-1].stop == expected.stop_reason
    twice = duo.say(longer(after, pieces[0]), "!")
    assert [token.text for token in twice.tokens] == ["!"]


def test_what_two_vocabularies_cannot_do_is_refused(duo: Duo) -> None:
    half = tuple(duo.tokenizer.encode("é", add_special_tokens=False)[:1])
    draft = Draft(ASKED, 7, WORDS, tokens=half, authors=(1,))
    with pytest.raises(
        ValueError, match="text: the junior cannot read it in its vocabulary; insert other characters, or"
    ):
        duo.say(draft, " c")
    with pytest.raises(ValueError, match="handovers are of single texts in one vocabulary"):
        duo.handovers(draft, EXAMPLE, list)


def test_surprisals_are_the_juniors_reading_of_each_word(duo: Duo, other_junior: Path) -> None:
    tokens = [token for piece in in_pieces(duo, Draft(ASKED, 7, WORDS), [4]) for token in piece.tokens]
    shown = [token for token in tokens if not token.special]
    text = "".join(token.text for token in shown)
    prompt, ids = own(duo)(TOLD)["input_ids"], own(duo)(text)["input_ids"]
    with torch.no_grad():  # the model by itself
        logits = AutoModelForCausalLM.from_pretrained(other_junior)(torch.tensor([[*prompt, *ids]])).logits[0]
    logprobs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1][torch.arange(len(ids)), torch.tensor(ids)]
    lengths = [len(own(duo).decode([each])) for each in ids]
    expected, found = np.zeros(len(text) + 1), np.zeros(len(text) + 1)
    expected[list(accumulate(lengths))] = -logprobs.numpy()
    found[list(accumulate(len(token.text) for token in shown))] = [token.surprisal for token in shown]
    starts = [i for i, c in enumerate(text) if c == " "] + [len(text)]
    np.testing.assert_allclose(found.cumsum()[starts], expected.cumsum()[starts], atol=1e-3)
    assert [token.surprisal for token in tokens if token.special] == [None] * (len(tokens) - len(shown))
