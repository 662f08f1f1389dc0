"""The result of a search, and its text: trials, what each change brought, the winner's flags."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mfu_jax.hardware.chips import named
from mfu_jax.planning.tune.evidence import Trial, speed
from mfu_jax.planning.tune.space import differences
from mfu_jax.util.formatting import columns, counted, json_text, percent
from mfu_jax.verdict import COLUMNS, LikeRuns, NextStep, Verdict

TOKENS = "tokens/s/chip"  # what the speed of the trainer's steps counts

_GIB = 2**30
_MOST_ROWS = 60
_FITS = {True: "fits", False: "too large", None: "?"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step on the way from the start to the winner: another choice on one axis.

    Attributes:
        axis: its name.
        before: the start's choice.
        after: the winner's.
        gain_fraction: by how much it raises the speed, after the changes before it; None: not
            known, as it does not fit without the next ones.
        source: ``measured``, ``planned``, ``estimated`` from other points, or ``unknown``.
    """

    axis: str
    before: str
    after: str
    gain_fraction: float | None
    source: str


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The result of a search.

    Attributes:
        target: the devices, as text.
        chip: its name in the hardware table; empty if unknown.
        unit: what a speed counts.
        points: size of the whole grid.
        rows: every trial; of a point that was planned and measured, the measured one.
        start: where the search began; None if it was not tried.
        winner: the fastest that fits, of the measured ones if there are any.
        settings: the winner's, key → value.
        changed: those of them that the start has not.
        flags: the winner as command-line words, ready to use.
        gain_fraction: the winner's speed over the start's, minus 1; None: the start has none.
        changes: from the start to the winner, one at a time.
        planned_over_measured: of each point with both: its times' ratio, by name.
        plans: trials by plans, those of earlier commands included.
        runs: the same by runs.
        notes: what was left undone.
    """

    target: str
    chip: str = ""
    unit: str
    points: int
    rows: tuple[Trial, ...]
    start: Trial | None
    winner: Trial | None
    settings: Mapping[str, Any]
    changed: Mapping[str, Any]
    flags: str
    gain_fraction: float | None
    changes: tuple[Change, ...]
    planned_over_measured: Mapping[str, float]
    plans: int
    runs: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{tune_verdict(self).render()}\n{render_tune(self)}"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        settings = {name: texts(getattr(self, name)) for name in ("settings", "changed")}
        return {**dataclasses.asdict(self), **settings}


def tune_verdict(result: TuneResult) -> Verdict:
    """The winner in a sentence."""
    best = result.winner
    kinds = ((result.plans, "plan"), (result.runs, "run"))
    tried = " and ".join(counted(n, kind) for n, kind in kinds if n)
    failed = all(trial.source == "failed" for trial in result.rows)
    none = "all failed" if failed else "none fits"
    finding = f"{result.target}: {tried} of {result.points:,} combinations, {none}"
    if best is not None:
        finding = (
            f"{result.target}: {_number(best)} {result.unit} {best.source}, "
            f"{_gain(result)}, by {tried} of {result.points:,} combinations"
        )
    another = f"the first failure: {result.rows[0].note}" if failed else _smaller(result)
    return Verdict(
        kind="tune",
        finding=finding,
        passed=best is not None,
        mfu=None if best is None else best.mfu,
        step_time_seconds=None if best is None else best.step_time_seconds,
        next_steps=(NextStep(text=_advice(result) if best else another),),
        like_runs=None if best is None else _like_runs(result, best),
    )


def _like_runs(result: TuneResult, best: Trial) -> LikeRuns | None:
    """Published runs of such a model on the chip; None if there are none."""
    rate = best.tokens_per_sec_per_chip if result.unit == TOKENS else None
    if not (result.chip and best.mfu):
        return None
    from mfu_jax.published import like_runs  # the analytic counts: 0.3 s

    chip = named(result.chip)
    peak = chip.peak_flops_per_sec("bf16")
    return like_runs(
        chip=chip.name,
        dtype="bf16",
        peak_flops_per_sec=peak,
        flops_per_token=best.mfu * peak * chip.devices_per_chip / rate if rate else None,
        convention="maxtext",
    )


def _smaller(result: TuneResult) -> str:
    """What to try where nothing fits."""
    if result.unit != TOKENS:
        return "half the batch, or settings that keep less memory"
    tried = [t.settings.get("per_device_batch_size") for t in result.rows]
    sizes = [float(text) for text in tried if text and text.replace(".", "", 1).isdecimal()]
    half = f"per_device_batch_size={min(sizes) / 2:g}" if sizes else "half the batch"
    return f"remat_policy=full, {half}, or more chips"


def _winner(result: TuneResult) -> list[str]:
    if result.winner:
        return ["winner:", f"  {result.flags}"]
    is_memory = any(trial.fits is False for trial in result.rows)
    return ["no point fits" if is_memory else "no trial succeeded"]


def _advice(result: TuneResult) -> str:
    """The changed settings, compiler flags as well."""
    if len(result.rows) < min(2, result.points):
        return "a larger budget=: only the start was tried"
    words = [f"{key}={text}" for key, text in result.changed.items()]
    return " ".join(words) or "keep these settings"


def _gain(result: TuneResult) -> str:
    if result.gain_fraction is None:
        return "where the start does not run"
    if not result.changes:
        return "the start itself"
    return f"{percent(result.gain_fraction)} faster than the start"


def show(result: TuneResult, *, is_json: bool, **more: str) -> int:
    """Prints a search's result, and what else to say; returns a command's exit code."""
    if is_json:
        print(json_text({"verdict": tune_verdict(result).to_json(), **more, **result.to_json()}))
    else:
        print("\n".join([str(result), *(f"{key}: {text}" for key, text in more.items())]))
    return 0 if result.winner else 1


def render_tune(result: TuneResult) -> str:
    """The search for the console."""
    return "\n".join(
        [
            *_table(result),
            *_changes(result),
            *_residuals(result),
            *_winner(result),
            *(f"note: {note}" for note in result.notes),
        ]
    )


def _table(result: TuneResult) -> list[str]:
    """The trials, fastest first, each with what differs from the first, the start."""
    start = result.rows[0].values
    fastest_first = sorted(
        result.rows, key=lambda t: (t.fits is not True, t.fits is False, -speed(t))
    )
    rows: list[tuple[str, ...]] = [("changes", "", "GiB", "s", result.unit, "MFU", "from")]
    rows += [(differences(start, t.values), *_cells(t)) for t in fastest_first[:_MOST_ROWS]]
    rest = len(result.rows) - _MOST_ROWS
    why = {t.note: t for t in result.rows if t.source == "failed" and t.note}
    return [
        *(f"  {line}" for line in columns(rows, "<<>>>><", width=COLUMNS - 2)),
        *[f"  … and {rest} more; --json has all"] * (rest > 0),
        *["  *: no other needs less memory and is faster"] * any(t.pareto for t in result.rows),
        *(
            line
            for note, t in why.items()
            for line in textwrap.wrap(
                f"{differences(start, t.values)}: {note}",
                COLUMNS,
                initial_indent="  ",
                subsequent_indent="    ",
                break_long_words=False,
            )
        ),
    ]


def _cells(trial: Trial) -> tuple[str, ...]:
    rate = trial.tokens_per_sec_per_chip
    return (
        _FITS[trial.fits],
        f"{trial.memory_peak_bytes / _GIB:.2f}" if trial.memory_peak_bytes else "",
        f"{trial.step_time_seconds:.4g}" if trial.step_time_seconds else "",
        f"{rate:,.0f}" if rate else "",
        percent(trial.mfu) if trial.mfu is not None else "",
        trial.source + " *" * trial.pareto,
    )


def _changes(result: TuneResult) -> list[str]:
    if not result.changes:
        return []
    rows = [("what each change brought, in this order", "", "", "")]
    for change in result.changes:
        gain = change.gain_fraction
        words = "not on its own" if gain is None else f"{100 * gain:+.1f}%"
        rows.append((f"  {change.axis}", f"{change.before} → {change.after}", words, change.source))
    return columns(rows, "<<><", width=COLUMNS, fold=1)


def _residuals(result: TuneResult) -> list[str]:
    ratios = sorted(result.planned_over_measured.values())
    if not ratios:
        return []
    middle = ratios[len(ratios) // 2]
    return [
        f"measured speed / planned: {middle:.2f} in the middle of {counted(len(ratios), 'point')}, "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    ]


def _number(trial: Trial) -> str:
    number = speed(trial)
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Values as text: what identifies a point, whatever their types."""
    return {key: str(value) for key, value in settings.items()}


def with_pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Marks those that fit and that no other beats in memory and time per token."""
    pairs = {(t.memory_peak_bytes, speed(t)) for t in trials if t.fits and t.memory_peak_bytes}
    front, fastest = set(), 0.0
    for size, rate in sorted(pairs, key=lambda pair: (pair[0], -pair[1])):
        if rate > fastest:
            front.add((size, rate))
            fastest = rate
    return [
        dataclasses.replace(t, pareto=bool(t.fits) and (t.memory_peak_bytes, speed(t)) in front)
        for t in trials
    ]
