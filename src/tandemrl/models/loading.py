"""Loads models and tokenizers from folders or the hub, and connects models to the library's packed attention.

The headers of weight files tell what is missing or cut off before any weight is loaded. A path is checked before
transformers would take it for a hub id, so that the error says what is wrong with it. Nothing in a model is patched,
unless the user asks for kernels of ``trainable.use_liger``.
"""

import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils import logging as transformers_logging

from tandemrl.config.hints import hint
from tandemrl.models.attention import ATTENTION, ModelError, PackedLayout
from tandemrl.models.forward import packed_logits, with_gathered_parameters

_OPTIONAL = ("gated_repo", "missing_entries", "connection_errors")


def weight_files(path: str | Path, *, download: bool = False) -> list[Path]:
    """The safetensors files of a model in a folder or on the hub; none if it has another format.

    Args:
        download: download them. Otherwise there are none if not all of them are in the hub's cache.

    Raises:
        ModelError: a folder has no weights, a file of them is missing, or their index cannot be read.
    """

    def find(name: str) -> Path | None:
        optional: dict[str, Any] = {f"_raise_exceptions_for_{what}": False for what in _OPTIONAL}
        found = cached_file(path, name, local_files_only=not download, **optional)
        return None if found is None else Path(found)

    if whole := find(SAFE_WEIGHTS_NAME):
        return [whole]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        if (Path(path) / CONFIG_NAME).is_file() and not (find(WEIGHTS_NAME) or find(WEIGHTS_INDEX_NAME)):
            expected = f"{SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}"
            raise ModelError(f"{path}: no weights are there; expected {expected}")
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weight files ({error}); copy or download it again") from None
    files = [found for name in names if (found := find(name))]
    if len(files) < len(names) and (download or Path(path).is_dir()):
        missing = next(name for name in names if name not in {file.name for file in files})
        raise ModelError(
            f"{index.parent / missing}: no such file; {len(names) - len(files)} of the {len(names)} files of weights "
            f"that {index.name} names are missing. Copy or download them again"
        )
    return files if len(files) == len(names) else []


@contextmanager
def opened(path: str | Path, *, download: bool = False) -> Iterator[dict[str, Any]]:
    """A context with every tensor of a model's safetensors files by name, to be read later. Only headers are read.

    Args:
        download: as for ``weight_files``.

    Raises:
        ModelError: as ``weight_files``, or a file is not whole.
    """
    with ExitStack() as files:
        slices: dict[str, Any] = {}
        for file in weight_files(path, download=download):
            try:
                tensors = files.enter_context(safe_open(file, framework="pt"))
                names = tensors.keys()  # it cannot be iterated itself
                slices |= {name: tensors.get_slice(name) for name in names}
            except SafetensorError as error:
                raise ModelError(
                    f"{file}: no whole safetensors file ({error}); copy or download it again, or `git lfs pull`"
                ) from None
        yield slices


