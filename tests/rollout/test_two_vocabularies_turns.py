"""Episodes of two models with vocabularies of their own: what each reads, who writes, and where turns end."""

import copy
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers import byte_level, flat, prepared, qwen3, small_qwen3
from tandemrl.apps.experiments.tiny import WORD_SPLIT
from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row, encode_prompts
from tandemrl.rollout import torch_engine
from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, Sampling, Turn, check_authors
from tandemrl.rollout.envs.environment import Answer, Environment, State
from tandemrl.rollout.envs.episodes import EpisodeRunner, Reader
from tandemrl.rollout.relay import LocalPartner, Written
from tandemrl.rollout.relay import Reader as LocalReader
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, alternating_turns, turn
from tandemrl.selection.whole_words import before_text_word, in_two_vocabularies, text_sentence, text_tables
from tandemrl.selection.words import word_starts

EOS, END = 0, 1
"""A text, or a turn, may end by either. The templates end turns with the second."""
COMMON = ["<eos>", "<end>", "b", "a", "Ġ", "!", ".", *"0123456789"]
ONE = {surface: i for i, surface in enumerate([*COMMON, "Ġa", "Ċ", "ĊĊ"])}
OTHER = {surface: i for i, surface in enumerate([*COMMON[:4], "Ċ", *COMMON[4:], "?", "ab", "Ġb", "aba", "Ġbab"])}
MERGES = [("a", "b"), ("Ġ", "b"), ("ab", "a"), ("Ġb", "ab")]
P = 0.6
LIMITS = RolloutConfig(max_turns=3, turn_tokens=9, observation_tokens=40, result_tokens=20, tool_timeout_s=60.0)


def talker(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], mine: str, other: str
) -> PreTrainedTokenizerFast:
    """A tokenizer whose chat template puts a character in front of a turn of an author, and another of the world."""
    bpe = byte_level(vocabulary, merges, WORD_SPLIT)
    template = (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{mine}{{{{ m.content }}}}<end>{{% else %}}{other}"
        f"{{{{ m.content }}}}{other}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{mine}{{% endif %}}"
    )
    ends = {"eos_token": "<eos>", "additional_special_tokens": ["<end>"]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template, **ends)


@cache
def tokenizers() -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """That of the junior, that of the senior."""
    return talker(OTHER, MERGES, "?", "."), talker(ONE, [("Ġ", "a"), ("Ċ", "Ċ")], "!", "2")


@cache
def untouched() -> tuple[PreTrainedModel, PreTrainedModel]:
    both = small_qwen3(143, vocabulary=len(OTHER)), qwen3(43, vocabulary=len(ONE))
    for model in both:
        model.generation_config.eos_token_id = [EOS, END]
    return both


def engine(max_rows: int = 64, context: int = 256) -> TorchEngine:
    junior, senior = (prepared(copy.deepcopy(model)) for model in untouched())
    junior.config.max_position_embeddings = context
    return TorchEngine(senior, junior, tokenizers()[1], junior_tokenizer=tokenizers()[0], max_rows=max_rows)


@cache
def strategies() -> dict[str, Strategy]:
    tables = text_tables(tokenizers()[1])
    return {
        "before_word": before_text_word(P, tables),
        "sentence": text_sentence("junior", tables),
        "turn": in_two_vocabularies(turn(P), tables),
        "alternating_turns": in_two_vocabularies(alternating_turns("junior"), tables),
    }


class Counts(Environment):
    """Says how long a turn was, in one or two messages."""

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        said = [{"role": "user", "content": f"b{len(message['content'])} a"}, {"role": "user", "content": "ab"}]
        return Answer(said[: 1 + len(message["content"]) % 2], {})


class Episode(NamedTuple):
    """A completion, its prompt for both, its messages, and the junior's half of it: its tokens, authors, log-probs."""

    completion: Completion
    prompts: tuple[tuple[int, ...], tuple[int, ...]]
    messages: list[Message]
    half: tuple[list[int], np.ndarray, np.ndarray]


