"""What an export says of itself."""

from dataclasses import replace

import yaml

from tandemrl.config import FunctionRecord, FunctionsConfig, load
from tandemrl.training.checkpoint.runs import model_card

VERSIONS = {"torch": "2", "git_revision": "a" * 40, "git_dirty": False, "vllm": None}


def front(card: str) -> dict:
    _, header, _ = card.split("---\n", 2)
    return dict(yaml.safe_load(header))


def test_a_card_says_what_was_trained_and_who_wrote_the_texts() -> None:
    config = load("deepscaler_tandem")
    best, accepted = "step 20, by held-out reward 0.2500", ["reward after step 5"]
    card = model_card(config, step=20, best=best, versions=VERSIONS, accepted=accepted)
    assert front(card)["base_model"] == "Qwen/Qwen3-4B-Instruct-2507"
    assert front(card)["tags"] == ["reinforcement-learning", "grpo", "tandem-rl"]
    for line in (
        "| who wrote the training texts | `word` |",
        "| weight of the junior's tokens in the loss | `0` |",
        "| steps | `20 of 4912` |",
        "| hf/best so far | `step 20, by held-out reward 0.2500` |",
        "| code changed in the run | `reward after step 5` |",
        f"| git_revision | `{'a' * 40}` |",
    ):
        assert line in card
    assert "vllm" not in card.partition("<details>")[0]
    shown = card.partition("```yaml\n")[2].partition("```")[0]
    assert float(yaml.safe_load(shown)["train"]["lr"]) == 1e-6


def test_what_was_passed_in_python_is_said() -> None:
    functions = FunctionsConfig(strategy=FunctionRecord("mine.relay"), recipe=FunctionRecord("grpo, surrogate=half"))
    card = model_card(replace(load("quickstart"), functions=functions), step=1, best="none", versions={})
    assert "| who wrote the training texts | `mine.relay` |" in card
    assert "| recipe | `grpo, surrogate=half` |" in card
    assert front(card)["tags"] == ["reinforcement-learning", "tandem-rl"]


def test_no_command_line_goes_into_a_card() -> None:
    agent = ["rollout.environment=agent", "rollout.agent.run=[env, KEY=hf_secret, python, agent.py]"]
    config = load("quickstart", agent)
    assert "hf_secret" not in model_card(config, step=1, best="none", versions={})
