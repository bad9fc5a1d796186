"""Problems with known answers: whose they are, and whether a text answers one."""

import json
from pathlib import Path

from tandemrl.apps.play.problems import Problems, Verdict, known_problems
from tandemrl.config import load, to_yaml
from tandemrl.rollout.envs.multihop import MultihopEnvironment


def test_a_run_asks_its_held_out_problems_and_grades_as_it_trained(tmp_path: Path) -> None:
    messages = {
        "alone": [{"role": "user", "content": "2 + 2?"}],
        "led": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
    }
    lines = [
        {"data_source": "mine", "prompt": each, "reward_model": {"ground_truth": "4"}} for each in messages.values()
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    mine = [f"data.eval=[{tmp_path}/rows.jsonl]", "data.prompt_suffix=Say it.", "reward.scorers.mine=dapo"]
    model = tmp_path / "run" / "hf" / "best"
    model.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load(overrides=mine)))
    problems = Problems(*known_problems(str(model)))
    assert problems.prompts == ["2 + 2? Say it."]  # the page cannot ask the other
    assert problems.verdict("2 + 2? Say it.", "Answer: 4") == Verdict(True, "4", "4")
    assert problems.verdict("2 + 2? Say it.", "It is 4.") == Verdict(False, None, "4")
    assert problems.verdict("2 + 2?", "Answer: 4") is None

    acting = [*mine, "rollout.environment=multihop"]
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(load(overrides=acting)))
    _, rows, environment = known_problems(str(model))
    assert [row.ground_truth for row in rows] == ["4", "4"]  # in turns, it can ask all
    assert isinstance(environment, MultihopEnvironment)


def test_other_models_get_an_example() -> None:
    problems = Problems(*known_problems("someone/some-model"))
    assert problems.verdict(problems.prompts[0], r"\boxed{5}") == Verdict(True, "5", "5")
    assert problems.verdict(problems.prompts[0], r"\boxed{6}") == Verdict(False, "6", "5")


def test_the_tiny_pair_brings_its_own(pair: Path) -> None:
    assert {row.data_source for row in known_problems(str(pair / "senior"))[1]} == {"synthetic/jargon"}
