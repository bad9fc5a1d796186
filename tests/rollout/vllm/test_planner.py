"""The planner against a scheduler, a block pool and two models that are simulated down to single KV entries."""

import numpy as np
import pytest
import torch

from helpers import VOCABULARY, strategies
from tandemrl.rollout.drafting import VLLM_CPU, DraftLength, Size
from tandemrl.rollout.engine import EngineError, Passes, replay_turns
from tandemrl.rollout.vllm.drafting import Round
from tandemrl.rollout.vllm.planner import JUNIOR, SENIOR, Admission, Planner
from tandemrl.selection import Strategy, alternating, alternating_turns, bernoulli, chunk, solo, turn
from tandemrl.selection.draws import SAMPLING, fold_in, mix64, stream

BLOCK = 4
DRAFTS = DraftLength(None, Size(12, 57_000_000, 15_000), Size(4, 5_000_000, 2_000), VLLM_CPU, lazy=True)


class Runner:
    """One model's KV memory. An entry remembers which text it was computed for, so that stale ones are found."""

    def __init__(self, num_blocks: int) -> None:
        self.kv: list[list[tuple[int, ...] | None]] = [[None] * BLOCK for _ in range(num_blocks)]
        self.blocks: dict[str, list[int]] = {}

    def run(self, work, texts: dict[str, list[int]]) -> None:
        for i, id in enumerate(work.ids):
            given = work.blocks[i]
            if i in work.new:
                assert id not in self.blocks
                self.blocks[id] = list(given)
            elif id in work.replaced:
                self.blocks[id] = list(given)
            elif given is not None:
                self.blocks[id] += given
            text, blocks = texts[id], self.blocks[id]
            for position in range(work.start[i]):
                found = self.kv[blocks[position // BLOCK]][position % BLOCK]
                assert found == tuple(text[: position + 1]), f"{id}: position {position} was never computed"
            for position in range(work.start[i], work.start[i] + work.count[i]):
                self.kv[blocks[position // BLOCK]][position % BLOCK] = tuple(text[: position + 1])


class Simulation:
    """A scheduler with chunked prefill, a prefix cache, preemption and aborts, all at random."""

    def __init__(self, seed: int, planner: Planner, num_blocks: int, *, caching: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.planner, self.caching = planner, caching
        self.runners = {who: Runner(num_blocks) for who in (JUNIOR, SENIOR)}
        self.free = list(range(num_blocks))
        self.cache: dict[tuple[int, ...], int] = {}
        self.used: dict[int, int] = {}
        self.texts: dict[str, list[int]] = {}
        self.prompt: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[int]] = {}
        self.authors: dict[int, list[int]] = {}  # by key
        self.request: dict[str, tuple[int, Strategy]] = {}
        self.preempted: list[str] = []
        self.ahead: dict[str, int] = {}
        self.done: set[str] = set()
        self.histories: dict[int, list[list[int]]] = {}  # by key: own tokens of turns that are over

    def allocate(self, id: str, upto: int) -> list[int] | None:
        needed = -(-upto // BLOCK) - len(self.blocks[id])
        if needed > len(self.free):
            return None
        new = []
        for _ in range(max(0, needed)):
            block = self.free.pop(int(self.random.integers(len(self.free))))
            self.cache = {text: b for text, b in self.cache.items() if b != block}
            self.used[block] = 1
            new.append(block)
        self.blocks[id] += new
        return new

    def release(self, id: str) -> None:
        for block in self.blocks.pop(id, []):
            self.used[block] -= 1
            if not self.used[block]:
                self.free.append(block)

    def hits(self, id: str) -> list[int]:
        text, found = self.texts[id], []
        while self.caching and (len(found) + 1) * BLOCK < len(text):
            block = self.cache.get(tuple(text[: (len(found) + 1) * BLOCK]))
            if block is None:
                break
            found.append(block)
        for block in found:
            self.used[block] = self.used.get(block, 0) + 1
            if block in self.free:
                self.free.remove(block)
        return found

    def step(self, arrivals: list[tuple[str, list[int], int, Strategy]]) -> None:
        """An arrival that was seen before is another turn of its row."""
        ids, start, count, blocks, resumed, admissions = [], [], [], [], set(), []

        def schedule(id: str, amount: int, new: list[int]) -> None:
            ids.append(id)
            start.append(self.computed[id])
            count.append(amount)
            blocks.append(new)
            for block in range(
                (self.computed[id] + amount) // BLOCK
            ):  # as vLLM: a hit from now on, before it is computed
                self.cache[tuple(self.texts[id][: (block + 1) * BLOCK])] = self.blocks[id][block]

        lazy = self.planner.mode == "draft" and self.random.random() < 0.5
        room = self.planner.budget  # tokens of decoding rows and their drafts, as vLLM's scheduler sees to it
        for id in [id for id in self.blocks if self.random.random() < 0.9]:
            rest = len(self.texts[id]) - self.computed[id]
            amount = rest if rest == 1 else int(self.random.integers(1, rest + 1))
            drafts = self.planner.mode == "draft" and rest == 1
            if drafts and not room:
                continue
            self.ahead[id] = int(self.random.integers(min(4, room))) if drafts and not lazy else 0
            room -= drafts * (1 + self.ahead[id])
            new = self.allocate(id, self.computed[id] + amount + self.ahead[id])
            if new is None:  # no memory: this one goes back to the queue
                self.release(id)
                self.preempted.append(id)
                continue
            schedule(id, amount, new)
        waiting = [(id, None) for id in self.preempted] + [(a[0], a) for a in arrivals]
        self.preempted = []
        for id, arrival in waiting:
            if arrival is not None:
                _, prompt, key, strategy = arrival
                self.texts[id], self.prompt[id], self.request[id] = list(prompt), len(prompt), (key, strategy)
                self.authors.setdefault(key, [])
                self.histories.setdefault(key, [])
            self.blocks[id] = self.hits(id)
            self.computed[id] = len(self.blocks[id]) * BLOCK
            amount = int(self.random.integers(1, len(self.texts[id]) - self.computed[id] + 1))
            if self.allocate(id, self.computed[id] + amount) is None:
                self.release(id)
                if arrival is None or arrival[0] in self.planner.slots:
                    self.preempted.append(id)
                continue
            if arrival is None:
                resumed.add(id)
            else:
                key = self.request[id][0]
                row = key if key % 4 else None  # some are told anew what they have written
                admissions.append(Admission(id, self.prompt[id], *self.request[id], list(self.histories[key]), row))
            schedule(id, amount, list(self.blocks[id]))
        if not ids:
            return
        fresh = {admission.id for admission in admissions}
        order = sorted(range(len(ids)), key=lambda i: ids[i] not in fresh)  # as the worker: new requests first
        ids, start, count, blocks = ([x[i] for i in order] for x in (ids, start, count, blocks))
        self.planner.admit(admissions)
        passes = self.planner.schedule(ids, start, count, blocks, resumed, room=not lazy)
        assert not (lazy and len(self.planner.drafting))
        ended = {JUNIOR: set(), SENIOR: set()}
        for who, works in enumerate(passes):
            for work in works:
                assert sum(work.count) <= self.planner.budget
                self.runners[who].run(work, self.texts)
                ended[who] |= {work.ids[i] for i in work.ends.nonzero()[0]}
        drafted = self.draft(ids)
        tokens = np.full(len(ids), -1)
        for i, (id, author) in enumerate(zip(ids, self.planner.authors, strict=True)):
            self.computed[id] = start[i] + count[i]
            if id in drafted:
                self.texts[id] += drafted[id]
                self.computed[id] = len(self.texts[id]) - 1
            elif self.computed[id] == len(self.texts[id]):
                assert id in ended[author], "the author of the next token did not compute it"
                tokens[i] = self.random.integers(2, VOCABULARY)
                self.authors[self.request[id][0]].append(int(author))
        self.planner.postprocess(tokens)
        for id, token in zip(ids, tokens, strict=True):
            if token >= 0:
                self.texts[id].append(int(token))
            if self.random.random() < 0.04:  # finished or aborted
                self.planner.finish([id])
                self.release(id)
                self.done.add(id)
                own = self.texts[id][self.prompt[id] :]
                self.histories[self.request[id][0]] += [own] if own else []

    def draft(self, ids: list[str]) -> dict[str, list[int]]:
        """What the rows that decode write in a round; the senior draws what was drafted with probability .7."""
        rows = [ids[i] for i in self.planner.drafting]
        if not rows:
            return {}
        step = Round(self.planner, np.array([self.ahead.get(id, 0) for id in rows]))
        texts = {id: list(self.texts[id]) for id in rows}
        for depth in range(step.depths):
            for work in step.draft_passes(depth):
                self.runners[JUNIOR].run(work, texts)
                ended = [step.index[work.ids[i]] for i in work.ends.nonzero()[0]]
                step.take(depth, np.array(ended), self.random.integers(2, VOCABULARY, len(ended)))
            step.advance(depth)
            for id, row in step.index.items():
                texts[id].append(int(step.tokens[row, depth]))
        catch_up, verify = step.catch_up_passes(), step.verify_pass()
        for work in [*catch_up, *([] if verify is None else [verify])]:
            assert sum(work.count) <= self.planner.budget
            self.runners[SENIOR].run(work, texts)
        places = step.senior.nonzero()
        drawn = np.where(self.random.random(len(places[0])) < 0.7, step.tokens[places], 1)
        step.correct(*places, drawn)
        count = step.settle()
        for id, row in step.index.items():
            self.authors[self.request[id][0]] += step.authors[row, : count[row]].tolist()
        return {id: step.tokens[row, : count[row]].tolist() for id, row in step.index.items()}


@pytest.mark.parametrize(("mode", "caching"), [("lazy", True), ("lazy", False), ("lockstep", True), ("draft", True)])
def test_every_position_is_computed_before_it_is_read(mode, caching) -> None:
    """Chunked prefill, prefix hits, preemption, aborts, short budgets, further turns: no model ever reads KV that is
    not its own, and a row's authors go on from turn to turn."""
    blocks = 48
    planner = Planner(budget=9, block_size=BLOCK, num_blocks=blocks, capacity=2, draft_length=DRAFTS)
    planner.mode = mode
    simulation = Simulation(0, planner, blocks, caching=caching)
    random, known = np.random.default_rng(0), [*strategies().values(), turn(0.5), alternating_turns()]
    went_on: set[str] = set()
    shared = random.integers(2, VOCABULARY, 24).tolist()
    for number in range(150):
        arrivals = []
        if number < 120 and random.random() < 0.4:
            prompt = shared[: int(random.integers(1, 24))] + random.integers(2, VOCABULARY, 3).tolist()
            arrivals = [(f"r{number}", prompt, mix64(0, number), known[int(random.integers(len(known)))])]
        for id in sorted(simulation.done - went_on):
            if number < 120 and len(simulation.texts[id]) < 60 and random.random() < 0.5:
                went_on.add(id)
                said = random.integers(2, VOCABULARY, int(random.integers(1, 6))).tolist()
                arrivals.append((f"{id}+", [*simulation.texts[id], *said], *simulation.request[id]))
        simulation.step(arrivals)
    assert len(simulation.done) > 10
    turns: dict[int, list[np.ndarray]] = {}
    for id, (key, _) in simulation.request.items():
        if own := simulation.texts[id][simulation.prompt[id] :]:
            turns.setdefault(key, []).append(np.array(own))
    assert sum(len(own) > 1 for own in turns.values()) > 1
    strategy_of = dict(simulation.request.values())
    for key, own in turns.items():
        assert simulation.authors[key] == replay_turns(strategy_of[key], [key], [own]).author[0].tolist()
    planner.finish(list(planner.slots))
    planner.begin_call()
    assert sorted(planner._free) == list(range(len(planner.state.blocks)))


def steps(planner: Planner, strategy: Strategy, *, prompt: int = 5, tokens: int = 12) -> None:
    planner.admit([Admission("a", prompt, 7, strategy)])
    planner.schedule(["a"], [0], [prompt], [list(range(8))])
    for i in range(tokens):
        planner.postprocess(np.array([5 + i]))
        if i < tokens - 1:
            planner.schedule(["a"], [prompt + i], [1], [None])


@pytest.mark.parametrize(
    ("strategy", "mode", "computed"),
    [
        (alternating("senior"), "lazy", [16, 15]),  # each catches up with two tokens at its turn
        (alternating("senior"), "lockstep", [16, 16]),
        (chunk(4, "senior"), "lazy", [12, 16]),  # the junior is last asked for token 7, the senior for token 11
        (solo("senior"), "lazy", [0, 16]),
        (solo("junior"), "lockstep", [16, 0]),
    ],
)
def test_lazy_computes_what_its_author_needs_and_no_more(strategy, mode, computed) -> None:
    planner = Planner(budget=64, block_size=BLOCK, num_blocks=16)
    planner.mode = mode
    steps(planner, strategy)
    assert planner.stats.computed == computed


def test_a_long_catch_up_is_split_and_predicts_once() -> None:
    planner = Planner(budget=5, block_size=BLOCK, num_blocks=16)
    planner.admit([Admission("a", 3, 1, chunk(9, "senior")), Admission("b", 1, 2, solo("senior"))])
    planner.schedule(["a", "b"], [0, 0], [3, 1], [[0, 1, 2], [3]])
    for i in range(9):
        planner.postprocess(np.array([4, 4]))
        junior, senior = planner.schedule(["a", "b"], [3 + i, 1 + i], [1, 1], [None, [4] if i == 3 else None])
    assert [work.count for work in junior] == [[5], [4]]
    assert [(work.start, work.ends.tolist()) for work in junior] == [([3], [False]), ([8], [True])]
    assert [work.ids for work in senior] == [["b"]]


@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize("row", [None, 5])
def test_another_turn_goes_on_whatever_the_workers_still_know(row, surplus) -> None:
    """A stop string is found in a text after the workers may have written on; what they wrote then does not count."""
    strategy, texts = bernoulli(0.5), [list(range(40, 47)), list(range(30, 50))]
    planner = Planner(budget=64, block_size=BLOCK, num_blocks=32)
    told, prompt = [], 3
    for number, text in enumerate(texts):
        id, extra = str(number), [5] * (surplus if number == 0 else 0)
        planner.admit([Admission(id, prompt, 7, strategy, texts[:number], row)])
        planner.schedule([id], [0], [prompt], [list(range(16 * number, 16 * number + 16))])
        for i, token in enumerate([*text, *extra]):
            told.append((int(planner.authors[0]), planner.token_keys([id])[0]) if i < len(text) else None)
            planner.postprocess(np.array([token]))
            planner.schedule([id], [prompt + i], [1], [None])
        planner.postprocess(np.array([-1]))
        planner.finish([id])
        prompt += len(text) + 4
    wanted = replay_turns(strategy, [7], [[np.array(text) for text in texts]]).author[0].tolist()
    assert len(set(wanted)) == 2
    counters = torch.arange(len(wanted))
    keys = fold_in(stream(torch.full_like(counters, 7), SAMPLING), counters).tolist()
    assert [pair for pair in told if pair is not None] == list(zip(wanted, keys, strict=True))


def test_a_broken_promise_is_an_error() -> None:
    liar = bernoulli(0.5)._replace(writers="senior")
    planner = Planner(budget=64, block_size=BLOCK, num_blocks=16)
    with pytest.raises(EngineError, match=r"Strategy\.writers"):
        steps(planner, liar)


def test_drafts_are_chosen_by_what_a_call_has_shown() -> None:
    """What the senior writes alone is wrong more often than what both do; a new call knows nothing."""
    planner = Planner(budget=4096, block_size=BLOCK, num_blocks=4096, draft_length=DRAFTS)
    ids = [f"r{i}" for i in range(5)]
    kinds = [bernoulli(0.5), bernoulli(0.5), bernoulli(0.5), solo("senior"), solo("junior")]
    planner.admit([Admission(id, 10 + i, i, kinds[i]) for i, id in enumerate(ids)])
    planner.schedule(ids, [0] * 5, [10 + i for i in range(5)], [list(range(8 * i, 8 * i + 8)) for i in range(5)])
    assert planner.state.reads[JUNIOR].tolist()[:5] == planner.state.known[JUNIOR].tolist()[:5]
    planner.postprocess(np.full(5, 5))
    both, alone = planner.ahead(ids[:3]), planner.ahead(ids[3:4])
    assert both == DRAFTS(3, Passes(), share=0.5, context=12)
    assert alone == DRAFTS(1, Passes(), share=1.0, context=14)
    planner.stats.drafts += Passes(drafted=1000, accepted=300)
    assert planner.ahead(ids[3:4]) == 0 < alone
    planner.begin_call()
    assert planner.ahead(ids[:3]) == both > 0
    planner.mode = "lazy"
    assert planner.ahead(ids) == 0
