"""Tandem rollouts on vLLM: the ``Engine`` contract over a stock installation, extended by ``worker_cls`` only."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
import vllm
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from tandemrl.config import RolloutConfig
from tandemrl.distributed.watchdog import stamp
from tandemrl.models.loading import eos_token_ids, load_tokenizer, vocabulary_check
from tandemrl.rollout.engine import Aborts, Completion, EngineError, EngineInfo, Request, StopReason, check_request
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.backend import Backend
from tandemrl.rollout.vllm.planner import SchedulingMode, check_mode
from tandemrl.rollout.vllm.settings import TandemOptions
from tandemrl.selection import Who, replay

_SHARED = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""What ``Sampling`` and vLLM's ``SamplingParams`` call by the same name."""


class VllmEngine:
    """Tandem decoding inside vLLM; see ``rollout.engine.Engine`` for the contract and ``planner`` for the idea.

    Args:
        context: tokens of the longest request, prompt and completion together.
        eos: ids that end a completion.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocabulary: int,
        context: int,
        has_junior: bool,
        eos: tuple[int, ...],
    ) -> None:
        self.backend, self.tokenizer = backend, tokenizer
        self.vocabulary, self.context, self.has_junior, self.eos = vocabulary, context, has_junior, eos
        self.policy_version = 0
        self._aborts = Aborts()

    @classmethod
    def start(
        cls,
        senior: str | Path,
        junior: str | Path | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig | None = None,
        *,
        dtype: str = "float32",
        longest: int | None = None,
        record: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> "VllmEngine":
        """Start vLLM as ``rollout.*`` of a config says. The weights on disk are policy version 0.

        Args:
            senior, junior: model folders or hub ids. No junior: only strategies that let the senior write alone.
            longest: longest prompt plus completion; None: what both models allow.
            record: keep the workers' own record of authors (``recorded_authors``), for tests.
            engine_args: further ``vllm.EngineArgs``.

        Raises:
            EngineError, ModelError: the models do not share a vocabulary, or a setting is not supported.
        """
        if vllm.__version__.partition("+")[0] not in VLLM_TESTED:
            warnings.warn(
                f"vLLM {vllm.__version__} is not a version that tandem decoding was tested with "
                f"({', '.join(VLLM_TESTED)}); it relies on internals that change",
                stacklevel=2,
            )
        config = config or RolloutConfig()
        v = config.vllm
        check_mode(v.mode)
        if junior is not None:
            vocabulary_check(tokenizer, load_tokenizer(junior))
        paths = [str(path) for path in (senior, junior) if path is not None]
        models = [AutoConfig.from_pretrained(path, trust_remote_code=False) for path in paths]
        vocabulary = min(model.vocab_size for model in models)
        if vocabulary < len(tokenizer):
            raise EngineError(f"a model has {vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
        context = min(model.max_position_embeddings for model in models)
        if longest is not None:
            context = min(context, longest)
        options = TandemOptions(
            junior=None if junior is None else str(junior),
            mode=v.mode,
            junior_dtype=v.junior_dtype,
            junior_quantization=v.junior_quantization,
            junior_device=v.junior_device,
            record=record,
        )
        backend = Backend.start(
            str(senior), options, config, dtype=dtype, context=context, engine_args=engine_args or {}
        )
        eos = eos_token_ids(_generation_config(senior), tokenizer)
        return cls(backend, tokenizer, vocabulary=vocabulary, context=context, has_junior=junior is not None, eos=eos)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.backend.dtype)

    # ------------------------------------------------------------------------------------------------------- generating

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        for i, request in enumerate(requests):
            check_request(i, request, vocabulary=self.vocabulary, context=self.context, has_junior=self.has_junior)
        self._aborts.clear()
        with self.backend.awake():
            try:
                return self._generate(requests, progress)
            except EngineDeadError as error:
                raise EngineError(
                    f"the vLLM engine died ({error}); its output above says why. Start again: a run resumes from its "
                    "last checkpoint"
                ) from error

    def _generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None) -> list[list[Completion]]:
        llm = self.backend.llm
        pairs = [(request, key) for request in requests for key in request.keys]
        names = {
            id(strategy): str(i) for i, strategy in enumerate({id(r.strategy): r.strategy for r in requests}.values())
        }
        named = {names[id(r.strategy)]: r.strategy for r in requests}
        self.backend.call("tandem_register", named if self.backend.in_process else cloudpickle.dumps(named))
        flying: dict[str, int] = {}  # engine's request id -> number of the completion
        written: dict[int, _Written] = {}
        try:
            for i, request in enumerate(requests):
                for key in request.keys:
                    number = len(flying)
                    params = self._params(i, request, key, names[id(request.strategy)])
                    name = llm.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, params)
                    flying[name] = number
            reported = 0
            while llm.has_unfinished_requests():
                for output in llm.step():
                    number = int(output.request_id)
                    ended = output.outputs[0]
                    reason = self._reason(pairs[number][0], ended)
                    written[number] = _Written(list(ended.token_ids), ended.logprobs, reason)
                states = llm.output_processor.request_states.values()
                tokens = sum(len(w.tokens) for w in written.values())
                tokens += sum(state.detokenizer.num_output_tokens() for state in states)
                if tokens > reported:
                    stamp()
                if progress is not None:
                    progress(tokens - reported)
                reported = tokens
                if self._aborts:
                    self._end_aborted(flying, pairs, written)
        except BaseException:
            llm.abort_request(list(flying), internal=True)
            # A step that failed was given blocks that no model has filled; its prompts must not hit them later.
            llm.reset_prefix_cache()
            raise
        done = iter(self._completions(pairs, [written[number] for number in range(len(pairs))]))
        return [[next(done) for _ in request.keys] for request in requests]

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self._aborts.add(keys)

    def _params(self, index: int, request: Request, key: int, strategy: str) -> SamplingParams:
        s = request.sampling
        try:
            params = SamplingParams(
                **{name: getattr(s, name) for name in _SHARED},
                stop=list(s.stop) or None,
                include_stop_str_in_output=True,
                # EOS ids go in as stop ids: vLLM knows one of them, and `_reason` asks which one ended a completion.
                stop_token_ids=sorted({*s.stop_token_ids, *(() if s.ignore_eos else self.eos)}),
                ignore_eos=True,
                detokenize=bool(s.stop),
                skip_special_tokens=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"tandem_key": key, "tandem_strategy": strategy},
            )
        except (ValueError, VLLMClientError) as error:
            raise EngineError(f"request {index}: vLLM cannot sample like this: {error}") from error
        if params.temperature != s.temperature:
            raise EngineError(
                f"request {index}: temperature {s.temperature} is too low for vLLM, which would use "
                f"{params.temperature}; 0 is greedy"
            )
        return params

    def _reason(self, request: Request, output: Any) -> StopReason:
        if output.finish_reason == "stop":
            ended = not request.sampling.ignore_eos and output.stop_reason in self.eos
            return "eos" if ended else "stop"
        if output.finish_reason == "length":
            return "length"
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}")

    def _completions(self, pairs: Sequence[tuple[Request, int]], written: Sequence["_Written"]) -> list[Completion]:
        """Who wrote what is recomputed from keys and tokens, all completions of a strategy at once."""
        authors: dict[int, np.ndarray] = {}
        for strategy in {id(request.strategy): request.strategy for request, _ in pairs}.values():
            mine = [i for i, (request, _) in enumerate(pairs) if request.strategy is strategy]
            lengths = torch.tensor([len(written[i].tokens) for i in mine])
            padded = pad_sequence([torch.tensor(written[i].tokens, dtype=torch.int64) for i in mine], batch_first=True)
            author = replay(strategy, torch.tensor([pairs[i][1] for i in mine]), padded, lengths).author.numpy()
            authors |= {i: row[: len(written[i].tokens)] for i, row in zip(mine, author, strict=True)}
        completions = []
        for i, ((request, key), (tokens, logprobs, reason)) in enumerate(zip(pairs, written, strict=True)):
            behaviour = np.zeros(len(tokens), dtype=np.float32)
            if request.sampling.temperature > 0:
                behaviour[:] = logprobs.logprobs if logprobs is not None else ()
            channels = np.array(tokens, dtype=np.int64), authors[i].copy(), behaviour
            completions.append(Completion(key, *channels, reason, self.policy_version))
        return completions

    def _end_aborted(
        self, flying: Mapping[str, int], pairs: Sequence[tuple[Request, int]], written: dict[int, "_Written"]
    ) -> None:
        """End aborted completions with what they have written so far."""
        for name, number in flying.items():
            if number in written or pairs[number][1] not in self._aborts:
                continue
            state = self.backend.llm.output_processor.request_states[name]
            written[number] = _Written(
                list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs, "abort"
            )
            self.backend.llm.abort_request([name], internal=True)

    # ---------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.backend.load_weights(weights)
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        self.backend.wake("weights")
        checksums = set(self.backend.call("tandem_fingerprint", who))
        if len(checksums) > 1:
            ranks = sorted(map(hex, checksums))
            raise EngineError(f"the ranks of the engine hold different weights of the {who}: {ranks}")
        return checksums.pop()

    # --------------------------------------------------------------------------------------------------- looking inside

    def set_mode(self, mode: SchedulingMode) -> None:
        """``lazy``, ``majority`` or ``lockstep``, from the next ``generate`` on."""
        self.backend.call("tandem_mode", mode)

    def recorded_authors(self) -> dict[int, np.ndarray]:
        """Key -> authors as the workers recorded them, since the last call. The engine must have ``record=True``."""
        return {key: np.array(authors, dtype=np.int8) for key, authors in self.backend.call("tandem_record")[0].items()}

    def stats(self) -> dict[str, Any]:
        """Steps, forward passes, computed and written tokens, each as [junior, senior]; requests in the ledger."""
        return self.backend.call("tandem_stats")[0]

    def close(self) -> None:
        self.backend.close()


class _Written(NamedTuple):
    """What vLLM returns of one completion; logprobs are its flat ones, None if there is no token."""

    tokens: list[int]
    logprobs: Any
    reason: StopReason


def _generation_config(path: str | Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
