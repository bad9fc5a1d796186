"""Headline numbers and their tables: one estimate for each arm and column, over seeds if there are several."""

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from tandemrl.apps.report.records import ArmRecord, Claim
from tandemrl.evals.measures import good_end
from tandemrl.evals.stats import Interval, seed_interval, standard_error

MISSING = "–"


def rate(value: float) -> str:
    """The text for a share, a probability or a difference of two."""
    return f"{value:.3f}"


def nats(value: float) -> str:
    """The text for a quantity of any size, to three digits."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def count(value: float) -> str:
    return f"{value:.1f}"


def texts(value: "Interval | Estimate", shown: Callable[[float], str], *, sign: bool = False) -> tuple[str, str]:
    """A value and its interval, ``("0.20", "[0.10, 0.50]")``, with the same number of decimals; "" for no interval.

    Args:
        sign: whether it is a difference, which has a sign unless it is shown as zero.
    """

    def signed(value: float, shown: Callable[[float], str]) -> str:
        text = shown(abs(value))
        return text if float(text.replace(",", "")) == 0 else f"{'+' if value > 0 else '−'}{text}"

    as_text = signed if sign else lambda value, shown: shown(value)
    mean = as_text(value.mean, shown)
    if value.low is None or value.high is None:
        return mean, ""
    alike = f"{{:,.{len(mean.partition('.')[2])}f}}".format
    return mean, f"[{as_text(value.low, alike)}, {as_text(value.high, alike)}]"


class Column(NamedTuple):
    """A macro metric of a phase, as a column of the table.

    Its value is ``metrics.macro[metric]`` in the phase's result file (``PHASE.json``), read by ``estimate``. An
    evaluation writes it there: ``evals.protocol.strategies`` names the arms of the phase (``handoff`` has
    ``senior_first`` and ``junior_first``), and ``evals.measures.summarise`` averages each of them into ``ARM/METRIC``,
    from what ``evals.reading`` computed of each text (``legibility``: the junior's surprisal).

    ``measure`` is its name in the rows of ``results.json``; one without a ``phase`` is there alone. No value can be
    below 0 or above ``highest``, so intervals over seeds are cut there. ``meaning`` explains it in a sentence.
    """

    title: str
    phase: str
    metric: str
    measure: str = ""
    meaning: str = ""
    unit: str = ""
    shown: Callable[[float], str] = rate
    highest: float = 1.0

    @property
    def arrow(self) -> str:
        """↑ or ↓, where one direction is better; else nothing."""
        return {"higher": "↑", "lower": "↓", None: ""}[good_end(self.metric or self.measure)]

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


SOLO = Column(
    *("solo pass@1", "pass-at-k", "pass@1", "solo/pass@1"),
    meaning="fraction of correct responses when the senior generates alone",
)
_TURNS = "fraction of correct responses when they take turns, a {} each, and the senior starts"
SENIOR_FIRST, JUNIOR_FIRST, *_BY_TURNS = (
    Column(title, "handoff", f"{how}/pass@1", f"handoff/{how}", meaning)
    for title, how, meaning in (
        ("handoff, senior first", "senior_first", _TURNS.format("step")),
        ("handoff, junior first", "junior_first", "the same, and the junior starts"),
        ("handoff by turns, senior first", "senior_first_turns", _TURNS.format("turn of the episode")),
        ("handoff by turns, junior first", "junior_first_turns", "the same, and the junior starts"),
        (
            *("senior’s first turn, then junior", "senior_then_junior"),
            "fraction of correct responses when the junior takes over after the first turn",
        ),
    )
)
JUNIOR_CE = Column(
    *("junior CE", "legibility", "cross_entropy", "junior_ce"),
    "cross-entropy of the senior's solo responses under the junior: how surprised the junior is",
    *("nats/token", nats, inf),
)
_READS = "fraction of correct answers when {} from the senior's solo text before its true answer appears"
UNSEEN = Column(*("transfer, unseen readers", "", "", "unseen/pass@1"), _READS.format("unseen readers go on freely"))
SEEN = Column(*("transfer, junior", "", "", "seen/pass@1"), _READS.format("the junior goes on freely"))
READERS_ALONE = Column("unseen readers alone", "", "", "unseen/free/0")
TANDEM = Column(
    *("tandem pass@1", "tandem", "pass@1", "tandem/pass@1"),
    meaning="fraction of correct responses when both generate, as in training",
)
SCHEDULES = (
    TANDEM._replace(title="by words"),
    SENIOR_FIRST._replace(title="by steps,\nsenior first"),
    JUNIOR_FIRST._replace(title="by steps,\njunior first"),
    Column("once, after\none step", "", "", "seen/free/step"),
    Column("the same,\nunseen readers", "", "", "unseen/free/step"),
)
"""How the authors change when arms are evaluated; steps are paragraphs."""
HEADLINE = (SOLO, SENIOR_FIRST, JUNIOR_CE)
"""The three columns that a report begins with."""
COLUMNS = (
    SOLO,
    *(
        Column(
            *(f"solo pass@{k}", "pass-at-k", f"pass@{k}", "solo/pass@4" if k == 4 else ""),
            meaning=f"probability that at least one of {k} responses is correct",
        )
        for k in (2, 4, 8, 16)
    ),
    Column("solo F1", "pass-at-k", "f1", meaning="overlap of the words of answer and ground truth, from 0 to 1"),
    Column("retrieval recall", "pass-at-k", "recall", meaning="fraction of the supporting documents that were found"),
    Column("citation recall", "pass-at-k", "citation", meaning="fraction of the supporting documents that are cited"),
    TANDEM,
    SENIOR_FIRST,
    JUNIOR_FIRST,
    *_BY_TURNS,
    UNSEEN,
    SEEN,
    JUNIOR_CE,
    Column(
        *("acceptance", "legibility", "acceptance", "acceptance"),
        meaning="fraction of the senior's tokens that the junior draws, too, with the same random numbers",
    ),
    Column(
        *("drift KL", "drift", "kl", "drift/kl"),
        "KL(senior ‖ junior) of their next-token distributions, on the senior’s solo responses",
        *("nats/token", nats, inf),
    ),
    Column(
        *("KL to the start", "", "", "start/kl"),
        "KL(senior ‖ senior before training) of their next-token distributions, on the senior’s solo responses",
        *("nats/token", nats, inf),
    ),
    Column(
        *("verified pass@1", "verified", "verified_pass@1"),
        meaning="fraction of responses that are correct and whose reasoning a judge accepts",
    ),
    Column("length", "pass-at-k", "length", "length", "mean length of solo responses", "tokens", count, inf),
    Column("turns", "pass-at-k", "turns", "", "mean number of turns of an episode", "", count, inf),
    Column("tool errors", "pass-at-k", "tool_errors", "", "calls per episode that raised an error", "", nats, inf),
    Column("invalid calls", "pass-at-k", "invalid_calls", "", "calls per episode that were not made", "", nats, inf),
    Column("jargon rate", "", "", "jargon_rate", "fraction of solo responses in jargon"),
    Column("shorthand rate", "", "", "shorthand_rate", "fraction of solo responses in shorthand"),
    Column("repairs", "", "", "handoff/repairs", "lines per handoff response that repair a step", "", nats, inf),
)
MEASURES: dict[str, tuple[str, str]] = {
    **{each.measure: (each.phase, each.metric) for each in COLUMNS if each.phase and each.measure},
    "handoff/pass@1": ("handoff", "pass@1"),
}
"""The measures in the rows of ``results.json``, each with its phase and metric. Only episodes have those by turns. The
handoff without an order is the mean over both."""


class Estimate(NamedTuple):
    """A number with its 95 % interval, over seeds if there are several, else over the problems of the one seed.

    ``low`` and ``high`` are None without an interval. ``by_seed`` has the value of each seed with its interval over
    problems.
    """

    mean: float
    low: float | None
    high: float | None
    by_seed: dict[str, "Estimate"]


def columns_of(arms: Sequence[ArmRecord], columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """The columns for which some arm has a value; of those that only ``results.json`` has, one that is not 0."""
    found = {column: [value for arm in arms if (value := estimate(arm, column)) is not None] for column in columns}
    return [c for c, values in found.items() if values and (c.phase or any(value.mean for value in values))]


def estimate(arm: ArmRecord, column: Column) -> Estimate | None:
    """An arm's value in a column, from its evaluations, else from ``results.json``; None if no seed has one.

    Over several seeds it is their mean with Student's interval, cut at 0 and the column's highest value.
    """
    by_seed: dict[str, Estimate] = {}
    for seed, result in arm.phase(column.phase).items():
        macro = result["metrics"]["macro"]
        if column.metric in macro:
            low, high = (macro.get(f"{column.metric}/{end}") for end in ("low", "high"))
            by_seed[seed] = Estimate(macro[column.metric], low, high, {})
    measured = {seed: values[column.measure] for seed, values in arm.extra.items() if column.measure in values}
    by_seed = by_seed or {seed: Estimate(value, None, None, {}) for seed, value in measured.items()}
    values = list(by_seed.values())
    if len(values) < 2:
        return values[0]._replace(by_seed=by_seed) if values else None
    own = [Interval(v.mean, v.low, v.high) for v in values if v.low is not None and v.high is not None]
    errors = [standard_error(each) for each in own] if len(own) == len(values) else []
    mean, low, high = seed_interval([value.mean for value in values], errors=errors)
    if low == high:  # equal values of which no more is known
        return Estimate(mean, None, None, by_seed)
    return Estimate(mean, max(0.0, low), min(column.highest, high), by_seed)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; all but the first ``left`` columns are numbers, aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"

    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([line(head), rule, *map(line, rows)]) + "\n"


def shown_values(claim: Claim) -> str:
    return ", ".join(map(nats, claim.values)) or MISSING


def headline_table(arms: Sequence[ArmRecord], columns: Sequence[Column] = HEADLINE) -> str:
    """A Markdown table: a row per arm, each number with its 95 % interval."""
    columns = columns_of(arms, columns)
    rows = [[arm.title, *(_cell(arm, column) for column in columns)] for arm in arms]
    return markdown_table(["", *(column.heading for column in columns)], rows)


def headline_lines(arms: Sequence[ArmRecord], columns: Sequence[Column] = HEADLINE) -> str:
    """The numbers of ``headline_table`` for a terminal: a block per column, a line per arm."""
    width = max(len(arm.title) for arm in arms)
    blocks = [
        [column.heading, *(f"  {arm.title:<{width}}  {_cell(arm, column)}" for arm in arms)]
        for column in columns_of(arms, columns)
    ]
    return "\n".join(line for block in blocks for line in block)


def _cell(arm: ArmRecord, column: Column) -> str:
    """``0.523 [0.480, 0.566]``"""
    value = estimate(arm, column)
    return MISSING if value is None else " ".join(filter(None, texts(value, column.shown)))
