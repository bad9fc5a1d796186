"""Tandem rollouts on vLLM: an ``Engine`` on a stock installation, which is extended by vLLM's own options only."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import vllm
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from tandemrl.config import RolloutConfig
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.models.lora import AdapterPlan
from tandemrl.rollout.engine import EngineError, EngineInfo, Passes
from tandemrl.rollout.open_call import CallEngine
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.backend import Backend
from tandemrl.rollout.vllm.call import VllmCall
from tandemrl.rollout.vllm.planner import SchedulingMode
from tandemrl.rollout.vllm.settings import TandemOptions
from tandemrl.selection import Who


class VllmEngine(CallEngine):
    """Tandem decoding inside vLLM; see ``rollout.engine.Engine`` for the contract and ``planner`` for the idea.

    Args:
        backend: the running vLLM engine.
        tokenizer: the tokenizer of both models.
        vocabulary: the size of the smaller of the two LM heads. Token ids are below it.
        context: how many tokens the longest request can have, prompt and completion together.
        has_junior: whether there is a junior.
        eos: the token ids that end a completion.
        adapters: whether the senior is adapters on the junior's weights.
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
        adapters: bool = False,
    ) -> None:
        super().__init__()
        self.backend, self.tokenizer = backend, tokenizer
        self.vocabulary, self.context, self.has_junior, self.eos = vocabulary, context, has_junior, eos
        self._adapters = adapters
        self.policy_version = 0
        self.passes = Passes()

    @classmethod
    def start(
        cls,
        senior: str | Path,
        junior: str | Path | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig | None = None,
        *,
        dtype: str = "float32",
        device: int = 0,
        longest: int | None = None,
        adapters: AdapterPlan | None = None,
        ends: Sequence[int] | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> "VllmEngine":
        """Start vLLM as ``rollout.*`` of a config says. The weights on disk are policy version 0.

        Args:
            senior: model folder or hub id of the senior.
            junior: model folder or hub id of the junior. None allows only strategies by which the senior writes alone.
            tokenizer: the tokenizer of the senior.
            config: ``rollout.*`` of a config; None stands for the defaults.
            dtype: the dtype of the engine's weights, by torch's name for it.
            device: the CUDA device of the engine's models, by its number in this process. ``rollout.vllm.devices`` and
                ``junior_device`` take precedence.
            longest: how many tokens prompt and completion may have together. None means as many as both models allow.
            adapters: if given, the senior is these adapters on the junior's weights. Both are then loaded from the same
                folder, and the weights only once.
            ends: the ids that end a completion. None stands for those of both models.
            engine_args: further ``vllm.EngineArgs``.

        Raises:
            EngineError: a setting is not supported, or a model has too few logits for the tokenizer.
            ModelError: the models do not share a vocabulary.
        """
        if vllm.__version__.partition("+")[0] != VLLM_TESTED:
            tested = f"tandem decoding was tested with {VLLM_TESTED}, and relies on internals that change"
            warnings.warn(f"vLLM {vllm.__version__}: {tested}", stacklevel=2)
        config = config or RolloutConfig()
        v = config.vllm
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
            draft=config.draft_tokens,
            junior_dtype=v.junior_dtype,
            junior_quantization=v.junior_quantization,
            junior_device=v.junior_device,
            device=device if v.devices is None else 0,  # the first of those that its process sees
            adapters=adapters,
        )
        backend = Backend.start(
            str(senior), options, config, dtype=dtype, context=context, engine_args=engine_args or {}
        )
        if ends is None:
            ends = stored_eos_token_ids(str(senior), tokenizer, None if junior is None else str(junior))
        return cls(
            backend,
            tokenizer,
            vocabulary=vocabulary,
            context=context,
            has_junior=junior is not None,
            eos=tuple(end for end in ends if end < vocabulary),  # a generation config may be of a larger one
            adapters=adapters is not None,
        )

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.backend.dtype, adapters=self._adapters)

    def make_call(self, *, turns: bool, streams: bool, anything: bool) -> VllmCall:
        return VllmCall(self, self.backend, self.eos, turns=turns, streams=streams)

    # ---------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.exclusive():
            self.backend.load_weights(weights)
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        with self.exclusive():
            self.backend.wake("weights")
            checksums = set(self.backend.call("tandem_fingerprint", who))
        if len(checksums) > 1:
            ranks = sorted(map(hex, checksums))
            raise EngineError(f"the ranks of the engine hold different weights of the {who}: {ranks}")
        return checksums.pop()

    # --------------------------------------------------------------------------------------------------- looking inside

    def set_mode(self, mode: SchedulingMode) -> None:
        """Set the scheduling mode from the next ``generate`` on.

        Args:
            mode: an engine with a junior and ``rollout.draft_tokens`` not 0 starts in ``draft``, others in ``lazy``.

        Raises:
            EngineError: it drafts, and this engine was not started for drafts.
        """
        self.backend.call("tandem_mode", mode)

    def stats(self) -> dict[str, Any]:
        """The counts of ``planner.Stats`` in the last call, and as ``requests`` how many the planner knows."""
        return self.backend.call("tandem_stats")[0]

    def close(self) -> None:
        self.backend.close()
