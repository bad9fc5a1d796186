"""An environment of your own: a calculator reads each solution of the quickstart's problems, says what the first wrong
sum comes to, and asks again. Five training steps on the tiny pair.

    python examples/calculator.py

From the command line, in this folder: `tandemrl train --config quickstart rollout.environment=calculator:Calculator
rollout.max_turns=3 rollout.turn_tokens=64 rollout.max_tokens=192 rollout.observation_tokens=128`.
A model that calls tools needs no environment: `rollout.environment=tools rollout.tools=[calculator:calculate]`.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import tandemrl
from tandemrl import Answer, Environment, Row, Transcript
from tandemrl.files import read_json_lines


def calculate(left: int, sign: str, right: int) -> int:
    """Work out a sum.

    Args:
        left: A number.
        sign: plus or minus
        right: Another number.
    """
    return left + right if sign == "plus" else left - right


class Calculator(Environment):
    """It is content with a solution whose sums are right. The tiny pair calls no tools: this reads its words."""

    def reply(self, row: Row, state: Any, message: Any) -> Answer:
        sums = re.findall(r"(\d{1,4}) (plus|minus) (\d{1,4}) (?:is|makes|about) (\d{1,4})", message["content"])
        for left, sign, right, said in sums:
            if (result := calculate(int(left), sign, int(right))) != int(said):
                told = f"{left} {sign} {right} is {result}. {row.messages[-1]['content']}"
                return Answer([{"role": "user", "content": told}], state, counts={"wrong_sums": 1})
        return Answer([], state, over=True)

    def score(self, row: Row, transcript: Transcript) -> float:
        *_, last = (message["content"] for message in transcript.messages if message["role"] == "assistant")
        return float(last.rpartition("\\boxed{")[2] == f"{row.ground_truth}}}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. train.steps=20")
    turns = [
        "rollout.max_turns=3",
        "rollout.turn_tokens=64",
        "rollout.max_tokens=192",
        "rollout.observation_tokens=128",
    ]
    defaults = ["train.steps=5", "output_dir=runs/calculator", *turns]
    config = tandemrl.load("quickstart.yaml", [*defaults, *parser.parse_args().overrides])
    if config.model.senior == "runs/tiny/senior":
        tandemrl.build_tiny_pair(Path("runs/tiny"))  # a minute, once
    tandemrl.train(config, resume="never", environment=Calculator(), quiet=True)
    for _, line in read_json_lines(Path(config.output_dir, "metrics.jsonl")):
        print("step {step}: reward {reward/mean:.3f}, turns {env/turns:.2f}".format(**line))
