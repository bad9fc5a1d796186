"""What sessions of the gateway cost the engine, beside the same episodes of an environment class: both in turn.

    OMP_NUM_THREADS=1 python benchmarks/agents_overhead.py --out benchmarks/results/agents_overhead.json

64 episodes of one and of two turns write the same tokens of a random pair. In `environment` an environment answers
within `generate`; in `gateway` a process with the plain `openai` client asks 64 sessions at once. Of each round:

- engine: CPU seconds of the threads that run the engine (one torch thread) and replay authors: the bar is 5 % more;
- wall: seconds from the first prompt to the last completion, with the server and the client on the same cores.

Counted at one turn: the class reads all 64 prompts at once and decodes in 32 passes of a model; the gateway's
sessions join in 6 groups, with 12 prefills of the same 7404 tokens and 42 passes. HTTP is in other threads.
"""

import argparse
import asyncio
import json
import shlex
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import models
import torch
from _common import about, over_rounds, prompt_texts

from tandemrl.config import load
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.collect import generate
from tandemrl.rollout.engine import Sampling
from tandemrl.rollout.envs.environment import Answer, Environment, State
from tandemrl.rollout.envs.episodes import make_episode_runner, opening_prompts
from tandemrl.rollout.gateway import agents
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.source import Endpoint, Outcome, Source
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import bernoulli

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
AGAIN = {"role": "user", "content": "Check it, and answer again."}


class Again(Environment):
    """Asks once more, up to a number of turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        turn = state.get("turn", 0) + 1
        return Answer([AGAIN], {"turn": turn}, turn == self.turns)


CLIENT = """
import asyncio, json, sys
from openai import AsyncOpenAI

async def episode(number, turns, messages, url, key):
    async with AsyncOpenAI(base_url=url, api_key=key, timeout=3600) as client:
        for _ in range(turns):
            reply = await client.chat.completions.create(model="both", messages=messages)
            messages += [reply.choices[0].message.to_dict(), AGAIN]
    print(number, flush=True)

async def main():
    running, lines = set(), asyncio.get_running_loop().run_in_executor
    while line := await lines(None, sys.stdin.readline):
        running.add(asyncio.create_task(episode(*json.loads(line))))

asyncio.run(main())
"""
"""The client process: an episode for each line of its input, and a line for each that has ended."""


class Elsewhere(Source):
    """Episodes that a client process plays."""

    def __init__(self) -> None:
        self.turns, self.ended = 1, list[Future[None]]()
        self.process = Popen((sys.executable, "-c", f"{AGAIN = }\n{CLIENT}"), stdin=PIPE, stdout=PIPE, text=True)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.ended[int(line)].set_result(None)

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        assert self.process.stdin is not None
        self.ended.append(ended := Future())
        line = json.dumps([len(self.ended) - 1, self.turns, [*row.messages], *endpoint])
        print(line, file=self.process.stdin, flush=True)
        await asyncio.wrap_future(ended)
        return Outcome()


class Timed(EngineThread):
    """Its CPU seconds, once it has ended."""

    cpu_s = 0.0

    def _run(self) -> None:
        super()._run()
        Timed.cpu_s = time.thread_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="kv", choices=list(models.SIZES), help="pair of benchmarks/models.py")
    parser.add_argument("--models", type=Path, default=Path("runs/benchmark_models"))
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turn-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the lines to this file, as a list")
    options = parser.parse_args()
    torch.set_num_threads(1)
    agents.EngineThread = Timed  # type: ignore[misc]  # a class in a class's place: only to time it
    folders = models.build(options.name, options.models)
    tokenizer = load_tokenizer(folders[0])
    tokenizer.chat_template = TEMPLATE
    engine = TorchEngine(*(load_model(each) for each in folders), tokenizer)
    rows = [
        Row(f"r{i}", ({"role": "user", "content": text},), "own", "", {})
        for i, text in enumerate(prompt_texts(options.sessions))
    ]
    outside, lines = Elsewhere(), list[dict[str, Any]]()
    for turns in (1, 2):
        outside.turns, rounds = turns, {"environment": list[Any](), "gateway": list[Any]()}
        names = list(rounds)
        for number in range(-1, options.rounds):  # one untimed round
            for name in names[number % 2 :] + names[: number % 2]:
                source = outside if name == "gateway" else Again(turns)
                told = measure(engine, tokenizer, rows, source, options.turn_tokens * turns, options.turn_tokens)
                if number >= 0:
                    rounds[name].append(told)
        tokens = [[each.pop("tokens") for each in rounds[name]] for name in names]
        assert tokens[0] == tokens[1], "other tokens"
        relative = {
            what: over_rounds([g[what] / e[what] for e, g in zip(*rounds.values(), strict=True)])
            for what in ("engine_cpu_s", "wall_s")
        }
        line = {"benchmark": "agents_overhead", **about(), "command": shlex.join(["python", *sys.argv])}
        line |= {
            "model": options.name,
            "sessions": options.sessions,
            "turns": turns,
            "turn_tokens": options.turn_tokens,
        }
        lines.append(line | {"gateway / environment": relative, "rounds": rounds})
        print(json.dumps(lines[-1]), flush=True)
    outside.process.terminate()
    if options.out:
        options.out.write_text(json.dumps(lines, indent=1) + "\n")


def measure(engine: TorchEngine, tokenizer: Any, rows: list[Row], source: Environment, most: int, turn: int) -> Any:
    """What a round takes, and what it writes."""
    limits = [f"rollout.max_tokens={most}", f"rollout.turn_tokens={turn}", "rollout.observation_tokens=200"]
    config = load(
        None, [*limits, "rollout.keep_turns=true", "rollout.tool_timeout_s=3600", "rollout.agent.timeout_s=3600"]
    )
    runner = make_episode_runner(config, tokenizer, environment=source)
    assert runner is not None
    prompts, _ = opening_prompts(rows, tokenizer, config.data, runner)
    wall, cpu, Timed.cpu_s = time.monotonic(), time.thread_time(), 0.0
    how: dict[str, Any] = {"strategy": bernoulli(0.5), "sampling": Sampling(most), "group_size": 1}
    batch = generate(engine, [*enumerate(prompts)], **how, seed=1, step=1, episode_runner=runner)
    cpu, wall = Timed.cpu_s + time.thread_time() - cpu, time.monotonic() - wall
    runner.close()
    tokens = [one.tokens.tolist() for [one] in batch.completions]
    return {"engine_cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "tokens": tokens}


if __name__ == "__main__":
    main()
