"""What an op is called in bars and tables."""

from __future__ import annotations

from mfu_jax.flops.executed.mesh_axes import axes_of
from mfu_jax.profiling.attribution.device_times import OpTime
from mfu_jax.profiling.join.ops import DeviceWork


def scope_of(op: OpTime) -> str:
    """An op's named scope; its kind, in parentheses, if it has none."""
    record = op.op.start or op.op.record
    return (record.scope if record is not None else "") or f"({op.op.kind})"


def communication_of(op: OpTime) -> str:
    """Kind and mesh axis of a collective, such as ``all-gather over data``."""
    joined = op.op
    if joined.start is None or joined.source is None:
        return joined.kind
    axes = axes_of(joined.start, joined.source.mesh)
    return f"{joined.kind} over {axes}" if axes else joined.kind


def kernel_of(op: OpTime) -> str:
    """A custom kernel's name, a collective with its axis, or any other op's opcode."""
    record = op.op.record
    if record is not None and record.kernels:
        return ", ".join(record.kernels)
    if op.op.work is DeviceWork.COMMUNICATION:
        return communication_of(op)
    if record is not None and record.flops:
        return f"{'vector ' * record.is_vector}matmul ({record.opcode})"
    return op.op.kind
