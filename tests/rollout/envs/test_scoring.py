r"""The scoring pool: hard limits from any thread, replaced workers, order. The bombs are real."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.math import GraderError, score_text
from tandemrl.rollout.envs.scoring import WORKER as DEFAULT_WORKER
from tandemrl.rollout.envs.scoring import Scorer

BOMB = r"\boxed{9^{9^{9^9}}}"

WORKER = """
import os, sys, time
from tandemrl.rollout.envs.worker import serve

def grade(gold, answer):
    if answer == "a + crash":
        os._exit(3)
    if answer == "a + raise":
        raise MemoryError("too much")
    if answer.startswith("a + sleep"):
        time.sleep(float(answer.split()[-1]))
    if answer == "a + print":
        print("noise")
    return "right" in answer

serve(grade)
"""


def row(gold="a + b", source="math500"):
    return Row("r", ({"role": "user", "content": "?"},), source, gold, {})


def boxed(*answers):
    return [(row(), rf"\boxed{{{answer}}}") for answer in answers]


@pytest.fixture
def worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return (sys.executable, str(script))


def in_thread(work):
    """Run off the main thread, where signal-based timers fail; returns the result or raises the error."""
    results, errors = [], []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results[0]


def test_a_bomb_is_killed_off_the_main_thread_and_scoring_goes_on():
    items = [
        (row(r"\sqrt{8}"), r"\boxed{2\sqrt2}"),
        (row("8"), BOMB),
        (row(r"\sqrt{8}"), r"\boxed{3}"),
        (row("8"), "8"),
    ]
    with Scorer(RewardConfig(timeout_s=2.0, workers=1)) as scorer:
        start = time.monotonic()
        scores = in_thread(lambda: scorer.score(items))
        assert time.monotonic() - start < 20
        assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0]
        assert scores[1].parts == {"acc": 0.0, "answer_present": 1.0, "timeout": 1.0}
        assert "timeout" not in scores[2].parts
        assert (scorer.timeouts, scorer.failures) == (1, 0)
        assert in_thread(lambda: scorer.score(items[:1]))[0].value == 1.0  # the killed worker was replaced


def test_pool_and_in_process_scores_agree():
    pairs = [("(x+1)^2", "x^2+2x+1"), ("[0,1)", "[0,1]"), ("18", "18"), (r"\pm 2", "2,-2"), ("4", "y")]
    items = [(row(gold), rf"\boxed{{{answer}}}") for gold, answer in pairs]
    with Scorer(RewardConfig()) as scorer:
        assert scorer.score(items) == [score_text(*item) for item in items]


def test_crashes_and_errors_are_counted_and_scored_zero(worker):
    with Scorer(RewardConfig(workers=2), worker=worker) as scorer:
        scores = scorer.score(boxed("a + right", "a + crash", "a + raise", "a + print", "a + wrong", "b + right"))
        assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert [score.parts.get("failure", 0.0) for score in scores] == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
        assert (scorer.timeouts, scorer.failures) == (0, 2)


def test_order_is_kept_when_items_finish_out_of_order(worker):
    answers = [f"a + sleep {'right' if i % 3 == 0 else 'wrong'} {0.2 if i == 0 else 0.001 * i}" for i in range(12)]
    with Scorer(RewardConfig(workers=3), worker=worker) as scorer:
        scores = scorer.score(boxed(*answers))
    assert [score.answer for score in scores] == answers
    assert [score.value for score in scores] == [float(i % 3 == 0) for i in range(12)]


def test_repeated_answers_are_graded_once_but_counted_each(worker):
    with Scorer(RewardConfig(workers=1, timeout_s=0.5), worker=worker) as scorer:
        start = time.monotonic()
        scores = scorer.score(boxed(*["a + sleep 60"] * 6, "a + right"))
        assert time.monotonic() - start < 10
        assert scorer.timeouts == 6
        assert [score.parts.get("timeout", 0.0) for score in scores] == [1.0] * 6 + [0.0]


def test_a_batch_in_which_nothing_could_be_scored_is_an_error(worker):
    with Scorer(RewardConfig(workers=1), worker=worker) as scorer:
        with pytest.raises(GraderError, match="none of 2 responses could be scored"):
            scorer.score(boxed("a + crash", "a + crash"))
        assert scorer.score(boxed("a + right"))[0].value == 1.0


def test_workers_that_cannot_start_are_an_error_with_their_words():
    command = (sys.executable, "-c", "raise SystemExit('no grader here')")
    with Scorer(RewardConfig(), worker=command) as scorer, pytest.raises(GraderError, match="no grader here"):
        scorer.score(boxed("a + right"))


def test_a_worker_that_died_while_idle_is_replaced(worker):
    with Scorer(RewardConfig(workers=1), worker=worker) as scorer:
        scorer.score(boxed("a + right"))
        scorer._workers[0]._process.kill()
        scorer._workers[0]._process.wait()
        assert scorer.score(boxed("b + right"))[0].value == 1.0
        assert scorer.failures == 0


def test_easy_items_start_no_process():
    with Scorer(RewardConfig(gsm8k="tandem", format_score=0.1), worker=("no-such-command",)) as scorer:
        items = [(row("7"), r"\boxed{7}"), (row("7", "openai/gsm8k"), "#### $7"), (row("7", "openai/gsm8k"), "#### 8")]
        assert [score.value for score in scorer.score(items)] == [1.0, 1.0, 0.1]
        assert scorer.score([]) == []


def test_bad_settings_and_rows_are_refused(monkeypatch):
    with pytest.raises(GraderError, match=r"reward\.workers"):
        Scorer(RewardConfig(workers=0))
    with Scorer(RewardConfig()) as scorer, pytest.raises(DataError, match="no scorer"):
        scorer.score([(row(source="codeforces"), "x")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GraderError, match="pip install"):
        Scorer(RewardConfig())


def test_a_worker_whose_parent_is_gone_ends_by_itself():
    with subprocess.Popen(DEFAULT_WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b'"ready"\n'
        process.stdin.write(json.dumps(["8", "9^{9^{9^9}}", 0.5]).encode() + b"\n")
        process.stdin.flush()
        assert process.wait(timeout=20) == -signal.SIGALRM


def test_scoring_imports_no_torch():
    code = "import sys, tandemrl.rollout.envs.scoring, tandemrl.rollout.envs.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
