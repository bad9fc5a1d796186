"""The tiny pair that comes with the library, as `tandemrl play` takes it."""

from pathlib import Path

import pytest

from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.apps.play.duo import Duo
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.torch_engine import TorchEngine


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("play") / "pair"
    build_tiny_pair(folder, pair="jargon")
    return folder


@pytest.fixture(scope="session")
def solver(pair: Path) -> Duo:
    senior, junior = load_model(str(pair / "senior")), load_model(str(pair / "junior"))
    tokenizer = load_tokenizer(str(pair / "senior"))
    return Duo(TorchEngine(senior, junior, tokenizer), junior, tokenizer, longest=256)
