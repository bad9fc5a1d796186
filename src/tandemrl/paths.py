"""What a path that does not exist was probably meant to be. No torch."""

import difflib
from pathlib import Path


def hint(path: str | Path) -> str:
    """``"; did you mean PATH?"`` for a missing path whose first missing part is close to a name that is there, else "".

    Example:
        >>> hint("no/such/place/at/all")
        ''
    """
    wanted = Path(path).expanduser()
    here = next(parent for parent in (wanted, *wanted.parents) if parent.exists() or not parent.name)
    name, *rest = wanted.relative_to(here).parts or ("",)
    try:
        names = [entry.name for entry in here.iterdir()]
    except OSError:
        return ""
    for close in difflib.get_close_matches(name, names, n=3):
        if (found := here.joinpath(close, *rest)).exists():
            return f"; did you mean {found}?"
    return ""
