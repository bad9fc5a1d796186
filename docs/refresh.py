"""Write the figures of README.md and docs/ from the committed results. `make figures`.

Every table between `<!-- figures: NAME -->` and `<!-- end -->` is one of `BLOCKS`, made from `docs/*.json` (written by
`tandemrl experiment`) and `benchmarks/results/` (written by the benchmarks). Nobody edits them by hand.

    python docs/refresh.py                                    # renew the tables
    python docs/refresh.py runs/paper-claims runs/ablations   # take over the results of finished experiments first
"""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tandemrl.apps.experiments.experiment import SCHEMA
from tandemrl.apps.report import read_results
from tandemrl.apps.report.records import Setting
from tandemrl.apps.report.tables import (
    JUNIOR_CE,
    JUNIOR_FIRST,
    SENIOR_FIRST,
    SOLO,
    TANDEM,
    Column,
    headline_table,
    markdown_table,
)
from tandemrl.data.loading import load_rows
from tandemrl.evals.files import read_samples
from tandemrl.evals.stats import pearson
from tandemrl.files import write_text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", DOCS / "speed.md")
PUBLISHED = {
    ("paper-claims", ("jargon",)): "paper_claims_jargon.json",
    ("quickstart", ("jargon",)): "quickstart_three_seeds.json",
    ("quickstart rollout.workers=1 train.async_steps=2", ("jargon",)): "two_steps_ahead.json",
    ("two-tokenizers", ("jargon_two_tokenizers",)): "two_tokenizers.json",
    ("ablations", ("jargon",)): "ablations.json",
    ("repair", ("repair",)): "repair.json",
    ("hops", ("hops",)): "hops.json",
    ("hops", ("hops_jargon",)): "hops_jargon.json",
    ("smollm2", ("word_problems",)): "smollm2.json",
    ("smollm2", ("word_problems_terse",)): "smollm2_terse.json",
}
"""Where the results of an experiment, with its overrides, and its pairs are committed."""
ENVIRONMENTS = DOCS / "environments"
"""Results of the headline, GRPO and tandem GRPO alone, under other CPUs, instruction sets and libraries' settings."""
HEADLINE = ("paper-claims", ("jargon",))

TEXTS = 5
"""Of how many problems texts are kept."""

CORE = (SOLO, TANDEM, SENIOR_FIRST, JUNIOR_FIRST, JUNIOR_CE)


# --------------------------------------------------------------------------------------------------------- experiments


def results(name: str) -> tuple[dict[str, Any], Setting]:
    """The content of a committed ``results.json``, and its one setting."""
    [setting] = read_results(DOCS / name)
    return json.loads((DOCS / name).read_text()), setting


def source(name: str) -> str:
    """What made a file, in one line: command, commit, date, and what the numbers are over."""
    content, _ = results(name)
    asked = content["experiment"]
    seeds = sorted({row["seed"] for row in content["rows"]})
    over = f"means over seeds {', '.join(map(str, seeds))}, with 95 % intervals" if len(seeds) > 1 else "one seed"
    return (
        f"`{content.get('command') or 'tandemrl experiment ' + asked['name']}` at {_commits(content)}"
        + (f", {content['date']}" if "date" in content else "")
        + f"; {over}{_refused(content)}; {asked['problems']} held-out problems × {asked['samples']} samples: "
        f"[{name}]({{docs}}{name}).\n"
    )


def _refused(content: Mapping[str, Any]) -> str:
    """The seeds whose pairs missed their criteria; an older file has none."""
    seeds = [str(each["seed"]) for each in content.get("refused", ())]
    return f" (refused: {', '.join(seeds)})" if seeds else ""


def _commits(content: Mapping[str, Any]) -> str:
    """The revisions that evaluated the arms; an older file names the one that collected them."""
    revisions = content.get("evaluated_by", [content["versions"]])
    named = [_commit(each) for each in revisions]
    return f"commit {named[0]}" if len(named) == 1 else f"commits {' and '.join(named)}"


def headline(name: str, *more: Column, columns: Sequence[Column] = CORE) -> str:
    return headline_table(results(name)[1].arms, (*columns, *more)) + "\n" + source(name)


