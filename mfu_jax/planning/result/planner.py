"""From a compiled program to its plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.executed.counting import ProgramCounter, counter_of
from mfu_jax.flops.executed.instruction_costs import costs_of
from mfu_jax.flops.executed.mesh_axes import kind_of, within_slice
from mfu_jax.flops.executed.records import ProgramCosts
from mfu_jax.flops.executed.resharding.findings import resharded_tensors
from mfu_jax.flops.executed.resharding.resharded_tensor import ReshardedTensor
from mfu_jax.hardware.chips import Chip
from mfu_jax.hardware.dtypes import is_wide_integer
from mfu_jax.planning.compilation.compiling import TooLarge
from mfu_jax.planning.result.changes import changes
from mfu_jax.planning.result.memory import memory_of
from mfu_jax.planning.result.plan import UNITS, Plan, StepWork, is_much_recomputed
from mfu_jax.planning.result.vmem import check_kernels, matmul_share
from mfu_jax.planning.step_time import compared_runs, links
from mfu_jax.planning.step_time.attention_kernels import (
    AS_COMPILED,
    executed_by_dtype,
    half_of_all_pairs,
    without_own_shortage,
)
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.grouped_matmuls import without_skipped_rows
from mfu_jax.planning.step_time.layer_timeline import largest_layer
from mfu_jax.planning.step_time.schedule import PredictedTime, predicted_time
from mfu_jax.planning.step_time.schedule_profile import schedule_profile
from mfu_jax.planning.step_time.time_range import bounds, host_notes, time_range
from mfu_jax.planning.targets import JAXS_SHARE, MEMORY_FRACTION, Target
from mfu_jax.util.formatting import percent

_PRINTED = 2**30 // 200  # half of the last digit of the limit that a compiler prints
# Of what JAX takes: above it, 40 of 43 published runs of which the plan fits did fit, below it all
# (scripts/results/plan_memory.json). XLA's scheduler itself stops at 95% of what arguments leave.
_UNDECIDED = 0.93
_LARGE_OUTPUT = 0.1  # of the peak: a state that is not donated, rather than a few metrics
_OTHER_BRANCH = "; runs of another branch may be faster than the bound"
# Platform → parts that wait for each other, and the share of a step that each doubling of them
# adds, beside what the walk has for their transfers: the median of published runs that differ in
# their number alone. Slices: MaxText's tables (configs/v5e and v5p, README.md), twelve doublings
# from 4 to 32 of four models, and three from 1 to 2 of 512B and 1024B, cost 0.8 to 9.9%. GPU hosts:
# half of 187 pairs lose 0.2 to 1.6% (held_out_runs.json in scripts/results).
_OUT_OF_STEP = {"tpu": ("slices", 0.036), "cuda": ("hosts", 0.007)}


def _refused(
    target: Target,
    refusal: TooLarge,
    work: StepWork | None,
    flags: Sequence[str],
    *,
    follows_run: bool,
    compiled_by: str,
) -> Plan:
    """The plan of a program that the compiler refused, with its times if it was scheduled."""
    if refusal.program is not None:
        plan = make_plan(
            refusal.program,
            target,
            work=work,
            flags=flags,
            follows_run=follows_run,
            compiled_by=compiled_by,
        ).with_notes("times are those of the program as it was scheduled, had it fitted")
    else:
        plan = Plan(
            target=str(target),
            chips=target.chips,
            hardware=target.chip.name,
            devices=target.devices,
            fits=False,
            model_flops=work.model_flops if work else None,
            convention=work.convention if work else "",
            compiled_by=compiled_by,
        )
    return replace(
        plan,
        fits=False,
        memory_peak_bytes=refusal.used_bytes,
        memory_limit_bytes=refusal.limit_bytes,
        notes=(*plan.notes, f"the compiler: {refusal.message}"),
    )


def make_plan(
    program: ProgramDump | TooLarge,
    target: Target,
    *,
    work: StepWork | None = None,
    efficiencies: Efficiencies | None = None,
    residuals: tuple[float, float] | None = None,
    flags: Sequence[str] = (),
    follows_run: bool = False,
    compiled_by: str = "",
) -> Plan:
    """Plans a compiled program.

    Args:
        program: compiled for `target`, or the compiler's refusal.
        target: the chips.
        work: the step's work; without it there is no MFU.
        efficiencies: shares of the chip's peaks; defaults to `Efficiencies()`.
        residuals: range of measured / predicted time for nine of ten runs; by default from
            compared_runs.yml, for models with experts, or without, as this one is.
        flags: compiler flags that the program was compiled with, as far as known.
        follows_run: whether they are a measured run's: without one for it, the chip's clock state
            was then the default.
        compiled_by: the compiler, as `Plan.compiled_by`, if it was compiled for the plan: without
            machine code, in which the compiler may still have refused a kernel.

    Raises:
        HloParseError: the program's text is not optimised HLO.
        UserError: a kernel does not fit into VMEM.
    """
    if isinstance(program, TooLarge):
        return _refused(
            target,
            program,
            work,
            flags,
            follows_run=follows_run,
            compiled_by=compiled_by,
        )
    state = target.chip.clock_set_by(" ".join(flags))
    is_at_state = follows_run or state not in ("", "default")
    clock = target.chip.clock_with(flags) if is_at_state else 1.0
    vmem = matmul_share(target.chip, flags) if compiled_by else 1.0  # a dump's flags are not known
    counter, costs, durations = _timed(program, target, work, efficiencies, clock, vmem)
    if compiled_by:
        check_kernels(counter.module, target.chip, flags)
    line = predicted_time(costs, durations, work.pipeline if work else None)
    if residuals is None:
        experts = work.experts if work else None
        residuals = compared_runs.residuals(target.platform, experts, compiled_by)
    resources = bounds(costs, target, program.memory)
    limiting, bound = max(resources.items(), key=lambda pair: pair[1], default=("", 0.0))
    if bound > line.seconds:
        line.spend(f"bound by {limiting}", bound - line.seconds)
    if work and work.loop_seconds:
        line.spend("the trainer's loop", work.loop_seconds)
    many, share = _OUT_OF_STEP[target.platform]
    if (parts := links.parts(target, (), target.devices)) > 1:
        line.spend(f"{many} out of step", share * math.log2(parts) * line.seconds)
    seconds = line.seconds
    memory, limit = _on_the_device(program.memory or {}, target), target.usable_memory_bytes
    kinds = memory_of(replace(program, memory=memory))
    return Plan(
        target=str(target),
        chips=target.chips,
        hardware=target.chip.name,
        devices=target.devices,
        fits=_fits(memory, target),
        memory_peak_bytes=memory.get("peak_memory_in_bytes"),
        memory_limit_bytes=limit,
        memory=kinds,
        resident_bytes=memory.get("argument_size_in_bytes", 0),
        executed_flops=executed_by_dtype(costs).total(),
        xla_rematerialized_flops=costs.executed.xla_rematerialized,
        step_time_bound_seconds=bound,
        step_time_seconds=seconds,
        step_time_range=time_range(
            costs, durations, seconds=seconds, bound=bound, residuals=residuals
        ),
        time_by_cause=dict(sorted(line.by_cause.items(), key=lambda pair: -pair[1])),
        ops=_ops(costs, line, durations.mesh),
        bound_by_resource=resources,
        collectives=_collectives(line),
        resharding=tuple(
            _resharding(tensor, costs, durations)
            for tensor in resharded_tensors(counter, _mesh(program, work))
        ),
        layer=largest_layer(costs, durations),
        changes=changes(
            costs,
            durations,
            line,
            is_roomy=_is_roomy(memory, target),
            is_state_offloaded="host" in kinds and not memory.get("host_temp_size_in_bytes"),
            free=limit - memory.get("peak_memory_in_bytes", limit),
            flags=flags,
        ),
        clock_state=target.chip.clock_state,
        compiled_by=compiled_by,
        doubts=_undecided(memory, target),
        notes=(
            *_notes(costs, memory),
            *host_notes(costs, target),
            *_gpu_memory(memory, target),
            *_clock(target.chip, state if is_at_state else None),
        ),
        **_rates(costs, target, work, bound, seconds),
    )


def planned_profile(program: ProgramDump, target: Target, work: StepWork | None) -> str:
    """The planned durations of a GPU's program, in place of a run's profile.

    Args:
        program: compiled for `target`.
        target: the chips.
        work: the step's work.
    """
    _, costs, durations = _timed(program, target, work)
    return schedule_profile(costs, durations)


def _timed(
    program: ProgramDump,
    target: Target,
    work: StepWork | None,
    efficiencies: Efficiencies | None = None,
    clock: float = 1.0,
    vmem: float = 1.0,
) -> tuple[ProgramCounter, ProgramCosts, Durations]:
    """The program's counter, its costs and its durations."""
    if work and work.trip_counts:
        program = replace(program, trip_counts=work.trip_counts)
    counter = counter_of(program, **program.counting)
    costs = costs_of(counter)
    durations = Durations(
        target=target,
        efficiencies=efficiencies or Efficiencies(),
        tiles=work.tiles if work else None,
        has_tokamax_experts=work.has_tokamax_experts if work else False,
        mesh=within_slice(_mesh(program, work), costs.devices),
        attention=(work.attention if work else None) or AS_COMPILED,
        clock=clock,
        vmem=vmem,
    )
    costs = without_skipped_rows(costs, work.own_rows if work else 1.0)
    costs = without_own_shortage(costs, work.partial_gradient_bytes if work else 0.0)
    return counter, _without_integer_matmuls(costs), durations


