"""Typed configuration: frozen dataclasses, YAML files, ``key=value`` overrides, and the printed batch plan.

A run is three things: a config file that says what differs from the defaults below, the overrides on the command line,
and the code revision. All three are stored with every checkpoint and result. This module imports no torch.
"""

# ruff: noqa: E501 - check() is a table, one rule per line

import difflib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tandemrl.files import hint

StrategyName = Literal["word", "word_aligned", "bernoulli", "sentence", "chunk", "alternating", "solo"]
RecipeName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]


class ConfigError(ValueError):
    """A bad key or value; the message names the key, the allowed values and, where close, what was meant."""


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (needs the `lora` extra). The engine gets, and hf/ holds, the merged weights."""

    rank: int = 0
    """0 = all weights are trained."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of modules, such as q_proj; `all-linear` = every linear layer but the LM head."""


@dataclass(frozen=True)
class ModelConfig:
    senior: str = "runs/tiny/senior"
    """HF folder or hub id of the trained model."""
    junior: str | None = None
    """HF folder or hub id of the frozen partner; null = the senior's initial weights ("self-paired")."""
    critic: str | None = None
    """HF folder or hub id of the value model of `loss.recipe: ppo`; null = the senior's initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of every forward. Trained weights and optimiser state are float32 ("master") in both cases."""
    device: str = "auto"
    """A torch device; auto = cuda if there is one, else cpu."""
    gradient_checkpointing: bool = False
    liger: bool = False
    """CUDA: RMSNorm, SwiGLU and RoPE by Liger's kernels (needs the `liger` extra)."""
    compile: bool = False
    """torch.compile of the layers: faster updates after a first step that takes tens of seconds; not for decoding."""
    activation_offload: bool = False
    """Keep what backward needs in host memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class DataConfig:
    train: tuple[str, ...] = ("synthetic:plain:train",)
    """JSONL/Parquet files (verl row schema or raw GSM8K), `synthetic:PAIR:SPLIT`, or `hf:REPO:CONFIG:SPLIT`."""
    eval: tuple[str, ...] = ("synthetic:plain:heldout",)
    max_prompt_tokens: int = 1024
    """Rows whose templated prompt is longer are dropped and counted."""
    prompt_suffix: str = ""
    """Appended to the last user message of every row, in training and evaluation alike."""


@dataclass(frozen=True)
class VllmConfig:
    mode: Literal["lazy", "majority", "lockstep"] = "lazy"
    """lazy: a token is computed by its author, the other model catches up in chunks; majority: and only one of the models
    runs in a step, the rows of the other wait; lockstep: by both."""
    multiprocess: bool = False
    """An engine in a process of its own, instead of in the trainer's."""
    devices: str | None = None
    """CUDA devices of that process, e.g. "1" or "2,3"; null = the trainer's."""
    kv_cache_gb: float | None = None
    """KV cache of both models; null = 1 GB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU that the engine may take, models included. The trainer needs the rest."""
    sleep: bool = False
    """CUDA: hand the engine's memory to the trainer between rollouts."""
    prefix_caching: bool = True
    max_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    """null = true on a CPU, else CUDA graphs."""
    junior_dtype: str | None = None
    junior_quantization: str | None = None
    """As vLLM's --dtype and --quantization, for the junior alone; null = the senior's dtype, what the model says."""
    junior_device: str | None = None
    """Another CUDA device for the junior, e.g. "cuda:1": both forwards are in flight at once."""


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["torch", "vllm"] = "torch"
    group_size: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    max_rows: int = 256
    """Rows decoded at once."""
    compile: bool = False
    """The torch engine: torch.compile of the decoding step: 1.5 times as fast for tiny models, after a minute."""
    tensor_parallel: int = 1
    """Ranks per model, with the vllm engine."""
    allow_truncated: bool = False
    """Permit top_p/top_k/min_p in training; the trainer then renormalises over the kept tokens too."""
    vllm: VllmConfig = field(default_factory=VllmConfig)


@dataclass(frozen=True)
class SelectionConfig:
    strategy: StrategyName = "word"
    prob_senior: float = 0.5
    max_gap_tokens: int = 32
    chunk_size: int = 16
    first: Literal["senior", "junior"] = "senior"
    """Who starts (`sentence`, `chunk`, `alternating`) or who writes everything (`solo`)."""
    prob_senior_final: float | None = None
    """With `anneal_steps`: prob_senior moves linearly to this value."""
    anneal_steps: int = 0


