"""Who writes the next token. A strategy is a pair of pure functions, vectorised over the rows of a decoding batch.

``init(request_keys)`` names the author of the first token, ``step(state, last_token)`` that of the next one. The state
is a NamedTuple of tensors whose first dimension is the row, so an engine may drop, reorder or merge rows by indexing
every field. Nothing else is remembered: authorship is a function of (request key, tokens) alone, and ``replay``
recomputes it. Draw number i of a completion is uniform number i of its key's SELECTION stream, whatever
``prob_senior`` is.

``word``, ``bernoulli``, ``sentence``, ``chunk`` and ``alternating`` are those of "Tandem Reinforcement Learning with
Verifiable Rewards" (arXiv:2606.28166).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int8, Int64
from torch import Tensor

from tandemrl.selection.boundaries import StepTables, WordTables
from tandemrl.selection.draws import SELECTION, stream, uniforms

Who = Literal["senior", "junior"]


class Strategy(NamedTuple):
    """``init(request_keys: Int64[b]) -> (senior_first: Bool[b], state)`` and
    ``step(state, last_token: Int64[b]) -> (senior_next: Bool[b], state)``.

    ``state`` is a NamedTuple of tensors with leading dimension b. Neither function changes its inputs. ``writers`` is a
    promise: an engine does not run a model that will never write, and fails if the promise is broken. An engine in
    another process gets its strategy pickled; the library's can be (they are module functions with bound values).

    A rollout of several turns is one sequence of own tokens: state and author carry on over what the world says in
    between, which no strategy sees. ``turn(state) -> (senior_next: Bool[b], state)``, where there is one, is called
    where a further turn begins, after the step of the last token before it.
    """

    init: Callable[[Tensor], tuple[Tensor, Any]]
    step: Callable[[Any, Tensor], tuple[Tensor, Any]]
    writers: Literal["both", "senior", "junior"] = "both"
    turn: Callable[[Any], tuple[Tensor, Any]] | None = None


class WordState(NamedTuple):
    """Author of the current word, tokens since the last draw, and the draws so far."""

    key: Int64[Tensor, " b"]
    senior: Bool[Tensor, " b"]
    since_draw: Int64[Tensor, " b"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]


class BernoulliState(NamedTuple):
    """The draws so far."""

    key: Int64[Tensor, " b"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]


class SentenceState(NamedTuple):
    """Author of the current step, and whether the last token ended in a newline."""

    senior: Bool[Tensor, " b"]
    after_newline: Bool[Tensor, " b"]


class ChunkState(NamedTuple):
    """Tokens written so far."""

    position: Int64[Tensor, " b"]


class SoloState(NamedTuple):
    """The one author."""

    senior: Bool[Tensor, " b"]


class TurnState(NamedTuple):
    """Author of the current turn, and the draws so far."""

    key: Int64[Tensor, " b"]
    senior: Bool[Tensor, " b"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]


def word(prob_senior: float, max_gap_tokens: int, boundary: Bool[Tensor, " v"]) -> Strategy:
    """Redraw the author after every boundary token, and at the latest after ``max_gap_tokens`` tokens.

    The author is drawn Bernoulli(``prob_senior``) at the start. After a boundary token, or once ``max_gap_tokens``
    tokens were written since the last draw, it is redrawn and the count starts again. The boundary token is the first
    piece of a word and the redraw comes after it, so a handoff can land inside a word of several pieces
    (``word_aligned`` avoids that). The paper trains with prob_senior 0.5 and max_gap_tokens 32.

    Args:
        boundary: ids that begin a word, see ``boundaries.word_boundary_table``; covers every id the models can emit.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1] or ``max_gap_tokens`` is below 1.
    """
    _check_at_least_one("max_gap_tokens", max_gap_tokens)
    return _redrawing(prob_senior, partial(_word_ends, max_gap_tokens, _OnDevices(boundary)))


def _word_ends(
    max_gap_tokens: int, boundary: "_OnDevices", last_token: Int64[Tensor, " b"], since_draw: Int64[Tensor, " b"]
) -> Bool[Tensor, " b"]:
    return (since_draw >= max_gap_tokens).logical_or_(boundary.at(last_token))


def word_aligned(prob_senior: float, max_gap_tokens: int, tables: WordTables) -> Strategy:
    """Like ``word``, but a handoff never lands inside a word. Not in the paper.

    An author is chosen before its token is known, so a leading space of the next token cannot be relied upon: a place
    is sure only if the text so far rules out that any next token continues a word. The author is redrawn

    - after a token that ends in whitespace (whatever follows starts a word, or is more whitespace), and
    - once ``max_gap_tokens`` tokens were written since the last draw, after the first token that ends outside a word:
      in whitespace or in punctuation that no word contains. ``boundaries.WordTables`` says what a word is.

    So ``max_gap_tokens`` is soft: past it the author goes on to the next sure place, however far that is. Authors
    change less often than with ``word``, since most tokenizers put the space in front of a word, not after it.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1] or ``max_gap_tokens`` is below 1.
    """
    _check_at_least_one("max_gap_tokens", max_gap_tokens)
    after_space, outside_word = _OnDevices(tables.ends_in_space), _OnDevices(tables.ends_outside_word)
    return _redrawing(prob_senior, partial(_aligned_word_ends, max_gap_tokens, after_space, outside_word))


def _aligned_word_ends(
    max_gap_tokens: int,
    after_space: "_OnDevices",
    outside_word: "_OnDevices",
    last_token: Int64[Tensor, " b"],
    since_draw: Int64[Tensor, " b"],
) -> Bool[Tensor, " b"]:
    overdue = (since_draw >= max_gap_tokens).logical_and_(outside_word.at(last_token))
    return overdue.logical_or_(after_space.at(last_token))


def _redrawing(prob_senior: float, redraw_after: Callable[[Tensor, Tensor], Tensor]) -> Strategy:
    """Bernoulli authors, redrawn where ``redraw_after(last_token, tokens since the draw)`` is true."""
    _check_probability(prob_senior)
    return Strategy(partial(_redrawing_init, prob_senior), partial(_redrawing_step, prob_senior, redraw_after))


def _redrawing_init(prob_senior: float, request_keys: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], WordState]:
    key = stream(request_keys, SELECTION)
    none = torch.zeros_like(key)
    senior = uniforms(key, none) < prob_senior
    return senior, WordState(key, senior, since_draw=none, draws=none + 1, senior_draws=senior.to(torch.int64))


def _redrawing_step(
    prob_senior: float,
    redraw_after: Callable[[Tensor, Tensor], Tensor],
    state: WordState,
    last_token: Int64[Tensor, " b"],
) -> tuple[Bool[Tensor, " b"], WordState]:
    since_draw = state.since_draw + 1
    redraw = redraw_after(last_token, since_draw)
    drawn = uniforms(state.key, state.draws) < prob_senior
    senior = torch.where(redraw, drawn, state.senior)
    return senior, WordState(
        state.key,
        senior,
        since_draw.masked_fill_(redraw, 0),
        state.draws + redraw,
        state.senior_draws + drawn.logical_and_(redraw),
    )


def bernoulli(prob_senior: float) -> Strategy:
    """Draw the author of every token, Bernoulli(``prob_senior``).

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    _check_probability(prob_senior)

    return Strategy(partial(_bernoulli_init, prob_senior), partial(_bernoulli_step, prob_senior))


