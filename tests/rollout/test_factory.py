"""The engine that a config asks for."""

import importlib.util
import sys

import pytest
from typer.testing import CliRunner

from helpers import tokenizer
from tandemrl.cli.main import app
from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.rollout.factory import ModelSource, make_engine


@pytest.mark.parametrize("command", ["train", "serve"])
def test_missing_vllm_is_missing_vllm_and_not_one_of_its_parts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    for module in [name for name in sys.modules if name.startswith("tandemrl.rollout.vllm.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    expected = r"needs vLLM, which is not installed: pip install 'tandemrl\[vllm\]'"
    if command == "serve":
        result = CliRunner().invoke(app, ["serve", "--senior", "s", "--junior", "j"])
        assert (result.exit_code, result.stderr.startswith("error: tandemrl serve needs vLLM, which")) == (2, True)
    else:
        with pytest.raises(ConfigError, match=rf"^rollout\.engine=vllm {expected}"):
            make_engine(RolloutConfig(engine="vllm"), ModelSource("s", pytest.fail), None, tokenizer(), longest=9)
