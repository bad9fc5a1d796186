"""Who writes the next token. A strategy is a pair of pure functions, vectorised over the rows of a decoding batch.

``init(request_keys)`` chooses the author of the first token, ``step(state, last_token)`` that of the next one. The
state is a NamedTuple of tensors whose first dimension is the row, so an engine may drop, reorder or merge rows by
indexing every field. Nothing else is remembered: authorship is a function of (request key, tokens) alone, and
``replay`` recomputes it. Draw number i of a completion is uniform number i of its key's SELECTION stream, whatever
``prob_senior`` is.

A strategy with ``starts`` (``whole_words``) decides after it has seen what the author would write, and may drop it.

The strategies ``word``, ``bernoulli``, ``sentence``, ``chunk`` and ``alternating`` are those of "Tandem Reinforcement
Learning with Verifiable Rewards" (arXiv:2606.28166).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from tandemrl.selection.boundaries import StepTables, WordTables
from tandemrl.selection.draws import SELECTION, group_of, stream, uniforms

Who = Literal["senior", "junior"]


class Strategy(NamedTuple):
    """The functions that decide who writes: ``init(request_keys: Int64[b]) -> (senior_first: Bool[b], state)`` and
    ``step(state, last_token: Int64[b]) -> (senior_next: Bool[b], state)``.

    ``state`` is a NamedTuple of tensors with leading dimension b. Neither function changes its inputs. ``writers`` is a
    promise about who may write: an engine does not run a model that never writes, and fails if the promise is broken.
    An engine in another process gets its strategy pickled; the library's strategies can be pickled, since they are
    module functions with bound values. `trial.try_strategy` checks before a run what a strategy promises: shapes,
    types, inputs untouched, and authors that depend on a row's own key and tokens alone. A state with a field ``draws``
    also has ``senior_draws`` (`authors.draw_counts`).

    A rollout of several turns is one sequence of own tokens. State and author carry over from turn to turn, and no
    strategy sees what the environment says in between. If ``turn(state) -> (senior_next: Bool[b], state)`` is set, it
    is called where a further turn begins, after the step of the last token before it.

    If ``starts`` is set, a table of token ids, an author only *proposes* a token, and ``step`` names the author of the
    very token that it is told, who also proposes the next one. If that is not who proposed it, the token is dropped,
    and the author whom ``step`` named draws another one, from the ids of ``starts`` alone (other logits are masked
    before truncation), with the random numbers of the stream HANDOVER at this place. So ``step`` may change the author
    at ids of ``starts`` only, and must not tell these apart: the dropped token leaves no trace.

    With ``removed``, words are a property of the text, for models of two vocabularies (``whole_words``). Nobody draws
    these ids: their logits are masked before truncation, by engine and trainer. With ``by_steps``, authors change at
    the first word after a blank line, and within a turn nowhere else: one who writes a run of words elsewhere is told
    so, and else how many words there are.

    With ``shared_draws``, the completions of a group have the same author draws (`per_group`).
    """

    init: Callable[[Tensor], tuple[Tensor, Any]]
    step: Callable[[Any, Tensor], tuple[Tensor, Any]]
    writers: Literal["both", "senior", "junior"] = "both"
    turn: Callable[[Any], tuple[Tensor, Any]] | None = None
    starts: Bool[Tensor, " v"] | None = None
    removed: Bool[Tensor, " v"] | None = None
    by_steps: bool = False
    shared_draws: bool = False


Chosen = tuple[Bool[Tensor, " b"], Any]
"""Whether the senior writes next in each row, and the state."""


class DrawnState(NamedTuple):
    """Author of the current token, word or turn, how many authors were drawn so far, how often the senior, and the
    tokens since the last draw, if the strategy counts them."""

    key: Int64[Tensor, " b"]
    senior: Bool[Tensor, " b"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]
    since_draw: Int64[Tensor, " b"]


class SentenceState(NamedTuple):
    """Author of the current step, and whether the last token ended in a newline."""

    senior: Bool[Tensor, " b"]
    after_newline: Bool[Tensor, " b"]


class ChunkState(NamedTuple):
    """How many tokens were written so far."""

    position: Int64[Tensor, " b"]


class SoloState(NamedTuple):
    """The one author."""

    senior: Bool[Tensor, " b"]


def undrawn(request_keys: Int64[Tensor, " b"]) -> DrawnState:
    """The state before the first draw."""
    none = torch.zeros_like(request_keys)
    return DrawnState(stream(request_keys, SELECTION), none.bool(), none, none, none)


def draw(prob_senior: float, state: Any, where: Bool[Tensor, " b"], **changes: Tensor) -> Chosen:
    """Draw the author in the rows ``where``; the others keep theirs.

    Args:
        state: one with the first fields of `DrawnState`.
        changes: what its other fields become.
    """
    drawn = uniforms(state.key, state.draws) < prob_senior
    senior = torch.where(where, drawn, state.senior)
    counts = {"draws": state.draws + where, "senior_draws": state.senior_draws + drawn.logical_and_(where)}
    return senior, state._replace(senior=senior, **counts, **changes)


def word(prob_senior: float, max_gap_tokens: int, boundary: Bool[Tensor, " v"]) -> Strategy:
    """Redraw the author after every boundary token, and at the latest after ``max_gap_tokens`` tokens.

    The author is drawn Bernoulli(``prob_senior``) at the start. After a boundary token, or once ``max_gap_tokens``
    tokens were written since the last draw, the author is redrawn and the count starts again. The boundary token is the
    first piece of a word and the redraw comes after it, so a handoff can land inside a word of several pieces
    (``word_aligned`` avoids that). The paper trains with prob_senior 0.5 and max_gap_tokens 32.

    Args:
        boundary: True at the ids that begin a word, see ``boundaries.word_boundary_table``. It must cover every id that
            the models can emit.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1] or ``max_gap_tokens`` is below 1.
    """
    return _redrawing(prob_senior, max_gap_tokens, boundary)


def word_aligned(prob_senior: float, max_gap_tokens: int, words: WordTables) -> Strategy:
    """Like ``word``, but a handoff never lands inside a word. Not in the paper.

    The author of a token is chosen before the token is known, so the strategy cannot rely on the token's leading space.
    A handoff is safe only where the text so far rules out that the next token continues a word. The author is redrawn

    - after a token that ends in whitespace (what follows starts a word, or is more whitespace), and
    - once ``max_gap_tokens`` tokens were written since the last draw, after the first token that ends outside a word:
      in whitespace or in punctuation that no word contains. ``boundaries.WordTables`` says what a word is.

    So ``max_gap_tokens`` is a soft limit: past it the author writes on up to the next safe place, however far that is.
    Authors change less often than with ``word``, since most tokenizers put the space in front of a word, not after it.

    Args:
        words: the tables of ``boundaries.word_start_tables``.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1] or ``max_gap_tokens`` is below 1.
    """
    return _redrawing(prob_senior, max_gap_tokens, words.ends_in_space, words.ends_outside_word)


def _redrawing(
    prob_senior: float, max_gap_tokens: int, ends: Bool[Tensor, " v"], safe: Bool[Tensor, " v"] | None = None
) -> Strategy:
    """A strategy that redraws the author after the tokens of ``ends``. If it has not for ``max_gap_tokens`` tokens, it
    also does after those of ``safe``; None: after any."""
    check_probability(prob_senior)
    _check_at_least_one("max_gap_tokens", max_gap_tokens)
    tables = OnDevices(ends), None if safe is None else OnDevices(safe)
    return Strategy(partial(_first_draw, prob_senior), partial(_redrawing_step, prob_senior, max_gap_tokens, *tables))


def _redrawing_step(
    prob_senior: float,
    max_gap_tokens: int,
    ends: "OnDevices",
    safe: "OnDevices | None",
    state: DrawnState,
    last_token: Int64[Tensor, " b"],
) -> Chosen:
    since_draw = state.since_draw + 1
    redraw = since_draw >= max_gap_tokens
    if safe is not None:
        redraw.logical_and_(safe.at(last_token))
    redraw.logical_or_(ends.at(last_token))
    return draw(prob_senior, state, redraw, since_draw=since_draw.masked_fill_(redraw, 0))


def bernoulli(prob_senior: float) -> Strategy:
    """Draw the author of every token on its own: the senior with probability ``prob_senior``.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    check_probability(prob_senior)
    return Strategy(partial(_first_draw, prob_senior), partial(_drawn_again, prob_senior))


