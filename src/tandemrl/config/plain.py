"""A config as plain values: nested dicts, YAML, flat keys, and what differs between two."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandemrl.config.schema import Config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict with lists for tuples: what is stored in ``config.yaml`` and result files."""
    return {key: plain(value) for key, value in asdict(config).items()}


def to_yaml(config: Config) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def difference(a: Config, b: Config) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ: ``{key: (value in a, value in b)}``."""
    left, right = flatten(to_dict(a)), flatten(to_dict(b))
    keys = [*left, *(key for key in right if key not in left)]  # of reward.scorers, each may have its own
    return {key: (left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)}


def plain(value: Any) -> Any:
    """Dicts and lists all the way down."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key.

    Examples:
        >>> flatten({"eval": {"seed": 1, "k": [1]}})
        {'eval.seed': 1, 'eval.k': [1]}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
