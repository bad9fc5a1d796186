"""The report of a run that goes on, over HTTP."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from test_report import sample, write_phase

from tandemrl.apps.report import build_report
from tandemrl.apps.report.records import ReportError
from tandemrl.apps.report.watch import LiveReport, server
from tandemrl.evals.compare import CompareError, Contrast
from tandemrl.evals.stats import Interval


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    serving = server(LiveReport(run, lambda: build_report(run)), port=0, every_s=3)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()
    thread.join()


def steps(run: Path, count: int) -> None:
    (run / "config.yaml").write_text("train: {steps: 9}\n")
    lines = [{"step": step, "reward/mean": step / 10, "loss": 0.0} for step in range(1, count + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_appears_and_is_renewed_when_the_run_has_gone_on(run: Path, address: str) -> None:
    empty = httpx.get(address)
    assert "Nothing to report yet" in empty.text
    assert empty.headers["refresh"] == "3"
    steps(run, 3)
    first = httpx.get(address).text
    assert "<svg" in first
    assert httpx.get(address).text == first
    steps(run, 5)
    assert httpx.get(address).text != first


def test_arms_are_compared_anew_only_when_their_evaluations_have_changed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandemrl.apps.report import differences

    compared: list[tuple[Path, ...]] = []

    def compare(a: tuple[Path, ...], b: tuple[Path, ...]) -> list[Contrast]:
        compared.append(a)
        if len(compared) == 3:
            raise CompareError("other problems")
        return [Contrast("pass-at-k", "pass@1", 0.5, 0.25, Interval(len(compared), 0.1, 9.0), (), "A > B", 8)]

    monkeypatch.setattr(differences, "compare", compare)
    for arm in ("grpo", "tandem"):
        write_phase(run / "eval" / arm, "pass-at-k", {"pass@1": 0.5})
    live = LiveReport(run, lambda: build_report(run))
    pages = [live.html()]
    for count in (3, 4):
        steps(run, count)
        pages.append(live.html())
    assert (len(set(pages)), len(compared)) == (3, 1)
    samples = run / "eval" / "tandem" / "pass-at-k.samples.jsonl"
    samples.write_text(json.dumps(sample([1], "S1", "other text")) + "\n")
    assert "+2.00" in live.html()
    assert compared == [(run / "eval" / "tandem",)] * 2
    write_phase(run / "eval" / "grpo", "pass-at-k", {"pass@1": 0.25})
    for count in (5, 6):
        steps(run, count)
        assert "cannot be compared: other problems" in live.html()
    assert len(compared) == 3


def test_only_this_machine_and_only_the_page_are_answered(run: Path, address: str) -> None:
    assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 403
    assert httpx.get(f"{address}/../metrics.jsonl").status_code == 404
    assert "default-src 'none'" in httpx.get(address).headers["content-security-policy"]


def test_a_port_in_use_is_named(run: Path, address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(ReportError, match=rf"port {port} of 127\.0\.0\.1: .* choose another --port, or 0 for any"):
        server(LiveReport(run, lambda: build_report(run)), port=port, every_s=3)
