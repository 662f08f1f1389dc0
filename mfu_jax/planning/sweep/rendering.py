"""A sweep as one screen of text: the points, memory against time, and the winner's flags."""

from __future__ import annotations

from collections.abc import Sequence

from mfu_jax.planning.sweep.outcomes import SweepRow
from mfu_jax.planning.sweep.running import SweepResult, fastest_first
from mfu_jax.util.formatting import columns, percent
from mfu_jax.verdict import NextStep, Verdict

_WIDTH, _HEIGHT = 64, 14
_GIB = 2**30
TOKENS = "tokens/s/chip"  # what the speed of the trainer's steps counts
_MOST_ROWS = 60
_VERDICT = {True: "fits", False: "too large", None: "?"}


def sweep_verdict(result: SweepResult) -> Verdict:
    """The winner in a sentence."""
    best, count = result.winner, len(result.rows)
    found = "none fits" if best is None else f"the fastest that fits is {best.name}"
    another = "smaller values of per_device_batch_size=, or a remat_policy= that keeps less"
    return Verdict(
        kind="sweep",
        finding=f"{result.target}: of {count} points, {result.compiles} compiled, {found}",
        passed=best is not None,
        mfu=None if best is None else best.mfu,
        step_time_seconds=None if best is None else best.step_time_seconds,
        next_steps=(NextStep(text=result.flags if best else another),),
    )


def render_sweep(result: SweepResult) -> str:
    """The sweep for the console."""
    compiled = sum(row.source == "compiled" for row in result.rows)
    return "\n".join(
        [
            f"{result.target}: {len(result.rows)} points, {compiled} compiled, "
            f"{result.memory_limit_bytes / _GIB:.2f} GiB a device",
            *table(result.rows),
            *plot(result.rows, sure="compiled", others="estimated"),
            *_winner(result),
            *(f"note: {note}" for note in result.notes),
        ]
    )


def table(points: Sequence[SweepRow], unit: str = TOKENS) -> list[str]:
    """The points, fastest first, as lines; their speed is in `unit`."""
    keys = list(points[0].values)
    shown = fastest_first(points)[:_MOST_ROWS]
    rows = [(*keys, "", "GiB", "s", unit, "MFU", "from")]
    rows += [(*row.values.values(), *_cells(row)) for row in shown]
    lines = [f"  {line}" for line in columns(rows, "<" * len(keys) + "<>>>><")]
    rest = len(points) - len(shown)
    why = {row.note: row for row in points if row.source in ("failed", "invalid") and row.note}
    lines += [f"  … and {rest} more; --json has all"] * bool(rest)
    return lines + [f"  {row.name}: {note}" for note, row in why.items()]


def _cells(row: SweepRow) -> tuple[str, ...]:
    numbers = (
        f"{row.memory_peak_bytes / _GIB:.2f}" if row.memory_peak_bytes else "",
        f"{row.step_time_seconds:.4g}" if row.step_time_seconds else "",
        f"{row.tokens_per_sec_per_chip:,.0f}" if row.tokens_per_sec_per_chip else "",
        percent(row.mfu) if row.mfu is not None else "",
    )
    star = " *" if row.pareto else ""
    return (_VERDICT[row.fits], *numbers, f"{row.source}{star}")


def plot(rows: Sequence[SweepRow], *, sure: str, others: str, unit: str = TOKENS) -> list[str]:
    """Memory on x, time for a token, or of `unit`, on y; `#`, `o` by source, `*` Pareto-optimal."""
    points = [
        (row.memory_peak_bytes / _GIB, 1e6 / row.tokens_per_sec_per_chip, row)
        for row in rows
        if row.fits and row.memory_peak_bytes and row.tokens_per_sec_per_chip
    ]
    if len(points) < 2:
        return []
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    grid = [[" "] * (_WIDTH + 1) for _ in range(_HEIGHT + 1)]
    for x, y, row in sorted(points, key=lambda p: (p[2].pareto, p[2].source == sure)):
        column = round(_WIDTH * _place(x, xs))
        line = _HEIGHT - round(_HEIGHT * _place(y, ys))
        grid[line][column] = "*" if row.pareto else "#" if row.source == sure else "o"
    lines = [f"  {'':9}│{''.join(line).rstrip()}" for line in grid]
    lines[0] = f"  {max(ys):8.4g} │{''.join(grid[0]).rstrip()}"
    lines[-1] = f"  {min(ys):8.4g} │{''.join(grid[-1]).rstrip()}"
    axis = f"{min(xs):.2f} GiB"
    what = "of a chip for a token" if unit == TOKENS else f"for one of the {unit.partition('/')[0]}"
    return [
        f"  µs {what}, against memory (# {sure}, o {others}, * Pareto front)",
        *lines,
        f"  {'':9}└{'─' * (_WIDTH + 1)}",
        f"  {'':10}{axis}{f'{max(xs):.2f} GiB':>{_WIDTH + 1 - len(axis)}}",
    ]


def _place(value: float, values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5


def _winner(result: SweepResult) -> list[str]:
    if result.winner is None:
        return ["no compiled point fits"]
    rate = result.winner.tokens_per_sec_per_chip
    speed = f", {rate:,.0f} tokens/s/chip" if rate else ""
    return [f"fastest{speed}:", f"  {result.flags}"]
