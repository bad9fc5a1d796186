"""The configuration of a run: its sections, as frozen dataclasses with defaults.

The string under a field explains it. The type says what values it takes, ``Allowed`` their range. ``tandemrl config``
prints all of this. What values contradict each other is in ``compatibility``. No module of this folder imports torch.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from tandemrl.config import recipes, strategies
from tandemrl.config.components import ENGINES, ENVIRONMENTS, RETRIEVERS, EngineKind, EnvironmentKind, RetrieverKind
from tandemrl.config.fields import (
    Address,
    Allowed,
    DraftTokens,
    FailureRate,
    Fraction,
    HostEvery,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    at_home,
    component,
    is_own,
)

UNIT_GROUPS = 4
"""What ``rollout.unit_groups: null`` stands for with workers."""
_OMISSIBLE = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "skip_special_tokens"),
    *("samplers", "mirostat", "dynatemp_range"),
)


_PARTS = {"prompt", "ground_truth", "data_source", "ability"}
_COLUMNS = Allowed("columns of prompt, ground_truth, data_source and ability", _PARTS.issuperset)


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
    leave_out: Annotated[tuple[str, ...], Allowed(f"some of {', '.join(_OMISSIBLE)}", set(_OMISSIBLE).issuperset)] = ()
    """Fields of a request that the endpoint refuses, by HTTP 400. Each is sent with the value that switches it off,
    unless `rollout` or `eval` sets it, so that no default of the server changes how the junior samples."""
    max_failure_rate: FailureRate = 0.1
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
    columns: Annotated[dict[str, str], _COLUMNS] = field(default_factory=dict)
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
class VllmConfig:
    """Rollouts by `rollout.engine: vllm`."""

    multiprocess: bool = False
    """Run the engine in a process of its own, instead of in the trainer's; required with several trainer
    processes."""
    devices: str | None = None
    """CUDA devices of that process, e.g. "1" or "2,3"; null = the trainer's, and with `rollout.tensor_parallel` those
    after it. Must be null with several trainer processes, and with `rollout.workers`, whose devices are Ray's to
    choose."""
    kv_cache_gb: PositiveFloat | None = None
    """Size of the KV cache of both models, in GB; null = 1 GB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    gpu_memory_utilization: PositiveFraction = 0.5
    """Fraction of the GPU's memory that the engine may use, models included. The trainer needs the rest."""
    sleep: bool = False
    """CUDA: release the engine's memory to the trainer between rollouts."""
    max_batched_tokens: int | None = None
    """Maximum number of tokens per scheduler step; null = at least 2048 and rollout.max_rows, and on a CPU the whole
    context."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs. null = true on a CPU, false on a GPU."""
    junior_dtype: str | None = None
    """The junior's dtype, as vLLM's --dtype; null = the senior's."""
    junior_quantization: str | None = None
    """The junior's quantisation, as vLLM's --quantization; null = as the model's config says."""
    junior_device: str | None = None
    """Another CUDA device for the junior, e.g. "cuda:1", so that both models compute at the same time. Must be
    null with several trainer processes, and with `rollout.workers`."""


@dataclass(frozen=True)
class AgentConfig:
    """A program that asks the models itself, with `rollout.environment: agent`. `max_tokens`, `turn_tokens`,
    `max_turns` (requests) and `observation_tokens` bound what it may ask for."""

    run: tuple[str, ...] = ()
    """A command such as [python, my_agent.py], which gets a row as JSON on its standard input, OPENAI_BASE_URL and
    OPENAI_API_KEY; or [module:function], a coroutine function."""
    scores: bool = False
    """Whether it ends with its reward. Else it ends with an answer, or nothing, and the row says how that is scored."""
    timeout_s: PositiveFloat = 600.0
    """An episode that takes longer is ended, with all its processes, and has no score."""
    at_once: PositiveInt = 64
    """Episodes that run at once."""
    max_failed: Fraction = 0.5
    """If more than this share of the episodes of a step fail (crash, take too long, do not ask), the run ends. Fewer
    are left out."""


