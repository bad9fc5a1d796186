"""Model folders and hub ids: what is wrong with one, said before or instead of what transformers would say."""

from collections.abc import Iterator
from pathlib import Path

from tandemrl.files import hint
from tandemrl.models.attention import ModelError

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"


def is_local(path: str | Path) -> bool:
    """Whether a path names a folder, there or not, and no hub id (NAME or OWNER/NAME)."""
    folder = Path(path)
    return (
        folder.exists()
        or folder.is_absolute()
        or len(folder.parts) > 2
        or str(path).startswith((".", "~"))
        or (len(folder.parts) == 2 and folder.parent.is_dir())
    )


def check_folder(path: str | Path) -> None:
    """Say what is wrong with a local path before it is taken for a hub id.

    Raises:
        ModelError: a folder without a model, or a local path that does not exist.
    """
    folder = Path(path)
    if any((folder / name).is_file() for name in (CONFIG, TOKENIZER_CONFIG)) or not is_local(path):
        return
    export = next((f"; did you mean {each}?" for each in _exports(folder) if each.is_dir()), "")
    if not folder.exists():
        build = (
            f"; build it: tandemrl model tiny --out {folder.parent}" if folder.parent.name.startswith("tiny") else ""
        )
        raise ModelError(f"{path}: no such folder{export or hint(folder) or build}")
    if not folder.is_dir():
        raise ModelError(f"{path}: a file; expected the folder of a model{export}")
    kind = "a training checkpoint, not a model" if (folder / "meta.json").is_file() else ""
    raise ModelError(f"{path}: {kind or 'neither a model nor a tokenizer is there'}{export}")


def _exports(folder: Path) -> Iterator[Path]:
    """Where the model may be that somebody looks for in a part of a run, in a run or in a tiny pair."""
    for run in (parent.parent for parent in (folder, *folder.parents) if parent.name == "checkpoints"):
        yield from (run / "hf" / folder.name, run / "hf" / "best")
    for home in (folder / "hf", folder):
        yield home / "best"
        yield from sorted(home.glob("step_*"), key=lambda each: (len(each.name), each.name), reverse=True)
    yield folder / "senior"


def refusal(what: str, path: str | Path, error: Exception) -> ModelError:
    """What transformers has against a model or tokenizer, as one error. what: e.g. ``model``."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        reason = (
            "it comes with Python code of its own, which is never run (trust_remote_code=False); use a model of an "
            "architecture that transformers has"
        )
    elif not is_local(path):
        reason = f"there is no such folder, and from the hub: {reason}"
    return ModelError(f"{what} {str(path)!r} could not be loaded: {reason}")
