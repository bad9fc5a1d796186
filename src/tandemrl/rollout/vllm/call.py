"""The open call of a vLLM engine. Its scheduler decides which rows are decoded together."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle
import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import exceptions

from tandemrl.rollout.call import Call, Event, NewTokens
from tandemrl.rollout.decoding_rows import Part, Row
from tandemrl.rollout.engine import (
    Completion,
    EngineDeadError,
    EngineError,
    Passes,
    Reply,
    Request,
    replay_turns,
)
from tandemrl.selection import Strategy

_SHARED = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""The fields that ``Sampling`` and vLLM's ``SamplingParams`` call by the same name."""


class VllmCall(Call):
    """The call of a ``VllmEngine``. Every turn of a row is a request of vLLM, which the prefix cache lets continue.

    Args:
        engine, turns, streams: see ``Call``.
    """

    poll_every = 1  # vLLM would give the place of a row that waits to another one

    def __init__(self, engine: Any, *, turns: bool, streams: bool) -> None:
        super().__init__(engine, turns=turns, streams=streams)
        self._engine = engine  # a VllmEngine, whose module imports this one
        self._llm = engine.llm
        self._flying: dict[int, str] = {}
        """vLLM's name of each running turn, by number of the row."""
        self._strategies: dict[str, Strategy] = {}
        """By name: those that the workers know."""
        self._ended = 0
        """How many tokens the ended turns have."""
        with ExitStack() as opened, death_reported():
            opened.enter_context(engine.awake())
            engine.call_workers("tandem_begin")
            self._opened = opened.pop_all()

    def close(self) -> None:
        try:
            with self._opened, death_reported():
                if self._flying:
                    self._llm.abort_request([*self._flying.values()], internal=True)
                    # A step that failed was given blocks that no model has filled; its prompts must not hit them later.
                    self._llm.reset_prefix_cache()
                stats = self._engine.stats()
                junior, senior = stats["rows"]
                self.engine.passes = Passes(self._ended, senior, junior) + Passes(*stats["drafts"])
        finally:
            self.engine.closed(self)

    def _begin(self, requests: Sequence[Request], rows: Sequence[Row]) -> None:
        with death_reported():
            self._register(requests)
            known = [(row, self._params(row)) for row in rows]
            try:
                for row, params in known:
                    self._begin_turn(row, params)
            except Exception:  # none joins, so none goes on
                self._llm.abort_request(
                    [self._flying.pop(r.number) for r in rows if r.number in self._flying], internal=True
                )
                raise

    def _register(self, requests: Sequence[Request]) -> None:
        """Let the workers know the strategies of these requests, and no others but those of rows that go on."""
        if {_name(request) for request in requests} <= self._strategies.keys():
            return
        live = [*requests, *(row.request for row in self._rows.values() if not row.over)]
        self._strategies = {_name(request): request.strategy for request in live}
        known: Any = self._strategies if self._engine.in_process else cloudpickle.dumps(self._strategies)
        self._engine.call_workers("tandem_register", known)

    def _params(self, row: Row) -> SamplingParams:
        """vLLM's sampling parameters of the row's next turn.

        Raises:
            EngineError: vLLM cannot sample like this.
        """
        s, eos = row.request.sampling, self._engine.eos
        history = [*map(list, row.request.history), *(turn.tolist() for turn in row.turns)]
        arguments = {"tandem_key": row.key, "tandem_strategy": _name(row.request), "tandem_history": history}
        if self._turns:
            arguments["tandem_row"] = row.number
        try:
            params = SamplingParams(
                **{name: getattr(s, name) for name in _SHARED},
                max_tokens=row.turn_left,
                stop=list(s.stop) or None,
                include_stop_str_in_output=True,
                # EOS ids go in as stop ids: vLLM knows one of them, and ``_reason`` sees which one ended a turn.
                stop_token_ids=sorted({*s.stop_token_ids, *(() if s.ignore_eos else eos)}),
                ignore_eos=True,
                detokenize=bool(s.stop),
                skip_special_tokens=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args=arguments,
            )
        except (ValueError, VLLMClientError) as error:
            raise EngineError(f"completion {row.number}: vLLM cannot sample like this: {error}") from error
        if params.temperature != s.temperature:
            limit = f"{s.temperature} is too low for vLLM, which would use {params.temperature}"
            raise EngineError(f"completion {row.number}: temperature {limit}; 0 is greedy")
        return params

    def _begin_turn(self, row: Row, params: SamplingParams) -> None:
        """Start the next turn of a row in vLLM.

        Rows with lower numbers have priority, since the prefix cache may still hold what was computed of them.
        """
        prompt, number = {"prompt_token_ids": row.text}, row.number
        self._flying[number] = self._llm.add_request(str(number), prompt, params, priority=number)

    def _step(self) -> list[Event]:
        events: list[Event] = []
        with death_reported():
            flying = bool(self._flying)
            for output in self._llm.step() if flying else ():
                row, written = self._rows[int(output.request_id)], output.outputs[0]
                events += self._end_turn(row, written.token_ids, written.logprobs, self._reason(row.request, written))
            states = self._llm.output_processor.request_states if flying else {}
            for number, name in self._flying.items() if self._streams else ():
                state = states[name]
                tokens, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
                events += self._news(self._rows[number], tokens, logprobs)
            written = self._ended + sum(state.detokenizer.num_output_tokens() for state in states.values())
            self.steps, self.written = self.steps + flying, written
            if self._aborts:
                events += self._end_aborted()
        return events

    def _news(self, row: Row, tokens: Sequence[int], logprobs: Any) -> list[Event]:
        """What its running turn has that was not told."""
        told, row.told = row.told, len(tokens)
        if len(tokens) == told:
            return []
        return [NewTokens(row.number, [*tokens[told:]], _values(row, len(tokens), logprobs)[told:])]

    def _end_turn(self, row: Row, tokens: Sequence[int], logprobs: Any, reason: Any) -> list[Event]:
        """Record a turn that has ended, after which the row waits for an answer or is over.

        Args:
            logprobs: vLLM's flat log-probs of the ``tokens``; None if there is none.
        """
        events = self._news(row, tokens, logprobs) if self._streams else []
        del self._flying[row.number]
        row.end_turn(Part.of(tokens, 0, _values(row, len(tokens), logprobs)), reason)  # authors are known later
        self._ended += len(tokens)
        if not self._turns or reason == "abort":
            self._end(row, reason)
            return events
        self._awaited[row.number] = row
        return [*events, row.turn]

    def _reason(self, request: Request, output: Any) -> str:
        if output.finish_reason == "stop":
            ended = not request.sampling.ignore_eos and output.stop_reason in self._engine.eos
            return "eos" if ended else "stop"
        if output.finish_reason == "length":
            return "length"
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}")

    def _end_aborted(self) -> list[Event]:
        """End aborted rows with what they have written so far."""
        aborted, events = self._take_aborts(), list[Event]()
        for number in [number for number in self._flying if number in aborted]:
            row, name = self._rows[number], self._flying[number]
            state = self._llm.output_processor.request_states[name]
            tokens = list(state.detokenizer.output_token_ids)
            events += self._end_turn(row, tokens, state.logprobs_processor.logprobs, "abort")
            self._llm.abort_request([name], internal=True)
        self._end_apart(aborted, [*self._awaited.values()])
        return events

    def _go_on(self, row: Row, reply: Reply) -> None:
        row.observe(reply.context)
        with death_reported():
            self._begin_turn(row, self._params(row))

    def take(self, numbers: Sequence[int]) -> list[Completion]:
        _name_authors([self._rows[number] for number in numbers])
        return super().take(numbers)

    @property
    def idle(self) -> bool:
        return not self._flying

    @property
    def blocked(self) -> bool:
        return self.idle and not (self._over or self._aborts)