def _environments() -> list[dict[str, Any]]:
    """The results of the headline on each numeric environment, that of the main table first."""
    every = [DOCS / PUBLISHED[HEADLINE], *sorted(ENVIRONMENTS.glob("*.json"))]
    return [content for file in every if "numerics" in (content := json.loads(file.read_text()))]


def _spread(content: Mapping[str, Any], arm: str, measure: str, minus: str | None = None) -> tuple[float, float]:
    """The lowest and the highest seed of an arm in a measure, or of its difference to another arm."""
    of = {(row["arm"], row["seed"]): row[measure] for row in content["rows"]}
    values = [value - (of[minus, seed] if minus else 0.0) for (name, seed), value in of.items() if name == arm]
    return min(values), max(values)


SPREADS = {
    "jargon rate, GRPO": ("grpo", "jargon_rate"),
    "jargon rate, tandem": ("tandem", "jargon_rate"),
    "handoff pass@1, tandem − GRPO": ("tandem", "handoff/pass@1", "grpo"),
    "solo pass@1, tandem − GRPO": ("tandem", "solo/pass@1", "grpo"),
}


def environments_sentence() -> str:
    """For README."""
    if not (every := _environments()):
        return "Not measured yet.\n"
    seeds = sum(len({row["seed"] for row in content["rows"]}) for content in every)
    refused = sum(len(content["refused"]) for content in every)

    def over_all(title: str) -> str:
        ends = [_spread(content, *SPREADS[title]) for content in every]
        shown = (f"{min(low for low, _ in ends):.2f}", f"{max(high for _, high in ends):.2f}")
        return " to ".join(dict.fromkeys(shown))

    return (
        f"Under {len(every)} kinds of [CPU arithmetic](docs/results.md#on-other-cpus) ({seeds} pairs"
        f"{f', {refused} refused' if refused else ''}), {over_all('jargon rate, GRPO')} of the texts keep the\n"
        f"words after GRPO, {over_all('jargon rate, tandem')} after tandem GRPO.\n"
    )


def _commit(versions: Mapping[str, Any]) -> str:
    return f"`{versions['git_revision'][:7]}`{' with uncommitted changes' if versions['git_dirty'] else ''}"


# ---------------------------------------------------------------------------------------------------------- benchmarks


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (BENCHMARKS / name).read_text().splitlines()]


def middle(values: Mapping[str, Any], digits: int = 2) -> str:
    """``0.62 [0.61, 0.65]``: the median over rounds and its 90 % interval."""
    low, high = values["interval_90"]
    return f"{values['median']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def versions_of(records: Sequence[Mapping[str, Any]]) -> str:
    """Commit, libraries and threads of benchmark lines."""
    ours = [line for line in records if line.get("library") == "tandemrl"]
    commits = sorted({_commit(line) for line in ours if line.get("git_revision")})
    peers = sorted(
        {f"{line['library']} {line['version']}" for line in records if line.get("library") not in (None, "tandemrl")}
    )
    first = ours[0]
    stated = [f"commit {' and '.join(commits)}" if commits else "commit not recorded", *peers]
    stated += [f"{library} {first[library]}" for library in ("torch", "transformers", "vllm") if library in first]
    return ", ".join([*stated, f"{first['threads']} thread{'s' if first['threads'] > 1 else ''}"])


def step_time(name: str) -> str:
    """Step time and update throughput relative to TRL."""
    content = json.loads((BENCHMARKS / name).read_text())
    columns = [pair.removesuffix(" / trl") for pair in content["ratios"] if pair.endswith(" / trl")]
    measured = {
        "seconds per step": content["ratios"],
        "CPU seconds per step": content["cpu_ratios"],
        "tokens per second of the update": content["update_tokens_per_s_ratios"],
    }
    rows = [[what, *(middle(ratios[f"{who} / trl"]) for who in columns)] for what, ratios in measured.items()]
    absolute = ", ".join(f"{who} {values['median']:.2f} s" for who, values in content["s_per_step"].items())
    return (
        markdown_table(["relative to TRL's solo step", *columns], rows)
        + f"\nEach ratio is between steps of the same turn; the table has medians over {content['rounds']} rounds with "
        f"90 % intervals. Median step: {absolute}; other processes used {content['cores_others']:.1f} cores; "
        f"{versions_of(content['lines'])}; {_file(name)}.\n"
    )


