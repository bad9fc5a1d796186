"""Checks before any weight is loaded that this machine has what a run needs.

``build`` begins with them, and ``tandemrl train --dry-run`` does nothing else.
"""

import importlib.util
import math
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from tandemrl.config import Config, ConfigError, with_steps
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.fields import is_own
from tandemrl.config.hints import no_folder, pip_install
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Response
from tandemrl.data.rows import DataError, Prompt, Row
from tandemrl.evals import profile_of, sampling_for
from tandemrl.evals.files import digests
from tandemrl.losses import Recipe
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import (
    check_positions,
    check_weights,
    is_local,
    junior_tokenizer_of,
    load_configuration,
    load_tokenizer,
    resolve_device,
    stored_eos_token_ids,
    visible_tokens,
    vocabulary_check,
)
from tandemrl.models.sharded_loading import meta_model
from tandemrl.processes.names import import_object
from tandemrl.processes.world import axes_of
from tandemrl.rewards import routing
from tandemrl.rewards.functions import RewardFunction, with_environment
from tandemrl.rewards.protocol import TrainerState
from tandemrl.rewards.scoring import Scorer, Tried
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.endpoint_partner import served
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, make_episode_runner, opening_prompts, reader_of
from tandemrl.rollout.envs.parsing import END_OF_THOUGHT, THOUGHT
from tandemrl.rollout.envs.retrieval import is_cross_encoder
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.signatures import signature
from tandemrl.rollout.vllm import require_vllm
from tandemrl.tasks.code.sandbox import Sandbox
from tandemrl.tasks.code.tests import Stdin
from tandemrl.tasks.rubric.judge import HttpJudge, Judge, other_words
from tandemrl.training.arguments import StrategyFunction, tried_recipe, try_strategies

_T = TypeVar("_T")


class NotHereError(Exception):
    """Something is not on this machine yet, and downloads are not allowed. The message names it."""


class Doubt(str):
    """What a check has found that may be a mistake of the user's, though a run can start with it."""


class Evaluated(NamedTuple):
    """The rows of some sources that are evaluated during training, and the prompts that are used: the first
    ``eval.train_problems`` of each source. There are none without ``train.eval_every``."""

    rows: list[Row]
    prompts: list[Prompt]


