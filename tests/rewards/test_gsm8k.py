"""The GSM8K config end to end on the real files: train, resume, export, evaluate the export. Needs the data."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandemrl.cli.main import app

DATA = Path(os.environ.get("TANDEMRL_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"

pytestmark = pytest.mark.skipif(
    not (DATA / "train.jsonl").is_file(), reason="no GSM8K files; set TANDEMRL_DATA to the folder above gsm8k/"
)


def tandemrl(*arguments: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_three_steps_resume_export_and_evaluate(tiny_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    tandemrl("data", "build", "gsm8k", "--source", str(DATA), "--out", str(tmp_path / "data"))
    command = [
        "train",
        *("--config", "gsm8k_tandem.yaml", f"output_dir={out}", "train.threads=1", "train.save_every=1"),
        *(f"model.senior={tiny_pair}/senior", f"model.junior={tiny_pair}/junior", "model.device=cpu"),
        *(f"data.train={tmp_path}/data/train.parquet", f"data.eval={tmp_path}/data/heldout.parquet"),
        *("rollout.max_tokens=32", "eval.max_tokens=32", "eval.train_problems=4", "train.prompts_per_step=8"),
    ]
    tandemrl(*command, "train.steps=2")
    tandemrl(*command, "train.steps=3")
    first, *steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in (first, *steps)] == [0, 1, 2, 3]
    assert all(line["mismatch/mean_abs"] < 2e-2 for line in steps)
    assert all(0.3 < line["tandem/senior_draw_frac"] < 0.7 for line in steps)

    evaluate = ["eval", "pass-at-k", "--model", str(out / "hf" / "step_3"), "--data", str(DATA / "test.jsonl")]
    tandemrl(*evaluate, "--limit", "8", "--samples", "2", "--k", "1,2", "--out", str(tmp_path / "eval"))
    result = json.loads((tmp_path / "eval" / "pass-at-k.json").read_text())
    assert result["schema"] == 1
    assert 0.0 <= result["metrics"]["by_set"]["openai/gsm8k"]["pass@1"] <= 1.0
