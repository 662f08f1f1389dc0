"""A plan compared with the run, as two tables."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.pages.document import notes, quiet, section
from mfu_jax.pages.markup import Markup
from mfu_jax.pages.tables import Column, table, wide
from mfu_jax.runs.report.plan_comparison import PlanComparison, PlannedRow
from mfu_jax.util.formatting import short


def planned(found: PlanComparison) -> Markup:
    """The section.

    Args:
        found: the comparison of plan and run.
    """
    about = quiet(f"{found.target}, by {short(found.path)}")
    tables = [wide(_table("plan and run", found.rows)), wide(_table("cause", found.causes))]
    return section("Predicted and measured", about, *tables, notes(found.notes))


def _table(by: str, rows: Sequence[PlannedRow]) -> Markup:
    columns: list[Column[PlannedRow]] = [
        Column("predicted", lambda r: r.predicted, lambda r: r.cells[1]),
        Column("measured", lambda r: r.measured, lambda r: r.cells[2]),
        Column("measured / predicted", lambda r: r.ratio, lambda r: r.cells[3]),
    ]
    return table(by, rows, lambda row: row.name, columns)
