import sys

import pytest

from tandemrl.rewards import scoring


@pytest.fixture
def without_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring processes begin without math-verify, whose import takes most of their start."""
    start = "from tandemrl.rewards.worker import serve; serve(lambda: None)"
    monkeypatch.setattr(scoring, "WORKER", (sys.executable, "-P", "-c", start))