def speed_sentence() -> str:
    """For README."""
    (step,) = (line for line in lines("pretrained_speed.jsonl") if line["part"] == "step")
    solo, tandem = (step["cpu_ratios"][f"{who} / trl"]["median"] for who in ("solo", "tandem"))
    return (
        f"On a CPU core a GRPO step of SmolLM2-135M takes {solo:.2f} of the CPU time of {step['peer'].upper()}'s, a "
        f"tandem step {tandem:.2f}\n([speed](docs/speed.md)).\n"
    )


def decoding() -> str:
    records = lines("decoding.jsonl")
    rows = [
        [
            str(line["rows"]),
            *(f"{line['median_s'][who]:.3f}" for who in ("transformers", "solo", "tandem")),
            *(middle(line["ratios"][pair]) for pair in ("solo / transformers", "tandem / solo")),
        ]
        for line in records
    ]
    head = ["rows", "transformers.generate", "solo", "tandem", "solo / transformers", "tandem / solo"]
    return (
        markdown_table(head, rows)
        + f"\nSeconds for {records[0]['max_tokens']} tokens per row, medians of {records[0]['rounds']} rounds, ratios "
        f"with 90 % intervals; {versions_of(records)}; {_file('decoding.jsonl')}.\n"
    )


def two_vocabularies() -> str:
    records = lines("two_vocabularies.jsonl")
    rows = [
        [
            str(line["rows"]),
            *(f"{line['median_cpu_ms_per_token'][who]:.0f}" for who in ("one", "two")),
            f"{line['ratios']['two / one']['median']:.2f}",
        ]
        for line in records
    ]
    head = ["rows", "one vocabulary", "two vocabularies", "two / one"]
    return (
        markdown_table(head, rows)
        + f"\nCPU milliseconds per token with `before_word`, medians of {records[0]['rounds']} rounds; "
        f"{records[0]['model']} as senior and junior, whose tokenizer is loaded twice; responses of at most "
        f"{records[0]['max_tokens']} tokens, the prompts included; {versions_of(records)}; "
        f"{_file('two_vocabularies.jsonl')}.\n"
    )


def fleet_throughput() -> str:
    found = json.loads((BENCHMARKS / "fleet_throughput.json").read_text())
    rows = []
    for name, rate in found["tokens_per_s"].items():
        relative = found["seconds_ratios"].get(f"{name} / engine, 2 threads")
        faster = "" if relative is None else f"{1 / relative['median']:.2f}"
        rows.append([name, f"{rate['median']:.0f}", faster])
    return (
        markdown_table(["", "tokens per second", "relative to `engine, 2 threads`"], rows)
        + f"\nMedians of {len(rate['per_round'])} rounds; {found['rows']} rows, units of {found['unit_groups']} groups"
        f"; ray {found['ray']}, {versions_of([found])}; {_file('fleet_throughput.json')}.\n"
    )


def pretrained_speed() -> str:
    """Rollouts, update, sync and steps of a real model. What is not in the file yet is left out."""
    name = "pretrained_speed.jsonl"
    records = {line["part"]: line for line in lines(name)}
    said = []
    if rollouts := [line for part, line in records.items() if part.startswith("rollout")]:
        said.append(_pretrained_rollouts(rollouts))
    if half := records.get("bfloat16"):
        shares = [f"{each['cpu_ratios']['bfloat16 / float32']['median']:.2f}" for each in half["rows"].values()]
        said.append(
            f"In bfloat16, solo takes {', '.join(shares)} of float32's CPU time with {', '.join(half['rows'])} rows; "
            f"this CPU has instructions for it ({', '.join(half['instructions']) or 'none'})."
        )
    if update := records.get("update"):
        said.append(
            f"The update of {update['sequences']} rollouts ({update['tokens']:,} packed tokens) reaches "
            f"{update['mfu_cpu']:.0%} of the matmul peak of {update['peak_gflops']:.0f} GFLOP/s."
        )
    if sync := records.get("sync"):
        cpu = {what: each["median"] for what, each in sync["cpu_s"].items()}
        said.append(
            f"A weight sync takes {cpu['sync']:.2f} CPU seconds. Copying takes {cpu['copy']:.2f} of them, and the "
            "checksums of both sides the rest."
        )
    if step := records.get("step"):
        seconds = {each: values["median"] for each, values in step["cpu_s_per_step"].items()}
        said.append(
            f"A step of {step['completions']} completions takes {seconds['solo']:.1f} CPU seconds solo, "
            f"{seconds['tandem']:.1f} in tandem and {seconds['trl']:.1f} with {step['peer']}: "
            f"{step['cpu_ratios']['solo / trl']['median']:.2f} and {step['cpu_ratios']['tandem / trl']['median']:.2f} "
            f"of it (medians of {step['rounds']} turns). The sync is {step['sync_share']['solo']:.1%} of the solo step."
        )
    first, others = next(iter(records.values())), max(line["cores_others"] for line in records.values())
    said.append(
        f"{first['model']}, from the {first['source']}, float32; other processes used up to {others:.1f} cores; "
        f"{versions_of(list(records.values()))}; {_file(name)}."
    )
    return "\n\n".join(said) + "\n"


