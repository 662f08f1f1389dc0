"""A plan: whether a step fits on given chips, how long it takes there, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.planning.compilation.compiling import TooLarge
from mfu_jax.planning.result.changes import Change, Room, changes
from mfu_jax.planning.result.memory import memory_of
from mfu_jax.planning.step_time import compared_runs
from mfu_jax.planning.step_time.bound import bounds
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.grouped_matmuls import without_skipped_rows
from mfu_jax.planning.step_time.kernel_tiles import KernelTiles
from mfu_jax.planning.step_time.layer_timeline import Layer, largest_layer
from mfu_jax.planning.step_time.schedule import Timeline, Turns, timeline
from mfu_jax.planning.step_time.time_range import host_notes, time_range
from mfu_jax.planning.step_time.uncounted_attention import executed_by_dtype, half_of_all_pairs
from mfu_jax.planning.targets import Target
from mfu_jax.util.formatting import percent, seconds_text

_DAY = 86400.0
_PRINTED = 2**30 // 200  # half of the last digit of the limit that a compiler prints
_JAXS_SHARE = 0.75  # of a GPU's memory (JAX's docs, "GPU memory allocation")
_LARGE_OUTPUT = 0.1  # of the peak: a state that is not donated, rather than a few metrics
_MUCH_AGAIN = 0.01  # of the executed FLOPs
_UNITS = ("matmul", "vector", "kernel", "copy", "host")  # not transfers between devices


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one step on one device.

    Attributes:
        model_flops: by `convention`; None if not known.
        tokens: tokens that it trains on; 0: not known.
        convention: how attention pairs are counted.
        experts: whether the model has experts; None if not known.
        own_rows: share of their rows that grouped kernels multiply (expert parallelism).
        tiles: tile sizes of grouped kernels; None: the program's own.
        mesh: axis → size, in device order; empty: as the program says.
        pipeline: turns of the step's pipeline; None: it has none, or they are not known.
    """

    model_flops: int | None
    tokens: float
    convention: str
    experts: bool | None = None
    own_rows: float = 1.0
    tiles: KernelTiles | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    pipeline: Turns | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step of one program on given chips. Times in seconds, everything else per device.

    Attributes:
        target: the chips, as text.
        chips: number of chips.
        hardware: the chip's name.
        devices: number of JAX devices: two per chip on some TPUs.
        fits: whether the program fits into their memory.
        memory_peak_bytes: the compiler's figure; None if it gives none.
        memory_limit_bytes: what a program may use of a device's memory.
        memory: bytes by kind.
        activations_by_scope: bytes saved for the backward pass, by named scope.
        resident_bytes: the part of `memory` that stays between steps: the arguments.
        model_flops: by `convention`; None if not known.
        executed_flops: FLOPs that the program runs; None if it does not fit.
        xla_rematerialized_flops: the part of them that the compiler recomputes to save memory.
        convention: the convention of `model_flops`.
        step_time_bound_seconds: a lower bound: no run of this program is faster.
        step_time_seconds: the prediction.
        step_time_range: where nine of ten measured runs of such models (with experts, or without)
            would lie; for GPUs, where too few runs were compared, the times at higher and lower
            shares of their peaks.
        mfu: predicted MFU.
        mfu_ceiling: MFU at the bound.
        hfu: predicted HFU.
        tokens_per_sec_per_chip: predicted rate.
        time_by_cause: seconds of the prediction by cause; they sum to it.
        bound_by_resource: seconds that each resource is busy at its peak.
        collectives: rows of ``kind`` (with its mesh axes and link), ``seconds``,
            ``hidden_seconds``, ``exposed_seconds``.
        layer: one iteration of the largest loop, to be drawn.
        changes: what would help most, and an upper limit on what it would save.
        tokens: tokens of the whole run; None if not given.
        price: price of one chip-hour; None if not given.
        days: days that `tokens` take at the predicted rate.
        cost: cost of `tokens` at `price`.
        notes: what the plan could not see.
    """

    target: str
    chips: int
    hardware: str = ""
    devices: int = 0
    fits: bool
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    activations_by_scope: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: int = 0
    model_flops: int | None = None
    executed_flops: int | None = None
    xla_rematerialized_flops: int = 0
    convention: str = ""
    step_time_bound_seconds: float | None = None
    step_time_seconds: float | None = None
    step_time_range: tuple[float, float] | None = None
    mfu: float | None = None
    mfu_ceiling: float | None = None
    hfu: float | None = None
    tokens_per_sec_per_chip: float | None = None
    time_by_cause: Mapping[str, float] = field(default_factory=dict)
    bound_by_resource: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Mapping[str, Any], ...] = ()
    layer: Layer | None = None
    changes: tuple[Change, ...] = ()
    tokens: float | None = None
    price: float | None = None
    days: float | None = None
    cost: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the compiler recomputes a notable part of the matmuls to save memory."""
        return _is_much(self.xla_rematerialized_flops, self.executed_flops or 0)

    def for_run(self, *, tokens: float = 0.0, price: float = 0.0) -> Plan:
        """Returns the plan with the days and the cost of a run.

        Args:
            tokens: tokens that the whole run trains on; 0: not given.
            price: price of one chip-hour; 0: not given.
        """
        rate = self.tokens_per_sec_per_chip
        if not tokens:
            return self.with_notes("no cost: pass tokens= beside price=") if price else self
        if not rate:
            why = "the step's tokens, or its time, are not known"
            return self.with_notes(f"no days for {tokens:,.4g} tokens: {why}")
        chip_seconds = tokens / rate
        return replace(
            self,
            tokens=tokens,
            price=price or None,
            days=chip_seconds / self.chips / _DAY,
            cost=chip_seconds / 3600 * price if price else None,
        )

    def with_notes(self, *notes: str) -> Plan:
        """Returns the plan with notes added."""
        return replace(self, notes=(*self.notes, *notes))

    def __str__(self) -> str:
        """The plan as one screen of text."""
        from mfu_jax.planning.result.rendering import render

        return render(self)

    def to_json(self) -> dict[str, Any]:
        """The whole plan as plain JSON values."""
        return asdict(self)

    def _repr_html_(self) -> str:
        from mfu_jax.pages.fragment import fragment

        whole, peak, limit = self.step_time_seconds, self.memory_peak_bytes, self.memory_limit_bytes
        title = f"{self.target}: {'fits' if self.fits else 'does NOT fit'}"
        if peak and limit:
            title += f", {peak / 2**30:,.2f} of {limit / 2**30:,.2f} GiB"
        rows = [
            (cause, seconds_text(seconds), percent(seconds / whole if whole else None))
            for cause, seconds in self.time_by_cause.items()
        ]
        if whole is not None:
            total = f"predicted step, MFU {percent(self.mfu)}, HFU {percent(self.hfu)}"
            rows.append((total, seconds_text(whole), percent(1.0)))
        return fragment(title, ("seconds of a step", "time", "share"), rows, notes=self.notes)


