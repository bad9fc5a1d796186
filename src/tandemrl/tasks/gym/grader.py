"""The grader of reasoning-gym: ``score_answer`` of the generator that made the problem."""

import pickle
from functools import lru_cache
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, Lost, Score


def gym(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """What reasoning-gym gives for the text between the last ``<answer>`` and ``</answer>``: from 0 to 1, and 0 without
    one. ``acc`` is 1 if it is 1."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text)
    if answer is None:
        return Score(0.0, {"acc": 0.0, "answer_present": 0.0}, None)
    entry = {name: row.extra_info[name] for name in ("question", "metadata")} | {"answer": row.raw_ground_truth}
    name = row.data_source.removeprefix("gym/")

    def scored(value: float | Lost) -> Score:
        if isinstance(value, Lost):
            return value.score(answer)
        return Score(value, {"acc": float(value >= 1), "answer_present": 1.0}, answer)

    return Deferred("symbolic", ("tandemrl.tasks.gym.grader:score", name, pickle.dumps(entry), answer), scored)


def score(name: str, entry: bytes, answer: str) -> float:
    """``score_answer``, in a process that may be killed: answers are parsed, some are even run."""
    return float(_generator(name).score_answer(answer=answer, entry=pickle.loads(entry)))


@lru_cache
def _generator(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, size=1, seed=0)
