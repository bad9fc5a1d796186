"""The loop as a whole: it learns what it should, stops when it must, and resumes as if nothing had happened."""

import gzip
import io
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from helpers import prepared, qwen3
from runs import SMALL, assert_same_run, config, kill, lines, metrics, timeless, weights
from tandemrl.config import ConfigError, load, with_steps
from tandemrl.data.rows import Prompt, Row
from tandemrl.evals import EvalResult
from tandemrl.losses import RECIPES
from tandemrl.models.head import ForwardOptions
from tandemrl.models.sampling import Truncation
from tandemrl.processes.world import World
from tandemrl.rollout.engine import Draws
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import bernoulli
from tandemrl.training import build as build_module
from tandemrl.training import checkpoint, evaluation, loop
from tandemrl.training.build import build
from tandemrl.training.checkpoint import CheckpointError, DamagedError, latest, lock, restore, runs
from tandemrl.training.evaluation import evaluate
from tandemrl.training.gates import TrainError, check_draws, check_mismatch, mismatch_limit, self_difference
from tandemrl.training.loop import train
from tandemrl.training.preflight import Preflight
from tandemrl.training.tracking import Tracker
from tandemrl.training.update import learning_rate, logprob_mismatch


@pytest.fixture(scope="module")
def finished(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of six steps."""
    return train(config(tiny_pair, tmp_path_factory.mktemp("run") / "whole", "train.steps=6"), quiet=True)


def test_a_run_leaves_its_files(finished: Path) -> None:
    assert [line["step"] for line in metrics(finished)] == [1, 2, 3, 4, 5, 6]
    required = {"reward/mean", "loss", "grad_norm", "tandem/senior_frac", "tandem/senior_draw_frac"}
    required |= {"mismatch/mean_abs", "weights/version_lag", "time/step", "time/rollout", "tokens/response"}
    for line in metrics(finished):
        assert required <= line.keys()
        assert line["weights/version_lag"] == 0
        assert line["mismatch/mean_abs"] < 1e-5
        assert line["grad_norm"] >= 0
    assert "eval/pass@1" in metrics(finished)[1]
    assert (finished / "config.yaml").is_file()
    assert (finished / "hf" / "best" / "config.json").is_file()
    samples = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6 * 16
    assert {author for author in samples[0]["author"]} <= {-1, 0, 1}


def test_what_is_watched_and_what_is_thrown_away_changes_nothing_else(
    tiny_pair: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Monitoring and few exports, in a run that fails once and goes on."""
    keys = ["data.monitor=synthetic:plain:heldout:16", "train.keep_exports=1", "train.keep_checkpoints=1"]
    watched = config(tiny_pair, tmp_path, "train.steps=6", *keys)
    with monkeypatch.context() as patched:
        patched.setattr(Tracker, "step", failing(Tracker.step, at=5))
        with pytest.raises(RuntimeError, match="step 5"):
            train(watched, quiet=True)
    assert {folder.name for folder in (tmp_path / "hf").iterdir()} == {"best", "step_4"}
    screen = io.StringIO()
    out = train(watched, console=Console(file=screen, width=200))

    assert {folder.name for folder in (out / "hf").iterdir()} == {"best", "step_6"}
    assert "removed hf/step_4 (train.keep_exports=1)" in screen.getvalue()
    lines = timeless(out)
    assert [{k: v for k, v in line.items() if not k.startswith("monitor/")} for line in lines] == timeless(finished)
    a, b = weights(finished, 6), weights(out, 6)
    assert all(torch.equal(a[name], b[name]) for name in a)
    evaluated = [line for line in lines if "eval/pass@1" in line]
    assert [line["step"] for line in evaluated] == [2, 4, 6]
    for line in evaluated:  # the same problems here, and so the same values
        held = {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
        assert {name: line[f"monitor/{name}"] for name in held} == held
        assert line["monitor/synthetic/plain/pass@2"] == held["pass@2"]
    assert (out / "samples.jsonl").read_bytes() == (finished / "samples.jsonl").read_bytes()


def failing(original: Callable[..., None], at: int) -> Callable[..., None]:
    def step(self: Tracker, number: int, metrics: dict[str, float]) -> None:
        if number == at:
            raise RuntimeError(f"step {at}")
        original(self, number, metrics)

    return step


def test_monitored_problems_do_not_choose(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build(config(tiny_pair, tmp_path, "data.monitor=synthetic:plain:train:3"))
    assert len(run.setup.preflight.monitored.prompts) == 3
    score, exported = {4: 0.25, 3: 0.75}, []

    def graded(_: object, prompts: Sequence[object], *_rest: object) -> EvalResult:
        values = dict.fromkeys(("pass@1", "pass@2", "reward", "length", "truncation_rate"), score[len(prompts)])
        return EvalResult({"macro": values, "by_set": {"a set": values}}, [])

    monkeypatch.setattr(evaluation, "evaluate_solo", graded)
    monkeypatch.setattr(checkpoint, "export", lambda run, name, step: exported.append(name))
    first = evaluate(run, 1)
    assert (first["eval/pass@2"], first["monitor/pass@2"], first["monitor/a set/pass@1"]) == (0.25, 0.75, 0.75)
    score[3] = 1.0
    evaluate(run, 1)
    assert (run.progress.best.values["pass@2"], exported) == (0.25, ["best"] * 2)
    score[4] = 0.5
    evaluate(run, 1)
    assert (run.progress.best.values["pass@2"], exported) == (0.5, ["best"] * 3)


MOMENTS = [  # in a run of six steps that saves after every second: a function, which call of it, and whether before it
    ("tandemrl.training.tracking:Tracker.step", 1, False),  # before the first checkpoint
    ("tandemrl.training.tracking:Tracker.step", 3, False),  # after one, with a line logged that must go again
    ("tandemrl.training.checkpoint.storage:save", 1, True),  # step 4 exported, its checkpoint not written
    ("tandemrl.training.update:update_policy", 2, False),  # step 4 again: weights updated, nothing logged
    ("tandemrl.training.tracking:Tracker.samples", 3, True),  # step 5 evaluated, not logged
]


@pytest.mark.parametrize(
    "moments", [[MOMENTS[i] for i in (1, 2, 4)], pytest.param(MOMENTS, marks=pytest.mark.slow)], ids=["some", "any"]
)
def test_resume_equals_uninterrupted_after_a_kill_at_any_moment(
    moments: Sequence[tuple[str, int, bool]], tiny_pair: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    overrides = [*SMALL, f"model.senior={tiny_pair}/senior", f"model.junior={tiny_pair}/junior", "train.steps=6"]
    (empty := tmp_path / "empty.yaml").write_text("train: {}\n")
    for function, call, before in moments:
        kill(["train", "--config", str(empty), *overrides, f"output_dir={out}"], function, call, before=before)
    assert latest(out) == out / "checkpoints" / "step_4"
    train(config(tiny_pair, out, "train.steps=6"), quiet=True)
    assert_same_run(finished, out, step=6)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut(file: Path, step: int) -> None:
    """Tear a record inside the first line of a step."""
    content = file.read_bytes()
    file.write_bytes(content[: content.index(f'"step": {step},'.encode()) + 4])


def without(file: Path, step: int) -> None:
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] != step))


DAMAGE = {  # the run is saved after steps 4 and 6: what is damaged, and what is said of it
    "metrics torn in step 2": (lambda out: cut(out / "metrics.jsonl", 2), r"metrics\.jsonl: cut, changed or gone"),
    "samples torn in step 6": (lambda out: cut(out / "samples.jsonl", 6), r"samples\.jsonl: cut"),
    "a metrics line less": (lambda out: without(out / "metrics.jsonl", 5), r"metrics\.jsonl: cut"),
    "no metrics": (lambda out: (out / "metrics.jsonl").unlink(), r"metrics\.jsonl: cut, changed or gone"),
}


def test_damage_is_refused_with_the_way_out_and_nothing_is_touched(
    tiny_pair: Path, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = build(config(tiny_pair, out, "train.steps=8"))
    for name, (damage, message) in DAMAGE.items():
        shutil.copytree(finished, out)
        damage(out)
        before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
        with pytest.raises(DamagedError, match=message) as error:
            restore(run, "auto")
        assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before, name
        assert str(error.value).endswith(f"again: --resume {out}/checkpoints/step_4"), name
        shutil.rmtree(out)
    copy = shutil.copytree(finished / "checkpoints" / "step_6", tmp_path / "a copy")
    flip(copy / "state.pt")
    with pytest.raises(DamagedError, match=r"a copy/state\.pt: .*No older checkpoint is in"):
        restore(run, str(copy))


def test_the_way_out_leads_to_the_same_run(
    tiny_pair: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past a damaged checkpoint, a torn record, and folders of others: back to a checkpoint that is named."""
    out = shutil.copytree(finished, tmp_path / "run")
    assert latest(out) == out / "checkpoints" / "step_6"
    flip(out / "checkpoints/step_6/tensors/__0_0.distcp")
    cut(out / "metrics.jsonl", 5)
    for foreign in ("checkpoints/step_999", "hf/step_final", "hf/step_9.bak"):
        (out / foreign).mkdir()
    again = config(tiny_pair, out, "train.steps=6")
    with pytest.raises(DamagedError) as error:
        train(again, quiet=True)
    way_out = re.search(r"again: --resume (\S+)", str(error.value))
    assert way_out is not None
    computed = Mock(side_effect=runs.reward_names)
    monkeypatch.setattr(runs, "reward_names", computed)
    train(again, resume=way_out[1], quiet=True)
    assert_same_run(finished, out, step=6)
    assert computed.call_count == 1  # when the run was compared with its past, and not again at each save
    assert (out / "hf" / "step_final").is_dir()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ("grpo", "ppo")])  # trained elsewhere
def test_every_recipe_trains(name: str, tiny_pair: Path, tmp_path: Path) -> None:
    mini_batches = [] if name == "rloo" else ["train.mini_batch_prompts=2"]
    short = ["train.steps=1", "train.eval_every=0", *mini_batches]
    out = train(config(tiny_pair, tmp_path, *short, f"loss.recipe={name}"), quiet=True)
    trained = [line for line in metrics(out) if line["updates"] > 0]
    assert trained
    assert any(line["grad_norm"] > 0 for line in trained)
    assert all(line["ratio"] == pytest.approx(1.0, abs=0.2) for line in trained)


@pytest.mark.parametrize(
    "extra",
    [
        "model.junior=null selection.strategy=alternating loss.kl_coef=0.05 loss.filter_zero_variance=true "
        "loss.filter_truncated=true",
        "loss.kl_coef=0.05 loss.kl_in_reward=true loss.importance=token train.tokens_per_micro_batch=192 "
        "selection.strategy=chunk selection.chunk_size=4",
        "loss.junior_kl_coef=0.1 loss.entropy_coef=0.01 loss.junior_weight=0.5 loss.normalise_by=response "
        "train.schedule=cosine train.warmup_steps=2 selection.strategy=word_aligned",
        "loss.importance=sequence loss.overlong_buffer=8 selection.strategy=sentence selection.first=junior "
        "rollout.top_p=0.9 rollout.top_k=50 rollout.temperature=0.7 rollout.allow_truncated=true",
        "selection.strategy=bernoulli selection.prob_senior_final=0.9 selection.anneal_steps=2 model.dtype=bfloat16 "
        "model.gradient_checkpointing=true loss.kl_coef=0.1",
    ],
)
def test_every_knob_trains_and_matches_the_engine(extra: str, tiny_pair: Path, tmp_path: Path) -> None:
    out = train(config(tiny_pair, tmp_path, "train.steps=2", "train.eval_every=0", *extra.split()), quiet=True)
    low = "model.dtype=bfloat16" in extra
    limit = 2e-2 if low else 1e-5
    assert all(line.get("mismatch/mean_abs", 0.0) <= limit for line in metrics(out))
    assert not low or metrics(out)[0]["ref_kl"] == 0.0  # the reference starts at exactly no divergence


def test_a_senior_beside_itself_writes_and_learns_the_same(tiny_pair: Path, tmp_path: Path) -> None:
    """Both models draw tokens from the same random numbers, so tandem alone changes neither texts nor rewards. With all
    tokens in the loss it takes GRPO's step: what tandem GRPO does otherwise is to leave tokens out."""
    senior, keys = tiny_pair / "senior", ["train.steps=1", "train.eval_every=0"]
    alone = ["model.junior=null", "selection.strategy=solo"]
    beside = [f"model.junior={senior}"]
    solo, tandem, apart = (
        train(config(tiny_pair, tmp_path / name, f"model.senior={senior}", *keys, *more), quiet=True)
        for name, more in (("solo", alone), ("tandem", [*beside, "loss.junior_weight=1"]), ("apart", beside))
    )
    told = [[(line["text"], line["reward"]) for line in lines(out / "samples.jsonl")] for out in (solo, tandem, apart)]
    assert told[0] == told[1] == told[2]
    assert 0.3 < metrics(tandem)[0]["tandem/senior_frac"] < 0.7
    assert metrics(tandem)[0]["grad_norm"] > 0
    a, b, c = (weights(out, 1) for out in (solo, tandem, apart))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)


def test_own_recipe_and_strategy(tiny_pair: Path, tmp_path: Path) -> None:
    mine = {
        "recipe": RECIPES["grpo"]._replace(name="mine", advantage=lambda rewards, group_ids: rewards - rewards.mean()),
        "strategy": bernoulli(0.25),
    }
    out = train(config(tiny_pair, tmp_path, "train.steps=2", "train.eval_every=0"), **mine, quiet=True)
    assert all(0.1 < line["tandem/senior_draw_frac"] < 0.4 for line in metrics(out))

    for folder in (out, out / "checkpoints" / "step_2"):  # both say what trained, and do not train something else
        stored = load(folder / "config.yaml")
        assert "every_step" in stored.functions.strategy.name
        assert stored.functions.recipe.name == "recipe mine"
        with pytest.raises(ConfigError, match=r"functions\.recipe: .* passed is none"):
            train(stored, quiet=True)
    assert train(stored, **mine, quiet=True) == out


def test_own_rewards_beside_the_library_s_by_weight(tiny_pair: Path, tmp_path: Path) -> None:
    """A closure of this process and a scorer of the library, for training rows; the held-out rows have their own."""

    def brevity(row: Row, text: str) -> float:
        return -abs(len(text) - 12) / 12

    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"question": f"{i} plus 1?", "answer": f"#### {i + 1}"}) for i in range(4)))
    sums = ["reward.scorers.synthetic/*=boxed + brevity", "reward.weights.brevity=0.5"]
    sums += ["reward.scorers.openai/*=gsm8k", f"data.eval={rows}", "train.steps=1", "train.eval_every=1"]
    settings = config(tiny_pair, tmp_path / "out", *sums)
    out = train(settings, reward=brevity, quiet=True)
    (line,) = metrics(out)
    samples = [json.loads(each) for each in (out / "samples.jsonl").read_text().splitlines()]
    texts = [sample["text"].removesuffix("<|im_end|>") for sample in samples]
    short = np.array([-abs(len(text) - 12) / 12 for text in texts])
    right = np.array([sample["reward_parts"]["boxed"] for sample in samples])
    assert set(right) <= {0.0, 1.0}
    assert [sample["reward"] for sample in samples] == pytest.approx(list(right + 0.5 * short))
    total = np.mean(right + 0.5 * short)
    expected = {"mean": total, "boxed": right.mean(), "brevity": short.mean(), "acc": right.mean()}
    assert {name: line[f"reward/{name}"] for name in expected} == pytest.approx(expected)
    assert "brevity=test_train." in load(out / "config.yaml").functions.reward.name