def _first_draw(prob_senior: float, request_keys: Int64[Tensor, " b"]) -> Chosen:
    state = undrawn(request_keys)
    return draw(prob_senior, state, torch.ones_like(state.senior))


def _drawn_again(prob_senior: float, state: DrawnState, last_token: Int64[Tensor, " b"] | None = None) -> Chosen:
    return draw(prob_senior, state, torch.ones_like(state.senior))


def sentence(first: Who, steps: StepTables) -> Strategy:
    r"""Hand over to the other author after every step of the solution, which ends in a blank line ("\n\n").

    The "\n\n" may lie inside one token, or be made by a token that ends in "\n" and a next one that starts with "\n".
    The prompt does not count, so a "\n" at the start of the response completes nothing. Three newlines in tokens of
    their own are two pairs, hence two handoffs. arXiv:2606.28166 evaluates handoffs with ``first="senior"``.

    Args:
        first: who writes the first step.
        steps: the tables of ``boundaries.step_tables``.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return _by_steps(is_senior("first", first), steps, None)


def first_step(who: Who, steps: StepTables) -> Strategy:
    """Let ``who`` write the first step of the solution and the other author all later ones. Not in the paper.

    Args:
        steps: what ends a step. With ``StepTables(boundary, none, none)``, it is the first token that begins a word.

    Raises:
        ValueError: ``who`` is neither "senior" nor "junior".
    """
    senior_starts = is_senior("who", who)
    return _by_steps(senior_starts, steps, senior_starts)


def _by_steps(senior_starts: bool, steps: StepTables, leaves: bool | None) -> Strategy:
    """Alternate by steps. leaves: who alone hands over, True for the senior; None: both do."""
    contains, starts, ends = map(OnDevices, (steps.contains, steps.starts_newline, steps.ends_newline))
    return Strategy(partial(_sentence_init, senior_starts), partial(_sentence_step, leaves, contains, starts, ends))


def _sentence_init(senior_starts: bool, request_keys: Int64[Tensor, " b"]) -> Chosen:
    senior = torch.full_like(request_keys, senior_starts, dtype=torch.bool)
    return senior, SentenceState(senior, after_newline=torch.zeros_like(senior))


def _sentence_step(
    leaves: bool | None,
    contains: "OnDevices",
    starts_newline: "OnDevices",
    ends_newline: "OnDevices",
    state: SentenceState,
    last_token: Int64[Tensor, " b"],
) -> Chosen:
    completes = starts_newline.at(last_token) & state.after_newline
    ended = contains.at(last_token) | completes
    senior = state.senior ^ (ended if leaves is None else ended & (state.senior == leaves))
    return senior, SentenceState(senior, ends_newline.at(last_token))


def chunk(chunk_size: int, first: Who = "senior") -> Strategy:
    """Let the authors alternate, each writing ``chunk_size`` tokens at a time; ``first`` begins.

    Raises:
        ValueError: ``chunk_size`` is below 1, or ``first`` is neither "senior" nor "junior".
    """
    _check_at_least_one("chunk_size", chunk_size)
    who = partial(_chunk_author, chunk_size, 0 if is_senior("first", first) else 1)
    return Strategy(partial(_chunk_init, who), partial(_chunk_step, who))


def _chunk_author(chunk_size: int, senior_parity: int, state: ChunkState) -> Chosen:
    return (state.position // chunk_size) % 2 == senior_parity, state


def _chunk_init(who: Callable[[ChunkState], Chosen], request_keys: Int64[Tensor, " b"]) -> Chosen:
    return who(ChunkState(torch.zeros_like(request_keys)))


def _chunk_step(who: Callable[[ChunkState], Chosen], state: ChunkState, last_token: Int64[Tensor, " b"]) -> Chosen:
    return who(ChunkState(state.position + 1))


def alternating(first: Who = "senior") -> Strategy:
    """Let the authors alternate after every token; ``first`` begins.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return chunk(1, first)


