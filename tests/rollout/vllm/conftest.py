"""Engines that the whole session shares, and a look at vLLM's scheduler."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from forked import fork_vllm, scan_once, stop_server
from pairs import Engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    fork_vllm()
    scan_once()
    running = Engines(tmp_path_factory.mktemp("models"))
    yield running
    running.close()
    stop_server()


@dataclass
class Scheduled:
    """What vLLM's in-process schedulers did since the test began."""

    preemptions: int = 0
    cached_tokens: int = 0


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> Scheduled:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    preempt, lookup, seen = Scheduler._preempt_request, KVCacheManager.get_computed_blocks, Scheduled()

    def counted_preemption(self, *args, **kwargs):
        seen.preemptions += 1
        return preempt(self, *args, **kwargs)

    def counted_lookup(self, *args, **kwargs):
        found = lookup(self, *args, **kwargs)
        seen.cached_tokens += found[1]
        return found

    monkeypatch.setattr(Scheduler, "_preempt_request", counted_preemption)
    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", counted_lookup)
    return seen
