"""Shared fixtures."""

import fcntl
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest

# Where numba is loaded (bm25s does that), stock vLLM 0.32 starts no engine on a CPU; ours do (`_readable_modules`).
sys.modules.setdefault("numba", None)  # type: ignore[arg-type]


# Thousands of modules are imported before the first test, and none of them goes: they are no garbage to look for.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries report what is frozen as leaks


# No test is timed: a busy machine is not a fault.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

ON_VLLM = "rollout/vllm/"
WHOLE_RUNS = (
    "training/", "apps/", "distributed/", "evals/", "cli/", "rollout/fleet/", "rollout/gateway/", "rollout/test_",
    "test_", ON_VLLM,
)  # fmt: skip
"""Tests that check no array annotations: a run calls the same few functions some thousand times, and the check takes a
third of its time. The tests of those functions check them, and so do the whole runs of `CHECKED`."""
CHECKED = (
    "test_every_knob_trains_and_matches_the_engine",
    "test_a_run_plays_episodes_and_its_record_says_what_happened",
    "test_a_run_trains_the_senior_and_resumes",
    "test_evals.py",
    "test_behaviour_logprobs_are_those_of_the_authors_sampling_distribution",
    "test_limits_and_stops_inside_a_draft",
    "test_planner.py",
    "test_samples_that_start_together",
    "test_a_stop_string_belongs_to_one_turn",
    # of the torch engine
    "test_before_word.py",
    "test_collect.py",
    "test_engine.py",
    "test_sync.py",
    "test_a_session_computes_its_new_tokens_alone",
    "test_a_step_asks_the_host_for_nothing",
    "test_auto_gives_the_same_completions",
    "test_behaviour_logprobs_are_those_of_the_authors_distribution",
    "test_no_row_waits_for_the_answer_to_another",
    "test_no_two_tokens_of_a_text_come_from_one_number",
    "test_one_call_mixes_strategies_limits_and_lone_turns",
    "test_requests_join_at_a_look",
    "test_stop_strings_are_kept_and_may_span_tokens",
    "test_the_junior_is_asked_for_no_more_than_it_can_read",
)
"""Tests, or files of them."""

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where annotations are checked at all (`make test`): switch the check off in `WHOLE_RUNS`, and on elsewhere."""
    whole = item.path.relative_to(HERE).as_posix().startswith(WHOLE_RUNS)
    checked = {item.path.name, getattr(item, "originalname", item.name)} & {*CHECKED}
    jaxtyping.config.update("jaxtyping_disable", whole and not checked)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together, and so do all that import vLLM: one process pays for that and for their engines."""
    from xdist.scheduler import LoadFileScheduling

    class ByEngine(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return ON_VLLM if nodeid.startswith(f"tests/{ON_VLLM}") else super()._split_scope(nodeid)

    return ByEngine(config, log)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged pair of the quickstart: it writes the format and is right now and then. All workers share it."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair

    return _shared(tmp_path_factory, "tiny", build_tiny_pair)


@pytest.fixture(scope="session")
def other_junior(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A junior for ``tiny_pair`` that has a vocabulary of its own. All workers share it."""
    from tandemrl.apps.experiments.tiny import build_tiny_pair

    return _shared(tmp_path_factory, "other", partial(build_tiny_pair, pair="jargon_two_tokenizers")) / "junior"


@pytest.fixture
def without_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring processes begin without math-verify, whose import takes most of their start."""
    start = "from tandemrl.rewards.worker import serve; serve(())"
    monkeypatch.setattr("tandemrl.rewards.scoring.WORKER", (sys.executable, "-P", "-c", start))


def _shared(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """A folder that the first worker builds and the others find."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    out = root / "pair" / name
    out.parent.mkdir(exist_ok=True)
    with open(out.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            build(out)
    return out


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random models that call tools now and then, and rows for them."""
    from agents import make_agents

    return make_agents(tmp_path_factory.mktemp("agents"))
