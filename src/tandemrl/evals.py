"""Evaluation: pass@k of the senior alone, of the pair in tandem and in handoff, its legibility, and verified pass@k.

Every phase is the same engine call with another strategy, under one sampling profile that no phase overrides:

- ``pass-at-k``: the senior writes alone.
- ``tandem``: both write, by the ``word`` schedule of training.
- ``handoff``: both write, one step each; once with the senior first and once with the junior first. Nothing caps the
  number of rounds; the whole text is graded.
- ``legibility``: the junior's mean cross-entropy per token on what the senior wrote alone.
- ``verified``: ``pass-at-k``, and ``verified_pass@k``, which counts a correct sample only if a judge accepts its
  reasoning too (arXiv 2510.07774).

Rates are means over the samples of a problem, then over the problems of a set; macro is the unweighted mean over sets.
Counts (``problems``, ``samples``, …) are sums, in macro too. ``NAME/low`` and ``NAME/high`` bound the 95 % bootstrap
interval over problems. The protocol is that of arXiv 2606.28166.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.checkpoint import versions, write_text
from tandemrl.config import EvalConfig, JudgeConfig, RewardConfig, RolloutConfig, SandboxConfig
from tandemrl.data.rows import Prompt, encode_prompts, load_rows
from tandemrl.model import load_model, load_tokenizer, sequence_logprobs, vocabulary_check
from tandemrl.rollout.engine import Completion, Engine, Request, Sampling, check_answers, check_authors
from tandemrl.rollout.engines import vllm_engine
from tandemrl.rollout.envs.code import score_code
from tandemrl.rollout.envs.rubric import JudgePool
from tandemrl.rollout.envs.scoring import Scorer
from tandemrl.rollout.judges import make_judge
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, sentence, solo, word
from tandemrl.selection.boundaries import step_tables, word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.stats import macro_interval, maj_at_k, pass_at_k
from tandemrl.types import Metrics

Phase = Literal["pass-at-k", "tandem", "handoff", "legibility", "verified"]
PHASES: tuple[Phase, ...] = get_args(Phase)
SCHEMA = 1
MANY_ROUNDS = 150
"""Handoff chains with more rounds are counted: the original protocol stops there, this one does not."""

WITH_INTERVAL = ("pass@", "maj@", "verified_pass@", "rejected_rate", "cross_entropy")
"""Rates that get a bootstrap interval, by the start of their names."""


class EvalError(ValueError):
    """An evaluation that cannot be run, or a result file that is not this evaluation's; names the fix."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The sampling that every phase of an evaluation shares, and the context it has to fit into.

    context: tokens of prompt and response together, None = no bound of the protocol's own. reserve: tokens of the
    context that stay unused.
    """

    sampling: Sampling
    context: int | None = None
    reserve: int = 0

    def longest(self, prompt_tokens: int) -> int:
        """Tokens of the longest sequence that can come of prompts of up to ``prompt_tokens``."""
        longest = prompt_tokens + self.sampling.max_tokens
        return longest if self.context is None else min(longest, self.context)


PROFILES: dict[str, Profile] = {
    "tiny": Profile(Sampling(max_tokens=64, temperature=1.0)),
    "paper": Profile(Sampling(max_tokens=3000, temperature=0.7, top_p=0.8, top_k=20), context=4096, reserve=8),
}


class Sample(NamedTuple):
    """One evaluated completion: a line of ``PHASE.samples.jsonl``.

    problem: position among the prompts. author: who wrote which tokens, as run lengths ("S12J5" = 12 tokens of the
    senior, then 5 of the junior). rounds: number of those runs. score, correct and answer are None where nothing was
    graded; cross_entropy (nats per token) is None but in the legibility phase, and there for texts that do not fit.
    judge (the mark of the reasoning, 0 to 1) is None but for correct samples of the verified phase, and there where the
    judge's replies held no mark; verified is None but in that phase.
    """

    problem: int
    example_id: str
    set: str
    arm: str
    sample: int
    key: int
    text: str
    tokens: list[int]
    length: int
    author: str
    rounds: int
    senior_share: float
    stop_reason: str
    score: float | None = None
    correct: bool | None = None
    answer: str | None = None
    cross_entropy: float | None = None
    judge: float | None = None
    verified: bool | None = None


Progress = Callable[[int], None]
Measure = Callable[[Sequence[Sample]], tuple[Metrics, Metrics]]
"""Rates and counts of one problem, from its samples of one arm."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """``metrics`` as in the result file: ``{"macro": {name: value}, "by_set": {set: {name: value}}}``."""

    metrics: dict[str, Any]
    samples: list[Sample]


# ------------------------------------------------------------------------------------------------------ pure functions


def profile_of(config: EvalConfig) -> Profile:
    """The profile that a config names; with ``profile: custom``, the one it spells out.

    Raises:
        EvalError: ``eval.context`` is set for a profile that has its own.
    """
    if config.profile in PROFILES:
        if config.context is not None:
            raise EvalError(f"eval.context={config.context} is read with eval.profile=custom, not {config.profile}")
        return PROFILES[config.profile]
    sampling = Sampling(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
    )
    return Profile(sampling, config.context)


def sampling_for(profile: Profile, prompt: Prompt) -> Sampling:
    """The profile's sampling with ``max_tokens`` cut to what the context leaves after this prompt.

    Raises:
        EvalError: the prompt leaves no room for a response.
    """
    if profile.context is None:
        return profile.sampling
    room = profile.context - len(prompt.tokens) - profile.reserve
    if room < 1:
        raise EvalError(
            f"row {prompt.row.example_id}: its prompt of {len(prompt.tokens)} tokens leaves no room in a context of "
            f"{profile.context} ({profile.reserve} reserved); lower max_prompt_tokens"
        )
    return replace(profile.sampling, max_tokens=min(profile.sampling.max_tokens, room))


def strategies(
    phase: Phase,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: int | None = None,
    prob_senior: float = 0.5,
    max_gap_tokens: int = 32,
) -> dict[str, Strategy]:
    """The strategies of a phase by arm name. Handoff has two arms; legibility reads what the senior writes alone.

    Args:
        vocabulary: number of logits, where the models have more than the tokenizer has tokens.
    """
    if phase == "tandem":
        return {"word": word(prob_senior, max_gap_tokens, word_boundary_table(tokenizer, vocabulary))}
    if phase == "handoff":
        tables = step_tables(tokenizer, vocabulary)
        return {"senior_first": sentence("senior", tables), "junior_first": sentence("junior", tables)}
    return {"solo": solo("senior")}


def author_runs(author: np.ndarray) -> str:
    """Authors as run lengths.

    Example:
        >>> author_runs(np.array([1, 1, 0, 1]))
        'S2J1S1'
    """
    return "".join(f"{'JS'[who]}{len(list(run))}" for who, run in groupby(author.tolist()))


# ---------------------------------------------------------------------------------------------------------- evaluating


def evaluate(
    arms: Mapping[str, Strategy],
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    scorer: Scorer,
    profile: Profile,
    samples: int,
    k: Sequence[int],
    seed: int,
    step: int = 0,
    bootstrap: int = 2000,
    progress: Progress | None = None,
) -> EvalResult:
    """Write ``samples`` completions per prompt and arm, grade them, and count: any phase but legibility.

    Raises:
        EvalError: no prompts, a k above ``samples``, or a prompt that leaves no room for a response.
        EngineError: the engine broke its contract, authorship included.
    """
    _check_k(k, samples)
    written = write(
        arms,
        engine=engine,
        tokenizer=tokenizer,
        prompts=prompts,
        profile=profile,
        samples=samples,
        seed=seed,
        step=step,
        progress=progress,
    )
    marked = grade(written, prompts, scorer)
    return EvalResult(summarise(marked, partial(graded, k=k), bootstrap=bootstrap, seed=seed), marked)


def write(
    arms: Mapping[str, Strategy],
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    profile: Profile,
    samples: int,
    seed: int,
    step: int = 0,
    progress: Progress | None = None,
) -> list[Sample]:
    """Completions, not graded, arm by arm: ``samples`` per prompt, in the order of the prompts.

    Keys are ``request_key(seed, step, position of the prompt, sample)`` in every arm, so that two checkpoints (or two
    arms) meet the same random numbers. ``progress(k)`` is told of k newly written tokens.

    Raises:
        EvalError: no prompts, or a prompt that leaves no room for a response.
        EngineError: a completion is missing or aborted, or its authors are not the strategy's.
    """
    if not prompts:
        raise EvalError("nothing to evaluate: no prompts")
    written = []
    for arm, strategy in arms.items():
        requests = [
            Request(
                prompt=prompt.tokens,
                keys=tuple(request_key(seed, step, problem, sample) for sample in range(samples)),
                sampling=sampling_for(profile, prompt),
                strategy=strategy,
            )
            for problem, prompt in enumerate(prompts)
        ]
        completions = engine.generate(requests, progress=progress)
        check_answers(requests, completions, engine.policy_version)
        flat = [completion for group in completions for completion in group]
        check_authors(flat, strategy)
        written += [
            _sample(i // samples, prompts[i // samples], arm, i % samples, completion, tokenizer)
            for i, completion in enumerate(flat)
        ]
    return written


def grade(samples: Sequence[Sample], prompts: Sequence[Prompt], scorer: Scorer) -> list[Sample]:
    """Score whole texts, whoever wrote them. Correct is the scorer's ``acc``: a format score alone is not."""
    scores = scorer.score([(prompts[sample.problem].row, sample.text) for sample in samples])
    return [
        sample._replace(score=float(score.value), correct=score.parts["acc"] == 1.0, answer=score.answer)
        for sample, score in zip(samples, scores, strict=True)
    ]


