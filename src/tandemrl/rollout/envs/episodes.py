"""Episodes of authors in an environment: they connect the turns of an engine with the answers of the environment.

The token ids of a turn are decoded to text, the text is parsed to a message, the environment answers the message, and
the answer becomes token ids. The environment answers in other processes or threads (`processes.calls`), so that no row
waits for the tool of another row, or forever for a tool that hangs.
"""

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from tandemrl.config import Config, ConfigError, DataConfig, RolloutConfig
from tandemrl.data.messages import Message, Transcript, sound
from tandemrl.data.rows import Prompt, Row, encode_prompts
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.models.attention import ModelError
from tandemrl.models.loading import stored_eos_token_ids
from tandemrl.processes.calls import Caller, ChildCalls, Outcome, ProcessError, ThreadCalls
from tandemrl.processes.child import cores
from tandemrl.rewards.calls import MEASURED, OF_K
from tandemrl.rollout.engine import (
    Completion,
    Draws,
    Engine,
    EngineError,
    OnProgress,
    Reply,
    Request,
    StopReason,
    Turn,
    generate_verified,
)
from tandemrl.rollout.envs.environment import Environment, Opening, State, make_environment, sample
from tandemrl.rollout.envs.parsing import CALL_FORMATS, CallFormat, parse_turn
from tandemrl.rollout.envs.rendering import Rendered, Rendering
from tandemrl.rollout.envs.worker import answering
from tandemrl.rollout.signatures import signature
from tandemrl.selection import Strategy

WORKER = (sys.executable, "-P", "-m", "tandemrl.rollout.envs.worker")
COUNTS = ("turns", "tool_calls", "tool_errors", "invalid_calls", "tool_timeouts", "cut_results")
"""The counts that the library keeps of every episode, beside those that the environment returns."""
RESERVED_METRICS = {*COUNTS, "observation_tokens", *MEASURED} - {"tool_errors"}
"""Names that an environment must not use for its counts, since the library's own metrics have them. Names that begin as
in ``OF_K`` are others."""


class Reader(NamedTuple):
    """A junior with a vocabulary of its own: its tokenizer, and the ids that end a turn for it."""

    tokenizer: Any
    eos_token_ids: Collection[int]


def reader_of(path: str | None, tokenizer: Any, *, download: bool = True) -> Reader | None:
    """The junior in a folder or on the hub, whose ``tokenizer`` is None if it has no vocabulary of its own.

    Args:
        download: see ``stored_eos_token_ids``.
    """
    if path is None or tokenizer is None:
        return None
    try:
        return Reader(tokenizer, stored_eos_token_ids(path, tokenizer, download=download))
    except ModelError:  # of a junior behind an endpoint there need be nothing but the tokenizer
        return Reader(tokenizer, (tokenizer.eos_token_id,))


class Acting:
    """An environment with its limits, ready for episodes, whatever their turns are made of.

    Args:
        environment: what the authors act in.
        config: the limits on turns, tokens and time.
        caller: runs the environment, as a rule in processes of its own. None runs it in threads of this process, for an
            environment that exists nowhere else, as in a notebook; there, a late call is given up but cannot be killed.
    """

    def __init__(self, environment: Environment, config: RolloutConfig, caller: Caller | None = None) -> None:
        self.environment, self.config = environment, config
        self.name = config.environment if config.environment_kind.turns else type(environment).__name__
        self.tools = environment.tool_schemas()
        """The schemas of the tools, for the chat template."""
        self.schemas = {schema["function"]["name"]: schema for schema in self.tools}
        self.caller = caller or ThreadCalls(answering(environment), limit_s=config.tool_timeout_s)

    def opening(self, row: Row) -> Opening:
        """The messages and the state that the episode of a row begins with.

        Raises:
            EngineError: the environment fails; the message names it and the row.
        """
        try:
            return self.environment.start(row)
        except Exception as error:
            what = f"environment {self.name}: row {row.example_id} cannot begin"
            raise EngineError(f"{what}: {type(error).__name__}: {error}") from error

    def message(self, turn: Turn) -> Message:
        """A turn as a message."""
        raise NotImplementedError  # of subclasses, by what their turns are made of

    def heard(self, turn: Turn, messages: Sequence[Message]) -> tuple[Rendered, tuple[int, ...]]:
        """What the authors read after a turn, and what a junior with a vocabulary of its own reads instead.

        Raises:
            ConfigError: messages of these roles cannot be shown.
        """
        raise NotImplementedError  # of subclasses, by what their turns are made of

    def close(self) -> None:
        """End the processes of the environment. The next call of the environment starts new ones."""
        self.caller.close()