def _bernoulli_init(prob_senior: float, request_keys: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], BernoulliState]:
    none = torch.zeros_like(request_keys)
    return _bernoulli_draw(prob_senior, BernoulliState(stream(request_keys, SELECTION), none, none))


def _bernoulli_step(
    prob_senior: float, state: BernoulliState, last_token: Int64[Tensor, " b"]
) -> tuple[Bool[Tensor, " b"], BernoulliState]:
    return _bernoulli_draw(prob_senior, state)


def _bernoulli_draw(prob_senior: float, state: BernoulliState) -> tuple[Bool[Tensor, " b"], BernoulliState]:
    senior = uniforms(state.key, state.draws) < prob_senior
    return senior, BernoulliState(state.key, state.draws + 1, state.senior_draws + senior)


def sentence(first: Who, tables: StepTables) -> Strategy:
    r"""Hand over after every step: after a "\n\n" inside one token, or made by a "…\n" token and a "\n…" token.

    The prompt does not count: a leading "\n" completes nothing. Three newlines in tokens of their own are two pairs, so
    two handoffs. arXiv:2606.28166 evaluates handoffs with ``first="senior"``.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    step = partial(
        _sentence_step,
        _OnDevices(tables.contains),
        _OnDevices(tables.starts_newline),
        _OnDevices(tables.ends_newline),
    )
    return Strategy(partial(_sentence_init, _is_senior("first", first)), step)


def _sentence_init(senior_starts: bool, request_keys: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], SentenceState]:
    senior = torch.full_like(request_keys, senior_starts, dtype=torch.bool)
    return senior, SentenceState(senior, after_newline=torch.zeros_like(senior))


def _sentence_step(
    contains: "_OnDevices",
    starts_newline: "_OnDevices",
    ends_newline: "_OnDevices",
    state: SentenceState,
    last_token: Int64[Tensor, " b"],
) -> tuple[Bool[Tensor, " b"], SentenceState]:
    completes = starts_newline.at(last_token) & state.after_newline
    senior = state.senior ^ (contains.at(last_token) | completes)
    return senior, SentenceState(senior, ends_newline.at(last_token))


def chunk(chunk_size: int, first: Who = "senior") -> Strategy:
    """``chunk_size`` tokens each, in turn.

    Raises:
        ValueError: ``chunk_size`` is below 1, or ``first`` is neither "senior" nor "junior".
    """
    _check_at_least_one("chunk_size", chunk_size)
    senior_parity = 0 if _is_senior("first", first) else 1
    return Strategy(partial(_chunk_init, chunk_size, senior_parity), partial(_chunk_step, chunk_size, senior_parity))


def _chunk_init(
    chunk_size: int, senior_parity: int, request_keys: Int64[Tensor, " b"]
) -> tuple[Bool[Tensor, " b"], ChunkState]:
    position = torch.zeros_like(request_keys)
    return (position // chunk_size) % 2 == senior_parity, ChunkState(position)


def _chunk_step(
    chunk_size: int, senior_parity: int, state: ChunkState, last_token: Int64[Tensor, " b"]
) -> tuple[Bool[Tensor, " b"], ChunkState]:
    position = state.position + 1
    return (position // chunk_size) % 2 == senior_parity, ChunkState(position)


def alternating(first: Who = "senior") -> Strategy:
    """Hand over after every token.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return chunk(1, first)


