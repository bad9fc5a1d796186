"""A text that is written in pieces, and by a person."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import CHAT_TEMPLATE, IDS, prepared, qwen3, small_qwen3, tokenizer
from tandemrl.apps.play.duo import Draft, Duo, LazyText, Piece
from tandemrl.config import SelectionConfig
from tandemrl.rollout.engine import EngineError, Request, Sampling
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection.draws import request_key


@pytest.fixture(scope="module")
def duo() -> Duo:
    senior, junior, chat = prepared(qwen3()), prepared(small_qwen3()), tokenizer()
    chat.chat_template = CHAT_TEMPLATE
    return Duo(TorchEngine(senior, junior, chat), junior, chat, longest=48)


def longer(draft: Draft, piece: Piece) -> Draft:
    return draft.longer([token.id for token in piece.tokens], [token.author for token in piece.tokens])


@pytest.mark.parametrize("strategy", ["word", "before_word", "solo"])
def test_pieces_of_any_length_make_the_text_of_one_request(duo: Duo, strategy: str) -> None:
    selection = SelectionConfig(strategy=strategy)
    prompt = duo.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b"}], add_generation_prompt=True, return_dict=False
    )
    whole = Request(
        prompt,
        (request_key(7, 0, 0, 0),),
        Sampling(max_tokens=20),
        schedule_of(selection, duo.tokenizer, duo.engine.vocabulary).strategy(1),
    )
    duo._free_engine()
    [[expected]] = duo.engine.generate([whole])
    draft, stop = Draft("a b", 7, selection), None
    while stop is None and len(draft.tokens) < 20:
        piece = duo.write(draft, min(3, 20 - len(draft.tokens)))
        draft, stop = longer(draft, piece), piece.stop
    assert list(draft.tokens) == expected.tokens.tolist()
    assert list(draft.authors) == expected.author.tolist()


def test_a_person_writes_as_the_junior_and_special_tokens_are_text(duo: Duo) -> None:
    draft = longer(Draft("a b", 1), duo.write(Draft("a b", 1), 4))
    said = duo.say(draft, " hi<eos>é")
    assert "".join(token.text for token in said.tokens) == " hieosé"  # the tokenizer of the tests knows no < and >
    assert {token.author for token in said.tokens} == {0}
    assert duo.tokenizer.eos_token_id not in [token.id for token in said.tokens]
    after = longer(draft, said)
    after = replace(after, given=len(after.tokens))
    further = duo.write(after, 3)
    duo._free_engine()
    prompt = [*duo._prompt("a b"), *after.tokens]
    key, strategy = request_key(1, 0, 0, 0), duo._strategy(draft.selection)
    [[expected]] = duo.engine.generate(
        [Request(prompt, (key,), Sampling(max_tokens=3), strategy, history=(after.tokens,))]
    )
    assert [token.id for token in further.tokens] == expected.tokens.tolist()
    assert [token.author for token in further.tokens] == expected.author.tolist()
    assert duo.write(after, 3).tokens == further.tokens
    with pytest.raises(ValueError, match="tokens: not what the two write with these settings; generate the text anew"):
        duo.write(replace(after, given=0), 2)


def test_a_character_whose_bytes_are_two_tokens_is_shown_once(duo: Duo) -> None:
    """Also where a piece ends between them."""
    ids = [IDS["a"], IDS["Ã"], IDS["©"], IDS["b"]]
    draft = Draft("a b", 1)
    texts = []
    for i, token in enumerate(ids):
        draft = replace(draft, tokens=(*draft.tokens, token), authors=(*draft.authors, i % 2))
        texts.append(duo._read(draft, i, duo._prompt("a b"))[0].text)
    assert texts == ["a", "", "é", "b"]
    half = replace(draft, tokens=tuple(ids[:2]), authors=(0, 1))
    assert duo._read(half, 1, duo._prompt("a b"), over=True)[0].text == "\ufffd"


def test_a_text_that_cannot_be_begun_or_gone_on_with_leaves_the_engine_free(monkeypatch: pytest.MonkeyPatch) -> None:
    senior, junior, chat = prepared(qwen3()), prepared(small_qwen3()), tokenizer()
    chat.chat_template = CHAT_TEMPLATE
    duo = Duo(TorchEngine(senior, junior, chat, draft_tokens=2), junior, chat, longest=48)
    draft = Draft("a b", 3)
    with pytest.raises(EngineError, match="this engine cannot do"):
        duo.write(replace(draft, selection=SelectionConfig(strategy="before_word")), 2)
    expected = duo.write(draft, 4)  # as before_word had never been asked for
    duo._free_engine()

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(LazyText, "write", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            duo.write(draft, 4)
    assert duo._lazy is None
    assert duo.write(draft, 4) == expected


def test_surprisals_are_the_juniors(duo: Duo) -> None:
    draft = Draft("a b", 3)
    piece = duo.write(draft, 5)
    prompt = duo._prompt("a b")
    ids = [*prompt, *(token.id for token in piece.tokens)]
    # The model by itself: plain logits of the whole text.
    with torch.no_grad():
        logits = small_qwen3()(input_ids=torch.tensor([ids])).logits[0].float()
    logprobs = logits.log_softmax(-1)
    expected = [-float(logprobs[len(prompt) + i - 1, token.id]) for i, token in enumerate(piece.tokens)]
    np.testing.assert_allclose([token.surprisal for token in piece.tokens], expected, atol=1e-4)


def test_a_text_ends_where_there_is_no_room(duo: Duo) -> None:
    draft = Draft("a b", 5, SelectionConfig(strategy="solo"))
    stop = None
    while stop is None:
        piece = duo.write(draft, 16)
        draft, stop = longer(draft, piece), piece.stop
    assert stop in ("length", "eos")
    room = 48 - len(duo._prompt("a b"))
    assert len(draft.tokens) == room or stop == "eos"
    with pytest.raises(ValueError, match="longer than 48 tokens"):
        duo.say(replace(draft, tokens=(3,) * room, authors=(0,) * room), "x")
    with pytest.raises(ValueError, match=r"the prompt has .* at most 47"):
        duo.write(Draft("a" * 60), 1)
