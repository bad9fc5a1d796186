"""A program of your own as the agent: it asks an OpenAI endpoint, checks the sums of the quickstart's problems, and
asks again where one is wrong. Five training steps on the tiny pair.

    python examples/agent.py

From the command line, in this folder: `tandemrl train --config quickstart rollout.environment=agent
rollout.agent.run=[agent:solve] rollout.agent.scores=true rollout.turn_tokens=64 rollout.max_tokens=192
rollout.observation_tokens=128`.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import tandemrl
from tandemrl.files import read_json_lines


async def solve(row: tandemrl.Row, client: Any) -> float:
    """Ask up to three times. The reward: whether the last answer is right."""
    messages, answer = [*row.messages], ""
    for _ in range(3):
        reply = await client.chat.completions.create(model="both", messages=messages)
        answer = reply.choices[0].message.content
        sums = re.findall(r"(\d{1,4}) plus (\d{1,4}) (?:is|makes|about) (\d{1,4})", answer)
        wrong = next(((a, b) for a, b, said in sums if int(a) + int(b) != int(said)), None)
        if wrong is None:
            break
        told = f"{wrong[0]} plus {wrong[1]} is {sum(map(int, wrong))}. {row.messages[-1]['content']}"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": told}]
    return float(answer.rpartition("\\boxed{")[2] == f"{row.ground_truth}}}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. train.steps=20")
    limits = ["rollout.turn_tokens=64", "rollout.max_tokens=192", "rollout.observation_tokens=128"]
    defaults = ["train.steps=5", "output_dir=runs/agent", *limits]
    config = tandemrl.load("quickstart.yaml", [*defaults, *parser.parse_args().overrides])
    if config.model.senior == "runs/tiny/senior":
        tandemrl.build_tiny_pair(Path("runs/tiny"))  # a minute, once
    tandemrl.train(config, resume="never", rollouts=tandemrl.openai_agent(solve, scores=True), quiet=True)
    for _, line in read_json_lines(Path(config.output_dir, "metrics.jsonl")):
        print("step {step}: reward {reward/mean:.3f}, requests {agent/requests:.2f}".format(**line))
