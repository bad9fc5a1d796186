"""A run goes on with repaired code if the user says so, and with nothing else that is another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrl.config import load
from tandemrl.training.checkpoint import check_folder
from tandemrl.training.checkpoint import runs as module
from tandemrl.training.checkpoint.storage import CheckpointError

RUN: Any = SimpleNamespace(setup=SimpleNamespace(world=SimpleNamespace(main=True)))
NOW = {"recipe": "a", "data.train": "b", "my:reward": "c"}


def test_repaired_code_is_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "identity", lambda run: NOW)
    path, before = Path("step_5"), NOW | {"my:reward": "d"}
    with pytest.raises(CheckpointError, match=r"another my:reward; .*: --accept-changed reward$"):
        module.check_same_identity(RUN, before, path)
    assert module.check_same_identity(RUN, before, path, ["reward"]) == ("reward",)
    assert module.check_same_identity(RUN, NOW, path, ["reward"]) == ()
    with pytest.raises(CheckpointError, match=r"another data.train; a resume would mix runs$"):
        module.check_same_identity(RUN, before | {"data.train": "e"}, path, ["reward"])
    with pytest.raises(CheckpointError, match=r"--accept-changed data.train: expected one of reward, "):
        check_folder(load(), "auto", ["data.train"])
