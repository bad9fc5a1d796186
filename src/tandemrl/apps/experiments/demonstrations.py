"""Scripted episodes, imperfect on purpose, from which the tiny agents learn to use their tools.

In the multi-hop worlds an author notes what it has found, with the id of the document, and asks for the next hop; at
last it completes with the ids of its notes. What goes wrong is what reinforcement learning can remove: queries for a
wrong relation, stopping early, citations that are left out or swapped. With a calculator an author asks for a sum and
boxes what it is told; what goes wrong: it guesses, or adds where it should take away.
"""

import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from tandemrl.apps.experiments.hops_tokenizer import (
    BOX,
    BOXED,
    CALCULATE,
    CALL,
    CITED,
    COMPLETE,
    COMPLETED,
    NEXT,
    SEARCH,
    SEARCHED,
)
from tandemrl.apps.experiments.warm_start import Lesson
from tandemrl.config import load
from tandemrl.data.documents import HEADER
from tandemrl.data.rows import Row, encode_prompts
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.factory import make_environment
from tandemrl.rollout.envs.multihop import MultihopEnvironment
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.tasks.generated.calculator import PAIRS as CALCULATOR_PAIRS
from tandemrl.tasks.generated.calculator import calculator, expression_of, problems
from tandemrl.tasks.generated.hops import ALIASES, DOCUMENTS, RELATIONS, World, hops_row, world
from tandemrl.tasks.generated.rows import AGENTS
from tandemrl.tasks.generated.synthetic import Numbers, Problem, Stage, row_of

WORLD_WEIGHT = 0.1
"""The loss weight of a token that the environment said. A model that can guess such tokens learns faster to read on."""
JARGON_RATE = 0.6
"""The share of jargon among the episodes that the jargon senior is trained further on; the others are plain."""

GUESS_RATE, SIGN_SLIPS = 0.3, 0.15
"""How often an author with a calculator guesses instead of calling it, and takes away what should be added, or adds."""


class Slips(NamedTuple):
    """The probabilities of mistakes.

    wrong_query: a query asks for a random relation. asked_again: such a query is corrected if it found something else.
    early_stop: the author stops, at each further hop. citation: a citation is left out or swapped.
    """

    wrong_query: float = 0.35
    asked_again: float = 0.4
    early_stop: float = 0.2
    citation: float = 0.15


PLAIN_SLIPS = Slips()
JARGON_SLIPS = Slips(wrong_query=0.07, early_stop=0.04, citation=0.03)
"""A senior makes fewer mistakes in jargon: that is why training alone drives it there."""


class Step(NamedTuple):
    """A turn, and the result of its tool, which is None after the last turn."""

    turn: str
    result: str | None


def demonstrate(
    world: World, search: Callable[[str], str], rng: random.Random, slips: Slips = PLAIN_SLIPS, *, jargon: bool = False
) -> list[Step]:
    """Write a scripted episode. An author that asked for the wrong thing believes the first document that it gets.

    Args:
        search: the tool, which returns the documents of a query as text.
        jargon: whether queries, notes and the answer are in jargon.
    """

    def said(word: str) -> str:
        return ALIASES[word] if jargon else word

    person, steps, note, cited = said(world.chain[0].subject), list[Step](), "", list[str]()
    for hop, fact in enumerate(world.chain):
        if hop and rng.random() < slips.early_stop:
            break
        right = said(fact.relation)
        relation = said(rng.choice(RELATIONS)) if rng.random() < slips.wrong_query else right
        again = relation != right and rng.random() < slips.asked_again
        for asked in (relation, right) if again else (relation,):
            query = f"{person}'s {asked}"
            steps.append(Step(f"{note}{CALL}{SEARCH}{query}{SEARCHED}", search(query)))
            note = ""
        number, text = _first_document(steps[-1])
        note = f"[{number}] {text}\n\n"
        cited.append(number)
        person = text.rpartition(" is ")[2].removesuffix(".")
    kept = [*dict.fromkeys(_sloppily(cited, rng, slips.citation))] or cited[-1:]
    return [*steps, Step(f"{note}{CALL}{COMPLETE}{person}{CITED}{NEXT.join(kept)}{COMPLETED}", None)]


