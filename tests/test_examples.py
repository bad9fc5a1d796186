"""Scripts under examples/, run as a reader would run them."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.tasks.countdown.grader import countdown
from tandemrl.tasks.generated.rows import generated_rows
from tandemrl.training.checkpoint import CheckpointError

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script with arguments, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


@pytest.fixture
def settings(tiny_pair):
    """Of a training run with the tiny pair, on four groups of four a step."""
    pair = [f"model.{name}={tiny_pair}/{name}" for name in ("senior", "junior")]
    return [*pair, "data.limit=64", "train.eval_every=0", "train.prompts_per_step=4", "rollout.group_size=4"]


def test_the_ablation_trains_with_its_own_strategy_and_loss(run, settings, tmp_path, capsys):
    run("ablation.py", *settings, "rollout.max_tokens=32")
    lines = (tmp_path / "runs" / "ablation" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5
    for printed, line in zip(capsys.readouterr().out.splitlines(), lines, strict=True):
        metrics = json.loads(line)
        assert printed.startswith(f"step {metrics['step']}: reward {metrics['reward/mean']:.3f}")

    samples = (tmp_path / "runs" / "ablation" / "samples.jsonl").read_text().splitlines()
    authors = [[a for a in json.loads(line)["author"] if a >= 0] for line in samples]
    assert len(authors) == 5 * 16
    assert all(author[:16] == [1] * len(author[:16]) for author in authors)  # the senior opens
    assert all(author == sorted(author, reverse=True) for author in authors)  # and never comes back
    assert any(0 in author for author in authors)

    with pytest.raises(CheckpointError, match="already holds a run"):  # another run must not pass for this one
        run("ablation.py", *settings, "rollout.max_tokens=32")


@pytest.mark.parametrize(("agent", "package"), [("gym", "reasoning_gym"), ("game", "textarena")])
def test_the_games_train(agent, package, run, settings, tmp_path):
    for name in (package, "openai"):
        pytest.importorskip(name, reason=f"needs {name}")
    run("games.py", agent, *settings, "train.steps=1", "train.prompts_per_step=1")
    lines = (tmp_path / "runs" / f"games-{agent}" / "samples.jsonl").read_text().splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 4
    assert not any("unscored" in each["reward_parts"] for each in rollouts)
    assert max(each["turns"] for each in rollouts) > 1


def test_an_agent_of_ones_own_is_trained(run, settings, tmp_path, capsys):
    run("agent.py", *settings, "train.steps=1")
    lines = [json.loads(line) for line in (tmp_path / "runs" / "agent" / "metrics.jsonl").read_text().splitlines()]
    assert len(capsys.readouterr().out.splitlines()) == len(lines) == 1
    assert all(line["agent/failed"] == line["agent/forks"] == 0 for line in lines)
    assert any(line["agent/requests"] > 1 for line in lines)


def test_countdown_is_taught_trained_by_both_recipes_and_measured(tmp_path, monkeypatch):
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLES / "countdown.py")))
    counts = {2: {"train": 16, "heldout": 4}, 3: {"train": 16, "heldout": 4}}
    example.COUNTS |= counts  # in place: its functions see the same dictionary
    rest = ["train.prompts_per_step=8", "train.mini_batch_prompts=4", "train.steps=1", "train.eval_every=1"]
    arguments = ["--out", str(tmp_path / "runs"), "--json", str(tmp_path / "copy.json"), "--teach", "2", *rest]
    monkeypatch.setattr(sys, "argv", ["countdown.py", *arguments])
    example.main()
    result = json.loads((tmp_path / "copy.json").read_text())
    assert result == json.loads((tmp_path / "runs" / "countdown.json").read_text())
    assert result["arms"].keys() == {"ppo", "grpo"}
    for values in (result["before"], *(arm["after"] for arm in result["arms"].values())):
        assert all(0 <= values[f"countdown/{size}/pass@1"] <= 1 for size in counts)
    for each in example.split_puzzles(0)["train"]:
        row = Row("r", (), each.data_source, json.dumps(each.ground_truth), {})
        score = countdown(row, example.answered(str(each.solution)), RewardConfig())
        assert score.parts["acc"] == 1
    monkeypatch.setattr(sys, "argv", ["countdown.py", *arguments[:-5], "3"])
    with pytest.raises(SystemExit):  # taught otherwise
        example.main()


def test_a_junior_of_another_family_is_trained_with_and_measured(tiny_pair, other_junior, run, tmp_path):
    small = ["train.steps=1", "train.prompts_per_step=4", "rollout.group_size=2", "data.max_prompt_tokens=128"]
    data = ["data.train=[synthetic:plain:train:16]", "data.eval=[synthetic:plain:heldout:4]"]
    arguments = [f"{tiny_pair}/senior", str(other_junior), *small, *data, "selection.max_untranslatable=1"]
    run("other_family.py", *arguments, "--json", "result.json", "--control", f"{tiny_pair}/junior")
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["training"]["reward/mean"]) == 1
    for phase, name in (("pass-at-k", "pass@1"), ("tandem", "pass@1"), ("legibility", "cross_entropy_per_byte")):
        before, after, control = (result[when][phase][name] for when in ("before", "after", "control"))
        assert result["differences"][f"{phase}/{name}"]["mean"] == pytest.approx(after - before)
        assert result["differences_to_control"][f"{phase}/{name}"]["mean"] == pytest.approx(after - control)


def test_the_calculator_asks_again_where_a_sum_is_wrong(run, settings, tmp_path, capsys):
    run("calculator.py", *settings, "train.steps=2")
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["step 1", "step 2"]
    lines = (tmp_path / "runs" / "calculator" / "samples.jsonl").read_text().splitlines()
    truths = {row.example_id: row.ground_truth for row in generated_rows("plain", "train", None, 0)}
    seen = set()
    for sample in map(json.loads, lines):
        messages = sample["transcript"]["messages"]
        for turn, answer in zip(messages[::2], [*messages[1::2], None], strict=False):
            sums = re.findall(r"(\d+) (plus|minus) (\d+) (?:is|makes|about) (\d+)", turn["content"])
            wrong = [(a, sign, b) for a, sign, b, c in sums if int(a) + int(b) * (-1) ** (sign == "minus") != int(c)]
            seen.add(bool(wrong))
            if wrong:
                assert answer["content"].startswith(" ".join(wrong[0]) + " is ")
            else:
                assert answer is None
        last = messages[2 * (sample["turns"] - 1)]["content"]
        assert sample["reward"] == last.endswith(f"\\boxed{{{truths[sample['example_id']]}}}")
        assert sample["transcript"]["counts"].get("wrong_sums", 0) == len(messages) // 2
    assert seen == {True, False}


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_scripts_parse_and_need_the_name_of_a_config(script):
    parsed = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    without = subprocess.run(["bash", script], capture_output=True, text=True)
    assert without.returncode != 0
    assert f"usage: sbatch examples/{script.name} CONFIG" in without.stderr


STUBS = {
    "scontrol": 'printf "%s\\n" node1 node2',
    "sleep": ":",
    # Without cgroups, the devices of a node need not begin with 0.
    "srun": 'while [[ $1 == --* ]]; do shift; done; CUDA_VISIBLE_DEVICES=$DEVICES exec "$@"',
    "ray": 'echo "ray $2 $CUDA_VISIBLE_DEVICES $SRUN_CPUS_PER_TASK" >>"$SEEN"; echo $RAY_AUTH_TOKEN >>"$SEEN.tokens"',
    "tandemrl": 'echo "tandemrl $* $CUDA_VISIBLE_DEVICES" >>"$SEEN"; echo $RAY_AUTH_TOKEN >>"$SEEN.tokens"',
}


@pytest.mark.parametrize(
    ("devices", "trainer", "head"), [("4,5,6", "4", "5,6"), ("3", "3", ""), ("MIG-a,MIG-b", "MIG-a", "MIG-b")]
)
def test_in_the_slurm_cluster_no_worker_gets_the_trainers_gpu(tmp_path, devices, trainer, head):
    for name, body in STUBS.items():
        stub = tmp_path / name
        stub.write_text(f"#!/bin/bash\n{body}\n")
        stub.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "16"}
    here = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SEEN": str(tmp_path / "seen"), "DEVICES": devices}
    done = subprocess.run(
        ["bash", EXAMPLES / "slurm_ray.sbatch", "my run", "rollout.workers=5"],
        env=slurm | here,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted((tmp_path / "seen").read_text().splitlines()) == [
        f"ray --address=node1:6379 {devices} 16",
        f"ray --head {head} 16",
        f"tandemrl train --config my run rollout.ray=node1:6379 rollout.workers=5 {trainer}",
    ]
    [token] = set((tmp_path / "seen.tokens").read_text().split())  # the same for all, and nobody else's
    assert re.fullmatch("[0-9a-f]{64}", token)