def solo(who: Who = "senior") -> Strategy:
    """One author writes everything.

    Raises:
        ValueError: ``who`` is neither "senior" nor "junior".
    """
    return Strategy(partial(_solo_init, _is_senior("who", who)), _solo_step, writers=who)


def _solo_init(senior_writes: bool, request_keys: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], SoloState]:
    senior = torch.full_like(request_keys, senior_writes, dtype=torch.bool)
    return senior, SoloState(senior)


def _solo_step(state: SoloState, last_token: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], SoloState]:
    return state.senior, state


def turn(prob_senior: float) -> Strategy:
    """One author per turn, drawn Bernoulli(``prob_senior``) where a turn begins: a tandem of agents. Not in the paper.

    Raises:
        ValueError: ``prob_senior`` is outside [0, 1].
    """
    _check_probability(prob_senior)
    return Strategy(partial(_turn_init, prob_senior), _turn_step, turn=partial(_turn_drawn, prob_senior))


def _turn_init(prob_senior: float, request_keys: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], TurnState]:
    none = torch.zeros_like(request_keys)
    started = TurnState(stream(request_keys, SELECTION), torch.zeros_like(none, dtype=torch.bool), none, none)
    return _turn_drawn(prob_senior, started)


def _turn_step(state: TurnState, last_token: Int64[Tensor, " b"]) -> tuple[Bool[Tensor, " b"], TurnState]:
    return state.senior, state


def _turn_drawn(prob_senior: float, state: TurnState) -> tuple[Bool[Tensor, " b"], TurnState]:
    senior = uniforms(state.key, state.draws) < prob_senior
    return senior, TurnState(state.key, senior, state.draws + 1, state.senior_draws + senior)


def alternating_turns(first: Who = "senior") -> Strategy:
    """One author per turn, in turn.

    Raises:
        ValueError: ``first`` is neither "senior" nor "junior".
    """
    return Strategy(partial(_solo_init, _is_senior("first", first)), _solo_step, turn=_other_turn)


def _other_turn(state: SoloState) -> tuple[Bool[Tensor, " b"], SoloState]:
    return ~state.senior, SoloState(~state.senior)


def first_turn(who: Who = "senior") -> Strategy:
    """One author writes the first turn, the other one all that follow: an agent takes over another's work.

    Raises:
        ValueError: ``who`` is neither "senior" nor "junior".
    """
    senior_starts = _is_senior("who", who)
    return Strategy(partial(_solo_init, senior_starts), _solo_step, turn=partial(_turn_of, not senior_starts))


def _turn_of(senior_writes: bool, state: SoloState) -> tuple[Bool[Tensor, " b"], SoloState]:
    senior = torch.full_like(state.senior, senior_writes)
    return senior, SoloState(senior)


def annealed(make: Callable[[float], Strategy], schedule: Callable[[int], float]) -> Callable[[int], Strategy]:
    """A strategy per training step: ``make(schedule(step))``.

    Examples:
        >>> strategy_at = annealed(bernoulli, linear(1.0, 0.5, steps=100))
        >>> strategy = strategy_at(20)  # prob_senior 0.9
    """
    return lambda step: make(schedule(step))


def linear(start: float, end: float, steps: int) -> Callable[[int], float]:
    """From ``start`` at step 0 in equal steps to ``end`` at step ``steps``, and ``end`` from there on.

    Raises:
        ValueError: ``steps`` is below 1.
    """
    _check_at_least_one("steps", steps)

    def schedule(step: int) -> float:
        done = min(max(step / steps, 0.0), 1.0)
        return (1.0 - done) * start + done * end  # exact at both ends, so a probability stays in [0, 1]

    return schedule