def read_legibility(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    junior: PreTrainedModel,
    *,
    context: int | None = None,
    tokens_per_micro_batch: int = 8192,
) -> list[Sample]:
    """The junior's mean cross-entropy on each text, in nats per token, given the chat prefix.

    The EOS that ends a text is not part of it. Texts that are empty or, with their prompt, longer than ``context`` (the
    profile's) or than the junior's own context get None.
    """
    longest = min(context or math.inf, getattr(junior.config, "max_position_embeddings", None) or math.inf)
    sequences: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for index, sample in enumerate(samples):
        text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
        sequence = [*prompts[sample.problem].tokens, *text]
        if text and len(sequence) <= longest:
            sequences[index], lengths[index] = sequence, len(text)
    logprobs = sequence_logprobs(
        junior, list(sequences.values()), tokens_per_micro_batch=tokens_per_micro_batch, temperature=1.0
    )
    read = list(samples)
    for index, values in zip(sequences, logprobs, strict=True):
        response = values[-lengths[index] :]
        read[index] = read[index]._replace(cross_entropy=-float(np.mean(response, dtype=np.float64)))
    return read


def verify(samples: Sequence[Sample], prompts: Sequence[Prompt], pool: JudgePool) -> list[Sample]:
    """Have the judge mark the reasoning of every correct sample; it accepts from ``judge.accept`` on.

    Raises:
        JudgeError: the judge is down or gives no marks.
        DataError: a row lacks what the judge is shown.
    """
    right = [i for i, sample in enumerate(samples) if sample.correct]
    shown = [(prompts[samples[i].problem].row, samples[i].text, samples[i].answer) for i in right]
    verified = [sample._replace(verified=False) for sample in samples]
    for i, mark in zip(right, pool.marks(shown), strict=True):
        accepted = mark is not None and mark >= pool.config.accept
        verified[i] = verified[i]._replace(judge=mark, verified=accepted)
    return verified