def refused(target: Target, refusal: TooLarge, work: Work | None = None) -> Plan:
    """The plan of a program that the compiler refused, with its times if it was scheduled."""
    if refusal.program is not None:
        plan = make_plan(refusal.program, target, work=work).with_notes(
            "times are those of the program as it was scheduled, had it fitted"
        )
    else:
        plan = Plan(
            target=str(target),
            chips=target.chips,
            hardware=target.chip.name,
            devices=target.devices,
            fits=False,
            model_flops=work.model_flops if work else None,
            convention=work.convention if work else "",
        )
    return replace(
        plan,
        fits=False,
        memory_peak_bytes=refusal.used_bytes,
        memory_limit_bytes=refusal.limit_bytes,
        notes=(*plan.notes, f"the compiler: {refusal.message}"),
    )


def make_plan(
    program: ProgramDump,
    target: Target,
    *,
    work: Work | None = None,
    efficiencies: Efficiencies | None = None,
    residuals: tuple[float, float] | None = None,
) -> Plan:
    """Plans a compiled program.

    Args:
        program: compiled for `target`.
        target: the chips.
        work: the step's work; without it there is no MFU.
        efficiencies: shares of the chip's peaks; defaults to `Efficiencies()`.
        residuals: range of measured / predicted time for nine of ten runs; by default from
            compared_runs.yml, for models with experts, or without, as this one is.

    Raises:
        HloParseError: the program's text is not optimised HLO.
    """
    costs = instruction_costs(
        program,
        kernel_flops=program.kernel_flops,
        trip_counts=program.trip_counts,
        lengths=program.lengths,
    )
    costs = without_skipped_rows(costs, work.own_rows if work else 1.0)
    durations = Durations(
        target=target,
        efficiencies=efficiencies or Efficiencies(),
        tiles=work.tiles if work else None,
        mesh=(work.mesh if work else {}) or program.topology.mesh,
    )
    line = timeline(costs, durations, work.pipeline if work else None)
    if residuals is None:
        residuals = compared_runs.residuals(target.platform, work.experts if work else None)
    resources = bounds(costs, target, program.memory)
    limiting, bound = max(resources.items(), key=lambda pair: pair[1], default=("", 0.0))
    if bound > line.seconds:
        line.spend(f"bound by {limiting}", bound - line.seconds)
    seconds = line.seconds
    memory, kinds = _on_the_device(program.memory or {}), memory_of(program)
    return Plan(
        target=str(target),
        chips=target.chips,
        hardware=target.chip.name,
        devices=target.devices,
        fits=_fits(memory, target),
        memory_peak_bytes=memory.get("peak_memory_in_bytes"),
        memory_limit_bytes=target.chip.usable_memory_bytes,
        memory=kinds.kinds,
        activations_by_scope=kinds.activations,
        resident_bytes=memory.get("argument_size_in_bytes", 0),
        executed_flops=executed_by_dtype(costs).total(),
        xla_rematerialized_flops=costs.executed.xla_rematerialized,
        step_time_bound_seconds=bound,
        step_time_seconds=seconds,
        step_time_range=time_range(
            costs, durations, seconds=seconds, bound=bound, residuals=residuals
        ),
        time_by_cause=dict(sorted(line.by_cause.items(), key=lambda pair: -pair[1])),
        bound_by_resource=resources,
        collectives=_collectives(line),
        layer=largest_layer(costs, durations),
        changes=changes(costs, durations, line, _room(memory, target)),
        notes=(*_notes(costs, memory), *host_notes(costs, target), *_gpu_memory(memory, target)),
        **_rates(costs, target, work, bound, seconds),
    )


