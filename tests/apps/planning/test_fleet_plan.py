"""The plan of a run with rollout workers: what its simulated clock comes to, and where its times are from."""

import json
import random
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemrl.apps.planning.accelerators import accelerator
from tandemrl.apps.planning.architectures import architecture
from tandemrl.apps.planning.fleet import Fleet, Times, estimated, measured, simulate
from tandemrl.apps.planning.plan import kv_bytes, parameters, plan
from tandemrl.cli.main import app
from tandemrl.config import ConfigError, load, to_yaml


@pytest.mark.parametrize(
    ("times", "ahead", "expected"),
    [
        # Four units of 5 s on two workers take 10 s. Then the trainer learns for 10 s, or at the same time.
        (Times(10, 5), 0, Fleet(20, 0.5, 0.5, {0: 1.0})),
        (Times(10, 5), 1, Fleet(10, 0, 0, {1: 1.0})),
        (Times(10, 5, load=1), 0, Fleet(21, 11 / 21, 10 / 21, {0: 1.0})),
        # Rollouts of 20 s: the trainer waits for half of its time, however far ahead they are generated.
        (Times(10, 10), 1, Fleet(20, 0.5, 0, {1: 1.0})),
        (Times(10, 10), 3, Fleet(20, 0.5, 0, {3: 1.0})),
        # And of 5 s: it is the workers that wait.
        (Times(10, 2.5), 2, Fleet(10, 0, 0.5, {2: 1.0})),
        # Two more units, once the others have their rewards.
        (Times(10, 5, resampled=[2]), 0, Fleet(25, 15 / 25, 10 / 25, {0: 1.0})),
    ],
)
def test_two_workers_by_hand(times: Times, ahead: int, expected: Fleet) -> None:
    found = simulate(times, workers=2, units=4, ahead=ahead)
    assert found.staleness == expected.staleness
    assert found[:3] == pytest.approx(expected[:3])
    assert found.steps_per_hour == pytest.approx(3600 / expected.step_s)


def test_a_long_unit_is_waited_for_less_if_more_steps_are_begun() -> None:
    times = Times(10, 4.5, spread=(0.1, 1.0, 1.9))
    waits = [simulate(times, workers=2, units=4, ahead=ahead).idle_trainer for ahead in (0, 1, 3)]
    assert waits[0] > 0.45
    assert waits[0] > waits[1] + 0.2
    assert waits[1] > waits[2] + 0.02


def test_idle_time_is_counted_up_to_the_step_at_which_it_is_read() -> None:
    """A worker that always waits for the trainer: in 20 steps it generates 20 units, whose times are drawn in order."""
    drawn = random.Random(0)
    units = [5 * drawn.choice((0.2, 1.0, 1.8)) for _ in range(25)]  # of step 4, the first that counts, to step 23
    found = simulate(Times(10, 5, spread=(0.2, 1.0, 1.8)), workers=1, units=1, ahead=2)
    assert found.step_s == 10
    assert found.idle_workers == pytest.approx(1 - sum(units[5:]) / 200)


def a_run(folder: Path, *overrides: str, **more: float) -> Path:
    """Steps of 8 s, 6 s of them for rollouts, and one of an hour with an evaluation."""
    config = load("quickstart", ["train.prompts_per_step=8", "rollout.unit_groups=4", *overrides])
    (folder / "config.yaml").write_text(to_yaml(config))
    line: dict[str, Any] = {"time/step": 8.0, "time/rollout": 6.0, "time/score": 0.4} | more
    slow = line | {"step": 1, "time/step": 99.0, "time/rollout": 90.0}
    evaluates = line | {"step": 6, "time/step": 3600.0, "time/rollout": 7.0, "time/eval": 3590.0}
    steps = [slow, *(line | {"step": step} for step in range(2, 6)), evaluates]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    texts = [{"step": 1, "group": group, "author": [-1, -1, *[1] * (2 + 4 * (group == 5))]} for group in range(8)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in texts))
    return folder


def test_the_times_of_a_run_are_those_that_it_recorded(tmp_path: Path) -> None:
    planned = load("quickstart", ["rollout.workers=3", "train.prompts_per_step=8"])
    alone = measured(a_run(tmp_path), planned)
    spread = (0.5, 1.5)  # the longest texts of the units have 2 and 6 tokens
    assert alone == Times(update=2.0, unit=3.0, spread=spread, resampled=(0,) * 4)
    run = a_run(tmp_path, "rollout.workers=2", **{"fleet/unit_s": 5.0, "fleet/load_s": 0.25})
    assert measured(run, planned)[:3] == (2.0, 5.0, 0.25)
    twice = load("quickstart", ["rollout.workers=3", "train.prompts_per_step=16"])
    assert measured(run, twice)[:3] == (4.0, 5.0, 0.25)


def test_what_a_run_resampled_is_generated_again_and_no_part_of_the_update(tmp_path: Path) -> None:
    run = a_run(tmp_path, "train.max_resamples=2", **{"time/resample": 1.2, "groups/resampled": 5.0})
    plan = ["rollout.workers=3", "train.prompts_per_step=8", "train.max_resamples=2"]
    found = measured(run, load("quickstart", plan))
    assert found.update == pytest.approx(8 - 6 - 1.2 + 0.4 * 5 / 8)
    assert (found.unit, found.resampled) == (3.0, (2, 2, 2, 2))


