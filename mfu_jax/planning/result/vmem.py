"""Refuses programs with a kernel that a TPU's VMEM cannot hold, as its compiler would.

libtpu finds it only in machine code, for which no plan waits. The limits are those of its messages
(0.0.42.1, kernels compiled for absent chips): ``Scoped allocation with size 32.00M and limit 16.00M
exceeded scoped vmem limit``, and ``Used 80.00M of 64.00M vmem``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.hlo.module import HloModule
from mfu_jax.flops.executed.kernels.bodies.body import UnknownBodyError
from mfu_jax.flops.executed.kernels.pallas_vmem import buffers
from mfu_jax.flops.executed.kernels.registry import MOSAIC_TPU, KernelCall
from mfu_jax.hardware.chips import Chip


class _Vmem(NamedTuple):
    """MiB of a core's VMEM: what a kernel may take by default, and all of it."""

    default: int
    whole: int


_CHIPS = {
    "TPU v5e": _Vmem(16, 128),
    "TPU v5p": _Vmem(16, 64),
    "TPU v6e (Trillium)": _Vmem(32, 128),
    "TPU7x (Ironwood)": _Vmem(32, 64),
}
_FLAG = re.compile(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)")
_XLAS_OWN = "mosaic_fusion_entry_point"  # kernels of ragged_dot, whose blocks XLA chooses
_MIB = 2**20


def check_kernels(module: HloModule, chip: Chip, flags: Sequence[str]) -> None:
    """Checks the Pallas kernels of a program.

    A kernel that passes may still be refused: the compiler adds up to a few MiB.

    Args:
        module: the program.
        chip: that it is compiled for.
        flags: compiler flags.

    Raises:
        UserError: a kernel's blocks and scratch exceed what it may take.
    """
    if not (vmem := _CHIPS.get(chip.name)):
        return
    set_by_flags = _FLAG.findall(" ".join(flags))
    default = int(set_by_flags[-1]) / 1024 if set_by_flags else vmem.default
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            call = KernelCall(computation, instruction)
            is_kernel = instruction.opcode == "custom-call" and call.target == MOSAIC_TPU
            if is_kernel and _XLAS_OWN not in instruction.attribute_text:
                limit = min(_own_limit(call) or default, vmem.whole)
                _check(call, chip, limit, vmem.whole)


def _own_limit(call: KernelCall) -> float:
    """MiB that the kernel's author allows it; 0 without."""
    rows = call.config.get("scoped_memory_configs") or ()
    return max((int(row.get("size", 0)) / _MIB for row in rows), default=0)


def _check(call: KernelCall, chip: Chip, limit: float, whole: int) -> None:
    if (needed := least_mib(call)) <= limit:
        return
    raise UserError(
        f"the kernel {call.name} needs at least {needed:,.4g} MiB of VMEM, two buffers for each "
        f"block that changes; on a {chip.name} it may take {limit:,.4g} MiB, and the compiler "
        "would refuse it",
        hint="usually blocks that are too large (sa_block_…, tile_…); pass smaller ones, or up "
        f"to xla_flags=--xla_tpu_scoped_vmem_limit_kib={whole * 1024} if the kernel sets "
        "no limit of its own",
    )


def least_mib(call: KernelCall) -> float:
    """What a kernel needs at least; 0 if its body cannot be read.

    Arrays that XLA has put into VMEM need no buffers.
    """
    config = call.config.get("custom_call_config")
    try:
        needed = buffers(str(config.get("body", "")) if isinstance(config, dict) else "")
    except UnknownBodyError:
        return 0.0
    arrays = [*call.operands[needed.prefetched :], *call.results]
    blocks = zip(arrays, needed.blocks, strict=False)
    moved = sum(size for array, size in blocks if not array.is_in_fast_memory)
    return (moved + needed.scratch) / _MIB
