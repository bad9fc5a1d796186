"""Doors for models: what a path was meant to be, what is missing in a folder, which models are refused and why."""

import builtins
import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from packing import dense, scored, sequences
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedModel

from helpers import EOS, IDS, PAD, VOCABULARY, llama, prepared, qwen3, small_qwen3, tokenizer
from tandemrl.models.attention import ModelError
from tandemrl.models.critic import load_critic
from tandemrl.models.loading import (
    attention_window,
    check_folder,
    check_positions,
    check_weights,
    eos_token_ids,
    junior_tokenizer_of,
    load_model,
    load_tokenizer,
    prepare,
    refusal,
    resolve_device,
    stored_eos_token_ids,
    vocabulary_check,
)

# ---------------------------------------------------------------------------------------------------------------- paths


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer."""
    out = tmp_path_factory.mktemp("models") / "own" / "senior"
    small_qwen3().save_pretrained(out)
    tokenizer().save_pretrained(out)
    return out


def copied(folder: Path, to: Path, *, without: str = "") -> Path:
    shutil.copytree(folder, to)
    for file in to.glob(without) if without else ():
        file.unlink()
    return to


def test_a_cuda_device_beyond_those_present_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [str(resolve_device(name)) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:0", "cpu"]
    monkeypatch.setenv("LOCAL_RANK", "2")
    for name, number in (("cuda:7", 7), ("cuda", 2)):
        with pytest.raises(ModelError, match=rf"model\.device=cuda:{number}: torch .* sees 2 CUDA device"):
            resolve_device(name)


class Program:
    """Pickled, it is a program that makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.file,)


def test_a_model_that_is_neither_here_nor_on_the_hub_says_what_to_correct() -> None:
    told = str(refusal("model", "someone/nothing", OSError("We couldn't connect to the hub.\nMore.")))
    assert "no such folder, and from the hub: We couldn't connect to the hub; correct the path or the name" in told


@pytest.mark.parametrize("load", [load_model, load_critic])
@pytest.mark.parametrize("damage", ["program", "cut", "no pickle"])
def test_weights_that_are_a_program_are_not_run(load, damage, folder, tmp_path):
    model, ran = copied(folder, tmp_path / "model", without="*.safetensors"), tmp_path / "ran"
    weights = model / "pytorch_model.bin"
    weights.write_bytes(pickle.dumps({"model.norm.weight": Program(ran)}))
    if damage != "program":
        weights.write_bytes(weights.read_bytes()[:10] if damage == "cut" else b"")
    with pytest.raises(ModelError, match=r"could not be loaded: its weights \(\.bin\) are a pickle that is damaged or"):
        load(model)
    assert not ran.exists()


@pytest.mark.parametrize("load", [load_model, load_tokenizer, load_critic])
def test_code_that_comes_with_a_model_is_not_run_and_nobody_is_asked(load, folder, tmp_path, monkeypatch):
    model = copied(folder, tmp_path / "model")
    for name, classes in (
        ("config.json", {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M", "AutoModelForTokenClassification": "x.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["x.T", None]}),
    ):
        kept = json.loads((model / name).read_text()) | {"model_type": "own", "tokenizer_class": "T"}
        (model / name).write_text(json.dumps(kept | {"auto_map": classes}))
    (model / "x.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'was_run')!r}).touch()\n")
    questions: list[object] = []
    monkeypatch.setattr(builtins, "input", lambda *text: questions.append(text) or "y")
    with pytest.raises(ModelError, match=r"comes with Python code of its own, which is never run"):
        load(model)
    assert not questions
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("own/seniro", "own/senior"),
        ("onw/senior", "own/senior"),
        ("own", "own/senior"),
        ("run", "run/hf/best"),
        ("run/checkpoints/step_12", "run/hf/step_12"),
        ("run/checkpoints/step_12/tensors", "run/hf/best"),
        ("early", "early/hf/step_100"),
        ("early/hf/step_10", "early/hf/step_100"),
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_folder_that_is_no_model_is_named_with_the_one_that_was_meant(name, meant, absolute, tmp_path, monkeypatch):
    for model in ("own/senior", "run/hf/best", "run/hf/step_12", "early/hf/step_20", "early/hf/step_100"):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").touch()
    (tmp_path / "run/checkpoints/step_12/tensors").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    home = f"{tmp_path}/" if absolute else "./" if "onw" in name else ""
    with pytest.raises(ModelError, match=rf"^{home}{name}: .*; did you mean {home.removeprefix('./')}{meant}\?$"):
        check_folder(f"{home}{name}")


# -------------------------------------------------------------------------------------------------------------- loading


def test_models_and_tokenizers_that_are_not_there_are_named(tmp_path):
    missing = tmp_path / "nothing"
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=f"{missing}: no such folder"):
            load(missing)
        with pytest.raises(ModelError, match=r"tiny/senior: no such folder; build it: tandemrl model tiny --out"):
            load(tmp_path / "tiny" / "senior")


