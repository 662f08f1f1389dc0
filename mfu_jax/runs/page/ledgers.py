"""Where the wall clock and the FLOPs of a run went."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mfu_jax.flops.names import EXECUTED
from mfu_jax.pages.bars import BarRow, bars
from mfu_jax.pages.document import quiet, section
from mfu_jax.pages.markup import Markup
from mfu_jax.pages.tables import Column, Word, ledger_table, of_value, table
from mfu_jax.runs.goodput.run_time import CATEGORIES, Attempt, TimeSlice, product
from mfu_jax.runs.report.run_data import RunData
from mfu_jax.util.formatting import percent, readable, span

if TYPE_CHECKING:
    from mfu_jax.flops.analytic.conventions import FlopsRow

_MOST_ATTEMPTS = 60


def time_ledger(run: RunData) -> Iterator[Markup]:
    """The wall clock by category, by attempt and by day.

    Args:
        run: the run to show.
    """
    time = run.time
    if not time.has_run_log:
        return
    text = (
        f"{span(sum(time.time.values()))} from the first process start to the last event, of "
        f"process 0. Restarts: {time.restarts}; steps done again: {time.lost_steps}."
    )
    shown = bars(list(_bars(time.time)), "where the wall clock went")
    parts = [quiet(text), shown, _attempts(time.attempts), *_parts("day", time.days)]
    yield section("Where the wall clock went", *parts)
    if len(time.processes) > 1:
        note = quiet("The wall clock of each process of the job.")
        yield section("Processes", note, *_parts("process", time.processes))


def _bars(time: Mapping[str, float]) -> Iterator[BarRow]:
    """A bar for each category that took time."""
    wall = sum(time.values())
    for category, seconds in sorted(time.items(), key=_order):
        if seconds:
            yield BarRow(
                name=CATEGORIES[category].name,
                kind=CATEGORIES[category].bar,
                points=100 * seconds / wall,
                seconds=seconds,
                time=span(seconds),
                meaning=CATEGORIES[category].meaning,
            )


def _order(pair: tuple[str, float]) -> tuple[bool, float]:
    """Training first, then the largest loss."""
    return pair[0] != "train", -pair[1]


def _attempts(attempts: Sequence[Attempt]) -> Markup:
    columns: list[Column[Attempt] | Word[Attempt]] = [
        of_value("lived", lambda a: a.end - a.start, span),
        of_value("first step", lambda a: a.first_step, "{:,}".format),
        of_value("last step", lambda a: a.last_step, "{:,}".format),
        of_value("steps lost", lambda a: a.lost_steps, "{:,}".format),
        Word("ended", lambda a: a.how),
    ]
    last = attempts[-_MOST_ATTEMPTS:]
    of = f" of {len(attempts):,}" if len(attempts) > len(last) else ""
    caption = f"The last {len(last)}{of} processes" if of else "Each process"
    return table("process", last, lambda a: f"{a.pid} on {a.host}", columns, caption=caption)


def _parts(by: str, parts: Sequence[TimeSlice]) -> Iterator[Markup]:
    columns: list[Column[TimeSlice] | Word[TimeSlice]] = [
        of_value("wall clock", lambda p: p.wall_seconds, span),
        of_value("goodput", lambda p: p.goodput, percent),
        of_value("effective MFU", lambda p: p.effective_mfu, percent),
        of_value("down", lambda p: p.time.get("down", 0.0), span),
        of_value("data wait", lambda p: p.time.get("data_wait", 0.0), span),
        of_value("slow steps", lambda p: p.time.get("slow_steps", 0.0), span),
    ]
    if len(parts) > 1:
        yield table(by, parts, lambda part: part.name, columns, caption=f"By {by}")


def flops(run: RunData) -> Iterator[Markup]:
    """The FLOPs ledger, the model's components, and every convention.

    Args:
        run: the run to show.
    """
    if run.setup.ledger:
        body = ledger_table(
            f"FLOPs per {run.setup.unit} and device", run.setup.ledger, executed_flops(run)
        )
        yield section("From model FLOPs to what ran", body)
    if run.model.components:
        yield section("The model's FLOPs by component", _components(run))
    if run.conventions:
        note = quiet("The same step and step time, counted as others count.")
        yield section("In every convention", note, _conventions(run))


def executed_flops(run: RunData) -> int | None:
    """All FLOPs that the program runs, by the run's ledger; None without one."""
    return next((row.flops for row in run.setup.ledger if row.label == EXECUTED), None)


def _components(run: RunData) -> Markup:
    whole, mfu = float(sum(row.training_flops for row in run.model.components)), run.summary.mfu

    def share(row: FlopsRow) -> float | None:
        return float(row.training_flops) / whole if whole else None

    columns: list[Column[FlopsRow] | Word[FlopsRow]] = [
        of_value("layers", lambda r: r.repeats, str),
        of_value("GFLOP", lambda r: float(r.training_flops) / 1e9, readable),
        of_value("of the model", share, percent),
        of_value("pts of MFU", lambda r: product(share(r), mfu), percent),
    ]
    rows = sorted(run.model.components, key=lambda row: -row.training_flops)
    return table("component", rows, lambda r: f"{r.layer} {r.component}", columns)


def _conventions(run: RunData) -> Markup:
    columns: list[Column[tuple[str, tuple[float, float | None]]]] = [
        of_value("TFLOP per step and device", lambda r: r[1][0], readable),
        of_value("MFU", lambda r: r[1][1], percent),
    ]
    return table("convention", list(run.conventions.items()), lambda row: row[0], columns)