@dataclass(frozen=True)
class RolloutConfig:
    """How rollouts are sampled, and by which engine."""

    engine: Annotated[str, component(ENGINES)] = "torch"
    """What decodes. `module:name` = a custom function or class that makes an Engine."""
    engine_parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom engine."""
    group_size: PositiveInt = 8
    """Rollouts per prompt. They are the group within which advantages are computed."""
    temperature: Annotated[float, Allowed("positive: greedy rollouts have no policy gradient", lambda x: x > 0)] = 1.0
    """Sampling temperature of both authors."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: the most probable tokens that together have this probability; 1 = off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most probable tokens; 0 = off."""
    min_p: Fraction = 0.0
    """Leave out tokens that are less probable than this fraction of the highest probability; 0 = off."""
    max_tokens: PositiveInt = 64
    """Maximum response length, in tokens of both authors together, over all turns if there are several."""
    environment: Annotated[str, component(ENVIRONMENTS)] = "single"
    """What the authors act in. `module:name` = a custom function or class that makes an Environment."""
    environment_parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom environment."""
    tools: tuple[str, ...] = ()
    """Functions that the authors can call, as `module:function`. `multihop` has its own tools; these are added."""
    max_turns: PositiveInt = 10
    """Maximum number of turns of an episode, in environments other than `single`."""
    turn_tokens: PositiveInt | None = None
    """Maximum length of a turn, in tokens; null = `rollout.max_tokens`."""
    observation_tokens: PositiveInt = 2048
    """Maximum number of tokens of all observations of an episode together. An episode that would need more ends there,
    even by a single result if `result_tokens` is larger."""
    result_tokens: PositiveInt = 512
    """Maximum number of tokens of a tool's result. A longer one is cut, with a mark at the place."""
    tool_timeout_s: PositiveFloat = 30.0
    """If the calls of a turn are not all answered after this many seconds, their process is killed, and the author is
    told. Calls of several episodes that run in one process at once share its interpreter."""
    tool_workers: PositiveInt | None = None
    """Processes that tools run in, with `rollout.workers` those of each; null = one per core, but at most two."""
    keep_turns: bool = False
    """Permit a chat template that rewrites earlier turns once later ones follow, as Qwen3's leaves out their thoughts.
    All turns then stay as they were generated, so that the models read some tokens more than the template would
    show."""
    max_rows: PositiveInt = 256
    """Maximum number of concurrent sequences."""
    host_every: HostEvery = "auto"
    """With the torch engine: how many tokens each sequence gets before the host looks at them, ends sequences and lets
    others join. The text is the same. On CUDA the steps between run as a CUDA graph. With penalties or `before_word`
    the host looks at each token all the same. auto: 16 on CUDA, 1 on a CPU."""
    draft_tokens: DraftTokens = 0
    """Tokens that the junior drafts, whoever their author is, before the senior reads them all at once and draws its
    own tokens again. The text is the same, with fewer forward passes of a senior that costs more than its junior. auto:
    as many as should pay off, by the sizes of the models, the number of sequences and how often both draw the same
    token; 0 = off."""
    tensor_parallel: PositiveInt = 1
    """With the vllm engine: tensor-parallel ranks per model; several trainer processes need 1."""
    workers: NonNegativeInt = 0
    """Ray actors that decode, each with an engine of its own (needs the `ray` extra); 0 = decode in this process."""
    ray: str = "auto"
    """With workers: where they run. local: on a Ray cluster of our own on this machine, which starts and ends with the
    run; an address: on the cluster there; auto: on the cluster that the job was submitted to (`RAY_ADDRESS`), else
    local."""
    unit_groups: PositiveInt | None = None
    """Groups that are decoded together, apart from all others, and take turns with an environment in rounds. A run with
    the same units has the same bits with any number of workers. null = 4 with workers, without them all groups of a
    step, whose turns wait for nobody's."""
    worker_timeout_s: PositiveFloat = 600.0
    """A worker that has not started, or not loaded weights and decoded a unit, in this time is restarted."""
    allow_truncated: bool = False
    """Permit top_p, top_k and min_p in training. The trainer then also renormalises over the kept tokens."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)

    @property
    def kind(self) -> EngineKind:
        """What the engine can do. Those of workers are in no trainer."""
        kind = EngineKind(self.engine, self.engine, "") if is_own(self.engine) else ENGINES[self.engine]
        return kind._replace(in_trainer=False) if self.workers else kind

    @property
    def units(self) -> int | None:
        """How many groups are decoded together; None = all of a call."""
        return self.unit_groups or (UNIT_GROUPS if self.workers else None)

    @property
    def environment_kind(self) -> EnvironmentKind:
        """What the environment is."""
        name = self.environment
        return EnvironmentKind(name, name, "") if is_own(name) else ENVIRONMENTS[name]


@dataclass(frozen=True)
class RetrievalConfig:
    """Search among documents, with `rollout.environment: multihop`."""

    retriever: Annotated[str, component(RETRIEVERS)] = "bm25"
    """How documents are found. `module:name` = a custom function that returns a retriever."""
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom retriever."""
    top_n: PositiveInt = 2
    """How many documents a search returns if the author does not say."""
    index: str | None = None
    """With bm25: a folder that `tandemrl data index` wrote, to search in this corpus; null = search in the documents of
    the row. The documents that support a row's answer must be in the corpus, under the same id."""
    merge: Literal["rrf", "halves"] = "rrf"
    """With hybrid: how the two rankings are merged. rrf: by the sum of 1 / (60 + rank); halves: as in rlvr, the first
    top_n / 2 + 1 documents of each ranking, semantic ones first, so up to top_n 2 only these."""
    model: str | None = None
    """With semantic and hybrid: HF folder or hub id of a cross-encoder or an embedding model, which
    sentence-transformers loads in each process that tools run in; with `url`, its name there."""
    device: str = "cpu"
    """The torch device of `model`."""
    url: Address | None = None
    """Address of a service with POST /rerank, to use instead of a model in the process; with search, of one with POST
    /search."""
    api: Literal["cohere", "tei"] = "cohere"
    """What is sent to `url`. cohere: {query, documents, model, top_n}, as Cohere, vLLM and others take it; tei: {query,
    texts}, as text-embeddings-inference takes it."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key; null = no key is sent."""
    timeout_s: PositiveFloat = 5.0
    """Time limit of one attempt."""
    retries: NonNegativeInt = 2
    """Retries if the service fails; after the last one the run stops."""
    backoff_s: NonNegativeFloat = 0.5
    """Wait before the first retry, in seconds; it doubles each time."""

    @property
    def kind(self) -> RetrieverKind:
        """What the retriever needs."""
        name = self.retriever
        return RetrieverKind(name, name, "") if is_own(name) else RETRIEVERS[name]

    @property
    def patience_s(self) -> float:
        """How long a service may take for one search, with all attempts."""
        waits: int = 2**self.retries - 1
        return (1 + self.retries) * self.timeout_s + self.backoff_s * waits