def solo(who: Who = "senior") -> Strategy:
    """Let one author, ``who``, write everything.

    Raises:
        ValueError: ``who`` is neither "senior" nor "junior".
    """
    return Strategy(partial(_solo_init, is_senior("who", who)), _same_author, writers=who)


def _solo_init(senior_writes: bool, request_keys: Int64[Tensor, " b"]) -> Chosen:
    senior = torch.full_like(request_keys, senior_writes, dtype=torch.bool)
    return senior, SoloState(senior)


def _same_author(state: Any, last_token: Int64[Tensor, " b"]) -> Chosen:
    return state.senior, state


def turn(prob_senior: float) -> Strategy:
    """Draw one author for each whole turn, the senior with probability ``prob_senior``. Not in the paper.

    This is a tandem of agents, in which every message and tool call has one author.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    check_probability(prob_senior)
    return Strategy(partial(_first_draw, prob_senior), _same_author, turn=partial(_drawn_again, prob_senior))


def alternating_turns(first: Who = "senior") -> Strategy:
    """Let the authors alternate, each writing one whole turn at a time; ``first`` begins.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return Strategy(partial(_solo_init, is_senior("first", first)), _same_author, turn=_other_turn)


def _other_turn(state: SoloState) -> Chosen:
    return ~state.senior, SoloState(~state.senior)