def _pretrained_rollouts(records: Sequence[Mapping[str, Any]]) -> str:
    who = list(dict.fromkeys(each for line in records for each in line["tokens_per_cpu_s"]))

    def faster(line: Mapping[str, Any], peer: str) -> str:
        """How many times as many tokens per CPU second solo writes."""
        found = line["cpu_ratios"].get(f"solo / {peer}")
        return f"{1 / found['median']:.2f}" if found else "–"

    rows = [
        [
            str(line["rows"]),
            *(f"{line['limits'][limit]:.0f}" for limit in ("roofline", "products, decoding alone")),
            *(f"{line['tokens_per_cpu_s'][each]:.0f}" if each in line["tokens_per_cpu_s"] else "–" for each in who),
            *(faster(line, peer) for peer in ("transformers", "vllm")),
            str(line["rounds"]),
        ]
        for line in records
    ]
    head = ["rows", "roofline", "products alone", *who, "solo : transformers", "solo : vllm", "rounds"]
    return markdown_table(head, rows) + (
        f"\nTokens per CPU second, {records[0]['max_tokens']} per row, the prompts included; medians over rounds. "
        "*Roofline* is what the CPU could write: the larger of the weights' bytes at the bandwidth of reading and the "
        "FLOPs at the speed of the best square product, and each prompt once. *Products alone* repeats the matrix "
        "products of a decoding step and does nothing else. *Tandem* has a junior of the same weights; *auto N* drafts "
        "with the senior's first N layers, which nobody trained for it."
    )


def pretrained_drafts() -> str:
    """Drafts by a junior that was cut from a real senior, and has learnt to write as it does."""
    name = "pretrained_drafts.jsonl"
    records = lines(name)
    rows = [
        [
            str(line["rows"]),
            *(f"{line['acceptance'][who]:.2f}" if who in line["acceptance"] else "–" for who in drafting),
            *(f"{line['passes_per_token'][who]['senior']:.2f}" for who in drafting),
            *(middle(each) for each in line["cpu_ratios"].values()),
        ]
        for line in records
        for drafting in [("solo with drafts", "tandem with drafts")]
    ]
    head = ["rows", "acceptance, solo", "acceptance, tandem", "senior passes per token, solo", "…, tandem"]
    made, first = records[0]["junior"], records[0]
    return (
        markdown_table([*head, *first["cpu_ratios"]], rows)
        + f"\nRatios of CPU seconds for the same texts, medians of {first['rounds']} rounds with 90 % intervals; the "
        f"junior is the senior's first {made['layers']} layers ({made['parameters'] / 1e6:.0f}M of "
        f"{made['senior_parameters'] / 1e6:.0f}M parameters, embeddings included) after {made['steps']} steps on "
        f"{made['texts']} texts of the senior, {made['cpu_s'] / 60:.0f} CPU minutes; {versions_of(records)}; "
        f"{_file(name)}.\n"
    )


