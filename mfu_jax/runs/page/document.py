"""The page: the answer, where the time went, curves, FLOPs, configuration; of one run or several.

Adding a section: a file beside this one, a section here; only `mfu_jax.pages` makes HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from mfu_jax.logger.records.summary import Summary
from mfu_jax.pages.document import document, facts, notes, page_head, quiet, section
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.pages.tables import Column, of_value, table
from mfu_jax.runs.comparison.runs import RunComparison
from mfu_jax.runs.page import columns, curves
from mfu_jax.runs.page.configuration import configuration, last_records, record_notes
from mfu_jax.runs.page.hosts import collectives, hosts
from mfu_jax.runs.page.ledgers import flops, time_ledger
from mfu_jax.runs.page.step_times import outlier_numbers, step_times
from mfu_jax.runs.report.plan_comparison import PlanComparison, PlannedRow, StepGap
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import percent, readable, seconds_text, short, span

_STYLE = """
@media (min-width: 641px) { .bar { grid-template-columns: minmax(0, 150px) 1fr 100px 70px } }
.rows tbody th { max-width: 420px }
@media (max-width: 640px) { .rows tbody th { max-width: 42vw } }
"""


def page(
    runs: Sequence[RunData],
    comparisons: Sequence[RunComparison] = (),
    plan: PlanComparison | None = None,
) -> str:
    """The whole page as one string.

    Args:
        runs: one or more; they share charts and tables.
        comparisons: of the first run with each of the others.
        plan: the plan compared with the first run.
    """
    paths = [run.metrics.path for run in runs]
    names: list[str] = []
    for i, name in enumerate(map(short, run_names(paths)), 1):
        names.append(f"{name} ({i})" if name in names else name)  # the same run twice
    named = dict(zip(names, runs, strict=True))
    body = [*(_one(names[0], runs[0]) if len(runs) == 1 else _several(named, comparisons))]
    if plan is not None:
        body.append(_plan_section(plan))
    body += record_notes(named)
    for run in runs:
        body += [*hosts(run), *collectives(run)]
    body += flops(runs[0]) if len(runs) == 1 else columns.ledgers(named)
    body += [*configuration(named), *last_records(named)]
    title = f"{names[0]}: MFU {percent(runs[0].summary.mfu)}"
    return document(title, body, style=_STYLE)


def _one(name: str, run: RunData) -> Iterator[Markup]:
    yield page_head(name, run.verdict.sentence, {name: run.verdict}, list(_about(run).items()))
    yield notes(run.time.notes)
    yield facts([(key, text, value) for key, (value, text) in _numbers(run).items()])
    yield from time_ledger(run)
    yield from curves.sections({name: run})
    yield from step_times(run)


def _several(runs: Mapping[str, RunData], found: Sequence[RunComparison]) -> Iterator[Markup]:
    names = list(runs)
    about = [_about(run) for run in runs.values()]
    shared = [pair for pair in about[0].items() if all(pair in other.items() for other in about)]
    sentences = [
        _named(c.verdict, names[0], name) for c, name in zip(found, names[1:], strict=True)
    ]
    splits = [
        _named(c.split_text, names[0], name) for c, name in zip(found, names[1:], strict=True)
    ]
    nexts = [f"next for {name}: {run.verdict.next_steps[0]}" for name, run in runs.items()]
    title = " · ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    yield page_head(
        title,
        f"{'; '.join(sentences)}.",
        {name: run.verdict for name, run in runs.items()},
        shared,
        beneath=[*filter(None, splits), *nexts],
    )
    warnings = dict.fromkeys(
        _named(note, names[0], name)
        for c, name in zip(found, names[1:], strict=True)
        for note in c.notes
    )
    yield from (tag("p", words, class_="warning") for words in warnings)
    yield notes([f"{name}: {note}" for name, run in runs.items() for note in run.time.notes])
    numbers = [_numbers(run) | outlier_numbers(run) for run in runs.values()]
    own = [{k: (None, v) for k, v in one.items() if (k, v) not in shared} for one in about]
    yield section(
        "The runs",
        columns.by_run("number", columns.merged(numbers), names),
        columns.by_run("about", columns.merged(own), names, has_words=True),
    )
    yield from columns.comparison(found, names)
    yield from curves.sections(runs)
    yield from columns.times(runs)


def _named(text: str, a: str, b: str) -> str:
    """A comparison's words with the runs' names in place of A and B."""
    return re.sub(r"\b[AB]\b", lambda found: a if found[0] == "A" else b, text)


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


def _numbers(run: RunData) -> dict[str, columns.Cell]:
    """What stands below the three large numbers."""
    summary, time = run.summary, run.time
    tokens = summary.tokens_per_sec_per_device
    numbers: dict[str, columns.Cell] = {
        "HFU": (summary.hfu, percent(summary.hfu)),
        "goodput": (time.goodput, percent(time.goodput)),
        "effective MFU": (time.effective_mfu, percent(time.effective_mfu)),
        "tokens/s/device": (tokens or None, f"{tokens:,.1f}" if tokens else "n/a"),
        "steps": (run.answer["steps"], f"{run.answer['steps']:,}"),
        "wall clock": (time.wall_seconds, _span(time.wall_seconds)),
    }
    if summary.tensor_active is not None:
        numbers["tensor cores"] = (summary.tensor_active, _tensor_cores(summary))
    if run.options.price is not None:
        numbers["cost"] = (run.cost, "n/a" if run.cost is None else f"{run.cost:,.2f}")
    return numbers


def _tensor_cores(summary: Summary) -> str:
    """How active they were, by their counter and by the executed FLOPs."""
    count = summary.tensor_active_by_count
    by_count = "" if count is None else f" ({percent(count)} by count)"
    return f"{percent(summary.tensor_active)}{by_count}"


def _span(seconds: float | None) -> str:
    return "n/a" if seconds is None else span(seconds)


def _about(run: RunData) -> dict[str, str]:
    """When, where and by what the run was made, and what its numbers refer to."""
    values, origin = run.setup.values, run.answer["origin"]
    tflops, convention = run.answer["reported_tflops"], run.setup.convention
    config = run.setup.config
    parameters = values.get("number of parameters", "")
    model = [
        config.get("model_name", "").replace("default", ""),
        f"{parameters} parameters" if parameters else "",
        f"{readable(tflops)} TFLOP per step and device" if tflops else "not logged",
        f"convention {convention}" if convention else "",
    ]
    cost = ""
    if run.options.price is not None:
        cost = f"{run.options.price:g} per device and hour"
        if run.cost is None:
            cost += ", not known in all: it needs the number of devices and the run's log"
    starts = [attempt.start for attempt in run.time.attempts[:1]]
    return {
        "file": run.metrics.path,
        "started": curves.when(starts[0]) if starts else "",
        "host": origin["host"] or "",
        "devices": str(values.get("devices", "not logged")),
        "peak": str(run.answer["peak"] or "not logged"),
        "model": ", ".join(filter(None, model)),
        "price": cost,
        "versions": ", ".join(f"{k} {v}" for k, v in (origin["versions"] or {}).items() if v),
        "commit": (origin["commit"] or "")[:12],
        "command": origin["command"] or "",
    }


def _plan_section(found: PlanComparison) -> Markup:
    """A plan compared with the run."""
    about = quiet(f"{found.target}, by {short(found.path)}")
    columns: list[Column[PlannedRow]] = [
        Column("predicted", lambda r: r.predicted, lambda r: r.cells[1]),
        Column("measured", lambda r: r.measured, lambda r: r.cells[2]),
        Column("measured / predicted", lambda r: r.ratio, lambda r: r.cells[3]),
    ]
    rows = table("plan and run", found.rows, lambda row: row.name, columns)
    return section("Predicted and measured", about, rows, notes(found.notes), *_gap(found.gap))


def _gap(gap: StepGap | None) -> Iterator[Markup]:
    """What a step takes beyond its plan, by cause."""
    if gap is not None:
        columns: list[Column[tuple[str, float]]] = [
            of_value("seconds", lambda c: c[1], seconds_text)
        ]
        yield tag("p", gap.sentence)
        yield table("gap", list(gap.by_reason().items()), lambda cause: cause[0], columns)
        yield notes(gap.notes)
