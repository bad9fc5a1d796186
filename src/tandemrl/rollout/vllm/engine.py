"""Tandem rollouts on vLLM: an ``Engine`` on a stock installation, which is extended by vLLM's own options only."""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np
import vllm
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import exceptions

from tandemrl.config import RolloutConfig
from tandemrl.distributed.watchdog import stamp
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.models.lora import AdapterPlan
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.engine import (
    Completion,
    EngineDeadError,
    EngineError,
    EngineInfo,
    Passes,
    Request,
    Responder,
    Sampling,
    StopReason,
    check_request,
)
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.backend import Backend
from tandemrl.rollout.vllm.modes import DRAFTING, SchedulingMode, check_mode
from tandemrl.rollout.vllm.rows import Row, authors_of, history_arguments
from tandemrl.rollout.vllm.settings import TandemOptions
from tandemrl.selection import Who

_SHARED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""The fields that ``Sampling`` and vLLM's ``SamplingParams`` call by the same name."""


class VllmEngine:
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
        self.backend, self.tokenizer = backend, tokenizer
        self.vocabulary, self.context, self.has_junior, self.eos = vocabulary, context, has_junior, eos
        self._adapters = adapters
        self.policy_version = 0
        self.passes = Passes()
        self._aborts, self._busy = Aborts(), threading.RLock()
        self._row_ids = count()

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
        record: bool = False,
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
            record: whether the workers keep their own record of authors (``recorded_authors``), for tests.
            adapters: if given, the senior is these adapters on the junior's weights. Both are then loaded from the same
                folder, and the weights only once.
            ends: the ids that end a completion. None stands for those of both models.
            engine_args: further ``vllm.EngineArgs``.

        Raises:
            EngineError: a setting is not supported, or a model has too few logits for the tokenizer.
            ModelError: the models do not share a vocabulary.
        """
        if vllm.__version__.partition("+")[0] not in VLLM_TESTED:
            warnings.warn(
                f"vLLM {vllm.__version__} is not a version that tandem decoding was tested with "
                f"({', '.join(VLLM_TESTED)}); it relies on internals that change",
                stacklevel=2,
            )
        config = config or RolloutConfig()
        v = config.vllm
        draft: int | Literal["auto"] = "auto" if config.draft_tokens == "auto" else int(config.draft_tokens)
        drafts = check_mode(v.mode) in DRAFTING
        if v.mode == "draft" and not draft:
            raise EngineError("rollout.vllm.mode=draft: set rollout.draft_tokens to auto, or to a number, e.g. 8")
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
            mode="lazy" if drafts and (junior is None or not draft) else v.mode,  # nobody to draft, or nothing
            draft=0 if junior is None else draft,
            junior_dtype=v.junior_dtype,
            junior_quantization=v.junior_quantization,
            junior_device=v.junior_device,
            device=device if v.devices is None else 0,  # the first of those that its process sees
            adapters=adapters,
            record=record,
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

    # ------------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        for i, request in enumerate(requests):
            check_request(i, request, self)
        self._aborts.clear()
        with self._busy, death_reported(), self.backend.awake():
            before = self.stats()
            rows = self._rows(requests)
            self._write(rows, progress, responder)
            after = self.stats()
        junior, senior = (now - then for now, then in zip(after["rows"], before["rows"], strict=True))
        drafts = {name: after[name] - before[name] for name in ("drafted", "accepted")}
        self.passes = Passes(sum(sum(row.own) for row in rows), senior, junior, **drafts)
        done = []
        for row, authors in zip(rows, authors_of(rows), strict=True):
            transcript = None if responder is None else responder.transcript(row.number)
            done.append(row.completion(authors, transcript))
        completions = iter(done)
        return [[next(completions) for _ in request.keys] for request in requests]

    def _rows(self, requests: Sequence[Request]) -> list[Row]:
        """Make one row for each completion, and tell the workers the strategies of the requests."""
        strategies = {id(request.strategy): request.strategy for request in requests}
        names = {known: str(i) for i, known in enumerate(strategies)}
        named = {names[known]: strategy for known, strategy in strategies.items()}
        self.backend.call("tandem_register", named if self.backend.in_process else cloudpickle.dumps(named))
        asked = [(i, request, key) for i, request in enumerate(requests) for key in request.keys]
        return [
            Row(number, next(self._row_ids), i, request, key, names[id(request.strategy)], self.policy_version)
            for number, (i, request, key) in enumerate(asked)
        ]

    def _write(self, rows: Sequence[Row], progress: Callable[[int], None] | None, responder: Responder | None) -> None:
        """Write every row to its end. A row that waits for an answer of the environment does not hold up the others.

        Args:
            rows: the rows, which are changed.
            progress: see ``Engine.generate``.
            responder: see ``Engine.generate``.
        """
        llm = self.backend.llm
        flying: dict[int, str] = {}  # number of the row -> vLLM's name of its turn
        try:
            for row in rows:
                flying[row.number] = self._begin_turn(row)
            waiting = set[int]()  # numbers of rows whose turn was submitted
            ended = reported = 0  # tokens of turns that have ended; of all of them, as they were reported
            while flying or waiting:
                for row in self._step(rows, flying):
                    ended += len(row.turns[-1])
                    if responder is not None:
                        waiting.add(row.number)
                        responder.submit(row.turn)
                states = llm.output_processor.request_states.values()
                tokens = ended + sum(state.detokenizer.num_output_tokens() for state in states)
                if tokens > reported:
                    stamp()
                if progress is not None:
                    progress(tokens - reported)
                reported = tokens
                if self._aborts:
                    ended += self._end_aborted(rows, flying, waiting)
                for reply in responder.replies(wait=not flying) if responder is not None and waiting else ():
                    stamp()
                    row = rows[reply.number]
                    if reply.number not in waiting:
                        if row.reason == "abort":  # its answer comes too late
                            continue
                        raise EngineError(f"completion {reply.number} was answered, and no turn of it awaits an answer")
                    waiting.remove(reply.number)
                    if any(not 0 <= token < self.vocabulary for token in reply.context):
                        raise EngineError(
                            f"completion {reply.number}: the observation has a token outside the vocabulary of "
                            f"{self.vocabulary}"
                        )
                    if row.add_observation(reply):
                        flying[row.number] = self._begin_turn(row)
        except BaseException:
            llm.abort_request(list(flying.values()), internal=True)
            # A step that failed was given blocks that no model has filled; its prompts must not hit them later.
            llm.reset_prefix_cache()
            raise

    def _step(self, rows: Sequence[Row], flying: dict[int, str]) -> list[Row]:
        """Make a step, or take the outputs of one that was made. Returns the rows whose turn it ends, which are removed
        from ``flying``."""
        ended = []
        for output in self.backend.llm.step() if flying else ():
            row, written = rows[int(output.request_id)], output.outputs[0]
            del flying[row.number]
            self._end_turn(row, written.token_ids, written.logprobs, self._reason(row.request, written))
            ended.append(row)
        return ended

    def _begin_turn(self, row: Row) -> str:
        """Start the next turn of a row in vLLM, and return vLLM's name of the turn.

        Rows with lower numbers have priority, since the prefix cache may still hold what was computed of them.
        """
        prompt, params = {"prompt_token_ids": row.prompt}, self._params(row)
        return self.backend.llm.add_request(str(row.number), prompt, params, priority=row.number)

    def _end_turn(self, row: Row, tokens: Sequence[int], logprobs: Any, reason: StopReason) -> None:
        """Record a turn that has ended. Log-probs of greedy decoding are 0.0.

        Args:
            row: the row of the turn.
            tokens: the own tokens of the turn.
            logprobs: vLLM's flat log-probs of them; None if there is no token.
            reason: why the turn ended.
        """
        greedy = logprobs is None or row.request.sampling.temperature == 0
        row.end_turn(tokens, [0.0] * len(tokens) if greedy else logprobs.logprobs, reason)

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self._aborts.add(keys)

    def _params(self, row: Row) -> SamplingParams:
        """vLLM's sampling parameters of the row's next turn."""
        s = row.request.sampling
        arguments = {
            "tandem_key": row.key,
            "tandem_strategy": row.strategy,
            "tandem_row": row.id,
            **history_arguments(row.history),
        }
        return sampling_params(f"request {row.index}", s, self.eos, row.left, arguments, stop=s.stop)

    def _reason(self, request: Request, output: Any) -> StopReason:
        if output.finish_reason == "stop":
            ended = not request.sampling.ignore_eos and output.stop_reason in self.eos
            return "eos" if ended else "stop"
        if output.finish_reason == "length":
            return "length"
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}")

    def _end_aborted(self, rows: Sequence[Row], flying: dict[int, str], waiting: set[int]) -> int:
        """End aborted completions with what they have written so far, and return how many tokens the ended turns have.

        Args:
            rows: all rows of the call.
            flying: vLLM's name of the running turn, by number of the row. Ended rows are removed.
            waiting: the numbers of the rows that wait for an answer. Ended rows are removed.
        """
        ended = 0
        for number in [n for n in (*flying, *waiting) if rows[n].key in self._aborts]:
            if number in waiting:
                waiting.remove(number)
                rows[number].reason = "abort"
                continue
            name = flying.pop(number)
            state = self.backend.llm.output_processor.request_states[name]
            tokens = list(state.detokenizer.output_token_ids)
            self._end_turn(rows[number], tokens, state.logprobs_processor.logprobs, "abort")
            ended += len(tokens)
            self.backend.llm.abort_request([name], internal=True)
        return ended

    # ---------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._busy:
            self.backend.load_weights(weights)
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        with self._busy:
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
            mode: ``lazy`` or ``lockstep``. An engine with a junior and ``rollout.draft_tokens`` not 0
                also has ``draft`` and ``auto``.

        Raises:
            EngineError: there is no such mode, or it drafts and this engine was not started for drafts.
        """
        self.backend.call("tandem_mode", mode)

    def recorded_authors(self) -> dict[int, np.ndarray]:
        """The authors of each own token since the last call, by request key, as the workers recorded them.

        Raises:
            EngineError: the engine was started without ``record=True``.
        """
        return {key: np.array(authors, dtype=np.int8) for key, authors in self.backend.call("tandem_record")[0].items()}

    def stats(self) -> dict[str, Any]:
        """The counts of ``planner.Stats``, and as ``requests`` the number of requests that the planner knows."""
        return self.backend.call("tandem_stats")[0]

    def close(self) -> None:
        self.backend.close()


