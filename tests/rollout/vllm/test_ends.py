"""What ends a text: the end tokens of both authors, wherever their files name them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from helpers import IDS, PAD, save_speaker, tokenizer
from tandemrl.config import RolloutConfig, VllmConfig
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, bernoulli, solo

WRITTEN = ["!", "a", "Ġb", PAD, "c", "d", "e", "f", "g", "h"]
"""What both models write after the first; the junior's own end is the senior's padding."""
ENDED = [IDS[each] for each in WRITTEN[1:4]]
STRATEGIES = [solo("junior"), bernoulli(0.5), solo("senior")]


def save_pair(folder: Path, named: str) -> Path:
    """A senior that ends by <eos>, and a junior whose end is named in a certain way."""
    ids = [IDS[each] for each in WRITTEN]
    save_speaker(folder / "senior", tokenizer(), ids)
    words = copy.deepcopy(tokenizer())
    if named == "tokenizer":
        words.eos_token = PAD
    junior = save_speaker(folder / "junior", words, ids)
    path = junior / "generation_config.json"
    stated: dict[str, Any] = json.loads(path.read_text()) | {"eos_token_id": IDS["z"]}
    if named in ("config", "config under a silent generation config"):
        path.unlink()
        if named != "config":
            path.write_text(json.dumps({key: value for key, value in stated.items() if key != "eos_token_id"}))
        configured = json.loads((junior / "config.json").read_text()) | {"eos_token_id": IDS[PAD]}
        (junior / "config.json").write_text(json.dumps(configured))
        return folder
    if named == "list":
        stated["eos_token_id"] = [IDS["z"], IDS[PAD]]
    elif named == "number":
        stated["eos_token_id"] = IDS[PAD]
    path.write_text(json.dumps(stated))
    return folder


def written(engine: Any, strategy: Strategy, **sampling: Any) -> tuple[list[int], str]:
    [[one]] = engine.generate(
        [Request([IDS["!"]], (1,), Sampling(max_tokens=8, temperature=0.0, **sampling), strategy)]
    )
    return one.tokens.tolist(), one.stop_reason


@pytest.mark.parametrize(
    ("named", "drafts"),
    [("number", 4), ("list", 0), ("tokenizer", 0), ("config", 0), ("config under a silent generation config", 0)],
)
def test_the_junior_s_own_end_ends_a_text_wherever_it_is_named(tmp_path, named, drafts):
    folder = save_pair(tmp_path, named)
    sources = [
        ModelSource(str(path), lambda path=path: load_model(path)) for path in (folder / "senior", folder / "junior")
    ]
    engine = make_engine(RolloutConfig(draft_tokens=drafts), *sources, load_tokenizer(folder / "senior"))
    for strategy in STRATEGIES:
        assert written(engine, strategy) == (ENDED, "eos")
        assert len(written(engine, strategy, ignore_eos=True)[0]) == 8
    alone = make_engine(RolloutConfig(), sources[0], None, load_tokenizer(folder / "senior"))
    assert written(alone, solo("senior"))[1] == "length"  # a senior without a junior has its own ends alone


def test_loaded_models_bring_their_ends_along(tmp_path):
    folder = save_pair(tmp_path, "config under a silent generation config")
    models = [load_model(folder / name) for name in ("senior", "junior")]
    engine = TorchEngine(*models, tokenizer())
    assert [written(engine, strategy) for strategy in STRATEGIES] == [(ENDED, "eos")] * 3


@pytest.mark.vllm
def test_so_it_does_on_vllm(engines, tmp_path):
    """Also in drafts."""
    config = RolloutConfig(engine="vllm", draft_tokens=4, vllm=VllmConfig(kv_cache_gb=0.05))
    folder = save_pair(tmp_path, "number")
    senior, junior = (ModelSource(str(folder / name), pytest.fail) for name in ("senior", "junior"))
    words = load_tokenizer(folder / "senior")
    engine = engines.keep(make_engine(config, senior, junior, words, longest=128))
    for mode in ("lazy", "draft"):
        engine.call_workers("tandem_mode", mode)
        assert [written(engine, strategy) for strategy in STRATEGIES] == [(ENDED, "eos")] * 3
    assert len(written(engine, STRATEGIES[0], ignore_eos=True)[0]) == 8
