"""The configuration of a run: its sections, as frozen dataclasses with defaults.

The string under a field explains it. The type says what values it takes, ``Allowed`` their range. ``tandemrl config``
prints all of this. No module of this folder imports torch.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from tandemrl.config.fields import (
    Address,
    Allowed,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    at_home,
)
from tandemrl.config.losses import LossConfig
from tandemrl.config.rewards import JudgeConfig, RewardConfig, SandboxConfig
from tandemrl.config.rollout import RetrievalConfig, RolloutConfig
from tandemrl.config.selection import SelectionConfig


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (needs the `lora` extra). Exports in hf/ and the engine get merged weights. `hf/step_N/adapter`
    has the adapters alone, in float32, for `peft.PeftModel.from_pretrained(BASE, "hf/step_N/adapter")`. If the junior
    is the senior's base, in the same dtype and on the same device, the engine gets the adapters alone and applies them
    to the junior's weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 = no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of modules, such as q_proj; `all-linear` = every linear layer but the LM head."""
    dropout: Annotated[float, Allowed("in [0, 1)", lambda p: 0 <= p < 1)] = 0.0
    """Dropout on an adapter's inputs: the fraction that is dropped, drawn anew in each forward pass of an update and
    used nowhere else. Above 0 the gradient depends on how a step is split into micro-batches and over processes."""


