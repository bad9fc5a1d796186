"""A junior behind llama.cpp's own server, which the package xllamacpp has: what it draws, a run, and real faults."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import artefacts
from helpers import chi_square_bound, reference_distribution
from runs import config, metrics
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.processes.http import Client
from tandemrl.processes.server import serving
from tandemrl.rollout.endpoint_partner import EndpointJunior, _answer, body_of, client_of
from tandemrl.rollout.engine import EngineError, Sampling
from tandemrl.training.loop import train

pytestmark = pytest.mark.slow

SERVE = """
import json, os, signal, sys
import xllamacpp
params = xllamacpp.CommonParams()
for path, value in json.loads(sys.argv[1]).items():
    *parents, name = path.split(".")
    owner = params
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, value)
print("PID", os.getpid(), flush=True)
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
CONTEXT = 512  # tokens of each slot, of which llama.cpp makes a multiple of 256
PATIENCE = {"retries": 1, "backoff_s": 0.1, "timeout_s": 60.0}


def gguf_of(folder: Path, file: Path, **sampling: float) -> Path:
    """A tiny Qwen3 as a GGUF file in float32. sampling: what its converter takes from ``generation_config.json``."""
    command = [sys.executable, "-c", WRITE, str(folder), str(file), json.dumps(sampling)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(artefacts.llama_cpp())})
    return file


class Running(NamedTuple):
    """A server. pid: of its process."""

    url: str
    pid: int


@contextmanager
def llama_cpp(model: Path, log: Path, **settings: Any) -> Iterator[Running]:
    """llama.cpp's server. settings: of its ``common_params``; ``__`` stands for a dot."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"model__path": str(model), "model_alias": ["other"], "hostnames": ["127.0.0.1"], "port": port}
    given |= {"cpuparams__n_threads": 1, "cpuparams_batch__n_threads": 1} | settings
    said = json.dumps({name.replace("__", "."): value for name, value in given.items()})
    run = ["env", f"PYTHONPATH={artefacts.llama_cpp()}", sys.executable, "-c", SERVE, said]
    url = f"http://127.0.0.1:{port}/v1"
    with serving(shlex.join(run), log, key="llama.cpp", error=RuntimeError) as check:
        client_of(JuniorEndpointConfig(url=url)).wait(120, check)
        lines = log.read_text(errors="replace").splitlines()
        yield Running(url, int([line for line in lines if line.startswith("PID ")][-1].split()[1]))


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
    with llama_cpp(other_gguf, tmp_path / "log", sampling__mirostat=2, sampling__dry_multiplier=0.9) as server:
        junior = EndpointJunior(JuniorEndpointConfig(url=server.url, **PATIENCE), tokenizer)
        prompt = junior.vocabulary.encode("First 3 plus 4 is 7.\n\nNext 7")
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].numpy()

        def found(sampling: Sampling, leave_out: tuple[str, ...] = ()) -> np.ndarray:
            body = {"prompt": prompt, "max_tokens": 1, "n_probs": len(logits), "post_sampling_probs": True}
            native = Client(replace(junior.client.service, url=server.url.removesuffix("/v1")))
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
        drawn = Counter(junior.client.post("/completions", body | {"seed": seed}, _answer)[0] for seed in range(500))
        texts = Counter[str]()
        for token, p in enumerate(reference_distribution(logits, SAMPLINGS[2], prompt, [])):
            texts[junior.vocabulary.pieces.get(token, b"").decode(errors="replace")] += p
        assert drawn.keys() <= texts.keys()
        statistic, bound = chi_square_bound(np.array([drawn[t] for t in texts]), np.array([*texts.values()]))
        assert statistic < bound
        junior.close()


def settings_of(pair: Path, out: Path, junior: Path, url: str, *more: str) -> Any:
    knobs = [f"model.junior={junior}", f"model.junior_endpoint.url={url}", "selection.strategy=before_word"]
    knobs += ["train.eval_every=0", "data.eval=[synthetic:plain:heldout:4]", "eval.samples=2", "eval.k=[1]"]
    return config(pair, out, *knobs, "selection.max_untranslatable=0.5", *more)


def dying(monkeypatch: pytest.MonkeyPatch, server: Running, answers: int) -> list[float]:
    """The server is killed after some answers. Returns where the time of it will be."""
    post, count, died = Client.post, iter(range(10**9)), list[float]()

    def counted(*arguments: Any) -> Any:
        found = post(*arguments)
        if next(count) == answers:
            os.kill(server.pid, signal.SIGKILL)
            died.append(time.monotonic())
        return found

    monkeypatch.setattr(Client, "post", counted)
    return died


def test_a_killed_server_ends_the_run_and_another_goes_on_with_it(
    tiny_pair: Path, other_junior: Path, other_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = [f"model.junior_endpoint.{name}={value}" for name, value in PATIENCE.items()]
    with llama_cpp(other_gguf, tmp_path / "log", n_parallel=4, n_ctx=2048) as server:
        settings = settings_of(tiny_pair, tmp_path / "out", other_junior, server.url, *patience)
        with monkeypatch.context() as patched:
            died = dying(patched, server, answers=100)
            with pytest.raises(EngineError, match=r"max_failure_rate=0\.1; .*failed 2 time.*Is it running \("):
                train(settings, quiet=True)
        assert time.monotonic() - died[0] < 20
    done = metrics(tmp_path / "out")
    assert len(done) < 3
    with llama_cpp(other_gguf, tmp_path / "log2", n_parallel=4, n_ctx=2048) as server:
        train(settings_of(tiny_pair, tmp_path / "out", other_junior, server.url, *patience), quiet=True)
    assert [step["step"] for step in metrics(tmp_path / "out")] == [1, 2, 3]