# --------------------------------------------------------------------------------------------------------------- gates


def test_draw_gate() -> None:
    check_draws(Draws(10_000, 5_100), 0.5)
    check_draws(Draws(0, 0), 0.5)
    check_draws(Draws(100, 100), 1.0)
    with pytest.raises(TrainError, match=r"selection\.prob_senior"):
        check_draws(Draws(10_000, 5_301), 0.5)
    with pytest.raises(TrainError):
        check_draws(Draws(100, 99), 1.0)
    check_draws(Draws(10_000, 5_301), 0.5, copies=4)
    with pytest.raises(TrainError):
        check_draws(Draws(10_000, 5_601), 0.5, copies=4)


def test_a_group_draws_its_authors_together(tiny_pair: Path, tmp_path: Path) -> None:
    keys = ["selection.strategy=bernoulli", "selection.draws=per_group", "train.steps=1", "train.eval_every=0"]
    out = train(config(tiny_pair, tmp_path / "run", *keys), quiet=True)
    by_example = dict[str, list[list[int]]]()
    lines = [json.loads(line) for line in (out / "samples.jsonl").open()]
    for line in lines:
        by_example.setdefault(line["example_id"], []).append([who for who in line["author"] if who >= 0])
    assert len(by_example) > 1
    for authors in by_example.values():
        assert all(author == other for each in authors for author, other in zip(each, authors[0], strict=False))
    assert len({line["text"] for line in lines}) > 2 * len(by_example)  # the tokens are drawn for each by itself
    assert len({tuple(authors[0][:12]) for authors in by_example.values()}) > 1