@dataclass(frozen=True)
class LossConfig:
    recipe: RecipeName = "grpo"
    junior_weight: float = 0.0
    """Loss weight of junior-written tokens: 0 = tandem GRPO, 1 = plain GRPO on every token."""
    clip_low: float | None = None
    clip_high: float | None = None
    """PPO clip range. Here and below, null = the recipe's own."""
    dual_clip: float | None = None
    """Bound of the loss at negative advantages (above 1); 0 = off."""
    kl_coef: float = 0.0
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = False
    """Subtract the KL (always k1, summed over trained tokens) from the reward instead of adding it to the loss."""
    junior_kl_coef: float = 0.0
    """λ_jun: pull of the senior towards the junior on junior-written tokens (0 in the paper)."""
    entropy_coef: float = 0.0
    normalise_by: Literal["weight", "response"] = "weight"
    importance: Literal["none", "token", "sequence"] | None = None
    """Truncated importance sampling (TIS) of trainer against engine log-probs."""
    importance_cap: float | None = None
    overlong_buffer: int | None = None
    """DAPO overlong shaping: the last `overlong_buffer` tokens before rollout.max_tokens are penalised; 0 = off."""
    filter_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the update."""
    kl_target: float | None = None
    """With kl_in_reward: adapt kl_coef so that the KL per trained token comes to this; null = fixed."""
    gamma: float = 1.0
    """Discount per trained token, and λ of generalised advantage estimation; with ppo."""
    lam: float = 0.95
    value_clip: float | None = 0.5
    """Values may move by this much per update; null = freely."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 50
    seed: int = 0
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    prompts_per_step: int = 16
    mini_batch_prompts: int | None = None
    """Prompts per optimiser step; null = all of prompts_per_step (one on-policy update)."""
    max_resamples: int = 0
    """Dynamic sampling (DAPO): prompts whose rewards are all equal are replaced by others, at most this many times."""
    critic_lr: float = 1e-5
    critic_warmup_steps: int = 0
    """First steps in which the critic alone learns."""
    tokens_per_micro_batch: int = 8192
    save_every: int = 20
    keep_checkpoints: int = 2
    eval_every: int = 20
    max_logprob_mismatch: float | None = None
    """Stop above this mean |trainer - engine| log-prob on senior tokens; null = 1e-3 (float32), 2e-2 (bfloat16)."""
    async_steps: int = 0
    """1 = the rollouts of the next step are written while this one is learnt from, by weights one step old."""
    async_save: bool = False
    """Write checkpoints in the background."""
    profile: bool = False
    """Write a trace and a table of phases, tokens/s and MFU to output_dir/profile."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    wandb_project: str = "tandemrl"
    log_samples: int = 4
    """Samples shown per logged table; every rollout goes to samples.jsonl regardless."""
    threads: int | None = None
    """torch CPU threads; null = leave torch's choice."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes that torchrun started share one run; their number is the product of the axes."""

    dp_replicate: int = 1
    """Groups of processes that each hold a whole copy of the weights."""
    dp_shard: int | None = None
    """Processes that each hold a part of the weights and see other rollouts (FSDP); null = what the other axes leave."""
    tp: int = 1
    """Processes that share every matrix (tensor parallelism)."""
    sp: int = 1
    """Processes that share every sequence (Ulysses sequence parallelism)."""
    offload: bool = False
    """CUDA, several processes: keep weights, gradients and optimiser state in host memory between uses."""
    timeout_s: float = 1800.0
    """How long a process waits for the others before it gives up; and, if there are others, for how long it may do
    nothing that counts as work (see ``watchdog``). More than the longest single thing takes, such as a checkpoint."""


@dataclass(frozen=True)
class EvalConfig:
    profile: Literal["tiny", "paper", "custom"] = "tiny"
    """One sampling config for every phase (spec: `tiny` T 1, 64 tokens; `paper` T 0.7, top_p 0.8, top_k 20, 3000)."""
    samples: int = 8
    k: tuple[int, ...] = (1, 2, 4, 8)
    seed: int = 17
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    """The last four are read with `profile: custom` only."""
    context: int | None = None
    select_by: str | None = None
    """Metric that chooses hf/best; null = macro pass@k at the largest k ≤ samples not above 4."""
    train_samples: int = 4
    train_problems: int = 128
    """Samples per problem, and problems per source of data.eval, of the held-out evaluation during training."""
    bootstrap: int = 2000


@dataclass(frozen=True)
class RewardConfig:
    timeout_s: float = 5.0
    workers: int | None = None
    """Scoring processes; null = chosen from the work and the cores."""
    scorers: dict[str, str] = field(default_factory=dict)
    """`data_source` pattern -> `module:function` of your own, or one of the library's scorers; see rollout/envs/routing.py.
    Looked up before the library's table. `a + b` is a weighted sum of two."""
    weights: dict[str, float] = field(default_factory=dict)
    """Name of a reward -> how often it counts; 1 without an entry. `module:function` is called `function`."""
    format_score: float | None = None
    """Score of a wrong answer in the right format; null = the scorer's own (GSM8K: `tandem` 0.1, else 0; Countdown 0.1)."""
    gsm8k: Literal["strict", "flexible", "tandem"] = "strict"
    countdown: Literal["tinyzero", "cohlem"] = "tinyzero"
    """Countdown rewards: 0, 0.1, 1 (`tinyzero`) or 0.01, 0.02, 1.01 (`cohlem`)."""
    code_credit: Literal["fraction", "all"] = "fraction"
    """What a program earns: the fraction of its tests that pass, or 1 for all of them and else 0."""
    compat: Literal["none", "verl", "tinyzero", "cohlem"] = "none"
    """Reproduce another implementation where results depend on its quirks. `verl`: its routing (`math` and `aime*` by
    DAPO's grader with rewards of ±1, MATH by its string grader), and "x + 3 = 4" is 4 to DAPO's, PRIME's and MATH's. `tinyzero`: GSM8K's first `####`; Countdown answers on
    the last line, with `**`, `//` and decimals. `cohlem`: Countdown numbers in any multiplicity."""


