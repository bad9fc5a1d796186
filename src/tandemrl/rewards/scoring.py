"""Scores whole batches: cheap items in this process, the rest in processes that are killed if they hang.

The protocol of scorers (`Score`, `Deferred`) is in `tandemrl.rewards.protocol`; `routing` chooses the scorers. The
module does not import torch.
"""

import math
import pickle
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import Row
from tandemrl.processes.calls import ChildCalls, Outcome, ProcessError
from tandemrl.processes.child import cores
from tandemrl.rewards.functions import RewardFunction, Term, weighted
from tandemrl.rewards.functions import call as call_by_name
from tandemrl.rewards.protocol import NO_SCORE, Deferred, GraderError, GroupScores, Item, Lost, Score, TrainerState
from tandemrl.rewards.routing import EQUALITY, RowKind, check_rewards, ideal_texts, terms_of

WORKER = (sys.executable, "-P", "-m", "tandemrl.rewards.worker")
TASKS_PER_WORKER = 8
"""For about how many comparisons it is worth starting another process, which takes half a second of imports."""
MAX_ROUNDS = 8
"""How often in a row a scorer may defer."""

Coder = Callable[[Row, str], Score]
"""Scores a response by running its program: `tasks.code.grader.score_code` with a sandbox."""
Answer = tuple[Row, str | Response]
"""A response to a row. A text stands for one of which nothing else is known."""


class Graded(NamedTuple):
    """The score of a response. lost: whether a process hung or died over it. extra: what reward functions logged about
    it, by column. metrics: what they logged about all responses to its prompt, by name; only the first of them has it.
    """

    score: Score
    lost: bool = False
    extra: Mapping[str, Any] = {}
    metrics: Mapping[str, Sequence[float]] = {}


class Tried(NamedTuple):
    """What a reward gives to the ground truth of a row, in words. own: whether it is the user's. doubt: nothing, in any
    form that it was tried in."""

    words: str
    own: bool
    doubt: bool = False