def test_the_mismatch_limit_is_a_default_per_dtype_or_the_number_given() -> None:
    def never() -> float:
        raise AssertionError("the limit does not depend on it")

    bfloat16 = ["model.dtype=bfloat16"]
    assert mismatch_limit(load(), never) == 1e-3
    assert mismatch_limit(load(overrides=[*bfloat16, "train.max_logprob_mismatch=0.01"]), never) == 0.01
    assert mismatch_limit(load(overrides=bfloat16), lambda: 0.004) == 2e-2
    assert mismatch_limit(load(overrides=bfloat16), lambda: 0.03) == pytest.approx(0.12)
    for coarse in (0.13, math.inf, math.nan):
        with pytest.raises(ConfigError, match=rf"by {coarse:.2g} nats.*model\.dtype=float32.*max_logprob_mismatch"):
            mismatch_limit(load(overrides=bfloat16), lambda moved=coarse: moved)  # type: ignore[misc]
        assert mismatch_limit(load(overrides=[*bfloat16, "train.max_logprob_mismatch=2"]), never) == 2


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_self_difference_is_that_of_the_stock_model(top_k: int) -> None:
    """The expected |difference| of a drawn token, over the last 64 places of each of the shortest prompts."""
    stock = qwen3()
    rows = np.random.default_rng(0).integers(0, 30, (4, 70)).tolist()
    given = [Prompt(Row("", (), "", "", {}), tuple(row)) for row in [*rows[:2], rows[2] * 2, rows[3] * 3]]
    options = ForwardOptions(temperature=0.7, truncation=Truncation(top_k, 1.0, 0.0) if top_k else None)
    noise = 2 * torch.rand((1, 140, 32), generator=torch.Generator().manual_seed(0)) - 1

    def logprobs(scale: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Of the tokens, after renormalising over those that can be drawn; and which those are."""
        embedded = stock.get_input_embeddings()(torch.tensor(rows[:2])) * scale.reshape(2, 70, 32)
        z = stock(inputs_embeds=embedded).logits[:, 6:].double().detach().numpy() / 0.7
        drawn = z >= np.sort(z, axis=-1)[..., [-top_k]] if top_k else np.ones_like(z, dtype=bool)
        return z - np.log((np.exp(z) * drawn).sum(-1, keepdims=True)), drawn

    (plain, drawn), (moved, _) = logprobs(torch.ones_like(noise)), logprobs(1 + noise / 256)
    expected = (np.exp(plain) * np.abs(moved - plain) * drawn).sum(-1).mean()
    got = self_difference(
        prepared(stock), given, options=options, dtype=torch.bfloat16, world=World(), device=torch.device("cpu")
    )
    assert got == pytest.approx(expected, rel=1e-3)
    assert got > 1e-4


def test_the_mismatch_gate_names_difference_and_limit() -> None:
    check_mismatch(1e-3, 9e-4)
    with pytest.raises(TrainError, match=r"differ by 0\.0011 .* \(limit 0\.001\).*train\.max_logprob_mismatch"):
        check_mismatch(1e-3, 1.1e-3)
    with pytest.raises(TrainError):
        check_mismatch(1e-3, float("nan"))


@pytest.fixture(scope="module")
def coarse_pair(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with a number added to all logits of a place: the same model, but in bfloat16 its logits are
    coarse, as those of large models are."""
    folder = tmp_path_factory.mktemp("coarse")
    shutil.copytree(tiny_pair, folder, dirs_exist_ok=True)
    for name in ("senior", "junior"):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.lm_head.weight.data[:, 0] += 200.0
        model.save_pretrained(folder / name)
    return folder


def test_in_bfloat16_the_mismatch_gate_knows_how_the_model_rounds(
    coarse_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stopped such a run was its own rounding; a wrong weight in the engine still stops it."""
    low = ["model.dtype=bfloat16", "rollout.temperature=2.0", "train.steps=2", "train.eval_every=0"]
    setup = build(config(coarse_pair, tmp_path / "built", *low)).setup
    out = train(config(coarse_pair, tmp_path / "right", *low), quiet=True)
    for line in metrics(out):
        assert 2e-2 < line["mismatch/mean_abs"] < setup.mismatch_limit
    again = build(config(coarse_pair, tmp_path / "right", *low)).setup  # from there a resumed run goes on
    assert again.mismatch_limit == setup.mismatch_limit

    generate = TorchEngine.generate

    def with_a_wrong_weight(self, requests, **options):
        weight = self.senior.model.layers[0].mlp.down_proj.weight
        weight.data.neg_()
        completions = generate(self, requests, **options)
        weight.data.neg_()
        return completions

    monkeypatch.setattr(TorchEngine, "generate", with_a_wrong_weight)
    with pytest.raises(TrainError, match="stale or wrong weights"):
        train(config(coarse_pair, tmp_path / "wrong", *low), quiet=True)


def test_mismatch_metrics_against_numpy() -> None:
    """An extreme token counts as exp(20); no token at all, nothing."""
    d = np.random.default_rng(0).normal(0.05, 0.3, 500).astype(np.float32)
    for gaps in (d, np.append(d, np.float32(31.0))):
        w = np.exp(np.minimum(gaps.astype(np.float64), 20.0))
        expected = {
            "mean_abs": np.abs(gaps).mean(),
            "max_abs": np.abs(gaps).max(),
            "ess": 1 / (len(w) * np.square(w / w.sum()).sum()),
            "perplexity_ratio": np.exp(-gaps.astype(np.float64)).prod() ** (1 / len(gaps)),
        }
        got = logprob_mismatch(World(), torch.from_numpy(gaps))
        assert got == pytest.approx({f"mismatch/{name}": value for name, value in expected.items()})
    assert logprob_mismatch(World(), torch.zeros(0)) == {}
    assert logprob_mismatch(World(), torch.zeros(3))["mismatch/ess"] == 1.0


# ----------------------------------------------------------------------------------------------------------- schedules


def test_learning_rate() -> None:
    c = load(overrides=["train.lr=1.0", "train.warmup_steps=4", "train.steps=12", "train.schedule=cosine"])
    rates = [learning_rate(c.train, step, c.train.lr) for step in range(1, 13)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[8] == pytest.approx(0.5)
    assert all(a > b > 0 for a, b in pairwise(rates[4:]))
    assert {learning_rate(load().train, step, 1.0) for step in (1, 10)} == {1.0}


def test_a_junior_with_fewer_logits_than_the_senior(tiny_pair: Path, tmp_path: Path) -> None:
    """Padded vocabularies differ in width; trainer and engine normalise over the same tokens all the same."""
    senior = AutoModelForCausalLM.from_pretrained(tiny_pair / "senior")
    senior.resize_token_embeddings(senior.config.vocab_size + 200, mean_resizing=False)
    with torch.no_grad():
        senior.get_input_embeddings().weight[-200:] = 1.0  # tied: the extra logits get real probability
    senior.save_pretrained(tmp_path / "senior")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "senior" / name).write_bytes((tiny_pair / "senior" / name).read_bytes())
    wide = config(tiny_pair, tmp_path / "run", f"model.senior={tmp_path}/senior", "train.steps=1", "train.eval_every=0")
    assert metrics(train(wide, quiet=True))[0]["mismatch/mean_abs"] < 1e-5


def test_every_held_out_source_is_evaluated(tiny_pair: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"question": f"{i} plus 1?", "answer": f"#### {i + 1}"}) for i in range(9)))
    heldout = Preflight(config(tiny_pair, tmp_path, f"data.eval=[synthetic:plain:heldout:16,{rows}]")).heldout.prompts
    assert [prompt.row.data_source for prompt in heldout].count("openai/gsm8k") == 4
    assert len(heldout) == 8


def test_prompts_of_few_hops_come_first(tiny_pair: Path, tmp_path: Path) -> None:
    hops = [3, 2, 4, 2, 3, 2]
    problem = {"prompt": "1 plus 1?", "data_source": "math500", "reward_model": {"ground_truth": "2"}}
    rows = [problem | {"extra_info": {"n_hops": n}} for n in hops]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    by_hops = config(tiny_pair, tmp_path, f"data.train=[{tmp_path}/rows.jsonl]", "data.order=by_hops")
    assert [hops[row] for row in build(by_hops).progress.sampler.next(12)] == [2, 2, 2, 3, 3, 4] * 2


@pytest.mark.parametrize("name", ["make_optimizer", "mismatch_limit"])
def test_the_engine_of_a_run_that_cannot_be_built_is_closed(
    name: str, tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[TorchEngine] = []
    monkeypatch.setattr(TorchEngine, "close", lambda engine: closed.append(engine))

    def no_memory(*_: Any, **__: Any) -> Any:
        assert not closed
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build_module, name, no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        build(config(tiny_pair, tmp_path))
    assert len(closed) == 1


def test_two_processes_cannot_write_one_folder(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "build", lambda *_, **__: pytest.fail("something was started"))
    with lock(tmp_path), pytest.raises(CheckpointError, match="another process is training there"):
        train(config(tiny_pair, tmp_path), quiet=True)


def test_resume_refuses_another_recipe_and_other_frozen_weights(tiny_pair: Path, finished: Path) -> None:
    same = config(tiny_pair, finished, "train.steps=6")
    with pytest.raises(CheckpointError, match="another recipe"):
        train(same, recipe=RECIPES["cispo"], quiet=True)
    run = build(same)
    with torch.no_grad():
        run.models.engine.models[0].get_input_embeddings().weight[0, 0] += 1
    with pytest.raises(CheckpointError, match="another junior"):
        restore(run, "auto")


# ----------------------------------------------------------------------------------------------------------------- time


def test_a_profiled_run_accounts_for_its_time(tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.profile=true", "train.steps=2", "loss.kl_coef=0.1", "train.mini_batch_prompts=2")
    out = train(config(tiny_pair, tmp_path / "run", *extra), quiet=True)
    last = metrics(out)[-1]
    inner = ["update/logprobs", "update/forward_backward", "update/forward_backward/optimizer"]
    outer = ["rollout", "score", "update", "sync", "eval"]
    times = {name.removeprefix("time/"): value for name, value in last.items() if name.startswith("time/")}
    assert times.keys() == {*inner, *outer, "step"}
    assert 0.8 * times["step"] < sum(times[name] for name in outer) <= times["step"]
    assert sum(times[name] for name in inner[:2]) <= times["update"]
    assert (out / "profile" / "trace_rollout.json.gz").exists()
    with gzip.open(out / "profile" / "trace_update.json.gz") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"update/logprobs", "update/forward_backward", "aten::mm"} <= names


# ------------------------------------------------------------------------------------------------------ length of a run


SHORT = ["train.prompts_per_step=4", "train.eval_every=1", "train.save_every=1", "rollout.max_tokens=16"]


@pytest.mark.parametrize(
    ("epochs", "prompts", "steps"), [(1, 64, 16), (2.5, 19, 10), (0.01, 64, 1), (15, 327_680, 1_228_800)]
)
def test_epochs_are_whole_batches(epochs: float, prompts: int, steps: int) -> None:
    given = load(overrides=[f"train.epochs={epochs}", "train.prompts_per_step=4"])
    assert with_steps(given, prompts).train.steps == steps
    assert with_steps(load(), prompts) == load()


def test_a_run_of_an_epoch_over_a_few_rows_goes_on_for_another(tiny_pair: Path, tmp_path: Path) -> None:
    first = config(tiny_pair, tmp_path, *SHORT, "data.limit=9", "train.epochs=1")
    train(first, quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]
    stored = load(tmp_path)
    assert (stored.train.epochs, stored.train.steps, stored.data.limit) == (1.0, 2, 9)
    train(config(tiny_pair, tmp_path, *SHORT, "data.limit=9", "train.epochs=1.5"), quiet=True)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    drawn = {line["example_id"] for line in lines(tmp_path / "samples.jsonl")}
    assert len(drawn) <= 9
    # The texts of each evaluation: the senior's alone, those that pass@1 was computed from.
    for line in metrics(tmp_path):
        kept = lines(tmp_path / "eval_texts" / f"step_{line['step']}.jsonl")
        assert len(kept) == 4 * 2  # eval.train_problems, eval.train_samples
        assert sum(text["correct"] for text in kept) / 8 == pytest.approx(line["eval/pass@1"])
        assert {(text["source"], set(text["author"][0])) == ("eval", {"S"}) for text in kept} == {True}
        assert all(text["text"] for text in kept)


# -------------------------------------------------------------------------------------------------------- ends of words


MORE = [
    "train.async_steps=1",
    "train.mini_batch_prompts=2",
    "loss.kl_coef=0.1",
    "loss.kl_in_reward=true",
    "loss.junior_kl_coef=0.1",
    "loss.junior_weight=0.5",
    "loss.importance=sequence",
    "rollout.top_k=20",
    "rollout.allow_truncated=true",
]


@pytest.mark.parametrize("more", [MORE, ["loss.recipe=gspo", "loss.word_ends=false"]], ids=["more", "without"])
def test_a_run_trains_the_ends_of_words(more: list[str], tiny_pair: Path, tmp_path: Path) -> None:
    knobs = ["selection.strategy=before_word", "train.steps=2", "train.eval_every=0", "data.eval=[]", *more]
    out = train(config(tiny_pair, tmp_path, *knobs), quiet=True)
    steps = metrics(out)
    assert len(steps) == 2
    for step in steps:
        assert step["tandem/handovers"] > 0.5
        assert step.get("mismatch/writer_mean_abs", step["mismatch/mean_abs"]) < 1e-4
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    ends = [sum(x != 0 for x in line["handover_logprobs"]) for line in lines]
    assert sum(ends) > 10
    assert all(len(line["handover_logprobs"]) == len(line["tokens"]) for line in lines)
