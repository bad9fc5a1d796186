"""What may be passed to ``train`` in Python, accepted in its short forms and refused with a line if it cannot work.

``config.yaml`` has a record of each function that takes the place of config keys. A file cannot hold a function, but it
can hold its name and signature. Whoever trains from the file alone is then told what is missing, instead of training
something else.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tandemrl.config import Config, ConfigError, FunctionRecord
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.fields import is_own
from tandemrl.config.schema import LossConfig
from tandemrl.config.strategies import KINDS
from tandemrl.losses import RECIPES, Recipe, try_recipe
from tandemrl.processes.names import import_failure, import_object, instantiate
from tandemrl.rollout.factory import EngineFactory
from tandemrl.rollout.signatures import signature
from tandemrl.selection import Strategy, try_strategy

StrategyFunction = Callable[[int], Strategy]


def require_config(config: Any) -> Config:
    """The config, if it is one.

    Raises:
        ConfigError: it is something else, such as the name of a config.
    """
    if not isinstance(config, Config):
        hint = f"load({str(config)!r})" if isinstance(config, str) or hasattr(config, "__fspath__") else "load(NAME)"
        raise ConfigError(f"config={config!r:.100} is a {type(config).__name__}; pass {hint}")
    return config


def resolve_arguments(
    config: Config,
    recipe: Recipe | str | None,
    strategy: StrategyFunction | Strategy | str | None,
    engine: EngineFactory | str | None = None,
) -> tuple[Config, Recipe | None, StrategyFunction | None, EngineFactory | None]:
    """Accept the short forms of arguments of ``train``.

    A name is set in the config, and so is where an engine was defined: what is known of it is what is known of a
    ``module:name``. A bare strategy becomes the strategy of every step.

    Raises:
        ConfigError: an argument is of another kind, its name is not known, or the config does not go with it.
    """
    if engine is not None and not isinstance(engine, str):
        config = replace(config, rollout=replace(config.rollout, engine=_defined_in(engine)))
    named = (("loss", "recipe", recipe), ("selection", "strategy", strategy), ("rollout", "engine", engine))
    for section, key, name in named:
        if isinstance(name, str):
            config = replace(config, **{section: replace(getattr(config, section), **{key: name})})
    check(config)
    recipe = None if isinstance(recipe, str) else recipe
    strategy = None if isinstance(strategy, str) else strategy
    engine = None if isinstance(engine, str) else engine
    if not isinstance(recipe, Recipe | None):
        field = "advantage or surrogate" if callable(recipe) else "field"
        raise ConfigError(
            f"recipe={describe(recipe):.100} is a {type(recipe).__name__}; expected a Recipe or the name of one. An "
            f"own {field} goes into one: recipe=RECIPES['grpo']._replace(surrogate=FUNCTION)"
        )
    if isinstance(strategy, Strategy):
        strategy = partial(every_step, strategy)
    maker = next((name for name, kind in KINDS.items() if callable(strategy) and _where(strategy) == kind.path), None)
    if maker is not None:
        raise ConfigError(f"strategy={maker} makes strategies; call it, as bernoulli(0.5), or pass its name, {maker!r}")
    return config, recipe, strategy, engine


def named_recipe(loss: LossConfig) -> Recipe:
    """The recipe that ``loss.recipe`` names, before other keys change it.

    Raises:
        ConfigError: a recipe of the user's own cannot be made.
    """
    if not is_own(loss.recipe):
        return RECIPES[loss.recipe]
    where = f"loss.recipe={loss.recipe}"
    try:
        found = import_object(loss.recipe)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{where}: {import_failure(loss.recipe, error)}") from error
    if not isinstance(found, Recipe):
        found = instantiate(loss.recipe, where, ConfigError, loss.parameters)
    if not isinstance(found, Recipe):
        raise ConfigError(f"{where}: is a {type(found).__name__}; name a Recipe or a function that returns one")
    return found


def resolve_recipe(recipe: Recipe, config: Config) -> Recipe:
    """The recipe with the choices that ``loss.*`` overrides; null keeps the recipe's own choice.

    With ``train.async_steps``, rollouts are from older weights. So a recipe without importance sampling then gets it
    per token, unless ``loss.importance`` is set.
    """
    c = config.loss
    names = ("reduction", "clip_low", "clip_high", "dual_clip", "importance", "importance_cap", "filter_zero_variance")
    overrides: dict[str, Any] = {name: getattr(c, name) for name in names}
    overrides["overlong_share"] = None if c.overlong_buffer is None else c.overlong_buffer / config.rollout.max_tokens
    recipe = recipe._replace(**{name: value for name, value in overrides.items() if value is not None})
    if config.train.async_steps and c.importance is None and recipe.importance == "none":
        recipe = recipe._replace(importance="token")
    return recipe._replace(dual_clip=None) if recipe.dual_clip == 0 else recipe


def tried_recipe(recipe: Recipe | None, config: Config) -> Recipe:
    """The recipe that a run trains with, after a trial and after the rules of the config that depend on it.

    Args:
        recipe: the recipe that was passed. None means ``loss.recipe``.

    Raises:
        ConfigError: it cannot be trained with, or not with this config.
    """
    resolved = resolve_recipe(recipe or named_recipe(config.loss), config)
    try:
        try_recipe(resolved)
    except ValueError as error:
        raise ConfigError(f"recipe {resolved.name}: {error}") from error
    check(config, Facts(recipe=resolved))
    return resolved


def strategy_at(strategy: StrategyFunction, step: int) -> Strategy:
    """The strategy of a step, from the function that was passed.

    Raises:
        ConfigError: the function fails, or returns something else.
    """
    where = _named(strategy, step)
    try:
        chosen = strategy(step)
    except Exception as error:
        raise ConfigError(
            f"{where}: {type(error).__name__}: {error}; it is called with the step, from 1, and returns a Strategy"
        ) from error
    if not isinstance(chosen, Strategy):
        raise ConfigError(
            f"{where}: returned {chosen!r:.60}, a {type(chosen).__name__}; expected a Strategy, such as bernoulli(0.5)"
        )
    return chosen


def try_strategies(strategy: StrategyFunction, steps: int, vocabulary: int) -> None:
    """Try the strategies of the first and the last step.

    Args:
        vocabulary: how many token ids the models can write.

    Raises:
        ConfigError: the function or one of its strategies cannot be used; the message names the step.
    """
    for step in (1, steps):
        chosen = strategy_at(strategy, step)
        try:
            try_strategy(chosen, vocabulary)
        except ValueError as error:
            raise ConfigError(f"{_named(strategy, step)}: {error}") from error


def every_step(strategy: Strategy, step: int) -> Strategy:
    """The same strategy at every step."""
    return strategy


def _named(strategy: StrategyFunction, step: int) -> str:
    """The beginning of a message about the strategy of a step."""
    bare = isinstance(strategy, partial) and strategy.func is every_step
    return "strategy" if bare else f"strategy: {describe(strategy)} at step {step}"


def _defined_in(engine: EngineFactory) -> str:
    """Where an engine's function or class was defined, as ``module:name``."""
    if not callable(engine):
        raise ConfigError(
            f"engine={engine!r:.100}: pass the class, or a function that makes one of what its parameters name, such "
            "as senior, junior and tokenizer: the run loads the models"
        )
    return _where(engine)