class Kept(LocalPartner):
    """Keeps what the junior has read and written, of which nothing is left when a row is dropped."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kept: dict[int, tuple[list[int], list[int], list[float]]] = {}
        """By number: all tokens, and the authors and log-probs of those after the prompt."""
        self.cuts, step = list[bool](), self._writer.step

        def recorded(*, wait: bool) -> dict[int, Written]:
            found = step(wait=wait)
            for number, written in found.items():
                self.mark(number, 0, list(written.logprobs))
            return found

        self._writer.step = recorded  # type: ignore[method-assign]

    def mark(self, number: int, author: int, logprobs: list[float]) -> None:
        self.kept[number][1].extend([author] * len(logprobs))
        self.kept[number][2].extend(logprobs)

    def mark_read(self, number: int, author: int = 1) -> None:
        reader = self.readers[number]
        new = len(reader.tokens) - len(reader.row.request.junior_prompt) - len(self.kept[number][1])
        self.mark(number, author, [0.0] * new)

    def admit(self, prompts: Any) -> None:
        super().admit(prompts)
        self.kept |= {row.number: (self.readers[row.number].tokens, [], []) for row in prompts}

    def ask(self, jobs: Any) -> None:
        super().ask(jobs)
        for job in jobs:
            self.mark_read(job.row.number)

    def read_turn(self, row: Any, text: bytes) -> bool:
        number, context, by_token = row.number, row.junior_context, row.stop_reason == "eos"
        reader = self.readers.get(number)
        before = reader and (reader.ended, reader.tokens[-1])
        readable = super().read_turn(row, text)
        if before and readable:
            ended, last = before
            observed = len(context) - (by_token and (not ended or last == context[0]))  # the end is the turn's
            self.mark_read(number)
            self.kept[number][1][-observed:] = [-1] * observed
        return readable

    def cut(self, reader: LocalReader, text: bytes) -> bool:
        written, first = [*reader.tokens], len(reader.row.request.junior_prompt)
        self.cuts.append(super().cut(reader, text))
        assert tokenizers()[0].decode(reader.tokens[reader.start :]).encode() == text
        pairs = zip([*written, -1], [*reader.tokens, -2], strict=False)
        same = next(i for i, (old, new) in enumerate(pairs) if old != new) - first
        assert first + same >= reader.start
        for each in self.kept[reader.row.number][1:]:
            del each[same:]
        self.mark_read(reader.row.number)
        return self.cuts[-1]


def played(running: TorchEngine, strategy: Strategy, count: int = 40) -> list[Episode]:
    junior, senior = tokenizers()
    row = Row("r", ({"role": "user", "content": "ab b"},), "own", "", {})
    runner = EpisodeRunner(Counts(), senior, LIMITS, eos_token_ids=(EOS, END), junior=Reader(junior, (EOS, END)))
    (prompt,), _ = encode_prompts([row], senior, max_prompt_tokens=99, junior=junior)
    partners, made = list[Kept](), running._make_partner

    def kept(words: Any) -> Kept:
        own = made(words)
        partners.append(Kept(words, own._writer, own._vocabulary, own._ends, own._context))
        return partners[-1]

    running._make_partner = kept
    asked = Request(prompt.tokens, tuple(range(count)), Sampling(max_tokens=22), strategy, junior_prompt=prompt.junior)
    with runner:
        found = flat(running.generate([runner.episode(asked, row)], responder=runner.episodes()))
    running._make_partner = made
    CUTS[running.max_rows] = partners[0].cuts
    assert not partners[0].readers  # nobody decodes an episode that has ended
    assert not len(partners[0]._writer)
    halves = {
        n: (tokens[len(prompt.junior) :], *map(np.array, told)) for n, (tokens, *told) in partners[0].kept.items()
    }
    messages = ([*row.messages, *(one.transcript.messages if one.transcript else ())] for one in found)
    none = ([], np.empty(0), np.empty(0))  # of one that was aborted before it began
    return [
        Episode(one, (prompt.junior, prompt.tokens), told, halves.get(number, none))
        for number, (one, told) in enumerate(zip(found, messages, strict=True))
    ]


CUTS: dict[int, list[bool]] = {}
"""By the rows of an engine: which turns were cut for the junior, in its last episodes."""


@cache
def episodes(name: str = "before_word") -> list[Episode]:
    return played(engine(), strategies()[name])


def turns_of(tokens: Sequence[int], authors: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """The own tokens of each turn, and who wrote them."""
    edges = [0, *(np.flatnonzero(np.diff(authors >= 0)) + 1).tolist(), len(authors)]
    return [(list(tokens[a:b]), authors[a:b].tolist()) for a, b in pairwise(edges) if a < b and authors[a] >= 0]


def conversation(episode: Episode) -> list[Message]:
    """The messages of an episode, with the text of each turn as the senior's tokens spell it."""
    turns = turns_of(episode.completion.tokens.tolist(), episode.completion.author)
    texts = iter(tokenizers()[1].decode(tokens, skip_special_tokens=True) for tokens, _ in turns)
    told = [m if m["role"] == "user" else m | {"content": next(texts)} for m in episode.messages]
    while episode.completion.stop_reason != "untranslatable" and told[-1]["role"] == "user":
        told.pop()  # the answer to a last turn, which nobody has seen
    return told + [{"role": "assistant", "content": text} for text in texts]  # one that was lost was not answered


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("name", ["before_word", "turn"])
def test_each_model_reads_the_conversation_in_its_own_chat_template(who: int, name: str) -> None:
    tokenizer, several = tokenizers()[who], 0
    for episode in episodes(name):
        tokens, authors, _ = episode.half
        if who:
            tokens, authors = episode.completion.tokens.tolist(), episode.completion.author
        read = tokenizer.decode([*episode.prompts[who], *tokens], skip_special_tokens=False)
        told = conversation(episode)
        rendered = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=told[-1]["role"] == "user")
        read = read.replace("<eos><end>", "<end>").removesuffix("<eos>")
        if not who and not rendered.startswith(read):  # it wrote more than there was room for, or what is lost
            assert episode.completion.stop_reason in ("length", "turns", "untranslatable")
            assert read.startswith(rendered.removesuffix("<end>"))
            continue
        assert rendered.startswith(read)
        turns = len(turns_of(tokens, authors))
        several += turns > 2
        assert who or episode.completion.stop_reason == "untranslatable" or len(episode.completion.turns) - turns < 2
    assert several > 2


