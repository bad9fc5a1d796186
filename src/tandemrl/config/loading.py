"""Loads and checks a config from a YAML file and ``key=value`` overrides.

A run is defined by three things: a config file that says what differs from the defaults, the overrides on the command
line, and the code revision. All three are stored with every checkpoint and result.
"""

import copy
import difflib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from tandemrl.config.fields import ConfigError
from tandemrl.config.plain import flatten, plain
from tandemrl.config.reference import expected
from tandemrl.config.rules import check
from tandemrl.config.schema import Config
from tandemrl.files import hint

_ABSENT = object()


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a config: the defaults, changed by a YAML file, changed by ``key=value`` overrides. The result is checked.

    Args:
        path: a YAML file, the name of a packaged one (``quickstart`` or ``quickstart.yaml``), or a run's folder, which
            stands for its ``config.yaml``. None means the defaults only.
        overrides: dotted assignments such as ``train.lr=1e-5``. What follows the ``=`` is read as YAML; for a key that
            takes a text, it is that text, unless it is ``null`` or begins with a quotation mark or bracket.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or a file cannot be read; the message names it.

    Examples:
        >>> load(overrides=["train.lr=1e-5"]).train.lr
        1e-05
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    sources: list[tuple[str, Any]] = []
    if path is not None:
        file = str(find_config(path))
        _require_utf8(file)
        source = _parsed(file, OmegaConf.load, file)
        if OmegaConf.is_dict(source) and not source:
            raise ConfigError(f"{file} is empty; write what differs from the defaults (see `tandemrl config`)")
        sources.append((file, source))
    if isinstance(overrides, str | Mapping):
        raise ConfigError(f"overrides={overrides!r}: expected a list, as ['train.lr=1e-5', 'train.steps=20']")
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r}: expected key=value, e.g. train.lr=1e-5")
        sources.append((item, _assigned(item)))
    merged = copy.deepcopy(_defaults())
    unset: set[str] = set()
    removed: dict[str, str] = {}
    for where, source in sources:
        if not OmegaConf.is_dict(source):
            raise ConfigError(f"{where}: expected a mapping of sections, found {type(source).__name__}")
        _rename(source, where)
        removed |= _removed(source, where)
        _refuse_unknown(OmegaConf.to_container(source), Config, where)
        for key in ("data.train", "data.eval", "data.monitor"):  # one source may be written without the list brackets
            if isinstance(value := OmegaConf.select(source, key), str):
                OmegaConf.update(source, key, [value])
        missing = OmegaConf.missing_keys(source)  # `???`: a value that the config leaves to the user; merge skips it
        unset = {key for key in unset if OmegaConf.select(source, key, default=_ABSENT) is _ABSENT} | missing
        try:
            merged = OmegaConf.unsafe_merge(merged, source)  # in place: `merge` copies all keys each time
        except (OmegaConfBaseException, TypeError) as error:
            at = getattr(error, "full_key", None)
            raise ConfigError(_bad_value(where, at, source, str(error).splitlines()[0])) from None
    for key in sorted(unset & removed.keys()):
        raise ConfigError(removed[key])
    if unset:
        assignments = ", ".join(f"{key}=…" for key in sorted(unset))
        raise ConfigError(f"{sources[0][0]} leaves a value to you (???); set {assignments}")
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    assert isinstance(config, Config)
    check(config)
    length = {"train.steps", "train.epochs"}
    if config.train.epochs is not None and stated_keys(overrides) & length == {"train.steps"}:
        raise ConfigError(
            f"train.steps={config.train.steps} has no effect beside train.epochs={config.train.epochs:g} of {path}; "
            "add train.epochs=null, or leave train.steps out"
        )
    return config


@cache
def _defaults() -> Any:
    """All keys with their types and defaults, to be copied: making them takes longer than the rest of ``load``."""
    from omegaconf import OmegaConf

    return OmegaConf.structured(Config)


