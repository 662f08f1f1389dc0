"""A profile as a self-contained HTML page: verdict, waterfall, advice, tables, ledger.

Adding a section: a section here; only `mfu_jax.pages` makes HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mfu_jax import names
from mfu_jax.flops.names import RESIDUAL
from mfu_jax.pages.bars import BarRow, bars
from mfu_jax.pages.document import document, facts, notes, page_head, quiet, section
from mfu_jax.pages.markup import Markup, tag
from mfu_jax.pages.tables import Column, Word, ledger_table, rest_row, table
from mfu_jax.profiling.breakdown.tables import COLUMNS, TableRow
from mfu_jax.profiling.breakdown.waterfall import Bar
from mfu_jax.profiling.report.comparison import TimeChange
from mfu_jax.profiling.report.comparison_text import signed
from mfu_jax.util.formatting import percent, seconds_text, short

if TYPE_CHECKING:
    from mfu_jax.profiling.profile import Profile
    from mfu_jax.profiling.report.plan_gap import PlanGap

_UNITS = "Seconds of a step, and pts of MFU: percent of the step. They sum to the step."

# The class of a bar, by the start of its name; all others are work that is not the model's.
_KINDS = (
    (names.IDLE, "idle"),
    (names.EXPOSED_COMMUNICATION, "communication"),
    (names.NO_INSTRUCTION, "unknown"),
    (names.LOOPS, "memory"),
    (names.EXPOSED_COPIES, "memory"),
    (names.VECTOR_WORK, "memory"),
    (names.BELOW_PEAK, "below"),
    (names.MFU, "model"),
)

_COLUMNS = (*COLUMNS, Word[TableRow]("bound by", lambda r: r.bound_by))


_GAP_COLUMNS = (
    Column[TimeChange]("planned", lambda r: r.before, lambda r: seconds_text(r.before)),
    Column[TimeChange]("measured", lambda r: r.after, lambda r: seconds_text(r.after)),
    Column[TimeChange]("gap", lambda r: r.seconds, lambda r: signed(r.seconds)),
    Word[TimeChange]("why", lambda r: ", ".join(f"{w} {signed(s)}" for w, s in r.why.items())),
)


def page(profile: Profile, gap: PlanGap | None = None) -> str:
    """The whole page's HTML.

    Args:
        profile: the profile to show.
        gap: to a plan.
    """
    answer = profile.overview()
    by = {kind: profile.table(kind) for kind in ("scope", "op", "kernel", "phase")}
    name = short(answer["program"])
    body = [
        page_head(name, profile.verdict.sentence, {name: profile.verdict}, _about(profile, answer)),
        notes(profile.notes),
        facts(
            [
                ("HFU", percent(profile.hfu), answer["hfu"]),
                ("coverage", percent(answer["coverage"]), answer["coverage"]),
                ("steps", f"{answer['steps']:,}", answer["steps"]),
            ]
        ),
        section("Where the peak went", quiet(_UNITS), _waterfall(profile.waterfall, "waterfall")),
        _advice(profile),
        *_gap(gap),
        *_phases(profile),
        section("Scopes", _row_table("scope", by["scope"])),
        section("Ops", _row_table("op", by["op"])),
        section("By kernel", _row_table("kernel", by["kernel"])),
        section("By phase", _row_table("phase", by["phase"])),
        section("FLOPs", _ledger(profile)),
    ]
    return document(f"{name}: MFU {percent(profile.mfu)}", body)


def _about(profile: Profile, answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    devices = f"{len(answer['devices'])} × {answer['device_kind'] or answer['platform']}"
    return [("trace", answer["source"]), ("devices", devices), ("peak", str(profile.peaks.main))]


def _waterfall(rows: Sequence[Bar], title: str) -> Markup:
    """From the peak down."""
    found = [
        BarRow(
            name=bar.name,
            kind=_kind_of(bar.name),
            points=bar.mfu_points,
            seconds=bar.seconds,
            time=seconds_text(bar.seconds),
            share=f"{bar.mfu_points:.2f} pts",
            note=bar.largest,
        )
        for bar in rows
    ]
    return bars(found, title, whole=BarRow("peak", "peak", 100.0, share="100 pts"))


def _kind_of(name: str) -> str:
    """A bar's style-sheet class."""
    return next((kind for start, kind in _KINDS if name.startswith(start)), "other")


def _phases(profile: Profile) -> Iterator[Markup]:
    """One waterfall per program, if a step consists of several."""
    if len(profile.programs) > 1:
        parts = []
        for program in profile.programs:
            shown = _waterfall(program.waterfall, program.name)
            parts.append(tag("div", tag("h3", str(program)), shown, data_program=program.name))
        yield section("Each program on its own", *parts)


def _advice(profile: Profile) -> Markup:
    if not profile.advice:
        return section("Advice", quiet(profile.no_advice))
    items = []
    for advice in profile.advice:
        head = tag("b", advice.cause), f": {profile.gain_of(advice)}"
        lines = tag("div", tag("b", f"Do: {advice.remedy}")), tag("div", advice.evidence)
        items.append(tag("li", *head, *lines, data_gain=advice.gain_seconds))
    note = quiet("The largest gain first; gains do not add up.")
    return section("Advice", note, tag("ol", *items, class_="advice"))


def _gap(gap: PlanGap | None) -> Iterator[Markup]:
    if gap is not None:
        causes = ", ".join(f"{why} {signed(s)}" for why, s in gap.by_reason().items())
        text = f"{gap.sentence}. All causes: {causes}."
        rows = table("op", gap.changes, _group_name, _GAP_COLUMNS, kind="rows paths")
        yield section("Gap to the plan", quiet(text), rows, notes(gap.notes))


def _group_name(change: TimeChange) -> str:
    return " ".join(filter(None, (change.scope, change.phase, change.op or change.kind)))


def _row_table(by: str, rows: Sequence[TableRow]) -> Markup:
    """A table of the longest rows.

    Args:
        by: what a row is.
        rows: longest first.
    """
    return table(by, rows, _row_name, _COLUMNS, foot=_rest, kind="rows paths")


def _row_name(row: TableRow) -> str:
    return row.name or "(no scope)"


def _rest(rows: Sequence[TableRow]) -> Markup:
    seconds = sum(row.seconds for row in rows)
    share = sum(row.share_of_step for row in rows)
    cells = [tag("td", seconds_text(seconds), data_value=seconds)]
    cells.append(tag("td", percent(share), data_value=share))
    return rest_row(len(rows), *cells, *[tag("td")] * (len(_COLUMNS) - 2))


def _ledger(profile: Profile) -> Markup:
    """The ledger of one run of the main program, with what its kernels run beyond it."""
    ledger = replace(profile.program.ledger, beyond=profile.beyond)
    rows = [row for row in ledger.rows() if row.flops or row.label == RESIDUAL]
    return ledger_table("FLOPs per run and device", rows, ledger.executed)
