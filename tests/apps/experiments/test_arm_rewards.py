"""Rewards of the arms, against log-probs that transformers computes token by token."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandemrl.apps.experiments.arm_rewards import _asked, brevity, junior_likelihood
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.messages import Response
from tandemrl.models.loading import load_tokenizer
from tandemrl.rewards.scoring import Scorer


@pytest.fixture(scope="module")
def junior(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pair") / "jargon"
    build_tiny_pair(folder, pair="jargon")
    return str(folder / "junior")


def by_hand(model: str, prompt: str, steps: str, answer: str) -> float:
    tokenizer, loaded = load_tokenizer(model), AutoModelForCausalLM.from_pretrained(model)
    begun = tokenizer.encode(prompt + steps, add_special_tokens=False)
    told = []
    for token in tokenizer.encode(answer, add_special_tokens=False):
        with torch.no_grad():
            told.append(loaded(torch.tensor([begun])).logits[0, -1].log_softmax(-1)[token].item())
        begun.append(token)
    return sum(told) / len(told)


def test_the_true_answer_is_read_after_the_steps_alone(junior: str) -> None:
    [row] = load_rows(["synthetic:jargon:heldout:1"])
    prompt = load_tokenizer(junior).apply_chat_template([*row.messages], add_generation_prompt=True, tokenize=False)
    steps = "First 5 plus 3 is 8.\n\n"
    texts = [steps + r"\boxed{1}", steps + r"\boxed{2} and more", steps]
    one, two, unanswered = junior_likelihood(row, texts, model=junior)
    assert one == two == unanswered  # whatever the text itself answers
    assert one == pytest.approx(by_hand(junior, prompt, steps, rf"\boxed{{{row.ground_truth}}}"), abs=1e-4)
    stated = junior_likelihood(row, texts[:1], model=junior, of="stated")
    assert stated == pytest.approx([by_hand(junior, prompt, steps, r"\boxed{1}")], abs=1e-4)
    answers = (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2")
    whole, open_ended = junior_likelihood(row, [steps + each for each in answers], model=junior, of="stated")
    assert whole == pytest.approx(by_hand(junior, prompt, steps, answers[0]), abs=1e-4)
    assert open_ended != whole


def test_prompts_are_rendered_as_training_renders_them(junior: str) -> None:
    [row], tokenizer = load_rows(["synthetic:jargon:heldout:1"]), load_tokenizer(junior)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    assert _asked(row, tokenizer).endswith("assistant\n<think></think>")


@pytest.mark.parametrize("child", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_is_a_term_of_a_sum_in_a_config(child: bool, junior: str) -> None:
    [row], mine = load_rows(["synthetic:jargon:heldout:1"]), {"model": junior}
    module = "tandemrl.apps.experiments.arm_rewards:" if child else ""
    reward = RewardConfig(
        scorers={"*": f"boxed + {module}junior_likelihood + {module}brevity"},
        weights={"junior_likelihood": 0.1, "brevity": 0.5},
        parameters={"junior_likelihood": mine} if child else {},
        timeout_s=120.0,
        workers=1,
    )
    functions = {} if child else {"junior_likelihood": partial(junior_likelihood, **mine), "brevity": brevity}
    text = rf"so \boxed{{{row.ground_truth}}}"
    with Scorer(reward, functions=functions) as scorer:
        [score] = scorer.score([(row, Response(text, text, ids=(5, 6, 7)))])
    [likelihood] = junior_likelihood(row, [text], model=junior)
    assert score.value == pytest.approx(1 + 0.1 * likelihood + 0.5 * -0.03, abs=1e-5)
    assert score.parts["acc"] == 1