def _where(thing: Any) -> str:
    """Where a function, a class or an object's class was defined, as ``module:name``."""
    while isinstance(thing, partial):
        thing = thing.func
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"


# -------------------------------------------------------------------------------------------------------------- records


def with_records(config: Config, *, accepted: Collection[str] = (), **functions: Any) -> Config:
    """The config with a record of each function that takes the place of some of its keys.

    Args:
        accepted: whose code may have changed (``--accept-changed``).
        functions: the arguments of ``train`` that ``config.FunctionsConfig`` has a field for. None means not passed.

    Raises:
        ConfigError: the config is of a run that had a function, and this function is not passed.
    """
    records = {
        name: None if each is None else FunctionRecord(name=describe(each), signature=signature(each))
        for name, each in functions.items()
    }
    for name, now in records.items():
        before: FunctionRecord | None = getattr(config.functions, name)
        if before is not None and (now is None or (now.signature != before.signature and name not in accepted)):
            passed = "none" if now is None else f"{now.name} [{now.signature}]"
            raise ConfigError(
                f"functions.{name}: this config belongs to a run with {before.name} [{before.signature}]; "
                f"passed is {passed}. Pass that function in Python, train(load(CONFIG), {name}=FUNCTION), "
                f"or set functions.{name}=null to train another run"
            )
    return replace(config, functions=replace(config.functions, **records))


def describe(function: Any) -> str:
    """A short description of a function: its name, and that of the module that defines it.

    Examples:
        >>> describe({"mine": with_records})
        'mine=tandemrl.training.arguments.with_records'
    """
    if isinstance(function, Recipe):
        return f"recipe {function.name}"
    if isinstance(function, Mapping):
        return ", ".join(f"{name}={describe(each)}" for name, each in function.items())
    if isinstance(function, partial):
        return f"partial({describe(function.func)})"
    return _where(function).replace(":", ".")
