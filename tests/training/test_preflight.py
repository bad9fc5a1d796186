"""What a run needs: everything that can be wrong is found before a weight is loaded, by `train` and by --dry-run."""

import importlib.util
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification
from typer.testing import CliRunner, Result

import tandemrl.training.build
from helpers import qwen3, small_qwen3, tokenizer
from tandemrl.cli.errors import is_users
from tandemrl.cli.main import app
from tandemrl.config import ConfigError, load
from tandemrl.evals import EvalError
from tandemrl.models.loading import load_model
from tandemrl.training.checkpoint.runs import check_resume
from tandemrl.training.preflight import NotHereError, Preflight

Disk = namedtuple("Disk", "total used free")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """senior and junior of one vocabulary, context 256, and a stranger with another one."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("senior", qwen3()), ("junior", small_qwen3()), ("stranger", small_qwen3())):
        model.save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
    file = folder / "stranger" / "tokenizer.json"
    file.write_text(file.read_text().replace('"Ġz"', '"Ġzz"'))
    return folder


def row(text: str = "ab", source: str = "math500", truth: str = "1") -> dict[str, Any]:
    return {"prompt": text, "data_source": source, "reward_model": {"ground_truth": truth}}


@pytest.fixture
def arguments(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a run that has all it needs, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(4)))
    values = {"model.senior": models / "senior", "model.junior": models / "junior", "model.device": "cpu"}
    values |= {"data.train": "train.jsonl", "data.eval": "heldout.jsonl", "train.prompts_per_step": 4}
    values |= {"data.max_prompt_tokens": 64, "output_dir": "runs/mine"}
    return [f"{key}={value}" for key, value in values.items()]


def dry_run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", "--config", "quickstart", *arguments, "--dry-run"])


def test_a_template_argument_that_the_template_does_not_read_is_refused(arguments: list[str]) -> None:
    result = dry_run(*arguments, "data.template_arguments={enable_thinking: true}")
    assert result.exit_code == 2
    assert "data.template_arguments.enable_thinking: the chat template of tokenizer" in " ".join(result.output.split())


def test_a_dry_run_says_what_it_checked_and_loads_no_weights(arguments, tmp_path, monkeypatch):
    import safetensors

    monkeypatch.setattr(safetensors, "safe_open", None)
    result = dry_run(*arguments)
    assert result.exit_code == 0, result.output
    subjects = [line.split()[1].rstrip(":") for line in result.stdout.splitlines() if line.startswith("ok  ")]
    assert subjects == [
        "--resume", "functions", "processes", "model.device", "packages", "model.senior", "model.junior",
        "vocabularies", "loss.recipe", "data.train", "data.eval", "rewards", "output_dir",
    ]  # fmt: skip
    parameters = qwen3().num_parameters()
    assert f"Qwen3ForCausalLM, {parameters:,} parameters, context 256" in result.stdout
    assert "data.train: 4 rows; the longest prompt has 3 tokens" in result.stdout
    assert not (tmp_path / "runs").exists()


MULTIHOP = ["rollout.environment=multihop", "rollout.observation_tokens=32"]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def without_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    qwen3().save_pretrained(folder, max_shard_size="50KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def without_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "layers.1.mlp.up" not in name}, file)


def without_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        edit(folder / name, eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "window": lambda folder: edit(
        folder / "config.json", layer_types=["full_attention", "sliding_attention"], use_sliding_window=True,
        sliding_window=66,
    ),
    "rope": lambda folder: edit(
        folder / "config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "shard": without_a_shard,
    "cut off": lambda folder: os.truncate(folder / "model.safetensors", 20_000),
    "pointer": lambda folder: (folder / "model.safetensors").write_text(POINTER),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weight": without_a_weight,
    "shape": lambda folder: edit(folder / "config.json", intermediate_size=40),
    "eos": lambda folder: [
        without_eos(folder), edit(folder / "generation_config.json", eos_token_id=[50256])
    ],
}  # fmt: skip
"""What may be wrong with the files of a model."""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 538090408\n"


def broken(what: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take one thing away from a run; overrides that go with it."""
    if what == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(10**6, 10**6, 1000))
    if what == "packages":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *p: None if name == "peft" else find(name, *p))
    lines = {"bad row": "{}\n", "no scorer": json.dumps(row(source="nobody")) + "\n"}
    if what in lines:
        (tmp_path / "train.jsonl").write_text(lines[what] * 4)
    if what == "long prompt":
        (tmp_path / "train.jsonl").write_text((json.dumps(row("ab" * 30)) + "\n") * 4)
        return ["rollout.max_tokens=200"]
    if what == "no tokenizer":
        shutil.copytree(models / "senior", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
        return ["model.senior=bare"]
    if what == "no sandbox":
        tests = json.dumps({"inputs": ["1"], "outputs": ["1"]})
        (tmp_path / "train.jsonl").write_text((json.dumps(row(source="apps", truth=tests)) + "\n") * 4)
        monkeypatch.setattr("tandemrl.tasks.code.sandbox.sys.platform", "win32")
    if what in DAMAGES:
        shutil.copytree(models / "senior", tmp_path / "damaged")
        DAMAGES[what](tmp_path / "damaged")
        return ["model.senior=damaged", *(["model.junior=damaged"] if "eos" in what else [])]
    return {
        "packages": ["model.lora.rank=4"],
        "ranker": [*MULTIHOP, "retrieval.retriever=semantic", "retrieval.model=./ranker"],
        "index": [*MULTIHOP, "retrieval.index=nowhere"],
        "senior": ["model.senior=./models/seinor"],
        "junior": [f"model.junior={models}/stranger"],
        "device": ["model.device=cuda:63"],
        "turns": ["rollout.turn_tokens=8"],
        "data": ["data.train=trian.jsonl"],
        "heldout": ["data.eval=heldotu.jsonl"],
        "too few": ["train.prompts_per_step=5"],
        "scorer": ["reward.scorers={math500: nowhere:score}"],
        "judge": ["judge.url=http://127.0.0.1:9/v1", "judge.retries=0"],
        "output": ["output_dir=train.jsonl"],
    }.get(what, [])


@pytest.mark.parametrize(
    ("what", "subject", "reason"),
    [
        ("senior", "model.senior", "models/seinor: no such folder"),
        ("junior", "vocabularies", "=word: must be before_word, since senior and junior have two vocabularies"),
        ("no tokenizer", "vocabularies", "bare: no tokenizer is there, only a model"),
        ("device", "model.device", "cuda:63"),
        ("packages", "packages", "model.lora.rank needs peft, which is not installed: pip install -e '.[lora]'"),
        ("ranker", "retrieval.model", "ranker: no such folder"),
        ("index", "rollout.environment", "retrieval.index=nowhere: no whole index of this version there"),
        ("data", "data.train", "trian.jsonl: no such file; did you mean train.jsonl?"),
        ("heldout", "data.eval", "heldotu.jsonl: no such file; did you mean heldout.jsonl?"),
        ("turns", "data.train", "rollout.turn_tokens=8: must be null with rollout.environment=single"),
        ("bad row", "data.train", "train.jsonl, line 1"),
        ("too few", "data.train", "4 usable rows"),
        ("long prompt", "data.train", "61 tokens and rollout.max_tokens=200 exceed the context of model.senior, 256"),
        ("no scorer", "rewards", "no scorer for data_source 'nobody'"),
        ("scorer", "rewards", "nowhere:score"),
        ("no sandbox", "rewards", "programs can only be run on Linux"),
        ("judge", "judge.url", "http://127.0.0.1:9/v1"),
        ("output", "output_dir", "output_dir=train.jsonl: a file"),
        ("window", "data.train", "rollout.max_tokens=64 exceed the attention window of model.senior, 66 tokens"),
        ("rope", "model.senior", "model.senior=damaged: rope_type dynamic"),
        ("shard", "model.senior", "damaged/model-00002-of-0000"),
        ("cut off", "model.senior", "damaged/model.safetensors: no whole safetensors file ("),
        ("pointer", "model.senior", "copy or download it again, or `git lfs pull`"),
        ("no weights", "model.senior", "damaged: no weights are there; expected model.safetensors"),
        ("weight", "model.senior", "the first: model.layers.1.mlp.up_proj.weight is missing"),
        ("shape", "model.senior", "is [48, 32] there, [40, 32] by its config.json"),
        ("eos", "vocabularies", "model.senior=damaged: no author has an EOS token ((50256,))"),
        ("space", "output_dir", "GB free in"),
    ],
)
def test_what_is_missing_is_found_before_any_weight(what, subject, reason, arguments, models, tmp_path, monkeypatch):
    overrides = [*arguments, *broken(what, models, tmp_path, monkeypatch)]
    result = dry_run(*overrides)
    assert result.exit_code == 2
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM") and f" {subject}: " in line]
    assert reason in line
    assert "Traceback" not in result.output
    monkeypatch.setattr(tandemrl.training.build, "load_model", None)
    with pytest.raises(Exception, match=r"\w") as refused:  # of whatever class that is the user's
        tandemrl.training.build.build(load("quickstart", overrides))
    assert is_users(refused.value)
    assert reason in " ".join(str(refused.value).split())


def test_the_end_of_either_author_is_enough(arguments: list[str], models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "senior", tmp_path / "damaged")
    without_eos(tmp_path / "damaged")
    assert "PROBLEM" not in dry_run(*arguments, "model.senior=damaged").stdout
    alone = dry_run(*arguments, "model.senior=damaged", "selection.strategy=solo").stdout
    assert "no author has an EOS token" in alone


def test_an_evaluation_must_fit_too(arguments: list[str], models: Path) -> None:
    """It is the first evaluation that would stop the run, after hours of training."""
    beyond = ["eval.profile=custom", "eval.max_tokens=300", "train.eval_every=5"]
    result = dry_run(*arguments, *beyond)
    assert "3 tokens and the 300 of a response (eval.profile=custom) exceed the context" in result.stdout
    assert dry_run(*arguments, *beyond, "train.eval_every=0").exit_code == 0
    found = Preflight(load("quickstart", [*arguments, "eval.profile=custom", "eval.context=3", "train.eval_every=5"]))
    with pytest.raises(EvalError, match=r"^row .* of 3 tokens leaves no room .*data\.max_prompt_tokens.*eval\.context"):
        found.evaluated_data(found.heldout)


def test_vllm_has_no_windows_and_a_critic_needs_no_lm_head(arguments: list[str], models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "critic"
    shutil.copytree(models / "senior", folder)
    AutoModelForTokenClassification.from_pretrained(folder, num_labels=1).save_pretrained(folder)
    assert dry_run(*arguments, "loss.recipe=ppo", "model.critic=critic").exit_code == 0
    shutil.copytree(models / "senior", tmp_path / "damaged")
    DAMAGES["window"](tmp_path / "damaged")
    preflight = Preflight(load("quickstart", [*arguments, "rollout.engine=vllm"]))
    with pytest.raises(ConfigError, match=r"66 tokens only, and rollout\.engine=vllm needs full attention"):
        preflight.model("model.junior", "damaged")


def test_a_body_and_pickled_weights_are_models_too(arguments: list[str], models: Path, tmp_path: Path) -> None:
    """transformers adds the prefix of the body, and reads files that have no header."""
    for name, save in (("body", save_file), ("pickled", torch.save)):
        shutil.copytree(models / "senior", tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        tensors = {key.removeprefix("model."): value for key, value in load_file(file).items()}
        file.unlink()
        save(tensors, file if name == "body" else tmp_path / name / "pytorch_model.bin")
        assert dry_run(*arguments, f"model.senior={name}").exit_code == 0
        assert torch.equal(load_model(name).lm_head.weight, load_model(models / "senior").lm_head.weight)


def test_a_dry_run_downloads_nothing(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a request was sent")

    for client in (httpx.Client, httpx.AsyncClient):
        monkeypatch.setattr(client, "send", no_network)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *p: find("json" if name == "datasets" else name, *p))
    result = dry_run(*arguments, "model.senior=nobody/has-this", "data.eval=hf:nobody/has-this:main:train")
    assert result.exit_code == 0, result.output
    unchecked = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("not checked")]
    assert unchecked == ["model.senior:", "vocabularies:", "data.train:", "data.eval:", "rewards:", "output_dir:"]
    with pytest.raises(NotHereError, match="nobody/has-this is not on this machine yet"):
        Preflight(load("quickstart", [*arguments, "model.senior=nobody/has-this"]), downloads=False).require()


def test_the_space_is_that_of_a_checkpoint_and_its_export(arguments, monkeypatch):
    size = sum(parameter.numel() for parameter in qwen3().parameters())
    needed = size * (12 + 4)  # weights and two moments, in float32; an export
    for free, extra in ((needed, []), (size * 4 + 1, ["model.lora.rank=4"]), (size * 14, ["model.dtype=bfloat16"])):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: Disk(0, 0, free))
        Preflight(load("quickstart", [*arguments, *extra])).space()
    with pytest.raises(ConfigError, match=r"output_dir=runs/mine: a checkpoint and its export take .* choose another"):
        Preflight(load("quickstart", [*arguments, "loss.recipe=ppo", "model.dtype=bfloat16"])).space()


@pytest.mark.parametrize(("resume", "what"), [("nope", "no such folder"), ("runs/mine/hf/step_10", "not a checkpoint")])
def test_a_resume_from_nowhere_names_the_checkpoint_that_is_there(resume, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        (tmp_path / f"runs/mine/hf/step_{step}").mkdir(parents=True)
        folder = tmp_path / f"runs/mine/checkpoints/step_{step}"
        folder.mkdir(parents=True)
        for name in ("meta.json", "config.yaml", "state.pt"):
            (folder / name).touch()
    for usable in ("auto", "never", "runs/mine/checkpoints/step_10"):
        check_resume(usable, "runs/mine")
    with pytest.raises(RuntimeError, match=rf"^--resume {resume}: {what}; .*mean runs/mine/checkpoints/step_20\?$"):
        check_resume(resume, "runs/mine")


def test_a_reward_for_rows_that_are_not_evaluated_is_no_mistake(arguments: list[str]) -> None:
    pattern = "reward.scorers.elsewhere=boxed"
    with pytest.raises(ValueError, match=r"reward\.scorers\.elsewhere"):
        Preflight(load("quickstart", [*arguments, pattern])).rewards()
    with pytest.warns(UserWarning, match=r"reward\.scorers\.elsewhere"):
        Preflight(load("quickstart", [*arguments, pattern, "train.eval_every=0"])).rewards()


# -------------------------------------------------------------------------------------- a reward is tried at the start

REWARDS = """
import time

def right(row, text):
    return float(text == row.ground_truth)

def of_trl(completions, ground_truth, **kwargs):
    return [0.5 for completion in completions]

def boxed_only(row, text):
    return float(text.split("boxed{")[1] == row.ground_truth)

def text(row, text):
    return "1.0"

def slow(row, text):
    time.sleep(60)

def two_rows(row):
    return 1.0
"""


@pytest.mark.usefixtures("without_math")
def test_a_dry_run_calls_a_reward_once_and_says_on_which_text(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    result = dry_run(*arguments, "reward.scorers.math500=boxed + mine:right + mine:of_trl")
    assert result.exit_code == 0, result.output
    (line,) = [" ".join(part.split()) for part in result.stdout.split("ok  ") if part.strip().startswith("rewards:")]
    found = "rewards: math500; right gives 1 for the ground truth of math500/1, as '1'; of_trl gives 0.5 for"
    assert line.startswith(found)


@pytest.mark.usefixtures("without_math")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("boxed_only", "mine:boxed_only, row math500/1: IndexError: list index out of range"),
        ("text", "found '1.0', which is a str"),
        ("slow", "slow, row math500/1: took longer than reward.timeout_s=1 on the text '1'"),
        ("two_rows", "mine:two_rows: its parameters are (row); expected (row, text)"),
    ],
)
def test_a_reward_that_fails_is_found_by_a_dry_run_in_a_line(arguments, tmp_path, function, reason):
    (tmp_path / "mine.py").write_text(REWARDS)
    limit_s = 1 if function == "slow" else 60
    result = dry_run(
        *arguments, f"reward.scorers.math500=mine:{function}", f"reward.timeout_s={limit_s}", "reward.workers=1"
    )
    assert result.exit_code == 2
    assert reason in " ".join(result.stdout.split())
    assert "Traceback" not in result.output
