"""What a run needs: everything that can be wrong is found before a weight is loaded, by `train` and by --dry-run."""

import json
import shutil
import warnings
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import qwen3, small_qwen3, tokenizer
from typer.testing import CliRunner, Result

import tandemrl.training.build
from tandemrl.cli.errors import is_users
from tandemrl.cli.main import app
from tandemrl.config import Config, load
from tandemrl.training.preflight import NotHereError, Preflight, check_resume

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


def test_a_dry_run_says_what_it_checked_and_loads_no_weights(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors

    monkeypatch.setattr(safetensors, "safe_open", None)
    result = dry_run(*arguments)
    assert result.exit_code == 0, result.output
    subjects = [line.split()[1].rstrip(":") for line in result.stdout.splitlines() if line.startswith("ok  ")]
    assert subjects == [
        "--resume", "functions", "model.device", "packages", "model.senior", "model.junior", "vocabularies",
        "data.train", "data.eval", "rewards", "output_dir",
    ]  # fmt: skip
    parameters = qwen3().num_parameters()
    assert f"Qwen3ForCausalLM, {parameters:,} parameters, context 256" in result.stdout
    assert "data.train: 4 rows; the longest prompt has 3 tokens" in result.stdout
    assert not (tmp_path / "runs").exists()


MULTIHOP = ["rollout.environment=multihop", "rollout.world_tokens=32"]


def broken(what: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take one thing away from a run; overrides that go with it."""
    if what == "space":
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(10**6, 10**6, 1000))
    if what in ("packages", "words"):
        import importlib.util

        missing, find = {"packages": "peft", "words": "bm25s"}[what], importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *p: None if name == missing else find(name, *p))
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
        monkeypatch.setattr("tandemrl.rewards.code.sandbox.sys.platform", "win32")
    return {
        "packages": ["model.lora.rank=4"],
        "words": [*MULTIHOP, "retrieval.retriever=hybrid", f"retrieval.model={models}/senior"],
        "ranker": [*MULTIHOP, "retrieval.retriever=semantic", "retrieval.model=./ranker"],
        "index": [*MULTIHOP, "retrieval.index=nowhere"],
        "senior": ["model.senior=./models/seinor"],
        "junior": [f"model.junior={models}/stranger"],
        "device": ["model.device=cuda:63"],
        "data": ["data.train=trian.jsonl"],
        "heldout": ["data.eval=heldotu.jsonl"],
        "monitored": ["data.monitor=heldotu.jsonl"],
        "too few": ["train.prompts_per_step=5"],
        "scorer": ["reward.scorers={math500: nowhere:score}"],
        "judge": ["judge.url=http://127.0.0.1:9/v1", "judge.retries=0"],
        "output": ["output_dir=train.jsonl"],
    }.get(what, [])


@pytest.mark.parametrize(
    ("what", "subject", "reason"),
    [
        ("senior", "model.senior", "models/seinor: no such folder"),
        ("junior", "vocabularies", "senior and junior have different vocabularies"),
        ("no tokenizer", "vocabularies", "bare: no tokenizer is there, only a model"),
        ("device", "model.device", "cuda:63"),
        ("packages", "packages", "model.lora.rank needs peft, which is not installed: pip install 'tandemrl[lora]'"),
        ("words", "packages", "retrieval.retriever needs bm25s, which is not installed"),
        ("ranker", "retrieval.model", "ranker: no such folder"),
        ("index", "rollout.environment", "retrieval.index=nowhere: no index there; write one: tandemrl data index"),
        ("data", "data.train", "trian.jsonl: no such file; did you mean train.jsonl?"),
        ("heldout", "data.eval", "heldotu.jsonl: no such file; did you mean heldout.jsonl?"),
        ("monitored", "data.monitor", "heldotu.jsonl: no such file; did you mean heldout.jsonl?"),
        ("bad row", "data.train", "train.jsonl, line 1"),
        ("too few", "data.train", "4 usable rows"),
        (
            "long prompt",
            "data.train",
            "its 61 tokens and rollout.max_tokens=200 exceed the context of model.senior, 256 tokens",
        ),
        ("no scorer", "rewards", "no scorer for data_source 'nobody'"),
        ("scorer", "rewards", "nowhere:score"),
        ("no sandbox", "rewards", "programs can only be run on Linux"),
        ("judge", "judge.url", "http://127.0.0.1:9/v1"),
        ("output", "output_dir", "output_dir=train.jsonl: a file"),
        ("space", "output_dir", "GB free in"),
    ],
)
def test_what_is_missing_is_found_by_a_dry_run_and_by_train_before_any_weight(
    what: str,
    subject: str,
    reason: str,
    arguments: list[str],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_dry_run_lists_every_problem_once(arguments: list[str]) -> None:
    result = dry_run(*arguments, "data.train=a.jsonl", "data.eval=b.jsonl", "--resume", "nope")
    problems = [line for line in result.stdout.splitlines() if line.startswith("PROBLEM")]
    assert [sum(name in line for line in problems) for name in ("a.jsonl", "b.jsonl", "nope: no such folder")] == [
        1
    ] * 3
    assert "rewards: see data.train" in problems[-1]
    assert result.stderr == "error: 3 of the checks failed: --resume, data.train, data.eval\n"


def test_a_dry_run_downloads_nothing(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def no_network(*_: Any, **__: Any) -> None:
        raise AssertionError("a request was sent")

    monkeypatch.setattr(httpx.Client, "send", no_network)
    result = dry_run(*arguments, "model.senior=nobody/has-this", "data.eval=hf:nobody/has-this:main:train")
    assert result.exit_code == 0, result.output
    unchecked = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("not checked")]
    assert unchecked == ["model.senior:", "vocabularies:", "data.train:", "data.eval:", "rewards:", "output_dir:"]
    with pytest.raises(NotHereError, match="nobody/has-this is not on this machine yet"):
        Preflight(load("quickstart", [*arguments, "model.senior=nobody/has-this"]), downloads=False).require()


def test_the_space_is_that_of_the_checkpoints_and_exports(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Config = load(
        "quickstart", [*arguments, "train.steps=10", "train.save_every=3", "train.keep_checkpoints=1"]
    )
    size = sum(parameter.numel() for parameter in qwen3().parameters())
    first = 2 * size * 12 + 2 * size * 4  # weights and two moments, in float32; the first export and hf/best
    needed = first + 3 * size * 4  # of 4 saves

    def with_free(free: int) -> Preflight:
        monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(0, 0, free))
        return Preflight(config)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_free(needed).space()
    with pytest.warns(UserWarning, match=r"with every export .*train\.save_every"):
        with_free(needed - 1).space()
    with pytest.warns(UserWarning, match="with every export"):
        with_free(first).space()
    with warnings.catch_warnings():  # one that is kept and the one that is written
        warnings.simplefilter("error")
        replace(
            with_free(first + size * 4), config=replace(config, train=replace(config.train, keep_exports=1))
        ).space()
    with pytest.raises(ValueError, match=r"checkpoints and the first export need .*train\.keep_checkpoints"):
        with_free(first - 1).space()
    for step in (3, 9):  # nearly done: one export is left
        (tmp_path / "runs" / "mine" / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "checkpoints" / f"step_{step}" / "meta.json").write_text("{}")
    assert f"{(size * 12 + 2 * size * 4) / 1e9:.2f} GB for" in with_free(needed).space()


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("nope", r"no such folder; .*; did you mean runs/mine/checkpoints/step_20\?$"),
        ("runs/mine", r"not a checkpoint; .*; did you mean runs/mine/checkpoints/step_20\?$"),
        ("runs/mine/hf/step_10", r"not a checkpoint; .*; did you mean runs/mine/checkpoints/step_10\?$"),
        ("runs/mine/checkpoints/step_99", r"no such folder; .*; did you mean runs/mine/checkpoints/step_20\?$"),
        ("runs/mine/checkpoints", r"not a checkpoint; .*; did you mean runs/mine/checkpoints/step_20\?$"),
    ],
)
def test_a_resume_from_nowhere_names_the_checkpoint_that_is_there(
    resume: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        (tmp_path / f"runs/mine/hf/step_{step}").mkdir(parents=True)
        folder = tmp_path / f"runs/mine/checkpoints/step_{step}"
        folder.mkdir(parents=True)
        for name in ("meta.json", "config.yaml", "state.pt"):
            (folder / name).touch()
    for usable in ("auto", "never", "runs/mine/checkpoints/step_10"):
        assert check_resume(usable, "runs/mine") == usable
    with pytest.raises(RuntimeError, match=rf"^--resume {resume}: {message}"):
        check_resume(resume, "runs/mine")


def test_without_evaluation_a_reward_for_the_evaluation_s_rows_is_no_mistake(arguments: list[str]) -> None:
    pattern = "reward.scorers.elsewhere=boxed"
    with pytest.raises(ValueError, match=r"reward\.scorers\.elsewhere"):
        Preflight(load("quickstart", [*arguments, pattern])).rewards()
    with pytest.warns(UserWarning, match=r"reward\.scorers\.elsewhere"):
        Preflight(load("quickstart", [*arguments, pattern, "train.eval_every=0"])).rewards()


def test_without_evaluation_a_typed_reward_that_no_row_uses_is_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tandemrl.training.build, "load_model", None)
    (tmp_path / "mine.yaml").write_text("train: {eval_every: 0}\n")
    for typed, mode in (("reward.scorers.here=boxed", []), ("reward={scorers: {here: boxed}}", ["--dry-run"])):
        result = CliRunner().invoke(app, ["train", "--config", "mine.yaml", *arguments, typed, *mode])
        assert "reward.scorers.here=boxed: no row matches" in " ".join(f"{result.output} {result.exception}".split())
        assert result.exit_code != 0
