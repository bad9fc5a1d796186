"""Loads and checks a config from a YAML file and ``key=value`` overrides.

A run is defined by three things: a config file that says what differs from the defaults, the overrides on the command
line, and the code revision. All three are stored with every checkpoint and result.
"""

import difflib
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from tandemrl.config.compatibility import check
from tandemrl.config.fields import ConfigError
from tandemrl.config.hints import hint
from tandemrl.config.plain import flatten, to_dict
from tandemrl.config.reference import expected
from tandemrl.config.schema import Config
from tandemrl.config.written import Written, free, read, tree_of, typed


def load(path: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load a config: the defaults, changed by a YAML file, changed by ``key=value`` overrides. The result is checked.

    Args:
        path: a YAML file, the name of a packaged one (``quickstart`` or ``quickstart.yaml``), or a run's folder, which
            stands for its ``config.yaml``; or a mapping of sections, such as an OmegaConf config. None
            means the defaults only.
        overrides: dotted assignments such as ``train.lr=1e-5``. For a key that takes a text, what
            follows the ``=`` is that text, unless it is ``null`` or in quotes. Lists and mappings are YAML in brackets.

    Raises:
        ConfigError: a key is unknown, a value is not allowed, or a file cannot be read; the message names it.

    Examples:
        >>> load(overrides=["train.lr=1e-5"]).train.lr
        1e-05
    """
    sources: list[tuple[str, Any]] = []
    if isinstance(path, Mapping):
        sources.append(("the mapping", tree_of(path)))
    elif path is not None:
        file = str(find_config(path))
        source = read(Path(file).read_bytes(), file)
        if not source:
            raise ConfigError(f"{file} is empty; write what differs from the defaults (see `tandemrl config`)")
        sources.append((file, source))
    if isinstance(overrides, str | Mapping):
        raise ConfigError(f"overrides={overrides!r}: expected a list, as ['train.lr=1e-5', 'train.steps=20']")
    for item in overrides:
        if "=" not in item:
            raise ConfigError(f"override {item!r}: expected key=value, e.g. train.lr=1e-5")
        sources.append((item, _assigned(item)))
    config, unset = Config(), set[str]()
    for where, source in sources:
        if not isinstance(source, dict):
            raise ConfigError(f"{where}: expected a mapping of sections, found {type(source).__name__}")
        _drop_removed(source, where)
        config = _changed(config, source, where, unset)
    if config.train.epochs is not None:  # which makes the number of steps
        unset.discard("train.steps")
    if unset:
        assignments = ", ".join(f"{key}=…" for key in sorted(unset))
        raise ConfigError(f"{sources[0][0]} leaves a value to you (???); set {assignments}")
    check(config)
    stated = stated_keys(overrides)
    if config.train.epochs is not None and "train.steps" in stated and "train.epochs" not in stated:
        raise ConfigError(
            f"train.steps={config.train.steps} has no effect beside train.epochs={config.train.epochs:g} of {path}; "
            "add train.epochs=null, or leave train.steps out"
        )
    return config


def stated_keys(overrides: Sequence[str]) -> set[str]:
    """The dotted keys that ``key=value`` overrides set.

    Examples:
        >>> sorted(stated_keys(["train.lr=1e-5", "reward={scorers: {mydata: boxed}}"]))
        ['reward.scorers.mydata', 'train.lr']
    """
    return set(chain(*(flatten(_assigned(item)) for item in overrides)))


def _assigned(item: str) -> Any:
    """The mapping of sections that a ``key=value`` override stands for.

    Raises:
        ConfigError: the value cannot be read.
    """
    key, _, text = item.partition("=")
    path, annotation = _place(key)
    origin, kinds = get_origin(annotation), set(get_args(annotation)) - {NoneType}
    listed = origin is tuple and str in kinds
    is_text = annotation is str or listed or (origin is not dict and kinds == {str})
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in ("'", '"')
    if quoted or (text[:1] in ("[", "{") and not is_text) or (listed and text[:1] == "["):
        value = read(text, item)
    else:
        value = Written(text if is_text else text.strip(), plain=annotation is not str or text not in ("", "~"))
    return reduce(lambda inner, name: {Written(name, plain=False): inner}, reversed(path), value)


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
            if inner in (str, float):
                return [*names[:i], ".".join(names[i:])], inner
            annotation = inner
        else:
            return names, annotation if annotation is Any else None
    return names, annotation


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
    candidate = Path(path).expanduser()
    if candidate.is_file():
        return candidate
    packaged = packaged_configs()
    if candidate.parent in (Path("."), Path("configs")) and candidate.name.removesuffix(".yaml") in packaged:
        return packaged[candidate.name.removesuffix(".yaml")]
    if (inside := candidate / "config.yaml").is_file():
        return inside
    name, there = candidate.name.removesuffix(".yaml"), "a folder without a config.yaml, so not that of a run"
    if not candidate.is_dir():
        near = [known for known in packaged if known.startswith(name)] or difflib.get_close_matches(name, packaged, n=1)
        named = f"; did you mean {' or '.join(near)}?" if near else ""
        there = "no such file" + ((named if len(candidate.parts) == 1 else "") or hint(candidate) or named)
    raise ConfigError(f"config {str(path)!r}: {there}; packaged configs: {', '.join(packaged)}")


def packaged_configs() -> dict[str, Path]:
    """The configs that come with the library, by name."""
    from importlib.resources import files

    paths = sorted(Path(str(file)) for file in files("tandemrl.configs").iterdir() if file.name.endswith(".yaml"))
    return {path.stem: path for path in paths}


_WANDB = "Weights & Biases reads its own variable, {}"
REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "parallel.offload": (False, "its name is parallel.offload_parameters"),
    "rollout.world_tokens": (2048, "its name is rollout.observation_tokens"),
    "rollout.compile": (False, "on CUDA, rollout.host_every captures decoding steps as a graph"),
    "rollout.in_flight": (False, "train.async_steps=1 overlaps rollouts and updates without it"),
    "rollout.vllm.mode": ("auto", "rollout.draft_tokens says whether the junior drafts; the texts are the same"),
    "rollout.vllm.prefix_caching": (True, "common prefixes are always kept"),
    "model.lora.export": (False, "hf/step_N/adapter has the adapters of every export"),
    "train.async_save": (False, "checkpoints are written before the next step"),
    "train.max_samples_gb": (None, "samples.jsonl has all rollouts; compress or move it between runs"),
    "train.log": (False, "tandemrl train … | tee train.log keeps what the console shows"),
    "train.keep_eval_texts": (True, "eval_texts/ is always written; remove it after the run"),
    "train.wandb_project": ("tandemrl", _WANDB.format("WANDB_PROJECT")),
    "train.wandb_name": (None, _WANDB.format("WANDB_NAME")),
    "train.wandb_tags": ([], _WANDB.format("WANDB_TAGS")),
    "loss.kl_in_loss": (None, "the KL is in the loss, or with loss.kl_in_reward=true in the reward"),
    "model.compile": (False, "no measurement showed a gain; on CUDA, model.liger=true"),
    "judge.command": (None, "start the server yourself, `COMMAND &`; judge.wait_s waits until it answers"),
    "judge.gates": ([], "a custom reward can refuse a response (reward.scorers=module:function); no judge needs gates"),
    "eval.select_by": (None, "train.select_by=pass@k or train.select_by=reward chooses hf/best"),
}
"""Keys of earlier versions that no longer exist, each with its default, which is ignored, and what to do instead."""


def _drop_removed(source: Any, where: str) -> None:
    """Take removed keys that have their default out of a tree, as the ``config.yaml`` of an older run has them.

    Raises:
        ConfigError: a removed key has another value.
    """
    for key, (default, instead) in REMOVED_KEYS.items():
        *sections, name = key.split(".")
        parent = reduce(lambda tree, section: tree.get(section) if isinstance(tree, dict) else None, sections, source)
        if not isinstance(parent, dict) or name not in parent:
            continue
        value = parent.pop(name)
        with suppress(ConfigError):  # it can be read in two ways: then it is not the default
            if free(value) == default:
                continue
        raise ConfigError(f"{where}: {key} was removed in 0.2; leave it out: {instead}")


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


def _meant(typed: str, close: Sequence[str], *, is_section: bool) -> str:
    """The key that an unknown one probably stands for, or none: one of another library's, one of this section that is
    ``close``, or the only one of that name in another section. Of a section, the keys in it say more than its name."""
    others = (ours for theirs, ours in ELSEWHERE.items() if f".{typed}".endswith(f".{theirs}"))
    same = [key for key in flatten(to_dict(Config())) if key.rpartition(".")[2] == typed.rpartition(".")[2]]
    elsewhere = same if len(same) == 1 else []
    return next(chain(others, *((elsewhere, close) if is_section else (close, elsewhere))), "")


def _changed(section: Any, tree: Mapping[str, Any], where: str, unset: set[str], prefix: str = "") -> Any:
    """A section of a config with the values of a tree. A mapping gets the entries of the new one.

    Args:
        unset: the keys whose value is left to the user (``???``); one is added here, and taken out once it is set.

    Raises:
        ConfigError: a key is unknown, or a value of another type. The message names it, and what is allowed.
    """
    known, changes = get_type_hints(type(section)), dict[str, Any]()
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            typed_key = next(iter(flatten({key: value})), key)
            close = [f"{prefix}{each}" for each in difflib.get_close_matches(name, known, n=1)]
            meant = _meant(typed_key, close, is_section=isinstance(value, Mapping))
            hint = f" Did you mean {meant}?" if meant else ""
            raise ConfigError(f"{where}: unknown key {key!r}.{hint} Allowed here: {', '.join(sorted(known))}")
        kind, old = known[name], getattr(section, name)
        inner: Any = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
        if inner is not None and isinstance(value, dict):
            changes[str(name)] = _changed(old or inner(), value, where, unset, f"{key}.")
        elif is_dataclass(kind):
            names = ", ".join(field.name for field in fields(kind))
            raise ConfigError(f"{where}: {key} is a section; set one of: {names}")
        elif value == "???" and (value.plain or "string" not in expected(kind)):
            unset.add(key)
        else:
            unset.discard(key)
            changes[str(name)] = _merged(old, _value(value, kind, where, key))
    return replace(section, **changes)


def _value(value: Any, kind: Any, where: str, key: str) -> Any:
    """A value as its key takes it.

    Raises:
        ConfigError: it is none of that kind, or may be read in two ways.
    """
    is_override = key.startswith(where.partition("=")[0])
    try:
        return typed(value, kind)
    except ConfigError as error:
        raise ConfigError(f"{where if is_override else f'{where}: {key}'}: {error}") from None
    except ValueError:
        close = difflib.get_close_matches(str(value), map(str, get_args(kind)), n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        quotes = "; put a text in quotes" if "string" in expected(kind) else ""
        shown = where if is_override else f"{where}: {key}={value}"
        raise ConfigError(f"{shown}: expected {expected(kind)}{meant}{quotes}") from None


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new