class EpisodeRunner(Acting):
    """An environment together with a tokenizer, in which turns are token ids. It lives as long as a run.

    It renders the schemas of the tools, opens the episode of a row, and makes one `Episodes` for each call of
    ``generate``.

    Args:
        environment, config, caller: see `Acting`.
        tokenizer: the tokenizer of the authors, with a chat template.
        eos_token_ids: the ids that end a turn for the engine. None stands for the tokenizer's EOS token.
        template_arguments: further variables of the chat template (``data.template_arguments``).
        junior: the junior, if it has a vocabulary of its own. ``tokenizer`` is then that of the senior.

    Raises:
        ConfigError: a tool cannot be described, or a tokenizer's chat template does not support several turns, or
            writes tool calls in a form that cannot be parsed.
    """

    def __init__(
        self,
        environment: Environment,
        tokenizer: Any,
        config: RolloutConfig,
        *,
        caller: Caller | None = None,
        eos_token_ids: Collection[int] | None = None,
        template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
        junior: Reader | None = None,
    ) -> None:
        super().__init__(environment, config, caller)
        self.ends = frozenset([tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids)
        self.rendering = Rendering(
            tokenizer,
            self.tools,
            eos_token_ids=self.ends,
            result_tokens=config.result_tokens,
            keep_turns=config.keep_turns,
            template_arguments=template_arguments,
        )
        self._tokenizer, self._junior = tokenizer, junior
        self._calls: CallFormat = self._call_format()
        self.junior_rendering: Rendering | None = None
        if junior is not None:
            self.junior_rendering = Rendering(
                junior.tokenizer,
                self.tools,
                eos_token_ids=junior.eos_token_ids,
                keep_turns=config.keep_turns,
            )  # results that are too long are cut for the senior
            if (misread := self._misread(self.junior_rendering, self._calls)) is not None:
                name, text, arguments = misread
                own = self.rendering.call_text(name, arguments)[:200]
                what = f"its chat template writes a call of {name} as {text[:200]!r}, the senior's as {own!r}"
                fix = "use a junior whose chat template writes calls as the senior's does"
                raise ConfigError(f"tokenizer {junior.tokenizer.name_or_path!r} of the junior: {what}; {fix}")

    def episode(self, request: Request, row: Row) -> Request:
        """``request`` as an episode of a row, with the limits on the tokens of a turn and of the environment.

        Raises:
            EngineError: the request has a history, after which the state of the environment is not known.
        """
        if request.history:
            raise EngineError(f"environment {self.name}: row {row.example_id}: an episode begins without a history")
        return replace(
            request,
            task=row,
            turn_tokens=self.config.turn_tokens,
            observation_tokens=self.config.observation_tokens,
            end_of_turn=self.rendering.end_of_turn,
        )

    def stop(self) -> None:
        """End a call of `generate` in another thread that the engine cannot end, since it waits for programs."""

    def episodes(self) -> "Episodes":
        """The episodes of one call of ``generate``, whose requests were made by `episode`."""
        return Episodes(self)

    def generate(
        self, engine: Engine, requests: Sequence[Request], strategy: Strategy, *, progress: OnProgress | None = None
    ) -> tuple[list[list[Completion]], Draws]:
        """Write the episodes of requests, which were made by `episode`; see `generate_verified`.

        Raises:
            EngineError: the environment is broken, or never answers.
        """
        responder = self.episodes()
        written = generate_verified(engine, requests, strategy, progress=progress, responder=responder)
        responder.check()
        return written

    def elsewhere(self, config: Config) -> "Callable[[], EpisodeRunner | None]":
        """Makes the runner of a rollout worker, to which this function is pickled: with the environment of ``config``,
        or with a copy of one that runs in threads."""
        return partial(
            make_episode_runner,
            config,
            self._tokenizer,
            environment=self.environment if isinstance(self.caller, ThreadCalls) else None,
            eos_token_ids=self.ends,
            junior=self._junior,
        )

    def message(self, turn: Turn) -> Message:
        """The text of a turn, parsed to a message."""
        tokens = turn.tokens.tolist()
        if tokens and turn.stop_reason != "length" and tokens[-1] in self.ends:
            tokens.pop()
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return parse_turn(text, self.schemas, self._tokenizer, self.rendering.prefix, self._calls)

    def heard(self, turn: Turn, messages: Sequence[Message]) -> tuple[Rendered, tuple[int, ...]]:
        rendered = self.rendering.context(messages, ended=turn.tokens[-1:].tolist() == [self.rendering.end_of_turn])
        junior = self.junior_rendering
        return rendered, () if junior is None else junior.context(rendered.messages, ended=False).tokens

    def _call_format(self) -> CallFormat:
        """The format in which the chat template writes calls: that in which a call of every tool is read back.

        Raises:
            ConfigError: there is none.
        """
        misread = {calls: self._misread(self.rendering, calls) for calls in CALL_FORMATS}
        if (found := next((calls for calls, each in misread.items() if each is None), None)) is not None:
            return found
        name, text, arguments = misread["hermes"] or ("", "", {})
        what = f"its chat template writes a call of {name} as {text[:200]!r}, which is not read as {arguments}"
        fix = "Use a tokenizer with a response template for its calls (response_template in tokenizer_config.json), or"
        forms = '<tool_call>{"name": …, "arguments": {…}}</tool_call> or {"name": …, "parameters": {…}}'
        raise ConfigError(f"tokenizer {self._tokenizer.name_or_path!r}: {what}. {fix} one that writes {forms}")

    def _misread(self, rendering: Rendering, calls: CallFormat) -> tuple[str, str, Mapping[str, Any]] | None:
        """A tool whose call is not read as a template writes it: its name, the text and the arguments; None if all are
        read."""
        for tool in self.tools:
            name, arguments = tool["function"]["name"], sample(tool["function"]["parameters"])
            text = rendering.call_text(name, arguments)
            read = parse_turn(text, self.schemas, self._tokenizer, self.rendering.prefix, calls).get("tool_calls")
            if read != [{"type": "function", "function": {"name": name, "arguments": arguments}}]:
                return name, text, arguments
        return None

    def __enter__(self) -> "EpisodeRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_episode_runner(
    config: Config,
    tokenizer: Any,
    *,
    environment: Environment | None = None,
    eos_token_ids: Collection[int] | None = None,
    junior: Reader | None = None,
) -> EpisodeRunner | None:
    """The `EpisodeRunner` of ``rollout.environment``, or None for ``single``, where a prompt gets one response.

    Args:
        environment: an environment to use instead of the configured one. It runs in threads; see `EpisodeRunner`.
        eos_token_ids: the ids that end a turn for the engine (``models.loading.eos_token_ids``). None stands for the
            tokenizer's EOS token.
        junior: the junior, if it has a vocabulary of its own.

    Raises:
        ConfigError: there is no such environment, or it does not work with the tokenizer.
    """
    acted_in = make_environment(config) if environment is None else environment
    if acted_in is None:
        return None
    signature(acted_in)  # before it is used
    how: dict[str, Any] = {"eos_token_ids": eos_token_ids, "junior": junior}
    if (make := getattr(acted_in, "make_runner", None)) is not None:  # it asks the models itself (``gateway.source``)
        runner: EpisodeRunner = make(tokenizer, config, **how)
        return runner
    how |= {"caller": make_caller(config, environment), "template_arguments": config.data.template_arguments}
    return EpisodeRunner(acted_in, tokenizer, config.rollout, **how)


