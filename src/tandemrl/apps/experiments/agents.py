"""The tiny agents: their tokenizers, the scripted episodes that they learn from, and what they can do alone.

Their vocabularies are closed and have whole words: an episode takes about a hundred tokens. A name is one token
wherever it stands, since the space belongs to the word before it. The beginnings and ends of calls and documents are
one or two tokens. Anything else is encoded as bytes, so any text can be encoded. Authors can hand over: tokens that
begin with a space (for ``word``) stand before what a turn decides, and a note ends a step.

The episodes are imperfect on purpose. In the multi-hop worlds an author notes what it has found, with the id of the
document, and asks for the next hop; at last it completes with the ids of its notes. What goes wrong is what
reinforcement learning can remove: queries for a wrong relation, stopping early, citations that are left out or swapped.
With a calculator an author asks for a sum and boxes what it is told; what goes wrong: it guesses, or adds where it
should take away.
"""

import copy
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tandemrl import evals
from tandemrl.apps.experiments.warm_start import Lesson
from tandemrl.config import Config, load
from tandemrl.data.documents import HEADER
from tandemrl.data.rows import Row
from tandemrl.evals.measures import Sample
from tandemrl.models.loading import prepare
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.envs.environment import Environment, make_environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, opening_prompts
from tandemrl.rollout.envs.multihop import MultihopEnvironment
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo
from tandemrl.tasks.generated import calculator, synthetic
from tandemrl.tasks.generated.hops import ALIASES, DOCUMENTS, JARGON, RELATIONS, SYSTEM, World, hops_row, world
from tandemrl.tasks.generated.rows import AGENTS
from tandemrl.tasks.generated.synthetic import Numbers, Problem, Stage

EOS, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"

# A call in pieces, as hermes writes it. The second piece begins with a space: authors can change before what is asked.
CALL = '<tool_call>\n{"name":'
SEARCH = ' "retrieve_documents", "arguments": {"query": "'
SEARCHED = '"}}\n</tool_call>'
COMPLETE = ' "complete", "arguments": {"reasoning": "", "final_answer": "'
CITED = '", "cited_doc_ids": ["'
NEXT = '", "'
COMPLETED = '"]}}\n</tool_call>'

CALCULATE = ' "calculator", "arguments": {"expression": "'
BOX, BOXED = "\\boxed{", "}"

_CALCULATOR_PIECES = (
    *(CALL, CALCULATE, SEARCHED, BOX, BOXED, "user\n", "assistant\n", "tool\n", " Tools:", " calculator", "\n"),
    *(*synthetic.NAMES, *(f" {noun}" for noun in synthetic.NOUNS)),
    *(f"{verb} " for verb in (*synthetic.GAIN_VERBS, *synthetic.LOSS_VERBS)),
    *(" has ", ", ", ". How many?", " + ", " - ", "-", *"0123456789"),
)
_PIECES = (
    *(CALL, SEARCH, SEARCHED, COMPLETE, CITED, NEXT, COMPLETED),
    *("system\n", "user\n", "assistant\n", "tool\n", SYSTEM, " Tools:", " retrieve_documents", " complete"),
    *("Who is the ", "Who is ", " of the ", " of ", "'s ", " is ", "?", ".\n\n", ".", "\n"),
    *(HEADER, "[", "] ", *"0123456789"),
)

# The tools are told by name: a model of this size learns from demonstrations what they take.
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- if loop.first and tools %} Tools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}<tool_call>
{"name": {{ call['function']['name'] | tojson }}, "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def hops_tokenizer(pair: str = "hops") -> PreTrainedTokenizerFast:
    """The tokenizer of a pair of agents; both pairs that search have the same."""
    known = _CALCULATOR_PIECES if pair in calculator.PAIRS else (*_PIECES, *ALIASES, *JARGON)
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def surface(text: str) -> str:
        return "".join(piece for piece, _ in to_bytes.pre_tokenize_str(text))

    pieces = sorted(known, key=lambda piece: (-len(piece), piece))  # the longest match first
    surfaces = dict.fromkeys((PAD, START, EOS, *sorted(to_bytes.alphabet()), *map(surface, pieces)))
    vocabulary = {token: index for index, token in enumerate(surfaces)}
    # No merges: what the split leaves whole is looked up as it is, and what is not found is spelt in bytes.
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = Regex("|".join(map(re.escape, pieces)))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(whole, behavior="isolated"), to_bytes])
    return tiny_tokenizer(backend, CHAT_TEMPLATE, additional_special_tokens=[START])


