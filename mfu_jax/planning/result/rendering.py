"""A plan as one screen of text."""

from __future__ import annotations

import itertools
import textwrap

from mfu_jax.planning.result.plan import Plan, warning_of
from mfu_jax.util.formatting import columns, percent, seconds_text
from mfu_jax.verdict import COLUMNS, share_text


def render(plan: Plan) -> str:
    """The plan for the console."""
    notes = [f"note: {note}" for note in plan.notes]
    parts = (_head, _times, _resharding, _changes, _run)
    return "\n".join(itertools.chain(*(part(plan) for part in parts), notes))


def _head(plan: Plan) -> list[str]:
    verdict = "fits" if plan.fits else "does NOT fit"
    peak, limit = plan.memory_peak_bytes, plan.memory_limit_bytes
    sizes = f": {size_text(peak)} of {size_text(limit)}" if peak and limit else ""
    lines = [f"{warning_of(plan)}{plan.target}: {verdict}{sizes}"]
    if plan.memory:
        lines += _memory(plan)
    if plan.model_flops:
        lines.append(
            f"model        {plan.model_flops / 1e12:,.4g} TFLOP a step ({plan.convention})"
        )
    if plan.executed_flops:
        lines.append(f"executed     {plan.executed_flops / 1e12:,.4g} TFLOP a step")
    if plan.compiled_by:
        lines.append(f"compiled by  {plan.compiled_by}")
    return lines


def _memory(plan: Plan) -> list[str]:
    """The kinds of memory, largest first."""
    kinds = sorted(plan.memory.items(), key=lambda pair: -pair[1])
    return ["memory       " + ", ".join(f"{kind} {size_text(size)}" for kind, size in kinds)]


def _times(plan: Plan) -> list[str]:
    if plan.step_time_seconds is None or plan.step_time_bound_seconds is None:
        return []
    limit = max(plan.bound_by_resource.items(), key=lambda pair: pair[1], default=("nothing", 0))
    mfu = f", MFU {percent(plan.mfu)}" if plan.mfu is not None else ""
    ceiling = f", MFU {percent(plan.mfu_ceiling)}" if plan.mfu_ceiling is not None else ""
    low_high = plan.step_time_range
    between = f" ({' to '.join(map(seconds_text, low_high))})" if low_high else ""
    tokens = plan.tokens_per_sec_per_chip
    rate = f", {tokens:,.0f} tokens/s/chip" if tokens else ""
    rows = [("  of a step", "time", "share")]
    rows += [
        (f"  {cause}", seconds_text(seconds), percent(seconds / plan.step_time_seconds))
        for cause, seconds in plan.time_by_cause.items()
        if seconds >= 1e-3 * plan.step_time_seconds
    ]
    return [
        f"bound        {seconds_text(plan.step_time_bound_seconds)} by {limit[0]}{ceiling}",
        f"predicted    {seconds_text(plan.step_time_seconds)}{between}{mfu}, "
        f"HFU {percent(plan.hfu)}{rate}",
        *columns(rows, "<>>"),
        *_transfers(plan, plan.step_time_seconds),
    ]


def _transfers(plan: Plan, step_seconds: float) -> list[str]:
    """What each kind of transfer takes in all, and what of it other work hides."""
    rows = [
        (
            f"  {row['kind']}",
            *(seconds_text(row[f"{part}seconds"]) for part in ("", "hidden_", "exposed_")),
        )
        for row in plan.collectives
        if row["seconds"] >= 1e-3 * step_seconds
    ]
    return columns([("  transfers", "total", "hidden", "exposed"), *rows], "<>>>") if rows else []


def _resharding(plan: Plan) -> list[str]:
    """What the partitioner moves or replicates without need: what, where, and the remedy."""
    lines = ["resharded without need:"] if plan.resharding else []
    for row in plan.resharding:
        lost = f", {seconds_text(row['seconds'])} a step" if row["seconds"] else ""
        lines += [f"  {row['text']}{lost}", f"    {row['advice']}"]
    return lines


def _changes(plan: Plan) -> list[str]:
    if not plan.changes:
        return []
    lines = [
        line
        for c in plan.changes
        for line in textwrap.wrap(
            f"  −{share_text(c.gain_fraction, 'step', c.saves_seconds)}: {c.change}",
            COLUMNS,
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    ]
    return ["would help most, each at most:", *lines]


def _run(plan: Plan) -> list[str]:
    if plan.days is None:
        return []
    lines = [f"run          {plan.days:,.1f} days for {plan.tokens:.4g} tokens"]
    if plan.cost is not None:
        lines.append(f"cost         {plan.cost:,.0f} at {plan.price:g} a chip-hour")
    return lines


def size_text(size: float) -> str:
    """Bytes in GiB, or in MiB or KiB if they are few."""
    if size < 2**20 // 10:
        return f"{size / 2**10:,.3g} KiB"
    if size < 2**30 // 10:
        return f"{size / 2**20:,.3g} MiB"
    return f"{size / 2**30:,.2f} GiB"
