"""What produced a result: the interpreter, the libraries, and the revision of this code."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str | bool | None]:
    """What produced a result: Python, libraries, and the git revision of this code (None when not from a checkout)."""
    tracked = _git("ls-files", "--error-unmatch", Path(__file__).name)
    revision = _git("rev-parse", "HEAD") if tracked else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "tandemrl")},
        "git_revision": revision,
        "git_dirty": None if revision is None else bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        here = str(Path(__file__).parent)
        done = subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
