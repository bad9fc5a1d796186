"""An example for the help of every command."""

import typer

EXAMPLES = {
    "train": "--config quickstart train.steps=5 output_dir=runs/first",
    "plan": "--config deepscaler_grpo --ranks 8 --device h100 parallel.tp=2",
    "eval all": "--model runs/first/hf/best --config runs/first",
    "eval pass-at-k": "--model runs/first/hf/best --config runs/first --samples 8",
    **dict.fromkeys(
        (f"eval {phase}" for phase in ("tandem", "handoff", "legibility", "drift", "junior")),
        "--model runs/first/hf/best --junior runs/tiny/junior --data synthetic:plain:heldout:64",
    ),
    **dict.fromkeys(
        (f"eval {phase}" for phase in ("surprise", "transfer", "recover", "checkable", "monitor")),
        "--model MODEL --data test.parquet eval.readers=[READER,OTHER]",
    ),
    "eval judge-legibility": "--model MODEL --data test.parquet judge.prompt=legibility judge.url=http://localhost:8000/v1",
    **dict.fromkeys(("eval intervene", "eval entropy"), "--model MODEL --data test.parquet"),
    "eval handover-effect": "--model runs/first/hf/best --config runs/first --limit 16 --samples 1 eval.branches=32",
    "eval verified": "--model MODEL --data test.parquet judge.url=http://localhost:8000/v1",
    "eval qa": "--model MODEL --data musique.parquet --predictions predictions.jsonl",
    "eval verifier": "--data HardVerify-Math.json judge.url=http://localhost:8000/v1",
    "legibility": "MODEL --reader READER --reader OTHER --data test.parquet",
    "compare": "runs/tandem runs/grpo --metric pass@1",
    "experiment quickstart": "train.steps=20",
    "experiment frontier": "--arms grpo,junior_kl,tandem --seeds 0,1,2",
    "experiment frontier-quick": "--out runs/frontier-quick",
    "experiment frontier-more": "--arms grpo,tandem,pool --seeds 0,1 --out runs/frontier-more",
    "experiment shorthand": "--arms grpo,brevity --seeds 0",
    "experiment paper-claims": "--seeds 0,1,2",
    "experiment two-tokenizers": "--seeds 0,1,2",
    "experiment repair": "--arms grpo,sentence",
    "experiment ablations": "--arms tandem,K_2,K_8",
    "experiment hops": "--pair hops --seeds 0,1,2 --out runs/hops-plain",
    "experiment smollm2": "--pair word_problems_terse --out runs/smollm2-terse",
    "experiment smollm2-quick": "train.steps=24",
    "experiment retrievers": "--retriever bm25 --retriever golden --model MODEL --data musique.parquet",
    "data show": "synthetic:jargon:heldout --limit 1",
    "data index": "corpus.jsonl --out data/index",
    "data serve": "data/index --port 8100",
    "data build": "gsm8k --out data/gsm8k",
    "model tiny": "jargon --out runs/pair",
    "model smollm2": "--pair word_problems_terse --out runs/terse",
    "model warm-start": "--model MODEL --data synthetic:word_problems:train --out runs/warm",
    "serve": "--senior runs/first/hf/best --junior runs/tiny/junior",
    "play": "--senior runs/first/hf/best --junior runs/tiny/junior",
    "score": "--data data/gsm8k/test.parquet --responses responses.jsonl --out scores.jsonl",
    "regrade": "runs/first --grader math_verify",
    "report": "runs/first",
    "export inspect": "runs/first",
    "config": "rollout",
    "check": "",
}
"""What may follow each command."""


def add_examples(app: typer.Typer, path: str = "") -> None:
    """Put the example of each command below its options."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        words = f"{path}{name}"
        if example := EXAMPLES.get(words):
            epilogs = [f"E.g. tandemrl {words} {example}", command.epilog]
            command.epilog = "\n\n".join(each for each in epilogs if each)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_examples(group.typer_instance, f"{path}{group.name} ")
