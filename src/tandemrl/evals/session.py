"""What the phases of an evaluation share: the configuration, and models, data, engine and judge, each loaded once."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config, ConfigError, SandboxConfig, SelectionConfig
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.plain import plain
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Prompt, Row
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.evals.files import digests
from tandemrl.evals.measures import EvalError
from tandemrl.evals.phases import PHASES, Phase
from tandemrl.evals.protocol import Profile, draws_turns, profile_of
from tandemrl.evals.readers import Reader
from tandemrl.evals.reading import TextReader
from tandemrl.evals.stored import Stored
from tandemrl.models.loading import junior_tokenizer_of, load_model, load_tokenizer, stored_eos_token_ids
from tandemrl.models.sampling import DRAW
from tandemrl.processes.http import Client, Service
from tandemrl.rewards.functions import with_environment
from tandemrl.rewards.routing import RowKind
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges
from tandemrl.rollout.endpoint_partner import EndpointJunior, served
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.envs.environment import Environment, make_environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, make_episode_runner, opening_prompts, reader_of
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.signatures import searched_by, signature
from tandemrl.selection.words import vocabulary_of

_OF_A_PHASE = ("readers", *(key for phase in PHASES.values() for key in phase.settings))
_NOT_OF_SOLO = ("train_samples", "train_problems", *_OF_A_PHASE)
_NO_PART_OF_A_MARK = ("url", "api_key_env", "backoff_s", "timeout_s", "concurrency", "max_failure_rate")
_OF_EPISODES = (
    *("environment", "tools", "max_turns", "turn_tokens", "observation_tokens", "result_tokens", "tool_timeout_s"),
)


def grader_settings(config: Config) -> dict[str, Any]:
    """The settings that grades depend on, beside the judge, under the names of the result files."""
    reward = {name: value for name, value in asdict(config.reward).items() if name != "workers"}
    reward = {name: value for name, value in reward.items() if value or name not in ("weights", "parameters")}
    return {"reward": reward} | ({} if config.sandbox == SandboxConfig() else {"sandbox": asdict(config.sandbox)})


def judge_settings(config: Config) -> dict[str, Any]:
    """The settings that a judge's marks depend on."""
    judge = {key: value for key, value in asdict(config.judge).items() if key not in _NO_PART_OF_A_MARK}
    return judge | {"digests": digests([config.judge.template] if config.judge.template else [])}


@dataclass(frozen=True)
class Endpoint:
    """The endpoint of a model.

    model: its name there; None means the first one that the endpoint lists. api_key_env: the environment variable with
    the key; None sends no key. The other fields say how patient to be, see `http.Service`.
    """

    url: str
    model: str | None = None
    api_key_env: str | None = None
    timeout_s: float = 120.0
    retries: int = 3
    backoff_s: float = 1.0
    concurrency: int = 16

    def client(self) -> Client:
        """The HTTP client for this endpoint.

        Raises:
            EvalError: ``api_key_env`` is not set.
        """
        return Client(Service.of(self, "Endpoint", "vllm serve MODEL", EvalError))

    def served(self) -> str:
        """The name of the model.

        Raises:
            EvalError: the endpoint is down, or serves other models.
        """
        with closing(self.client()) as client:
            return client.model(self.model)