def _name_authors(rows: Sequence[Row]) -> None:
    """Write down who wrote each own token of each row, replayed from keys and tokens for all rows of a strategy at
    once."""
    for strategy in {id(row.request.strategy): row.request.strategy for row in rows}.values():
        mine = [row for row in rows if row.request.strategy is strategy]
        turns = [[*map(np.asarray, row.request.history), *row.turns] for row in mine]
        replayed = replay_turns(strategy, [row.key for row in mine], turns).author.numpy()
        for row, authors in zip(mine, replayed, strict=True):
            begun = sum(map(len, row.request.history))
            for part in row.parts:
                if len(part.author) and part.author[0] >= 0:
                    part.author[:] = authors[begun : begun + len(part.author)]
                    begun += len(part.author)


def _name(request: Request) -> str:
    """The name by which the workers know the strategy of a request."""
    return str(id(request.strategy))


def _values(row: Row, count: int, logprobs: Any) -> list[float]:
    """The log-probs of the first tokens of a turn, from vLLM's flat ones. Those of greedy decoding are 0.0."""
    greedy = logprobs is None or row.request.sampling.temperature == 0
    return [0.0] * count if greedy else [*logprobs.logprobs]


@contextmanager
def death_reported() -> Iterator[None]:
    """A context that says what to do when the engine's process ends.

    Raises:
        EngineDeadError: it did.
    """
    try:
        yield
    except exceptions.EngineDeadError as error:
        raise EngineDeadError(
            f"the vLLM engine died ({error}); its output above says why. Start again: a run resumes from its last "
            "checkpoint"
        ) from error