def _mesh(program: ProgramDump, work: StepWork | None) -> Mapping[str, int]:
    return (work.mesh if work else {}) or program.topology.mesh


def _without_integer_matmuls(costs: ProgramCosts) -> ProgramCosts:
    """Costs in which matmuls of wide integers are elementwise work: no matrix unit has a peak."""
    records, flops = dict(costs.records), Counter(costs.executed.by_dtype)
    for name, record in costs.records.items():
        kept = {d: n for d, n in record.flops_by_dtype.items() if not is_wide_integer(d)}
        more = record.flops - sum(kept.values())
        if more:
            records[name] = replace(
                record, flops_by_dtype=kept, elementwise=record.elementwise + more
            )
    for dtype in list(flops):
        if is_wide_integer(dtype):
            del flops[dtype]
    return replace(costs, records=records, executed=replace(costs.executed, by_dtype=flops))


def _on_the_device(memory: Mapping[str, int], target: Target) -> Mapping[str, int]:
    """Sets the peak to what the runtime needs of the device's memory.

    HBM holds no more than the arguments, the new results and the temporaries; the compiler's peak
    also counts what is offloaded to the host. On a GPU it holds all of them, as the temporaries are
    one allocation with the gaps between them (openxla/xla, gpu_executable.cc,
    `GenerateBufferAllocations`).
    """
    sizes = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    most = sum(memory.get(key, 0) for key in sizes) - memory.get("alias_size_in_bytes", 0)
    is_allocated = target.platform == "cuda" and "temp_size_in_bytes" in memory
    if not (is_allocated or memory.get("host_temp_size_in_bytes")):
        return memory
    peak = most if is_allocated else min(memory.get("peak_memory_in_bytes", most), most)
    return {**memory, "peak_memory_in_bytes": peak}