@dataclass(frozen=True)
class SelectionConfig:
    """Who generates which token."""

    strategy: Annotated[str, component(strategies.KINDS)] = "word"
    """When the author changes. `module:name` = a custom function that returns a Strategy."""
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom strategy. Those that have the name of a key below get its value."""
    prob_senior: Annotated[
        float, Allowed("in (0, 1]: without senior tokens nothing is trained", lambda p: 0 < p <= 1)
    ] = 0.5
    """p: probability that a draw falls to the senior."""
    max_gap_tokens: PositiveInt = 32
    """K: `word` redraws at the latest this many tokens after the last draw, `word_aligned` at the next safe place."""
    chunk_size: PositiveInt = 16
    """Tokens that an author generates at a time, with `chunk`."""
    first: Literal["senior", "junior"] = "senior"
    """Who starts (`sentence`, `chunk`, `alternating`, `alternating_turns`) or who generates everything (`solo`)."""
    prob_senior_final: PositiveFraction | None = None
    """With `anneal_steps`: prob_senior moves linearly to this value."""
    draws: Literal["per_rollout", "per_group"] = "per_rollout"
    """Whether each rollout draws its authors, or all of a group draw the same: then, as far as their texts take the
    same course, the luck of the draws cancels in the advantage."""
    max_untranslatable: Fraction = 0.01
    """Two vocabularies: stop if more than this share of a step's rollouts cannot be expressed in both (beyond chance,
    6σ). Such rollouts are not scored and not trained on."""
    anneal_steps: NonNegativeInt = 0
    """Training steps in which prob_senior moves to prob_senior_final; 0 = it stays."""

    @property
    def kind(self) -> strategies.Kind:
        """What the strategy says of itself. One of the user's own may read every key, and needs a junior."""
        own = strategies.Kind(
            self.strategy, self.strategy, "", ("prob_senior", "max_gap_tokens", "chunk_size", "first")
        )
        return own if is_own(self.strategy) else strategies.KINDS[self.strategy]


