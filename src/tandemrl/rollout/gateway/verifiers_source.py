"""Environments of verifiers (0.4) as a source of episodes, with its own classes: tasks, harness, tools and rewards.

The rows are those of `tasks.verifiers.rows`. Each episode is a run of ``Env.run_episode`` whose model is the session of
the gateway. ``Env.finalize``, which compares traces, gets those of an episode if it has several; if each has one, it
gets the traces of all episodes of a group at once.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tandemrl.config import Config, ConfigError
from tandemrl.config.hints import pip_install
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.calls import is_metric
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.envs.environment import BrokenEnvironmentError, Opening
from tandemrl.rollout.gateway.source import AgentFailedError, Endpoint, Outcome, ScoredSource, Source

KEPT = 10_000
"""How many traces are kept until they are scored."""


def verifiers(
    taskset: str,
    harness: str = "tandem",
    *,
    env: str = "",
    renderer: Mapping[str, Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Source:
    """A source of the episodes of a taskset.

    Args:
        taskset: its id, as in ``data.train=[verifiers:TASKSET:512]``.
        harness: the id of the program that plays each role. ``tandem`` is a chat with tools in this process; verifiers'
            own ``null`` is one in a process that uv makes.
        env: the id of the environment, as ``best-of-n``. "": that of the taskset, or a single agent.
        renderer: ask through ``TrainClient`` with this renderer of the package ``renderers``. None: through its client
            of chat completions. Either way the gateway keeps the sampled ids.
        parameters: further values of verifiers' configuration of the environment.

    Raises:
        ConfigError: verifiers is missing, or finds no such plug-in or setting.
    """
    try:
        import verifiers.v1 as vf
        from verifiers.v1.utils.generic import concrete_type
        from verifiers.v1.utils.loaders import environment_class

        from tandemrl.rollout.gateway import verifiers_parts
    except ImportError as error:
        raise ConfigError(f"verifiers({taskset!r}): {error.name} is missing; {pip_install('verifiers')}") from None
    verifiers_parts.register()
    given = dict(parameters or {})
    try:
        kind = environment_class(taskset, env)
        settings = concrete_type(kind, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
        fields = settings.model_fields.items()
        usual = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        roles = {name: usual | given.get(name, {}) for name, each in fields if isinstance(each.default, vf.AgentConfig)}
        tasks = {"id": taskset, **given.get("taskset", {})}
        made = kind(settings.model_validate({"id": env, **given, **roles, "taskset": tasks}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"verifiers({taskset!r}): {error}") from None
    compares = type(made).finalize is not vf.Env.finalize
    return (_Compared if compares else _Verifiers)(made, renderer)


class _Verifiers(ScoredSource):
    """See `verifiers`."""

    def __init__(self, env: Any, renderer: Mapping[str, Any] | None) -> None:
        self.env, self.renderer, self.tokenizer = env, renderer, ""
        self.settings = env.config.model_dump_json()  # what signatures read
        self.kinds = [type(env), type(env.taskset), type(env.taskset).task_type()]
        self._traces: dict[str, Any] = {}
        self._serving: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._judge, env.finalize = env.finalize, self._within

    def make_runner(self, tokenizer: Any, config: Config, **how: Any) -> Any:
        self.tokenizer = config.model.senior
        return super().make_runner(tokenizer, config, **how)

    def start(self, row: Row) -> Opening:
        self._task(row)  # refuses it before the run
        return super().start(row)

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        import verifiers.v1 as vf

        await self._served()
        how: dict[str, Any] = {"base_url": endpoint.base_url, "api_key_var": "TANDEMRL_SESSION"}
        client = vf.EvalClientConfig(**how)
        if self.renderer is not None:
            client = vf.TrainClientConfig(**how, renderer=self.renderer, renderer_model_name=self.tokenizer)
        episode = await self.env.run_episode(self._task(row), vf.ModelContext(model="pair", client=client))
        for agent in (trace.agent for trace in episode.traces if not trace.agent.trainable):
            if agent.config.client.base_url == endpoint.base_url and agent.config.model != "junior":
                own = "{model: junior}, or a client of its own"
                fix = f"give it another in parameters (rollout.environment_parameters): {{{agent.name}: {own}}}"
                raise ConfigError(f"verifiers: {agent.name} is not to be trained, but the senior plays it; {fix}")
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise AgentFailedError("; ".join(f"{each.type}: {each.message}" for each in errors)[-300:])
        traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
        if len(episode.traces) == 1:
            self._traces[traces[0].id] = traces[0]
            while len(self._traces) > KEPT:
                del self._traces[next(iter(self._traces))]
        counts = {f"vf/{name}": x for trace in traces for name, x in trace.metrics.items() if x is not None}
        return Outcome(_score(traces), counts=counts, state=traces[0].id)

    def _task(self, row: Row) -> Any:
        kind = type(self.env.taskset).task_type()
        try:
            return kind(kind.data_type().model_validate(row.extra_info["task"]), self.env.taskset.config.task)
        except (KeyError, ValueError) as error:
            why = f"row {row.example_id}: no task of {self.env.config.taskset.id}: {error}"
            raise ConfigError(
                f"{why}; use data.train and data.eval=[verifiers:{self.env.config.taskset.id}:512]"
            ) from None

    async def _within(self, task: Any, episode: Any) -> None:
        """Compare the traces of an episode, if it has several."""
        if len(episode.traces) > 1:
            await self._judge(task, episode)

    async def _served(self) -> None:
        """Wait for the servers of this event loop, which end with it.

        Raises:
            BrokenEnvironmentError: they do not start.
        """
        loop = asyncio.get_running_loop()
        if self._ready is None or self._ready.get_loop() is not loop:
            self._ready = loop.create_future()
            self._serving = loop.create_task(self._serve(self._ready))
        try:
            await asyncio.shield(self._ready)
        except Exception as error:
            raise BrokenEnvironmentError(f"verifiers: {type(error).__name__}: {error}") from error

    async def _serve(self, ready: "asyncio.Future[None]") -> None:
        try:
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)


class _Compared(_Verifiers):
    """The same, of an environment that compares traces."""

    async def score_group(self, row: Row, transcripts: Sequence[Transcript]) -> list[Score | None]:
        """The scores after ``Env.finalize`` over the traces of the group; of an episode with several, its own."""
        import verifiers.v1 as vf

        traces = [self._traces.pop(str((each.state or {}).get("state")), None) for each in transcripts]
        if together := [trace for trace in traces if trace is not None]:
            task = self._task(row)
            await self._judge(task, vf.Episode(task=together[0].task, traces=together, ok=True))
        both = zip(traces, transcripts, strict=True)
        return [self.score(row, told) if trace is None else _score([trace]) for trace, told in both]


def _score(traces: Sequence[Any]) -> Score:
    """The score of traces that are trained on together: the mean over them of the sum of rewards."""
    value = sum(trace.reward for trace in traces) / len(traces)
    given = {name: each.score for trace in traces for name, each in trace.rewards.items() if each is not None}
    parts = {f"vf_{name}" if is_metric(name) or name == "acc" else name: float(x) for name, x in given.items()}
    return Score(value, {"acc": float(value >= 1), **parts}, None)