def graded(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """Rates and counts of the graded samples of one problem."""
    n = len(problem)
    correct = [bool(sample.correct) for sample in problem]
    answers = [sample.answer for sample in problem]
    rates = {f"pass@{m}": pass_at_k(sum(correct), n, m) for m in k}
    rates |= {f"maj@{m}": maj_at_k(answers, correct, m) for m in k if m > 1}
    rates |= {
        "score": sum(sample.score or 0.0 for sample in problem) / n,
        "truncation_rate": sum(sample.stop_reason == "length" for sample in problem) / n,
        "length": sum(sample.length for sample in problem) / n,
        "senior_share": sum(sample.senior_share for sample in problem) / n,
        "rounds": sum(sample.rounds for sample in problem) / n,
    }
    counts: Metrics = {
        "samples": n,
        "unfinished": sum(sample.stop_reason == "length" for sample in problem),
        f"above_{MANY_ROUNDS}_rounds": sum(sample.rounds > MANY_ROUNDS for sample in problem),
    }
    return rates, counts


def accepted(problem: Sequence[Sample], k: Sequence[int]) -> tuple[Metrics, Metrics]:
    """`graded`, and what is left of it when a judge reads the reasoning.

    ``rejected_rate``: share of all samples that are correct by reasoning that the judge does not accept (the paper's
    false positives). ``judge_failures``: correct samples without a mark, which count as rejected.
    """
    rates, counts = graded(problem, k)
    n, correct = len(problem), sum(bool(sample.correct) for sample in problem)
    verified = sum(bool(sample.verified) for sample in problem)
    rates |= {f"verified_pass@{m}": pass_at_k(verified, n, m) for m in k}
    rates["rejected_rate"] = (correct - verified) / n
    counts |= {
        "judged": correct,
        "judge_failures": sum(bool(sample.correct) and sample.judge is None for sample in problem),
    }
    return rates, counts


def legible(problem: Sequence[Sample]) -> tuple[Metrics, Metrics]:
    """The mean cross-entropy of the texts of one problem that the junior read, and how many it did not."""
    read = [sample.cross_entropy for sample in problem if sample.cross_entropy is not None]
    rates = {"cross_entropy": sum(read) / len(read)} if read else {}
    return rates, {"samples": len(problem), "dropped": len(problem) - len(read)}


def summarise(samples: Sequence[Sample], measure: Measure, *, bootstrap: int, seed: int) -> dict[str, dict[str, Any]]:
    """``{"macro": …, "by_set": …}`` from what ``measure`` says of each problem.

    With several arms, each has its own ``ARM/NAME``; the plain ``NAME`` is the mean over arms, problem by problem.

    Args:
        bootstrap: resamples of the intervals; 0 = no intervals.

    Raises:
        EvalError: a rate has no value in any problem of a set.
    """
    rates: dict[str, dict[str, np.ndarray]] = {}
    counts: dict[str, Metrics] = {}
    for name in dict.fromkeys(sample.set for sample in samples):
        members = [sample for sample in samples if sample.set == name]
        arms: dict[str, list[tuple[Metrics, Metrics]]] = {}
        for (arm, _), problem in groupby(members, key=lambda sample: (sample.arm, sample.problem)):
            arms.setdefault(arm, []).append(measure(list(problem)))
        by_arm = {arm: _columns([rate for rate, _ in problems], name) for arm, problems in arms.items()}
        totals = {arm: _totals([count for _, count in problems]) for arm, problems in arms.items()}
        rates[name] = {metric: np.mean(values, axis=0) for metric, values in _transpose(by_arm).items()}
        counts[name] = {metric: sum(values) for metric, values in _transpose(totals).items()}
        counts[name]["problems"] = max(len(problems) for problems in arms.values())
        if len(arms) > 1:
            rates[name] |= {f"{arm}/{metric}": v for arm in arms for metric, v in by_arm[arm].items()}
            counts[name] |= {f"{arm}/{metric}": v for arm in arms for metric, v in totals[arm].items()}

    def describe(sets: Sequence[str]) -> Metrics:
        out: Metrics = {}
        for metric in rates[sets[0]]:
            values = [rates[name][metric] for name in sets]
            out[metric] = float(np.mean([value.mean() for value in values]))
            if bootstrap and metric.rpartition("/")[2].startswith(WITH_INTERVAL):
                _, out[f"{metric}/low"], out[f"{metric}/high"] = macro_interval(values, resamples=bootstrap, seed=seed)
        return out | {metric: sum(counts[name][metric] for name in sets) for metric in counts[sets[0]]}

    return {"macro": describe(list(rates)), "by_set": {name: describe([name]) for name in rates}}


# --------------------------------------------------------------------------------------------------------- whole phases


def run_phase(
    phase: Phase,
    *,
    model: str,
    junior: str | None,
    data: Sequence[str],
    eval: EvalConfig,
    out: Path,
    reward: RewardConfig | None = None,
    sandbox: SandboxConfig | None = None,
    judge: JudgeConfig | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    prompt_suffix: str = "",
    max_prompt_tokens: int = 1024,
    limit: int | None = None,
    threads: int | None = None,
    prob_senior: float = 0.5,
    max_gap_tokens: int = 32,
    rollout: RolloutConfig | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run one phase and write ``PHASE.json`` and ``PHASE.samples.jsonl``; returns what is in the former.

    A finished phase of the same configuration, weights and data is not run again. Legibility and verified read the
    samples of ``pass-at-k.json`` beside them when there is one of the same configuration, and write the same ones
    themselves otherwise.

    Args:
        model, junior: HF folder or hub id. junior is needed by every phase but pass-at-k and verified.
        sandbox: limits of programs, where the score is the tests that they pass.
        judge: marks the reasoning in the verified phase, and responses to rows that are scored by a judge.
        out: a folder, or the result file itself if it ends in ``.json``.
        limit: rows of ``data`` (all sources, in order) that are used.

    Raises:
        EvalError: unknown phase, no junior, no judge, or a result file of another configuration; names the fix.
        JudgeError: the judge is down or gives no marks.
        ModelError, DataError, EngineError: a model, a data source or a request cannot be used.
    """
    if phase not in PHASES:
        raise EvalError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
    if phase in ("pass-at-k", "verified"):
        junior = None
    elif junior is None:
        raise EvalError(f"phase {phase} needs a junior; give one (--junior)")
    if isinstance(data, str):
        data = [data]
    rollout = rollout or RolloutConfig()
    reward, sandbox, judge = reward or RewardConfig(), sandbox or SandboxConfig(), judge or JudgeConfig()
    has_judge = judge.url is not None or judge.model is not None
    if phase == "verified" and not has_judge:
        raise EvalError("phase verified needs a judge; give judge.url=http://HOST:PORT/v1 or judge.model=FOLDER")
    if phase == "verified" and judge.prompt == "tinyv":
        raise EvalError("judge.prompt=tinyv compares answers; phase verified needs rubric or reasoning")

    @cache
    def pool() -> JudgePool:
        asked = make_judge(judge, dtype=dtype, device=device, max_rows=rollout.max_rows)
        assert asked is not None
        return JudgePool(asked, judge)

    profile = profile_of(eval)
    _check_k(eval.k, eval.samples)
    if threads is not None:
        torch.set_num_threads(threads)

    solo_config = _plain(
        {
            "model": model,
            "data": data,
            "eval": {key: value for key, value in asdict(eval).items() if key not in _TRAINING_ONLY},
            "reward": {key: value for key, value in asdict(reward).items() if key != "workers"},
            **({} if sandbox == SandboxConfig() else {"sandbox": asdict(sandbox)}),
            "dtype": dtype,
            "device": device,
            "prompt_suffix": prompt_suffix,
            "max_prompt_tokens": max_prompt_tokens,
            "limit": limit,
            "engine": rollout.engine,
            "digests": _digests([model, *data]),
        }
    )
    config = dict(solo_config)
    if junior is not None:
        config |= {"junior": junior, "digests": _digests([model, junior, *data])}
    if phase == "tandem":
        config |= {"prob_senior": prob_senior, "max_gap_tokens": max_gap_tokens}
    if has_judge:
        config["judge"] = {key: value for key, value in asdict(judge).items() if key not in _NO_PART_OF_A_MARK}
        config["judge"]["digests"] = _digests([each for each in (judge.model, judge.template) if each])
    if phase == "verified":
        config["judge"] |= {"model": judge.model or pool().judge.model}
    config = _plain(config)
    file = result_file(phase, out)
    if (finished := finished_result(file, phase, config)) is not None:
        return finished

    tokenizer = load_tokenizer(model)
    if junior is not None:
        vocabulary_check(tokenizer, load_tokenizer(junior))
    rows = load_rows(data)[:limit]
    prompts, dropped = encode_prompts(rows, tokenizer, max_prompt_tokens=max_prompt_tokens, suffix=prompt_suffix)
    load = partial(load_model, dtype=dtype, device=device)
    reads = phase in ("legibility", "verified")
    written = _stored_samples(file.with_name("pass-at-k.json"), solo_config) if reads else None
    if written is None:
        partner = None if phase == "legibility" else junior
        engine: Engine
        if rollout.engine == "vllm":
            longest = profile.longest(max(len(prompt.tokens) for prompt in prompts))
            engine = vllm_engine(rollout, model, partner, tokenizer, dtype=dtype, device=device, longest=longest)
        else:
            frozen = None if partner is None else load(partner)
            engine = TorchEngine(load(model), frozen, tokenizer, max_rows=rollout.max_rows)
        arms = strategies(
            phase, tokenizer, vocabulary=engine.vocabulary, prob_senior=prob_senior, max_gap_tokens=max_gap_tokens
        )
        written = write(
            arms,
            engine=engine,
            tokenizer=tokenizer,
            prompts=prompts,
            profile=profile,
            samples=eval.samples,
            seed=eval.seed,
            progress=progress,
        )
    counters: Metrics = {"prompts_dropped": dropped}
    measure: Measure = legible
    if phase == "legibility":
        assert junior is not None  # refused above
        measured = read_legibility(written, prompts, load(junior), context=profile.context)
    else:
        measure = partial(graded, k=eval.k)
        with Scorer(
            reward,
            code=partial(score_code, sandbox=sandbox),
            judge=(lambda items: pool()(items)) if has_judge else None,
        ) as scorer:
            measured = grade(written, prompts, scorer)
            counters |= {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
        if phase == "verified":
            measure = partial(accepted, k=eval.k)
            measured = verify(measured, prompts, pool())
    metrics = summarise(measured, measure, bootstrap=eval.bootstrap, seed=eval.seed)
    metrics["macro"] |= counters
    seeds = {"sampling": eval.seed, "step": 0, "bootstrap": eval.seed}
    return write_result(file, phase, config, EvalResult(metrics, measured), seeds=seeds)


def result_file(phase: Phase, out: Path) -> Path:
    """``out`` if it names a ``.json`` file, else ``out/PHASE.json``."""
    return Path(out) if Path(out).suffix == ".json" else Path(out) / f"{phase}.json"


def finished_result(file: Path, phase: Phase, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result in ``file`` if it is this phase with this configuration; None if there is no file.

    Raises:
        EvalError: the file holds something else; names the first difference.
    """
    if not file.exists():
        return None
    stored = read_result(file)
    if stored["phase"] != phase:
        raise EvalError(f"{file} holds the phase {stored['phase']}, not {phase}; choose another --out")
    before, now = _flat(stored["config"]), _flat(config)
    changed = [key for key in dict.fromkeys([*before, *now]) if before.get(key) != now.get(key)]
    if changed:
        listed = "; ".join(f"{key}: {before.get(key)!r} there, {now.get(key)!r} now" for key in changed[:3])
        raise EvalError(
            f"{file} holds this phase with another configuration ({listed}); delete it or choose another --out"
        )
    return stored


def read_result(file: Path) -> dict[str, Any]:
    """A stored result.

    Raises:
        EvalError: not an evaluation result of this schema.
    """
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"{file}: not readable as an evaluation result ({error}); delete it and run again") from None
    if not isinstance(stored, dict) or stored.get("schema") != SCHEMA:
        raise EvalError(f"{file}: not an evaluation result of schema {SCHEMA}; choose another --out")
    return dict(stored)


def write_result(
    file: Path, phase: Phase, config: Mapping[str, Any], result: EvalResult, *, seeds: Mapping[str, int]
) -> dict[str, Any]:
    """Write the samples, then the result that points to them, each atomically: a result file means "finished".

    Raises:
        EvalError: a number is not finite; nothing is written.
    """
    samples = file.with_suffix(".samples.jsonl")
    stored = {
        "schema": SCHEMA,
        "phase": phase,
        "config": config,
        "versions": versions() | {"numpy": np.__version__, "math-verify": metadata.version("math-verify")},
        "seeds": seeds,
        "metrics": result.metrics,
        "samples": samples.name,
    }
    try:
        text = json.dumps(stored, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        lines = [json.dumps(sample._asdict(), ensure_ascii=False, allow_nan=False) + "\n" for sample in result.samples]
    except ValueError as error:
        raise EvalError(f"{file}: a result is not finite ({error}); nothing was written") from None
    write_text(samples, "".join(lines))
    write_text(file, text)
    return json.loads(text)


def read_samples(file: Path) -> list[Sample]:
    """The samples of a ``PHASE.samples.jsonl`` file, in order."""
    with open(file, encoding="utf-8") as lines:
        return [Sample(**json.loads(line)) for line in lines]


# --------------------------------------------------------------------------------------------------------------------

_TRAINING_ONLY = ("select_by", "train_samples", "train_problems")
_NO_PART_OF_A_MARK = ("url", "api_key_env", "backoff_s", "timeout_s", "concurrency")


def _check_k(k: Sequence[int], samples: int) -> None:
    if not k or not all(1 <= m <= samples for m in k):
        raise EvalError(f"eval.k={list(k)}: each k must be between 1 and eval.samples ({samples})")


def _sample(
    problem: int, prompt: Prompt, arm: str, number: int, completion: Completion, tokenizer: PreTrainedTokenizerBase
) -> Sample:
    tokens, author = completion.tokens.tolist(), completion.author
    return Sample(
        problem=problem,
        example_id=prompt.row.example_id,
        set=prompt.row.data_source,
        arm=arm,
        sample=number,
        key=completion.key,
        text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
        tokens=tokens,
        length=len(tokens),
        author=author_runs(author),
        rounds=1 + int(np.count_nonzero(np.diff(author))) if len(author) else 0,
        senior_share=float(author.mean()) if len(author) else 0.0,
        stop_reason=completion.stop_reason,
    )


def _columns(problems: Sequence[Metrics], name: str) -> dict[str, np.ndarray]:
    """One array per rate, over the problems that have it."""
    metrics = dict.fromkeys(metric for problem in problems for metric in problem)
    if not metrics:
        raise EvalError(f"set {name}: none of its {len(problems)} problems could be measured (texts empty or too long)")
    return {metric: np.array([p[metric] for p in problems if metric in p], dtype=np.float64) for metric in metrics}


def _totals(problems: Sequence[Metrics]) -> Metrics:
    return {metric: sum(problem[metric] for problem in problems) for metric in problems[0]}


def _transpose(by_arm: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """arm -> metric -> value as metric -> values, in the order of the arms."""
    first = next(iter(by_arm.values()))
    return {metric: [values[metric] for values in by_arm.values()] for metric in first}


def _stored_samples(file: Path, solo_config: Mapping[str, Any]) -> list[Sample] | None:
    """What the pass-at-k phase wrote, if it was run with this configuration, with or without a judge."""
    if not file.exists():
        return None
    stored = read_result(file)
    samples = file.with_name(stored["samples"])
    config = {key: value for key, value in stored["config"].items() if key != "judge"}
    if stored["phase"] != "pass-at-k" or config != solo_config or not samples.exists():
        return None
    return read_samples(samples)


def _digests(sources: Sequence[str]) -> dict[str, str]:
    """A hash of each local model folder or data file: changed weights or data are another configuration."""
    digests = {}
    for source in map(Path, sources):
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        if files := [file for file in files if file.is_file()]:
            digest = hashlib.blake2b(digest_size=16)
            for file in files:
                with open(file, "rb") as content:
                    digest.update(hashlib.file_digest(content, "blake2b").digest())
            digests[str(source)] = digest.hexdigest()
    return digests


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it reads back from JSON."""
    return json.loads(json.dumps(value))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
