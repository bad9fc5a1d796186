"""The pairs that come with the library: that they are whole, that today's recipes would make them, what they can do."""

import lzma
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrl.apps.experiments import tiny
from tandemrl.apps.experiments.pair import PACKAGED
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.data.rows import DataError
from tandemrl.tasks.generated.synthetic import generate

FILES = sorted(file.name.removesuffix("-0.tar.xz") for file in PACKAGED.iterdir())
SHA256 = {"senior": "d8886c7f73cafe2f", "junior": "73638690c2c243cd"}
"""How the checksums of the quickstart's weights begin."""


def test_all_of_them_are_small() -> None:
    assert sorted(tiny.WARM_STARTS) == FILES
    assert sum(file.stat().st_size for file in PACKAGED.iterdir()) < 6e6


@pytest.mark.parametrize("pair", FILES)
def test_a_packaged_pair_is_what_the_recipe_of_today_asks_for(pair: str, tmp_path: Path) -> None:
    """Unpacked, with the weights that its manifest names; nothing is trained."""
    manifest = build_tiny_pair(tmp_path / "pair", pair=pair, progress=pytest.fail)
    assert manifest.items() >= tiny.pair_identity(pair=pair, seed=0).items()
    assert manifest["unmet"] == []
    assert build_tiny_pair(tmp_path / "pair", pair=pair, progress=pytest.fail) == manifest
    if pair == "jargon":
        assert {name: value[: len(SHA256[name])] for name, value in manifest["sha256"].items()} == SHA256


def test_the_quickstart_pair_can_do_what_its_manifest_says(tmp_path: Path) -> None:
    manifest = build_tiny_pair(tmp_path / "pair", pair="jargon")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pair" / "junior")
    rows = generate("jargon", "heldout", 200, 1)
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "pair" / name) for name in ("senior", "junior")]
    skill = tiny._skill(*((model, tokenizer) for model in models), rows, 1)
    for measure in ("jargon/pass@1", "plain/pass@1", "jargon/rate", "junior/solo/pass@1"):
        assert skill[measure] == pytest.approx(manifest["base"][measure], abs=0.15)


def test_a_packaged_pair_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = bytearray(lzma.decompress((PACKAGED / "plain-0.tar.xz").read_bytes()))
    at = archive.index(b'"senior"')  # in the manifest, before the hash of its weights
    archive[at + 11] ^= 1
    (tmp_path / "plain-0.tar.xz").write_bytes(lzma.compress(archive))
    monkeypatch.setattr("tandemrl.apps.experiments.pair.PACKAGED", tmp_path)
    with pytest.raises(DataError, match=r"plain-0\.tar\.xz: not the weights that were packed; install"):
        build_tiny_pair(tmp_path / "pair", pair="plain")
    assert not (tmp_path / "pair").exists()
