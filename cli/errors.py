"""Which errors are the user's to fix, and how they are printed."""


def is_users(error: Exception) -> bool:
    """Whether the message is meant for the user: an error class of this library, or a file that cannot be used."""
    ours = any(base.__module__.startswith("tandemrl.") for base in type(error).__mro__)
    return ours or (isinstance(error, OSError) and not isinstance(error, BrokenPipeError))


def one_line(error: Exception) -> str:
    """The message without line breaks; an ``OSError`` starts with its file."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())
