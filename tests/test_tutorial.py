"""The tutorial, as a reader would follow it: its commands and its Python, in their order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALLER = {"train.steps=20": "train.steps=2", "train.eval_every=10": "train.eval_every=1", ":64": ":8", ":128": ":12"}
"""So that it takes a minute: fewer steps and problems, the same commands."""


@pytest.mark.slow
def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    blocks = BLOCK.findall(TUTORIAL.read_text())
    assert len(blocks) >= 7
    for language, code in blocks:
        for usual, smaller in SMALLER.items():
            code = code.replace(usual, smaller)
        command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": programs}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs" / "first" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "runs" / "second" / "metrics.jsonl").read_text().count("\n") == 2
