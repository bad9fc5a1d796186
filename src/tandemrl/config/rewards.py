"""The settings of rewards: scorers, the judge, the sandbox. No torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandemrl.config.fields import (
    Address,
    Allowed,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a finished response: which scorer scores which row, and how."""

    timeout_s: PositiveFloat = 5.0
    """Time limit for scoring one response. A scorer that hangs is killed and counted."""
    workers: PositiveInt | None = None
    """Scoring processes; null = chosen from the work and the cores."""
    scorers: dict[str, str] = field(default_factory=dict)
    """Scorers by pattern. A pattern is compared with a row's `data_source`, or after `ability:` with its `ability`. A
    scorer is one of the library's, or a custom `module:function` (also verl's `compute_score`), or a sum `a + b`;
    see rewards/routing.py. These patterns come before the library's table."""
    fallback: str | None = None
    """The scorer of rows whose `data_source` neither `scorers` nor the library's table knows, written as in `scorers`;
    null = they are refused. The published code of the rubric reward model has `prime` here."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each reward in a sum, by its name; 1 without an entry. The name of `module:function` is `function`."""
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Parameters of a custom `module:function`, by its name."""
    format_score: float | None = None
    """Score of a wrong answer in the right format; null = the scorer's own (GSM8K: `tandem` 0.1, else 0; Countdown
    0.1)."""
    gsm8k: Literal["strict", "flexible", "tandem"] = "strict"
    """Where GSM8K's answer is read. `strict`: the last `#### N`; `flexible`: the last number; `tandem`: the last
    `####`, even if other characters stand before N."""
    countdown: Literal["tinyzero", "cohlem"] = "tinyzero"
    """Countdown rewards: 0, 0.1, 1 (`tinyzero`) or 0.01, 0.02, 1.01 (`cohlem`)."""
    code_credit: Literal["fraction", "all"] = "fraction"
    """The reward of a program. fraction: the fraction of its tests that pass; all: 1 if all pass, else 0."""
    musique: Literal["head", "scaled", "mean", "bonus", "readme", "agents"] = "head"
    """How the parts of a MuSiQue score make the reward. `head`: hops / 2 times the weighted mean of F1 and recall
    (weight 1 each), exact match 0.9, citations 0.6, precision 0.4 and format 0.1. For the others see
    tasks/qa/grader.py."""
    compat: Literal["none", "verl", "tinyzero", "cohlem"] = "none"
    """Reproduce another implementation where results depend on its quirks. `verl`: its routing (`math` and `aime*` by
    DAPO's grader with rewards of ±1, MATH by its string grader); stray `<answer>` tags are overlooked (`tinyzero` and
    `cohlem`, too).
    `tinyzero`: GSM8K's first `####`; Countdown answers on the last line, with `**`, `//` and decimals. `cohlem`:
    Countdown numbers in any multiplicity."""


@dataclass(frozen=True)
class JudgeConfig:
    """A model that scores responses, for rows whose `data_source` contains `_tinyv` or is HardVerify-Math, and for
    `tandemrl eval verified`. It is off unless `url` or `model` is set."""

    url: Address | None = None
    """OpenAI-compatible endpoint such as http://localhost:8000/v1; null = `model` is loaded into this process."""
    command: str | None = None
    """A command that serves the judge at `url`, such as `vllm serve MODEL --port 8000`. `tandemrl train` starts it
    (without a shell; `env NAME=VALUE vllm serve …` sets variables) and ends it with the run. Its output is in
    output_dir/judge.log. Needs `wait_s`."""
    wait_s: NonNegativeFloat = 0.0
    """Seconds to wait at the start for an endpoint that does not answer yet, while its server loads the model."""
    model: str | None = None
    """With `url`: the model's name at the endpoint, null = the first one listed. Without: HF folder or hub id."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    prompt: Literal["rubric", "rrm", "tinyv", "reasoning"] = "rubric"
    """What the judge is asked. `rubric`: score the whole response by the row's criteria, out of 10; `rrm`: the same in
    the words of the published rubric reward model, for a judge that was trained to reply to them; `tinyv`: whether the
    extracted answer equals the reference answer, true or false; `reasoning`: score how sound the whole response is, out
    of 10, without criteria."""
    template: str | None = None
    """A text file to use as the text of `prompt`, with the fields {{QUESTION}}, {{CRITERIA}}, {{GROUND_TRUTH_ANSWER}},
    {{MODEL_ANSWER}}."""
    mode: Literal["addon", "mixed", "tinyv_only"] = "addon"
    """How the rule's verdict r in {0, 1} and the judge's score j in [0, 1] make the reward. `addon`: 1 if r is 1, else
    weight * j; `mixed`: weight * j + (1 - weight) * r; `tinyv_only`: j."""
    weight: Fraction = 1.0
    """The weight of the judge in `mode`."""
    accept: PositiveFraction = 1.0
    """`eval verified`: the lowest score at which the judge accepts the reasoning."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 = greedy."""
    max_tokens: PositiveInt = 2048
    """Maximum length of the judge's reply, in tokens."""
    retries: NonNegativeInt = 3
    """Retries, both when the endpoint fails and when a reply holds no score (then at `retry_temperature`)."""
    retry_temperature: Annotated[float, Allowed("positive: a greedy judge would repeat itself", lambda x: x > 0)] = 0.3
    """Sampling temperature after a reply without a score."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the first retry, in seconds; it doubles each time."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of one attempt."""
    concurrency: PositiveInt = 64
    """Requests in flight at once."""
    max_failure_rate: Annotated[float, Allowed("in [0, 1)", lambda x: 0 <= x < 1)] = 0.1
    """Stop if the judge gives no score to more than this fraction of a batch, where one response is always tolerated
    unless this is 0. Below the limit, such responses are not used in training."""


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a program that a model wrote, when the reward runs its tests; see tasks/code/sandbox.py."""

    timeout_s: PositiveFloat = 5.0
    """Wall-clock limit of one test."""
    program_timeout_s: PositiveFloat = 30.0
    """Wall-clock limit of all tests of one program. Tests that are not reached count as failed."""
    memory_mb: Annotated[int, Allowed("at least 64: the interpreter needs some of it", lambda n: n >= 64)] = 1024
    """Address space of each process of a test."""
    file_mb: PositiveInt = 64
    """Maximum size of a file, and of the working directory if that is in memory."""
    output_mb: PositiveInt = 4
    """How many megabytes a test may print or return."""
    processes: PositiveInt = 8
    """How many processes and threads a test may have at once."""
    allow_weak: bool = False
    """Run programs even if a layer of the sandbox is missing (`tandemrl check` lists them)."""
