"""A planted fault beside the advice that it got: named first, its gain within 20%."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.profiling.advice.rules import Advice
from mfu_jax.util.formatting import columns
from scripts import results

WITHIN = 0.2
_LEAST = 0.05  # of a step: smaller gains deserve no advice


class Judged(NamedTuple):
    """A row of the table, and whether the advice was right."""

    cells: tuple[str, ...]
    is_right: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--only`` and ``--write``."""
    parser.add_argument("--only", default="", help="names of faults, joined by commas")
    results.add_write(parser)


def judge(
    name: str, cause: str, advice: Sequence[Advice], *, step: float, brought: float | None
) -> Judged:
    """Advice on a step with a fault.

    Args:
        name: of the fault.
        cause: that is expected first; empty: a healthy step, which deserves no advice.
        advice: largest gain first.
        step: seconds of a step with the fault.
        brought: seconds that its removal gained; below 5% of a step, it must not be named.
    """
    first, gain = (advice[0].cause, advice[0].gain_seconds) if advice else ("none", 0.0)
    others = ", ".join(f"{one.cause} {ms(one.gain_seconds)}" for one in advice[1:])
    if not cause or brought is None:
        return Judged((name, ms(step), first, ms(gain), "", "", others), not advice)
    off = gain / brought - 1 if brought else 0.0
    is_right = first == cause and abs(off) <= WITHIN
    if brought < _LEAST * step:
        is_right = cause not in {one.cause for one in advice}
    return Judged((name, ms(step), first, ms(gain), ms(brought), f"{off:+.0%}", others), is_right)


def verdict(what: str, head: Sequence[str], rows: Sequence[Judged], *, is_written: bool) -> int:
    """Prints the table, and writes it if asked to; the exit code, 1 if an advice was wrong."""
    cells = [row.cells for row in rows]
    print("\n".join(columns([head, *cells], "<><>>>" + ">" * (len(head) - 7) + "<")))
    if is_written:
        results.write("planted_faults", what, [dict(zip(head, row, strict=True)) for row in cells])
    return int(not all(row.is_right for row in rows))


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:.2f} ms"
