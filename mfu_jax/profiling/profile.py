"""A profile: a trace joined with its programs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mfu_jax import hardware as chips
from mfu_jax.errors import UserError
from mfu_jax.flops.executed.formulas.tiles import beyond_library_tile, library_tile
from mfu_jax.flops.ledger_lines import LedgerLine
from mfu_jax.flops.names import TILES_STATED
from mfu_jax.hardware.peak_sources import memory_bandwidth, resolve_peak
from mfu_jax.hardware.step_peaks import StepPeaks, peaks_by_dtype
from mfu_jax.names import MFU, PROFILE_POINTS, PROFILE_SECONDS
from mfu_jax.profiling.advice.rules import Advice, advice_for, least_gain
from mfu_jax.profiling.advice.stats import LEAST, ProfileStats
from mfu_jax.profiling.attribution.device_times import DeviceTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep, measure
from mfu_jax.profiling.breakdown.program_times import ProgramTime, program_times
from mfu_jax.profiling.breakdown.tables import KEYS, TableRow, table
from mfu_jax.profiling.breakdown.waterfall import Bar, executed_seconds, waterfall
from mfu_jax.profiling.join.ops import Join
from mfu_jax.profiling.join.programs import KnownProgram, ProgramLibrary, open_traces
from mfu_jax.profiling.timeline.time_attribution import summed
from mfu_jax.storage.trace_folders import trace_files
from mfu_jax.util.formatting import percent, seconds_text
from mfu_jax.verdict import (
    TOKENS,
    LikeRuns,
    NextStep,
    TimeLoss,
    Verdict,
    impossible_numbers,
    share_text,
)

_CUBLAS = "__cublas"
_OF_CUBLAS = "and of cuBLAS's tiles, which its kernels' names state"
_ENOUGH = 0.95
_NOTABLE = 0.01  # of the step time


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a step went, as the mean over devices and steps.

    Attributes:
        source: the trace's folder.
        measured: times by op.
        peaks: peaks of one device.
        program: the main program, which takes most of the time.
        executed_seconds: shortest time of its matmuls in a step, at the peak.
        waterfall: from the peak to MFU; sums to the step time.
        programs: each program on its own, longest first.
        beyond: what the hardware runs per step in addition to the program's executed FLOPs, as in
            the ledger, with the tiles that names of cuBLAS kernels state.
        notes: what is missing or assumed.
        advice: what would make a step faster, largest gain first.
        chip: its name in the hardware table; empty if unknown.
        tokens: tokens of a step on one device; None if unknown.
        settings: the trainer's settings, key → text; empty if unknown.
    """

    source: str
    measured: MeasuredStep
    peaks: StepPeaks
    program: KnownProgram
    executed_seconds: float
    waterfall: tuple[Bar, ...]
    programs: tuple[ProgramTime, ...]
    notes: tuple[str, ...]
    beyond: tuple[LedgerLine, ...] = ()
    advice: tuple[Advice, ...] = ()
    chip: str = ""
    tokens: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def mfu(self) -> float:
        """Model FLOPs over the FLOPs that the peak allows in the step time."""
        return next(bar.mfu_points for bar in self.waterfall if bar.name == MFU) / 100

    @property
    def hfu(self) -> float:
        """As `mfu`, with all matmuls that the main program executes."""
        return self.executed_seconds / self.measured.step_seconds

    @property
    def coverage(self) -> float:
        """The share of device time whose ops have an instruction."""
        return self.measured.coverage

    def table(self, by: str, *, depth: int = 0, sort: str = "time") -> tuple[TableRow, ...]:
        """Times grouped by one of ``scope op phase dtype kernel program``.

        Args:
            by: what the ops of a group share.
            depth: group by the first `depth` parts of a name; 0: all parts.
            sort: column sorted by, largest first: ``time runs flops mfu hfu bytes bandwidth``.
        """
        return table(self.measured, self.peaks, KEYS[by], depth=depth, sort=sort)

    @functools.cached_property
    def like_runs(self) -> LikeRuns | None:
        """Published runs of such a model, or of any, on the chip; None if there are none."""
        if not self.chip:
            return None
        from mfu_jax.published import like_runs  # the analytic counts: 0.3 s

        peak, experts = self.peaks.main, self.settings.get("num_experts", "")
        flops = self.mfu * peak.flops_per_sec * self.measured.step_seconds
        return like_runs(
            chip=self.chip,
            dtype=peak.dtype,
            peak_flops_per_sec=peak.flops_per_sec,
            flops_per_token=flops / self.tokens if self.tokens else None,
            convention=self.program.ledger.convention,
            has_experts=int(experts) > 1 if experts.isdecimal() else None,
        )

    @property
    def verdict(self) -> Verdict:
        """The answer first: MFU, how good it is, the largest loss, and what to do next."""
        step, peak = self.measured.step_seconds, self.peaks.main
        losses = [bar for bar in self.waterfall if bar.name != MFU and bar.seconds > 0]
        losses.sort(key=lambda bar: -bar.seconds)
        return Verdict(
            kind="profile",
            finding=impossible_numbers((), self.mfu, self.hfu),
            mfu=self.mfu,
            hfu=self.hfu,
            convention=self.program.ledger.convention,
            peak=f"{peak.tflops_per_sec:.6g} TFLOP/s {peak.dtype}",
            peak_flops_per_sec_per_device=peak.flops_per_sec,
            step_time_seconds=step,
            losses=tuple(
                TimeLoss(name=bar.name, fraction=bar.seconds / step, seconds=bar.seconds)
                for bar in losses
            ),
            next_steps=tuple(self._next_steps()),
            like_runs=self.like_runs,
        )

    def _next_steps(self) -> Iterator[NextStep]:
        for advice in self.advice:
            yield NextStep(
                text=f"{advice.remedy}, against {advice.cause}",
                gain_fraction=advice.gain_seconds / self.measured.step_seconds,
                gain_seconds=advice.gain_seconds,
            )
        if not self.advice:
            yield NextStep(text=f"mfu-jax profile {shlex.quote(self._folder)} by=kernel")
        if self.like_runs and not self.tokens:
            yield NextStep(text=TOKENS)

    @property
    def no_advice(self) -> str:
        """What the place of advice says without any."""
        return f"no known remedy saves {least_gain(self.measured):.0%} of a step"

    @property
    def _folder(self) -> str:
        return self.source.partition("/plugins/profile/")[0]

    def gain_of(self, advice: Advice) -> str:
        """What following the advice saves, as text."""
        seconds = advice.gain_seconds
        return f"saves {share_text(seconds / self.measured.step_seconds, 'step', seconds)}"

    def scalars(self) -> dict[str, float]:
        """The headline numbers and the waterfall, in seconds and in points, by metric name."""
        numbers = {
            "profile/mfu": self.mfu,
            "profile/hfu": self.hfu,
            "profile/step_time_seconds": self.measured.step_seconds,
            "profile/coverage": self.coverage,
        }
        for bar in self.waterfall:
            numbers[f"{PROFILE_SECONDS}/{bar.name}"] = bar.seconds
            numbers[f"{PROFILE_POINTS}/{bar.name}"] = bar.mfu_points
        for program in self.programs:
            numbers[f"profile/program_mfu/{program.name}"] = program.mfu
            numbers[f"profile/program_seconds/{program.name}"] = program.seconds
        return numbers

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        step = seconds_text(self.measured.step_seconds)
        title = f"Where the peak went: step {step}, MFU {percent(self.mfu)}"
        rows = [(b.name, seconds_text(b.seconds), f"{b.mfu_points:.2f}") for b in self.waterfall]
        ends = itertools.accumulate((bar.mfu_points for bar in self.waterfall), initial=0.0)
        bars = [*itertools.pairwise(ends)]
        return fragment(title, ("bar", "time", "pts of MFU"), rows, notes=self.notes, bars=bars)

    def to_json(self, *, depth: int = 0, sort: str = "time") -> dict[str, Any]:
        """The whole profile as plain JSON values; `depth` and `sort` as in `table`."""
        tables = {by: self.table(by, depth=depth, sort=sort) for by in KEYS}
        found = {f"by_{by}": list(map(asdict, rows)) for by, rows in tables.items()}
        return {**self.overview(), **found}

    def overview(self) -> dict[str, Any]:
        """As `to_json`, without the tables."""
        measured, ledger = self.measured, self.program.ledger
        return {
            "verdict": self.verdict.to_json(),
            "source": self.source,
            "platform": measured.platform,
            "device_kind": self.program.device_kind or measured.kind,
            "devices": [_device_json(device) for device in measured.devices],
            "program": measured.main.module,
            "steps": measured.steps,
            "step_time_seconds": measured.step_seconds,
            "coverage": self.coverage,
            "not_covered": _not_covered(measured),
            "mfu": self.mfu,
            "hfu": self.hfu,
            "peak": asdict(self.peaks.main),
            "bytes_per_second": self.peaks.bytes_per_sec,
            "convention": ledger.convention,
            "model_flops": ledger.model,
            "executed_flops": ledger.executed,
            "beyond_executed": {line.label: line.flops for line in self.beyond},
            "waterfall": [_bar_json(bar) for bar in self.waterfall],
            "programs": [_program_json(program) for program in self.programs],
            "advice": [asdict(advice) for advice in self.advice],
            "notes": list(self.notes),
        }


