"""The engine that a config asks for."""

import importlib.util
import re
import sys

import pytest
from typer.testing import CliRunner

from helpers import tokenizer
from tandemrl.cli.main import app
from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.rollout.factory import ModelSource, make_engine


def say_vllm_is(found: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: found if name == "vllm" else find(name, *rest))
    for module in [name for name in sys.modules if name.startswith("tandemrl.rollout.vllm.")]:
        monkeypatch.delitem(sys.modules, module)


@pytest.mark.parametrize("command", ["train", "serve"])
def test_missing_vllm_is_missing_vllm_and_not_one_of_its_parts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    say_vllm_is(None, monkeypatch)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    expected = r"needs vLLM, which is not installed: pip install -e '\.\[vllm\]'"
    if command == "serve":
        result = CliRunner().invoke(app, ["serve", "--engine", "vllm", "--senior", "s", "--junior", "j"])
        assert result.exit_code == 2
        assert re.match(rf"error: rollout\.engine=vllm {expected}", result.stderr)
    else:
        with pytest.raises(ConfigError, match=rf"^rollout\.engine=vllm {expected}"):
            make_engine(RolloutConfig(engine="vllm"), ModelSource("s", pytest.fail), None, tokenizer(), longest=9)


def test_a_vllm_that_cannot_be_imported_is_told_which_ones_work(monkeypatch: pytest.MonkeyPatch) -> None:
    say_vllm_is(True, monkeypatch)
    for module in ("vllm", "vllm.config"):
        monkeypatch.setitem(sys.modules, module, None)
    expected = "the installed vLLM is broken, or too old or new (tested with 0.32.0): "
    with pytest.raises(ConfigError, match=re.escape(f"rollout.engine=vllm: {expected}")):
        make_engine(RolloutConfig(engine="vllm"), ModelSource("s", pytest.fail), None, tokenizer(), longest=9)