def _on_the_device(memory: Mapping[str, int]) -> Mapping[str, int]:
    """Limits the peak to HBM: the compiler's also counts what is offloaded to the host.

    HBM holds no more than the arguments, the new results and the temporaries.
    """
    if not memory.get("host_temp_size_in_bytes"):
        return memory
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    most = sum(memory.get(key, 0) for key in sizes) - memory.get("alias_size_in_bytes", 0)
    return {**memory, "peak_memory_in_bytes": min(memory.get("peak_memory_in_bytes", most), most)}


def _fits(memory: Mapping[str, int], target: Target) -> bool:
    """TPU compilers refuse what does not fit; GPU compilers and dumps for other chips do not."""
    return memory.get("peak_memory_in_bytes", 0) <= target.chip.usable_memory_bytes + _PRINTED


def _gpu_memory(memory: Mapping[str, int], target: Target) -> tuple[str, ...]:
    """A note on the setting that lets JAX use this much of a GPU's memory."""
    share = memory.get("peak_memory_in_bytes", 0) / (target.chip.memory_bytes or 1)
    if target.platform != "cuda" or not _JAXS_SHARE < share <= 1:
        return ()
    return (
        f"the step needs {percent(share)} of the memory, and JAX takes {percent(_JAXS_SHARE)}: set "
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
    )


def _rates(
    costs: ProgramCosts, target: Target, work: Work | None, bound: float, seconds: float
) -> dict[str, Any]:
    chip, executed = target.chip, executed_by_dtype(costs)
    optimal = sum(flops / chip.peak_flops_per_sec(dtype) for dtype, flops in executed.items())
    rates: dict[str, Any] = {"hfu": optimal / seconds}
    if work and work.tokens:
        rates["tokens_per_sec_per_chip"] = work.tokens * chip.devices_per_chip / seconds
    if work and work.model_flops and executed.total():
        share = work.model_flops / executed.total()  # at the program's own mix of dtypes
        rates |= {
            "model_flops": work.model_flops,
            "convention": work.convention,
            "mfu": optimal * share / seconds,
            "mfu_ceiling": optimal * share / bound,
        }
    return rates


def _room(memory: Mapping[str, int], target: Target) -> Room:
    return Room(
        peak_bytes=memory.get("peak_memory_in_bytes", 0),
        resident_bytes=memory.get("argument_size_in_bytes", 0),
        limit_bytes=target.chip.usable_memory_bytes,
    )


def _collectives(line: Timeline) -> tuple[dict[str, Any], ...]:
    rows = []
    for kind, seconds in sorted(line.transfers.items(), key=lambda pair: -pair[1]):
        exposed = line.by_cause.get(kind, 0.0)
        hidden = max(0.0, seconds - exposed)  # a wait may also be for the link
        if kind not in _UNITS:
            times = {"seconds": seconds, "hidden_seconds": hidden, "exposed_seconds": exposed}
            rows.append({"kind": kind, **times})
    return tuple(rows)


def _is_much(again: int, executed: int) -> bool:
    return again > _MUCH_AGAIN * max(executed, 1)


def _notes(costs: ProgramCosts, memory: Mapping[str, int]) -> tuple[str, ...]:
    notes = [
        f"not counted: {item.name} {item.where}: {item.reason}"
        for item in costs.executed.unaccounted
    ]
    if any(half_of_all_pairs(record) for record in costs.records.values() if record.runs):
        notes.append(
            "attention kernels that are not counted are taken for half of all pairs of query and "
            "key, as causal masks keep, in executed FLOPs and in time"
        )
    again, runs = costs.executed.xla_rematerialized, costs.executed.total
    if _is_much(again, runs):
        notes.append(
            f"memory is short: this compiler recomputes {again / 1e12:,.3g} TFLOP of matmuls a "
            f"step ({percent(again / runs)} of what runs); another version may not make it fit; "
            "a smaller batch, or a remat policy that keeps less, may be faster"
        )
    new = memory.get("output_size_in_bytes", 0) - memory.get("alias_size_in_bytes", 0)
    if new > _LARGE_OUTPUT * max(memory.get("peak_memory_in_bytes", 0), 1):
        notes.append(
            f"the step returns {new / 2**20:,.3g} MiB beside its arguments; usually a state that "
            "is not donated: jax.jit(step, donate_argnums=0)"
        )
    return tuple(notes)
