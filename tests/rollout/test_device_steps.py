"""Steps between two looks of the host write what steps with a look at each token write.

On a CPU the same steps run without a graph, with the keys and values that a graph would need in their places
(``static``).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel

from helpers import (
    VOCABULARY,
    assert_same,
    flat,
    llama,
    prepared,
    prompts,
    qwen3,
    requests,
    small_qwen3,
    strategies,
    tokenizer,
)
from scripted_world import ScriptedWorld
from tandemrl.rollout import torch_engine
from tandemrl.rollout.call import Finished
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Decoder, Row, Shaping
from tandemrl.rollout.device_steps import DeviceSteps, Step
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, bernoulli, solo, turn

WAYS = {"4": (4, False), "4, static": (4, True), "16, static": (16, True)}
"""Steps between two looks, and whether everything stays in its place."""
SAMPLINGS = (
    Sampling(max_tokens=21, stop_token_ids=(7, 30), ignore_eos=True),
    Sampling(max_tokens=33, temperature=0.7),
    Sampling(max_tokens=5, temperature=0.0),
    Sampling(max_tokens=18, top_k=9, top_p=0.9, min_p=0.02),
    Sampling(max_tokens=30, stop=("a", "b c"), ignore_eos=True),
)


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return prepared(qwen3()), prepared(small_qwen3())


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    def engine(host_every: int = 1, static: bool = False, **options: Any) -> TorchEngine:
        monkeypatch.setattr(torch_engine, "DeviceSteps", partial(DeviceSteps, static=static))
        return TorchEngine(*pair(), tokenizer(), host_every=host_every, **options)

    return engine


def batch(strategy: Strategy, *, kinds: int = len(SAMPLINGS)) -> list[Request]:
    asked = requests(prompts(2 * kinds), SAMPLINGS[0], strategy)
    return [replace(request, sampling=SAMPLINGS[i % kinds]) for i, request in enumerate(asked)]


@pytest.mark.parametrize(("name", "way"), [("solo senior", "4, static"), ("mixed", "4"), ("mixed", "16, static")])
def test_how_often_the_host_looks_changes_no_token(name: str, way: str, make: Any) -> None:
    """Rows end at stops and limits within the steps; four rows at once, so that others follow them."""
    known = list(strategies().values())
    asked = batch(known[0])
    asked = [
        replace(request, strategy=known[i % len(known)] if name == "mixed" else strategies()[name])
        for i, request in enumerate(asked)
    ]
    by_host, alone = make(max_rows=4), make(*WAYS[way], max_rows=4)
    wanted = flat(by_host.generate(asked))
    assert {c.stop_reason for c in wanted} == {"stop", "eos", "length"}
    assert_same(flat(alone.generate(asked)), wanted)
    assert alone.passes == by_host.passes
    assert_same(flat(alone.generate(asked)), wanted)  # what was kept from the first call


def test_a_model_can_be_its_own_junior(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a model before training is evaluated with itself."""
    one, asked, written = pair()[0], batch(strategies()["word"]), []
    for every, static in ((1, False), (16, True)):
        monkeypatch.setattr(torch_engine, "DeviceSteps", partial(DeviceSteps, static=static))
        written.append(flat(TorchEngine(one, one, tokenizer(), host_every=every).generate(asked)))
    assert_same(written[1], written[0])


def test_turns_go_on_where_they_ended(make: Any) -> None:
    known = [turn(0.5), strategies()["word"], bernoulli(0.5), solo("junior")]
    asked = [
        replace(request, strategy=known[i % len(known)], turn_tokens=7, observation_tokens=30)
        for i, request in enumerate(batch(known[0]))
    ]
    wanted = flat(make(max_rows=5).generate(asked, responder=ScriptedWorld()))
    assert max(len(c.turns) for c in wanted) == 3
    assert_same(flat(make(4, True, max_rows=5).generate(asked, responder=ScriptedWorld())), wanted)


@pytest.mark.parametrize("way", ["4", "16, static"])
def test_sessions_go_on_with_what_was_kept_of_them(way: str, make: Any) -> None:
    """Every other request has one."""
    asked = [replace(each, session=str(i) if i % 2 else None) for i, each in enumerate(batch(strategies()["word"]))]
    by_host, alone = make(), make(*WAYS[way])
    for _ in range(2):
        found = flat(alone.generate(asked))
        assert_same(found, flat(by_host.generate([replace(each, session=None) for each in asked])))
        texts = [[*each.prompt, *c.tokens.tolist(), 3, 4] for each, c in zip(asked, found, strict=True)]
        asked = [replace(each, prompt=text) for each, text in zip(asked, texts, strict=True)]