@dataclass(frozen=True)
class JudgeConfig:
    """A model that marks responses: for rows whose `data_source` contains `_tinyv` or is HardVerify-Math, and for
    `tandemrl eval verified`. Off unless `url` or `model` is set."""

    url: str | None = None
    """OpenAI-compatible endpoint such as http://localhost:8000/v1; null = `model` is loaded into this process."""
    model: str | None = None
    """With `url`: the name it goes by there, null = the first one listed. Without: HF folder or hub id."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    prompt: Literal["rubric", "tinyv", "reasoning"] = "rubric"
    """`rubric`: the whole response by the row's criteria, out of 10. `tinyv`: is the extracted answer the reference
    answer, true or false. `reasoning`: is the whole response sound, out of 10, without criteria."""
    template: str | None = None
    """A text file with other words for `prompt`: {{QUESTION}}, {{CRITERIA}}, {{GROUND_TRUTH_ANSWER}}, {{MODEL_ANSWER}}."""
    mode: Literal["addon", "mixed", "tinyv_only"] = "addon"
    """Reward from the rule r in {0, 1} and the judge j in [0, 1]: `addon` 1 if r, else weight * j; `mixed`
    weight * j + (1 - weight) * r; `tinyv_only` j."""
    weight: float = 1.0
    gates: tuple[Literal["one_think", "sections", "boxed", "repetition", "short"], ...] = ()
    """Responses that fail one get its reward and are not shown to the judge; see rollout/envs/rubric.py."""
    accept: float = 1.0
    """`eval verified`: the judge accepts a reasoning from this score on."""
    temperature: float = 0.0
    max_tokens: int = 2048
    retries: int = 3
    """Further attempts, both when the endpoint fails and when a reply holds no score (then at `retry_temperature`)."""
    retry_temperature: float = 0.3
    backoff_s: float = 1.0
    """Wait before the first further attempt; it doubles each time."""
    timeout_s: float = 120.0
    """Limit of one attempt."""
    concurrency: int = 64
    """Requests in flight at once."""
    max_failure_rate: float = 0.1
    """Stop if the judge gives no score to more than this share of a batch, or to one response if that is more; 0 = to any.
    Below it, such responses are not learnt from."""


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a program that a model wrote, where the reward is to run its tests; see rollout/envs/sandbox.py."""

    timeout_s: float = 5.0
    """Wall clock of one test."""
    program_timeout_s: float = 30.0
    """Wall clock of all tests of one program; those not reached count as failed."""
    memory_mb: int = 1024
    """Address space of each process of a test."""
    file_mb: int = 64
    """Size of a file, and of the working directory where that is in memory."""
    output_mb: int = 4
    """What a test may print or return."""
    processes: int = 8
    """Processes and threads of a test at once."""
    allow_weak: bool = False
    """Run programs even where a layer is missing (`tandemrl check` lists them)."""


@dataclass(frozen=True)
class FunctionRecord:
    """A Python function that a run was given, as far as a file can tell."""

    name: str = ""
    """Where it was defined; of a recipe, what differs from the library's."""
    signature: str = ""
    """Hash of its code, constants and the values that it closes over."""


@dataclass(frozen=True)
class FunctionsConfig:
    """Functions passed to `train` in place of config keys. `train` writes this section; a config that has an entry
    trains only with the same function. null = the config's own keys hold."""

    recipe: FunctionRecord | None = None
    """`train(recipe=...)`, in place of loss.recipe."""
    strategy: FunctionRecord | None = None
    """`train(strategy=...)`, in place of selection.*."""
    reward: FunctionRecord | None = None
    """`train(reward=...)`, in place of the library's choice for rows without an entry in reward.scorers."""


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    functions: FunctionsConfig = field(default_factory=FunctionsConfig)
    output_dir: str = "runs/train"