def demonstrate_calculator(problem: Problem, rng: random.Random) -> list[Step]:
    """Write a scripted episode of a sum."""
    numbers = problem.numbers
    if rng.random() < GUESS_RATE:
        return [Step(f"{BOX}{max(0, numbers.answer + rng.randint(-20, 20))}{BOXED}", None)]
    signs = [-1 if rng.random() < SIGN_SLIPS else 1 for _ in numbers.deltas]
    asked = expression_of(Numbers(numbers.start, tuple(map(operator.mul, signs, numbers.deltas))))
    result = calculator(asked)
    return [Step(f"{CALL}{CALCULATE}{asked}{SEARCHED}", result), Step(f"{BOX}{result}{BOXED}", None)]


def lessons(tokenizer: PreTrainedTokenizerFast, pair: str, seed: int, *, stage: Stage = "base") -> Iterator[Lesson]:
    """Yield episodes of the train split without end, as the token ids that reinforcement learning uses."""
    environment = make_environment(load(AGENTS[pair]))
    assert environment is not None
    schemas, eos = environment.tool_schemas(), int(tokenizer.eos_token_id)
    rendering = Rendering(tokenizer, schemas, eos_token_ids=[eos], result_tokens=512)
    rng = random.Random(f"demonstrations/{pair}/{stage}/{seed}")
    shown = _calculations(rng) if pair in CALCULATOR_PAIRS else _searches(environment, pair, rng, stage)
    for row, steps in shown:
        prompts, _ = encode_prompts(
            [row],
            tokenizer,
            max_prompt_tokens=512,
            opening=lambda each: environment.start(each).messages,
            tools=schemas,
        )
        tokens = list(prompts[0].tokens)
        weights = [0.0] * len(tokens)
        for turn, result in steps:
            written = [*tokenizer(turn)["input_ids"], eos]
            message = {"role": "tool", "name": environment.tools[0].__name__, "content": result}
            answer = () if result is None else rendering.context([message], ended=True).tokens
            tokens += [*written, *answer]
            weights += [1.0] * len(written) + [WORLD_WEIGHT] * len(answer)
        yield Lesson(row, tokens, weights)


# --------------------------------------------------------------------------------------------------------------------


def _calculations(rng: random.Random) -> Iterator[tuple[Row, list[Step]]]:
    for problem in problems("train", rng):
        yield row_of(CALCULATOR_PAIRS[0], "train", 0, 0, problem), demonstrate_calculator(problem, rng)


def _searches(
    environment: Environment, pair: str, rng: random.Random, stage: Stage
) -> Iterator[tuple[Row, list[Step]]]:
    assert isinstance(environment, MultihopEnvironment)
    while True:
        told = world("train", rng)
        row = hops_row(pair, "train", 0, told)
        jargon = stage == "senior" and rng.random() < JARGON_RATE
        search = partial(environment.retrieve_documents, row=row)
        yield row, demonstrate(told, search, rng, JARGON_SLIPS if jargon else PLAIN_SLIPS, jargon=jargon)


_FIRST = re.compile(rf"{HEADER}(\S+)\n(.+)")


def _first_document(step: Step) -> tuple[str, str]:
    """The id and the text of the document that the author reads first."""
    found = _FIRST.match(step.result or "")
    assert found is not None, step
    return found[1], found[2]


def _sloppily(cited: Sequence[str], rng: random.Random, rate: float) -> Iterator[str]:
    """Yield the citations, each left out or swapped with probability ``rate``."""
    for number in cited:
        if rng.random() >= rate:
            yield number
        elif rng.random() < 0.5:
            yield str(rng.randrange(DOCUMENTS))
