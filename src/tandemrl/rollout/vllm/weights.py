"""How new weights reach the senior in vLLM, which may be in another process or on another device.

``rollout.sync.sync_weights`` sends them through ``VllmEngine.load_weights`` and compares the checksums of both sides.
In between, all happens here: ``send_weights`` in the trainer's process hands them over as they are, by CUDA IPC handles
or through a file; ``receive_weights`` puts them into the worker's model; ``fingerprint_of`` reads them back from
what the kernels compute with (``parameters``).
"""

import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from vllm.config import set_current_vllm_config

from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.sync import fingerprint
from tandemrl.rollout.vllm.adapters import adapted_parameters, load_adapters
from tandemrl.rollout.vllm.kv_state import JUNIOR, SENIOR
from tandemrl.rollout.vllm.parameters import (
    checked,
    engine_fingerprint,
    parameters_of,
    shapes_of,
    summed_before_packing,
    tied_heads,
)
from tandemrl.rollout.vllm.versions import RELOAD_LOGGERS

SHARED_MEMORY = Path("/dev/shm")


def send_weights(
    weights: Iterable[tuple[str, Tensor]],
    load: Callable[[Any], object],
    *,
    in_process: bool,
    shares_gpu: bool,
    dtype: torch.dtype,
) -> None:
    """Hand weights over to every worker of an engine, and return when all have loaded them.

    Args:
        weights: the weights with their names.
        load: calls ``receive_weights`` in every worker, with what is handed over.
        in_process: whether the workers are in this process.
        shares_gpu: whether the workers are on the GPU of this process.
        dtype: the dtype of the engine's weights.
    """
    named = list(weights)
    if in_process:
        load(named)
    elif shares_gpu and all(tensor.device.type == "cuda" for _, tensor in named):
        handles, kept = export_weights(named)
        load(handles)
        del kept
        torch.cuda.ipc_collect()
    else:
        path = write_weights(named, dtype=dtype)
        try:
            load(str(path))
        finally:
            path.unlink(missing_ok=True)


def receive_weights(
    runners: Mapping[int, Any],
    handed: Iterable[tuple[str, Tensor]] | str | bytes,
    device: torch.device,
    *,
    adapters: bool,
) -> None:
    """Replace the senior's weights in place, or only its adapters if it is adapters. This runs in a worker.

    Args:
        runners: the model runners, by author.
        handed: named tensors, the path of a file with them (``write_weights``), or CUDA IPC handles of them
            (``export_weights``).
        device: the device of the worker.
        adapters: whether the senior is adapters on the junior's weights.
    """
    weights: Iterable[tuple[str, Tensor]]
    if isinstance(handed, bytes):
        weights = list(import_weights(handed, device))
    else:
        weights = read_weights(handed) if isinstance(handed, str) else handed
    if adapters:
        load_adapters(runners[SENIOR].get_model(), weights)
    else:
        load_checkpoint_weights(runners[SENIOR], weights)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the sender may change its tensors once this returns


def fingerprint_of(runners: Mapping[int, Any], author: int, *, adapters: bool) -> int:
    """The checksum of the weights that a model computes with (see ``rollout.sync.fingerprint``), in a worker.

    Raises:
        EngineError: the weights cannot be read back.
    """
    if author == SENIOR and adapters:
        return fingerprint(adapted_parameters(runners[SENIOR], runners[JUNIOR]))
    return engine_fingerprint(runners[author])


# ------------------------------------------------------------------------------------------------------- into the model


@torch.no_grad()
def load_checkpoint_weights(runner: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the weights of a model in place by a trainer's, cast to the engine's dtype.

    KV computed with the old weights is not dropped. The caller must reset the prefix cache.

    Args:
        runner: the model runner of the model.
        weights: the trainer's weights, with the names and the whole shapes of ``PreTrainedModel.named_parameters``, in
            any order and on any device.

    Raises:
        EngineError: a name or shape does not match, or a layer is quantised or of an unknown kind. No weight has
            changed.
    """
    model, config = runner.get_model(), runner.vllm_config
    shapes = shapes_of(part for tensor in parameters_of(model) for part in tensor.parts)
    named = checked(weights, shapes)
    # In the model's order, so that no layer waits for its last piece; detached, because the loader annotates tensors.
    ordered = ((name, named[name].detach().to(config.model_config.dtype)) for name in shapes)
    with set_current_vllm_config(config), _quiet(), summed_before_packing(model, config.model_config.dtype):
        runner.reload_weights(weights_iterator=ordered)
        for _, head in tied_heads(model):
            # The reload renews the embedding's table, but not what a tied head has packed of it.
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without vLLM's warnings about rotary tables and tied heads, which no checkpoint holds.

    They would come with every reload.
    """
    levels = {logger: logger.level for logger in map(logging.getLogger, RELOAD_LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


# ------------------------------------------------------------------------------------------------------- through a file


def write_weights(
    weights: Iterable[tuple[str, Tensor]], directory: Path | None = None, *, dtype: torch.dtype | None = None
) -> Path:
    """Write tensors to a new safetensors file, for ``read_weights`` in other processes of this machine.

    The caller must delete the file, also if the other process fails.

    Args:
        weights: the tensors with their names.
        directory: where to write the file. None means shared memory if it exists and has room, else the temporary
            directory.
        dtype: the dtype to cast the tensors to, which halves the file for a bfloat16 engine. None keeps their dtypes.

    Returns:
        The path of the file.
    """
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in weights}
    if directory is None:
        size = 2**20 + sum(tensor.nbytes for tensor in tensors.values())
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > size
        directory = SHARED_MEMORY if roomy else Path(tempfile.gettempdir())
    handle, name = tempfile.mkstemp(".safetensors", "tandemrl-weights-", directory)
    os.close(handle)
    path = Path(name)
    try:
        save_file(tensors, path)
    except BaseException:
        path.unlink()
        raise
    return path


def read_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, mapped into memory. They are read when used, and survive the deletion of the file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


# ------------------------------------------------------------------------------------------------------ by CUDA handles


def export_weights(weights: Iterable[tuple[str, Tensor]]) -> tuple[bytes, list[Tensor]]:
    """Make handles with which other processes can map CUDA tensors in place (CUDA IPC).

    Returns:
        The pickled handles, and the tensors behind them. Keep the tensors until every receiver has returned, and do not
        change them before.

    Raises:
        EngineError: a tensor is not on a CUDA device.
    """
    handles, kept = [], []
    for name, tensor in weights:
        if tensor.device.type != "cuda":
            raise EngineError(f"weight {name} is on {tensor.device}; only CUDA tensors can be mapped elsewhere")
        shared = tensor.detach().contiguous()
        kept.append(shared)
        handles.append((name, {_device_uuid(shared.device): reduce_tensor(shared)[1]}))
    for device in {shared.device for shared in kept}:  # which need not be torch's current one
        torch.cuda.synchronize(device)
    return pickle.dumps(handles), kept


def import_weights(payload: bytes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The tensors behind the handles of ``export_weights``.

    Args:
        payload: the pickled handles.
        device: the engine's GPU, by its number in this process.

    Raises:
        EngineError: the tensors are on another GPU.
    """
    own = _device_uuid(device)
    for name, handles in pickle.loads(payload):
        if own not in handles:
            raise EngineError(
                f"weight {name} lies on GPU {', '.join(handles)}, the engine runs on {own}; CUDA IPC needs one GPU"
            )
        arguments = list(handles[own])
        arguments[6] = device.index  # the receiver's number of the same GPU
        yield name, rebuild_cuda_tensor(*arguments)


def _device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
