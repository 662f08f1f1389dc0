"""The waterfall: from the peak down to MFU, with every second of a step in exactly one bar.

A step consists of idle time, exposed communication, work without matmuls, and matmuls. Matmuls
divide into their shortest time and what they took beyond it; the shortest time into the model's and
the ledger's other lines. So the bars sum to the step time, whatever the trace contains.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mfu_jax import names
from mfu_jax.flops.names import EVALUATION, OTHER, RECOMPUTED_BY_XLA, REMATERIALISED
from mfu_jax.hardware.step_peaks import StepPeaks
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.attribution.step_times import MeasuredStep
from mfu_jax.profiling.breakdown.ops import communication_of, scope_of
from mfu_jax.profiling.join.ops import DeviceWork
from mfu_jax.profiling.timeline.devices import Program
from mfu_jax.util.formatting import seconds_text, short

if TYPE_CHECKING:
    from mfu_jax.profiling.join.programs import KnownProgram

_MOST_SCOPES = 3
_MOST_KINDS = 8


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One loss, or what is left.

    Attributes:
        name: what the time went to.
        seconds: per step; below 0 if matmuls ran faster than the peak that they are compared with.
        mfu_points: `seconds` as a percentage of the step: points of MFU.
        scopes: named scopes that own most of it, with their seconds; for idle time, what the host
            did.
    """

    name: str
    seconds: float
    mfu_points: float
    scopes: Mapping[str, float]

    @property
    def largest(self) -> str:
        """`scopes` as text."""
        return ", ".join(f"{short(scope)} {seconds_text(s)}" for scope, s in self.scopes.items())


def waterfall(
    measured: MeasuredStep,
    programs: Mapping[Program, KnownProgram],
    main: KnownProgram,
    peaks: StepPeaks,
) -> tuple[Bar, ...]:
    """The bars, from the peak to MFU.

    Args:
        measured: the times.
        programs: the programs that ran.
        main: the program whose model FLOPs count.
        peaks: peaks of one device.
    """
    bars = [*_idle(measured), *_without_matmuls(measured, peaks)]
    bars += _matmuls(measured, programs, main, peaks)
    step = measured.step_seconds
    return tuple(
        Bar(name=name, seconds=seconds, mfu_points=100 * seconds / step, scopes=_largest(scopes))
        for name, seconds, scopes in bars
        if seconds or name == names.MFU
    )


_Bar = tuple[str, float, Mapping[str, float]]


def _largest(scopes: Mapping[str, float]) -> dict[str, float]:
    most = Counter(scopes).most_common(_MOST_SCOPES)
    return {scope: seconds for scope, seconds in most if seconds > 0}


def _idle(measured: MeasuredStep) -> Iterator[_Bar]:
    for where, seconds in measured.idle.items():
        name = f"{names.IDLE}: {where}" if where else names.IDLE
        yield name, seconds, measured.idle_causes.get(where, {})


def _without_matmuls(measured: MeasuredStep, peaks: StepPeaks) -> Iterator[_Bar]:
    """Bars of ops without matmuls; of vector-unit matmuls, the time beyond the shortest."""
    bars: dict[str, dict[str, float]] = {}
    for op in measured.ops:
        if op.op.record is None or op.op.record.is_vector:
            scopes = bars.setdefault(_bar_of(op), defaultdict(float))
            scopes[scope_of(op)] += op.seconds - op.shortest(peaks)
    _merge_short_kinds(bars)
    seconds = {name: sum(scopes.values()) for name, scopes in bars.items()}
    for name in sorted(bars, key=lambda name: (_order(name), -seconds[name])):
        yield name, seconds[name], bars[name]


def _merge_short_kinds(bars: dict[str, dict[str, float]]) -> None:
    """Merges all but the longest kinds without an instruction, which may be thousands."""
    kinds = [name for name in bars if name.startswith(_NOT_JOINED)]
    kinds.sort(key=lambda name: -sum(bars[name].values()))
    if rest := kinds[_MOST_KINDS:]:
        scopes: dict[str, float] = defaultdict(float)
        for name in rest:
            for scope, seconds in bars.pop(name).items():
                scopes[scope] += seconds
        bars[f"{_NOT_JOINED}{len(rest):,} other kinds"] = scopes