# --------------------------------------------------------------------------------------------------------------------


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Defaults <- YAML file <- ``key=value`` overrides, checked.

    Args:
        path: a YAML file, or the name of a packaged one (``quickstart`` or ``quickstart.yaml``); None = defaults only.
        overrides: dotted assignments such as ``train.lr=1e-5``.

    Raises:
        ConfigError: unknown key, bad value or unreadable file; the message names it.

    Example:
        >>> load(overrides=["train.lr=1e-5"]).train.lr
        1e-05
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    merged = OmegaConf.structured(Config)
    sources: list[tuple[str, Any]] = []
    unset: set[str] = set()
    reading = str(path)
    try:
        if path is not None:
            file = find_config(path)
            sources.append((str(file), OmegaConf.load(file)))
        for item in overrides:
            if "=" not in item:
                raise ConfigError(f"override {item!r}: expected key=value, e.g. train.lr=1e-5")
            reading = item
            sources.append((item, OmegaConf.from_dotlist([item])))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{reading}: not readable as YAML: {' '.join(str(error).split())}") from None
    for where, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{where}: expected a mapping of sections, found {type(source).__name__}")
        _refuse_unknown(OmegaConf.to_container(source), Config, where)
        for key in ("data.train", "data.eval"):  # one source may be written without the list brackets
            if isinstance(value := OmegaConf.select(source, key), str):
                OmegaConf.update(source, key, [value])
        missing = OmegaConf.missing_keys(source)  # `???`: a value that the config leaves to the user; merge skips it
        unset = {key for key in unset if OmegaConf.select(source, key, default=_ABSENT) is _ABSENT} | missing
        try:
            merged = OmegaConf.merge(merged, source)
        except OmegaConfBaseException as error:
            raise ConfigError(_bad_value(where, error.full_key, source, str(error).splitlines()[0])) from None
    if unset:
        wanted = ", ".join(f"{key}=…" for key in sorted(unset))
        raise ConfigError(f"{sources[0][0]} leaves a value to you (???); give {wanted}")
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    assert isinstance(config, Config)
    check(config)
    return config


