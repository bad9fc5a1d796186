"""The hops agents, trained as an outside program with the plain `openai` client and by the environment class.

    OMP_NUM_THREADS=1 python benchmarks/hops_agents.py --out benchmarks/results/hops_agents.json

Both write by turns, from the same pair, seeds and config. The program knows of no ids and authors: it sends messages
and tools, runs the searches that are called, and grades its episode. The environment class evaluates both results.
Importance weights are left out, since rounding of the engine's log-probs depends on which rows are decoded together.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from _common import about
from openai import BadRequestError
from safetensors.torch import load_file

import tandemrl
from tandemrl.config import RetrievalConfig, RewardConfig
from tandemrl.data.messages import Transcript
from tandemrl.evals import evaluate
from tandemrl.files import read_json_lines
from tandemrl.rollout.envs.multihop import MultihopEnvironment
from tandemrl.rollout.envs.parsing import parse_turn
from tandemrl.tasks.qa.grader import musique

SAME = ("example_id", "seed", "tokens", "author", "reward", "turns")
WORLD = MultihopEnvironment(RetrievalConfig(retriever="hops"))
TOOLS = WORLD.tool_schemas()
SCHEMAS = {tool["function"]["name"]: tool for tool in TOOLS}


async def search(row: tandemrl.Row, client: Any) -> dict[str, Any]:
    """What the environment `multihop` does, by requests."""
    messages: list[Any] = [*WORLD.start(row).messages]
    for _ in range(8):
        asked = {"model": "both", "messages": messages, "tools": TOOLS}
        try:
            reply = await client.chat.completions.create(**asked, extra_body={"skip_special_tokens": False})
        except BadRequestError:  # the tokens are used up
            break
        said = reply.choices[0].message.to_dict()
        turn = parse_turn(said.get("content") or "", SCHEMAS)  # a call that cannot be made is text
        if functions := [call["function"] for call in said.get("tool_calls") or ()]:
            calls = [{"function": {**each, "arguments": json.loads(each["arguments"])}} for each in functions]
            turn = said | {"tool_calls": calls}
        answer = WORLD.reply(row, {}, turn)
        messages += [said, *answer.messages]
        if answer.over:
            break
    return {"score": musique(row, "", RewardConfig(), Transcript(tuple(messages)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=64, help="of the evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs/hops_agents"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("overrides", nargs="*", help="config overrides")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tandemrl.build_tiny_pair(Path("runs/tiny-hops"), pair="hops")
    seeds = {}
    for seed in options.seeds:
        folders = {name: options.runs / f"{name}-{seed}" for name in ("environment", "agent")}
        em = dict[str, float]()
        for name, folder in folders.items():
            how = [f"train.steps={options.steps}", f"train.seed={seed}", f"output_dir={folder}", "train.threads=1"]
            how += ["train.prompts_per_step=4", "rollout.group_size=4", "train.eval_every=0"]
            how += ["rollout.keep_turns=true", "loss.importance=none", *options.overrides]
            alone = ["rollout.environment=single"] if name == "agent" else []
            source = tandemrl.openai_agent(search, scores=True) if alone else None
            tandemrl.train(tandemrl.load("hops_tandem", [*how, *alone]), rollouts=source, quiet=True)
            how += ["eval.k=[1]", "eval.samples=1", "eval.bootstrap=100"]
            told = evaluate(
                tandemrl.load("hops_tandem", how),
                model=str(folder / "hf" / f"step_{options.steps}"),
                phases=("pass-at-k",),
                limit=options.questions,
                out=folder / "eval",
            )
            em[name] = told["pass-at-k"]["metrics"]["macro"]["em"]
        seeds[seed] = {"em": em, **compare(*folders.values())}
        line = {"benchmark": "hops_agents", **about(), "command": shlex.join(["python", *sys.argv])}
        line |= {"steps": options.steps, "questions": options.questions, "seeds": seeds}
        print(json.dumps({seed: seeds[seed]}), flush=True)
        if options.out:
            options.out.write_text(json.dumps(line, indent=1) + "\n")


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Whether two runs are the same, bit for bit, and what they earned in their first and last step."""
    episodes, metrics = (
        [[line for _, line in read_json_lines(folder / name)] for folder in (one, other)]
        for name in ("samples.jsonl", "metrics.jsonl")
    )
    ours, theirs = (load_file(next(folder.glob("hf/step_*/model.safetensors"))) for folder in (one, other))
    return {
        "samples": len(episodes[0]),
        "same_samples": all(a[name] == b[name] for a, b in zip(*episodes, strict=True) for name in SAME),
        "same_weights": all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()),
        "reward": {
            name: [lines[i]["reward/mean"] for i in (0, -1)]
            for name, lines in zip(("environment", "agent"), metrics, strict=True)
        },
        "failed": sum(line["agent/failed"] for line in metrics[1]),
    }


if __name__ == "__main__":
    main()