def stated_keys(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that ``key=value`` overrides set.

    Examples:
        >>> sorted(stated_keys(["train.lr=1e-5", "reward={scorers: {mydata: boxed}}"]))
        ['reward.scorers.mydata', 'train.lr']
    """
    from omegaconf import OmegaConf

    return set(chain(*(flatten(plain(OmegaConf.to_container(_assigned(item)))) for item in overrides)))


def _assigned(item: str) -> Any:
    """The mapping of sections that a ``key=value`` override stands for.

    Raises:
        ConfigError: the value cannot be read.
    """
    from omegaconf import OmegaConf

    key, _, text = item.partition("=")
    path, annotation = _place(key)
    if _takes_text(annotation, text):
        value: Any = text
    else:
        parsed: Any = OmegaConf.to_container(_parsed(item, OmegaConf.from_dotlist, [f"value={text}"]))
        value = parsed["value"]
    if "[" in key:  # OmegaConf's own way to write a key with dots
        source = OmegaConf.create()
        OmegaConf.update(source, key, value, force_add=True)
        return source
    return OmegaConf.create(reduce(lambda inner, name: {name: inner}, reversed(path), value))


def _place(key: str) -> tuple[list[str], Any]:
    """The names that lead to a dotted key, and the type there, or None if it is unknown.

    What follows the key of a mapping of texts or numbers is one name, since a ``data_source`` may have dots.
    """
    names = key.split(".")
    annotation: Any = Config
    for i, name in enumerate(names):
        if is_dataclass(annotation):
            annotation = get_type_hints(annotation).get(name)
        elif get_origin(annotation) is dict:
            inner = get_args(annotation)[1]
            return ([*names[:i], ".".join(names[i:])], inner) if inner in (str, float) else (names, None)
        else:
            return names, None
    return names, annotation


def _takes_text(annotation: Any, text: str) -> bool:
    """Whether a value is a text as it stands, and not YAML: its key takes a text, or a list that may have one alone."""
    kinds = get_args(annotation)
    listed = get_origin(annotation) is tuple and kinds[0] is str
    if annotation is not str and set(kinds) != {str, NoneType} and not listed:
        return False
    other = text in ("null", "~", "???") or "${" in text or text[:1] in ("'", '"', "[", "{")
    return not other and (bool(text) or not kinds)


def warn_of_reward_function(config: Config) -> None:
    """Warn that a config alone cannot score as its run did, if that run was given a reward function."""
    if config.functions.reward is not None:
        warnings.warn(
            f"functions.reward: this config's run was rewarded by {config.functions.reward.name}, which no file holds; "
            "here reward.scorers and the rows' data_source decide",
            stacklevel=2,
        )


def find_config(path: str | Path) -> Path:
    """The file that a path stands for: an existing file, else a packaged config of that name, else the ``config.yaml``
    of a run's folder.

    Raises:
        ConfigError: it is none of these; the message lists the packaged names.
    """
    candidate = Path(path)
    if candidate.is_file():
        return candidate
    packaged = packaged_configs()
    if candidate.parent in (Path("."), Path("configs")) and candidate.name.removesuffix(".yaml") in packaged:
        return packaged[candidate.name.removesuffix(".yaml")]
    names = f"packaged configs: {', '.join(packaged)}"
    if candidate.is_dir():
        if (inside := candidate / "config.yaml").is_file():
            return inside
        raise ConfigError(f"config {str(path)!r}: a folder without a config.yaml, so not that of a run; {names}")
    if len(candidate.parts) > 1 or candidate.suffix:
        named = _closest(candidate.stem, packaged) if len(candidate.parts) == 1 else ""
        raise ConfigError(f"config {str(path)!r}: no such file{hint(candidate) or f'{named}; {names}'}")
    raise ConfigError(f"config {str(path)!r} not found{_closest(candidate.name, packaged)}; {names}")


def packaged_configs() -> dict[str, Path]:
    """The configs that come with the library, by name."""
    from importlib.resources import files

    paths = sorted(Path(str(file)) for file in files("tandemrl.configs").iterdir() if file.name.endswith(".yaml"))
    return {path.stem: path for path in paths}


def _closest(name: str, packaged: Collection[str]) -> str:
    """A question that names the packaged config that was probably meant, or nothing."""
    longer = [known for known in packaged if known.startswith(name)]
    close = longer or difflib.get_close_matches(name, packaged, n=1)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _require_utf8(file: str) -> None:
    try:
        Path(file).read_bytes().decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}, line {line}: not UTF-8; save the file as UTF-8") from None


def _parsed(where: str, parse: Callable[[Any], Any], text: str | list[str]) -> Any:
    try:
        return parse(text)
    except Exception as error:
        at, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        if at is not None and isinstance(text, str):
            fix = "compare its indentation, brackets and quotes with the lines above"
            raise ConfigError(f"{where}, line {at.line + 1}: not readable as YAML: {problem}; {fix}") from None
        raise ConfigError(f"{where}: not readable as YAML: {' '.join(str(error).split())}") from None


RENAMED = {"parallel.offload": "parallel.offload_parameters", "rollout.world_tokens": "rollout.observation_tokens"}
"""Keys of earlier versions, which the ``config.yaml`` of a run may have, and their present names."""


def _rename(source: Any, where: str) -> None:
    """Rename keys that have an earlier name to the present one, in place, with a warning."""
    from omegaconf import OmegaConf

    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        parent = OmegaConf.select(source, section)
        if not OmegaConf.is_dict(parent) or name not in parent:
            continue
        if OmegaConf.select(source, new, default=_ABSENT) is not _ABSENT:
            raise ConfigError(f"{where}: {old} is the earlier name of {new}; set {new} alone")
        value = parent.pop(name)
        if value:
            warnings.warn(f"{where}: {old} is called {new} now", stacklevel=3)
        OmegaConf.update(source, new, value, force_add=True)


REMOVED = {
    ("rollout.vllm.mode", "majority"): "this mode was removed; set auto, which writes the same tokens "
    "(and drafts with rollout.draft_tokens=auto)"
}
"""Values of earlier versions that no longer exist, each with the reason and what to use."""


REMOVED_KEYS = {
    "rollout.in_flight": (False, "train.async_steps=1 overlaps rollouts and updates without it"),
    "eval.select_by": (None, "train.select_by=pass@k or train.select_by=reward chooses hf/best"),
}
"""Keys of earlier versions that no longer exist, each with its default, which is ignored, and what to do instead."""


def _removed(source: Any, where: str) -> dict[str, str]:
    """The keys that have a removed value, each with a message. They are left to later sources, as with ``???``.

    Raises:
        ConfigError: a removed key has another value than its default.
    """
    from omegaconf import OmegaConf

    for key, (default, instead) in REMOVED_KEYS.items():
        section, _, name = key.rpartition(".")
        parent: Any = OmegaConf.select(source, section) if OmegaConf.is_dict(source) else None
        if OmegaConf.is_dict(parent) and name in parent and parent.pop(name) != default:
            raise ConfigError(f"{where}: {key} was removed in 0.2; leave it out: {instead}")
    found = {}
    for (key, value), why in REMOVED.items():
        if OmegaConf.is_dict(source) and OmegaConf.select(source, key, default=None) == value:
            shown = where if "=" in where else f"{where}: {key}={value}"
            found[key] = f"{shown}: {why}"
            OmegaConf.update(source, key, "???")
    return found


ELSEWHERE = {
    "critic.optim.lr": "train.critic_lr",
    **dict.fromkeys(("learning_rate", "optim.lr"), "train.lr"),
    **dict.fromkeys(("max_steps", "total_training_steps"), "train.steps"),
    **dict.fromkeys(("num_generations", "rollout.n", "rollouts_per_example"), "rollout.group_size"),
    "train_files": "data.train",
    "val_files": "data.eval",
    "train_batch_size": "train.prompts_per_step",
    "ppo_mini_batch_size": "train.mini_batch_prompts",
    **dict.fromkeys(("per_device_train_batch_size", "ppo_max_token_len_per_gpu"), "train.tokens_per_micro_batch"),
    "max_prompt_length": "data.max_prompt_tokens",
    **dict.fromkeys(("max_completion_length", "max_response_length"), "rollout.max_tokens"),
    **dict.fromkeys(("loss_type", "adv_estimator", "loss_mode"), "loss.recipe"),
    "loss_agg_mode": "loss.reduction",
    **dict.fromkeys(("epsilon", "clip_ratio_low"), "loss.clip_low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "loss.clip_high"),
    **dict.fromkeys(("beta", "kl_loss_coef"), "loss.kl_coef"),
    "kl_loss_type": "loss.kl_kind",
    "use_kl_in_reward": "loss.kl_in_reward",
    "entropy_coeff": "loss.entropy_coef",
    **dict.fromkeys(("save_steps", "save_freq"), "train.save_every"),
    **dict.fromkeys(("eval_steps", "test_freq"), "train.eval_every"),
    "default_local_dir": "output_dir",
    "use_vllm": "rollout.engine",
    **dict.fromkeys(("tensor_model_parallel_size", "vllm_tensor_parallel_size"), "rollout.tensor_parallel"),
    "lora_rank": "model.lora.rank",
    **dict.fromkeys(("report_to", "logger"), "train.wandb"),
}
"""Keys of TRL, verl and prime-rl, without verl's sections, and ours: those of `docs/howto/coming_from.md`."""


def _of_others(typed: str) -> str:
    """The key that one of another library stands for, or none."""
    return next((ours for theirs, ours in ELSEWHERE.items() if f".{typed}".endswith(f".{theirs}")), "")


def _elsewhere(typed: str) -> str:
    """The key of another section that an unknown one probably stands for, or none."""
    from omegaconf import OmegaConf

    ours = flatten(OmegaConf.to_container(_defaults()))  # type: ignore[arg-type]  # a mapping
    same = [dotted for dotted in ours if dotted.rpartition(".")[2] == typed.rpartition(".")[2]]
    return same[0] if len(same) == 1 else ""


def _refuse_unknown(tree: Any, schema: type, where: str, prefix: str = "") -> None:
    """Refuse unknown keys. The error names the key, the allowed keys and the most similar one."""
    known = {f.name: f for f in fields(schema)}
    for key, value in (tree or {}).items():
        dotted = f"{prefix}{key}"
        if key not in known:
            typed = next(iter(flatten({dotted: value})), dotted)
            close = [f"{prefix}{name}" for name in difflib.get_close_matches(str(key), known, n=1)]
            if isinstance(value, Mapping):  # of a section, the keys in it say more than its name
                close.insert(0, _elsewhere(typed))
            meant = next(filter(None, (_of_others(typed), *close, _elsewhere(typed))), "")
            hint = f" Did you mean {meant}?" if meant else ""
            raise ConfigError(f"{where}: unknown key {dotted!r}.{hint} Allowed here: {', '.join(sorted(known))}")
        inner = known[key].type
        if isinstance(inner, type) and is_dataclass(inner):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {dotted} is a section; set one of: {', '.join(f.name for f in fields(inner))}"
                )
            _refuse_unknown(value, inner, where, f"{dotted}.")