def test_weights_that_are_missing_are_not_drawn_at_random(folder: Path, tmp_path: Path) -> None:
    model = copied(folder, tmp_path / "model")
    kept = load_file(model / "model.safetensors")
    del kept["model.layers.0.mlp.up_proj.weight"]
    save_file(kept, model / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 weights are missing there, the first is model\.layers\.0\.mlp\.up_proj"):
        load_model(model)


def test_weights_that_transformers_renames_are_not_missing(tmp_path: Path) -> None:
    """The files of GPT-NeoX call the head ``embed_out``."""
    model = tiny("GPTNeoX")
    model.save_pretrained(tmp_path)
    assert "embed_out.weight" in load_file(tmp_path / "model.safetensors")
    check_weights(tmp_path, model)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    """Not the attention, as long as the packed path was compared with NaN."""
    model = llama()
    model.model.layers[1].mlp.down_proj.weight.data[0, :3] = torch.nan
    model.lm_head.weight.data[0, 0] = torch.inf
    model.save_pretrained(tmp_path)
    named = r"its logits are NaN or infinite: the weight model\.layers\.1\.mlp\.down_proj\.weight is \(damaged"
    with pytest.raises(ModelError, match=named):
        load_model(tmp_path)
    large = llama()
    large.lm_head.weight.data.mul_(1e38)
    large.model.norm.weight.data.mul_(1e3)
    with pytest.raises(ModelError, match=r"its logits are NaN or infinite: torch\.float32 overflows"):
        prepare(large)


def test_vocabulary_check():
    vocabulary_check(tokenizer(), copy.deepcopy(tokenizer()))
    longer = copy.deepcopy(tokenizer())
    longer.add_tokens([AddedToken("later", normalized=False), AddedToken("last", normalized=False)])
    with pytest.raises(ModelError, match=rf"2 entries differ, the first is 'later' \(id {VOCABULARY}\)"):
        vocabulary_check(tokenizer(), longer)
    with pytest.raises(ModelError, match=r"2 entries differ.* but not here; .* check --senior .*family"):
        vocabulary_check(longer, tokenizer())


def test_a_junior_has_a_vocabulary_of_its_own_if_a_token_differs(tmp_path):
    names = ("senior", "same", "longer")
    senior, same, longer = (str(tmp_path / name) for name in names)
    for path in (senior, same):
        tokenizer().save_pretrained(path)
    more = copy.deepcopy(tokenizer())
    more.add_tokens([AddedToken("later", normalized=False)])
    more.save_pretrained(longer)
    assert junior_tokenizer_of(senior, None, endpoint=True) is None
    told = json.loads((tmp_path / "same" / "tokenizer_config.json").read_text())
    (tmp_path / "same" / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": "{{ messages }}"}))
    assert junior_tokenizer_of(senior, same) is None
    assert len(junior_tokenizer_of(senior, longer)) == VOCABULARY + 1
    assert len(junior_tokenizer_of(longer, senior)) == VOCABULARY
    assert len(junior_tokenizer_of(senior, same, endpoint=True)) == VOCABULARY
    with pytest.raises(ModelError, match="no such folder"):
        junior_tokenizer_of(senior, str(tmp_path / "nowhere"))


def test_eos_ids_are_those_of_model_and_tokenizer(tmp_path: Path):
    model, own = qwen3(), IDS[EOS]
    model.config.eos_token_id = 7
    for named, ends in (([9, 4], {9, 4, own}), (9, {9, own}), (None, {7, own})):
        model.generation_config.eos_token_id = named
        assert eos_token_ids(model.generation_config, model.config, tokenizer()) == tuple(sorted(ends))
        model.save_pretrained(tmp_path)
        assert stored_eos_token_ids(str(tmp_path), tokenizer()) == tuple(sorted(ends))
    (tmp_path / "generation_config.json").unlink()
    assert stored_eos_token_ids(str(tmp_path), tokenizer()) == eos_token_ids(None, model.config, tokenizer())
    assert stored_eos_token_ids(str(tmp_path), tokenizer()) == tuple(sorted({7, own}))


# ------------------------------------------------------------------------------------------------------------- refusals

TINY = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.4,
    pad_token_id=IDS[PAD],
    bos_token_id=None,
    eos_token_id=IDS[EOS],
)


def tiny(family: str, **changes: object) -> PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**(TINY | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
REFUSED = {
    "attention soft-capping": ("Gemma2", {}, "soft-capping"),
    "soft-capped logits": ("Gemma2", dict(attn_logit_softcapping=None), "different logits"),
    "scaled logits": ("Granite", dict(logits_scaling=8.0), "different logits"),
    "multiplied logits": ("Cohere", dict(logit_scale=0.25), "different logits"),
    "a window shorter than the probe": ("Mistral", dict(sliding_window=3), "sliding window 3 is shorter"),
    "bidirectional": ("Bert", dict(is_decoder=False), "different logits"),
    "recurrent": ("Mamba", dict(state_size=4), "different logits"),
    "partly recurrent": (
        "Qwen3Next",
        dict(layer_types=["linear_attention", "full_attention"], **LINEAR, **EXPERTS),
        "different logits",
    ),
    "convolutions": ("Lfm2", dict(layer_types=["conv", "full_attention"]), "different logits"),
    "ALiBi outside of the interface": ("Bloom", dict(n_layer=2, n_head=4), "different logits|custom attention"),
    "attention sinks": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=64), "sinks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_would_be_computed_wrongly_are_refused(case):
    family, changes, match = REFUSED[case]
    with pytest.raises(ModelError, match=match) as caught:
        prepare(tiny(family, **changes), name="the junior")
    assert str(caught.value).startswith("the junior: ")


@pytest.mark.parametrize(("ids", "accepted"), [({5}, True), (set(range(70)), False)])
def test_one_sequence_that_rounding_alone_changes_refuses_no_model(ids, accepted):
    """As ids 4, 5, 6 in some checkpoints of SmolLM2, where hidden states of 25,000 cancel out."""
    odd = qwen3()
    kept = odd.model.embed_tokens.forward

    def rounded(given):
        found = kept(given)
        return found + 0.1 * given.shape[-1] * torch.isin(given, torch.tensor([*ids]))[..., None]

    odd.model.embed_tokens.forward = rounded  # other values in the packed probe, which is longer
    if accepted:
        assert prepare(odd) is odd
    else:
        with pytest.raises(ModelError, match="different logits"):
            prepare(odd)


def test_models_without_a_head_are_refused():
    with pytest.raises(ModelError, match="no linear LM head; only causal LMs"):
        prepare(qwen3().model)


@pytest.mark.parametrize(
    ("family", "changes", "window"),
    [
        ("Mistral", dict(sliding_window=8), 8),
        ("Mistral", dict(sliding_window=None), None),
        ("Qwen2", dict(sliding_window=8), None),  # use_sliding_window is false
        ("Qwen2", dict(sliding_window=8, use_sliding_window=True, max_window_layers=1), 8),
        ("Gemma3Text", dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]), 8),
        ("Gemma3Text", dict(sliding_window=8, layer_types=["full_attention"] * 2), None),
        ("Llama4Text", dict(attention_chunk_size=6, num_local_experts=1), 6),
        ("Llama", {}, None),
    ],
)
def test_the_window_is_that_of_the_layers_that_have_one(family: str, changes: dict, window: int | None) -> None:
    assert attention_window(getattr(transformers, f"{family}Config")(**(TINY | changes))) == window