def drafting() -> str:
    """CPU seconds of drafts in the torch engine, relative to the senior alone and to single tokens."""
    records = lines("drafting.jsonl")
    shown = (
        "tandem / solo",
        "tandem 4 / solo",
        "tandem 8 / solo",
        "tandem auto / solo",
        "tandem auto / tandem",
        "solo 8 / solo",
    )
    rows = [
        [
            f"{line['acceptance']['tandem 8']:.2f}",
            str(line["rows"]),
            *(middle(line["cpu_ratios"][pair]) for pair in shown),
            f"{line['tokens_per_senior_pass']['tandem 8']:.1f}",
        ]
        for line in records
    ]
    head = ["acceptance", "rows", *shown, "tokens per senior pass, 8"]
    size = records[0].get("pair", records[0])
    made = "distilled" if "pair" in records[0] else "random, and scaled so that both agree more or less often"
    return (
        markdown_table(head, rows)
        + f"\nRatios of CPU seconds for {records[0]['max_tokens']} tokens per row, medians of {records[0]['rounds']} "
        f"rounds with 90 % intervals; senior {size['senior_parameters'] / 1e6:.0f}M and junior "
        f"{size['junior_parameters'] / 1e6:.0f}M parameters, {made}; {versions_of(records)}; "
        f"{_file('drafting.jsonl')}.\n"
    )


def draw() -> str:
    """Cost of the ways to draw, and how often two models agree by them."""
    records = lines("draw.jsonl")
    ways = {"inverse_cdf": "inverse CDF", "race": "race", "race_in_blocks": "race in blocks (ours)"}
    rows = [
        [f"ms per step, {line['rows']} rows, {line['vocabulary']:,} ids", *(f"{line[way]:.2f}" for way in ways), "–"]
        for line in records
        if line["what"] == "cost_ms" and line["rows"] == 32
    ]
    agreements = {
        f"agreement, {line['shape']}, {line['vocabulary']:,} ids": line
        for line in records
        if line["what"] == "agreement" and line["vocabulary"] in (512, 151_936)
    }
    agreements |= {
        f"agreement, jargon pair, {line['senior'].split('/')[0]}": line["agreement"]
        for line in records
        if line["what"] == "pair"
    }
    rows += [[name, *(f"{line[way]:.3f}" for way in (*ways, "bound"))] for name, line in agreements.items()]
    return (
        markdown_table(["", *ways.values(), "upper bound"], rows)
        + f"\nMeasured at {versions_of(records)}; {_file('draw.jsonl')}.\n"
    )


def tandem_cost() -> str:
    records = [line for line in lines("tandem_cost.jsonl") if "pair" not in line]
    models = {"tiny": "0.4M", "mid": "63M", "kv": "KV-heavy 6M"}
    pairs = ("lockstep / stock", "lazy / solo", "lazy / stock", "lazy / lockstep")
    rows = []
    for line in records:
        shown = {pair: f"{line['ratios'][pair]['median']:.2f}" for pair in pairs}
        low, high = line["ratios"]["lazy / solo"]["interval_90"]
        shown["lazy / solo"] += f" [{low:.2f}, {high:.2f}]"
        rows.append(
            [f"{models[line['model']]}, {line['rows']}, {line['prompt']}", str(line["rounds"]), *shown.values()]
        )
    return (
        markdown_table(["model, rows, context", "rounds", *pairs], rows)
        + "\nRatios within a round, medians over the rounds; lazy / solo also with its 90 % interval; "
        f"{versions_of(records)}; "
        f"{_file('tandem_cost.jsonl')}.\n"
    )


def tandem_drafts() -> str:
    """CPU seconds of drafts in vLLM, relative to the senior alone in stock vLLM, and what that says."""
    records = [line for line in lines("tandem_cost.jsonl") if "pair" in line]
    if not records:
        return "Not measured yet; [benchmarks/README.md]({root}benchmarks/README.md) has the command.\n"
    who = ("solo", "lockstep", "lazy", "draft 4", "draft 8", "draft 12", "auto")
    rows = []
    for line in records:
        found = line["cpu_ratios"]
        lengths = [name for name in line["acceptance"] if name.startswith("draft")]
        shown = [middle(found[f"{name} / stock"]) if f"{name} / stock" in found else "–" for name in who]
        near = found.get(f"auto / {line['faster']}")
        rows.append(
            [
                f"1:{line['pair']['senior_parameters'] / line['pair']['junior_parameters']:.0f}, "
                f"{line['acceptance'][lengths[-1]]:.2f}",
                f"{line['rows']}, {line['prompt']:,}",
                *shown,
                middle(near) if near else "–",
            ]
        )
    head = [
        "size, acceptance",
        "rows, context",
        *(f"{name} / stock" for name in who),
        "auto / the faster of lazy and drafts",
    ]
    rounds = sorted({line["rounds"] for line in records})
    return (
        markdown_table(head, rows, left=2)
        + "\nRatios of CPU seconds of decoding, medians over "
        + (f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}")
        + f" rounds with 90 % intervals; senior {records[0]['pair']['senior_parameters'] / 1e6:.0f}M parameters; "
        f"{versions_of(records)}; {_file('tandem_cost.jsonl')}.\n\n{_tandem_drafts_sentence(records)}\n"
    )


