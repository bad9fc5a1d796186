"""Generated small worlds of people, told in nine short documents each, and questions that need several of them.

A question names a person and two or three relations ("Who is Bado's friend's boss?"). Each hop is a fact in a document
of its own. The other documents are decoys: facts that lead on to the last relation of the question, either from a
person of the chain by a wrong relation or from a stranger by a right one. The right query still finds the right
document. Rows have the schema of MuSiQue (``extra_info``: docs, answers, n_hops). Questions of train and held-out
worlds are disjoint, since a hash of a question decides which split it belongs to.

In the jargon worlds every name and every relation has an alias. A search answers in the language of its query, and an
answer may be given in either language. Questions are in plain words.
"""

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandemrl.data.documents import Document, documents_of
from tandemrl.data.rows import DataError, Row
from tandemrl.tasks.generated.synthetic import Split, generated_row, split_by_hash

PAIRS = ("hops", "hops_jargon")
DEFAULT_COUNTS = {"train": 4096, "heldout": 1024}

DOCUMENTS = 9
THREE_HOPS = 0.3
"""The share of questions with three hops; the others have two."""
MAX_HOPS = 4
SYSTEM = "Search, then answer."
"""The system message, in place of the environment's long rules, which are of no use to a tiny model."""

NAMES = tuple(f"{c}{e}" for c in "BDFGHJKLMNPR" for e in ("ado", "ela", "ino", "oru", "una", "eb", "ok", "iv"))
RELATIONS = (
    *("boss", "friend", "tutor", "sister", "rival", "guard"),
    *("cook", "heir", "pilot", "tenant", "host", "agent"),
)
JARGON_NAMES = tuple(
    f"{c}{e}"
    for c in ("Z", "X", "Q", "V", "Zr", "Xr", "Qr", "Vr", "Zl", "Xl", "Ql", "Vl")
    for e in ("ogg", "yth", "umb", "arx", "eek", "orp", "isk", "unt")
)
JARGON_RELATIONS = (
    *("blorp", "quonk", "vreet", "snarg", "plimf", "drusk"),
    *("gleph", "thrum", "skwon", "fnord", "zwell", "krimp"),
)
ALIASES = dict(zip((*NAMES, *RELATIONS), (*JARGON_NAMES, *JARGON_RELATIONS), strict=True))
JARGON = frozenset(ALIASES.values())
_MEANINGS = {alias: word for word, alias in ALIASES.items()}
_FACT = re.compile(r"(\w+)'s (\w+) is (\w+)\.")
_WORD = re.compile(r"[A-Za-z]+")


class Fact(NamedTuple):
    """The fact that a document tells, in either language: ``subject``'s ``relation`` is ``object``."""

    subject: str
    relation: str
    object: str

    @property
    def text(self) -> str:
        return f"{self.subject}'s {self.relation} is {self.object}."

    @classmethod
    def of(cls, text: str) -> "Fact":
        """The fact that a document tells.

        Raises:
            DataError: the text is not a document of these worlds.
        """
        told = _FACT.fullmatch(text)
        if told is None or not ALIASES.keys() >= set(told.groups()):
            raise DataError(
                f"not a fact of a generated world: {text!r:.80}; the retriever hops works with synthetic:hops only"
            )
        return cls(*told.groups())

    @property
    def query(self) -> str:
        """The query that searches for this fact."""
        return f"{self.subject}'s {self.relation}"

    @property
    def alias(self) -> "Fact":
        """The same fact in jargon."""
        return Fact(*(ALIASES[word] for word in self))


class World(NamedTuple):
    """A question with its documents.

    ``chain`` holds the fact of each hop, in order; the answer is the object of the last one. ``facts`` are those of all
    documents, including the chain's; the id of a document is its index.
    """

    chain: tuple[Fact, ...]
    facts: tuple[Fact, ...]
    question: str


def split_of(subject: str, relations: Sequence[str]) -> Split:
    """The split that a question belongs to, by a hash of what it asks, whatever its wording."""
    return split_by_hash((subject, tuple(relations)))


