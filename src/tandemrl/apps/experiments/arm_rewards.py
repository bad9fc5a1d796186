"""Rewards of the arms that are compared with tandem, as `reward.scorers` names them (``module:function``)."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Literal

from tandemrl.data.rows import Row

ANSWER = r"\boxed{"


def brevity(completions: Sequence[str], completion_ids: Sequence[Sequence[int]], tokens: float = 100.0) -> list[float]:
    """A penalty on length: minus one for so many tokens. In tokens, not in characters: jargon has fewer tokens and more
    characters than plain words, so that a penalty on characters would be one on jargon itself.

    Examples:
        >>> brevity(["3 and 4"], [[5, 6, 7]])
        [-0.03]
    """
    return [-len(ids) / tokens for ids in completion_ids]


def junior_likelihood(row: Row, texts: Sequence[str], model: str, of: Literal["truth", "stated"] = "truth") -> Any:
    r"""The mean log-prob, in nats per token, that the junior gives an answer after the steps of each text: the idea of
    reinforcement-learned teachers (arXiv 2506.08388).

    The text's own ``\boxed{}`` and what follows is no part of its steps. Nothing can leak but by the steps.

    Args:
        model: the junior's folder or hub id.
        of: ``truth``: the true answer. ``stated``: that of the text, whether it is true or not, as a checker that is
            not told the truth judges it (arXiv 2407.13692, with a verifier that is not trained).
    """
    import torch

    junior, tokenizer = _loaded("AutoModelForCausalLM", model)
    prompt = _asked(row, tokenizer)
    found = []
    for text in texts:
        steps, sign, end = text.rpartition(ANSWER)
        answer = _braced(end) if of == "stated" and sign else row.ground_truth
        begun = tokenizer.encode(prompt + (steps if sign else text), add_special_tokens=False)
        tokens = tokenizer.encode(f"{ANSWER}{answer}}}", add_special_tokens=False)
        with torch.no_grad():
            logprobs = junior(torch.tensor([begun + tokens])).logits[0, len(begun) - 1 : -1].float().log_softmax(-1)
        found.append(float(logprobs.gather(1, torch.tensor(tokens)[:, None]).mean()))
    return found


def verified(row: Row, texts: Sequence[str], model: str) -> list[float]:
    """How probably right each text is, as a trained verifier says that has not seen the truth (arXiv 2407.13692).

    Args:
        model: its folder (`makings.verifier`).
    """
    import torch

    verifier, tokenizer = _loaded("AutoModelForTokenClassification", model)
    begun = tokenizer.encode(_asked(row, tokenizer), add_special_tokens=False)
    found = []
    for text in texts:
        tokens = [*begun, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        with torch.no_grad():
            found.append(float(verifier(torch.tensor([tokens])).logits[0, -1, 0].sigmoid()))
    return found


def _asked(row: Row, tokenizer: Any) -> str:
    """The prompt, as training renders it."""
    from tandemrl.data.templates import DEFAULT_ARGUMENTS as given

    return tokenizer.apply_chat_template([*row.messages], add_generation_prompt=True, tokenize=False, **given)


def _braced(text: str) -> str:
    """A text up to the brace that closes it."""
    depth = accumulate({"{": 1, "}": -1}.get(character, 0) for character in text)
    return text[: next((i for i, open_braces in enumerate(depth) if open_braces < 0), len(text))]


@cache
def _loaded(kind: str, model: str) -> tuple[Any, Any]:
    import transformers

    own: Any = getattr(transformers, kind)
    return own.from_pretrained(model, dtype="float32").eval(), transformers.AutoTokenizer.from_pretrained(model)
