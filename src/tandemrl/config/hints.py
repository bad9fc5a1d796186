"""What an error tells its reader to do: the path that was meant, the extra to install."""

import difflib
import os
from pathlib import Path


def hint(path: str | Path) -> str:
    """The text "; did you mean PATH?" if an existing path is close to the missing ``path``, else an empty text.

    A path is close if it exists and differs only in the first part that is missing, whose name must be similar.

    Examples:
        >>> hint("no/such/place/at/all")
        ''
    """
    missing = Path(path).expanduser()
    here = next(parent for parent in (missing, *missing.parents) if parent.exists() or not parent.name)
    name, *rest = missing.relative_to(here).parts or ("",)
    for close in difflib.get_close_matches(name, [entry.name for entry in here.glob("*")], n=3):
        if (candidate := here.joinpath(close, *rest)).exists():
            return f"; did you mean {candidate}?"
    return ""


def no_folder(path: str | Path) -> str:
    """Why no folder can be written at a path, and the fix; an empty text if one can."""
    path = Path(path).absolute()
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.is_dir():
        return f"{'' if there == path else f'{there} is '}a file; choose a folder, which need not exist"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to; choose another place"


def pip_install(extra: str) -> str:
    """The command that installs an extra of this library: in the clone if it runs from one, else from PyPI."""
    in_a_clone = (Path(__file__).parents[3] / "pyproject.toml").is_file()
    return f"pip install -e '.[{extra}]'" if in_a_clone else f"pip install 'tandemrl[{extra}]'"
