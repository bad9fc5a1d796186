"""What a run reports: metrics.jsonl and samples.jsonl always, the console, and Weights & Biases if asked.

The files are the record, one line per step, on disk before the next step starts; everything else is a view of them.
The line of step 0 is the evaluation before the first one.
"""

import json
import math
import netrc
import os
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self
from uuid import uuid4

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tandemrl.config import Config, to_dict
from tandemrl.config.hints import pip_install
from tandemrl.evals.files import EVAL_TEXTS
from tandemrl.evals.measures import Sample
from tandemrl.files import write_text
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
COLUMNS = 80


class TrackingError(RuntimeError):
    """A tracking back-end that the config asks for cannot be used. The message says what to install or set."""


class Tracker:
    """Writes the record of one run into ``output_dir`` and shows it. If the run ends early, the record says why.

    Args:
        output_dir: the folder of the run, to whose files lines are appended (see ``checkpoint`` for a resume).
        config: the config, of which train.{steps, wandb, log_samples} and rollout.max_tokens are read.
        console: where to print. The default is standard output. Progress bars are drawn on a terminal only.
        quiet: print nothing.
        record: write the files. It is False in all processes of a run but one.

    Raises:
        TrackingError: ``train.wandb`` is on and wandb is not installed.
    """

    def __init__(
        self,
        output_dir: str | Path,
        config: Config,
        *,
        console: Console | None = None,
        quiet: bool = False,
        record: bool = True,
    ) -> None:
        self._config = config
        self._console = Console(quiet=True) if quiet else console or Console(highlight=False)
        self._live = self._console.is_terminal and not quiet
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._ending = folder / STOPPED if record else None
        if self._ending is not None:
            self._ending.unlink(missing_ok=True)
        self._last_step = _last_step(folder / "metrics.jsonl") if record else None
        self._logged = folder / "wandb" / "last_step"  # which W&B may have seen
        self._wandb = _start_wandb(folder, config, self._last_step, self._logged, self.say) if record else None
        self._metrics, self._samples = (
            open(folder / f"{name}.jsonl", "a", encoding="utf-8") if record else None  # noqa: SIM115 - closed in close()
            for name in ("metrics", "samples")
        )
        self._progress: Progress | None = None
        self._steps_bar: TaskID | None = None
        self._rollout_bars: dict[int, TaskID] = {}
        self._lock = threading.Lock()  # with train.async_steps another thread shows the bars of later steps
        self._started = time.perf_counter()
        self._first_step: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._ending is not None:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARS]
            with suppress(OSError):  # the error itself is what matters
                write_text(self._ending, json.dumps({"step": self._last_step or 0, "reason": reason}) + "\n")
        self.close(failed=kind is not None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step (non-finite values as null) and print its summary line.

        Raises:
            ValueError: the step or a later one is already recorded.
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"metrics.jsonl already has step {self._last_step}; step {step} would be a second record")
        values = {key: float(value) for key, value in metrics.items()}
        line = {"step": step, **{key: value if math.isfinite(value) else None for key, value in values.items()}}
        _write(self._metrics, [json.dumps(line)])
        self._last_step = step
        if self._wandb is not None:
            self._log_to_wandb(step, values)
        self._show_step(step, values)

    def samples(self, step: int, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
        """Record the rollouts of a step.

        On the first step and every ``train.eval_every`` steps, also show the first ``train.log_samples`` of them,
        coloured by author.
        """

        def line(rollout: Rollout) -> str:
            text = {} if rollout.response is not None else {"text": written_text(rollout, tokenizer)}
            record = {"step": step, **text, **rollout.to_json()}
            return json.dumps(record, ensure_ascii=False)

        _write(self._samples, [line(rollout) for rollout in rollouts])
        one_per_prompt = [rollout for rollout in rollouts if rollout.index == 0]
        shown = one_per_prompt[: self._config.train.log_samples] if self._is_table_step(step) else []
        if shown:
            self._console.print(sample_table(step, shown, tokenizer))
        if shown and self._wandb is not None:
            import wandb

            rows = [[r.example_id, r.reward, authored_text(r, tokenizer).plain] for r in shown]
            table = wandb.Table(columns=["example", "reward", "text"], data=rows)
            self._log_to_wandb(step, {"samples": table})

    def _log_to_wandb(self, step: int, values: Mapping[str, Any]) -> None:
        write_text(self._logged, str(step))  # before, so that a step which a kill cuts off counts as seen
        assert self._wandb is not None
        self._wandb.log(values, step=step)

    def written(self) -> dict[str, int]:
        """How many bytes the files of the record have, by name."""
        return {Path(file.name).name: file.tell() for file in (self._metrics, self._samples) if file is not None}

    def rollout_progress(self, step: int, total_rows: int) -> Callable[[int], None]:
        """Show a progress bar, and return the function to call with the number of newly written tokens.

        The bar is full at ``total_rows`` rows of the greatest length. It is there until another one of the step
        replaces it, or until the step ends.
        """
        if not self._live:
            return lambda tokens: None
        what, total = f"step {step}: tokens of {total_rows} rollouts", total_rows * self._config.rollout.max_tokens
        with self._lock:
            progress = self._bars()
            if step in self._rollout_bars:
                progress.remove_task(self._rollout_bars[step])
            bar = self._rollout_bars[step] = progress.add_task(what, total=total)

        def advance(tokens: int) -> None:
            with suppress(KeyError):  # it is gone
                progress.advance(bar, tokens)

        return advance

    def say(self, line: str) -> None:
        """Print one plain line."""
        self._console.print(line, markup=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """Remove the progress bars and close the files. It may be called twice.

        Args:
            failed: an error ends the run. What cannot be written then, as on a full disk, does not hide it.
        """
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(failed))
            self._wandb = None
        for file in (self._metrics, self._samples):
            if file is not None:
                with suppress(OSError) if failed else nullcontext():
                    file.close()

    def _is_table_step(self, step: int) -> bool:
        every = self._config.train.eval_every
        return step == self._first_step or self._first_step is None or (every > 0 and step % every == 0)

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if step == 0:  # an evaluation, whose time says nothing about that of steps
            self._started = now
            return self.say(summary_line(0, self._config.train.steps, metrics, 0.0))
        if self._first_step is None:
            self._first_step = step
        self.say(
            summary_line(step, self._config.train.steps, metrics, (now - self._started) / (step - self._first_step + 1))
        )
        if self._live:
            with self._lock:
                progress = self._bars()
                assert self._steps_bar is not None
                progress.update(self._steps_bar, completed=step)
                for done in [each for each in self._rollout_bars if each <= step]:
                    progress.remove_task(self._rollout_bars.pop(done))

    def _bars(self) -> Progress:
        if self._progress is None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=self._console)
            done = self._last_step or 0
            self._steps_bar = self._progress.add_task("steps", total=self._config.train.steps, completed=done)
            self._progress.start()
        return self._progress


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
    (folder / EVAL_TEXTS).mkdir(parents=True, exist_ok=True)
    write_text(folder / EVAL_TEXTS / f"step_{step}.jsonl", "".join(lines))


