"""The settings of rollouts: engine, environment, search. No torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandemrl.config.components import (
    ENGINES,
    ENVIRONMENTS,
    RETRIEVERS,
    EngineKind,
    EnvironmentKind,
    RetrieverKind,
    engine_kind,
    environment_kind,
    retriever_kind,
)
from tandemrl.config.fields import (
    Address,
    Allowed,
    DraftTokens,
    Fraction,
    HostEvery,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    component,
)

UNIT_GROUPS = 4
"""What ``rollout.unit_groups: null`` stands for with workers."""


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
    compile: bool = False
    """With the torch engine: torch.compile of the decoding step, 1.5 times as fast for tiny models after a minute."""
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

    @property
    def kind(self) -> EngineKind:
        """What the engine can do. Those of workers are in no trainer."""
        kind = engine_kind(self.engine)
        return kind._replace(in_trainer=False) if self.workers else kind

    @property
    def units(self) -> int | None:
        """How many groups are decoded together; None = all of a call."""
        return self.unit_groups or (UNIT_GROUPS if self.workers else None)

    @property
    def environment_kind(self) -> EnvironmentKind:
        """What the environment is."""
        return environment_kind(self.environment)


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
        return retriever_kind(self.retriever)

    @property
    def patience_s(self) -> float:
        """How long a service may take for one search, with all attempts."""
        waits: int = 2**self.retries - 1
        return (1 + self.retries) * self.timeout_s + self.backoff_s * waits
