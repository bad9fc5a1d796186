"""A config as plain values: nested dicts, YAML, flat keys, and the difference of two configs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandemrl.config.schema import Config
from tandemrl.config.written import written


def to_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts, with lists for tuples, as ``config.yaml`` and result files store it."""
    return {key: plain(value) for key, value in asdict(config).items()}


def to_yaml(config: Config) -> str:
    """The config as YAML, which ``load`` reads as the same config."""
    return written(to_dict(config))


def difference(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """The dotted keys whose values differ: ``{key: (value in a, value in b)}``."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    keys = [*left, *(key for key in right if key not in left)]  # of reward.scorers, each may have its own
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def plain(value: Any) -> Any:
    """A value with all nested mappings and sequences as dicts and lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested mapping, by dotted key.

    Examples:
        >>> flatten({"eval": {"seed": 1, "k": [1]}})
        {'eval.seed': 1, 'eval.k': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
