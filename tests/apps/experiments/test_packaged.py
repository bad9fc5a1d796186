"""The pair that comes with the library: that it is whole, that today's recipe would make it, and what it can do."""

import hashlib
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrl.apps.experiments import tiny
from tandemrl.apps.experiments.packaged import PAIRS, find_packaged
from tandemrl.apps.experiments.tiny import CRITERIA, build_tiny_pair
from tandemrl.data.rows import DataError
from tandemrl.tasks.generated.synthetic import generate

SHA256 = {"senior": "a676c149c7660304", "junior": "c987e82d8c771ca5"}


def test_the_packaged_pair_is_the_one_that_was_checked_in():
    """Its bytes, and that its manifest holds what the recipe of today asks for."""
    folder = PAIRS / "jargon-0"
    hashes = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in folder.glob("*.safetensors")}
    assert hashes == SHA256
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 1.5e6
    found = find_packaged(tiny.pair_identity(pair="jargon", seed=0))
    assert found is not None, "made by another recipe: build a new one and pack it (apps/experiments/packaged.py)"
    assert found.manifest["unmet"] == []
    for measure, low, high in CRITERIA["jargon"]:
        assert low <= found.manifest["base"][measure] <= high


def test_the_packaged_pair_can_do_what_its_manifest_says(tmp_path):
    manifest = build_tiny_pair(tmp_path / "pair", pair="jargon", packaged=True, progress=pytest.fail)
    assert build_tiny_pair(tmp_path / "pair", pair="jargon", progress=pytest.fail) == manifest
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pair" / "junior")
    rows = generate("jargon", "heldout", 200, 1)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / name) for name in ("senior", "junior")]
    skill = tiny._skill(*((model, tokenizer) for model in models), rows, 1)
    for measure in ("jargon/pass@1", "plain/pass@1", "jargon/rate", "junior/solo/pass@1"):
        assert skill[measure] == pytest.approx(manifest["base"][measure], abs=0.15)


def test_a_packaged_pair_that_was_changed_is_refused(tmp_path, monkeypatch):
    shutil.copytree(PAIRS / "jargon-0", tmp_path / "jargon-0")
    monkeypatch.setattr("tandemrl.apps.experiments.packaged.PAIRS", tmp_path)
    (tmp_path / "jargon-0" / "junior.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"junior\.safetensors: not the file that was packaged; install"):
        build_tiny_pair(tmp_path / "pair", pair="jargon", packaged=True)
    assert not (tmp_path / "pair").exists()