def summary_line(step: int, steps: int, metrics: Mapping[str, float], seconds_per_step: float) -> str:
    """The most important metrics of a step, the seconds per step and the time left, as text.

    Held-out and monitored pass@k have lines of their own, with the share of texts that the limit of tokens cut off. No
    line is longer than 80 columns.

    Examples:
        >>> summary_line(3, 50, {"reward/mean": 0.5, "loss": 0.01, "time/step": 2.0}, 2.0)
        'step 3/50 | reward 0.500 loss +0.010 | 2.0s ETA 1m34s'
    """
    left = round(max(0, steps - step) * seconds_per_step)
    hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
    shown = [f"{label} {form.format(metrics[key])}" for label, key, form in _SUMMARY if key in metrics]
    times = [f"{metrics['time/step']:.1f}s"] if "time/step" in metrics else []
    times += [f"ETA {f'{hours}h{minutes:02}m' if hours else f'{minutes}m{seconds:02}s'}"] if step else []
    lines = _wrapped([[f"step {step}/{steps}"], shown, times], "")
    for label, prefix in (("held-out", "eval/"), ("monitored", "monitor/")):
        found = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(f"{prefix}pass@")}
        cut = [f"cut off {metrics[key]:.3f}"] if (key := f"{prefix}truncation_rate") in metrics else []
        if cut and prefix == "eval/" and (key := "response/truncated_at_eval") in metrics:
            cut += [f"(rollouts {metrics[key]:.3f})"]
        if found and (reward := metrics.get(f"{prefix}reward")) not in (None, found.get("pass@1")):
            found = {"reward": reward, **found}
        if found:
            lines += _wrapped([[label, *(f"{name} {value:.3f}" for name, value in found.items()), *cut]], "  ")
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