def _tandem_drafts_sentence(records: Sequence[Mapping[str, Any]]) -> str:
    """Of the settings in which both models agree nearly always."""
    agreeing = [line for line in records if line["model"] == "12-high"]
    if not agreeing:
        return "The pair that agrees most is not measured yet."
    parts = []
    for line in agreeing:
        best = "auto" if "auto" in line["contestants"] else line["faster"]
        cost, lazy = (line["cpu_ratios"][f"{name} / stock"]["median"] for name in (best, "lazy"))
        many = f"{line['rows']} row{'s' if line['rows'] > 1 else ''} and {line['prompt']:,} tokens"
        parts.append(f"{cost:.2f} (`lazy` {lazy:.2f}) for {many}")
    return (
        "In words: the junior is a twelfth of the senior and nearly always agrees with it. Then tandem decoding with "
        "`auto` needs the following share of the CPU time that stock vLLM needs for the senior alone, depending on the "
        f"rows and on the length of the prompt: {'; '.join(parts)}."
    )


def acceptance() -> str:
    """How often the junior draws what the senior writes, by pair, size and arm, and how that goes with junior CE."""
    records = lines("acceptance.jsonl")
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for line in records:
        groups.setdefault((line["pair"], line["parameters"], line["arm"]), []).append(line)
    rows = [
        [
            f"{pair}, {parameters / 1e6:.1f}M",
            arm,
            str(len(each)),
            *(f"{sum(line[name] for line in each) / len(each):.3f}" for name in ("acceptance", "junior_ce")),
        ]
        for (pair, parameters, arm), each in sorted(groups.items(), key=lambda item: item[0][:2])
    ]
    related = []
    for pair in dict.fromkeys(line["pair"] for line in records):
        of_pair = [line for line in records if line["pair"] == pair]
        r = pearson([line["acceptance"] for line in of_pair], [line["junior_ce"] for line in of_pair])
        if r is not None:
            related.append(f"{r:.2f} for {pair} (n {len(of_pair)})")
    commits = sorted({_commit(line["versions"]) for line in records})
    commands = dict.fromkeys(line["command"] for line in records)
    return (
        markdown_table(["pair, parameters", "senior", "seeds", "acceptance", "junior CE"], rows, left=2)
        + "\nMeans over seeds, of the senior's solo texts on held-out problems"
        + (
            f". Pearson's r of acceptance and junior CE, over arms, seeds and sizes: {', '.join(related)}"
            if related
            else ""
        )
        + f". {', '.join(f'`{command}`' for command in commands)} at commit {' and '.join(commits)}; "
        f"{_file('acceptance.jsonl')}.\n"
    )


def update_and_head() -> str:
    update, head = (json.loads((BENCHMARKS / f"{name}.json").read_text()) for name in ("update", "head_memory"))
    first, later = head["fraction"], head["accumulating"]["fraction"]
    return (
        f"The update of a {update['parameters'] / 1e6:.0f}M model ({update['tokens']:,} packed tokens) reaches "
        f"{update['mfu']:.0%} of the measured matmul peak ({versions_of([update])}; {_file('update.json')}).\n\n"
        f"The log-probs and entropies of {head['tokens']:,} tokens over {head['vocabulary']:,} ids are computed in "
        f"chunks. Beside inputs and weight gradient this needs {first:.0%} of the memory that the logits would "
        f"take. From the second micro-batch of a step on it needs {later:.0%}, since autograd then adds two weight "
        f"gradients ({versions_of([head])}; {_file('head_memory.json')}).\n"
    )


