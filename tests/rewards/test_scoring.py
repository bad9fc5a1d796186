r"""The scoring pools: hard limits from any thread, replaced workers, order, chains, users' scorers. Bombs are real."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from scored import score_text
from tandemrl.config import ConfigError, RewardConfig
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import DataError, Row
from tandemrl.processes.calls import ChildCalls
from tandemrl.rewards import routing, scoring
from tandemrl.rewards.functions import by_name
from tandemrl.rewards.protocol import Deferred, GraderError, Lost, Score
from tandemrl.rewards.scoring import Scorer

BOMB = r"\boxed{\int_0^{999} x^{x^x} dx}"
"""Something that a computer algebra system does not finish, and that is not decided before it."""
EIGHT = r"\boxed{2+6}"
"""8, but only math-verify says so: it is quick, also in a new process on a busy machine."""
UNUSABLE = (
    "float('nan')",
    "float('-inf')",
    "None",
    "'1.0'",
    "b'1'",
    "[1.0, 2.0]",
    "Score(None, {'acc': 1.0}, None)",
    "Score('1', {'acc': 1.0}, None)",
    "Score(1.0, {'acc': float('nan')}, None)",
    "Score(1.0, {}, None)",
    "Score(1.0, {'acc': 1.0, 'mean': 3.0}, None)",
    "Score(1.0, {'acc': 1.0}, 7)",
)
"""What a reward function may not return."""
TESTS = '{"inputs": ["1"], "outputs": ["1"]}'

TASKS = """
import os, sys, time

def task(what, value=None):
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise MemoryError("too much")
    if what == "exit":
        sys.exit(1)
    if what == "sleep":
        time.sleep(value)
    with open("log", "a") as log:
        log.write(what)
    print("noise")
    return [what, value]