@dataclass(frozen=True)
class LossConfig:
    """What is optimised: the recipe, and what replaces or extends it. If a key takes null, that means the recipe's own
    value, unless its explanation says otherwise."""

    recipe: Annotated[str, component(recipes.KINDS)] = "grpo"
    """The algorithm: advantage, surrogate, reduction and clip range. `module:name` = a custom Recipe, or a function
    that returns one."""
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom recipe that is a function."""
    junior_weight: Fraction = 0.0
    """Loss weight of the junior's tokens: 0 = tandem GRPO, 1 = plain GRPO on every token."""
    word_ends: bool = True
    """With `before_word`: a senior that ends its word, where the junior takes over, has made a choice, which is trained
    like a token of its own. false leaves it out; the gradient is then biased."""
    clip_low: Fraction | None = None
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """The probability ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Allowed("0 (off) or above 1", lambda x: x == 0 or x > 1)] | None = None
    """Bound of the loss at negative advantages; 0 = off."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the initial policy, or to what `kl_to` says; 0 = off."""
    kl_to: Literal["initial", "junior"] = "initial"
    """Whom that KL is to. junior: on all trained tokens, also of a senior that writes alone. With kl_kind=k2 this is
    on-policy distillation: the negative reverse KL of each token is added to its advantage."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL in the loss: Schulman's k2 or k3. The gradient of k1 has expectation 0 there."""
    kl_in_reward: bool = False
    """Subtract the KL (always k1, summed over trained tokens) from the reward instead of adding it to the loss."""
    junior_kl_coef: NonNegativeFloat = 0.0
    """λ_jun: coefficient of a KL that pulls the senior towards the junior on the junior's tokens (0 in the paper)."""
    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus on trained tokens; 0 = off."""
    normalise_by: Literal["weight", "response"] = "weight"
    """What the loss is divided by. weight: the sum of the token weights; response: the number of response tokens,
    whoever generated them."""
    reduction: recipes.Reduction | None = None
    """How the losses of tokens become one number. token_mean: the mean over tokens (DAPO); sequence_mean_token_mean:
    the mean over sequences of each one's mean (GRPO as first published); sequence_mean_token_sum: the mean over
    sequences of each one's sum; token_sum_constant: the same, divided by rollout.max_tokens (Dr. GRPO). The critic's
    loss is reduced in the same way."""
    importance: recipes.Importance | None = None
    """Level of truncated importance sampling (TIS) of the trainer's log-probs against the engine's."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: the maximum weight, to which larger ones are clipped."""
    overlong_buffer: int | None = None
    """DAPO's overlong penalty: it grows over the last `overlong_buffer` tokens before rollout.max_tokens; 0 = off."""
    filter_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the update."""
    filter_truncated: bool = False
    """Leave rollouts that `rollout.max_tokens` cut off out of the loss (DAPO's overlong filtering). Their rewards still
    count in the baselines of their groups."""
    kl_target: float | None = None
    """With kl_in_reward: adapt kl_coef so that the KL per trained token becomes this, in nats; null = fixed."""
    gamma: PositiveFraction = 1.0
    """With ppo: discount per trained token."""
    lam: Fraction = 0.95
    """With ppo: λ of generalised advantage estimation."""
    value_clip: PositiveFloat | None = 0.5
    """With ppo: how far the critic's values may move per update before they are clipped; null = no clipping."""

    @property
    def kind(self) -> recipes.Recipe:
        """What is known of the recipe before it is made: of one of the user's own, nothing."""
        own = recipes.Recipe(self.recipe, "", "", "token_mean")
        return own if is_own(self.recipe) else recipes.KINDS[self.recipe]

    @property
    def loss_kl_coef(self) -> float:
        """The coefficient of the KL in the loss."""
        return 0.0 if self.kl_in_reward else self.kl_coef


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
    `tandemrl eval verified`. It is off unless `url` is set."""

    url: Address | None = None
    """OpenAI-compatible endpoint such as http://localhost:8000/v1."""
    wait_s: NonNegativeFloat = 0.0
    """Seconds to wait at the start for an endpoint that does not answer yet, while its server loads the model."""
    model: str | None = None
    """The model's name at the endpoint; null = the first one listed."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key; null = no key is sent."""
    prompt: Literal["rubric", "rrm", "tinyv", "reasoning", "legibility"] = "rubric"
    """What the judge is asked. `rubric`: score the whole response by the row's criteria, out of 10; `rrm`: the same in
    the words of the published rubric reward model, for a judge that was trained to reply to them; `tinyv`: whether the
    extracted answer equals the reference answer, true or false; `reasoning`: score how sound the whole response is, out
    of 10, without criteria; `legibility`: how well the whole response can be followed, from 0 to 4."""
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
    """How often a prompt is sent again at most, after the endpoint failed or its reply held no score (then at
    `retry_temperature`)."""
    retry_temperature: Annotated[float, Allowed("positive: a greedy judge would repeat itself", lambda x: x > 0)] = 0.3
    """Sampling temperature after a reply without a score."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the first retry, in seconds; it doubles each time."""
    timeout_s: PositiveFloat = 120.0
    """Time limit of one attempt."""
    concurrency: PositiveInt = 64
    """Requests in flight at once."""
    max_failure_rate: FailureRate = 0.1
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
    """How long a process waits for the others before it gives up, which ends the run. It must exceed the longest time
    that one of them works alone, such as on a checkpoint."""


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
    readers: tuple[str, ...] = ()
    """Models that read the senior's texts (phases transfer, surprise, …): folders or hub ids, of any tokenizer, or
    MODEL@URL for one that an OpenAI-compatible endpoint with /completions serves."""
    draws: NonNegativeInt = 256
    """Phase transfer: how often a reader goes on from a text, at most, and begins alone, for a label; 0 = no labels. A
    text is done as soon as it is decided, or after a quarter of the draws if all of them would hardly decide it."""
    bootstrap: NonNegativeInt = 2000
    """Resamples of the bootstrap intervals over problems; 0 = no intervals."""
    branches: PositiveInt = 16
    """`eval handover-effect`: how often a text is finished from each place, by the senior and after a handover."""
    handover: Literal["step", "word", "rest"] = "step"
    """`eval handover-effect`: what the junior writes there before the senior goes on."""

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
    "eval": ("readers",),
    "judge": ("template",),
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
        object.__setattr__(self, "output_dir", at_home(self.output_dir))
        for section, names in PATHS.items():
            old = getattr(self, section)
            paths = {name: at_home(getattr(old, name)) for name in names}
            object.__setattr__(self, section, replace(old, **paths))

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
