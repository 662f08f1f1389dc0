"""The executed count of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mfu_jax.flops.count import FlopCount
from mfu_jax.flops.executed.cost_types import Collective


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A choice that the reader of a count should know about, and how often it was made."""

    text: str
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class ExecutedCount(FlopCount):
    """Matmul FLOPs that one device executes in one call of the program.

    Attributes:
        xla_rematerialized: FLOPs that XLA runs again to save memory, without `jax.checkpoint`. Part
            of `total`, not of `forward` or `rematerialized`.
        duplicated: FLOPs of matmuls that XLA repeats on the same operands in another fusion. Part
            of `total`.
        duplicated_operations: the forward and backward part of `duplicated`, keyed as
            `by_operation`, which excludes it.
        repeated: FLOPs of forward and backward matmuls that several devices run on the same values,
            beyond one run of each, by a description of the extent. Part of `total`.
        repeated_attention: the part of `repeated` in `attention_kernels`.
        repeated_by_user: the part of `repeated` inside a `shard_map`.
        padding: FLOPs of forward and backward matmuls on explicit zero padding. Part of `total`.
        expansion: the same for zeros of ragged and depthwise products that XLA computes densely.
        in_pieces: FLOPs of convolutions on overlapping pieces of images: by kind of piece, then
            keyed as `by_operation`, of which they are a part.
        vector_matmuls: FLOPs of matmuls that run on vector units: XLA writes them as a
            multiplication and a sum, because one of m, n and k is 1. Part of `total`.
        hardware_passes: FLOPs of matmuls that run as several lower-precision passes, by passes:
            ``{"bf16_x6": …}`` takes six times as long as bf16. Counted once, 2·m·n·k, in `total`.
        kernels: FLOPs of custom kernels that XLA does not see into (or counts wrongly), by name.
            Part of `total`.
        attention_kernels: FLOPs of attention kernels, forward and backward, without recomputation.
        attention_operations: the same by operation: a part of `by_operation`.
        elementwise: FLOPs of all other instructions, by XLA's rule of one per element of a result.
            Not part of `total`.
        beyond: what the hardware runs in addition to `total`, by its line in the ledger: the rest
            of whole tiles, and window positions on padding.
        overhang: the part of `beyond` that forward and backward Pallas kernels run where their
            blocks overhang their arrays, without recomputation; by the ledger's name for it.
        recomputed_in_kernels: the part of `rematerialized` that attention kernels recompute in
            their backward pass, without `jax.checkpoint`.
        named: how many instructions have the name of each operation, keyed as `by_operation`, in a
            forward, backward or rematerialised phase, whether or not they cost anything.
        host: FLOPs that the program hands to the host (`compute_on("device_host")`). Not part of
            `total`, which is the device's.
        host_operations: the same by operation.
        hbm_bytes: bytes that unfused instructions read from and write to HBM.
        collectives: every collective, with its bytes and runs.
        loops_once: `total` with every loop body counted once, as in XLA's own report.
        kernels_once: FLOPs of `kernels` with every loop body counted once.
        kernels_xla: what XLA reports for `kernels_once`: the authors' `cost_estimate`s, or 0.
        vector_once: `vector_matmuls` with every loop body counted once.
        vector_xla: what XLA reports for `vector_once`: one FLOP per multiplication or addition.
        elementwise_once: `elementwise` with every loop body counted once.
        flags: choices that the count made, such as the branch of a conditional.
    """

    xla_rematerialized: int = 0
    duplicated: int = 0
    duplicated_operations: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, int] = field(default_factory=dict)
    repeated_attention: int = 0
    repeated_by_user: int = 0
    padding: int = 0
    expansion: int = 0
    in_pieces: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    vector_matmuls: int = 0
    hardware_passes: Mapping[str, int] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)
    beyond: Mapping[str, int] = field(default_factory=dict)
    overhang: Mapping[str, int] = field(default_factory=dict)
    recomputed_in_kernels: int = 0
    attention_kernels: int = 0
    attention_operations: Mapping[str, int] = field(default_factory=dict)
    elementwise: int = 0
    named: Mapping[str, int] = field(default_factory=dict, repr=False)
    host: int = 0
    host_operations: Mapping[str, int] = field(default_factory=dict)
    hbm_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    loops_once: int = 0
    kernels_once: int = 0
    kernels_xla: int = 0
    vector_once: int = 0
    vector_xla: int = 0
    elementwise_once: int = 0
    flags: tuple[Flag, ...] = ()

    @property
    def total(self) -> int:
        """Everything that runs."""
        return super().total + self.xla_rematerialized

    @property
    def on_hardware(self) -> int:
        """`total` and `beyond`: what the tensor cores' counters see."""
        return self.total + sum(self.beyond.values())
