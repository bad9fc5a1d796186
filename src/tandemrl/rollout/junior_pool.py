"""A pool of juniors: each rollout has one of them, drawn by its key. An engine of the kind ``module:name``."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.models.loading import junior_tokenizer_of
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, OnProgress, Passes, Request, Responder
from tandemrl.rollout.factory import ModelSource, load_frozen, torch_engine
from tandemrl.selection import Who
from tandemrl.selection.draws import POOL, mix64, stream, uniforms


class JuniorPool:
    """The torch engine with ``model.junior`` and further ``juniors``, of the senior's vocabulary, for single responses.

    They share the senior, and each writes the rollouts whose keys draw it. So a rollout depends on its key alone, as
    with one junior. Terms of the loss with a junior's log-probs (``junior_kl_coef``, ``kl_to``) are of the first.

    Raises:
        ConfigError: there is no junior to draw, or one has another vocabulary.
    """

    def __init__(
        self,
        config: RolloutConfig,
        senior: ModelSource,
        junior: ModelSource | None,
        tokenizer: PreTrainedTokenizerBase,
        dtype: str,
        device: str,
        ends: Sequence[int] | None,
        juniors: Sequence[str] = (),
    ) -> None:
        where = "rollout.engine_parameters.juniors"
        if junior is None or not juniors:
            raise ConfigError(f"{where}: nothing to draw; name models there, and a strategy in which a junior writes")
        if apart := [path for path in (junior.path, *juniors) if junior_tokenizer_of(senior.path, path) is not None]:
            raise ConfigError(f"{where}: {apart[0]} has another vocabulary than the senior; leave it out")
        whole = senior.load()
        further = (ModelSource(path, partial(load_frozen, path, dtype, device)) for path in juniors)
        shared = senior._replace(load=lambda: whole)
        self.engines = [torch_engine(config, shared, each, tokenizer, ends) for each in (junior, *further)]
        if len({engine.vocabulary for engine in self.engines}) > 1:
            raise ConfigError(f"{where}: the models have LM heads of different sizes; use juniors with the same")
        self.policy_version, self.passes, self.has_junior = 0, Passes(), True
        self.vocabulary, self.context = self.engines[0].vocabulary, min(engine.context for engine in self.engines)

    @property
    def info(self) -> EngineInfo:
        return self.engines[0].info

    def generate(
        self, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
    ) -> list[list[Completion]]:
        """As ``Engine.generate``, without a responder."""
        if responder is not None:
            raise EngineError("a pool of juniors writes single responses; use rollout.engine=torch with environments")
        drawn = [self._drawn(request.keys) for request in requests]
        written: dict[tuple[int, int], Completion] = {}
        self.passes = Passes()
        for number, engine in enumerate(self.engines):
            places = {i: [j for j, each in enumerate(row) if each == number] for i, row in enumerate(drawn)}
            mine = {i: keys for i, own in places.items() if (keys := tuple(requests[i].keys[j] for j in own))}
            if not mine:
                continue
            found = engine.generate([replace(requests[i], keys=keys) for i, keys in mine.items()], progress=progress)
            for i, completions in zip(mine, found, strict=True):
                written |= {(i, j): each for j, each in zip(places[i], completions, strict=True)}
            self.passes += engine.passes
        return [[written[i, j] for j in range(len(request.keys))] for i, request in enumerate(requests)]

    def _drawn(self, keys: Sequence[int]) -> list[int]:
        """The number of each rollout's junior."""
        streams = stream(torch.tensor(keys, dtype=torch.int64), POOL)
        return (uniforms(streams, torch.zeros_like(streams)) * len(self.engines)).long().tolist()

    def abort(self) -> None:
        for engine in self.engines:
            engine.abort()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As ``Engine.load_weights``: into the senior, which is that of all."""
        self.engines[0].load_weights(weights, version)
        for engine in self.engines:
            engine.policy_version = version
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        """As ``Engine.fingerprint``; that of the junior is of all juniors."""
        first, *_ = found = [engine.fingerprint(who) for engine in self.engines[: 1 if who == "senior" else None]]
        return first if who == "senior" else mix64(*found)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