_TRANSFER = f"{names.EXPOSED_COPIES} to and from "
_HOST = "waiting for callbacks on the host"
_NOT_JOINED = f"{names.NO_INSTRUCTION}: "
_OF_WORK = {DeviceWork.HOST: _HOST, DeviceWork.CONTROL: names.LOOPS}
_ORDER = (
    names.EXPOSED_COMMUNICATION,
    _HOST,
    _NOT_JOINED,
    names.LOOPS,
    _TRANSFER,
    names.VECTOR_WORK,
)


def _order(name: str) -> int:
    return next(i for i, start in enumerate(_ORDER) if name.startswith(start))


def _bar_of(op: OpTime) -> str:
    joined = op.op
    if joined.work is DeviceWork.COMMUNICATION:
        return f"{names.EXPOSED_COMMUNICATION}{communication_of(op)}"
    if joined.is_host_copy:
        return f"{_TRANSFER}the host"
    if joined.record is None:
        return f"{_NOT_JOINED}{joined.kind}"
    if joined.work is DeviceWork.TRANSFER:
        return f"{_TRANSFER}{'the host' if joined.start and joined.start.host_bytes else 'memory'}"
    return _OF_WORK.get(joined.work, names.VECTOR_WORK)


def _matmuls(
    measured: MeasuredStep,
    programs: Mapping[Program, KnownProgram],
    main: KnownProgram,
    peaks: StepPeaks,
) -> Iterator[_Bar]:
    ops = [op for op in measured.ops if op.op.record is not None and op.op.record.flops]
    of_main, of_others = executed_seconds(measured, programs, peaks)
    below: dict[str, float] = defaultdict(float)
    beyond = 0.0
    for op in ops:
        if op.op.record is not None and not op.op.record.is_vector:
            below[scope_of(op)] += op.seconds - op.shortest(peaks)
            beyond += op.seconds
        else:
            beyond += op.shortest(peaks)
    yield names.BELOW_PEAK, beyond - of_main - of_others, below
    if of_others:
        yield "matmuls of other programs", of_others, {}
    of_program = [op for op in ops if op.op.module == measured.main.module]
    yield from _ledger_bars(main, of_main, of_program)


def executed_seconds(
    measured: MeasuredStep, programs: Mapping[Program, KnownProgram], peaks: StepPeaks
) -> tuple[float, float]:
    """Shortest time of a step's matmuls: the main program's, all versions, and the others'."""
    of_main = of_others = 0.0
    for program, runs in measured.executions.items():
        if program in programs:
            seconds = runs * peaks.seconds(programs[program].costs.executed.by_dtype)
            if program in measured.versions:
                of_main += seconds
            else:
                of_others += seconds
    return of_main, of_others


def _ledger_bars(main: KnownProgram, seconds: float, ops: list[OpTime]) -> Iterator[_Bar]:
    """The shortest time of the program's matmuls, by the lines of its ledger; MFU comes last."""
    ledger = main.ledger
    per_flop = seconds / ledger.executed if ledger.executed else 0.0
    model, *lines = ledger.lines
    phases = {
        REMATERIALISED: ("rematerialized",),
        RECOMPUTED_BY_XLA: ("xla_rematerialized",),
        EVALUATION: ("evaluation",),
        OTHER: ("optimizer", "other"),
    }
    for line in lines:
        scopes = _flops_by_scope(ops, phases.get(line.label, ()))
        yield line.label, line.flops * per_flop, {s: n * per_flop for s, n in scopes.items()}
    yield "unexplained by the ledger", ledger.residual * per_flop, {}
    scopes = _flops_by_scope(ops, main.model_phases)
    yield names.MFU, model.flops * per_flop, {s: n * per_flop for s, n in scopes.items()}


def _flops_by_scope(ops: list[OpTime], phases: tuple[str, ...]) -> Counter[str]:
    scopes: Counter[str] = Counter()
    for op in ops:
        if op.op.record is not None:
            flops = sum(op.op.record.flops_by_phase.get(phase, 0) for phase in phases)
            scopes[scope_of(op)] += flops * op.op.record.runs
    return scopes