def draw_counts(state: Any) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
    """Author draws so far and how many of them fell to the senior, per row; zeros where the state does not count."""
    if hasattr(state, "draws"):
        return state.draws, state.senior_draws
    none = torch.zeros_like(state[0], dtype=torch.int64)
    return none, none


class Replay(NamedTuple):
    """The authors of a batch of completions, ``l`` the longest. author: 1 senior, 0 junior, -1 beyond the length.

    draws, senior_draws: as they stood when the author of the last token had been chosen. What the last token itself
    would have caused is not counted; 0 for an empty row.
    """

    author: Int8[Tensor, "b l"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]


def replay(
    strategy: Strategy,
    keys: Int64[Tensor, " b"],
    tokens: Int64[Tensor, "b l"],
    lengths: Int64[Tensor, " b"],
    turn_starts: Bool[Tensor, "b l"] | None = None,
) -> Replay:
    """Recompute who wrote what from tokens and request keys alone; equal to what a live engine recorded.

    ``tokens`` are the own tokens of all turns, right-padded with anything; row i has ``lengths[i]`` of them.
    ``turn_starts`` is true where a token begins a further turn (never the first); None: one turn each.
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    written = tokens.masked_fill(~real, 0).T.contiguous()  # by position: a step reads one row
    senior, state = strategy.init(keys)
    draws = senior_draws = torch.zeros_like(keys)
    authors = []
    for i in range(tokens.shape[1]):
        if i > 0:
            senior, state = strategy.step(state, written[i - 1])
        if turn_starts is not None and strategy.turn is not None and bool(turn_starts[:, i].any()):
            senior, state = _where(turn_starts[:, i], strategy.turn(state), (senior, state))
        drawn, senior_drawn = draw_counts(state)
        draws = torch.where(real[:, i], drawn, draws)
        senior_draws = torch.where(real[:, i], senior_drawn, senior_draws)
        authors.append(senior)
    if not authors:
        return Replay(torch.empty_like(tokens, dtype=torch.int8), draws, senior_draws)
    author = torch.stack(authors, dim=1).to(torch.int8).masked_fill_(~real, -1)
    return Replay(author, draws, senior_draws)


def resumed(
    strategy: Strategy, keys: Int64[Tensor, " b"], histories: Sequence[Sequence[Sequence[int]]]
) -> tuple[Bool[Tensor, " b"], Any]:
    """Author and state where the next turn begins: ``init`` for a row without history, and else what the strategy has
    come to over the own tokens of its earlier turns.

    Args:
        histories: per row the own tokens of each turn that is over.
    """
    senior, state = strategy.init(keys)
    longest = max((sum(map(len, history)) for history in histories), default=0)
    tokens = torch.zeros(longest, len(keys), dtype=torch.int64, device=keys.device)
    ends = torch.zeros(longest, len(keys), dtype=torch.bool, device=keys.device)
    real = torch.zeros_like(ends)
    for row, history in enumerate(histories):
        own = [token for earlier in history for token in earlier]
        tokens[: len(own), row] = torch.tensor(own, dtype=torch.int64, device=keys.device)
        real[: len(own), row] = True
        for end in accumulate(map(len, history)):
            ends[end - 1, row] = True
    for i in range(longest):
        after = strategy.step(state, tokens[i])
        if strategy.turn is not None and bool(ends[i].any()):
            after = _where(ends[i], strategy.turn(after[1]), after)
        senior, state = _where(real[i], after, (senior, state))
    return senior, state


def _where(rows: Bool[Tensor, " b"], chosen: Any, other: Any) -> Any:
    """Of two (nested) NamedTuples of tensors, the rows of one or of the other."""
    if isinstance(chosen, Tensor):
        return torch.where(rows.view(-1, *[1] * (chosen.dim() - 1)), chosen, other)
    parts = [_where(rows, a, b) for a, b in zip(chosen, other, strict=True)]
    return type(chosen)(*parts) if hasattr(chosen, "_fields") else tuple(parts)


class _OnDevices:
    """A table on the device of the tokens, copied there once: one strategy serves the engine and a CPU replay."""

    def __init__(self, table: Tensor) -> None:
        self._copies = {table.device: table}

    def at(self, tokens: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
        if tokens.device not in self._copies:
            self._copies[tokens.device] = next(iter(self._copies.values())).to(tokens.device)
        return self._copies[tokens.device].index_select(0, tokens)


def _check_probability(prob_senior: float) -> None:
    if not 0.0 <= prob_senior <= 1.0:
        raise ValueError(f"prob_senior must be in [0, 1], got {prob_senior}")


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _is_senior(name: str, who: str) -> bool:
    if who not in ("senior", "junior"):
        raise ValueError(f'{name} must be "senior" or "junior", got {who!r}')
    return who == "senior"