def logprobs(who: int, prompt: Sequence[int], tokens: Sequence[int], authors: np.ndarray) -> list[float]:
    """The log-prob of each token of one author, from one full forward of the untouched model: masked where a word
    begins inside of a token, and after a handover to those that begin one."""
    with torch.no_grad():
        logits = untouched()[who](input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    surfaces = [surface.replace("Ġ", " ") for surface in (OTHER, ONE)[who]]
    joined = [" " in surface[1:] and not surface.isspace() for surface in surfaces]
    begins = [surface[0] in " <" for surface in surfaces]
    found = []
    for i in np.flatnonzero(authors == who):
        opening = i > 0 and authors[i - 1] == 1 - who
        barred = torch.tensor([j or (opening and not b) for j, b in zip(joined, begins, strict=True)])
        found.append(float(logits[i].masked_fill(barred, -torch.inf).log_softmax(-1)[tokens[i]]))
    return found


@pytest.mark.parametrize("name", ["before_word", "turn"])
def test_tokens_are_drawn_after_what_their_author_has_read(name: str) -> None:
    """Also in a later turn, and after a turn that a limit has cut."""
    for episode in episodes(name):
        one, (tokens, authors, told) = episode.completion, episode.half
        wanted = logprobs(1, episode.prompts[1], one.tokens.tolist(), one.author)
        np.testing.assert_allclose(one.behaviour_logprobs[one.author == 1], wanted, atol=1e-4)
        wanted = logprobs(0, episode.prompts[0], tokens, authors)
        np.testing.assert_allclose(told[authors == 0], wanted, atol=1e-4)
        assert not one.behaviour_logprobs[one.author < 1].any()


@pytest.mark.parametrize("name", ["before_word", "sentence"])
def test_authors_change_before_words_and_either_ends_a_turn(name: str) -> None:
    check_authors([episode.completion for episode in episodes(name)], strategies()[name])
    ends, cut, senior = {0: 0, 1: 0}, 0, tokenizers()[1]
    for episode in episodes(name):
        for tokens, authors in turns_of(episode.completion.tokens.tolist(), episode.completion.author):
            assert len(tokens) <= 9
            if tokens[-1] in (EOS, END):
                ends[authors[-1]] += 1
                assert tokens[-1] == END or authors[-1]  # the senior's template ends turns with it
            else:
                cut += len(tokens) == 9
            pieces = [senior.decode([token]) for token in tokens]
            text = "".join(piece for piece in pieces if piece[0] != "<")
            offsets = np.cumsum([0, *map(len, pieces)])
            changes = {int(offsets[i]) for i in np.flatnonzero(np.diff(authors)) + 1}
            assert changes <= {*word_starts(text.encode()), len(text)}
    assert min(ends.values()) > 1
    assert cut > 3


@pytest.mark.parametrize("name", ["turn", "alternating_turns"])
def test_a_turn_has_one_author(name: str) -> None:
    check_authors([episode.completion for episode in episodes(name)], strategies()[name])
    for episode in episodes(name):
        turns = turns_of(episode.completion.tokens.tolist(), episode.completion.author)
        assert all(len({*authors}) == 1 for _, authors in turns)


def test_a_cut_turn_is_cut_for_the_junior_too() -> None:
    """Its tokens are longer than the senior's, so that it writes more than there is room for."""
    found = played(engine(max_rows=12), strategies()["before_word"])
    assert sum(CUTS[12]) > 3
    for one, other in zip(found, episodes(), strict=True):  # whichever rows are decoded together
        assert one.completion.tokens.tolist() == other.completion.tokens.tolist()
        assert one.completion.author.tolist() == other.completion.author.tolist()
        assert one.completion.stop_reason == other.completion.stop_reason
        assert one.half[0] == other.half[0]


def test_no_token_of_an_episode_is_drawn_from_the_numbers_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[int, list[int]] = {len(ONE): [], len(OTHER): []}
    race_times = torch_engine.race_times

    def recorded(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
        drawn[vocabulary] += keys.tolist()
        return race_times(keys, vocabulary)

    monkeypatch.setattr(torch_engine, "race_times", recorded)
    played(engine(), strategies()["before_word"], 20)
    for keys in drawn.values():
        assert len(keys) > 100
        assert len(set(keys)) == len(keys)
    assert not {*drawn[len(ONE)]} & {*drawn[len(OTHER)]}


def test_an_episode_ends_where_the_junior_can_read_no_more() -> None:
    found = [episode.completion for episode in played(engine(max_rows=20, context=24), strategies()["before_word"])]
    check_authors(found, strategies()["before_word"])
    short = 0
    for one, other in zip(found, episodes(), strict=True):
        mine, whole = ([*c.turns[0].tolist()] if c.turns else [] for c in (one, other.completion))
        assert mine == whole[: len(mine)]
        short += one.stop_reason == "length" and len(one.turns) < len(other.completion.turns)
    assert short > 5


def test_aborted_episodes_end_and_the_others_go_on() -> None:
    running, told = engine(max_rows=14), list[int]()
    going_on = running.generate

    def aborting(*given: Any, **options: Any) -> list[list[Completion]]:
        def progress(new: int) -> None:
            told.append(new)
            if len(told) == 12:
                running._call.abort(range(0, 40, 2))

        return going_on(*given, progress=progress, **options)

    running.generate = aborting  # type: ignore[method-assign]  # of this one engine
    found = [episode.completion for episode in played(running, strategies()["before_word"])]
    aborted = [one.key for one in found if one.stop_reason == "abort"]
    assert aborted
    assert not any(key % 2 for key in aborted)
    for one, other in zip(found, episodes(), strict=True):
        if one.key not in aborted:
            assert one.tokens.tolist() == other.completion.tokens.tolist()


# ------------------------------------------------------------------------------------------------------------- refusals


class Silent:
    """A responder that does not know the junior's vocabulary."""

    def submit(self, turn: Turn) -> None:
        self.turn = turn

    def replies(self, *, wait: bool) -> list[Reply]:
        return [Reply(self.turn.number, (2, 3))]

    def transcript(self, number: int) -> Any:
        raise AssertionError


def test_what_the_junior_cannot_read_is_refused_by_name() -> None:
    limits = {"turn_tokens": 3, "observation_tokens": 9, "junior_prompt": (2,)}
    asked = Request((2,), (0,), Sampling(9), strategies()["before_word"], **limits)  # type: ignore[arg-type]  # values of many types
    with pytest.raises(
        EngineError, match="no context for the junior, which has another vocabulary; set junior_context"
    ):
        engine().generate([asked], responder=Silent())
    junior, senior = map(copy.deepcopy, tokenizers())

    def add(a: int) -> str:
        """Adds.

        Args:
            a: a number
        """
        return str(a)

    acting = Environment()
    acting.tools = (add,)
    for tokenizer in (senior, junior):
        tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        tokenizer.chat_template = tools + tokenizer.chat_template.replace("<end>", f"{calls}<end>")
    made = EpisodeRunner(acting, senior, LIMITS, eos_token_ids=(EOS, END), junior=Reader(junior, (EOS, END)))
    assert made.junior_rendering is not None
    junior.chat_template = junior.chat_template.replace("tool_call>", "do>")
    with pytest.raises(
        ConfigError, match=r"of the junior: .* writes a call of add as '<do>.*, the senior's as '<tool_"
    ):
        EpisodeRunner(acting, senior, LIMITS, eos_token_ids=(EOS, END), junior=Reader(junior, (EOS, END)))
