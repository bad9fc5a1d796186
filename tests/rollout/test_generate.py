"""``tandemrl.generate``: prompts of every kind, on both engines, with the author of every token."""

from itertools import chain

import numpy as np
import pytest

import tandemrl
from helpers import IDS, save_speaker, tokenizer
from tandemrl.config import ConfigError, RolloutConfig, VllmConfig
from tandemrl.rollout.engine import EngineError
from tandemrl.selection import alternating, before_word, bernoulli, solo
from tandemrl.selection.boundaries import start_table

WRITTEN = ["!", "a", "Ġb", "c", "Ġd", "<eos>"]
TEXT = "a bc d"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    for name in ("senior", "junior"):
        save_speaker(folder / name, tokenizer(), [IDS[each] for each in WRITTEN])
    return folder / "senior", folder / "junior"


def of_all_kinds():
    return ["ab!", [{"role": "user", "content": "ab"}], [IDS["a"], IDS["b"], IDS["!"]]]


def test_all_kinds_of_prompts_get_texts_with_their_authors(pair):
    groups = tandemrl.generate(*pair, of_all_kinds(), strategy=alternating(), n=2, max_tokens=8, temperature=0.0)
    assert [[one.text for one in group] for group in groups] == [[TEXT, TEXT]] * 3
    for one in (one for group in groups for one in group):
        assert (one.tokens.tolist(), one.stop_reason) == ([IDS[each] for each in WRITTEN[1:]], "eos")
        assert one.authorship_mask.tolist() in ([1, 0, 1, 0, 1], [0, 1, 0, 1, 0])


def test_a_seed_repeats_and_another_does_not(pair):
    def drawn(seed, **options):
        groups = tandemrl.generate(*pair, ["ab!"], strategy=bernoulli(0.5), n=8, seed=seed, max_tokens=8, **options)
        return [(one.tokens.tolist(), one.authorship_mask.tolist()) for one in groups[0]]

    assert drawn(3) == drawn(3, rollout=RolloutConfig(draft_tokens=4))
    assert drawn(3) != drawn(4)
    assert len({str(each) for each in drawn(3)}) == 8


def test_loaded_models_and_a_senior_alone(pair):
    senior, junior = (tandemrl.load_model(path) for path in pair)
    options = dict(tokenizer=tokenizer(), max_tokens=3, temperature=0.0)
    senior.name_or_path = ""  # as one that was never stored
    [[one]] = tandemrl.generate(senior, None, ["!"], **options)
    assert (one.text, one.authorship_mask.tolist(), one.stop_reason) == ("a bc", [1, 1, 1], "length")
    [[one]] = tandemrl.generate(senior, junior, ["!"], strategy=solo("junior"), **options)
    assert (one.text, one.authorship_mask.tolist()) == ("a bc", [0, 0, 0])


def test_an_end_of_the_juniors_alone_is_no_text(pair):
    senior, junior = (tandemrl.load_model(path) for path in pair)
    junior.generation_config.eos_token_id = IDS["Ġd"]  # an ordinary token
    options = dict(tokenizer=tokenizer(), max_tokens=8, temperature=0.0)
    for strategy in (solo("junior"), alternating()):
        [[one]] = tandemrl.generate(senior, junior, ["!"], strategy=strategy, **options)
        assert (one.text, one.tokens[-1], one.stop_reason) == ("a bc", IDS["Ġd"], "eos")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": "ab"}, "prompts: expected a list of texts"),
        ({"prompts": ["ab"], "junior": None, "strategy": solo("junior")}, "needs a junior"),
    ],
)
def test_refusals_name_what_is_wrong(pair, options, says):
    with pytest.raises(EngineError, match=says):
        tandemrl.generate(pair[0], options.pop("junior", pair[1]), options.pop("prompts"), **options)
    starts = start_table(tokenizer(), len(tokenizer()))
    with pytest.raises(ConfigError, match=r"rollout\.engine=vllm: must be torch with a strategy such as before_word"):
        tandemrl.generate(*pair, ["ab"], strategy=before_word(0.5, starts), engine="vllm")
    with pytest.raises(TypeError, match="max_token"):
        tandemrl.generate(*pair, ["ab"], max_token=3)


@pytest.mark.vllm
def test_vllm_writes_what_torch_does(pair):
    pytest.importorskip("vllm", reason="needs the vllm extra")
    own = RolloutConfig(vllm=VllmConfig(multiprocess=True, kv_cache_gb=0.25, enforce_eager=True))
    options = dict(strategy=bernoulli(0.5), n=4, seed=1, max_tokens=8)
    torch = tandemrl.generate(*pair, of_all_kinds(), **options)
    vllm = tandemrl.generate(*pair, of_all_kinds(), engine="vllm", rollout=own, **options)
    for one, other in zip(chain(*torch), chain(*vllm), strict=True):
        assert (one.text, one.tokens.tolist()) == (other.text, other.tokens.tolist())
        assert np.array_equal(one.authorship_mask, other.authorship_mask)