@dataclass(frozen=True)
class Preflight:
    """What a run reads before its weights: tokenizer, rows and prompts. Each is read once, when it is first needed.

    downloads: whether to download tokenizers, model configurations and data from the hub if they are not on this
    machine. If not, a missing one raises a ``NotHereError``. processes: how many were started; None: not
    known yet. recipe, strategy, reward, environment: what was
    passed to ``train``.
    stated: dotted keys of ``reward.*`` that the user typed, so that they must be used, even without evaluation.
    """

    config: Config
    downloads: bool = True
    processes: int | None = 1
    recipe: Recipe | None = None
    strategy: StrategyFunction | None = None
    reward: Mapping[str, RewardFunction] | None = None
    environment: Environment | None = None
    stated: Collection[str] = ()

    @property
    def checks(self) -> dict[str, Callable[[], str]]:
        """The checks by subject, in order. Each is a function that returns what it has found, in a few words.

        A check raises ConfigError, DataError, EvalError, ModelError, GraderError, JudgeError, SandboxError or OSError
        if something is wrong, and NotHereError if it would need a download to decide.
        """
        config, model = self.config, self.config.model
        endpoint = model.junior_endpoint
        loaded = model.junior if endpoint.url is None else None
        models = {"model.senior": model.senior, "model.junior": loaded, "model.critic": model.critic}
        acted_in = self.environment is not None or config.rollout.environment_kind.turns
        return {
            "processes": self.mesh,
            "model.device": lambda: str(resolve_device(model.device)),
            "packages": self.packages,
            **{key: partial(self.model, key, path) for key, path in models.items() if path is not None},
            "vocabularies": self.vocabularies,
            **({} if endpoint.url is None else {"model.junior_endpoint.url": self.junior_served}),
            "loss.recipe": lambda: self.trained_recipe.name,
            **({"strategy": self.strategies} if self.strategy is not None or is_own(config.selection.strategy) else {}),
            **({"retrieval.model": self.ranker} if self._ranks_here else {}),
            **({"rollout.environment": self.episodes} if acted_in else {}),
            "data.train": self.train_data,
            **({"data.eval": lambda: self.evaluated_data(self.heldout)} if config.train.eval_every else {}),
            **({"data.monitor": lambda: self.evaluated_data(self.monitored)} if config.data.monitor else {}),
            "rewards": self.rewards,
            **({"judge.url": self.endpoint} if config.judge.url is not None else {}),
            "output_dir": self.space,
        }

    def require(self) -> "Preflight":
        """Run all checks, raise the error of the first that fails, and return this object."""
        for each in self.checks.values():
            each()
        return self

    # ----------------------------------------------------------------------------------------------------- what is read

    def _read(self, load: Callable[..., _T], path: str) -> _T:
        """What ``load`` reads of a model.

        Raises:
            NotHereError: it is a hub id that is not in the cache, and downloads are not allowed.
        """
        try:
            return load(path, download=self.downloads)
        except ModelError:
            if self.downloads or is_local(path):
                raise
            raise NotHereError(f"{path} is not on this machine yet; train downloads it") from None

    def configuration(self, path: str) -> PretrainedConfig:
        return self._read(load_configuration, path)

    def skeleton(self, path: str) -> Any:
        """A model without its weights, on the meta device."""
        return meta_model(self.configuration(path))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._read(load_tokenizer, self.config.model.senior)

    @cached_property
    def junior_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of a junior that has other tokens than the senior, or is behind an endpoint; else None."""
        model, elsewhere = self.config.model, self.config.model.junior_endpoint.url is not None

        def load(path: str) -> PreTrainedTokenizerBase:
            return self.tokenizer if path == model.senior else self._read(load_tokenizer, path)

        return junior_tokenizer_of(model.senior, model.junior, endpoint=elsewhere, load=load)

    @cached_property
    def trained_recipe(self) -> Recipe:
        """The recipe of the run, after a trial on a few made-up tokens."""
        return tried_recipe(self.recipe, self.config)

    @cached_property
    def environment_id(self) -> dict[str, str]:
        """What a resumed run must have in common with its past: the environment, and the contents that it searches."""
        if self.episode_runner is None:
            return {}
        retrieval = self.config.retrieval
        searched = digests([each for each in (retrieval.model, retrieval.index) if each])
        contents = {"retrieval": ", ".join(searched.values())} if searched else {}
        if self.config.rollout.environment_kind.searches and is_own(retrieval.retriever):
            contents["retriever"] = signature(import_object(retrieval.retriever))
        return {"environment": signature(self.episode_runner.environment), **contents}

    @cached_property
    def episode_runner(self) -> EpisodeRunner | None:
        """The `EpisodeRunner` of the run's environment, or None if a response is a single turn.

        Raises:
            ConfigError: the environment or one of its tools cannot be made, the chat template does not support it, or
                keys ask for several turns although there is no environment.
        """
        config = self.config
        if self.environment is not None:
            check(config, Facts(acted_in=True))
            check(config)  # with room for what it says
        elif not config.rollout.environment_kind.turns:
            check(config, Facts(one_turn=True))
            return None
        junior = reader_of(config.model.junior, self._reader, download=self.downloads)
        runner = make_episode_runner(
            config, self.tokenizer, environment=self.environment, eos_token_ids=self._ends, junior=junior
        )
        assert runner is not None
        return runner

    @cached_property
    def rewards_by_name(self) -> dict[str, RewardFunction]:
        """The functions that score in this process: those passed, and the environment's own."""
        environment = None if self.episode_runner is None else self.episode_runner.environment
        return with_environment(self.reward or {}, environment)

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of ``data.train``, as many as ``data.limit`` says."""
        return self._rows(self.config.data.train)[: self.config.data.limit]

    @cached_property
    def prompts(self) -> tuple[list[Prompt], int]:
        """The prompts of ``data.train``, and how many rows were dropped because they are too long.

        Raises:
            DataError: fewer prompts are left than a step takes.
        """
        config = self.config
        prompts, dropped = self._encoded(self.rows)
        if len(prompts) < config.train.prompts_per_step:
            raise DataError(
                f"data.train: {len(prompts)} usable rows (data.max_prompt_tokens={config.data.max_prompt_tokens}) are "
                f"fewer than train.prompts_per_step={config.train.prompts_per_step}; lower that, or add rows"
            )
        return prompts, dropped

    @cached_property
    def planned(self) -> Config:
        """The config with the number of steps that ``train.epochs`` makes of the prompts.

        Raises:
            ConfigError: a rule of the config does not hold with so many steps.
        """
        if self.config.train.epochs is None:
            return self.config
        planned = with_steps(self.config, len(self.prompts[0]))
        check(replace(planned, train=replace(planned.train, epochs=None)))
        return planned

    @cached_property
    def heldout(self) -> Evaluated:
        return self._evaluated(self.config.data.eval)

    @cached_property
    def monitored(self) -> Evaluated:
        return self._evaluated(self.config.data.monitor)

    # ------------------------------------------------------------------------------------------------------- the checks

    def mesh(self) -> str:
        """Check that the processes divide into the axes of ``parallel``, and support what the config asks for."""
        if self.processes is None:
            return "1, or as many as torchrun starts"
        axes_of(self.config.parallel, self.processes)
        check(self.config, Facts(processes=self.processes))
        return str(self.processes)

    def packages(self) -> str:
        config = self.config
        sources = (*config.data.train, *config.data.eval, *config.data.monitor)
        by_words = config.rollout.environment_kind.searches and config.retrieval.kind.words
        needed = {
            ("model.lora.rank", "peft", "lora"): config.model.lora.rank > 0,
            ("model.liger", "liger_kernel", "liger"): config.model.liger,
            ("rollout.workers", "ray", "ray"): config.rollout.workers > 0,
            ("train.wandb", "wandb", "wandb"): config.train.wandb != "disabled",
            ("data: an hf: source", "datasets", "hub"): any(source.startswith("hf:") for source in sources),
            ("retrieval.retriever", "bm25s", "retrieval"): by_words,
            ("retrieval.retriever", "Stemmer", "retrieval"): by_words,
            ("retrieval.model", "sentence_transformers", "retrieval"): self._ranks_here,
        }
        engine = config.rollout.kind.package
        if engine is not None:
            require_vllm(f"rollout.engine={config.rollout.engine}")
        for (key, package, extra), is_needed in needed.items():
            if is_needed and importlib.util.find_spec(package) is None:
                raise ConfigError(f"{key} needs {package}, which is not installed: {pip_install(extra)}")
        used = [] if engine is None else [engine]
        used += [package for (_, package, _), is_needed in needed.items() if is_needed]
        return ", ".join(used) or "no optional ones needed"

    def model(self, key: str, path: str) -> str:
        """Read a model's configuration and the headers of its weight files, and say what it describes.

        Args:
            key: the config key that names the model.
        """
        shape = self.skeleton(path)
        config = shape.config
        check_positions(config, name=f"{key}={path}")
        limits = visible_tokens(config)
        if (window := limits.get("attention window")) and key in self._read_by_the_engine:
            check(self.config, Facts(windowed=(key, window)))
        # A critic may have a head of its own instead.
        head = next((name for name, module in shape.named_modules() if module is shape.get_output_embeddings()), None)
        check_weights(path, shape, without=head if key == "model.critic" else None)
        seen = "".join(f", {what} {limit}" for what, limit in limits.items())
        return f"{path}: {type(shape).__name__}, {_size(shape):,} parameters{seen}"

    def ranker(self) -> str:
        """Check that the model that ranks documents exists, and say what it is. Processes of tools load it later."""
        path = self.config.retrieval.model
        assert path is not None
        configuration = self.configuration(path)
        kind = "a cross-encoder" if is_cross_encoder(configuration) else "an embedding model"
        return f"{path}: {configuration.model_type}, {kind}"

    @property
    def _ranks_here(self) -> bool:
        config, retrieval = self.config, self.config.retrieval
        return config.rollout.environment_kind.searches and retrieval.kind.model and retrieval.url is None

    def vocabularies(self) -> str:
        """Check that the models have one vocabulary, or work with two, and that a text of theirs can end."""
        model, tokenizer, other, passed = self.config.model, self.tokenizer, self.junior_tokenizer, self.strategy
        if model.critic is not None:
            vocabulary_check(tokenizer, self._read(load_tokenizer, model.critic), other="critic")
        if other is not None:
            check(self.config, Facts(apart=True))
            if passed is not None:
                raise ConfigError(
                    "strategy: the senior and the junior have two vocabularies, and a strategy looks at tokens; pass "
                    "none, and use selection.strategy=before_word"
                )
        logits, ends = self.configuration(model.senior).get_text_config().vocab_size, self._ends
        if not any(0 <= token < logits for token in ends):
            raise ModelError(
                f"model.senior={model.senior}: no author has an EOS token ({ends or 'none is named'}), so that every "
                "response would be truncated; set eos_token_id in its generation_config.json, or eos_token in its "
                "tokenizer_config.json"
            )
        return f"{len(tokenizer)} tokens" + ("" if other is None else f"; the junior has {len(other)} of its own")

    @property
    def _ends(self) -> tuple[int, ...]:
        """The ids that end a text of the authors."""
        model, written = self.config.model, not self.config.selection.kind.solo or self.strategy is not None
        one = written and self.junior_tokenizer is None and model.junior_endpoint.url is None
        junior = model.junior if one else None
        return stored_eos_token_ids(model.senior, self.tokenizer, junior, download=self.downloads)

    def strategies(self) -> str:
        """Try the user's own strategies on a few made-up rows."""
        paths = {self.config.model.senior, self.config.model.junior or self.config.model.senior}
        vocabulary = min(self.skeleton(path).get_output_embeddings().weight.shape[0] for path in paths)
        steps, strategy = self.planned.train.steps, self.strategy
        if strategy is None:
            strategy = schedule_of(self.config.selection, self.tokenizer, vocabulary).strategy
        try_strategies(strategy, steps, vocabulary)
        return f"tried those of the steps 1 and {steps}"

    def episodes(self) -> str:
        """Check that the environment can be made, and that the chat template supports it."""
        assert self.episode_runner is not None
        tools = ", ".join(schema["function"]["name"] for schema in self.episode_runner.tools)
        return f"{self.episode_runner.name}; tools: {tools or 'none'}"

    def train_data(self) -> str:
        """Check that prompts and completions fit into what the models that read them can see."""
        rows = len(self.rows)  # what is wrong with the files comes before what is wrong with the tokenizer
        prompts, dropped = self.prompts
        budget = "rollout.max_tokens" + (" + rollout.observation_tokens" if self.config.has_episodes else "")
        new = self.config.response_tokens
        fix = f"lower data.max_prompt_tokens, which drops such rows, or {budget.replace(' + ', ' or ')}"
        critic = self.config.model.critic
        for key, path in (self._read_by_the_engine | ({"model.critic": critic} if critic else {})).items():
            apart = key == "model.junior" and self.junior_tokenizer is not None
            read = [(prompt.row, len(prompt.junior if apart else prompt.tokens)) for prompt in prompts]
            self._sees(key, path, *max(read, key=itemgetter(1)), new, f"{budget}={new}", fix)
        left_out = f", {dropped} left out as longer than data.max_prompt_tokens" if dropped else ""
        train, steps = self.config.train, self.planned.train.steps
        epochs = "" if train.epochs is None else f"; train.epochs={train.epochs:g} makes {steps} steps"
        longest = max(len(prompt.tokens) for prompt in prompts)
        return f"{rows} rows{left_out}; the longest prompt has {longest} tokens{epochs}"

    def evaluated_data(self, found: Evaluated) -> str:
        """Check that prompts and the senior's responses to them fit into the evaluation's context and the senior's."""
        config, profile = self.config, profile_of(self.config.eval)
        if found.prompts:
            longest = max(found.prompts, key=lambda prompt: len(prompt.tokens))
            observed = config.response_tokens - config.rollout.max_tokens
            tokens = len(longest.tokens)
            sampling_for(profile, longest)
            new = profile.longest(tokens) + observed - tokens
            named = f"the {new} of a response (eval.profile={config.eval.profile})"
            fix = "lower data.max_prompt_tokens, or use eval.profile=custom with a smaller eval.max_tokens"
            self._sees("model.senior", config.model.senior, longest.row, tokens, new, named, fix)
        return f"{len(found.rows)} rows, of which {len(found.prompts)} are used"

    def rewards(self) -> str:
        """Check that every row that is used has a scorer, and that the scorers have what they need.

        The user's own functions are called once for each kind of rows, with the ground truth of a row as the text (one
        of TRL's with several texts); without downloads, that is for `--dry-run`, also with other forms of it, as are
        the library's scorers.
        """
        config, functions = self.config, self.rewards_by_name
        prompts, evaluated = self.prompts[0], (self.heldout, self.monitored)
        asked = [*chain(prompts, *(each.prompts for each in evaluated))]
        rows = [prompt.row for prompt in asked]
        state = trainer_state(self.planned, len(prompts), 0)
        judging = None if config.judge.url is None else _unused
        with Scorer(config.reward, code=_unused, judge=judging, functions=functions) as scorer:
            # Without evaluation the rows of data.eval are not read: what only they would use is no mistake in a file.
            stated = None if config.train.eval_every or not config.data.eval else self.stated
            kinds = map(routing.RowKind.of, chain(self.rows, *(each.rows for each in evaluated)))
            scorer.check(rows, episodes=self.episode_runner is not None, kinds=kinds, stated=stated, state=state)
            if words := other_words(rows, config.judge):
                warnings.warn(words, stacklevel=2)
            used = {routing.RowKind.of(prompt.row): prompt for prompt in reversed(asked)}
            reader = ResponseReader(self.tokenizer)
            places = [(row, reader.opened(tokens, row)) for row, tokens, _ in reversed(used.values())]
            tried = [one for row, opened in places for one in self._tried(scorer, row, opened, state)]
        sources = ", ".join(dict.fromkeys(kind.data_source for kind in used))
        every = [term for row, *_ in used.values() for term in routing.terms_of(row, config.reward, functions)]
        if any(term.name == "code" for term in every):
            Sandbox(config.sandbox).run("", Stdin(""))
            sources += "; the sandbox starts"
        said = [sources, *(one.words for one in tried if one.own or one.doubt)]
        return (Doubt if any(one.doubt for one in tried) else str)("; ".join(said))

    def _tried(self, scorer: Scorer, row: Row, opened: str, state: TrainerState) -> list[Tried]:
        """What rewards give for the ground truth of a row.

        Args:
            opened: what the chat template begins the response with.
        """
        begun = f"{THOUGHT}\n" if THOUGHT in opened and END_OF_THOUGHT not in opened else ""

        def response(form: str) -> Response:
            text = form.removeprefix(begun)
            return Response(text, text, opened, tuple(self.tokenizer.encode(text, add_special_tokens=False)))

        tried = scorer.tried(row, response, state, thorough=not self.downloads)
        if opened and (blind := [term.name for term in scorer.terms_of(row) if term.own and not term.opened]):
            begins = f"the chat template begins each response with {opened!r}"
            why = f"{begins}, which {', '.join(blind)} will not see: a parameter `opened` gets it"
            tried.append(Tried(why, own=True, doubt=True))
        return tried

    @cached_property
    def judge(self) -> Judge | None:
        """The judge at ``judge.url``, after it has answered; None if the config has none."""
        if self.config.judge.url is None:
            return None
        return HttpJudge(self.config.judge)

    def junior_served(self) -> str:
        endpoint = self.config.model.junior_endpoint
        return f"{endpoint.url} serves {served(endpoint)}"

    def endpoint(self) -> str:
        judge = self.config.judge
        if not self.downloads and judge.wait_s > 0:
            raise NotHereError(f"train waits for {judge.url} up to judge.wait_s={judge.wait_s:g}")
        assert self.judge is not None
        return f"{self.config.judge.url} serves {self.judge.model}"

    def space(self) -> str:
        """Check that the disk of ``output_dir`` has room for a checkpoint and its export.

        A checkpoint has three float32 numbers per trained parameter: its weight and the two of the optimiser.
        """
        model, output = self.config.model, Path(self.config.output_dir)
        if reason := no_folder(output):
            raise ConfigError(f"output_dir={output}: {reason}")
        policy = _size(self.skeleton(model.senior))
        trained = 0 if model.lora.rank else policy  # adapters are small beside the export
        if self.trained_recipe.critic:
            trained += _size(self.skeleton(model.critic or model.senior))
        needed = 12 * trained + policy * (4 if model.dtype == "float32" else 2)
        place = next(folder for folder in (output, *output.absolute().parents) if folder.is_dir())
        free = shutil.disk_usage(place).free
        words = f"a checkpoint and its export take {needed / 1e9:.2g} GB; {free / 1e9:.1f} GB free in {place}"
        if needed > free:
            raise ConfigError(f"output_dir={output}: {words}; choose another disk")
        return words

    def _rows(self, sources: Sequence[str]) -> list[Row]:
        if remote := [source for source in sources if source.startswith("hf:") and not self.downloads]:
            raise NotHereError(f"{', '.join(remote)} is read from the hub")
        return load_rows(sources, columns=self.config.data.columns)

    def _evaluated(self, sources: Sequence[str]) -> Evaluated:
        most = self.config.eval.train_problems
        read = [self._rows([source]) for source in sources] if self.config.train.eval_every else []
        prompts = [prompt for rows in read for prompt in self._encoded(rows)[0][:most]]
        return Evaluated([*chain.from_iterable(read)], prompts)

    def _encoded(self, rows: Sequence[Row]) -> tuple[list[Prompt], int]:
        return opening_prompts(rows, self.tokenizer, self.config.data, self.episode_runner, self._reader)

    @property
    def _reader(self) -> PreTrainedTokenizerBase | None:
        return None if self.config.selection.kind.solo else self.junior_tokenizer

    @property
    def _read_by_the_engine(self) -> dict[str, str]:
        """The models that read the texts of training, by their config keys."""
        config, model = self.config, self.config.model
        unread = config.loss.junior_kl_coef == 0 and config.loss.kl_to != "junior"
        solo = (config.selection.kind.solo and unread) or model.junior_endpoint.url is not None
        return {"model.senior": model.senior} | ({} if solo or model.junior is None else {"model.junior": model.junior})

    def _sees(self, key: str, path: str, row: Row, tokens: int, new: int, budget: str, fix: str) -> None:
        for what, limit in visible_tokens(self.configuration(path)).items():
            if tokens + new > limit:
                raise ConfigError(
                    f"row {row.example_id}: its {tokens} tokens and {budget} exceed the {what} of "
                    f"{key}, {limit} tokens; {fix}"
                )


def trainer_state(config: Config, prompts: int, done: int) -> TrainerState:
    """How far a run with so many prompts is after ``done`` steps, for reward functions."""
    train, epoch = config.train, config.train.prompts_per_step / prompts
    return TrainerState(done, train.steps, done * epoch, math.ceil(train.steps * epoch))


def _size(model: Any) -> int:
    """How many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def _unused(*_: Any) -> Any:
    raise AssertionError("nothing is scored before the run")