def opening_prompts(
    rows: Sequence[Row], tokenizer: Any, data: DataConfig, runner: EpisodeRunner | None, junior: Any = None
) -> tuple[list[Prompt], int]:
    """The prompts of rows (see `encode_prompts`): what their episodes begin with, or the row's own without a runner."""
    return encode_prompts(
        rows,
        tokenizer,
        max_prompt_tokens=data.max_prompt_tokens,
        suffix=data.prompt_suffix,
        opening=None if runner is None else lambda row: runner.opening(row).messages,
        tools=() if runner is None else runner.tools,
        template_arguments=data.template_arguments,
        junior=junior,
    )


def make_caller(config: Config, environment: Environment | None = None) -> Caller | None:
    """What answers for the environment of a config: processes, which are started when they are first needed. None for
    one that was passed, which exists in this process alone: see `Acting`."""
    if environment is not None:
        return None
    processes = config.rollout.tool_workers or min(2, cores())
    return ChildCalls(WORKER, config, processes=processes, limit_s=config.rollout.tool_timeout_s)


class Episodes:
    """A `rollout.engine.Responder` whose answer to a turn depends on that turn's episode alone.

    If a turn is the last one, by ``rollout.max_turns`` or a limit on tokens, the transcript holds the answer to it,
    although no author has seen it.
    """

    def __init__(self, acting: Acting) -> None:
        self._runner = acting
        self._episodes: dict[int, _Episode] = {}
        self._replies: deque[Reply] = deque()
        self._awaited = 0
        self._failure: str | None = None
        self.tally = Counter[str]()
        """How many turns the environment was ``asked`` to answer, here or in rollout workers, and how many of them were
        ``unanswered``: they ended by a time-out or a crash."""

    def submit(self, turn: Turn) -> None:
        """See `Responder`."""
        runner = self._runner
        if turn.number not in self._episodes:
            if not isinstance(turn.task, Row):
                raise EngineError(f"environment {runner.name}: Request.task must be the row, got {turn.task!r:.100}")
            self._episodes[turn.number] = _Episode(turn.task, self._state(turn.task))
        episode, message = self._episodes[turn.number], runner.message(turn)
        episode.messages.append(message)
        calls, invalid = message.get("tool_calls", ()), message.get("invalid_calls", ())
        episode.counts.update(turns=1, tool_calls=len(calls), invalid_calls=len(invalid))
        self._awaited += 1
        runner.caller.call(
            (episode.row, episode.state, message),
            lambda outcome: self._answer(turn, message, outcome),
            key=episode.row.example_id,
        )

    def replies(self, *, wait: bool) -> list[Reply]:
        """See `Responder`."""
        if wait and not self._replies and not self._awaited:
            raise EngineError(f"environment {self._runner.name}: an answer is awaited, but no turn was submitted")
        try:
            self._runner.caller.poll(wait=wait and not self._replies)
        except ProcessError as error:
            self._failure = str(error)
        if self._failure is not None:
            raise EngineError(f"environment {self._runner.name}: {self._failure}")
        ready = list(self._replies)
        self._replies.clear()
        return ready

    def transcript(self, number: int) -> Transcript:
        """See `Responder`."""
        episode = self._episodes.get(number)
        if episode is None:  # it was aborted in its first turn
            return Transcript((), None, dict.fromkeys(COUNTS, 0.0))
        return Transcript(tuple(episode.messages), episode.state, {key: float(n) for key, n in episode.counts.items()})

    def check(self) -> None:
        """Refuse the episodes, once all have ended, if the environment never answered.

        Raises:
            EngineError: there were at least two turns to answer, and all of them ended by a time-out or a crash.
        """
        runner, asked = self._runner, self.tally["asked"]
        if self.tally["unanswered"] == asked > 1:
            raise EngineError(
                f"environment {runner.name}: none of {asked} turns was answered: all took more than "
                f"{runner.config.tool_timeout_s:g} s or crashed; raise rollout.tool_timeout_s if the machine is slow"
            )

    def _state(self, row: Row) -> State:
        """The state that an episode begins with, as a JSON value."""
        state = self._runner.opening(row).state
        try:
            return sound(json.loads(json.dumps(state, allow_nan=False)))
        except (TypeError, ValueError) as error:
            where = f"environment {self._runner.name}: row {row.example_id}"
            raise EngineError(f"{where}: its state is no JSON value: {error}") from error

    def _answer(self, turn: Turn, message: Message, outcome: Outcome) -> None:
        """Record the outcome of a turn in its episode, and render the answer to token ids."""
        self._awaited -= 1
        runner, episode = self._runner, self._episodes[turn.number]
        if message.get("tool_calls") or not runner.tools:
            self.tally.update(asked=1, unanswered=outcome.how in ("timeout", "death"))
        if outcome.how == "result":
            answer = sound(outcome.value)
            said, over, fault = answer["messages"], answer["over"], self._fault(answer)
        else:
            what = (
                f"no answer within {runner.config.tool_timeout_s:g} s"
                if outcome.how == "timeout"
                else "the tool crashed"
            )
            said, over = [{"role": "tool" if runner.tools else "user", "content": f"Error: {what}"}], False
            fault = outcome.value if outcome.how == "error" else None
            episode.counts["tool_timeouts" if outcome.how == "timeout" else "tool_errors"] += 1
        stop: StopReason | None = None if over or turn.index + 1 < runner.config.max_turns else "turns"
        rendered, read = Rendered((), [], 0), tuple[int, ...]()
        try:
            if said and fault is None:
                rendered, read = runner.heard(turn, said)
        except ConfigError as error:
            fault = str(error)
        if fault is not None:
            self._failure = f"row {episode.row.example_id}: {fault}"
            return
        if outcome.how == "result":
            episode.state = answer["state"]
            episode.counts.update(answer["counts"])
        episode.messages += rendered.messages
        episode.counts["cut_results"] += rendered.cut
        self._replies.append(Reply(turn.number, *(((), stop) if over or stop else (rendered.tokens, None, read))))

    def _fault(self, answer: Mapping[str, Any]) -> str | None:
        """What is wrong with an answer of the environment, or None if nothing is."""
        for message in answer["messages"]:
            known = isinstance(message, Mapping) and message.get("role") in ("tool", "user")
            if not known or not isinstance(message.get("content"), str):
                return f"its answer has a message that is not of a tool or user with a text: {message!r:.200}"
            if unknown := message.keys() - {"role", "content", "name"}:
                return f"its answer has a message with the key {min(unknown)!r}, which is not shown"
            if message.get("name") not in (None, *self._runner.schemas):
                return f"its answer names the tool {message['name']!r}, which it does not have"
        counts = answer["counts"]
        if not isinstance(counts, Mapping) or not all(isinstance(count, int | float) for count in counts.values()):
            return f"its answer counts what is no number: {counts!r:.200}"
        if taken := [name for name in counts if name in RESERVED_METRICS or str(name).startswith(OF_K)]:
            return f"its answer counts {taken[0]!r}, which is the library's to count; give it another name"
        return None if answer["messages"] or answer["over"] else "its answer is empty, and the episode is not over"


@dataclass
class _Episode:
    row: Row
    state: State
    messages: list[Message] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTS, 0)))
