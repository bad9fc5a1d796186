"""Rows in flight: any subset may advance, and every slot's authors are those of a replay."""

import pickle

import numpy as np
import pytest
import torch

from helpers import VOCABULARY, strategies
from tandemrl.rollout.engine import replay_turns
from tandemrl.selection import alternating_turns, replay, turn
from tandemrl.selection.authors import resumed
from tandemrl.selection.live import LiveSelection


def test_rows_of_several_turns_are_those_of_a_replay() -> None:
    """Turns begin in any subset of rows, while others advance; some rows come with turns that are over."""
    known = [*strategies().values(), turn(0.5), alternating_turns("junior")]
    random, live, running = np.random.default_rng(1), LiveSelection(), {}
    for slot in range(24):
        strategy = known[slot % len(known)]
        history = [random.integers(0, VOCABULARY, random.integers(1, 6)).tolist() for _ in range(slot % 3)]
        senior = live.admit(torch.tensor([slot]), [strategy], torch.tensor([slot]), [history])
        running[slot] = (strategy, [*history, []], [bool(senior)])
    for _ in range(40):
        some = [slot for slot in running if random.random() < 0.6]
        if some:
            tokens = torch.from_numpy(random.integers(0, VOCABULARY, len(some)))
            for slot, token, author in zip(some, tokens, live.step(torch.tensor(some), tokens), strict=True):
                running[slot][1][-1].append(int(token))
                running[slot][2].append(bool(author))
        begin = [slot for slot, (_, turns, _) in running.items() if turns[-1] and random.random() < 0.1]
        if begin:
            last = torch.tensor([running[slot][2][-1] for slot in begin])
            for slot, author in zip(begin, live.turn(torch.tensor(begin), last), strict=True):
                running[slot][1].append([])
                running[slot][2][-1] = bool(author)
    for slot, (strategy, turns, authors) in running.items():
        written = [np.array(tokens, np.int64) for tokens in turns if tokens]
        replayed = replay_turns(strategy, [slot], [written]).author[0].tolist()
        before = sum(map(len, turns[: slot % 3]))
        assert replayed[before:] == [int(author) for author in authors[: len(replayed) - before]]
        assert len(turns) > 2


@pytest.mark.parametrize("name", ["turn", "word", "alternating_turns"])
def test_a_text_that_is_asked_for_turn_by_turn_is_read_once(name) -> None:
    """Whether it goes on, is asked for again, or had another past; and beside rows that are new."""
    random, told = np.random.default_rng(5), list[int]()
    plain = {**strategies(), "turn": turn(0.5), "alternating_turns": alternating_turns("junior")}[name]

    def step(state, tokens):
        told.append(len(tokens))
        return plain.step(state, tokens)

    live, strategy = LiveSelection(), plain._replace(step=step)
    turns = [tuple(random.integers(0, VOCABULARY, 6).tolist()) for _ in range(8)]
    pasts = [turns[:n] for n in range(9)] + [turns[:8], [*turns[:3], turns[0]], [*turns[:3], turns[0], turns[1]]]
    costs = []
    for past in pasts:
        told.clear()
        senior = live.admit(torch.tensor([2, 7]), [strategy] * 2, torch.tensor([40, 41]), [past, ()])
        costs.append(sum(told))
        for slot, key, each in ((2, 40, past), (7, 41, ())):
            assert bool(senior[(2, 7).index(slot)]) == bool(resumed(plain, torch.tensor([key]), [each])[0])
        then = torch.tensor([turns[4]] * 2)
        mine = [live.step(torch.tensor([2, 7]), then[:, k])[0] for k in range(6)]
        replayed = replay_turns(plain, [40], [[*map(np.array, [*past, turns[4]])]]).author[0, -5:]
        assert [int(author) for author in mine[:-1]] == replayed.tolist()
    ends = plain.turn is not None
    assert max(costs[:9]) <= 2 * (6 + ends)
    assert costs[9] == 0
    assert costs[10] == 2 * 4 * (6 + ends)  # both rows are told of a step that one of them takes
    assert costs[11] <= 2 * (6 + ends)


@pytest.mark.parametrize("kinds", [["word"], list(strategies())])
def test_rows_that_go_back_go_on_as_in_a_replay(kinds) -> None:
    """Drafts of one to four tokens, of which each row keeps some; a row that is in no draft goes its own way."""
    random, live = np.random.default_rng(2), LiveSelection()
    known = [strategies()[kinds[slot % len(kinds)]] for slot in range(20)]
    first = live.admit(torch.arange(20), known, torch.arange(20))
    tokens, authors = [[] for _ in known], [[bool(author)] for author in first]
    for _ in range(15):
        slots = torch.from_numpy(random.permutation(20)[: int(random.integers(1, 20))])
        depth = int(random.integers(1, 5))
        marks, drafted, following = [], random.integers(0, VOCABULARY, (depth, len(slots))), []
        for j in range(depth):
            marks.append(live.mark(slots))
            following.append(live.step(slots, torch.from_numpy(drafted[j])).tolist())
        kept = torch.from_numpy(random.integers(0, depth, len(slots)))
        live.rewind(slots, marks, kept)
        last = torch.from_numpy(random.integers(0, VOCABULARY, len(slots)))
        then = live.step(slots, last).tolist()
        for i, slot in enumerate(slots.tolist()):
            tokens[slot] += [*drafted[: kept[i], i].tolist(), int(last[i])]
            authors[slot] += [*(following[j][i] for j in range(kept[i])), then[i]]
    for slot, strategy in enumerate(known):
        if written := tokens[slot]:
            each = replay(strategy, torch.tensor([slot]), torch.tensor([written]), torch.tensor([len(written)]))
            assert each.author[0].tolist() == [int(author) for author in authors[slot][: len(written)]]


@pytest.mark.parametrize("name", list(strategies()))
def test_strategies_can_be_sent_to_another_process(name) -> None:
    strategy = strategies()[name]
    copy = pickle.loads(pickle.dumps(strategy))
    keys, tokens = torch.arange(40), torch.randint(0, VOCABULARY, (40, 9), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((40,), 9)
    assert torch.equal(replay(strategy, keys, tokens, lengths).author, replay(copy, keys, tokens, lengths).author)