def test_rotary_frequencies_that_depend_on_the_length_are_refused() -> None:
    fixed = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.Gemma3TextConfig(**TINY)
    config.rope_parameters = {"full_attention": fixed, "sliding_attention": fixed}
    check_positions(config, name="it")
    config.rope_parameters = {"full_attention": fixed | {"rope_type": "longrope"}, "sliding_attention": fixed}
    with pytest.raises(ModelError, match="it: rope_type longrope"):
        check_positions(config, name="it")


def test_mixtures_of_experts_are_packed_too():
    reference = tiny("Qwen3Moe", **EXPERTS, attn_implementation="eager")
    given = sequences([3, 11, 6])
    wanted, _ = dense(reference, given, 1.0)
    torch.testing.assert_close(scored(prepared(reference), given), wanted.detach(), rtol=0, atol=5e-5)


def test_a_sliding_window_is_fine_until_a_sequence_outgrows_it():
    reference = tiny("Mistral", sliding_window=8, attn_implementation="eager")
    packed = prepared(reference)
    given = sequences([8, 5])
    wanted, _ = dense(reference, given, 1.0)
    torch.testing.assert_close(scored(packed, given), wanted.detach(), rtol=0, atol=5e-5)
    with pytest.raises(ModelError, match=r"sliding window 8 is shorter than the sequences \(9\)"):
        scored(packed, sequences([9]))


def test_attention_dropout_is_refused_in_training_mode():
    packed = prepared(tiny("Llama", attention_dropout=0.1))
    scored(packed, sequences([5]))
    packed.train()
    with pytest.raises(ModelError, match=r"attention dropout 0\.1"):
        scored(packed, sequences([5]))


def test_a_wired_model_does_not_run_without_a_layout():
    """Its own forward would have no attention mask; it must not answer quietly."""
    packed = prepared(qwen3())
    with pytest.raises(ModelError, match="did not pass `layout`"):
        packed(input_ids=torch.tensor([[1, 2, 3]]))
