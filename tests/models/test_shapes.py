"""The array annotations bite: what `make test` checks at run time fails on a wrong shape."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("beartype", reason="needs the dev extra")

MAKEFILE = Path(__file__).parents[2] / "Makefile"
SCRIPT = """
import sys
from jaxtyping import TypeCheckError, install_import_hook

*packages, checker = sys.argv[1].split(",")
with install_import_hook(packages, checker):
    import torch
    from tandemrl.models.batching import pack_tokens
    from tandemrl.models.forward import token_logprobs
    from tandemrl.models.head import HeadSettings, linear_logprobs
    from tandemrl.models.sampling import draw_token

keys = torch.zeros(2, dtype=torch.int64)
batch = pack_tokens([[1, 2, 3]])
for name, wrong in {
    "rows": lambda: draw_token(torch.zeros(3, 5), keys),
    "dtype": lambda: draw_token(torch.zeros(2, 5), keys.int()),
    "rank": lambda: draw_token(torch.zeros(5), keys),
    "hidden": lambda: linear_logprobs(torch.zeros(2, 4), torch.zeros(5, 3), None, keys, HeadSettings(5)),
    "select": lambda: token_logprobs(None, batch, select=torch.ones(4, dtype=torch.bool)),
}.items():
    try:
        wrong()
    except TypeCheckError:
        continue
    sys.exit(f"{name}: no error")
draw_token(torch.zeros(2, 5).log_softmax(-1), keys)
"""


def test_a_wrong_shape_in_models_fails_under_the_checks_of_the_makefile() -> None:
    match = re.search(r"^TYPED := (\S+)$", MAKEFILE.read_text(), re.MULTILINE)
    assert match is not None
    run = subprocess.run([sys.executable, "-c", SCRIPT, match[1]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