"""


def row(gold="a > b", source="math500", name="r"):
    return Row(name, ({"role": "user", "content": "?"},), source, gold, {})


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


# ---- processes -----------------------------------------------------------------------------------------------------


def test_a_bomb_is_killed_off_the_main_thread_and_scoring_goes_on():
    items = [
        (row("8"), EIGHT),
        (row("8"), BOMB),
        (row("8", "numina_olympiads"), BOMB),  # no formula to PRIME
        (row("9"), EIGHT),
        (row("8"), "8"),
    ]
    with Scorer(RewardConfig(timeout_s=5.0, workers=1)) as scorer:
        start = time.monotonic()
        scores = in_thread(lambda: scorer.score(items))
        assert time.monotonic() - start < 50
        assert [score.value for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0]
        assert scores[1].parts == {"acc": 0.0, "answer_present": 1.0, "timeout": 1.0}
        assert "timeout" not in {**scores[2].parts, **scores[3].parts}
        assert (scorer.timeouts, scorer.failures) == (1, 0)
        assert in_thread(lambda: scorer.score(items[:1]))[0].value == 1.0  # the killed worker was replaced


def test_the_librarys_scorers_read_text_without_special_tokens():
    response = Response("so <|mask|>\\boxed{4<|mask|>2}", "so \\boxed{42}")
    assert (score_text(row("42"), response).value, score_text(row("42"), response.text).value) == (1.0, 0.0)


def test_each_task_gets_its_own_outcome_and_equal_ones_are_done_once(tmp_path, monkeypatch, without_math):
    (tmp_path / "tasks_for_tests.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    slow, late = ("sleep", 0.3), ("sleep", 60)
    asked = [slow, ("die",), ("raise",), ("a", 1), ("exit",), slow, ("b", None), late, late]
    processes = scoring._Processes(RewardConfig(workers=2, timeout_s=10.0))
    found = processes.settle([Deferred("symbolic", ("tasks_for_tests:task", *each)) for each in asked])
    processes.close()
    assert found == [
        ["sleep", 0.3],
        Lost("failure"),
        Lost("failure", "MemoryError: too much"),
        ["a", 1],
        Lost("failure", "SystemExit: 1"),
        ["sleep", 0.3],
        ["b", None],
        Lost("timeout"),
        Lost("timeout"),
    ]
    assert sorted((tmp_path / "log").read_text().replace("sleep", "s")) == ["a", "b", "s"]


@pytest.mark.parametrize("workers", [0, -1])
def test_there_is_at_least_one_worker(workers):
    with pytest.raises(GraderError, match=f"reward.workers={workers}: must be at least 1, or null"):
        Scorer(RewardConfig(workers=workers))


def test_a_batch_after_an_interrupted_one_gets_none_of_its_answers(mine, monkeypatch):
    poll = ChildCalls.poll

    def interrupted(calls, **how):
        while not any(process.begun for process in calls._processes):
            poll(calls, wait=False)
        raise KeyboardInterrupt

    with Scorer(mine) as scorer:
        with monkeypatch.context() as patch:
            patch.setattr(ChildCalls, "poll", interrupted)
            with pytest.raises(KeyboardInterrupt):
                scorer.score([(row("yes", "my/data"), "yes")])
        assert [score.value for score in scorer.score([(row("yes", "my/data"), t) for t in ("no", "yes")])] == [0, 1]
        assert (scorer.timeouts, scorer.failures) == (0, 0)


# ---- code and judges -----------------------------------------------------------------------------------------------


def test_programs_go_to_the_sandbox_in_threads():
    seen = []

    def run(problem, text):
        seen.append(threading.current_thread() is not threading.main_thread())
        time.sleep(0.01 * len(text))
        return Score(float(text == "good"), {"acc": float(text == "good")}, text)

    items = [
        (row(TESTS, "taco"), "good"),
        (row(TESTS, "apps"), "bad"),
        (row("7"), r"\boxed{7}"),
        (row(TESTS, "apps"), ""),
    ]
    with Scorer(RewardConfig(), code=run) as scorer:
        assert [score.value for score in scorer.score(items)] == [1.0, 0.0, 1.0, 0.0]
    assert seen == [True] * 3


def test_a_judge_sees_the_whole_batch_after_the_rules_and_their_processes():
    batches = []

    def judge(items):
        batches.append([(text, rule.value, rule.answer) for _, text, rule in items])
        return [Score(0.5 + rule.value / 2, {"acc": rule.value}, rule.answer) for _, _, rule in items]

    items = [
        (row("5", "polaris_tinyv"), r"\boxed{5}"),
        (row("8", "polaris_tinyv"), r"\boxed{2+6}"),  # sympy first
        (row("5", "HardVerify-Math"), r"\boxed{six}"),
    ]
    with Scorer(RewardConfig(workers=1), judge=judge) as scorer:
        assert [score.value for score in scorer.score(items)] == [1.0, 1.0, 0.5]
    assert batches == [[(r"\boxed{5}", 1.0, "5"), (r"\boxed{2+6}", 1.0, "2+6"), (r"\boxed{six}", 0.0, "six")]]


def test_what_cannot_be_scored_is_refused_before_anything_is_generated():
    with Scorer(RewardConfig()) as scorer:
        scorer.check([row("7"), row("x > 3"), row("5", "openai/gsm8k")])
        with pytest.raises(GraderError, match=r"row c: scoring data_source 'taco' needs a sandbox"):
            scorer.check([row(TESTS, "taco", "c")])
        with pytest.raises(GraderError, match=r"row j: .*'x_tinyv' needs a judge; set judge\.url"):
            scorer.check([row("7"), row("5", "x_tinyv", "j")])
        with pytest.raises(DataError, match="row u: no scorer for data_source 'unknown'"):
            scorer.check([row("7"), row("7", "unknown", "u")])
        with pytest.raises(DataError, match="row n: ground truth of countdown must be"):
            scorer.check([row("7", "countdown", "n")])
        assert scorer._processes._processes == []
    with Scorer(RewardConfig(scorers={"mine": "no_such_module:score"})) as scorer:
        with pytest.raises(GraderError, match="no_such_module"):
            scorer.check([row("7", "mine")])
        with pytest.raises(ConfigError, match=r"reward\.scorers\.mine=no_such_module:score: no row matches"):
            scorer.check([row("7")])


# ---- users' scorers ------------------------------------------------------------------------------------------------

MINE = """
import os, time
from tandemrl.rewards import routing
from tandemrl.rewards.protocol import Score

def score(row, text, options):
    if text == "hang":
        time.sleep(60)
    if text == "crash":
        os._exit(1)
    if text == "bug":
        raise KeyError("oops")
    if text.startswith("return "):
        return eval(text.removeprefix("return "))
    right = text == row.ground_truth
    parts = {"acc": float(right), "chars": float(len(text)), "pid": float(os.getpid())}
    return Score(float(right), parts, text * 9999)

exact = score  # under a name that it may have in a sum

def turns(row, text, *, transcript, options=None):
    return len(transcript.messages) + (options is not None) / 2