class Scorer:
    """Scores batches of responses. ``reward.timeout_s`` is a hard limit for each item, in any thread.

    Scorers run in this process as long as they are cheap; what they defer is settled by four pools (see `protocol`).
    The processes of the symbolic pool are started when they are first needed. A process that hangs or dies is killed
    and replaced; its item scores 0, with the part ``timeout`` or ``failure`` set to 1, and is counted in ``timeouts``
    or ``failures``.

    Args:
        reward: the ``reward`` section of a config.
        code: scores rows whose ``data_source`` is code. It is called in threads.
        judge: scores rows that a judge has to see, a whole batch of (row, response, score by the rules) at a time: a
            `tasks.rubric.judge.JudgePool`.
        functions: reward functions of this process by name; see `routing` for the rows that they score.
        world: the processes of a run (`processes.world.World`), which must all make the same calls: responses are dealt
            out to the scorers of all, those that a function gets together to one, and scores are gathered. Whether too
            many are unscored, or all were lost, is decided over the whole batch.

    Examples:
        >>> from tandemrl.data.rows import Row
        >>> with Scorer(RewardConfig()) as scorer:
        ...     scorer.score([(Row("a", (), "math500", "7", {}), r"\\boxed{7}")])[0].value
        1.0
    """

    def __init__(
        self,
        reward: RewardConfig,
        *,
        code: Coder | None = None,
        judge: Any = None,
        functions: Mapping[str, RewardFunction] | None = None,
        world: Any = None,
    ) -> None:
        self.functions = dict(functions or {})
        self.timeouts = 0
        self.failures = 0
        self._reward = reward
        self._code = code
        self._judge, self._world = judge, world
        self._processes = _Processes(reward)
        self._terms: dict[RowKind, tuple[Term, ...]] = {}
        self._lock = threading.Lock()

    def check(
        self,
        rows: Iterable[Row],
        *,
        episodes: bool = False,
        kinds: Iterable[RowKind] | None = None,
        stated: Collection[str] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        """Refuse rows that cannot be scored, and rewards that would score none, before anything is generated.

        Args:
            rows: the rows to check.
            episodes: whether there will be transcripts.
            kinds: the kinds of all rows that were read. None means those of ``rows``.
            stated: see `routing.check_rewards`.
            state: see `graded`.

        Raises:
            ConfigError: a pattern, a weight or a function of the rewards is not used.
            DataError: a row's ``data_source`` has no scorer, or its ground truth is not what the scorer needs.
            GraderError: a scorer cannot be imported, or needs a sandbox, a judge or a transcript, which is missing.
        """
        rows, nothing = list(rows), Transcript(()) if episodes else None
        read = map(RowKind.of, rows) if kinds is None else kinds
        check_rewards(read, self._reward, self.functions, stated=stated)
        for row in rows:
            for term in self.terms_of(row):
                pending = term.begin([Item(row, Response("", "", ids=()), nothing)], self._reward, state)
                if isinstance(pending, Deferred):
                    self._pool(pending.kind, row)

    def score(self, items: Sequence[Answer], *episodes: Any, **how: Any) -> list[Score]:
        """As `graded`, the scores alone."""
        return [each.score for each in self.graded(items, *episodes, **how)]

    def graded(
        self,
        items: Sequence[Answer],
        transcripts: Sequence[Transcript | None] | None = None,
        *,
        groups: Sequence[Hashable] | None = None,
        state: TrainerState | None = None,
    ) -> list[Graded]:
        """Score each (row, response), in the given order.

        Args:
            transcripts: the transcripts of the episodes that the responses come from, for scorers that read them.
            groups: equal for responses to one prompt, which functions of TRL's form get together. None: by row.
            state: how far the run has come, for functions that ask for it. None: this is no run.

        Raises:
            DataError: a row's ``data_source`` has no scorer.
            GraderError: a pool or a reward function is broken, a scorer reads transcripts and there are none, or all
                of at least two items hung or crashed.
        """
        episodes = [None] * len(items) if transcripts is None else transcripts
        each = [Item(row, Response.of(text), episode) for (row, text), episode in zip(items, episodes, strict=True)]
        keys = [item.row.example_id for item in each] if groups is None else groups
        terms = [self.terms_of(item.row) for item in each]
        calls: dict[Hashable, tuple[Term, list[int]]] = {}
        for number in range(max(map(len, terms), default=0)):  # calls of one kind in a row: they are dealt out
            for i, (key, some) in enumerate(zip(keys, terms, strict=True)):
                for term in some[number : number + 1]:
                    _, places = calls.setdefault((key if term.grouped else ("alone", i), id(term)), (term, []))
                    places.append(i)

        def settled(some: Sequence[tuple[Term, list[int]]]) -> list[tuple[GroupScores, bool]]:
            return self._settled([(term, [each[i] for i in places]) for term, places in some], state)

        dealt = [*calls.values()]
        told = settled(dealt) if self._world is None else self._world.scatter_gather(dealt, settled)
        found, lost = [dict[str, Score]() for _ in terms], set[int]()
        extra, metrics = [dict[str, Any]() for _ in terms], [dict[str, list[float]]() for _ in terms]
        for (term, places), (said, gone) in zip(dealt, told, strict=True):
            lost |= {*places} if gone else set()
            for i, score in zip(places, said.scores, strict=True):
                found[i][term.name] = score
            for column, values in said.extra.items():
                for i, value in zip(places, values, strict=True):
                    extra[i][f"{term.name}/{column}" if column in extra[i] else column] = value
            for name, logged in said.metrics.items():
                metrics[places[0]].setdefault(name, []).extend(logged)
        scores = [weighted(some, [of[term.name] for term in some]) for some, of in zip(terms, found, strict=True)]
        with self._lock:
            self.timeouts += sum("timeout" in score.parts for score in scores)
            self.failures += sum("failure" in score.parts for score in scores)
        graded = [Graded(score, i in lost, extra[i], metrics[i]) for i, score in enumerate(scores)]
        if self._world is not None and self._judge is not None:
            self._judge.check([one.score for one in graded])
        if len(graded) > 1 and all(one.lost for one in graded):
            raise GraderError(
                f"none of {len(graded)} responses could be scored: all hung for {self._reward.timeout_s} s or crashed; "
                "raise reward.timeout_s if the machine is slow"
            )
        return graded

    def tried(
        self, row: Row, response: Callable[[str], Response] = Response.of, state: Any = None, *, thorough: bool = True
    ) -> list[Tried]:
        """What each reward gives to the ground truth of a row: the most of the forms that it is tried in.

        They are called as in training, with the same limits. One that needs a judge or an episode, or whose right
        answers are no ground truths (tests of a program), is not tried.

        Args:
            response: the response with a text.
            state: see `graded`.
            thorough: False: try only the user's, in one form, unless they get several together.

        Raises:
            GraderError: a function fails, returns no score, hangs or crashes; the message names it.
        """
        found = []
        for term in self.terms_of(row):
            texts = [] if term.reads_transcripts else ideal_texts(term, row)
            items = [Item(row, response(text)) for text in texts]
            items = items if thorough or (term.own and term.grouped) else items[: term.own]
            calls = [items] if items and term.grouped else [[item] for item in items]
            settled = self._settled([(term, call) for call in calls], state)
            for item, (said, lost) in zip(items, settled, strict=False):
                if lost:
                    late = f"took longer than reward.timeout_s={self._reward.timeout_s:g}"
                    how = late if "timeout" in said.scores[0].parts else "ended its process"
                    text = item.response.text[:80]
                    raise GraderError(f"{term.name}, row {row.example_id}: {how} on the text {text!r}")
            scores = [score for said, _ in settled for score in said.scores]
            if not scores:
                found.append(Tried(f"graded by {term.name}", term.own))
                continue
            best = max(scores, key=lambda score: score.value)
            given = "no score" if best is NO_SCORE else f"{best.value:g}"
            doubt = thorough and best is not NO_SCORE and best.value <= 0
            words = f"{term.name} gives {given} for the ground truth of {row.example_id}, as "
            words += f"{texts[scores.index(best)][:60]!r}{': can a correct response earn a reward?' * doubt}"
            found.append(Tried(words, term.own, doubt))
        return found

    def close(self) -> None:
        """End the scoring processes. The next call of `score` starts new ones."""
        with self._lock:
            self._processes.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def terms_of(self, row: Row) -> tuple[Term, ...]:
        kind = RowKind.of(row)
        if kind not in self._terms:
            self._terms[kind] = terms_of(row, self._reward, self.functions)
        return self._terms[kind]

    def _settled(
        self, calls: Sequence[tuple[Term, Sequence[Item]]], state: TrainerState | None
    ) -> list[tuple[GroupScores, bool]]:
        """What rewards give to responses, and whether it was lost because a process hung or died. Pools settle deferred
        scores, and those that are then deferred again."""
        results = [term.begin(items, self._reward, state) for term, items in calls]
        rows, lost = [items[0].row for _, items in calls], set[int]()
        for _ in range(MAX_ROUNDS):
            waiting: dict[str, list[int]] = {}
            for i, item in enumerate(results):
                if isinstance(item, Deferred):
                    waiting.setdefault(item.kind, []).append(i)
            if waiting.keys() - {"judge"}:
                waiting.pop("judge", None)  # asked once per batch, when all that may lead to it is settled
            for kind, places in waiting.items():
                pending = [item for i in places if isinstance(item := results[i], Deferred)]
                with self._lock:
                    outcomes = self._pool(kind, rows[places[0]])(pending)
                for i, item, outcome in zip(places, pending, outcomes, strict=True):
                    results[i] = item.then(outcome)
                    if isinstance(outcome, Lost) and not isinstance(results[i], Deferred):
                        lost.add(i)
            if not waiting:
                break
        settled = []
        for i, (row, result) in enumerate(zip(rows, results, strict=True)):
            if isinstance(result, Score) and math.isfinite(result.value):
                result = GroupScores([result])
            if not isinstance(result, GroupScores):
                raise GraderError(f"row {row.example_id}: its scorer gave no finite score but {result!r:.300}")
            settled.append((result, i in lost))
        return settled

    def _pool(self, kind: str, row: Row) -> Callable[[Sequence[Deferred]], Sequence[Any]]:
        """The function that settles one kind of deferred scores."""
        if kind == "symbolic":
            return self._processes.settle
        if kind == "function":
            return lambda pending: [each.payload[0]() for each in pending]
        if kind == "code" and self._code is not None:
            return self._run_code
        if kind == "judge" and self._judge is not None:
            judge = self._judge if self._world is None else self._judge.score_part
            return lambda pending: judge([each.payload for each in pending])
        missing = {
            "code": "a sandbox to run programs in; give the Scorer code=…",
            "judge": "a judge; set judge.url to an OpenAI-compatible endpoint",
        }[kind]
        raise GraderError(f"row {row.example_id}: scoring data_source {row.data_source!r} needs {missing}")

    def _run_code(self, pending: Sequence[Deferred]) -> list[Score]:
        assert self._code is not None
        with ThreadPoolExecutor(self._reward.workers or cores()) as threads:
            return [*threads.map(self._code, *zip(*(each.payload for each in pending), strict=True))]


def surely_equal(a: str, b: str) -> bool:
    """Whether the default grader calls two answers equal, by math-verify in a process that it kills if need be."""
    quick, symbolic = (f"{EQUALITY}:{name}" for name in ("quick_equal", "equal"))
    decided = call_by_name(quick, a, b)
    return _voters().settle([Deferred("symbolic", (symbolic, a, b))])[0] is True if decided is None else bool(decided)


@cache
def _voters() -> "_Processes":
    return _Processes(RewardConfig(workers=1))


class _Processes(ChildCalls):
    """Child processes that call functions by name; an answer is a JSON value, or `Lost`."""

    def __init__(self, reward: RewardConfig) -> None:
        if reward.workers is not None and reward.workers < 1:  # of a config that nothing has checked
            raise GraderError(f"reward.workers={reward.workers}: must be at least 1, or null to choose")
        processes, queue = reward.workers or cores(), 1 if reward.workers else TASKS_PER_WORKER
        super().__init__(WORKER, None, processes=processes, limit_s=reward.timeout_s, queue=queue)

    def settle(self, pending: Sequence[Deferred]) -> list[Any]:
        """The result of ``module:function(*arguments)`` for each payload. Equal payloads are computed once."""
        keys = [pickle.dumps((each.payload, each.responses)) for each in pending]
        tasks, outcomes = dict(zip(keys, pending, strict=True)), dict[bytes, Outcome]()
        try:
            for key, task in tasks.items():
                limit_s = self._limit_s * task.responses
                self.call(task.payload, partial(outcomes.__setitem__, key), limit_s=limit_s)
            while len(outcomes) < len(tasks):
                self.poll(wait=True)
        except ProcessError as error:
            raise GraderError(f"scoring process {error}") from None
        except BaseException:  # what is under way is nothing for the next batch
            self.close()
            raise
        return [_answer(outcomes[key]) for key in keys]


def _answer(outcome: Outcome) -> Any:
    if outcome.how == "error":  # a GraderError says itself what was raised, and where
        return Lost("failure", outcome.value.removeprefix(f"{GraderError.__name__}: "))
    return {"result": outcome.value, "timeout": Lost("timeout"), "death": Lost("failure")}[outcome.how]