@pytest.mark.parametrize("static", [False, True])
def test_requests_join_at_a_look(static: bool, make: Any) -> None:
    """Longer ones and more of them than the call began with."""
    first, second = batch(bernoulli(0.5))[:2], batch(strategies()["word"])
    second = [replace(each, prompt=[*each.prompt, *range(10, 60), *range(10, 60)]) for each in second]
    wanted = [c for group in (first, second) for c in flat(make().generate(group))]
    with make(4, static).open() as call:
        numbers = call.submit(first)
        call.step()
        numbers += call.submit(second)
        left = set(numbers)
        while left:
            left -= {event.number for event in call.step() if isinstance(event, Finished)}
        assert_same(call.take(numbers), wanted)


def test_new_weights_count_from_the_next_call_on(make: Any) -> None:
    kept = {name: parameter.clone() for name, parameter in pair()[0].named_parameters()}
    asked, alone = batch(bernoulli(0.5)), make(8, True)
    before = flat(alone.generate(asked))
    try:
        alone.load_weights([(name, weight * 1.5) for name, weight in kept.items()], 1)
        after = flat(alone.generate(asked))
        assert_same(after, [replace(c, policy_version=1) for c in flat(make().generate(asked))])
    finally:
        alone.load_weights(list(kept.items()), 2)
    assert [c.tokens.tolist() for c in before] != [c.tokens.tolist() for c in after]


def test_a_strategy_that_needs_the_host_is_asked_there(make: Any) -> None:
    known, asked = bernoulli(0.5), list[int]()

    def step(state: Any, tokens: Tensor) -> tuple[Tensor, Any]:
        asked.append(len(tokens))
        if len(asked) == 1:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return known.step(state, tokens)

    group = batch(known)
    wanted = flat(make().generate(group))
    with pytest.warns(UserWarning, match="asked on the CPU, as it cannot be asked elsewhere: can't convert"):
        found = make(8).generate([replace(each, strategy=known._replace(step=step)) for each in group])
    assert_same(flat(found), wanted)


class NoHost(TorchDispatchMode):
    """Refuses what would have the host wait, or a constant of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        tensors = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, Tensor)]
        name = str(func)
        assert not any(x.device.type == "cpu" for x in tensors), name
        assert not any(part in name for part in ("lift_fresh", "_local_scalar_dense", "nonzero")), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shaping", [Shaping(), Shaping(scaled=True, greedy=True, truncated=True)])
@pytest.mark.parametrize("build", [qwen3, llama])
def test_a_step_asks_the_host_for_nothing(build: Any, shaping: Shaping) -> None:
    """On the meta device nothing has a value, so a step that needs one could not run."""
    models = {1: prepared(build()), 0: prepared(small_qwen3())}
    keys, known = torch.arange(2), list(strategies().values())
    mark = [(i, keys, strategy.init(keys)[1]) for i, strategy in enumerate(known)]
    for model in models.values():
        model.to("meta")
    heads = {who: model.get_output_embeddings() for who, model in models.items()}
    decoder = Decoder(models, heads, VOCABULARY, (0,), tokenizer())
    layers = {}
    for who, model in models.items():
        config = model.config
        heads_of = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = 4, heads_of, 16, size
        layers[who] = {
            i: (torch.zeros(shape, device="meta"), torch.zeros(shape, device="meta"))
            for i in range(config.num_hidden_layers)
        }
    sizes = {"rows": 4, "width": 16, "steps": 2}
    with torch.inference_mode():
        step = Step(decoder, layers, shaping, known, mark, **sizes)
        step()  # tables are copied to a device once
        with NoHost():
            step()


def test_what_penalties_count_is_on_the_device_of_the_draws() -> None:
    decoder = Decoder({}, {1: torch.nn.Linear(2, VOCABULARY, device="meta")}, VOCABULARY, (0,), tokenizer())
    batch = DecodingBatch(decoder, turns=False)
    asked = requests(prompts(2), Sampling(max_tokens=4, presence_penalty=0.5), solo())
    batch.extend(asked, 2)
    entries = batch._entries([Row(request, 0, i) for i, request in enumerate(asked)], torch.ones(2, dtype=torch.bool))
    assert {entries[name].device.type for name in ("seen", "counts", "parameters")} == {"meta"}