def scoring() -> str:
    rows = [
        [
            line["benchmark"].removeprefix("scoring/"),
            f"{line['responses']:,}",
            *(f"{line[rate]:,.0f}" for rate in ("per_second", "per_cpu_second")),
            *(f"{_by_fifths(line[peak])}" for peak in ("peak_mib", "peak_mib_children")),
        ]
        for line in lines("scoring.jsonl")
    ]
    head = ["scorer", "responses", "per second", "per second of CPU", "MiB of the process", "MiB of its children"]
    return (
        markdown_table(head, rows)
        + "\nThe two numbers for memory are the peaks in the second and in the last fifth of the run; "
        f"{_file('scoring.jsonl')}. Older code wrote this result, and recorded no commit.\n"
    )


def retrieval() -> str:
    result = json.loads((BENCHMARKS / "retrieval.json").read_text())
    build, search = result["build"], result["search"]
    low, high = (1e3 * seconds for seconds in search["interval_90"])
    return (
        f"The index of {result['documents']:,} documents ({result['corpus_mb']:.0f} MiB of text) has "
        f"{result['index_mb']:.0f} MiB. Building it takes {build['cpu_seconds']:.0f} s of CPU time and "
        f"{build['peak_mb'] / 1024:.1f} GiB of memory. A query takes {1e3 * search['seconds_per_query']:.0f} ms (nine "
        f"queries of ten: {low:.0f} to {high:.0f} ms). A process that searches needs {search['own_mb']:.0f} MiB of its "
        f"own, beside the pages of the index files ({versions_of([result])}; {_file('retrieval.json')}).\n"
    )


def turns() -> str:
    [result] = lines("turns.jsonl")
    return (
        f"{result['rows']} episodes of three turns, all of one length. If every answer of the environment takes "
        f"{1e3 * result['answer_s']:.0f} ms, the rollout takes {middle(result['ratios']['slow / instant'])} times as "
        f"long as with immediate answers ({result['median_s']['instant']:.1f} s; median of {result['rounds']} rounds "
        f"with a 90 % interval; {versions_of([result])}; {_file('turns.jsonl')}).\n"
    )


def _by_fifths(fifths: Mapping[str, float]) -> str:
    return " and ".join(f"{value:.0f}" for value in fifths.values())


def _file(name: str) -> str:
    return f"[{name}]({{root}}benchmarks/results/{name})"


SMOLLM2_ARMS = {
    "base": "before training",
    "grpo": "GRPO",
    "grpo_8": "GRPO, half of the prompts",
    "tandem_self": "tandem GRPO with its copy",
    "tandem": "tandem GRPO, weaker junior",
    "sentence": "the same, by steps",
}
"""Arms on a pretrained model, as README names them."""


def step_shares() -> str:
    """Where the time of a step goes, in the runs on a pretrained model."""
    content = json.loads((BENCHMARKS / "tandem_noise.json").read_text())
    rows = [
        [arm["title"], *(f"{arm['time'][f'time/{part}']:.1%}" for part in ("rollout", "update", "sync"))]
        for arm in content["arms"].values()
    ]
    return (
        markdown_table(["arm", "rollout", "update", "sync"], rows)
        + f"\nShares of the wall time of all steps ({versions_of([content])}; {_file('tandem_noise.json')}).\n"
    )


def smollm2_table() -> str:
    """For README: means alone, as intervals are in the results."""
    content = json.loads((DOCS / "smollm2.json").read_text())
    of = {arm: [row for row in content["rows"] if row["arm"] == arm] for arm in SMOLLM2_ARMS}
    rows = [
        [title, *(f"{fmean(row[name] for row in of[arm]):.2f}" for name in ("solo/pass@1", "handoff/pass@1"))]
        for arm, title in SMOLLM2_ARMS.items()
        if of[arm]
    ]
    return markdown_table(["word problems", "solo pass@1", "handoff pass@1"], rows)


# --------------------------------------------------------------------------------------------------------------- pages

README_COLUMNS = (SOLO, SENIOR_FIRST, JUNIOR_FIRST, JUNIOR_CE)

