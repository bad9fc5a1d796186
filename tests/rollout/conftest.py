"""What the reference engine computes."""

from typing import Any

import pytest

from tandemrl.rollout import decoding


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass over prompts computed."""
    counts = list[int]()

    def counted(function: Any, tokens_of: Any) -> Any:
        def call(*given: Any) -> Any:
            counts.append(sum(map(len, tokens_of(*given))))
            return function(*given)

        return call

    monkeypatch.setattr(decoding, "prefill", counted(decoding.prefill, lambda model, texts: [t[:-1] for t in texts]))
    monkeypatch.setattr(decoding, "extend", counted(decoding.extend, lambda model, cache, rows, starts, chunks: chunks))
    return counts
