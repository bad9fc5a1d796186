"""Two agents that ask the models through OpenAI's client: a game of TextArena, and a problem of reasoning-gym with a
second try. Two training steps each on the tiny pair, offline; any model with a chat template does.

    pip install openai textarena reasoning-gym
    python examples/games.py game
    python examples/games.py gym
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import tandemrl
from tandemrl import Row, openai_agent


async def game(row: Row, client: Any) -> float:
    """Guess a number, told each time whether it is higher or lower."""
    import openai
    import textarena

    played = textarena.make("GuessTheNumber-v0")
    played.reset(num_players=1, seed=int(row.ground_truth))
    messages, over = list[Any](), False
    while not over:
        messages.append({"role": "user", "content": played.get_observation()[1]})
        try:
            answer = await client.chat.completions.create(model="pair", messages=messages)
        except openai.BadRequestError:  # its tokens are used up: lost, not unscored
            return 0.0
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        over, _ = played.step(re.sub(r"\\boxed\{(\d+)\}", r"[\1]", messages[-1]["content"]))
    return float(played.close()[0][0])


async def gym(row: Row, client: Any) -> float:
    """Answer, and once more if that was wrong."""
    import reasoning_gym

    score_of = reasoning_gym.get_score_answer_fn(row.data_source.removeprefix("gym/"))
    problem = {"answer": row.ground_truth, **row.extra_info}
    messages, score = [dict(message) for message in row.messages], 0.0
    for _ in range(2):
        answer = await client.chat.completions.create(model="pair", messages=messages)
        text = answer.choices[0].message.content
        found = re.findall(r"(?:<answer>|\\boxed\{)(.*?)(?:</answer>|\})", text)
        score = max(score, score_of(found[-1] if found else "", problem))
        if score == 1:
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "That is wrong. Try again."}]
    return score


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", choices=["game", "gym"])
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. train.steps=20")
    asked = parser.parse_args()
    rows = Path("runs/games.jsonl")
    if asked.agent == "game":
        rows.parent.mkdir(exist_ok=True)
        rows.write_text(
            "".join(json.dumps({"prompt": "Play.", "answer": str(n), "data_source": "game"}) + "\n" for n in range(64))
        )
    data = str(rows) if asked.agent == "game" else "gym:basic_arithmetic:train:64"
    limits = [
        "rollout.max_turns=8",
        "rollout.turn_tokens=64",
        "rollout.max_tokens=256",
        "rollout.observation_tokens=768",
        "data.max_prompt_tokens=768",
    ]
    small = ["train.steps=2", "train.prompts_per_step=2", "rollout.group_size=4", "train.eval_every=0"]
    defaults = [f"data.train=[{data}]", "data.eval=[]", f"output_dir=runs/games-{asked.agent}", *limits, *small]
    config = tandemrl.load("quickstart.yaml", [*defaults, *asked.overrides])
    if config.model.senior == "runs/tiny/senior":
        tandemrl.build_tiny_pair(Path("runs/tiny"))
    tandemrl.train(config, rollouts=openai_agent(game if asked.agent == "game" else gym, scores=True))