def _fits(memory: Mapping[str, int], target: Target) -> bool:
    """TPU compilers refuse what does not fit; GPU compilers and dumps for other chips do not."""
    return memory.get("peak_memory_in_bytes", 0) <= target.usable_memory_bytes + _PRINTED


def _undecided(memory: Mapping[str, int], target: Target) -> tuple[str, ...]:
    """A doubt where XLA's GPU scheduler has filled its memory, which the run's may not manage."""
    used = memory.get("peak_memory_in_bytes", 0) / (target.usable_memory_bytes or 1)
    if target.platform != "cuda" or not target.memory_fraction or not _UNDECIDED < used <= 1:
        return ()
    return (f"{percent(used)} of what JAX takes, where published runs fit or went out of memory",)


def _gpu_memory(memory: Mapping[str, int], target: Target) -> tuple[str, ...]:
    """A note on the setting that lets JAX use this much of a GPU's memory."""
    share = memory.get("peak_memory_in_bytes", 0) / (target.chip.usable_memory_bytes or 1)
    taken = target.memory_fraction or JAXS_SHARE
    if target.platform != "cuda" or not taken < share <= 1:
        return ()
    more = "" if target.memory_fraction else ", and pass it as memory_fraction=…"
    return (
        f"the step needs {percent(share)} of the memory, and JAX takes {percent(taken)}: set "
        f"{MEMORY_FRACTION}{more}: XLA hides transfers within it",
    )