@pytest.mark.parametrize(
    ("run", "plan", "why"),
    [
        ([], ["rollout.group_size=2"], r"train it with rollout\.unit_groups=4 rollout\.group_size=2"),
        (["train.max_resamples=1"], [], r"train it with .* train\.max_resamples=0"),
        (["train.async_steps=1"], [], r"train it with train\.async_steps=0"),
        (["rollout.workers=2"], [], r"it has no fleet/unit_s"),
    ],
)
def test_a_run_whose_times_say_nothing_about_the_plan_is_refused(
    run: list[str], plan: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        measured(a_run(tmp_path, *run), load("quickstart", ["rollout.workers=3", *plan]))


def test_a_run_without_its_record_is_refused(tmp_path: Path) -> None:
    (a_run(tmp_path) / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        measured(tmp_path, load("quickstart", ["rollout.workers=3"]))


@pytest.mark.parametrize(
    ("ranks", "launched"),
    [(1, [0.4e-3, 2e-3]), (4, [0.0, 2e-3])],
    ids=["eager", "compiled, four processes"],
)
def test_the_time_of_a_unit_is_that_of_a_worker_however_many_processes_train(
    ranks: int, launched: list[float], elsewhere: ProcessPoolExecutor
) -> None:
    """It is that of reading memory, or of launching kernels for each layer where that takes longer."""
    compiled = f"rollout.compile={'false' if launched[0] else 'true'}"
    config = load("quickstart", ["rollout.workers=2", "model.device=cuda", compiled])
    device = accelerator("h100")
    found = elsewhere.submit(plan, config, ranks, device).result()
    shape = architecture("runs/tiny/senior")
    sequences = 4 * config.rollout.group_size
    present = config.data.max_prompt_tokens + config.rollout.max_tokens / 2  # of each, on average
    read = 2 * (4 * parameters(shape) + sequences * present * kv_bytes(shape, 4))  # by senior and junior, for a token
    times = [each.unit for each in estimated(config, found)]
    steps, layers = config.rollout.max_tokens, 2 * shape.num_hidden_layers
    reading = [steps * read / device.bandwidth / share for share in (0.7, 0.1)]
    assert times == pytest.approx([max(r, steps * layers * each) for r, each in zip(reading, launched, strict=True)])


def test_what_is_only_for_engines_in_trainers_is_not_asked_of_workers(elsewhere: ProcessPoolExecutor) -> None:
    """An engine in each of several processes has one GPU; a worker may have two."""
    keys = ["model.device=cuda", "rollout.engine=vllm", "rollout.tensor_parallel=2", "rollout.vllm.kv_cache_gb=1"]
    found = elsewhere.submit(plan, load("quickstart", ["rollout.workers=2", *keys]), 2, accelerator("h100")).result()
    assert [note for note in found.notes if "trainer process" in note] == []
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.multiprocess=False: must be true"):
        plan(load("quickstart", keys), 2, accelerator("h100"))


def test_a_larger_cache_than_is_used_takes_no_longer() -> None:
    def unit_s(gb: int) -> float:
        keys = ["rollout.workers=2", "model.device=cuda", "rollout.engine=vllm", f"rollout.vllm.kv_cache_gb={gb}"]
        return plan(load("quickstart", keys), 1, accelerator("h100")).seconds["unit"][0]

    assert unit_s(1) == unit_s(8)


def test_adapters_are_sent_alone_if_workers_have_their_base() -> None:
    keys = ["rollout.workers=2", "model.device=cuda", "model.lora.rank=8", "model.lora.targets=[q_proj]"]
    device, shape = accelerator("h100"), architecture("runs/tiny/senior")
    adapters = shape.num_hidden_layers * 8 * (shape.hidden_size + shape.num_attention_heads * shape.head_dim)
    for junior, count in (("null", adapters), ("runs/tiny/junior", parameters(shape))):
        found = plan(load("quickstart", [*keys, f"model.junior={junior}"]), 1, device)
        assert found.sent_to_workers == 4 * count
        assert estimated(load("quickstart", keys), found)[0].load == 4 * count / device.network


def planned(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "--config", "quickstart", "--dry-run", *arguments])


def test_the_command_plans_workers_by_data_sheets_and_by_a_run(tmp_path: Path) -> None:
    arguments = ("train.prompts_per_step=8", "train.async_steps=2", "--ranks", "1", "--workers", "2")
    output = planned(*arguments).output
    assert "fleet: 2 workers, 2 units of 4 prompts a step, generated 2 steps ahead" in output
    assert "from data sheets" in output
    assert "engine, senior" not in output  # it is not in the trainer's process
    output = planned(*arguments, "--times-of", str(a_run(tmp_path))).output
    assert "measured times" in output
    assert "staleness of the rollouts: 2 (100%)" in output
    assert "3 workers would generate as fast as the trainer learns" in output  # 2 units of 3 s, 2 s
    refused = planned("--workers", "2")
    assert refused.exit_code == 2
    assert "--workers needs --ranks" in refused.output


@pytest.mark.slow
def test_a_thousand_processes_and_ten_thousand_workers_take_less_than_a_minute() -> None:
    begun = time.process_time()
    arguments = ["train.prompts_per_step=40000", "train.async_steps=2", "--ranks", "1024", "--workers", "10000"]
    output = CliRunner().invoke(app, ["train", "--config", "deepscaler_grpo", "--dry-run", *arguments]).output
    assert "fleet: 10,000 workers, 10,000 units" in output
    assert time.process_time() - begun < 60
