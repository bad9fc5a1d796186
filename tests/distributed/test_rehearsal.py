"""What is planned for a process is what it has and holds: on 1, 2 and 4 real processes, by another tool's count."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from helpers import _build, _common
from processes import run
from runs import FORKED
from tandemrl.apps.planning import rehearsal
from tandemrl.apps.planning.rehearsal import Rehearsal, Role, Work, batch_of, rehearse, storage_bytes
from tandemrl.config import Config, load
from tandemrl.models.critic import load_critic, packed_values, token_values
from tandemrl.models.forward import token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.loading import load_model
from tandemrl.models.lora import attach
from tandemrl.models.sharding import shard
from tandemrl.models.trainable import checkpoint_gradients, make_optimizer
from tandemrl.processes.world import imagined_world, init_world

VOCABULARY = 301  # not a multiple of anything: parts are uneven
SHAPE = dict(
    hidden_size=32, intermediate_size=72, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, head_dim=8
)
WORK = Work((70, 70, 41), context=9)
BFLOAT16 = "model.dtype=bfloat16"
CHECKPOINTED = "model.gradient_checkpointing=true"
LORA = "model.lora.rank=4"


class Case(NamedTuple):
    """A model on a mesh."""

    model: str
    overrides: tuple[str, ...] = ()
    critic: bool = False


CASES = {
    1: [Case("qwen3 tied"), Case("qwen3 untied", (BFLOAT16, CHECKPOINTED)), Case("llama", (LORA,))],
    2: [
        Case("qwen3 tied", (BFLOAT16, CHECKPOINTED)),
        Case("qwen3 untied", ("parallel.tp=2",)),
        Case("llama", ("parallel.sp=2", CHECKPOINTED)),
        Case("qwen3 tied", ("parallel.dp_replicate=2",), critic=True),
    ],
    4: [
        Case("qwen3 tied", ("parallel.tp=2", CHECKPOINTED)),
        Case("qwen3 untied", ("parallel.dp_replicate=2", BFLOAT16)),
        Case("llama", ("parallel.sp=2", LORA)),
    ],
}


def _model(name: str) -> PreTrainedModel:
    if name == "llama":
        return _build(LlamaForCausalLM, LlamaConfig(**SHAPE, **_common(VOCABULARY, 256, tied=False)), 1)
    return _build(Qwen3ForCausalLM, Qwen3Config(**SHAPE, **_common(VOCABULARY, 256, tied=name == "qwen3 tied")), 0)


def _config(folder: Path, case: Case) -> Config:
    return load(None, [f"model.senior={folder / case.model}", *case.overrides])


def _options(config: Config, size: int) -> ForwardOptions:
    mixed = config.model.dtype == "bfloat16" and size == 1
    return ForwardOptions(temperature=0.7, vocabulary=VOCABULARY, autocast=torch.bfloat16 if mixed else None)


def truth(folder: Path, size: int) -> list[dict[str, int]]:
    """Of every case, in one of ``size`` processes: bytes after a step, and at the worst moment of its second pass."""
    return [_measured(_config(folder, case), case.critic, size) for case in CASES[size]]


def _measured(config: Config, critic: bool, size: int) -> dict[str, int]:
    world = init_world(config.parallel, torch.device("cpu"))
    model = load_critic(config.model.senior) if critic else load_model(config.model.senior)
    if config.model.gradient_checkpointing:
        checkpoint_gradients(model)
    if config.model.lora.rank:
        attach(model, config.model.lora, 0)
    forward: Any = {"forward": packed_values} if critic else {}
    shard(model, world, dtype=getattr(torch, config.model.dtype), **forward)
    optimizer = make_optimizer(model, config.train, 1e-3)
    batch = batch_of(WORK, VOCABULARY)
    options = _options(config, size)

    def one_pass() -> None:
        select = batch.author >= 0
        if critic:
            token_values(model, batch, select=select, options=options, shards=world.shards).sum().backward()
        else:
            token_scores(model, batch, select=select, options=options, shards=world.shards)[0].sum().backward()

    tracker = MemTracker()
    if config.model.lora.rank:  # it cannot take frozen parameters
        one_pass()
        return _bytes_of(model, optimizer)
    tracker.track_external(model)
    with tracker:
        one_pass()
        [before] = [each["Total"] for each in tracker.get_tracker_snapshot("current").values()]
        tracker.reset_mod_stats()
        one_pass()
    [peak] = [each["Total"] for each in tracker.get_tracker_snapshot("peak").values()]
    return _bytes_of(model, optimizer) | {"activations": peak - before}


def _bytes_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    gradients = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    optimizer.step()
    state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
    return {"weights": storage_bytes(model.parameters()), "gradients": gradients, "optimizer": storage_bytes(state)}


def _planned(config: Config, critic: bool, size: int, more: int = rehearsal.MORE) -> Rehearsal:
    """more: layers of the larger of the two models that are run."""
    rehearsal.MORE = more
    role = Role("critic" if critic else "policy")
    configuration, options = AutoConfig.from_pretrained(config.model.senior), _options(config, size)
    with imagined_world(config.parallel, size) as world:
        return rehearse(role, configuration, config, world, WORK, options)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process without a process group: an engine of another test may have left one here."""
    with ProcessPoolExecutor(1, mp_context=FORKED) as pool:
        yield pool


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_a_process_has_what_was_planned(size: int, tmp_path: Path, elsewhere: ProcessPoolExecutor) -> None:
    for name in {case.model for case in CASES[size]}:
        _model(name).save_pretrained(tmp_path / name)
    [measured, *_] = run(truth, size, tmp_path, size) if size > 1 else [truth(tmp_path, 1)]
    for case, found in zip(CASES[size], measured, strict=True):
        planned = elsewhere.submit(_planned, _config(tmp_path, case), case.critic, size).result()._asdict()
        exact = ("weights", "gradients", "optimizer")
        assert {name: planned[name] for name in exact} == {name: found[name] for name in exact}, case
        if "activations" in found:
            assert planned["activations"] == pytest.approx(found["activations"], rel=0.15), case


def test_layers_that_were_not_run_count_as_those_that_were(tmp_path: Path, elsewhere: ProcessPoolExecutor) -> None:
    _model("qwen3 tied").save_pretrained(tmp_path / "qwen3 tied")
    config = _config(tmp_path, Case("qwen3 tied", (CHECKPOINTED,)))
    few, all_of_them = (elsewhere.submit(_planned, config, False, 64, more).result() for more in (rehearsal.MORE, 5))
    assert few == all_of_them


def test_a_frozen_model_has_weights_alone(tmp_path: Path) -> None:
    model = _model("qwen3 untied")
    model.save_pretrained(tmp_path / "qwen3 untied")
    config = _config(tmp_path, Case("qwen3 untied"))
    with imagined_world(config.parallel, 1) as world:
        options = _options(config, 1)
        found = rehearse(Role("frozen", "bfloat16"), model.config, config, world, WORK, options)
    assert found.weights == 2 * sum(parameter.numel() for parameter in model.parameters())
    assert (found.gradients, found.optimizer) == (0, 0)