def _clock(chip: Chip, state: str | None) -> tuple[str, ...]:
    """A note on the clock state that a run must set, or on the one that this run had."""
    if state is not None:
        note = chip.clock_note(state)
        return (f"{note}; the times are at the run's clock",) if note else ()
    if not chip.clock_state:
        return ()
    return (
        f"MFU's peak and the times hold at {chip.clock_state}: set it in LIBTPU_INIT_ARGS; "
        f"without it, published steps took {chip.clock_state_gain} longer",
    )


def _rates(
    costs: ProgramCosts, target: Target, work: StepWork | None, bound: float, seconds: float
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


def _is_roomy(memory: Mapping[str, int], target: Target) -> bool:
    """Whether twice the batch fits even if all but the resident state doubles."""
    more = 2 * memory.get("peak_memory_in_bytes", 0) - memory.get("argument_size_in_bytes", 0)
    return 0 < more <= target.usable_memory_bytes


def _ops(
    costs: ProgramCosts, line: PredictedTime, mesh: Mapping[str, int]
) -> tuple[dict[str, Any], ...]:
    """The predicted time by scope, phase and kind of instruction, with their work."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    none = {"seconds": 0.0, "runs": 0, "flops": 0, "hbm_bytes": 0}
    for name, seconds in line.by_op.items():
        record = costs.records.get(name)
        key = (record.scope, record.phase, kind_of(record, mesh)) if record else ("", "", name)
        row = rows.setdefault(key, {**none, "instructions": {}})
        row["seconds"] += seconds
        if record:
            row["instructions"][name] = seconds
            row["runs"] += record.runs
            row["flops"] += record.runs * record.flops
            row["hbm_bytes"] += record.runs * record.hbm_bytes
    named = [dict(zip(("scope", "phase", "kind"), key, strict=True)) | rows[key] for key in rows]
    return tuple(sorted(named, key=lambda row: -row["seconds"]))


def _collectives(line: PredictedTime) -> tuple[dict[str, Any], ...]:
    rows = []
    for kind, seconds in sorted(line.transfers.items(), key=lambda pair: -pair[1]):
        exposed = line.by_cause.get(kind, 0.0)
        hidden = max(0.0, seconds - exposed)  # a wait may also be for the link
        if kind not in UNITS:
            times = {"seconds": seconds, "hidden_seconds": hidden, "exposed_seconds": exposed}
            rows.append({"kind": kind, **times})
    return tuple(rows)


def _resharding(
    tensor: ReshardedTensor, costs: ProgramCosts, durations: Durations
) -> dict[str, Any]:
    """A finding with its share of the time of its transfers, each alone on its links."""
    records = [costs.records[name] for name in tensor.instructions if name in costs.records]
    seconds = sum(r.runs * part.seconds for r in records for part in durations.of(r) if part.lanes)
    moved = sum(r.runs * r.collective.bytes for r in records if r.collective)
    share = min(1.0, tensor.bytes_moved / moved) if moved else 1.0
    return {**tensor.to_json(), "seconds": seconds * share}


def _notes(costs: ProgramCosts, memory: Mapping[str, int]) -> tuple[str, ...]:
    notes = [
        flag.text + _OTHER_BRANCH * flag.text.startswith("conditional ")
        for flag in costs.executed.flags
    ]
    notes += [
        f"not counted exactly: {item.name} {item.where}: {item.reason}"
        for item in costs.executed.unaccounted
    ]
    if any(half_of_all_pairs(record) for record in costs.records.values() if record.runs):
        notes.append(
            "attention kernels that are not counted are taken for half of all pairs, as causal "
            "masks keep"
        )
    again, runs = costs.executed.xla_rematerialized, costs.executed.total
    if is_much_recomputed(again, runs):
        notes.append(
            f"memory is short: this compiler recomputes {again / 1e12:,.3g} TFLOP of matmuls a "
            f"step ({percent(again / runs)} of what runs), and another version may not; a smaller "
            "batch, or a remat policy that keeps less, may be faster"
        )
    new = memory.get("output_size_in_bytes", 0) - memory.get("alias_size_in_bytes", 0)
    if new > _LARGE_OUTPUT * max(memory.get("peak_memory_in_bytes", 0), 1):
        notes.append(
            f"the step returns {new / 2**20:,.3g} MiB beside its arguments; usually a state that "
            "is not donated: jax.jit(step, donate_argnums=0)"
        )
    return tuple(notes)
