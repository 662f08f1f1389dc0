"""The page: headline numbers, comparison, time and FLOPs ledgers, curves, configuration.

Adding a section: a file beside this one, a section here; only `mfu_jax.pages` makes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from mfu_jax.logger.records.summary import Summary
from mfu_jax.pages.document import (
    document,
    headlines,
    notes,
    quiet,
    section,
    verdict_line,
)
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.pages.tables import Column, Word, table, wide
from mfu_jax.runs.comparison.intervals import CONFIDENCE
from mfu_jax.runs.comparison.runs import (
    TABLE_HEAD,
    MetricChange,
    RunComparison,
    change_text,
    interval,
)
from mfu_jax.runs.goodput.time_table import span
from mfu_jax.runs.page import curves
from mfu_jax.runs.page.configuration import configuration, last_gpus, last_record, record_notes
from mfu_jax.runs.page.hosts import collectives, hosts
from mfu_jax.runs.page.ledgers import flops, time_ledger
from mfu_jax.runs.page.step_times import step_times
from mfu_jax.runs.report.plan_comparison import PlanComparison, PlannedRow, StepGap
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import percent, readable, seconds_text, short

_STYLE = """
@media (min-width: 641px) { .bar { grid-template-columns: minmax(0, 130px) 1fr 100px 70px } }
.ledger tbody th { font-weight: 400 }
.rows tbody th { max-width: 420px }
td.word { white-space: normal; min-width: 140px; overflow-wrap: anywhere }
"""


def page(
    runs: Sequence[RunData],
    comparisons: Sequence[RunComparison] = (),
    plan: PlanComparison | None = None,
) -> str:
    """The whole page as one string.

    Args:
        runs: one or more; their curves share the charts.
        comparisons: of the first run with each of the others.
        plan: the plan compared with the first run.
    """
    names = run_names([run.metrics.path for run in runs])
    body: list[Markup] = [tag("h1", " · ".join(short(name) for name in names[:4]))]
    body += [
        _comparison(found, names[0], name)
        for found, name in zip(comparisons, names[1:], strict=False)
    ]
    for run, name in zip(runs, names, strict=True):
        body += [] if len(runs) == 1 else [tag("h2", short(name))]
        body += [verdict_line(run.verdict.sentence), headlines(_numbers(run))]
        body += [quiet(_about(run)), notes(run.time.notes)]
    if plan is not None:
        body.append(_plan_section(plan))
    for run, name in zip(runs, names, strict=True):
        body += time_ledger(run, _of(name, runs))
    body += curves.sections(runs)
    for run, name in zip(runs, names, strict=True):
        body += [*step_times(run, _of(name, runs)), *record_notes(run, _of(name, runs))]
        body += hosts(run, _of(name, runs))
        body += collectives(run, _of(name, runs))
        body += flops(run, _of(name, runs))
    body += configuration(runs, [short(name) for name in names])
    for run, name in zip(runs, names, strict=True):
        body += last_gpus(run, _of(name, runs))
        body += last_record(run, _of(name, runs))
    title = f"{short(names[0])}: MFU {percent(runs[0].summary.mfu)}"
    return document(title, body, style=_STYLE)


def run_names(paths: Sequence[str]) -> list[str]:
    """Names of runs: the folder of ``metrics.jsonl``, else the file; full paths where two coincide.

    >>> run_names(["runs/a/metrics.jsonl", "b.log"])
    ['a', 'b.log']
    """
    names = []
    for path in paths:
        place = PurePath(path)
        is_folders = place.name == "metrics.jsonl" and place.parent.name
        names.append(place.parent.name if is_folders else place.name)
    return names if len(set(names)) == len(names) else list(paths)


def _of(name: str, runs: Sequence[RunData]) -> str:
    return "" if len(runs) == 1 else f": {short(name)}"


def _numbers(run: RunData) -> list[tuple[str, str, float | None]]:
    summary, time = run.summary, run.time
    tokens = summary.tokens_per_sec_per_device
    numbers: list[tuple[str, str, float | None]] = [
        ("mean MFU", percent(summary.mfu), summary.mfu),
        ("mean HFU", percent(summary.hfu), summary.hfu),
        ("goodput", percent(time.goodput), time.goodput),
        ("effective MFU", percent(time.effective_mfu), time.effective_mfu),
        ("median step time", _seconds(summary.median_seconds), summary.median_seconds),
        ("mean tokens/s/device", f"{tokens:,.1f}" if tokens else "n/a", tokens or None),
        ("steps", f"{run.answer['steps']:,}", run.answer["steps"]),
        ("wall clock", _span(time.wall_seconds), time.wall_seconds),
    ]
    if summary.tensor_active is not None:
        numbers.insert(2, ("tensor cores", _tensor_cores(summary), summary.tensor_active))
    if run.options.price is not None:
        cost = "n/a" if run.cost is None else f"{run.cost:,.2f}"
        numbers.append(("cost", cost, run.cost))
    return numbers


def _tensor_cores(summary: Summary) -> str:
    """How active they were, by their counter and by the executed FLOPs."""
    count = summary.tensor_active_by_count
    by_count = "" if count is None else f" ({percent(count)} by count)"
    return f"{percent(summary.tensor_active)}{by_count}"


def _seconds(seconds: float | None) -> str:
    return "n/a" if seconds is None else seconds_text(seconds)


def _span(seconds: float | None) -> str:
    return "n/a" if seconds is None else span(seconds)


def _about(run: RunData) -> str:
    """Where the numbers come from, and what they refer to."""
    values = run.setup.values
    peak = run.answer["peak"] or "peak not logged"
    tflops = run.answer["reported_tflops"]
    model = f"model {readable(tflops)} TFLOP per step and device" if tflops else "model not logged"
    if run.setup.convention:
        model += f", convention {run.setup.convention}"
    parts = [
        run.metrics.path,
        str(values.get("devices", "devices not logged")),
        str(peak),
        model,
    ]
    if run.options.price is not None:
        parts.append(
            f"cost at {run.options.price:g} per device and hour"
            if run.cost is not None
            else "cost not known: it needs the number of devices and the run's log"
        )
    return " · ".join(parts)


def _comparison(found: RunComparison, a: str, b: str) -> Markup:
    """The comparison table of two runs, and the verdict."""
    columns: list[Column[MetricChange] | Word[MetricChange]] = [
        Column(f"A: {short(a)}", lambda r: r.difference.a, lambda r: r.metric.text(r.difference.a)),
        Column(f"B: {short(b)}", lambda r: r.difference.b, lambda r: r.metric.text(r.difference.b)),
        Column("B / A", lambda r: r.difference.change, lambda r: change_text(r.difference)),
        Word(f"{CONFIDENCE:.0%} interval", lambda r: interval(r.difference)),
    ]
    body = table(TABLE_HEAD, found.rows, lambda r: r.metric.title, columns)
    verdict = tag("p", found.verdict, class_="verdict", data_verdict=found.to_json()["result"])
    title = f"{short(b)} against {short(a)}"
    return section(title, verdict, wide(body), notes(found.notes))


def _plan_section(found: PlanComparison) -> Markup:
    """A plan compared with the run, as two tables."""
    about = quiet(f"{found.target}, by {short(found.path)}")
    tables = [
        wide(_plan_table("plan and run", found.rows)),
        wide(_plan_table("cause", found.causes)),
    ]
    return section("Predicted and measured", about, *tables, notes(found.notes), *_gap(found.gap))


def _gap(gap: StepGap | None) -> Iterator[Markup]:
    """What a step takes beyond its plan, by cause."""
    if gap is not None:
        seconds: Column[tuple[str, float]] = Column(
            "seconds", lambda cause: cause[1], lambda cause: seconds_text(cause[1])
        )
        rows = table("gap", list(gap.by_reason().items()), lambda cause: cause[0], [seconds])
        yield tag("p", gap.sentence)
        yield wide(rows)
        yield notes(gap.notes)


def _plan_table(by: str, rows: Sequence[PlannedRow]) -> Markup:
    columns: list[Column[PlannedRow]] = [
        Column("predicted", lambda r: r.predicted, lambda r: r.cells[1]),
        Column("measured", lambda r: r.measured, lambda r: r.cells[2]),
        Column("measured / predicted", lambda r: r.ratio, lambda r: r.cells[3]),
    ]
    return table(by, rows, lambda row: row.name, columns)