def tiny_tokenizer(backend: Tokenizer, chat_template: str, **more: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a tiny pair."""
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        chat_template=chat_template,
        model_max_length=2048,
        **more,
    )


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
        number, text = re.findall(rf"^{HEADER}(\S+)\n(.+)", steps[-1].result or "")[0]  # of the first document
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
    asked = calculator.expression_of(Numbers(numbers.start, tuple(map(operator.mul, signs, numbers.deltas))))
    result = calculator.calculator(asked)
    return [Step(f"{CALL}{CALCULATE}{asked}{SEARCHED}", result), Step(f"{BOX}{result}{BOXED}", None)]


def lessons(tokenizer: PreTrainedTokenizerFast, pair: str, seed: int, *, stage: Stage = "base") -> Iterator[Lesson]:
    """Yield episodes of the train split without end, as the token ids that reinforcement learning uses."""
    config = load(AGENTS[pair])
    environment = make_environment(config)
    assert environment is not None
    episode_runner, eos = EpisodeRunner(environment, tokenizer, config.rollout), int(tokenizer.eos_token_id)
    rng = random.Random(f"demonstrations/{pair}/{stage}/{seed}")
    shown = _calculations(rng) if pair in calculator.PAIRS else _searches(environment, pair, rng, stage)
    for row, steps in shown:
        [prompt], _ = opening_prompts([row], tokenizer, config.data, episode_runner)
        tokens = list(prompt.tokens)
        weights = [0.0] * len(tokens)
        for turn, result in steps:
            written = [*tokenizer(turn)["input_ids"], eos]
            message = {"role": "tool", "name": environment.tools[0].__name__, "content": result}
            answer = () if result is None else episode_runner.rendering.context([message], ended=True).tokens
            tokens += [*written, *answer]
            weights += [1.0] * len(written) + [WORLD_WEIGHT] * len(answer)
        yield Lesson(row, tokens, weights)


def solo_episodes(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: Sequence[Row], seed: int, *, config: Config
) -> list[Sample]:
    """Run and grade one episode per row at temperature 1, in the environment and with the limits of a config."""
    environment = make_environment(config)
    assert environment is not None
    engine = TorchEngine(prepare(copy.deepcopy(model)), None, tokenizer, max_rows=512)
    with EpisodeRunner(environment, tokenizer, config.rollout) as episode_runner, Scorer(config.reward) as scorer:
        prompts, _ = opening_prompts(rows, tokenizer, config.data, episode_runner)
        samples = evals.generate_samples(
            {"solo": solo("senior")},
            engine=engine,
            tokenizer=tokenizer,
            prompts=prompts,
            profile=evals.profile_of(config.eval),
            samples=1,
            seed=seed,
            episode_runner=episode_runner,
        )
        return evals.grade(samples, prompts, scorer)


# --------------------------------------------------------------------------------------------------------------------


def _calculations(rng: random.Random) -> Iterator[tuple[Row, list[Step]]]:
    for problem in calculator.problems("train", rng):
        yield synthetic.row_of(calculator.PAIRS[0], "train", 0, 0, problem), demonstrate_calculator(problem, rng)


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


def _sloppily(cited: Sequence[str], rng: random.Random, rate: float) -> Iterator[str]:
    """Yield the citations, each left out or swapped with probability ``rate``."""
    for number in cited:
        if rng.random() >= rate:
            yield number
        elif rng.random() < 0.5:
            yield str(rng.randrange(DOCUMENTS))
