"""The changes to a step that would help most, and an upper limit on what each would save.

A saving is the time that the walk of the schedule spends on what the changed program would not do.
The changed program is not compiled, so a saving is a limit, not a promise; a sweep compiles it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mfu_jax.flops.executed.records import InstructionRecord, ProgramCosts
from mfu_jax.planning.step_time.durations import Durations
from mfu_jax.planning.step_time.gpu_kernels import (
    attention_share,
    is_attention,
    is_masked,
    odd_sizes,
)
from mfu_jax.planning.step_time.schedule import BUBBLE, PredictedTime
from mfu_jax.planning.targets import Target
from mfu_jax.verdict import remat_policy

MOST = 3
_LEAST = 0.005  # of the step
_WIDE = ("f32", "f64")
_AGAIN = ("rematerialized", "xla_rematerialized")
_LITTLE = 0.06  # of the memory
# libtpu 0.0.42.1's scheduler hides transfers in 95% of the memory, unless told otherwise
# (scripts/results/held_out_runs.json).
_SCHEDULERS_SHARE = "--xla_tpu_scheduler_percent_shared_memory_limit"
_WHOLE_MEMORY = (
    "hide transfers in the last 5% of the memory, if the step then fits: "
    f"xla_flags={_SCHEDULERS_SHARE}=100"
)
_MORE_VMEM = "leave matmuls 64 MiB of VMEM: xla_flags=--xla_tpu_scoped_vmem_limit_kib=65536"
_BLOCK = 2048  # positions: of MaxText's recipes
_LARGER_BLOCKS = (
    f"attention in blocks of {_BLOCK:,} positions, if VMEM holds them: sa_block_q={_BLOCK} and the "
    "other sa_block_ keys"
)
_WINDOWED = "--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000"
_MORE_MICROBATCHES = "twice the num_pipeline_microbatches=, of half the size: a smaller bubble"
_INSTEAD = {
    "copy": "avoid copies to other layouts, and between HBM and VMEM",
    "host": "offload less to the host's memory: remat_policy=minimal, if that fits",
}
_STATE = "keep the optimizer's state on the device, if it fits, and not in the host's memory"


@dataclass(frozen=True, kw_only=True)
class ProposedChange:
    """One change.

    Attributes:
        change: description.
        saves_seconds: upper limit, per step; for twice the batch, per half of that step.
        gain_fraction: the same as a fraction of the step.
    """

    change: str
    saves_seconds: float
    gain_fraction: float


def changes(
    costs: ProgramCosts,
    durations: Durations,
    line: PredictedTime,
    *,
    is_roomy: bool,
    is_state_offloaded: bool,
    free: int,
    flags: Sequence[str] = (),
) -> tuple[ProposedChange, ...]:
    """At most three changes, largest first; those that save under 0.5% are left out.

    Args:
        costs: the program's costs.
        durations: durations of its instructions.
        line: the program's timeline.
        is_roomy: whether the memory holds twice the batch.
        is_state_offloaded: whether what is in the host's memory are arguments, not activations.
        free: bytes of memory that the step leaves.
        flags: compiler flags that are known to be set.
    """
    saved = [
        (_MORE_VMEM, line.by_cause.get("matmul", 0.0) * (1 - durations.vmem)),
        *_hidden(line, durations.target, is_state_offloaded),
        *_scheduled_in_all_memory(line, durations.target, free, flags),
        *_without_recomputing(costs, durations, free),
        *_narrower(costs, durations),
        *_on_gpus(costs, durations),
        (_LARGER_BLOCKS, _in_larger_blocks(costs, durations)),
        *(_larger_batch(costs, durations, line) if is_roomy else ()),
    ]
    total = line.seconds
    found = [
        ProposedChange(change=words, saves_seconds=seconds, gain_fraction=seconds / total)
        for words, seconds in saved
        if _LEAST * total < seconds < total
    ]
    return tuple(sorted(found, key=lambda change: -change.saves_seconds)[:MOST])


def _hidden(
    line: PredictedTime, target: Target, is_state_offloaded: bool
) -> Iterator[tuple[str, float]]:
    """Savings from exposed transfers, and from idle ticks of a pipeline."""
    instead = {**_INSTEAD, "host": _STATE} if is_state_offloaded else _INSTEAD
    for cause in line.transfers:
        words = instead.get(cause, f"hide or remove {cause}: first, half the devices on its axis")
        if cause.startswith("collective-permute") and target.platform == "tpu":
            words += f" (of collective matmuls: {_WINDOWED})"
        yield words, line.by_cause.get(cause, 0.0)
    yield _MORE_MICROBATCHES, line.by_cause.get(BUBBLE, 0.0)


def _scheduled_in_all_memory(
    line: PredictedTime, target: Target, free: int, flags: Sequence[str]
) -> Iterator[tuple[str, float]]:
    """Savings from hiding transfers that the scheduler's share of the memory leaves exposed."""
    is_full = 0 < free < _LITTLE * target.usable_memory_bytes
    is_set = any(flag.startswith(_SCHEDULERS_SHARE) for flag in flags)
    if target.platform == "tpu" and is_full and not is_set:
        yield _WHOLE_MEMORY, sum(s for cause, s in line.by_cause.items() if " on " in cause)


