"""The strategies by name, and what each says of itself before it is made. No torch.

A strategy is a function that returns a ``Strategy`` (the contract is in ``selection.strategies``). It gets what its
parameters name: the keys of ``selection.*`` (``who`` is ``selection.first``), the ``tokenizer``, the size of the
``vocabulary``, and the token tables of ``selection.boundaries``: ``boundary``, ``words``, ``steps``, ``starts``. To
add one, write the function and its row of the table here.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """What a strategy says of itself.

    path: the function that makes it, as ``module:name``. parameters: the keys of ``selection.*`` that it reads.
    by_turns: whether authors change between turns only. solo: whether one author writes everything. drops: whether what
    an author proposes may be dropped (``Strategy.starts``), which not every engine can do. by_text: the function that
    makes it for models of two vocabularies, from ``texts`` (``whole_words.TextTables``) and maybe the ``strategy`` for
    one; without it they are refused.
    """

    name: str
    path: str
    says: str
    parameters: tuple[str, ...] = ()
    by_turns: bool = False
    solo: bool = False
    drops: bool = False
    by_text: str | None = None

    @property
    def draws(self) -> bool:
        """Whether it draws authors with the probability ``prob_senior``."""
        return "prob_senior" in self.parameters


_STRATEGIES, _WHOLE_WORDS = "tandemrl.selection.strategies", "tandemrl.selection.whole_words"
_AS_FOR_ONE = f"{_WHOLE_WORDS}:in_two_vocabularies"
_BEFORE = "one draw for each whole word; the first token of another author replaces what the one before proposes"


def _here(name: str, says: str, *parameters: str) -> Kind:
    return Kind(name, f"{_STRATEGIES}:{name}", says, parameters)


def _of_turns(name: str, says: str, *parameters: str) -> Kind:
    return _here(name, says, *parameters)._replace(by_turns=True, by_text=_AS_FOR_ONE)


_TABLE = (
    _here("word", "redraw the author after each word boundary (the paper's strategy)", "prob_senior", "max_gap_tokens"),
    _here("word_aligned", "as word, but never inside a word", "prob_senior", "max_gap_tokens"),
    _here("before_word", _BEFORE, "prob_senior")._replace(
        path=f"{_WHOLE_WORDS}:before_word", drops=True, by_text=f"{_WHOLE_WORDS}:before_text_word"
    ),
    _here("bernoulli", "redraw after each token", "prob_senior"),
    _here("sentence", "hand over after each step", "first"),
    _here("chunk", "hand over after chunk_size tokens", "chunk_size", "first"),
    _here("alternating", "hand over after each token", "first"),
    _of_turns("turn", "draw the author of each turn", "prob_senior"),
    _of_turns("alternating_turns", "hand over after each turn", "first"),
    _here("solo", "one author generates everything", "first")._replace(solo=True, by_text=_AS_FOR_ONE),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}