@dataclass(frozen=True)
class JuniorEndpointConfig:
    """A junior behind an OpenAI-compatible endpoint with /completions, such as `vllm serve MODEL`. Then `model.junior`
    is where its tokenizer and chat template are; its weights are not loaded. It works as with two vocabularies."""

    url: Address | None = None
    """Address such as http://localhost:8000/v1; null = the junior is loaded."""
    model: str | None = None
    """The junior's name at the endpoint; null = the first one listed."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    attempts: PositiveInt = 8
    """How often words are asked for, each time with another seed, until the answer begins with a word. After the last
    one the rollout has failed, and is not scored."""
    retries: NonNegativeInt = 3
    """Retries if the endpoint fails."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the first retry, in seconds; it doubles each time."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of one attempt."""
    concurrency: PositiveInt = 64
    """Requests in flight at once."""
    leave_out: tuple[
        Literal[
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "skip_special_tokens",
            "samplers",
            "mirostat",
            "dynatemp_range",
        ],
        ...,
    ] = ()
    """Fields of a request that the endpoint refuses, by HTTP 400. Each is sent with the value that switches it off,
    unless `rollout` or `eval` sets it, so that no default of the server changes how the junior samples."""
    max_failure_rate: Annotated[float, Allowed("in [0, 1)", lambda x: 0 <= x < 1)] = 0.1
    """Stop if more than this fraction of the rollouts that are written together fail, where one is always tolerated
    unless this is 0. Below the limit, such rollouts are not used in training."""


@dataclass(frozen=True)
class ModelConfig:
    """The models: which ones, where, and how they compute."""

    senior: str = "runs/tiny/senior"
    """HF folder or hub id of the trained model."""
    junior: str | None = None
    """HF folder or hub id of the frozen partner; null = the senior's initial weights ("self-paired")."""
    junior_endpoint: JuniorEndpointConfig = field(default_factory=JuniorEndpointConfig)
    critic: str | None = None
    """HF folder or hub id of the value model of `loss.recipe: ppo`; null = the senior's initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of every forward pass. Trained weights and optimiser state are float32 ("master") in both cases."""
    device: str = "auto"
    """A torch device; auto = cuda if there is one, else cpu. Several processes each take a device of their own."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    liger: bool = False
    """CUDA: compute RMSNorm, SwiGLU and RoPE with Liger's kernels (needs the `liger` extra)."""
    compile: bool = False
    """torch.compile of the layers: faster updates after a first step that takes tens of seconds; not for decoding."""
    activation_offload: bool = False
    """Keep the activations that the backward pass needs in host memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class DataConfig:
    """The problems: training and held-out rows, and how they become prompts."""

    train: Annotated[tuple[str, ...], Allowed("at least one source", bool)] = ("synthetic:plain:train",)
    """JSONL/Parquet files, `synthetic:PAIR:SPLIT`, `gym:NAME:SPLIT:N` (reasoning-gym), or `hf:REPO:CONFIG:SPLIT`."""
    eval: tuple[str, ...] = ("synthetic:plain:heldout",)
    """Sources of the held-out evaluation during training, in the same form as `train`. It chooses `hf/best`."""
    monitor: tuple[str, ...] = ()
    """Sources that are evaluated at the same steps and in the same way, and only recorded (`monitor/…`), such as
    benchmarks to be reported: they never choose `hf/best`."""
    columns: Annotated[
        dict[str, str],
        Allowed(
            "columns of prompt, ground_truth, data_source and ability",
            {"prompt", "ground_truth", "data_source", "ability"}.issuperset,
        ),
    ] = field(default_factory=dict)
    """The columns of files and hub sets that have other names than ours, e.g. {prompt: question, ground_truth: answer}.
    Without it, `prompt`, `question` or `problem` is the prompt, and `ground_truth`, `answer` or `solution` the answer.
    All other columns are in `extra_info`."""
    limit: PositiveInt | None = None
    """Train on this many rows only, the first ones of `train`; null = all. For trials."""
    order: Literal["shuffled", "by_hops"] = "shuffled"
    """Order of the training prompts in an epoch. shuffled: at random; by_hops: questions with few hops first,
    shuffled among those with the same number of hops."""
    max_prompt_tokens: PositiveInt = 1024
    """Rows whose templated prompt is longer are dropped and counted."""
    prompt_suffix: str = ""
    """Text that is appended to the last user message of every row, in training and evaluation alike."""
    template_arguments: dict[str, Any] = field(default_factory=lambda: {"enable_thinking": False})
    """Variables of the senior's chat template, beside the messages and the tools (chat_template_kwargs elsewhere), in
    training and evaluation alike, e.g. {enable_thinking: true}; null = this one is not passed. One that the template
    does not read is refused. Rendered prompts have no template."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how fast, in which batches, and what is written."""

    steps: PositiveInt = 50
    """Training steps; each samples prompts_per_step prompts."""
    epochs: PositiveFloat | None = None
    """Passes through the training prompts, in place of `steps`, which is then computed: an epoch has as many steps as
    there are whole batches of prompts_per_step. null = `steps` counts."""
    seed: NonNegativeInt = 0
    """Seed of the order of the prompts and of every draw in a rollout."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    betas: Annotated[
        tuple[float, float],
        Allowed("two numbers in [0, 1)", lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
    ] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine that would reach 0 one step after the last."""
    prompts_per_step: PositiveInt = 16
    """Prompts sampled per step; each gets rollout.group_size rollouts."""
    mini_batch_prompts: PositiveInt | None = None
    """Prompts per optimiser step; null = all of prompts_per_step (one on-policy update)."""
    max_resamples: NonNegativeInt = 0
    """Dynamic sampling (DAPO): prompts whose rewards are all equal are replaced by others, at most this many times."""
    critic_lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic, with ppo."""
    critic_warmup_steps: int = 0
    """Number of initial steps in which only the critic is trained."""
    tokens_per_micro_batch: int = 8192
    """Maximum number of tokens in one forward and backward pass. It bounds memory and does not change the gradient."""
    save_every: PositiveInt = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_exports: PositiveInt | None = 5
    """How many of the newest hf/step_N are kept, beside those whose checkpoint is kept; null = all. hf/best always
    stays. Each export takes two bytes per parameter in bfloat16, four in float32; `--dry-run` prints the sum."""
    eval_every: NonNegativeInt = 20
    """Steps between held-out evaluations; 0 = never."""
    eval_first: bool = False
    """Also evaluate before the first step. Its line in metrics.jsonl is that of step 0, and it can be `hf/best`."""
    select_by: Literal["pass@k", "reward"] | None = None
    """What chooses hf/best, averaged over the data sources; of equal ones the later step. `pass@k`: at the largest of
    `eval.k` that is neither above `eval.train_samples` nor above 4, or else at the first one that is not above
    `eval.train_samples`. `reward`: the mean reward. null = reward if rewards are graded (two correct or two wrong
    responses to one source had different rewards, in an evaluation or before it), else pass@k."""
    max_logprob_mismatch: PositiveFloat | None = None
    """Stop if the mean |trainer - engine| log-prob difference on senior tokens exceeds this, in nats. null = 1e-3 in
    float32; in bfloat16 four times as far as rounding moves the senior's log-probs (measured at the start), and at
    least 2e-2."""
    async_steps: Annotated[int, Allowed("between 0 and 8", lambda n: 0 <= n <= 8)] = 0
    """How many steps ahead rollouts are generated, so with weights that are so many steps old. 1 = those of the next
    step, during the update of this one; more than 1 requires `rollout.workers`; 0 = off."""
    profile: bool = False
    """Write traces of one step to output_dir/profile, and the seconds of inner phases, too, to metrics.jsonl."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Also log metrics and samples to Weights & Biases (needs the `wandb` extra). Its own variables are read:
    WANDB_PROJECT (else tandemrl), WANDB_NAME (else the last part of output_dir), WANDB_TAGS, WANDB_RUN_GROUP."""
    log_samples: NonNegativeInt = 4
    """How many samples a logged table shows. samples.jsonl has every rollout regardless."""
    threads: PositiveInt | None = None
    """torch CPU threads; null = torch's default."""
    deterministic: bool = False
    """On a GPU, use kernels that add in a fixed order, which are slower; a warning names an operation that has none.
    Without them, no run repeats bit for bit there. On a CPU, runs repeat anyway."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the processes that torchrun started share one run; their number is the product of the axes."""

    dp_replicate: PositiveInt = 1
    """Groups of processes that each hold a whole copy of the weights."""
    dp_shard: PositiveInt | None = None
    """Processes that each hold a part of the weights and see other rollouts (FSDP); null = what the others leave."""
    tp: PositiveInt = 1
    """Processes that share every matrix (tensor parallelism)."""
    sp: PositiveInt = 1
    """Processes that share every sequence (Ulysses sequence parallelism)."""
    offload_parameters: bool = False
    """With several processes: keep weights in host memory and gather them on the device layer by layer (FSDP2).
    Gradients and the optimiser's state are then in host memory, too, and the optimiser steps there."""
    offload_optimizer: bool = False
    """Keep the optimiser's state in host memory between its steps, which are made on the device. Gradients are not
    kept: they are freed with each step."""
    timeout_s: PositiveFloat = 1800.0
    """How long a process waits for the others before it gives up. With several processes, it is also the longest time
    that a process may make no progress before it is killed (see `watchdog`). It must exceed the longest single
    operation, such as a checkpoint."""