def _without_recomputing(
    costs: ProgramCosts, durations: Durations, free: int
) -> Iterator[tuple[str, float]]:
    again = [(r, share) for r in costs.records.values() if (share := _recomputed_share(r))]
    seconds = sum(_seconds(record, durations) * share for record, share in again)
    kept = sum(r.runs * r.shape.result_bytes * share for r, share in again if r.flops)
    policy = remat_policy(free / max(kept, 1))
    yield f"recompute less in the backward pass, as the memory allows: {policy}", seconds


def _recomputed_share(record: InstructionRecord) -> float:
    # Kernels of attention form scores again in the backward pass, whatever is saved.
    if not record.flops or record.kernels:
        return float(record.phase in _AGAIN)
    return sum(record.flops_by_phase.get(phase, 0) for phase in _AGAIN) / record.flops


def _narrower(costs: ProgramCosts, durations: Durations) -> Iterator[tuple[str, float]]:
    """Savings from running float32 and float64 matmuls at bfloat16 speed."""
    chip, on_gpus = durations.target.chip, durations.target.platform == "cuda"
    seconds = 0.0
    for record in costs.records.values():
        # A TPU's float32 is bfloat16, several times; a GPU's is TF32, or neither.
        passes = 1 if on_gpus else record.shape.passes
        precision = "highest" if on_gpus and record.shape.is_full_float32 else None
        wide = {d: n for d, n in record.flops_by_dtype.items() if d in _WIDE}
        if wide:
            narrow = sum(wide.values()) / chip.peak_flops_per_sec("bf16")
            now = passes * sum(n / chip.peak_flops_per_sec(d, precision) for d, n in wide.items())
            share = sum(wide.values()) / record.flops
            seconds += _seconds(record, durations) * share * (1 - narrow / now)
    yield "matmuls in bfloat16 that are in float32 (dtype=bfloat16)", seconds


def _on_gpus(costs: ProgramCosts, durations: Durations) -> Iterator[tuple[str, float]]:
    """Savings from filling tensor cores, and from cuDNN's attention without a mask."""
    if durations.target.platform != "cuda":
        return
    shares, odd, masked = durations.efficiencies, 0.0, 0.0
    sizes: set[int] = set()
    for record in costs.records.values():
        seconds = _seconds(record, durations)
        if is_attention(record) and is_masked(record):
            faster = attention_share(record, shares.gpu_masked_attention, masked=True)
            masked += seconds * (
                1 - faster / attention_share(record, shares.gpu_attention, masked=False)
            )
        elif record.flops and seconds and (found := odd_sizes(record)):
            odd += seconds * (1 - shares.odd_matmul / durations.matmul_share)
            sizes.update(found)
    widths = ", ".join(f"{size} → {-(-size // 8) * 8}" for size in sorted(sizes)[:3])
    yield f"matmul dimensions rounded up to a multiple of 8 ({widths})", odd
    yield "attention without a mask, if every row is one document", masked


def _in_larger_blocks(costs: ProgramCosts, durations: Durations) -> float:
    records = costs.records.values()
    return sum(record.runs * durations.saved_by_blocks(record, _BLOCK) for record in records)


def _larger_batch(
    costs: ProgramCosts, durations: Durations, line: PredictedTime
) -> Iterator[tuple[str, float]]:
    """Half the time independent of the batch: the optimizer, and moving weights."""
    if not any("jvp(" in record.op_name for record in costs.records.values()):
        return  # no gradients: all of it may be the batch's
    fixed = sum(
        _seconds(record, durations)
        for record in costs.records.values()
        if record.op_name and "jvp(" not in record.op_name and not record.collective
    )
    fixed += sum(
        seconds
        for cause, seconds in line.by_cause.items()
        if cause.startswith(("all-gather", "reduce-scatter"))
    )
    words = "twice the per_device_batch_size=: the optimizer and the weights' transfers stay"
    yield words, fixed / 2


def _seconds(record: InstructionRecord, durations: Durations) -> float:
    """Seconds of all runs of an instruction on the device's own units."""
    return record.runs * sum(part.seconds for part in durations.of(record) if not part.lanes)