BLOCKS: dict[str, Callable[[], str]] = {
    "readme-claims": lambda: headline("paper_claims_jargon.json", columns=README_COLUMNS),
    "readme-environments": environments_sentence,
    "readme-smollm2": smollm2_table,
    "step-shares": step_shares,
    "step-time": lambda: step_time("step_time.json"),
    "step-time-lognormal": lambda: step_time("step_time_lognormal.json"),
    "speed-sentence": speed_sentence,
    "decoding": decoding,
    "two-vocabularies": two_vocabularies,
    "fleet-throughput": fleet_throughput,
    "pretrained-speed": pretrained_speed,
    "pretrained-drafts": pretrained_drafts,
    "drafting": drafting,
    "draw": draw,
    "tandem-cost": tandem_cost,
    "tandem-drafts": tandem_drafts,
    "acceptance": acceptance,
    "update-and-head": update_and_head,
    "scoring": scoring,
    "retrieval": retrieval,
    "turns": turns,
}
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def refreshed(page: Path) -> str:
    """The text of a page with every block made anew.

    Raises:
        ValueError: an unknown block; names it.
    """

    def refresh_block(match: re.Match[str]) -> str:
        opening, name, closing = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"{page}: unknown block {name!r}; known: {', '.join(BLOCKS)}")
        top = page.parent == ROOT
        text = BLOCKS[name]().replace("{docs}", "docs/" if top else "").replace("{root}", "" if top else "../")
        return f"{opening}{text}{closing}"

    return BLOCK.sub(refresh_block, page.read_text(encoding="utf-8"))


def take_over(folders: Iterable[Path]) -> None:
    """Copy the ``results.json`` of finished experiments into docs/.

    Raises:
        ValueError: one that is not published here, or that no commit made; names it.
    """
    for folder in folders:
        text = (folder / "results.json").read_text()
        content = json.loads(text)
        overrides = [word for word in shlex.split(content["command"] or "") if "=" in word]
        key = " ".join([content["experiment"]["name"], *overrides]), tuple(content["experiment"]["pairs"])
        if key not in PUBLISHED:
            raise ValueError(f"{folder}: {key} is not published; known: {', '.join(map(str, PUBLISHED))}")
        if content["schema"] != SCHEMA:
            raise ValueError(
                f"{folder}: written by older code; give its command again, which collects what is finished"
            )
        made_by = [content["versions"], *content["evaluated_by"]]
        if content["command"] is None or any(each["git_revision"] is None or each["git_dirty"] for each in made_by):
            raise ValueError(f"{folder}: made by no commit, or by no command; run it from a clean checkout")
        file = DOCS / PUBLISHED[key]
        if key == HEADLINE and "kl" not in {arm["name"] for arm in content["experiment"]["arms"]}:
            words = [
                *map(str, content.get("numerics", {}).values()),
                "seeds",
                *map(str, content["experiment"]["seeds"]),
            ]
            file = ENVIRONMENTS / f"{re.sub(r'[^a-z0-9.]+', '-', ' '.join(words).lower())}.json"
        write_text(file, text)
        if content["experiment"]["name"] == "smollm2":
            write_text(_texts_file(file.name), json.dumps(first_texts(folder, content), indent=1) + "\n")


def _texts_file(name: str) -> Path:
    return BENCHMARKS / name.replace(".json", "_texts.json")


def first_texts(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """What each arm of the first seed generates alone for the first held-out problems."""
    [pair], seed = content["experiment"]["pairs"], min(content["experiment"]["seeds"])
    rows = load_rows([f"synthetic:{pair}:heldout"])[:TEXTS]
    arms = [("base", "before training"), *((arm["name"], arm["title"]) for arm in content["experiment"]["arms"])]
    samples = {
        title: read_samples(folder / pair / f"seed-{seed}" / "eval" / arm / "pass-at-k.samples.jsonl")[:TEXTS]
        for arm, title in arms
    }
    assert all([each.example_id for each in own] == [row.example_id for row in rows] for own in samples.values())
    problems = [
        {
            "problem": row.messages[-1]["content"],
            "answer": row.ground_truth,
            "texts": {title: {"text": own[i].text, "correct": own[i].correct} for title, own in samples.items()},
        }
        for i, row in enumerate(rows)
    ]
    return {"seed": seed, "problems": problems}


def main() -> None:
    take_over(map(Path, sys.argv[1:]))
    for page in PAGES:
        text = refreshed(page)
        if text != page.read_text(encoding="utf-8"):
            write_text(page, text)
            print(f"{page.relative_to(ROOT)}: renewed")


if __name__ == "__main__":
    main()
