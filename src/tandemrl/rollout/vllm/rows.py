"""The authors of completions that vLLM has written. This module does not import vllm."""

from collections.abc import Sequence

import numpy as np

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import replay_turns


def name_authors(rows: Sequence[Row]) -> None:
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