def read_profile(
    path: str | os.PathLike[str],
    *,
    peak_tflops_per_device: float | None = None,
    hardware: str = "",
    model_flops: int | None = None,
    tokens: float | None = None,
    settings: Mapping[str, str] | None = None,
) -> Profile:
    """Reads a trace, joins it with its programs, and divides the time of a step.

    Args:
        path: a folder given to `mfu_jax.profile`, ``profile_dir=`` or `jax.profiler.start_trace`;
            or an ``.xplane.pb`` file.
        peak_tflops_per_device: dense peak of one JAX device, instead of the table's.
        hardware: a chip of the table, or 'calibrate'; by default the trace's chip.
        model_flops: model FLOPs of one run of the main program on one device.
        tokens: tokens of a step on one device, which tell the model's size.
        settings: the trainer's, key → text: advice then has their new values.

    Raises:
        UserError: there is no trace, it is damaged or holds no program, or no peak is known.
    """
    files = trace_files(Path(path))
    devices, library = open_traces(files)
    ops = [name for timeline, _ in devices for name in timeline.names]
    if not any(op.program.module for op in ops) and (only := library.only):
        devices = [(timeline.of_program(only), host) for timeline, host in devices]
    join = Join(library)
    measured = measure(devices, join)
    main = library.find(measured.main)
    if main is None:
        raise UserError(
            f"{str(path)!r}: the program {measured.main.module!r} that ran in it is not known; "
            "expected its HLO in the trace, or a dump beside it",
            hint="usually the profiler was told to leave it out; trace again with mfu_jax.profile "
            f"{'; '.join(library.notes)}",
        )
    if model_flops is not None:
        main = main.with_model(model_flops)
    kind = main.device_kind or measured.kind
    if not (kind or hardware or peak_tflops_per_device):
        raise UserError(
            f"{str(path)!r}: the trace does not name its device; expected hardware=NAME or "
            "peak_tflops_per_device=N",
            hint="usually an AMD GPU; mfu-jax hardware --list has names",
        )
    peak_of = functools.partial(
        resolve_peak,
        kind or None,
        peak_tflops_per_device=peak_tflops_per_device,
        hardware=hardware or None,
    )
    bandwidth = memory_bandwidth(kind, hardware)
    peaks = peaks_by_dtype(peak_of, main.costs.executed.by_dtype, bandwidth)
    if peaks.main.kind == "calibrated" and kind == "cpu":
        peaks = _shared(peaks, len(devices) // len(files))
    ran = {program: known for program in measured.executions if (known := library.find(program))}
    ran[measured.main] = main
    bars = waterfall(measured, ran, main, peaks)
    settings = settings or {}
    stats = ProfileStats(
        measured=measured, peaks=peaks, program=main, programs=ran, settings=settings
    )
    return Profile(
        source=str(files[0].parent),
        measured=measured,
        peaks=peaks,
        program=main,
        executed_seconds=executed_seconds(measured, ran, peaks)[0],
        waterfall=bars,
        programs=program_times(measured, ran, peaks),
        notes=tuple(_notes(stats, bars, library)),
        beyond=_beyond(measured, main),
        advice=advice_for(stats),
        chip=_chip(kind, hardware),
        tokens=tokens,
        settings=settings,
    )


def _shared(peaks: StepPeaks, devices: int) -> StepPeaks:
    """Rescales a calibrated share of this machine to the number of devices of a host's trace."""
    import jax

    share = len(jax.local_devices()) / devices
    shared = f"; shared by the {devices} devices of the trace" if devices > 1 else ""
    source = f"{peaks.main.source}{shared}"
    main = replace(peaks.main, flops_per_sec=peaks.main.flops_per_sec * share, source=source)
    by_dtype = {dtype: flops * share for dtype, flops in peaks.by_dtype.items()}
    return replace(peaks, main=main, by_dtype=by_dtype)


def _chip(kind: str, hardware: str) -> str:
    """The chip's name in the table, by the user's word or by JAX's; empty if unknown."""
    with contextlib.suppress(UserError):
        return (chips.named(hardware) if hardware else chips.lookup(kind)).name
    return ""


def _beyond(measured: MeasuredStep, main: KnownProgram) -> tuple[LedgerLine, ...]:
    """The ledger's rows below executed, with the tiles that kernels' names state."""
    named = 0
    for op in measured.ops:
        record = op.op.record
        if record is None or op.op.source is not main or any(record.beyond):
            continue
        kernels = [k for k in measured.kernels.get(op.op.name, ()) if library_tile(k)]
        shape = record.shape
        if shape.matmul and len(kernels) == 1 and shape.target.startswith(_CUBLAS):
            rest = beyond_library_tile(kernels[0], shape.matmul, shape.is_transposed)
            named += record.runs * rest
    return tuple(
        replace(line, flops=line.flops + named, note=f"{line.note}; {_OF_CUBLAS}")
        if named and line.label == TILES_STATED
        else line
        for line in main.ledger.beyond
        if line.flops or (named and line.label == TILES_STATED)
    )


def _notes(stats: ProfileStats, bars: tuple[Bar, ...], library: ProgramLibrary) -> list[str]:
    measured, main, peaks = stats.measured, stats.program, stats.peaks
    notes = list(library.notes)
    if not main.has_model:
        notes.append(
            f"model FLOPs are {main.ledger.convention}, masked pairs and padding included; pass "
            f"model_flops=N, or trace with mfu_jax.profile"
        )
    if measured.coverage < _ENOUGH:
        most = list(_not_covered(measured).items())[:5]
        rest = ", ".join(f"{kind} {seconds_text(seconds)}" for kind, seconds in most)
        notes.append(f"{1 - measured.coverage:.1%} of device time has no instruction: {rest}")
    if any(bar.seconds < -_NOTABLE * measured.step_seconds for bar in bars):
        cause = "the one given is of other units or a part of the device"
        if peaks.main.kind != "flag":
            cause = "it was calibrated on a busy machine; pass peak_tflops_per_device="
        notes.append(
            f"a bar is below 0: matmuls ran faster than the peak, which is too low; usually {cause}"
        )
    if main.ledger.residual:
        notes += [note for note in main.ledger.notes if "not counted" not in note]
    records = [record for record in main.costs.records.values() if record.runs]
    reasons = {(r.shape.target or r.opcode, reason) for r in records for reason in r.unaccounted}
    notes += [f"{what} is not counted: {reason}" for what, reason in sorted(reasons)]
    idle = sum(measured.idle.values())
    if not measured.host and idle > LEAST * measured.step_seconds:
        notes.append(
            "the trace holds no call of the step, so advice knows nothing of the host; mark each "
            "call by jax.profiler.StepTraceAnnotation, or by instrument(step)"
        )
    if (unexplained := stats.unexplained_idle) > LEAST * measured.step_seconds:
        notes.append(
            f"the trace does not say what the host does for {seconds_text(unexplained)} of a step "
            f"while the device is idle; usually python_tracer_level is 0, or the loop computes"
        )
    if min(measured.recording, idle) > LEAST * measured.step_seconds:
        notes.append(
            f"recording Python's calls takes the host {seconds_text(measured.recording)} of a "
            f"step: steps are shorter without a trace, or with python_tracer_level = 0 in it"
        )
    if measured.steps < 2:
        notes.append("one step only: idle time after it is not seen; trace three or more")
    return notes


def _not_covered(measured: MeasuredStep) -> Mapping[str, float]:
    """Seconds of ops without an instruction, by kind."""
    unknown = [op for op in measured.ops if op.op.record is None and not op.op.is_host_copy]
    kinds = summed((op.op.kind, op.seconds) for op in unknown)
    return dict(sorted(kinds.items(), key=lambda kind: -kind[1]))


def _bar_json(bar: Bar) -> dict[str, Any]:
    scopes = [{"scope": scope, "seconds": seconds} for scope, seconds in bar.scopes.items()]
    return {**asdict(bar), "scopes": scopes}


def _program_json(program: ProgramTime) -> dict[str, Any]:
    bars = [_bar_json(bar) for bar in program.waterfall]
    return {**asdict(program), "mfu": program.mfu, "waterfall": bars}


def _device_json(device: DeviceTime) -> dict[str, Any]:
    seconds = {"step_time_seconds": device.step, "idle_seconds": device.idle}
    return {"device": device.device, **seconds}