@dataclass(frozen=True)
class EvalConfig:
    """How models are evaluated, during training and by `tandemrl eval`."""

    profile: Literal["tiny", "paper", "custom"] = "tiny"
    """The sampling of every phase. `tiny`: temperature 1, 64 tokens; `paper`: temperature 0.7, top_p 0.8, top_k 20,
    3000 tokens; `custom`: temperature, top_p, top_k, max_tokens and context of this section."""
    samples: PositiveInt = 8
    """Samples per problem, with `tandemrl eval`."""
    k: tuple[int, ...] = (1, 2, 4, 8)
    """The k of pass@k and maj@k."""
    seed: NonNegativeInt = 17
    """Seed of every draw. All phases and checkpoints get the same random numbers."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature with `profile: custom`; 0 = greedy."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling with `profile: custom`; 1 = off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most probable tokens with `profile: custom`; 0 = off."""
    max_tokens: PositiveInt = 64
    """Maximum response length in tokens, with `profile: custom`."""
    context: int | None = None
    """Maximum number of tokens of prompt and response together, with `profile: custom`; null = no limit."""
    train_samples: PositiveInt = 4
    """Samples per problem in the evaluations during training."""
    train_problems: PositiveInt = 128
    """Problems per source of data.eval and data.monitor in the evaluations during training."""
    bootstrap: NonNegativeInt = 2000
    """Resamples of the bootstrap intervals over problems; 0 = no intervals."""

    @property
    def unread(self) -> tuple[str, ...]:
        """The assignments of a custom profile's sampling beside another profile, which does not read them."""
        if self.profile == "custom":
            return ()
        values = ((key, getattr(self, key)) for key in CUSTOM_SAMPLING)
        return tuple(f"eval.{key}={value}" for key, value in values if value != CUSTOM_SAMPLING[key])


CUSTOM_SAMPLING = {
    key: getattr(EvalConfig(), key) for key in ("temperature", "top_p", "top_k", "max_tokens", "context")
}
"""The keys of `EvalConfig` that only ``profile: custom`` reads, with their defaults."""


@dataclass(frozen=True)
class FunctionRecord:
    """A record of a Python function that a run was given, since a file cannot hold the function."""

    name: str = ""
    """Where the function was defined; for a recipe, what differs from the library's."""
    signature: str = ""
    """Hash of its module's source and of the values that it is made with."""


@dataclass(frozen=True)
class FunctionsConfig:
    """Functions passed to `train` in place of config keys. `train` writes this section. A config with an entry trains
    only with the same function. null = the config's own keys are used."""

    recipe: FunctionRecord | None = None
    """`train(recipe=...)`, in place of loss.recipe."""
    strategy: FunctionRecord | None = None
    """`train(strategy=...)`, in place of selection.*."""
    reward: FunctionRecord | None = None
    """`train(reward=...)`, in place of the library's choice for rows without an entry in reward.scorers."""
    environment: FunctionRecord | None = None
    """`train(environment=...)`, in place of rollout.environment."""
    engine: FunctionRecord | None = None
    """`train(engine=...)`; rollout.engine then says where it was defined."""


PATHS = {
    "model": ("senior", "junior", "critic"),
    "data": ("train", "eval", "monitor"),
    "judge": ("model", "template"),
    "retrieval": ("index", "model"),
}
"""The keys of each section that can be paths."""


@dataclass(frozen=True)
class Config:
    """The configuration of a run. A YAML file and the command line say what differs from these defaults."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
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
    """Folder of the run: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/ and hf/."""

    def __post_init__(self) -> None:
        """Write the home folder in place of a ``~`` that begins a path."""
        object.__setattr__(self, "output_dir", at_home("output_dir", self.output_dir))
        for section, names in PATHS.items():
            old = getattr(self, section)
            values = {name: at_home(f"{section}.{name}", getattr(old, name)) for name in names}
            if any(value != getattr(old, name) for name, value in values.items()):
                object.__setattr__(self, section, replace(old, **values))

    @property
    def has_episodes(self) -> bool:
        """Whether the authors take turns with an environment."""
        return self.rollout.environment_kind.turns or self.functions.environment is not None

    @property
    def response_tokens(self) -> int:
        """The most tokens after a prompt: those of the authors, and what an environment says between their turns."""
        return self.rollout.max_tokens + (self.rollout.observation_tokens if self.has_episodes else 0)

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a rollout, including its prompt."""
        return self.data.max_prompt_tokens + self.response_tokens