@dataclass
class Session:
    """The models, data, engine and judge of an evaluation. Each is loaded once, when a phase first needs it.

    The fields are the arguments of ``evaluate``: source is the model, passed the environment. The junior is used only
    if one of the phases needs it. models: those that are loaded, by their folders or hub ids.
    """

    config: Config
    source: str | Path | Endpoint | Stored
    phases: Sequence[Phase]
    limit: int | None = None
    stated: Collection[str] | None = None
    passed: Environment | None = None
    models: dict[str, PreTrainedModel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, source = self.config, self.source
        self.remote = source if isinstance(source, Endpoint) else None
        self.stored = source if isinstance(source, Stored) else None
        name = source.name if isinstance(source, Stored) else source
        self.model = source.served() if isinstance(source, Endpoint) else str(name)
        self.has_episodes = config.has_episodes or self.passed is not None
        self.observation_tokens = config.rollout.observation_tokens if self.has_episodes else 0
        self.junior = config.model.junior if any(phase.junior for phase in self.phases) else None
        self.endpoint = None if config.model.junior_endpoint.url is None else config.model.junior_endpoint
        self.has_judge = config.judge.url is not None
        self._engine: Engine | None = None
        self._unfit: str | None = None
        """Why a junior with a vocabulary of its own cannot take turns with the environment."""

    def of_junior(self, phase: Phase) -> "Session":
        """A session in which the junior is the model that generates alone, with its own tokenizer and template."""
        assert self.junior is not None  # refused in evaluate
        return replace(self, source=self.junior, phases=[phase])

    def readers(self, models: Sequence[str] | None = None) -> Iterator[Reader]:
        """The models that read the texts, one after the other: each is closed before the next one.

        Args:
            models: None stands for ``eval.readers``.
        """
        models = self.config.eval.readers if models is None else models
        phases = [phase for phase in self.phases if phase.readers or phase.itself]
        tokenizer = None if self.remote is not None or self.stored is not None else self.tokenizer
        for name, model in zip(short_names(models), models, strict=True):
            loaded = {*self.models}
            path, url = reader_of_spec(model)
            with ExitStack() as stack:
                session = stack.enter_context(closing(replace(self, source=path, phases=phases)))
                endpoint = None
                if url is not None:
                    served_at = replace(self.config.model.junior_endpoint, url=url, model=None)
                    endpoint = stack.enter_context(closing(EndpointJunior(served_at, session.tokenizer)))
                yield Reader(name, session, tokenizer, endpoint)
            for path in self.models.keys() - loaded:
                del self.models[path]

    # what makes results comparable

    @cached_property
    def profile(self) -> Profile:
        return profile_of(self.config.eval)

    @cached_property
    def digests(self) -> dict[str, str]:
        readers = self.config.eval.readers if any(phase.readers for phase in self.phases) else ()
        stored = [] if self.stored is None else [str(self.stored.file)]
        juniors = [self.junior] if self.junior else []
        return digests([self.model, *juniors, *readers, *stored, *self.config.data.eval])

    @cached_property
    def solo_identity(self) -> dict[str, Any]:
        """Everything that the texts of the senior alone depend on, under the names of the result files."""
        config, arguments = self.config, self.config.data.template_arguments
        if self.stored is not None:
            author: dict[str, Any] = {"engine": "stored", "responses": str(self.stored.file), "authors": "unknown"}
            author |= {"response_digests": self._digests_of(str(self.stored.file))}
        elif self.remote is None:
            author = {"engine": config.rollout.engine, "draw": DRAW}
        else:
            author = {"engine": "endpoint", "endpoint": self.remote.url, "authors": "unknown"}
        return plain(
            {
                "model": self.model,
                "data": config.data.eval,
                "eval": {key: value for key, value in asdict(config.eval).items() if key not in _NOT_OF_SOLO},
                **grader_settings(config),
                **(self._acting_settings() if self.has_episodes else {}),
                "dtype": config.model.dtype,
                "device": config.model.device,
                "prompt_suffix": config.data.prompt_suffix,
                "max_prompt_tokens": config.data.max_prompt_tokens,
                **({} if arguments == DEFAULT_ARGUMENTS else {"template_arguments": arguments}),
                "limit": self.limit,
                "digests": self._digests_of(self.model, *config.data.eval),
                **author,
            }
        )

    def identity(self, phase: Phase) -> dict[str, Any]:
        """Everything that the result of a phase depends on. A result with another identity is another result."""
        config, identity = self.config, dict(self.solo_identity)
        if phase.junior:
            assert self.junior is not None  # refused in evaluate
            digests_of_both = self._digests_of(self.model, self.junior, *config.data.eval)
            identity |= {"junior": self.junior, "digests": digests_of_both}
            if self.endpoint is not None:
                model = self.endpoint.model or served(self.endpoint)
                identity["junior_endpoint"] = {"model": model, "attempts": self.endpoint.attempts}
        if phase.readers:
            read = self._digests_of(self.model, *config.eval.readers, *config.data.eval)
            identity |= {"readers": config.eval.readers, "digests": read}
        identity |= {key: getattr(config.eval, key) for key in phase.settings}
        if phase.name == "tandem":
            selection = config.selection
            named = draws_turns(selection) or self.junior_tokenizer is not None
            drawn = {"strategy": selection.strategy} if named else {"max_gap_tokens": selection.max_gap_tokens}
            identity |= {"prob_senior": selection.prob_senior, **drawn}
        if self.has_judge:
            judge = judge_settings(config)
            if phase.judge:
                judge["model"] = config.judge.model or self.judges.judge.model
            identity["judge"] = judge
        return plain(identity)

    def _acting_settings(self) -> dict[str, Any]:
        """Everything that an episode depends on beside its authors."""
        rollout, retrieval = self.config.rollout, self.config.retrieval
        settings: dict[str, Any] = {name: getattr(rollout, name) for name in _OF_EPISODES}
        if self.passed is not None:
            kind = type(self.passed)
            settings["environment"] = f"{kind.__module__}:{kind.__qualname__}"
        settings["signature"] = signature(self.environment)
        if rollout.keep_turns:
            settings["keep_turns"] = True
        local = [each for each in (retrieval.model, retrieval.index) if each]
        return settings | {"retrieval": searched_by(retrieval) | ({"digests": digests(local)} if local else {})}

    def _digests_of(self, *sources: str) -> dict[str, str]:
        return {source: self.digests[source] for source in map(str, map(Path, sources)) if source in self.digests}

    # what is loaded

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model)

    @cached_property
    def junior_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of a junior that has a vocabulary of its own; None if the models have one."""
        return junior_tokenizer_of(self.model, self.junior, endpoint=self.endpoint is not None, load=self._tokenizer)

    def _tokenizer(self, path: str) -> PreTrainedTokenizerBase:
        return self.tokenizer if path == self.model else load_tokenizer(path)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text, whoever writes it: those of both models, if they have one vocabulary."""
        one = self.junior_tokenizer is None and self.endpoint is None
        return stored_eos_token_ids(self.model, self.tokenizer, self.junior if one else None)

    def refusal(self, phase: Phase) -> str | None:
        """Why a phase cannot be run with this environment, or with a junior that has a vocabulary of its own, and what
        could; None if it can."""
        if phase.by_name and self.has_episodes:
            return "is of single responses; set rollout.environment=single"
        if not phase.junior or self.junior_tokenizer is None:
            return None
        apart = self.endpoint is not None  # which gives no log-probs of a text
        if phase.one_vocabulary or (apart and not phase.both):
            where = "is behind an endpoint" if apart else "has another vocabulary than the senior"
            fix = "or load it (model.junior_endpoint.url=null)" if apart else "or a junior of the senior's family"
            same = "needs one vocabulary, since both read the same tokens"
            return f"{same}, but the junior {self.junior} {where}; use tandem, {fix}"
        if phase.both:
            rollout, by_words = self.config.rollout, SelectionConfig("before_word")
            try:
                check(Config(self.config.model, rollout=rollout, selection=by_words), Facts(apart=True))
            except ConfigError as error:
                return f"cannot be run: {error}"
        made = self.episode_runner is not None and self._unfit is not None
        return f"needs both in the environment: {self._unfit}" if made else None

    @cached_property
    def rows(self) -> list[Row]:
        """All rows of the data, before ``limit``. They need ground truths if a phase grades, or an environment may."""
        graded = self.has_episodes or any(phase.graded for phase in self.phases)
        return load_rows(self.config.data.eval, graded=graded, columns=self.config.data.columns)

    @cached_property
    def prompts(self) -> tuple[list[Prompt], int]:
        """The prompts, and how many rows were dropped because they are too long. An endpoint gets no tokens."""
        rows, other = self.rows[: self.limit], self.junior_tokenizer
        if self.remote is not None or self.stored is not None:
            return [Prompt(row, ()) for row in rows], 0
        return opening_prompts(rows, self.tokenizer, self.config.data, self.episode_runner, other)

    @cached_property
    def environment(self) -> Environment | None:
        """The environment that the authors act in, or None."""
        return self.passed or make_environment(self.config)

    @cached_property
    def episode_runner(self) -> EpisodeRunner | None:
        """Where the authors take turns with an environment. None if a prompt gets one response."""
        if not self.has_episodes:
            return None
        own, ends = self.passed, self.ends
        make = partial(make_episode_runner, self.config, self.tokenizer, environment=own, eos_token_ids=ends)
        try:
            return make(junior=reader_of(self.junior, self.junior_tokenizer))
        except ConfigError as error:
            self._unfit = str(error)
            return make()  # which raises what is not about the junior

    @property
    def reader(self) -> TextReader | None:
        """How a junior with a vocabulary of its own gets a text to read."""
        if self.junior_tokenizer is None:
            return None
        rendering = None if self.episode_runner is None else self.episode_runner.junior_rendering
        return TextReader(vocabulary_of(self.junior_tokenizer), self.tokenizer, rendering)

    @cached_property
    def judges(self) -> Any:
        found = judges(self.config)
        assert found is not None  # refused in evaluate
        return found

    def scorer(self) -> Scorer:
        return Scorer(
            self.config.reward,
            functions=with_environment({}, self.environment),
            code=code_scorer(self.config),
            judge=(lambda items: self.judges(items)) if self.has_judge else None,
        )

    def check_rewards(self) -> None:
        """Refuse rows that cannot be scored and rewards that are not used, before any completion is written.

        Raises:
            ConfigError, DataError, GraderError: see ``Scorer.check``.
        """
        with self.scorer() as scorer:
            rows = (prompt.row for prompt in self.prompts[0])
            scorer.check(rows, kinds=map(RowKind.of, self.rows), stated=self.stated, episodes=self.has_episodes)

    def load(self, path: str | None) -> PreTrainedModel:
        assert path is not None  # refused in evaluate
        if path not in self.models:
            self.models[path] = load_model(path, dtype=self.config.model.dtype, device=self.config.model.device)
        return self.models[path]

    @property
    def vocabulary(self) -> int:
        """How many token ids both models can write: those below this number."""
        paths = [path for path in (self.model, self.junior) if path is not None]
        return min(AutoConfig.from_pretrained(path).get_text_config().vocab_size for path in paths)

    def engine(self, phase: Phase) -> Engine:
        """The engine that writes the texts of a phase.

        An engine in a process of its own is the same for all phases, and has the junior if any of them needs it.
        """
        config, rollout = self.config.model, self.config.rollout
        shared = not rollout.kind.in_trainer
        if self._engine is None or not shared:
            both = any(each.both and not self.refusal(each) for each in self.phases) if shared else phase.both
            junior = self.junior if both else None
            self.close_engine()
            load = partial(self.load, junior)
            prompted = max((len(prompt.tokens) for prompt in self.prompts[0]), default=0)
            read = self.profile.sampling.max_tokens if phase.readers else 0  # of another model's text
            self._engine = make_engine(
                rollout,
                ModelSource(self.model, partial(self.load, self.model)),
                None if junior is None else ModelSource(junior, load, None, None, self.junior_tokenizer, self.endpoint),
                self.tokenizer,
                dtype=config.dtype,
                device=config.device,
                longest=self.observation_tokens + self.profile.longest(prompted) + read,
                acting=None if self.episode_runner is None else self.episode_runner.elsewhere(self.config),
                ends=self.ends,
            )
        return self._engine

    def close(self) -> None:
        """End the processes that the session has started."""
        self.close_engine()
        if (made := vars(self).get("episode_runner")) is not None:
            made.close()

    def close_engine(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()


def reader_of_spec(spec: str) -> tuple[str, str | None]:
    """The model of a reader, and where it is served; None if it is to be loaded.

    Examples:
        >>> reader_of_spec("org/small"), reader_of_spec("org/small@http://localhost:8000/v1")
        (('org/small', None), ('org/small', 'http://localhost:8000/v1'))
    """
    path, at, address = spec.partition("@http")
    return path, f"http{address}" if at else None


def short_names(models: Sequence[str]) -> list[str]:
    """Short names of models: the last parts of their paths, as many as tell them apart.

    Examples:
        >>> short_names(["pairs/0/junior", "pairs/1/junior", "org/small"])
        ['0-junior', '1-junior', 'small']
    """
    parts = [Path(reader_of_spec(model)[0]).parts for model in models]

    def name(own: tuple[str, ...]) -> str:
        counts = (sum(each[-n:] == own[-n:] for each in parts) for n in range(1, len(own) + 1))
        return "-".join(own[-next((n for n, count in enumerate(counts, 1) if count == 1), len(own)) :])

    return [*map(name, parts)]