def stored_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model's safetensors files that are on this machine, by name.

    Raises:
        ModelError: as ``opened``.
    """
    with opened(path) as tensors:
        return {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}


def check_weights(path: str | Path, model: PreTrainedModel, *, without: str | None = None) -> None:
    """Check by their headers that a model's weight files are whole and have every parameter of ``model``.

    Names and shapes are not compared for an architecture whose files hold other tensors than its parameters.

    Args:
        model: the model of the path's configuration; its parameters may be on the meta device.
        without: the name of a submodule whose parameters need not be there.

    Raises:
        ModelError: as ``stored_shapes``, or parameters are missing there or have another shape.
    """
    stored = stored_shapes(path)
    if stored and not is_converted(model) and (problems := misfits(model, stored, without=without)):
        raise ModelError(
            f"{path}: {len(problems)} of its weights do not fit the model, the first: {problems[0]}. "
            f"Its weights and its {CONFIG_NAME} are not of one model, or a file is missing"
        )


def misfits(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]], *, without: str | None = None) -> list[str]:
    """Which parameters of a model its files lack or hold in another shape, in words.

    Args:
        stored: the shapes of the tensors in the files, by name.
        without: the name of a submodule whose parameters need not be there.
    """
    found, shapes = [], {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, key in stored_names(model, stored).items():
        there = stored.get(key)
        if there is None and not (without and name.startswith(f"{without}.")):
            found.append(f"{name} is missing")
        elif there is not None and there != shapes[name]:
            found.append(f"{key} is {list(there)} there, {list(shapes[name])} by its {CONFIG_NAME}")
    return found


def stored_names(model: PreTrainedModel, stored: Container[str]) -> dict[str, str]:
    """For each parameter, the name under which the files store it. It may be the name of a parameter that is tied to
    it, or its name in the body, if the files are of the body alone."""
    body = f"{model.base_model_prefix}."
    every = {names[0]: (*names, *(name.removeprefix(body) for name in names)) for names in tied_names(model)}
    return {name: next((each for each in names if each in stored), name) for name, names in every.items()}


def tied_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers makes the model's parameters out of other tensors in its files."""
    return bool(get_model_conversion_mapping(model, add_legacy=False)) or hasattr(model.config, "quantization_config")


# ------------------------------------------------------------------------------------------------ models and tokenizers

CONFIG = "config.json"


def resolve_device(device: str) -> torch.device:
    """The torch device of a config's ``model.device``.

    ``auto`` stands for cuda if there is a CUDA device, else for cpu. Of several CUDA devices, ``cuda`` is the one of
    this process (torchrun's ``LOCAL_RANK``).

    Raises:
        ModelError: it is not a torch device, or this machine has no such CUDA device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(f"cuda:{rank}" if device == "cuda" and (rank := os.getenv("LOCAL_RANK")) else device)
    except RuntimeError:
        raise ModelError(f"model.device={device}: not a torch device; use auto, cpu or cuda") from None
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= present:
        sees = f"torch {torch.__version__} sees {present or 'no'} CUDA device(s)"
        raise ModelError(f"model.device={resolved}: {sees}; choose one of them, or model.device=cpu")
    return resolved


def use_deterministic_kernels() -> None:
    """Let torch use only CUDA kernels that add in a fixed order, in this process from now on. It warns of an operation
    that has none. To be called before the first matrix product on the GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of more workspaces than one, cuBLAS takes any
    torch.use_deterministic_algorithms(True, warn_only=True)


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """Load a causal LM in eval mode on ``device``, with this library's attention.

    Raises:
        ModelError: it cannot be loaded, weights are missing, it is not a causal LM with standard attention, or its head
            is more than a linear map.
    """
    model, missing = from_files(AutoModelForCausalLM, path, dtype=getattr(torch, dtype))
    refuse_missing("model", path, missing)
    model.to(resolve_device(device))
    return prepare(model, name=str(path))


def from_files(kind: Any, path: str | Path, what: str = "model", **options: Any) -> tuple[Any, list[str]]:
    """What ``kind.from_pretrained`` makes of a model's files, and which weights it has drawn at random.

    Args:
        kind: an auto class of transformers.

    Raises:
        ModelError: the model cannot be loaded.
    """
    check_folder(path)
    stored_shapes(path)  # names the file that is not whole
    with no_progress_bars(), _refused(what, path):
        model, report = kind.from_pretrained(path, output_loading_info=True, trust_remote_code=False, **options)
    return model, sorted(map(str, report["missing_keys"]))


def refuse_missing(what: str, path: str | Path, missing: Sequence[str]) -> None:
    """Refuse a model whose files lack weights.

    Raises:
        ModelError: ``missing`` is not empty.
    """
    if missing:
        raise ModelError(f"{what} {str(path)!r}: {len(missing)} weights are missing there, the first is {missing[0]}")


