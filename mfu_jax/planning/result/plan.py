"""A plan: whether a step fits on given chips, how long it takes there, and what limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mfu_jax.util.formatting import percent, seconds_text

if TYPE_CHECKING:  # a plan is data: what makes its parts is imported by `planner`
    from mfu_jax.planning.result.changes import ProposedChange
    from mfu_jax.planning.step_time.attention_kernels import RunsKernel
    from mfu_jax.planning.step_time.grouped_matmuls import KernelTiles
    from mfu_jax.planning.step_time.layer_timeline import LayerTimeline
    from mfu_jax.planning.step_time.schedule import PipelineTicks

_DAY = 86400.0
UNITS = ("matmul", "vector", "kernel", "copy", "host")  # causes that are no transfers
_MUCH_AGAIN, _FAR_OFF = 0.01, 0.05  # of the executed FLOPs
_FAR_OFF_WAITS = 0.2  # of the step: 25% more than without
_FULL = 0.9  # of the memory; beyond, compilers end transfers right after their start


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of one step on one device.

    Attributes:
        model_flops: by `convention`; None if not known.
        tokens: tokens that it trains on; 0: not known.
        convention: how attention pairs are counted.
        experts: whether the model has experts; None if not known.
        own_rows: share of their rows that grouped kernels multiply (expert parallelism).
        tiles: tile sizes of grouped kernels; None: the program's own.
        has_tokamax_experts: whether the run's grouped kernels are tokamax's.
        mesh: axis → size, in device order; empty: as the program says.
        attention: where the run's attention kernel is another than the program's.
        partial_gradient_bytes: that the compiled attention kernel holds beyond the run's.
        loop_seconds: what the trainer's loop adds to the device's work.
        pipeline: ticks of the step's pipeline; None: it has none, or they are not known.
        trip_counts: iterations of loops that depend on data; empty: those of the dump.
    """

    model_flops: int | None
    tokens: float
    convention: str
    experts: bool | None = None
    own_rows: float = 1.0
    tiles: KernelTiles | None = None
    has_tokamax_experts: bool = False
    mesh: Mapping[str, int] = field(default_factory=dict)
    attention: RunsKernel | None = None
    partial_gradient_bytes: float = 0.0
    loop_seconds: float = 0.0
    pipeline: PipelineTicks | None = None
    trip_counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step of one program on given chips. Times in seconds, everything else per device.

    Attributes:
        target: the chips, as text.
        model: what is planned, in words; empty if not known.
        compiled_by: the compiler's packages and their versions; empty for a program that was given.
        chips: number of chips.
        hardware: the chip's name.
        devices: number of JAX devices: two per chip on some TPUs.
        fits: whether the program fits into their memory.
        memory_peak_bytes: the compiler's figure; None if it gives none.
        memory_limit_bytes: what a program may use of a device's memory.
        memory: bytes by kind.
        resident_bytes: the part of `memory` that stays between steps: the arguments.
        model_flops: by `convention`; None if not known.
        executed_flops: FLOPs that the program runs; None if it does not fit.
        xla_rematerialized_flops: the part of them that the compiler recomputes to save memory.
        convention: the convention of `model_flops`.
        step_time_bound_seconds: a lower bound: no run of this program is faster, unless a note
            names a conditional, of whose branches it has the most expensive.
        step_time_seconds: the prediction.
        step_time_range: where nine of ten measured runs of such models (with experts, or without)
            would lie; for GPUs, where too few runs were compared, the times at higher and lower
            shares of their peaks.
        mfu: predicted MFU.
        mfu_ceiling: MFU at the bound.
        hfu: predicted HFU.
        tokens_per_sec_per_chip: predicted rate.
        time_by_cause: seconds of the prediction by cause; they sum to it.
        ops: the prediction by groups of instructions: rows of ``scope``, ``phase``, ``kind``,
            ``seconds``, ``runs``, ``flops``, ``hbm_bytes`` and ``instructions`` (their seconds by
            name), longest first; they sum to it, too.
        bound_by_resource: seconds that each resource is busy at its peak.
        collectives: rows of ``kind`` (with its mesh axes and link), ``seconds``,
            ``hidden_seconds``, ``exposed_seconds``.
        resharding: tensors that the partitioner moves or replicates without need: rows as
            of `ReshardedTensor.to_json`, with ``seconds`` of their transfers.
        layer: one iteration of the largest loop, to be drawn.
        changes: what would help most, and an upper limit on what it would save.
        tokens: tokens of the whole run; None if not given.
        price: price of one chip-hour; None if not given.
        days: days that `tokens` take at the predicted rate.
        cost: cost of `tokens` at `price`.
        clock_state: at which MFU's peak holds, and which a run must set; empty if there is one.
        another_program: what was asked for and is not planned, if that makes it another program.
        left_out: settings that a run does not give, in place of which defaults are planned, if they
            decide much of its time.
        left_out_share: of the predicted time, what other settings would save at most.
        doubts: what else may put a run out of memory, or far from the time, and how far.
        notes: what the plan could not see, with `with_lost` first what may change its time most.
    """

    target: str
    model: str = ""
    compiled_by: str = ""
    chips: int
    hardware: str = ""
    devices: int = 0
    fits: bool
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
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
    ops: tuple[Mapping[str, Any], ...] = ()
    bound_by_resource: Mapping[str, float] = field(default_factory=dict)
    collectives: tuple[Mapping[str, Any], ...] = ()
    resharding: tuple[Mapping[str, Any], ...] = ()
    layer: LayerTimeline | None = None
    changes: tuple[ProposedChange, ...] = ()
    tokens: float | None = None
    price: float | None = None
    days: float | None = None
    cost: float | None = None
    clock_state: str = ""
    another_program: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    left_out_share: float = 0.0
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_short_of_memory(self) -> bool:
        """Whether the compiler recomputes a notable part of the matmuls to save memory."""
        return is_much_recomputed(self.xla_rematerialized_flops, self.executed_flops or 0)

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

    def with_lost(self, other_work: Sequence[str], details: Sequence[str]) -> Plan:
        """Returns the plan of a step that is only near to the one that was asked for.

        Args:
            other_work: what makes it another program: no range would hold the run.
            details: what else is not followed, the largest effect first; notes before the others.
        """
        return replace(
            self,
            another_program=(*self.another_program, *other_work),
            step_time_range=None if other_work else self.step_time_range,
            notes=(*details, *self.notes),
        )

    def with_doubt(self, why: str, longer: float = 0.0) -> Plan:
        """Returns the plan with a reason, in its first line, why its time may be far off.

        Args:
            why: the reason, with how much it may be.
            longer: of the time, what a run may take more: its range ends so much later.
        """
        span = self.step_time_range
        if span:
            span = span[0], span[1] * (1 + longer)
        return replace(self, doubts=(*self.doubts, why), step_time_range=span)

    def __str__(self) -> str:
        """The verdict, and the plan as one screen of text."""
        from mfu_jax.planning.result.rendering import render
        from mfu_jax.planning.result.verdict import plan_verdict

        return f"{plan_verdict(self).render()}\n{render(self)}"

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


def warning_of(plan: Plan) -> str:
    """What a plan's first line begins with: why its time may be far off; empty: nothing says so."""
    why = []
    if plan.another_program:
        why.append(f"another program's plan, without {'; '.join(plan.another_program)}: ")
    if plan.left_out:
        why.append(
            f"planned with defaults for what the run leaves out ({', '.join(plan.left_out)}), "
            f"which may take {percent(plan.left_out_share)} of this step more than its own: "
        )
    why += [f"{doubt}: " for doubt in plan.doubts]
    again = plan.xla_rematerialized_flops / max(plan.executed_flops or 0, 1)
    if again >= _FAR_OFF and not plan.another_program:
        why.append(f"{percent(again)} recomputed for want of memory, which a run may not need: ")
    waits = sum(row["exposed_seconds"] for row in plan.collectives)
    waits /= plan.step_time_seconds or math.inf
    used = (plan.memory_peak_bytes or 0) / (plan.memory_limit_bytes or math.inf)
    if waits > _FAR_OFF_WAITS and used > _FULL:
        share = percent(waits)
        why.append(f"{share} waits for transfers, which a compiler with memory to spare may hide: ")
    return "".join(why)


def is_much_recomputed(again: int, executed: int) -> bool:
    """Whether recomputed FLOPs are a notable part of those executed."""
    return again > _MUCH_AGAIN * max(executed, 1)
