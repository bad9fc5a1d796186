"""How new weights get into the senior in vLLM, which may be in another process.

``rollout.sync.sync_weights`` sends them through ``VllmEngine.load_weights`` and compares the checksums of both sides.
A LoRA senior sends its adapters alone. Workers in the trainer's process get weights as they are, others through a file
(``written_weights``). Each worker loads them, cast to its dtype, and reads them back from what the kernels compute
with; the checksum is of what was read. Keys and values of the old weights are dropped.
"""

import logging
import os
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from tandemrl.rollout.engine import SentWeights
from tandemrl.rollout.sync import check_shapes
from tandemrl.rollout.vllm.parameters import parameters_of, shapes_of, tied_heads

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64

# It warns with every reload that no checkpoint holds rotary tables and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)


@torch.no_grad()
def load_checkpoint_weights(runner: Any, weights: SentWeights) -> None:
    """Replace the weights of a model in place by a trainer's, cast to the engine's dtype.

    KV computed with the old weights is not dropped. The caller must reset the prefix cache.

    Args:
        runner: the model runner of the model.
        weights: the trainer's weights, with the names and the whole shapes of ``PreTrainedModel.named_parameters``, on
            any device. They are taken one by one: in the model's order, no more is held than the pieces of a layer.

    Raises:
        EngineError: a name or shape does not match, or a layer is quantised or of an unknown kind. No weight has
            changed.
    """
    model, config = runner.get_model(), runner.vllm_config
    check_shapes(weights.shapes, shapes_of(part for _, _, parts in parameters_of(model) for part in parts))
    # Detached, because the loader annotates tensors.
    stream = ((name, tensor.detach().to(config.model_config.dtype)) for name, tensor in weights)
    with set_current_vllm_config(config):
        runner.reload_weights(weights_iterator=stream)
        for _, head in tied_heads(model):
            # The reload renews the embedding's table, but not what a tied head has packed of it.
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def written_weights(weights: SentWeights, dtype: torch.dtype) -> Iterator[str]:
    """A context with a file of weights, for ``read_weights`` in other processes of this machine and user.

    The file has no name in any folder, so that nothing of it is left if this process is killed. It is in shared memory
    if there is room, else in the temporary directory. Weights are taken and written one by one, and cast to ``dtype``.

    Yields:
        A path by which it can be opened within the context. What was opened survives it.
    """
    head = pickle.dumps((dtype, dict(weights.shapes)))
    head += bytes(-len(head) % ALIGNMENT)
    size = len(head) + sum(map(prod, weights.shapes.values())) * dtype.itemsize
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TemporaryFile(dir=SHARED_MEMORY))
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            file = stack.enter_context(TemporaryFile())
        file.write(head)
        for _, tensor in weights:
            value = tensor.detach().to("cpu", dtype).contiguous()
            file.write(value.flatten().view(torch.uint8).numpy().data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def read_weights(path: str) -> SentWeights:
    """The weights of a file, mapped into memory. They are read when used, and survive the end of the context."""
    with open(path, "rb") as file:
        dtype, shapes = pickle.load(file)
        start = file.tell() + -file.tell() % ALIGNMENT
    content = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)[start:].view(dtype)
    pieces = content.split([prod(shape) for shape in shapes.values()])
    return SentWeights(shapes, ((n, piece.view(shapes[n])) for n, piece in zip(shapes, pieces, strict=True)))