def load_configuration(
    path: str | Path, *, what: str = "model", download: bool = True, **options: Any
) -> PretrainedConfig:
    """The configuration of a model in a folder or on the hub.

    Args:
        what: what the message calls the model.
        download: download it from the hub if it is not on this machine.

    Raises:
        ModelError: it cannot be read.
    """
    check_folder(path)
    options |= {"trust_remote_code": False, "local_files_only": not download}
    with _refused(what, path):
        found: PretrainedConfig = AutoConfig.from_pretrained(path, **options)
    return found


_PROBES = ((0, 1), (1009, 97), (50021, 1009))
"""The first id of each seven, and the step between them."""


def prepare(
    model: PreTrainedModel, *, name: str = "model", head: nn.Linear | None = None, device: torch.device | None = None
) -> PreTrainedModel:
    """Connect a loaded model to the library's attention, in place, and check on a probe that it computes as before.

    All processes of a sharded model must call this together. The probe runs in the dtype in which the model computes.

    Args:
        name: what error messages call the model.
        head: the linear map from hidden states to ``model(...).logits``. None means the LM head.
        device: the device on which the model computes. None means that of the head.

    Raises:
        ModelError: the architecture ignores the attention interface, carries state other than attention from token to
            token, or transforms its logits after the LM head. Or weights are NaN or infinite.
    """
    model.eval()
    if model.config._attn_implementation == ATTENTION:
        return model
    check_positions(model.config, name=name)
    head = model.get_output_embeddings() if head is None else head
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{name}: no linear LM head; only causal LMs are supported")
    # Two sequences: state other than attention (recurrences, convolutions) would leak from the first into the second.
    # With three kinds of ids: an odd sequence may be one of which rounding alone changes the logits. A model that
    # computes otherwise does so for all of them.
    lengths, device = [4, 3] * len(_PROBES), device or head.weight.device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    ids = torch.cat([first + step * torch.arange(7, device=device) for first, step in _PROBES])
    probe = ids % model.config.get_text_config().vocab_size
    with torch.no_grad():
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in probe.split(lengths)]
        tolerance = 1e-3 if alone[0].dtype == torch.float32 else 0.1
        stock = torch.cat(alone).float()
        if not stock.isfinite().all():
            parts = {each: p.to_local() if isinstance(p, DTensor) else p for each, p in model.named_parameters()}
            wrong = next((each for each, part in parts.items() if not part.isfinite().all()), "")
            why = f"the weight {wrong} is (damaged, or training had diverged)" if wrong else f"{model.dtype} overflows"
            raise ModelError(f"{name}: its logits are NaN or infinite: {why}")
        try:
            model.set_attn_implementation(ATTENTION)
            spans = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
            logits = with_gathered_parameters(packed_logits, model)
            packed = logits(head, probe, positions, PackedLayout(spans, device)).float()
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{name}: {type(model).__name__} does not support custom attention: {error}") from None
    gap = (stock - packed).abs().amax(-1).view(len(_PROBES), -1).amax(-1).min().item()  # of the best of them
    if not gap <= tolerance * max(1.0, stock.abs().max().item()):
        raise ModelError(
            f"{name}: {type(model).__name__} produces different logits through the packed path (max difference "
            f"{gap:.3g}): its attention or its LM head is not a standard one"
        )
    return model


def check_positions(config: PretrainedConfig, *, name: str) -> None:
    """Check that the rotary frequencies of a model do not depend on the length of the text.

    Raises:
        ModelError: they do.
    """
    found = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for each in (found, *(value for value in found.values() if isinstance(value, dict))):  # or by type of layer
        if (rope := each.get("rope_type")) in ("dynamic", "longrope"):
            raise ModelError(
                f"{name}: rope_type {rope} makes a text depend on its neighbours in a batch; it is unsupported"
            )


