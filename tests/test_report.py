import json

import pytest

from tandemrl.report import ReportError, learning_curves, summary_table, write_report


def result(**metrics):
    macro = {}
    for name, value in metrics.items():
        name = name.replace("__", "/").replace("pass_1", "pass@1")
        macro |= {name: value, f"{name}/low": value - 0.01, f"{name}/high": value + 0.02}
    return {"metrics": {"macro": macro, "by_set": {}}}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_summary_table_has_a_row_per_model_and_a_column_per_headline():
    table = summary_table(
        {
            "base": {"pass-at-k": result(pass_1=0.5), "legibility": result(cross_entropy=0.36)},
            "tandem": {
                "pass-at-k": result(pass_1=0.95),
                "tandem": result(pass_1=0.8),
                "legibility": {"metrics": {"macro": {"cross_entropy": 0.3}}},
                "handoff": result(pass_1=0.65, senior_first__pass_1=0.7, junior_first__pass_1=0.6),
            },
        }
    )
    header, rule, base, tandem = map(cells, table.splitlines())
    assert len(header) == len(rule) == len(base) == len(tandem) == 6
    found = {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in (base, tandem)}
    assert found["base"]["solo pass@1"] == "0.500 [0.490, 0.520]"
    assert found["base"]["junior CE (nats/token)"] == "0.360 [0.350, 0.380]"
    assert found["base"]["tandem pass@1"] == "–"
    assert found["tandem"]["tandem pass@1"] == "0.800 [0.790, 0.820]"
    assert found["tandem"]["handoff, senior first"] == "0.700 [0.690, 0.720]"
    assert found["tandem"]["handoff, junior first"] == "0.600 [0.590, 0.620]"
    assert found["tandem"]["junior CE (nats/token)"] == "0.300"


def test_learning_curves_quote_the_first_the_last_and_the_mean_of_the_last_five(tmp_path):
    rewards = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.9]
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": i, "reward/mean": reward} for i, reward in enumerate(rewards)] + [{"step": 7, "loss": 1.0}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    row = cells(learning_curves({"GRPO": file}).splitlines()[-1])
    assert row == ["GRPO", "7", "0.100", "0.900", "0.540"]
    assert cells(learning_curves({"GRPO": file}, "loss").splitlines()[-1]) == ["GRPO", "1", "1.000", "1.000", "1.000"]


def test_learning_curves_name_the_bad_file(tmp_path):
    file = tmp_path / "metrics.jsonl"
    with pytest.raises(ReportError, match=r"metrics\.jsonl"):
        learning_curves({"a": file})
    file.write_text('{"step": 1, "reward/mean": null}\n')
    with pytest.raises(ReportError, match="no step has 'reward/mean'"):
        learning_curves({"a": file})
    file.write_text("{")
    with pytest.raises(ReportError, match="not readable"):
        learning_curves({"a": file})


def test_write_report_is_atomic(tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    write_report(file, "Report", ["| a |\n", "Text."])
    assert file.read_text() == "# Report\n\n| a |\n\nText.\n"

    def fail(*args):
        raise OSError("killed")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="killed"):
        write_report(file, "Other", [])
    assert file.read_text() == "# Report\n\n| a |\n\nText.\n"
