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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from vllm.config import set_current_vllm_config

from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import check_shapes, fingerprint
from tandemrl.rollout.vllm.adapters import adapted_parameters, load_adapters
from tandemrl.rollout.vllm.kv_state import JUNIOR, SENIOR
from tandemrl.rollout.vllm.parameters import (
    checked,
    hf_parameters,
    parameters_of,
    shapes_of,
    tied_heads,
)
from tandemrl.rollout.vllm.versions import RELOAD_LOGGERS

SHARED_MEMORY = Path("/dev/shm")
SPARE_BYTES = 2**20
ALIGNMENT = 64


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
    if in_process:
        load(weights)  # which are gathered while they are loaded
        return
    stream = iter(weights)
    first = list(islice(stream, 1))
    stream = chain(first, stream)
    if shares_gpu and all(tensor.device.type == "cuda" for _, tensor in first):
        handles, kept = export_weights(stream)
        load(handles)
        del kept
        torch.cuda.ipc_collect()
    else:
        del first
        with written_weights(stream, dtype=dtype) as path:
            load(path)


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
        handed: named tensors, the path of a file with them (``written_weights``), or CUDA IPC handles of them
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
    own = author == SENIOR and adapters
    return fingerprint(adapted_parameters(runners[SENIOR], runners[JUNIOR]) if own else hf_parameters(runners[author]))


# ------------------------------------------------------------------------------------------------------- into the model


@torch.no_grad()
def load_checkpoint_weights(runner: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Replace the weights of a model in place by a trainer's, cast to the engine's dtype.

    KV computed with the old weights is not dropped. The caller must reset the prefix cache.

    Args:
        runner: the model runner of the model.
        weights: the trainer's weights, with the names and the whole shapes of ``PreTrainedModel.named_parameters``, on
            any device. `SentWeights` come in the model's order and are taken one by one: no more is held than the
            pieces of a layer. Others may come in any order.

    Raises:
        EngineError: a name or shape does not match, or a layer is quantised or of an unknown kind. No weight has
            changed.
    """
    model, config = runner.get_model(), runner.vllm_config
    shapes = shapes_of(part for tensor in parameters_of(model) for part in tensor.parts)
    if isinstance(weights, SentWeights):
        check_shapes(weights.shapes, shapes)
        ordered = iter(weights)
    else:
        named = checked(weights, shapes)  # in the model's order, so that no layer waits for its last piece
        ordered = ((name, named[name]) for name in shapes)
    # Detached, because the loader annotates tensors.
    stream = ((name, tensor.detach().to(config.model_config.dtype)) for name, tensor in ordered)
    with set_current_vllm_config(config), _quiet():
        runner.reload_weights(weights_iterator=stream)
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


@contextmanager
def written_weights(
    weights: Iterable[tuple[str, Tensor]], directory: Path | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[str]:
    """A context with a file of tensors, for ``read_weights`` in other processes of this machine and user.

    The file has no name in any folder, so that nothing of it is left if this process is killed. Tensors are taken and
    written one by one.

    Args:
        weights: the tensors with their names.
        directory: where the file takes its room. None means shared memory while it has room, else the temporary
            directory.
        dtype: the dtype to cast the tensors to, which halves the file for a bfloat16 engine. None keeps their dtypes.

    Yields:
        A path by which it can be opened within the context. What was opened survives it.
    """
    shared = directory is None and SHARED_MEMORY.is_dir()
    with ExitStack() as stack:
        file = stack.enter_context(TemporaryFile(dir=SHARED_MEMORY if shared else directory))
        index = []
        for name, tensor in weights:
            value = tensor.detach().to("cpu", dtype).contiguous()
            if shared and shutil.disk_usage(SHARED_MEMORY).free < value.nbytes + SPARE_BYTES:
                shared, full = False, file
                file = stack.enter_context(TemporaryFile())
                full.seek(0)
                shutil.copyfileobj(full, file, 2**24)
                full.close()
            start = file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
            index.append((name, value.dtype, value.shape, start))
            file.write(value.flatten().view(torch.uint8).numpy().data)
        end = file.tell()
        pickle.dump(index, file)
        file.write(end.to_bytes(8, "little"))
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def read_weights(path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, mapped into memory. They are read when used, and survive the end of the context."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        end = int.from_bytes(file.read(), "little")
        file.seek(end)
        index = pickle.load(file)
    content = torch.from_file(path, size=end, dtype=torch.uint8)
    for name, dtype, shape, start in index:
        yield name, content[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


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