def attention_window(config: PretrainedConfig) -> int | None:
    """How many tokens the layer with the shortest sight attends to. None means that all layers see the whole text."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    if getattr(text, "use_sliding_window", True) is False:
        del windows["sliding_attention"]
    found = [getattr(text, windows[kind], None) for kind in set(kinds) & windows.keys()]
    return min((window for window in found if window), default=None)


def visible_tokens(config: PretrainedConfig) -> dict[str, int]:
    """How many tokens of one text a model of this configuration can be given here, by what limits them.

    Positions end with its ``context``. With layers of a shorter ``attention window``, no text is longer than what they
    see, so that attention to all of it is what the model has learnt.
    """
    limits = {
        "context": getattr(config.get_text_config(), "max_position_embeddings", None),
        "attention window": attention_window(config),
    }
    return {what: int(limit) for what, limit in limits.items() if limit}


def context_of(config: PretrainedConfig) -> int:
    """How many tokens of one text a model of this configuration can be given here."""
    return min(visible_tokens(config).values(), default=2**31 - 1)


def load_tokenizer(path: str | Path, *, download: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Args:
        download: download the tokenizer from the hub if it is not on this machine.

    Raises:
        ModelError: it cannot be loaded, or its files are missing.
    """
    check_folder(path)
    with _refused("tokenizer of", path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=not download)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes out of no files
        raise ModelError(
            f"{path}: no tokenizer is there, only a model; copy its files (tokenizer.json, tokenizer_config.json and, "
            "if there is one, chat_template.jinja) from the model that it was made from"
        )
    return tokenizer


def vocabulary_check(
    senior: PreTrainedTokenizerBase, junior: PreTrainedTokenizerBase, *, other: str = "junior"
) -> None:
    """Check that two tokenizers agree on every token id. Only then can two models share tokens, caches and log-probs.

    Args:
        other: what the message calls the second model.

    Raises:
        ModelError: they differ; the message says in how many ids, and names the first of them.
    """
    if differing := differing_entries(senior, junior):
        why = (
            "Models of two vocabularies work together in training, evaluations and `tandemrl serve` with the torch "
            "engine (selection.strategy=before_word), but not here; `tandemrl check --senior MODEL "
            "--junior MODEL` says what works with these two"
            if other == "junior"
            else "They read the same tokens"
        )
        token, index = differing[0]
        raise ModelError(
            f"senior and {other} have different vocabularies: {len(differing)} entries differ, the first is {token!r} "
            f"(id {index}). {why}. Choose a {other} of the senior's tokenizer family."
        )