NOT_A_FUNCTION = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch, without_math):
    (tmp_path / "my_scorers_for_tests.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield RewardConfig(scorers={"my/*": "my_scorers_for_tests:score"}, timeout_s=60.0, workers=1)
    sys.modules.pop("my_scorers_for_tests", None)


def test_a_users_scorer_runs_in_a_child_process(mine):
    threads = "__import__('threading')"  # the main one: functions may use signals
    main = f"return {threads}.current_thread() is {threads}.main_thread()"
    with Scorer(mine) as scorer:
        scores = scorer.score(
            [*((row("yes", "my/data"), text) for text in ("yes", "no", main)), (row("7"), r"\boxed{7}")]
        )
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 1.0]
    assert scores[1].parts["chars"] == 2.0
    assert scores[0].parts["pid"] != os.getpid()
    assert scores[0].answer == "yes" * 9999  # a reply longer than a pipe's buffer arrives whole


def test_a_users_scorer_that_hangs_or_crashes_is_killed_and_counted(mine):
    with Scorer(replace(mine, timeout_s=5.0)) as scorer:
        scores = scorer.score([(row("yes", "my/data"), text) for text in ("hang", "crash", "yes")])
        assert [score.value for score in scores] == [0.0, 0.0, 1.0]
        assert (scorer.timeouts, scorer.failures) == (1, 1)


def test_a_bug_in_a_users_scorer_stops_the_run(mine):
    with Scorer(mine) as scorer:
        for text, message in (
            ("bug", r"my_scorers_for_tests:score, row r: KeyError: 'oops'"),
            ("return None", r"my_scorers_for_tests:score, row r: expected a finite number, or Score\(.*found None"),
            *(
                (f"return (1, {{'acc': 1, {part!r}: 2}}, None)", "none of mean, std, score, length, .* among the parts")
                for part in ("length", "samples", "pass@1")
            ),
            *((f"return {value}", "row r: (expected a finite number|TypeError: bytes is not)") for value in UNUSABLE),
        ):
            with pytest.raises(GraderError, match=message):
                scorer.score([(row("yes", "my/data"), text), (row("yes", "my/data"), "yes")])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_scorers_for_tests:scroe", "has no attribute 'scroe'"),
        ("my_scorers_for_tests:NOT_A_FUNCTION", "is a int, not a function"),
        ("no_such_module:score", "No module named 'no_such_module'"),
        ("scroe", r"'scroe' is neither module:function nor one of the library's scorers, which are math, "),
    ],
)
def test_a_users_scorer_that_is_not_there_is_named(mine, path, message):
    with Scorer(RewardConfig(scorers={"my/*": path})) as scorer, pytest.raises(GraderError, match=message):
        scorer.score([(row("yes", "my/data"), "yes")])


def score_here(row, text, options):
    return eval(text)


def test_a_number_is_a_score_in_a_child_and_here(mine):
    wanted = {
        "0.5": Score(0.5, {"acc": 0.0}, None),
        "True": Score(1.0, {"acc": 1.0}, None),
        "-2": Score(-2.0, {"acc": 0.0}, None),
        "__import__('numpy').float32(1.5)": Score(1.5, {"acc": 1.0}, None),
        "__import__('numpy').bool_(True)": Score(1.0, {"acc": 1.0}, None),
        "Score(0, {'acc': True, 'style': 0.25}, 'x')": Score(0.0, {"acc": 1.0, "style": 0.25}, "x"),
    }
    with Scorer(mine) as scorer:
        told = scorer.score([(row("yes", "my/data"), f"return {value}") for value in wanted])
    with Scorer(RewardConfig(), functions={"mine": score_here}) as scorer:
        assert scorer.score([(row("yes", "my/data"), value) for value in wanted]) == told == list(wanted.values())


def test_functions_may_leave_the_options_out_and_are_asked_at_the_start():
    seen = []

    def two(row, text):
        seen.append((row.example_id, text))
        return 0.0

    def default(row, text, bonus=0.25):
        return bonus

    def keyword(row, text, options=None):
        return options.timeout_s

    rewards = by_name({"two": two, "default": default, "keyword": keyword, "partial": partial(default, bonus=4.0)})
    with Scorer(RewardConfig(timeout_s=7.0), functions=rewards) as scorer:
        scorer.check([row("yes", "my/data")])
        assert seen == []  # a check of the start calls nothing of the user's
        (score,) = scorer.score([(row("yes", "my/data"), "hi")])
    assert seen == [("r", "hi")]
    assert score == (11.25, {"acc": 0.0, "two": 0.0, "default": 0.25, "keyword": 7.0, "partial": 4.0}, None)

    assert list(by_name(lambda row, text: 0.0)) == ["reward"]
    assert list(by_name(two)) == ["two"]
    for bad, message in (
        ({"one": lambda row: 0.0}, r"reward one: its parameters are \(row\); expected \(row, text\)"),
        ({"path": "my:score"}, "reward path: 'my:score' is a str, not a function"),
        ({}, "no function"),
    ):
        with pytest.raises(GraderError, match=message):
            by_name(bad)


EPISODE = Transcript(({"role": "assistant", "content": "hi"}, {"role": "tool", "content": "3"}), {"found": [3]})


def test_who_asks_for_the_transcript_gets_it_here_and_in_a_child(mine):
    def may(row, text, transcript=None):
        return 0.0 if transcript is None else transcript.state["found"][0]

    one, other = row("yes", "my/data"), row("yes", "other")
    child = replace(mine, scorers={"my/*": "my_scorers_for_tests:turns"})
    with Scorer(child, functions=by_name(may)) as scorer:
        scorer.check([one, other], episodes=True)
        scores = scorer.score([(one, "a"), (other, "b"), (other, "c")], [EPISODE, EPISODE, None])
    assert [score.value for score in scores] == [2.5, 3.0, 0.0]


def quiet(row, text, options, transcript):
    return Score(1.0, {"acc": 1.0}, None)


def test_a_reward_that_reads_transcripts_is_refused_where_there_are_none(mine, monkeypatch):
    def must(row, text, transcript, options):
        return 1.0

    monkeypatch.setitem(routing.SCORERS, "quiet", f"{__name__}:quiet")
    message = r"row r: it reads the transcript of an episode, and .* set rollout\.environment"
    for scorers, functions, name in (
        ({"my/*": "my_scorers_for_tests:turns"}, None, "my_scorers_for_tests:turns"),
        ({"my/*": "quiet"}, None, "quiet"),
        ({}, by_name(must), "reward must"),
    ):
        with Scorer(replace(mine, scorers=scorers), functions=functions) as scorer:
            scorer.check([row("yes", "my/data")], episodes=True)
            for refused in (scorer.check, lambda rows: scorer.score([(rows[0], "a")])):
                with pytest.raises(GraderError, match=f"{name}, {message}"):
                    refused([row("yes", "my/data")])
    with pytest.raises(GraderError, match="reward bad: its parameters are"):
        by_name({"bad": lambda text, transcript: 0.0})


def test_rewards_are_summed_by_weight_whoever_settles_them(mine):
    """Strings, a child process and a function of this process in one sum; the first one's verdict counts."""
    sums = {"my/*": "prime + my_scorers_for_tests:exact + brevity", "short/*": "brevity"}
    options = replace(mine, scorers=sums, weights={"prime": 2.0, "brevity": -0.5})
    items = [
        (row("8", "my/data"), EIGHT),
        (row("8", "my/data"), "8"),
        (row("8", "short/data"), "four"),
        (row("7"), r"\boxed{7}"),
    ]
    with Scorer(options, functions={"brevity": lambda row, text: float(len(text))}) as scorer:
        scorer.check([row for row, _ in items])
        scores = scorer.score(items)
    right = [score_text(row("8", "AMC"), text).value for _, text in items[:2]]  # prime alone
    exact = [0.0, 1.0]
    assert [s.value for s in scores[:2]] == [
        2.0 * r + e - 0.5 * len(t) for r, e, (_, t) in zip(right, exact, items, strict=False)
    ]
    assert [s.parts["acc"] for s in scores[:2]] == right
    assert [(s.parts["prime"], s.parts["exact"], s.parts["brevity"]) for s in scores[:2]] == [
        (right[0], 0.0, float(len(EIGHT))),
        (right[1], 1.0, 1.0),
    ]
    assert scores[0].parts["chars"] == len(EIGHT)  # the parts of the others are kept
    assert (scores[2].value, scores[2].parts["brevity"]) == (-2.0, 4.0)  # a single reward is weighed, too
    assert scores[3] == (1.0, {"acc": 1.0, "answer_present": 1.0}, "7")


def test_a_reward_lost_on_every_response_is_an_error(mine):
    both = replace(mine, scorers={"my/*": "boxed + my_scorers_for_tests:exact"})
    items = [(row("7", "my/data"), "crash"), (row("7", "my/data"), r"\boxed{7}")]
    with Scorer(both) as scorer:
        crashed, scored = scorer.score(items)
        assert (crashed.parts["failure"], crashed.value, scored.value, scorer.failures) == (1.0, 0.0, 1.0, 1)
        with pytest.raises(GraderError, match="none of 2 responses could be scored"):
            scorer.score([items[0], (row("8", "my/data"), "crash")])


def test_a_part_that_goes_by_the_name_of_a_reward_is_kept_under_another():
    items = [(row("5", "polaris_tinyv"), r"\boxed{6}")]
    options = RewardConfig(scorers={"*": "boxed + judge"})
    with Scorer(options, judge=lambda items: [Score(0.5, {"acc": 0.0, "judge": 0.75}, None)]) as scorer:
        (score,) = scorer.score(items)
    assert (score.value, score.parts["judge"], score.parts["judge/part"]) == (0.5, 0.5, 0.75)


def test_no_call_pays_for_imports() -> None:
    calls = [("math.equality:equal", "x^2", "x x"), ("math.prime:equal", r"\sqrt{y}", "y^{1/2}")]
    program = f"""
import sys
from tandemrl.rewards.worker import FIRST_CALLS, call_by_name
for each in FIRST_CALLS:
    call_by_name(*each)
before = set(sys.modules)
for path, *answers in {calls!r}:
    call_by_name(f"tandemrl.tasks.{{path}}", *answers)
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