RECENT_STEPS = 5
"""The time left follows the median of so many steps."""


def rest_of_steps(times: Sequence[float], left: int) -> str:
    """About how long ``left`` steps take, after steps that took ``times``, in seconds.

    Examples:
        >>> rest_of_steps([100.0, 2.0, 2.0, 2.0, 30.0], 100)
        'about 3 min left'
    """
    return time_left(median(times[-RECENT_STEPS:]) * left)


def _wrapped(groups: Sequence[Sequence[str]], indent: str) -> list[str]:
    """Wrap to lines of at most ``COLUMNS`` characters, without a break between a label and its value."""
    fixed = " | ".join(" ".join(part.replace(" ", "\0") for part in group) for group in groups if group)
    lines = textwrap.wrap(fixed, COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return [line.replace("\0", " ") for line in lines]


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


def _last_step(path: Path) -> int | None:
    """The step of the last line of a metrics file, or None if there is none."""
    if not path.is_file():
        return None
    with open(path, encoding="utf-8") as file:
        tail = deque(file, maxlen=1)
    if not tail:
        return None
    try:
        return int(json.loads(tail[0])["step"])
    except (ValueError, KeyError, TypeError):
        raise TrackingError(f"{path}: the last line is torn; resume the run, or remove the line") from None


def _start_wandb(folder: Path, config: Config, last: int | None, logged: Path, say: Callable[[str], None]) -> Any:
    """Start the W&B run, or return None if it is disabled. Without an API key, an online run is recorded offline.

    W&B drops what is logged for a step that it has. So a resumed run goes on under its id only if no step that W&B may
    have seen was discarded. Otherwise a new run of the same group replaces it, which begins with the steps kept.

    Args:
        last: the last step of metrics.jsonl.
        logged: the file with the last step that W&B may have seen.
    """
    mode, identity, notes = config.train.wandb, folder / "wandb" / "run_id", None
    known = -1 if last is None else last
    discarded = identity.is_file() and not (logged.is_file() and int(logged.read_text()) <= known)
    if mode == "disabled":
        if discarded:
            logged.unlink(missing_ok=True)  # for a later resume, which may be past these steps again
        return None
    try:
        import wandb
    except ImportError:
        raise TrackingError(
            f"train.wandb needs Weights & Biases: {pip_install('wandb')}, or train.wandb=disabled"
        ) from None
    if mode == "online" and not _has_wandb_key():
        say("wandb: no API key (see `wandb login`); recording offline, to be uploaded with `wandb sync`")
        mode = "offline"
    identity.parent.mkdir(exist_ok=True)
    if not identity.is_file():
        identity.write_text(uuid4().hex[:12])
    elif discarded:
        old = identity.read_text()
        group, _, number = old.partition("-")
        write_text(identity, f"{group}-{int(number or 1) + 1}")
        kept = f"after step {last}" if last is not None else "from its start"
        notes = f"replaces run {old}, whose steps {kept} were discarded by a resume"
        say(f"wandb: run {identity.read_text()} {notes}")
    group, _, number = identity.read_text().partition("-")
    name = os.environ.get("WANDB_NAME") or folder.resolve().name
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "tandemrl"),
        name=f"{name} (resume {int(number) - 1})" if number else name,
        group=os.environ.get("WANDB_RUN_GROUP") or group,
        notes=notes,
        dir=folder,
        id=identity.read_text(),  # a resumed run continues its own curve
        resume="allow" if mode == "online" else None,
        mode=mode,
        config=to_dict(config),
        settings=wandb.Settings(silent=True, console="off"),
    )
    write_text(logged, str(known))
    if last is not None:  # what this run of W&B lacks: offline it knows of no earlier part
        with open(folder / "metrics.jsonl", encoding="utf-8") as file:
            for line in map(json.loads, file):
                if (step := line.pop("step")) >= run.step:
                    run.log({key: math.nan if value is None else value for key, value in line.items()}, step=step)
    return run


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False