def junior_tokenizer_of(
    senior: str,
    junior: str | None,
    *,
    endpoint: bool = False,
    load: Callable[[str], PreTrainedTokenizerBase] = load_tokenizer,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a junior that has a vocabulary of its own; None if there is one vocabulary, or no junior.

    Args:
        endpoint: whether the junior is behind an endpoint. It is then treated as if it had one of its own.
        load: loads the tokenizer of a model.

    Raises:
        ModelError: a tokenizer cannot be loaded.
    """
    if junior is None:
        return None
    found = load(junior)
    return found if endpoint or differing_entries(load(senior), found) else None


def differing_entries(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> list[tuple[str, int]]:
    """The tokens, with their ids, that only one of two tokenizers has, by id."""
    return sorted(set(one.get_vocab().items()) ^ set(other.get_vocab().items()), key=lambda item: item[1])


def eos_token_ids(
    generation: GenerationConfig | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """The token ids that end a completion: those of a model's generation config, or of its configuration if that names
    none, and the tokenizer's EOS token."""
    configured = None if generation is None else generation.eos_token_id
    if configured is None:
        configured = GenerationConfig.from_model_config(config).eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def stored_eos_token_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, junior: str | None = None, *, download: bool = True
) -> tuple[int, ...]:
    """The ids that end a text of a model in a folder or on the hub, and of its junior, without loading their weights.

    Args:
        junior: a junior of the same vocabulary, whose own ends count, too.
        download: download the generation config from the hub if it is not on this machine.
    """
    if junior is not None:
        its = stored_eos_token_ids(junior, load_tokenizer(junior), download=download)
        return tuple(sorted({*stored_eos_token_ids(path, tokenizer, download=download), *its}))
    try:
        generation = GenerationConfig.from_pretrained(path, local_files_only=not download)
    except OSError:  # it has none
        generation = None
    return eos_token_ids(generation, load_configuration(path, download=download), tokenizer)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """A context in which transformers draws no progress bars, which would break into the console of a run."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


# ---------------------------------------------------------------------------------------------------------------- paths


def is_local(path: str | Path) -> bool:
    """Whether a path names a folder, existing or not, rather than a hub id (NAME or OWNER/NAME)."""
    folder = Path(path)
    return (
        folder.exists()
        or folder.is_absolute()
        or len(folder.parts) > 2
        or str(path).startswith((".", "~"))
        or (len(folder.parts) == 2 and folder.parent.is_dir())
    )


def check_folder(path: str | Path) -> None:
    """Refuse a local path without a model, before transformers would take it for a hub id.

    Raises:
        ModelError: the folder does not exist, or has neither a model nor a tokenizer.
    """
    folder = Path(path)
    if any((folder / name).is_file() for name in (CONFIG, "tokenizer_config.json")) or not is_local(path):
        return
    runs = [parent.parent for parent in (folder, *folder.parents) if parent.name == "checkpoints"]
    exports = [run / "hf" / name for run in runs for name in (folder.name, "best")]
    for home in (folder / "hf", folder):
        steps = sorted(home.glob("step_*"), key=lambda each: (len(each.name), each.name), reverse=True)
        exports += [home / "best", *steps]
    export = next((f"; did you mean {each}?" for each in (*exports, folder / "senior") if each.is_dir()), "")
    if not folder.exists():
        tiny, dash, pair = folder.parent.name.partition("-")
        command = f"tandemrl model tiny{f' {pair}' if dash else ''} --out {folder.parent}"
        build = f"; build it: {command}" if tiny == "tiny" else ""
        near = hint(folder)
        mistyped = near if folder.parent.is_dir() and folder.name not in ("senior", "junior") else ""
        fix = export or mistyped or build or near or "; name a model's folder, such as runs/NAME/hf/best"
        raise ModelError(f"{path}: no such folder{fix}")
    kind = "a file; expected the folder of a model" if folder.is_file() else "neither a model nor a tokenizer is there"
    kind = "a training checkpoint, not a model" if (folder / "meta.json").is_file() else kind
    raise ModelError(f"{path}: {kind}{export}")


@contextmanager
def _refused(what: str, path: str | Path) -> Iterator[None]:
    """A context in which what transformers raises for a folder that it cannot load becomes a `refusal`."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, UnpicklingError, SafetensorError) as error:
        raise refusal(what, path, error) from None


def refusal(what: str, path: str | Path, error: Exception) -> ModelError:
    """An error that says why transformers could not load a model or tokenizer.

    Args:
        what: what the message calls it, such as ``model``.
        error: what transformers raised.
    """
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        reason = (
            "it comes with Python code of its own, which is never run (trust_remote_code=False); use a model of an "
            "architecture that transformers has"
        )
    elif isinstance(error, UnpicklingError | EOFError):
        reason = (
            "its weights (.bin) are a pickle that is damaged or holds more than tensors. A pickle is a program, and is "
            "not run; take the model's safetensors files, or convert it (save_pretrained) where you trust it"
        )
    elif not is_local(path):
        fix = "correct the path or the name, connect to the hub, or copy a folder or the hub's cache (HF_HOME) here"
        reason = f"there is no such folder, and from the hub: {reason.rstrip('.')}; {fix}"
    return ModelError(f"{what} {str(path)!r} could not be loaded: {reason}")
