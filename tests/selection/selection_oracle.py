"""One completion at a time, in plain Python integers and lists: what the vectorised strategies must agree with."""

from collections.abc import Sequence
from typing import NamedTuple

from helpers import splitmix


def uniform(key: int, index: int) -> float:
    """Uniform number ``index`` of the author draws of a request."""
    stream = splitmix(splitmix(key, 0) + 1, 0)
    return (splitmix(stream, index) >> 11) / 2**53


class Told(NamedTuple):
    authors: list[int]
    draws: int
    senior_draws: int


def _drawn(key: int, p: float, redrawn: Sequence[bool]) -> Told:
    """``redrawn[i]``: the author of token i is drawn, not kept."""
    authors: list[int] = []
    results: list[int] = []
    for redraw in redrawn:
        if redraw:
            results.append(1 if uniform(key, len(results)) < p else 0)
        authors.append(results[-1])
    return Told(authors, len(results), sum(results))


def word(key: int, tokens: Sequence[int], p: float, gap: int, boundary: Sequence[bool]) -> Told:
    redrawn, count = [], 0
    for i in range(len(tokens)):
        if i > 0:
            count += 1
        redraw = i == 0 or boundary[tokens[i - 1]] or count == gap
        redrawn.append(redraw)
        count = 0 if redraw else count
    return _drawn(key, p, redrawn)


def word_aligned(
    key: int, tokens: Sequence[int], p: float, gap: int, space: Sequence[bool], outside: Sequence[bool]
) -> Told:
    redrawn, last_draw = [], 0
    for i in range(len(tokens)):
        redraw = i == 0 or space[tokens[i - 1]] or (i - last_draw >= gap and outside[tokens[i - 1]])
        last_draw = i if redraw else last_draw
        redrawn.append(redraw)
    return _drawn(key, p, redrawn)


def before_word(key: int, turns: Sequence[Sequence[int]], p: float, starts: Sequence[bool]) -> Told:
    return _drawn(key, p, [i == 0 or starts[token] for tokens in turns for i, token in enumerate(tokens)])


def bernoulli(key: int, tokens: Sequence[int], p: float) -> Told:
    return _drawn(key, p, [True] * len(tokens))


def sentence(tokens: Sequence[int], first: str, texts: Sequence[str]) -> Told:
    author = int(first == "senior")
    authors = []
    for i in range(len(tokens)):
        if i > 0:
            last, before = texts[tokens[i - 1]], texts[tokens[i - 2]] if i > 1 else ""
            if "\n\n" in last or (before.endswith("\n") and last.startswith("\n")):
                author = 1 - author
        authors.append(author)
    return Told(authors, 0, 0)


def first_step(tokens: Sequence[int], who: str, texts: Sequence[str]) -> Told:
    first, *_ = authors = sentence(tokens, who, texts).authors or [0]
    changed = authors.index(1 - first) if 1 - first in authors else len(tokens)
    return Told([first if i < changed else 1 - first for i in range(len(tokens))], 0, 0)


def chunk(tokens: Sequence[int], size: int, first: str) -> Told:
    authors: list[int] = []
    author = int(first == "senior")
    while len(authors) < len(tokens):
        authors += [author] * size
        author = 1 - author
    return Told(authors[: len(tokens)], 0, 0)


def turn(key: int, turns: Sequence[Sequence[int]], p: float) -> Told:
    drawn = [int(uniform(key, number) < p) for number in range(len(turns))]
    authors = [who for who, tokens in zip(drawn, turns, strict=True) for _ in tokens]
    return Told(authors, len(drawn), sum(drawn))


def alternating_turns(turns: Sequence[Sequence[int]], first: str) -> Told:
    authors = [(number + (first == "senior")) % 2 for number, tokens in enumerate(turns) for _ in tokens]
    return Told(authors, 0, 0)