def _bad_value(where: str, key: str | None, source: Any, reason: str) -> str:
    """A message about a bad value: the kind of value that its field takes, or else OmegaConf's ``reason``."""
    from omegaconf import OmegaConf

    is_override = where.partition("=")[1] != ""
    key = where.partition("=")[0] if is_override else key or _culprit(source)
    annotation: Any = Config
    for name in key.split("."):
        annotation = get_type_hints(annotation).get(name) if is_dataclass(annotation) else None
    if not (kind := expected(annotation)):
        return f"{where}: {reason}"
    value = str(OmegaConf.select(source, key))
    close = difflib.get_close_matches(value, map(str, get_args(annotation)), n=1)
    shown = where if is_override else f"{where}: {key}={value}"
    return f"{shown}: expected {kind}{f'; did you mean {close[0]}?' if close else ''}"


def _culprit(source: Any) -> str:
    """The key of a file whose value is refused. OmegaConf does not name it if the value is in a list."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, value in flatten(OmegaConf.to_container(source)).items():  # type: ignore[arg-type]  # a mapping by now
        alone = OmegaConf.create()
        OmegaConf.update(alone, key, value)
        try:
            OmegaConf.merge(_defaults(), alone)
        except (OmegaConfBaseException, TypeError):
            return key
    return ""