def first_turn(who: Who = "senior") -> Strategy:
    """Let ``who`` write the first turn and the other author all later ones, as an agent takes over another's work.

    Raises:
        ValueError: ``who`` is neither "senior" nor "junior".
    """
    senior_starts = is_senior("who", who)
    return Strategy(partial(_solo_init, senior_starts), _same_author, turn=partial(_turn_of, not senior_starts))


def _turn_of(senior_writes: bool, state: SoloState) -> Chosen:
    senior = torch.full_like(state.senior, senior_writes)
    return senior, SoloState(senior)


def per_group(strategy: Strategy) -> Strategy:
    """The same author draws in all completions of a group: the n-th draw falls to the same author in each.

    Rewards of a group are compared with their mean. So how much luck the draws were, say a hard word for the junior,
    cancels in the advantage, as far as completions take the same course.
    """
    return strategy._replace(init=partial(_init_by_group, strategy.init), shared_draws=True)


def _init_by_group(
    init: Callable[[Tensor], tuple[Tensor, Any]], request_keys: Int64[Tensor, " b"]
) -> tuple[Tensor, Any]:
    return init(group_of(request_keys))


def annealed(make: Callable[[float], Strategy], schedule: Callable[[int], float]) -> Callable[[int], Strategy]:
    """A strategy per training step: ``make(schedule(step))``.

    Examples:
        >>> strategy_at = annealed(bernoulli, linear(1.0, 0.5, steps=100))
        >>> strategy = strategy_at(20)  # prob_senior 0.9
    """
    return lambda step: make(schedule(step))


def linear(start: float, end: float, steps: int) -> Callable[[int], float]:
    """A schedule that goes linearly from ``start`` at step 0 to ``end`` at step ``steps``, and stays there.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    _check_at_least_one("steps", steps)

    def schedule(step: int) -> float:
        done = min(max(step / steps, 0.0), 1.0)
        return (1.0 - done) * start + done * end  # exact at both ends, so a probability stays in [0, 1]

    return schedule


class OnDevices:
    """A table that is copied once to each device on which tokens are looked up in it.

    So one strategy serves an engine on a GPU and a replay on the CPU.
    """

    def __init__(self, table: Tensor) -> None:
        self._copies = {table.device: table}

    @property
    def table(self) -> Tensor:
        return next(iter(self._copies.values()))

    def at(self, tokens: Int64[Tensor, " b"]) -> Tensor:
        if tokens.device not in self._copies:
            self._copies[tokens.device] = self.table.to(tokens.device)
        return self._copies[tokens.device].index_select(0, tokens)


def check_probability(prob_senior: float) -> None:
    if not 0.0 <= prob_senior <= 1.0:
        raise ValueError(f"prob_senior must be in [0, 1], got {prob_senior}")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def is_senior(name: str, who: str) -> bool:
    if who not in ("senior", "junior"):
        raise ValueError(f'{name} must be "senior" or "junior", got {who!r}')
    return who == "senior"