def sampling_params(
    where: str, s: Sampling, eos: Sequence[int], room: int, arguments: Mapping[str, Any], *, stop: Sequence[str] = ()
) -> SamplingParams:
    """vLLM's sampling parameters of a request for up to ``room`` tokens.

    Args:
        where: the request, for the message.
        eos: the ids that end a completion, unless ``ignore_eos`` is set.
        arguments: ``extra_args`` of the request.
        stop: the stop strings that vLLM looks for.

    Raises:
        EngineError: vLLM cannot sample like this.
    """
    try:
        params = SamplingParams(
            **{name: getattr(s, name) for name in _SHARED},
            max_tokens=room,
            stop=list(stop) or None,
            include_stop_str_in_output=True,
            # EOS ids go in as stop ids: vLLM knows one of them, and whoever asks sees which one ended a completion.
            stop_token_ids=sorted({*s.stop_token_ids, *(() if s.ignore_eos else eos)}),
            ignore_eos=True,
            detokenize=bool(stop),
            skip_special_tokens=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=dict(arguments),
        )
    except (ValueError, VLLMClientError) as error:
        raise EngineError(f"{where}: vLLM cannot sample like this: {error}") from error
    if params.temperature != s.temperature:
        raise EngineError(
            f"{where}: temperature {s.temperature} is too low for vLLM, which would use {params.temperature}; 0 is "
            "greedy"
        )
    return params


@contextmanager
def death_reported() -> Iterator[None]:
    """A context that says what to do when the engine's process ends.

    Raises:
        EngineDeadError: it did.
    """
    try:
        yield
    except exceptions.EngineDeadError as error:
        raise EngineDeadError(
            f"the vLLM engine died ({error}); its output above says why. Start again: a run resumes from its last "
            "checkpoint"
        ) from error