def world(split: Split, rng: random.Random, *, hops: int | None = None) -> World:
    """Generate a world of a split.

    Args:
        hops: how many hops the question has, from 2 to ``MAX_HOPS``. None draws three with probability ``THREE_HOPS``,
            else two.
    """
    hops = hops or (3 if rng.random() < THREE_HOPS else 2)
    while True:
        relations = rng.sample(RELATIONS, hops)
        names = rng.sample(NAMES, hops + 1 + 2 * (DOCUMENTS - hops))
        if split_of(names[0], relations) == split:
            break
    people, strangers = names[: hops + 1], iter(names[hops + 1 :])
    chain = tuple(map(Fact, people, relations, people[1:]))
    told = {(fact.subject, fact.relation): fact for fact in chain}
    astray = True
    while len(told) < DOCUMENTS:
        # By turns somebody of the chain by another relation, and somebody else by a relation of the chain.
        asked = (
            (rng.choice(people[:-1]), rng.choice(RELATIONS))
            if astray
            else (next(strangers), rng.choice(relations[:-1]))
        )
        if asked in told:
            continue
        met = next(strangers)
        told[asked] = Fact(*asked, met)
        if len(told) < DOCUMENTS:
            told[met, relations[-1]] = Fact(met, relations[-1], next(strangers))
        astray = not astray
    facts = sorted(told.values())
    rng.shuffle(facts)
    return World(chain, tuple(facts), ask(people[0], relations, possessive=rng.random() < 0.5))


def ask(subject: str, relations: Sequence[str], *, possessive: bool) -> str:
    """The text of a question, in the possessive form or with "of".

    Examples:
        >>> ask("Bado", ("friend", "boss"), possessive=True)
        "Who is Bado's friend's boss?"
        >>> ask("Bado", ("friend", "boss"), possessive=False)
        'Who is the boss of the friend of Bado?'
    """
    if possessive:
        possessives = "'s ".join((subject, *relations))
        return f"Who is {possessives}?"
    return f"Who is the {' of the '.join(reversed(relations))} of {subject}?"


def uses_jargon(text: str) -> bool:
    """Whether any alias occurs in a text."""
    return not JARGON.isdisjoint(_WORD.findall(text))


def retriever() -> Callable[[Row, str, int], list[Document]]:
    """The retriever ``hops``: `search` in the documents of a row."""
    return lambda row, query, count: search(documents_of(row), query, count)


def search(documents: Sequence[Document], query: str, count: int) -> list[Document]:
    """The documents that share most with a query, best first, in the language of the words that they share.

    A shared word counts more the rarer it is among the documents, and half as much again if it is the subject of the
    document. Of equal documents the first one comes first. A document is found once. It is returned in jargon if it
    shares more with the query in jargon, or equally much and the query has no plain word of these worlds.

    Raises:
        DataError: a document is not of a generated world.
    """
    asked = set(_WORD.findall(query))
    facts = [Fact.of(document.text) for document in documents]
    words = {word for word in asked if word in ALIASES} | {_MEANINGS[word] for word in asked if word in JARGON}
    rarity = {word: math.log(1 + len(facts) / max(1, sum(word in fact for fact in facts))) for word in words}
    in_jargon = asked.isdisjoint(ALIASES) and not asked.isdisjoint(JARGON)
    found: list[tuple[float, int, Document]] = []
    for document, fact in zip(documents, facts, strict=True):

        def score(told: Fact, fact: Fact = fact) -> float:
            shared = sum(rarity[word] for word, said in zip(fact, told, strict=True) if said in asked)
            return shared + (rarity[fact.subject] / 2 if told.subject in asked else 0.0)

        told = max((fact.alias, fact) if in_jargon else (fact, fact.alias), key=score)
        found.append((-score(told), len(found), document._replace(title=told.subject, text=told.text)))
    return [document for _, _, document in sorted(found)[:count]]


def generate(pair: str, split: Split, count: int, seed: int) -> list[Row]:
    """``count`` rows of a split. Equal arguments give equal rows, and both pairs get the same worlds."""
    rng = random.Random(f"hops/{split}/{seed}")
    return [hops_row(pair, split, index, world(split, rng)) for index in range(count)]


def hops_row(pair: str, split: Split, index: int, world: World) -> Row:
    """A world as a row in the schema of MuSiQue. For the jargon pair, the answer is right under both of its names."""
    answer = world.chain[-1].object
    answers = [answer, ALIASES[answer]] if pair == "hops_jargon" else [answer]
    docs = [
        {"id": str(number), "title": fact.subject, "text": fact.text, "is_supporting": fact in world.chain}
        for number, fact in enumerate(world.facts)
    ]
    truth = answer if len(answers) == 1 else json.dumps(answers)
    system = ({"role": "system", "content": SYSTEM},)
    extra = {"n_hops": len(world.chain), "answers": answers, "docs": docs}
    return generated_row(pair, split, index, world.question, truth, system, **extra)
