"""What a run reports: metrics.jsonl and samples.jsonl always, the console, and Weights & Biases if asked.

The files are the record, one line per step, on disk before the next step starts; everything else is a view of them.
The line of step 0 is the evaluation before the first one.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tandemrl.config import Config, to_dict
from tandemrl.evals.files import EVAL_TEXTS
from tandemrl.evals.measures import Sample
from tandemrl.files import read_json_lines, write_text
from tandemrl.training.authored import authored_text, sample_table, written_text
from tandemrl.types import Rollout

_SUMMARY = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "loss", "{:+.3f}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("senior", "tandem/senior_frac", "{:.2f}"),
    ("accepted", "draft/acceptance", "{:.2f}"),
)
"""What the line of a step shows: label, metric, format. ``senior`` is the fraction of the response tokens that
the senior generated, and ``accepted`` the fraction of the junior's drafts that the senior accepts."""
STOPPED = "stopped.json"
"""The file that says of a run which ended before its last step where and why. It is there until the run goes on."""
MAX_REASON_CHARS = 500


class TrackingError(RuntimeError):
    """A tracking back-end that the config asks for cannot be used. The message says what to install or set."""


class Tracker:
    """Writes the record of one run into ``output_dir`` and shows it. If the run ends early, the record says why.

    Args:
        config: the config, of which output_dir, train.{steps, wandb, log_samples} and rollout.max_tokens are read.
            Lines are appended to the files in the folder (see ``checkpoint`` for a resume).
        done: the last step of the record.
        console: where to print. The default is standard output. Progress bars are drawn on a terminal only.
        quiet: print nothing.
        record: write the files. It is False in all processes of a run but one.

    Raises:
        TrackingError: ``train.wandb`` is on and W&B cannot start.
    """

    def __init__(
        self, config: Config, *, done: int = 0, console: Console | None = None, quiet: bool = False, record: bool = True
    ) -> None:
        self._config = config
        self._console = Console(quiet=True) if quiet else console or Console(highlight=False)
        folder = Path(config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._ending = folder / STOPPED if record else None
        if self._ending is not None:
            self._ending.unlink(missing_ok=True)
        self._wandb = _start_wandb(folder, config) if record else None
        self._metrics, self._samples = (
            open(folder / f"{name}.jsonl", "a", encoding="utf-8") if record else None  # noqa: SIM115 - closed in __exit__
            for name in ("metrics", "samples")
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        hidden = quiet or not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._bars: dict[int, TaskID] = {}
        self._begun = self._step = done
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._ending is not None:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
            with suppress(OSError):  # the error itself is what matters
                write_text(self._ending, json.dumps({"step": self._step, "reason": reason}) + "\n")
        self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(error is not None))
        for file in (self._metrics, self._samples):
            if file is not None:
                with suppress(OSError) if error is not None else nullcontext():  # it shall not hide the error
                    file.close()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (non-finite values as null) and print its summary line."""
        values = {key: float(value) for key, value in metrics.items()}
        line = {"step": step, **{key: value if math.isfinite(value) else None for key, value in values.items()}}
        _write(self._metrics, [json.dumps(line)])
        self._step = step
        if self._wandb is not None:
            self._wandb.log(values, step=step)
        now = time.perf_counter()
        if step == 0:  # an evaluation, whose time says nothing about that of steps
            self._started = now
        pace_s = (now - self._started) / max(1, step - self._begun)
        self.say(summary_line(step, self._config.train.steps, values, pace_s))
        for finished in [each for each in list(self._bars) if each <= step]:  # rollouts a step ahead may add one
            self._progress.remove_task(self._bars.pop(finished))

    def samples(self, step: int, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
        """Record the rollouts of a step.

        On the first step and every ``train.eval_every`` steps, also show the first ``train.log_samples`` of them,
        coloured by author.
        """

        def line(rollout: Rollout) -> str:
            text = {} if rollout.response is not None else {"text": written_text(rollout, tokenizer)}
            return json.dumps({"step": step, **text, **rollout.to_json()}, ensure_ascii=False)

        _write(self._samples, [line(rollout) for rollout in rollouts])
        one_per_prompt = [rollout for rollout in rollouts if rollout.index == 0]
        every = self._config.train.eval_every
        shows = step == self._begun + 1 or (every > 0 and step % every == 0)
        shown = one_per_prompt[: self._config.train.log_samples] if shows else []
        if shown:
            self._console.print(sample_table(step, shown, tokenizer))
        if shown and self._wandb is not None:
            import wandb

            rows = [[r.example_id, r.reward, authored_text(r, tokenizer).plain] for r in shown]
            table = wandb.Table(columns=["example", "reward", "text"], data=rows)
            self._wandb.log({"samples": table}, step=step)

    def written(self) -> dict[str, int]:
        """How many bytes the files of the record have, by name."""
        return {Path(file.name).name: file.tell() for file in (self._metrics, self._samples) if file is not None}

    def rollout_progress(self, step: int, total_rows: int) -> Callable[[int], None]:
        """Show a progress bar, and return the function to call with the number of newly written tokens.

        The bar is full at ``total_rows`` rows of the greatest length. It is there until another one of the step
        replaces it, or until the step ends.
        """
        self._progress.start()
        if step in self._bars:
            self._progress.remove_task(self._bars[step])
        total = total_rows * self._config.rollout.max_tokens
        bar = self._bars[step] = self._progress.add_task(f"step {step}: tokens of {total_rows} rollouts", total=total)

        def advance(tokens: int) -> None:
            with suppress(KeyError):  # it is gone
                self._progress.advance(bar, tokens)

        return advance

    def say(self, line: str) -> None:
        """Print one plain line."""
        self._console.print(line, markup=False, soft_wrap=True)


def write_eval_texts(folder: Path, step: int, samples: Mapping[str, Sequence[Sample]]) -> None:
    """Write the texts of an evaluation as ``folder/eval_texts/step_N.jsonl``, which replaces one of the same step.

    Args:
        samples: the samples by what they are of, ``eval`` or ``monitor``, which becomes the field ``source``.
    """
    lines = [
        json.dumps({"source": source, **sample.to_json()}, ensure_ascii=False) + "\n"
        for source, each in samples.items()
        for sample in each
    ]
    write_text(folder / EVAL_TEXTS / f"step_{step}.jsonl", "".join(lines))


def summary_line(step: int, steps: int, metrics: Mapping[str, float], seconds_per_step: float) -> str:
    """The most important metrics of a step, the seconds per step and the time left, as text.

    Held-out and monitored pass@k have lines of their own, with the fraction of texts that the limit of tokens cut off.

    Examples:
        >>> summary_line(3, 50, {"reward/mean": 0.5, "loss": 0.01, "time/step": 2.0}, 2.0)
        'step 3/50 | reward 0.500 loss +0.010 | 2.0s ETA 1m34s'
    """
    left = round(max(0, steps - step) * seconds_per_step)
    hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
    times = [f"{metrics['time/step']:.1f}s"] if "time/step" in metrics else []
    times += [f"ETA {f'{hours}h{minutes:02}m' if hours else f'{minutes}m{seconds:02}s'}"] if step else []
    shown = [f"{label} {form.format(metrics[key])}" for label, key, form in _SUMMARY if key in metrics]
    lines = [" | ".join(" ".join(part) for part in ([f"step {step}/{steps}"], shown, times) if part)]
    for label, prefix in (("held-out", "eval/"), ("monitored", "monitor/")):
        found = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(f"{prefix}pass@")}
        if found:
            others = {"reward": metrics.get(f"{prefix}reward"), "cut off": metrics.get(f"{prefix}truncation_rate")}
            if others["reward"] == found.get("pass@1"):
                del others["reward"]
            found |= {name: value for name, value in others.items() if value is not None}
            lines.append("  ".join(["", label, *(f"{name} {value:.3f}" for name, value in found.items())]))
    return "\n".join(lines)


def time_left(seconds: float) -> str:
    """A rough duration.

    Examples:
        >>> [time_left(seconds) for seconds in (40, 500, 9000)]
        ['about 40 s left', 'about 8 min left', 'about 2.5 h left']
    """
    if seconds < 120:
        return f"about {seconds:.0f} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 7200 else f"about {seconds / 3600:.1f} h left"


def _write(file: IO[str] | None, lines: Sequence[str]) -> None:
    """Append lines to a file, if there is one.

    Raises:
        TrackingError: the lines could not be written to disk.
    """
    if file is None:
        return
    try:
        file.write("".join(f"{line}\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise TrackingError(
            f"{file.name}: {error.strerror}; free the disk and resume from the last checkpoint"
        ) from None


def _start_wandb(folder: Path, config: Config) -> Any:
    """Start a run of W&B, or return None if it is disabled. One that is resumed is another run of the same group, which
    begins with the steps that were kept: W&B takes no step twice."""
    mode = config.train.wandb
    if mode == "disabled":
        return None
    import wandb  # preflight has found it

    name, record = folder.resolve().name, folder / "metrics.jsonl"
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tandemrl"),
            name=os.environ.get("WANDB_NAME") or name,
            group=os.environ.get("WANDB_RUN_GROUP") or name,
            dir=folder,
            mode=mode,
            config=to_dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise TrackingError(f"train.wandb={mode}: {error}; train.wandb=offline needs no key") from None
    for _, line in read_json_lines(record) if record.is_file() else ():
        run.log({key: value for key, value in line.items() if key != "step" and value is not None}, step=line["step"])
    return run
