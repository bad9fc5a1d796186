"""Scores one response in this process, without a time limit."""

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Response
from tandemrl.data.rows import Row
from tandemrl.rewards.functions import call, weighted
from tandemrl.rewards.protocol import Deferred, GraderError, GroupScores, Item, Score
from tandemrl.rewards.routing import terms_of


def score_text(row: Row, text: str | Response, options: RewardConfig | None = None) -> Score:
    options = options or RewardConfig()
    terms, item = terms_of(row, options), Item(row, Response.of(text))
    return weighted(terms, [_settled(term.begin([item], options, None)) for term in terms])


def _settled(result: Score | Deferred | GroupScores) -> Score:
    while isinstance(result, Deferred):
        if result.kind != "symbolic":
            raise GraderError("is scored by a Scorer only")
        result = result.then(call(*result.payload))
    return result.scores[0] if isinstance(result, GroupScores) else result
