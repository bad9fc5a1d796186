import itertools
import json
import math
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrl.data.rows import DataError
from tandemrl.data.synthetic import examples, generate
from tandemrl.tiny import build_tiny_pair

STEPS = 12


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A barely trained pair, with what its progress callback was told."""
    out = tmp_path_factory.mktemp("tiny") / "pair"
    seen = []
    manifest = build_tiny_pair(out, steps=STEPS, progress=lambda *event: seen.append(event))
    return out, manifest, seen


@pytest.fixture(scope="module")
def tokenizer(built):
    return AutoTokenizer.from_pretrained(built[0] / "senior")


def test_two_builds_are_equal_and_leave_global_state_alone(built, tmp_path):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = build_tiny_pair(tmp_path / "pair", steps=STEPS)
    assert again == built[1]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]


def test_warm_start_learns(built):
    _, manifest, seen = built
    assert [(done, steps) for done, steps, _ in seen] == [(i, STEPS) for i in range(1, STEPS + 1)]
    assert seen[0][2] == pytest.approx(math.log(manifest["vocab_size"]), rel=0.1)  # uniform at first
    assert seen[-1][2] < seen[0][2] - 1.0
    assert manifest["base"]["warm_start/loss"] == seen[-1][2]


def test_cache_hit_trains_nothing(built):
    out, manifest, _ = built
    before = (out / "manifest.json").stat().st_mtime_ns

    def never(*event):
        raise AssertionError("trained again")

    assert build_tiny_pair(out, steps=STEPS, progress=never) == manifest
    assert (out / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["steps", "weights"])
def test_a_pair_that_differs_is_built_anew(built, tmp_path, change):
    out, first = tmp_path / "pair", built[1]
    shutil.copytree(built[0], out)
    if change == "weights":
        (out / "junior" / "model.safetensors").write_bytes(b"torn")
    events = []
    second = build_tiny_pair(
        out,
        steps=2 if change == "steps" else STEPS,
        progress=lambda *event: events.append(event),
    )
    assert events
    assert json.loads((out / "manifest.json").read_text()) == second
    assert (second["sha256"] == first["sha256"]) == (change == "weights")


def test_a_pair_of_another_seed_is_not_replaced(built):
    with pytest.raises(FileExistsError, match="seed 0, which runs may rely on"):
        build_tiny_pair(built[0], seed=1, steps=STEPS)


def test_refuses_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(FileExistsError, match="choose another folder"):
        build_tiny_pair(tmp_path, steps=1)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_unknown_pair(tmp_path):
    with pytest.raises(DataError, match="known: plain"):
        build_tiny_pair(tmp_path / "pair", pair="martian", steps=1)
    assert not list(tmp_path.iterdir())


def test_senior_and_junior_load_and_are_the_same_model(built, tokenizer):
    out, manifest, _ = built
    models = [AutoModelForCausalLM.from_pretrained(out / name) for name in ("senior", "junior")]
    tokens = torch.tensor([tokenizer("Tom has 5 nuts")["input_ids"]])
    with torch.no_grad():
        senior, junior = (model(tokens).logits for model in models)
    assert torch.equal(senior, junior)
    assert senior.shape[-1] == len(tokenizer) == manifest["vocab_size"] <= 400
    assert models[0].dtype == torch.float32
    assert models[0].generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in models[0].parameters()) == manifest["parameters"]
    assert AutoTokenizer.from_pretrained(out / "junior").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("text", ["Tom has 5 nuts", "naïve 語 🙂\t x\r\n", "a  b\n\n\n c", "\\frac{1}{2} <|im_end|>"])
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], clean_up_tokenization_spaces=False) == text


def test_tokens_end_a_step_keep_digits_apart_and_start_words_with_their_space(tokenizer):
    assert tokenizer.tokenize("First 15 plus 5 is 20.\n\nNext 20") == [
        *("First", "Ġ", "1", "5", "Ġplus", "Ġ", "5", "Ġis", "Ġ", "2", "0", ".ĊĊ"),
        *("Next", "Ġ", "2", "0"),
    ]
    assert not [token for token in tokenizer.get_vocab() if re.search(r"\d", token) and len(token) > 1]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


def test_chat_template_prefix_and_thinking(tokenizer):
    question = [{"role": "user", "content": "Tom has 5 nuts. How many?"}]
    answer = {"role": "assistant", "content": "\\boxed{5}"}

    def render(messages, **options):
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)

    prompt = render(question, add_generation_prompt=True)
    assert render(question, add_generation_prompt=True, enable_thinking=False) == prompt
    whole = render([*question, answer])
    assert whole[: len(prompt)] == prompt
    written = [*tokenizer("\\boxed{5}")["input_ids"], tokenizer.eos_token_id]
    assert whole[len(prompt) : len(prompt) + len(written)] == written
    follow_up = render([*question, answer, *question], add_generation_prompt=True)
    assert follow_up[: len(whole)] == whole


def test_problems_and_solutions_fit_the_tiny_profile(tokenizer):
    rows = generate("plain", "heldout", 200, 0)
    prompts = tokenizer.apply_chat_template(
        [list(row.messages) for row in rows], add_generation_prompt=True, return_dict=False
    )
    assert max(map(len, prompts)) <= 40
    texts = [text for _, text in itertools.islice(examples("plain", 5), 500)]
    assert max(map(len, tokenizer(texts)["input_ids"])) + 1 <= 56  # of 64