def stated_keys(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that ``key=value`` overrides set.

    Example:
        >>> sorted(stated_keys(["train.lr=1e-5", "reward={scorers: {mydata: boxed}}"]))
        ['reward.scorers.mydata', 'train.lr']
    """
    from omegaconf import OmegaConf

    return set(_flatten(_plain(OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides))))))


def warn_of_reward_function(config: Config) -> None:
    """Say that a config alone cannot score as its run did, if that run was given a reward function."""
    if config.functions.reward is not None:
        warnings.warn(
            f"functions.reward: this config's run was rewarded by {config.functions.reward.name}, which no file holds; "
            "here reward.scorers and the rows' data_source decide",
            stacklevel=2,
        )


def find_config(path: str | Path) -> Path:
    """A file that exists, else a packaged config of that name.

    Raises:
        ConfigError: neither; lists the packaged names.
    """
    candidate = Path(path)
    if candidate.is_file():
        return candidate
    packaged = packaged_configs()
    if candidate.parent in (Path("."), Path("configs")) and candidate.name.removesuffix(".yaml") in packaged:
        return packaged[candidate.name.removesuffix(".yaml")]
    names = f"packaged configs: {', '.join(packaged)}"
    if candidate.is_dir():
        inside = candidate / "config.yaml"
        meant = f"; did you mean {inside}?" if inside.is_file() else ""
        raise ConfigError(f"config {str(path)!r}: a folder; expected a YAML file{meant or f', or a name; {names}'}")
    if len(candidate.parts) > 1 or candidate.suffix:
        raise ConfigError(f"config {str(path)!r}: no such file{hint(candidate) or f'; {names}'}")
    close = difflib.get_close_matches(str(path), packaged, n=1)
    raise ConfigError(f"config {str(path)!r} not found{f' (did you mean {close[0]}?)' if close else ''}; {names}")


def packaged_configs() -> dict[str, Path]:
    """The configs that come with the library, by name."""
    from importlib.resources import files

    found = sorted(Path(str(file)) for file in files("tandemrl.configs").iterdir() if file.name.endswith(".yaml"))
    return {file.stem: file for file in found}


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with lists for tuples: what is stored in ``config.yaml`` and result files."""
    return _plain(asdict(config))  # type: ignore[no-any-return]


def to_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def difference(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ: ``{key: (value in a, value in b)}``."""
    left, right = _flatten(to_dict(a)), _flatten(to_dict(b))
    keys = [*left, *(key for key in right if key not in left)]  # of reward.scorers, each may have its own
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def check(config: Config) -> None:
    """Refuse values that are out of range or contradict each other.

    Raises:
        ConfigError: the message names the key and what is allowed.
    """
    v = config.rollout.vllm
    p = config.parallel
    m, r, s, lo, t, e = config.model, config.rollout, config.selection, config.loss, config.train, config.eval
    per_update = t.mini_batch_prompts or t.prompts_per_step
    longest = config.data.max_prompt_tokens + r.max_tokens
    rules: list[tuple[bool, str, object, str]] = [
        (r.group_size >= (1 if lo.recipe == "ppo" else 2), "rollout.group_size", r.group_size, "at least 2: a group of one has no advantage (with ppo, at least 1)"),
        (r.temperature > 0, "rollout.temperature", r.temperature, "positive: greedy rollouts have no policy gradient"),
        (0 < r.top_p <= 1, "rollout.top_p", r.top_p, "in (0, 1]"),
        (r.top_k >= 0, "rollout.top_k", r.top_k, "0 (off) or positive"),
        (0 <= r.min_p <= 1, "rollout.min_p", r.min_p, "in [0, 1]"),
        (r.max_tokens >= 1, "rollout.max_tokens", r.max_tokens, "at least 1"),
        (r.max_rows >= 1, "rollout.max_rows", r.max_rows, "at least 1"),
        (r.tensor_parallel == 1 or r.engine == "vllm", "rollout.tensor_parallel", r.tensor_parallel, "1 with the torch engine"),
        (0 < s.prob_senior <= 1, "selection.prob_senior", s.prob_senior, "in (0, 1]: without senior tokens nothing is trained"),
        (s.prob_senior_final is None or 0 < s.prob_senior_final <= 1, "selection.prob_senior_final", s.prob_senior_final, "in (0, 1]"),
        (s.anneal_steps == 0 or s.strategy in ("word", "word_aligned", "bernoulli"), "selection.anneal_steps", s.anneal_steps, f"0 with {s.strategy}, which draws nothing"),
        (s.strategy != "solo" or s.first == "senior", "selection.first", s.first, "senior with solo: a junior alone trains nothing"),
        ((s.prob_senior_final is None) == (s.anneal_steps == 0), "selection.anneal_steps", s.anneal_steps, "set together with selection.prob_senior_final"),
        (s.max_gap_tokens >= 1, "selection.max_gap_tokens", s.max_gap_tokens, "at least 1"),
        (s.chunk_size >= 1, "selection.chunk_size", s.chunk_size, "at least 1"),
        (0 <= lo.junior_weight <= 1, "loss.junior_weight", lo.junior_weight, "in [0, 1]"),
        (lo.kl_coef >= 0, "loss.kl_coef", lo.kl_coef, "0 (off) or positive"),
        (lo.junior_kl_coef >= 0, "loss.junior_kl_coef", lo.junior_kl_coef, "0 (off) or positive"),
        (not lo.kl_in_reward or lo.kl_coef > 0, "loss.kl_in_reward", lo.kl_in_reward, "false unless loss.kl_coef > 0"),
        (lo.recipe != "rloo" or lo.clip_low is lo.clip_high is None, "loss.clip_low/clip_high", (lo.clip_low, lo.clip_high), "null with rloo, which does not clip"),
        (lo.recipe not in ("rloo", "cispo") or lo.dual_clip is None, "loss.dual_clip", lo.dual_clip, f"null with {lo.recipe}"),
        (lo.dual_clip is None or lo.dual_clip == 0 or lo.dual_clip > 1, "loss.dual_clip", lo.dual_clip, "null, 0 (off) or above 1"),
        (lo.recipe != "rloo" or per_update == t.prompts_per_step, "train.mini_batch_prompts", t.mini_batch_prompts, "null with rloo, which has no correction for a second update"),
        (lo.importance_cap is None or lo.importance_cap > 0, "loss.importance_cap", lo.importance_cap, "positive"),
        (lo.overlong_buffer is None or 0 <= lo.overlong_buffer < r.max_tokens, "loss.overlong_buffer", lo.overlong_buffer, "null, 0 (off) or below rollout.max_tokens"),
        (m.critic is None or lo.recipe == "ppo", "model.critic", m.critic, "null unless loss.recipe=ppo"),
        (t.steps >= 1, "train.steps", t.steps, "at least 1"),
        (t.lr > 0, "train.lr", t.lr, "positive"),
        (t.grad_clip > 0, "train.grad_clip", t.grad_clip, "positive"),
        (t.warmup_steps >= 0, "train.warmup_steps", t.warmup_steps, "0 or positive"),
        (t.prompts_per_step >= 1, "train.prompts_per_step", t.prompts_per_step, "at least 1"),
        (per_update >= 1 and t.prompts_per_step % per_update == 0, "train.mini_batch_prompts", t.mini_batch_prompts, f"a divisor of train.prompts_per_step ({t.prompts_per_step})"),
        (t.tokens_per_micro_batch >= longest, "train.tokens_per_micro_batch", t.tokens_per_micro_batch, f"at least {longest}: data.max_prompt_tokens + rollout.max_tokens, the longest sequence there can be"),
        (len(t.betas) == 2 and all(0 <= beta < 1 for beta in t.betas), "train.betas", list(t.betas), "two numbers in [0, 1)"),
        (t.weight_decay >= 0, "train.weight_decay", t.weight_decay, "0 or positive"),
        (t.eval_every == 0 or len(config.data.eval) > 0, "data.eval", list(config.data.eval), "at least one source, or train.eval_every=0"),
        (e.train_problems >= 1, "eval.train_problems", e.train_problems, "at least 1"),
        (any(k <= e.train_samples for k in e.k), "eval.train_samples", e.train_samples, f"at least the smallest of eval.k ({min(e.k, default=1)})"),
        (e.select_by is None or e.select_by in {f"pass@{k}" for k in e.k if k <= e.train_samples}, "eval.select_by", e.select_by, "null or one of " + ", ".join(f"pass@{k}" for k in e.k if k <= e.train_samples)),
        (t.threads is None or t.threads >= 1, "train.threads", t.threads, "null (torch's choice) or at least 1"),
        (t.seed >= 0, "train.seed", t.seed, "0 or positive"),
        (t.log_samples >= 0, "train.log_samples", t.log_samples, "0 or positive"),
        (t.max_logprob_mismatch is None or t.max_logprob_mismatch > 0, "train.max_logprob_mismatch", t.max_logprob_mismatch, "null or positive"),
        *((getattr(p, axis) is None or getattr(p, axis) >= 1, f"parallel.{axis}", getattr(p, axis), "at least 1") for axis in ("dp_replicate", "dp_shard", "sp", "tp")),
        (p.timeout_s > 0, "parallel.timeout_s", p.timeout_s, "positive"),
        (not m.liger or p.tp == 1, "model.liger", m.liger, "false with parallel.tp > 1: its kernels cannot be split"),
        (not m.compile or p.tp == 1, "model.compile", m.compile, "false with parallel.tp > 1"),
        (not r.compile or r.engine == "torch", "rollout.compile", r.compile, "false with rollout.engine=vllm, which has its own way"),
        *((not on or t.async_steps == 0 or r.engine != "torch", key, on, "false with train.async_steps=1 and rollout.engine=torch: two threads cannot compile") for key, on in (("model.compile", m.compile), ("rollout.compile", r.compile))),
        (m.lora.rank >= 0, "model.lora.rank", m.lora.rank, "0 (off) or positive"),
        (m.lora.alpha > 0, "model.lora.alpha", m.lora.alpha, "positive"),
        (m.lora.rank == 0 or p.tp == 1, "model.lora.rank", m.lora.rank, "0 with parallel.tp > 1: adapters are not split"),
        (lo.kl_target is None or (lo.kl_target > 0 and lo.kl_in_reward), "loss.kl_target", lo.kl_target, "null, or positive with loss.kl_in_reward"),
        (0 < lo.gamma <= 1, "loss.gamma", lo.gamma, "in (0, 1]"),
        (0 <= lo.lam <= 1, "loss.lam", lo.lam, "in [0, 1]"),
        (lo.value_clip is None or lo.value_clip > 0, "loss.value_clip", lo.value_clip, "null (off) or positive"),
        (t.max_resamples >= 0, "train.max_resamples", t.max_resamples, "0 (off) or positive"),
        (t.max_resamples == 0 or r.group_size >= 2, "train.max_resamples", t.max_resamples, "0 with rollout.group_size=1: the rewards of one rollout are always equal"),
        (t.critic_lr > 0, "train.critic_lr", t.critic_lr, "positive"),
        (0 <= t.critic_warmup_steps < t.steps, "train.critic_warmup_steps", t.critic_warmup_steps, f"0 or positive, and below train.steps ({t.steps})"),
        (t.critic_warmup_steps == 0 or lo.recipe == "ppo", "train.critic_warmup_steps", t.critic_warmup_steps, "0 unless loss.recipe=ppo"),
        (config.data.max_prompt_tokens >= 1, "data.max_prompt_tokens", config.data.max_prompt_tokens, "at least 1"),
        (e.seed >= 0, "eval.seed", e.seed, "0 or positive"),
        (e.bootstrap >= 0, "eval.bootstrap", e.bootstrap, "0 (no intervals) or positive"),
        (e.temperature >= 0, "eval.temperature", e.temperature, "0 (greedy) or positive"),
        (0 < e.top_p <= 1, "eval.top_p", e.top_p, "in (0, 1]"),
        (e.top_k >= 0, "eval.top_k", e.top_k, "0 (off) or positive"),
        (e.max_tokens >= 1, "eval.max_tokens", e.max_tokens, "at least 1"),
        (e.context is None or e.profile == "custom", "eval.context", e.context, f"null with eval.profile={e.profile}, which has its own"),
        (t.save_every >= 1, "train.save_every", t.save_every, "at least 1"),
        (t.keep_checkpoints >= 1, "train.keep_checkpoints", t.keep_checkpoints, "at least 1"),
        (t.eval_every >= 0, "train.eval_every", t.eval_every, "0 (never) or positive"),
        (t.async_steps in (0, 1), "train.async_steps", t.async_steps, "0 or 1: rollouts of weights older than one step are not learnt from"),
        (t.max_resamples == 0 or t.async_steps == 0, "train.max_resamples", t.max_resamples, "0 with train.async_steps=1: the engine is busy with the next step"),
        (p.dp_replicate * (p.dp_shard or 1) * p.sp * p.tp == 1 or r.engine == "torch" or v.multiprocess, "rollout.vllm.multiprocess", v.multiprocess, "true with several processes: vLLM would take the trainer's process group for its own"),
        (r.tensor_parallel >= 1, "rollout.tensor_parallel", r.tensor_parallel, "at least 1"),
        (v.kv_cache_gb is None or v.kv_cache_gb > 0, "rollout.vllm.kv_cache_gb", v.kv_cache_gb, "null or positive"),
        (0 < v.gpu_memory_utilization <= 1, "rollout.vllm.gpu_memory_utilization", v.gpu_memory_utilization, "in (0, 1]"),
        (v.max_batched_tokens is None or v.max_batched_tokens >= r.max_rows, "rollout.vllm.max_batched_tokens", v.max_batched_tokens, f"null or at least rollout.max_rows ({r.max_rows})"),
        (v.devices is None or v.multiprocess, "rollout.vllm.devices", v.devices, "null unless rollout.vllm.multiprocess=true: a process has one set of devices"),
        (not v.sleep or m.device.startswith("cuda"), "rollout.vllm.sleep", v.sleep, "false unless model.device is a CUDA device"),
        (v.junior_device is None or m.device.startswith("cuda"), "rollout.vllm.junior_device", v.junior_device, "null unless model.device is a CUDA device"),
        (e.samples >= 1, "eval.samples", e.samples, "at least 1"),
        (e.train_samples >= 1, "eval.train_samples", e.train_samples, "at least 1"),
        (len(e.k) > 0 and all(1 <= k <= e.samples for k in e.k), "eval.k", list(e.k), f"non-empty, each between 1 and eval.samples ({e.samples})"),
        (len(config.data.train) > 0, "data.train", list(config.data.train), "at least one source"),
        (config.reward.workers is None or config.reward.workers >= 1, "reward.workers", config.reward.workers, "null (automatic) or at least 1"),
        (config.reward.timeout_s > 0, "reward.timeout_s", config.reward.timeout_s, "positive"),
        (config.sandbox.timeout_s > 0, "sandbox.timeout_s", config.sandbox.timeout_s, "positive"),
        (config.sandbox.program_timeout_s > 0, "sandbox.program_timeout_s", config.sandbox.program_timeout_s, "positive"),
        (config.sandbox.memory_mb >= 64, "sandbox.memory_mb", config.sandbox.memory_mb, "at least 64: the interpreter needs some of it"),
        (config.sandbox.file_mb >= 1, "sandbox.file_mb", config.sandbox.file_mb, "at least 1"),
        (config.sandbox.output_mb >= 1, "sandbox.output_mb", config.sandbox.output_mb, "at least 1"),
        (config.sandbox.processes >= 1, "sandbox.processes", config.sandbox.processes, "at least 1"),
        (config.reward.compat != "cohlem" or config.reward.countdown == "cohlem", "reward.countdown", config.reward.countdown, "cohlem with reward.compat=cohlem"),
        (config.reward.compat != "tinyzero" or config.reward.countdown == "tinyzero", "reward.countdown", config.reward.countdown, "tinyzero with reward.compat=tinyzero"),
        (config.judge.url is None or config.judge.url.startswith(("http://", "https://")), "judge.url", config.judge.url, "null or an address such as http://localhost:8000/v1"),
        (config.judge.api_key_env is None or config.judge.url is not None, "judge.api_key_env", config.judge.api_key_env, "null without judge.url"),
        (0 <= config.judge.weight <= 1, "judge.weight", config.judge.weight, "in [0, 1]"),
        (0 < config.judge.accept <= 1, "judge.accept", config.judge.accept, "in (0, 1]"),
        (len(set(config.judge.gates)) == len(config.judge.gates), "judge.gates", list(config.judge.gates), "without repeats"),
        (config.judge.temperature >= 0, "judge.temperature", config.judge.temperature, "0 (greedy) or positive"),
        (config.judge.retry_temperature > 0, "judge.retry_temperature", config.judge.retry_temperature, "positive: a greedy judge would repeat itself"),
        (config.judge.max_tokens >= 1, "judge.max_tokens", config.judge.max_tokens, "at least 1"),
        (config.judge.retries >= 0, "judge.retries", config.judge.retries, "0 (none) or positive"),
        (config.judge.backoff_s >= 0, "judge.backoff_s", config.judge.backoff_s, "0 or positive"),
        (config.judge.timeout_s > 0, "judge.timeout_s", config.judge.timeout_s, "positive"),
        (config.judge.concurrency >= 1, "judge.concurrency", config.judge.concurrency, "at least 1"),
        (0 <= config.judge.max_failure_rate < 1, "judge.max_failure_rate", config.judge.max_failure_rate, "in [0, 1)"),
    ]  # fmt: skip
    for key, value in _flatten(to_dict(config)).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: must be a finite number")
    for ok, key, value, allowed in rules:
        if not ok:
            raise ConfigError(f"{key}={value}: must be {allowed}")
    if (r.top_p < 1 or r.top_k > 0 or r.min_p > 0) and not r.allow_truncated:
        raise ConfigError(
            "rollout.top_p/top_k/min_p truncate the sampling distribution, which biases the trainer's ratios; set "
            "rollout.allow_truncated=true (the trainer then renormalises over the kept tokens) or switch them off"
        )


@dataclass(frozen=True)
class BatchPlan:
    """What the batch knobs mean, per training step. ``micro_batches`` is an upper bound, reached if every sequence has
    its full length."""

    prompts: int
    rollouts: int
    updates: int
    sequences_per_update: int
    max_tokens_per_sequence: int
    micro_batches: int

    def __str__(self) -> str:
        return (
            f"batch plan per step: {self.prompts} prompts -> {self.rollouts} rollouts -> {self.updates} update(s) of "
            f"{self.sequences_per_update} sequences, each <= {self.max_tokens_per_sequence} tokens, in at most "
            f"{self.micro_batches} micro-batch(es) per update"
        )


def batch_plan(config: Config) -> BatchPlan:
    """The batch plan of one training step.

    Example:
        >>> plan = batch_plan(load(overrides=["train.prompts_per_step=16", "train.mini_batch_prompts=8"]))
        >>> plan.rollouts, plan.updates, plan.sequences_per_update
        (128, 2, 64)
    """
    per_update = config.train.mini_batch_prompts or config.train.prompts_per_step
    sequences = per_update * config.rollout.group_size
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    per_micro_batch = max(1, config.train.tokens_per_micro_batch // longest)
    return BatchPlan(
        prompts=config.train.prompts_per_step,
        rollouts=config.train.prompts_per_step * config.rollout.group_size,
        updates=config.train.prompts_per_step // per_update,
        sequences_per_update=sequences,
        max_tokens_per_sequence=longest,
        micro_batches=math.ceil(sequences / per_micro_batch),
    )


# --------------------------------------------------------------------------------------------------------------------


_ABSENT = object()


def _refuse_unknown(tree: Any, schema: type, where: str, prefix: str = "") -> None:
    """Unknown keys are an error that names the key, the allowed ones and the nearest."""
    known = {f.name: f for f in fields(schema)}
    for key, value in (tree or {}).items():
        dotted = f"{prefix}{key}"
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" Did you mean {prefix}{close[0]}?" if close else ""
            raise ConfigError(f"{where}: unknown key {dotted!r}.{hint} Allowed here: {', '.join(sorted(known))}")
        inner = known[key].type
        if isinstance(inner, type) and is_dataclass(inner):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {dotted} is a section; set one of: {', '.join(f.name for f in fields(inner))}"
                )
            _refuse_unknown(value, inner, where, f"{dotted}.")


def _bad_value(where: str, key: str | None, source: Any, reason: str) -> str:
    """What is wrong with a value: the kind of value that its field takes, or else OmegaConf's ``reason``."""
    from omegaconf import OmegaConf

    is_override = where.partition("=")[1] != ""
    key = where.partition("=")[0] if is_override else key or _culprit(source)
    annotation: Any = Config
    for name in key.split("."):
        annotation = get_type_hints(annotation).get(name) if is_dataclass(annotation) else None
    if not (expected := _expected(annotation)):
        return f"{where}: {reason}"
    value = str(OmegaConf.select(source, key))
    close = difflib.get_close_matches(value, map(str, get_args(annotation)), n=1)
    shown = where if is_override else f"{where}: {key}={value}"
    return f"{shown}: expected {expected}{f'; did you mean {close[0]}?' if close else ''}"


def _culprit(source: Any) -> str:
    """The key of a file whose value alone is refused: OmegaConf does not name it where it is in a list."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, value in _flatten(OmegaConf.to_container(source)).items():  # type: ignore[arg-type]  # a mapping by now
        alone = OmegaConf.create()
        OmegaConf.update(alone, key, value)
        try:
            OmegaConf.merge(OmegaConf.structured(Config), alone)
        except OmegaConfBaseException:
            return key
    return ""


def _expected(annotation: Any) -> str:
    """The values that a field of this type takes, in words; "" where there are none for it."""
    kinds, origin = get_args(annotation), get_origin(annotation)
    if origin is Literal:
        return f"one of {', '.join(kinds)}"
    if origin is UnionType:
        return " or ".join(filter(None, map(_expected, kinds)))
    if origin is tuple:
        return f"a list such as [a, b], each {_expected(kinds[0])}"
    return _KINDS.get(annotation, "")


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    dict[str, str]: "a mapping such as {a: b}",
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
