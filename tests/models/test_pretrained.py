"""Doors for models: what a path was meant to be, what is missing in a folder, and that no code of a model is run."""

import builtins
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers import small_qwen3, tokenizer

from tandemrl.files import hint
from tandemrl.models.attention import ModelError
from tandemrl.models.critic import load_critic
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.models.pretrained import check_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    out = tmp_path_factory.mktemp("models") / "own" / "senior"
    small_qwen3().save_pretrained(out)
    tokenizer().save_pretrained(out)
    return out


def copied(folder: Path, to: Path, *, without: str = "") -> Path:
    shutil.copytree(folder, to)
    for file in to.glob(without) if without else ():
        file.unlink()
    return to


def test_a_model_without_tokenizer_files_is_said_to_have_none(folder: Path, tmp_path: Path) -> None:
    bare = copied(folder, tmp_path / "bare", without="tokenizer*")
    assert load_model(bare) is not None
    with pytest.raises(ModelError, match=rf"{bare}: no tokenizer is there, only a model; copy its files"):
        load_tokenizer(bare)


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_critic])
def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(
    load: Callable[[Path], object], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copied(folder, tmp_path / "model")
    for name, classes in (
        ("config.json", {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M", "AutoModelForTokenClassification": "x.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["x.T", None]}),
    ):
        kept = json.loads((model / name).read_text()) | {"model_type": "own", "tokenizer_class": "T"}
        (model / name).write_text(json.dumps(kept | {"auto_map": classes}))
    (model / "x.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'was_run')!r}).touch()\n")
    questions: list[object] = []
    monkeypatch.setattr(builtins, "input", lambda *text: questions.append(text) or "y")
    with pytest.raises(ModelError, match=r"comes with Python code of its own, which is never run"):
        load(model)
    assert not questions
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("own/seniro", "own/senior"),
        ("onw/senior", "own/senior"),
        ("own", "own/senior"),
        ("run", "run/hf/best"),
        ("run/hf", "run/hf/best"),
        ("run/checkpoints", "run/hf/best"),
        ("run/checkpoints/step_12", "run/hf/step_12"),
        ("run/checkpoints/step_12/tensors", "run/hf/best"),
        ("run/checkpoints/step_99", "run/hf/best"),
        ("early", "early/hf/step_100"),
        ("early/hf/step_10", "early/hf/step_100"),
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_folder_that_is_no_model_is_named_with_the_one_that_was_meant(
    name: str, meant: str, absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in ("own/senior", "run/hf/best", "run/hf/step_12", "early/hf/step_20", "early/hf/step_100"):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").touch()
    (tmp_path / "run/checkpoints/step_12/tensors").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    home = f"{tmp_path}/" if absolute else "./" if "onw" in name else ""
    with pytest.raises(ModelError, match=rf"^{home}{name}: .*; did you mean {home.removeprefix('./')}{meant}\?$"):
        check_folder(f"{home}{name}")


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_critic])
def test_the_hub_is_not_asked_for_a_folder_whose_parent_is_here(
    load: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"^runs/tiny: no such folder$"):
        load("runs/tiny")
    (tmp_path / "runs" / "file").touch()
    with pytest.raises(ModelError, match=r"^runs/file: a file; expected the folder of a model$"):
        load("runs/file")
    for hub_id in ("gpt2", "openai-community/gpt2"):
        check_folder(hub_id)


def test_a_hint_is_given_only_for_a_name_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    (tmp_path / "data" / "gsm8k" / "train.parquet").touch()
    for wrong in ("data/gsm8k/trian.parquet", "dta/gsm8k/train.parquet", "data/gsm8/train.parquet"):
        assert hint(tmp_path / wrong) == f"; did you mean {tmp_path}/data/gsm8k/train.parquet?"
    for strange in ("data/gsm8k/zzz", "other/gsm8k/train.parquet", "data/gsm8/zzz"):
        assert hint(tmp_path / strange) == ""


@pytest.mark.parametrize("command", ["vllm_engine", "serve"])
def test_missing_vllm_is_missing_vllm_and_not_one_of_its_parts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from typer.testing import CliRunner

    from tandemrl.cli.main import app
    from tandemrl.config import ConfigError, RolloutConfig
    from tandemrl.rollout.factory import vllm_engine

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    for module in [name for name in sys.modules if name.startswith("tandemrl.rollout.vllm_")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    expected = r"needs vLLM, which is not installed: pip install 'tandemrl\[vllm\]'"
    if command == "serve":
        result = CliRunner().invoke(app, ["serve", "--senior", "s", "--junior", "j"])
        assert (result.exit_code, result.stderr.startswith("error: tandemrl serve needs vLLM, which")) == (2, True)
    else:
        with pytest.raises(ConfigError, match=rf"^rollout\.engine=vllm {expected}"):
            vllm_engine(RolloutConfig(), "s", None, tokenizer(), dtype="float32", device="cpu", longest=9)
