"""Installs the wheel of a folder in a new environment, far from the repository, and uses it; looks into the sdist.

python .ci/wheel_check.py dist TORCH_REQUIREMENT TORCH_INDEX
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

BELONGS = (
    "setup.py", "mkdocs.yml", "CHANGELOG.md", "CITATION.cff", "docs/results.md", "examples/quickstart.py",
    "notebooks/02_loss.ipynb", "tests/conftest.py", "tests/helpers.py", "tests/rollout/test_turns.py", "cli/main.py",
    "configs/quickstart.yaml",
)  # fmt: skip
PACKAGED = (
    *("py.typed", "configs/quickstart.yaml", "apps/play/page/play.js", "apps/planning/architectures.json"),
    *(f"apps/experiments/pairs/{pair}-0.tar.xz" for pair in ("plain", "jargon", "hops", "calculator")),
)
MOST_BYTES = 7_000_000
"""Of the wheel."""


def main(folder: Path, torch: str, index: str) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in BELONGS if name not in names]:
        sys.exit(f"{sdist} lacks {', '.join(missing)}: see MANIFEST.in")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel} has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.namelist()
        [metadata] = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    if missing := [name for name in PACKAGED if f"tandemrl/{name}" not in packed]:
        sys.exit(f"{wheel} lacks {', '.join(missing)}: see pyproject.toml")
    if relative := re.findall(r"\]\((?!https?:|#)[^)]+\)", metadata):
        sys.exit(f"links that lead nowhere on PyPI: {', '.join(relative)}")
    with tempfile.TemporaryDirectory() as place:
        environment = Path(place) / "venv"
        venv.create(environment, with_pip=True)
        outside = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

        def run(program: str, *arguments: str, check: bool = True) -> int:
            print("$", program, *arguments, flush=True)
            command = [str(environment / "bin" / program), *arguments]
            return subprocess.run(command, cwd=place, env=outside, check=check).returncode

        pip = ["install", "--quiet", "--disable-pip-version-check"]
        if run("pip", *pip, torch, check=False):
            run("pip", *pip, torch, "--index-url", index)
        of_torch = size(environment)
        run("pip", *pip, str(wheel.resolve()))
        print(f"installed: {size(environment):.0f} MB, of it torch {of_torch:.0f} MB", flush=True)
        run("tandemrl", "check")
        run("tandemrl", "model", "tiny", "--out", "tiny")
        pair = [f"model.{who}=tiny/{who}" for who in ("senior", "junior")]
        two_steps = ["train.steps=2", "train.eval_every=0", "output_dir=run"]
        run("tandemrl", "train", "--config", "quickstart", *pair, *two_steps)
        run("tandemrl", "plan", "--config", "quickstart")
        run("tandemrl", "report", "run")
        if not (Path(place) / "run" / "report.html").stat().st_size:
            sys.exit("the report is empty")


def size(folder: Path) -> float:
    """Megabytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink()) / 1e6


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
