"""A TPU's VMEM: how fast matmuls are in their share, and kernels that it cannot hold, refused.

A block that changes from step to step of the grid has two buffers, one of which is being filled;
what the kernel does not use has none. What the compiler adds is not in the kernel's body.

libtpu finds such a kernel only in machine code, for which no plan waits. The limits are those of
its messages (0.0.42.1, kernels compiled for absent chips): ``Scoped allocation with size 32.00M and
limit 16.00M exceeded scoped vmem limit``, and ``Used 80.00M of 64.00M vmem``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.hlo.module import HloModule
from mfu_jax.flops.executed.kernels.bodies.body import UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.reader import integer, integers
from mfu_jax.flops.executed.kernels.pallas_tpu import kernel_function, read_kernel
from mfu_jax.flops.executed.kernels.registry import MOSAIC_TPU, KernelCall
from mfu_jax.hardware.chips import Chip


class _Vmem(NamedTuple):
    """A core's VMEM.

    Attributes:
        default: MiB that one instruction may take by default.
        whole: MiB in all.
        matmul: the share of their speed that matmuls reach with the default.
    """

    default: int
    whole: int
    matmul: float = 1.0


_CHIPS = {
    "TPU v5e": _Vmem(16, 128),
    "TPU v5p": _Vmem(16, 64),
    "TPU v6e (Trillium)": _Vmem(32, 128, 0.81),
    "TPU7x (Ironwood)": _Vmem(32, 64, 0.83),
}
_FLAG = re.compile(r"--xla_tpu_scoped_vmem_limit_kib=(\d+)")
_XLAS_OWN = "mosaic_fusion_entry_point"  # kernels of ragged_dot, whose blocks XLA chooses
_MIB = 2**20
_IN_VMEM = re.compile(r"memref<((?:\d+x)*)[a-z]+(\d+)\w*, .*memory_space<vmem>")
_LANES = 128  # to which the last of several dimensions is padded


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
    default = _limit_set_by(flags) or vmem.default
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            call = KernelCall(computation, instruction)
            is_kernel = instruction.opcode == "custom-call" and call.target == MOSAIC_TPU
            if is_kernel and _XLAS_OWN not in instruction.attribute_text:
                limit = min(_own_limit(call) or default, vmem.whole)
                _check(call, chip, limit, vmem.whole)


def matmul_share(chip: Chip, flags: Sequence[str]) -> float:
    """The share of their speed that matmuls reach in the VMEM that flags leave them; 1 at most.

    From XLA's own cycles (scripts/results/matmul_vmem.json). Recipes set 64 MiB or more, from which
    on published steps differ by 2% (vlasenkoalexey/tpu_performance_autoresearch_wiki).
    """
    vmem = _CHIPS.get(chip.name)
    return vmem.matmul if vmem and _limit_set_by(flags) <= vmem.default else 1.0


def _limit_set_by(flags: Sequence[str]) -> float:
    """MiB; 0 without a flag."""
    found = _FLAG.findall(" ".join(flags))
    return int(found[-1]) / 1024 if found else 0.0


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
        needed = _buffers(str(config.get("body", "")) if isinstance(config, dict) else "")
    except UnknownBodyError:
        return 0.0
    arrays = [*call.operands[needed.prefetched :], *call.results]
    blocks = zip(arrays, needed.blocks, strict=False)
    moved = sum(size for array, size in blocks if not array.is_in_fast_memory)
    return (moved + needed.scratch) / _MIB


class _Buffers(NamedTuple):
    """A kernel's buffers in VMEM, in bytes.

    Attributes:
        prefetched: number of operands in scalar memory, which come first.
        blocks: of each other operand, then of each result; 0 for those in another memory.
        scratch: of its scratch.
    """

    prefetched: int
    blocks: tuple[int, ...]
    scratch: int


@functools.lru_cache(maxsize=256)
def _buffers(text: str) -> _Buffers:
    """The buffers of a kernel.

    Args:
        text: the ``body`` of a ``tpu_custom_call``.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    return read_kernel(text, _read_buffers)


def _read_buffers(module: Any) -> _Buffers:
    function = kernel_function(module)
    attributes = function.attributes
    grid = integers(attributes["iteration_bounds"]) if "iteration_bounds" in attributes else ()
    prefetched = integer(function, "scalar_prefetch")
    windows = [*map(str, attributes["window_params"])] if "window_params" in attributes else []
    arguments = [*function.regions[0].blocks[0].arguments][len(grid) + prefetched :]
    sizes = [_bytes_in_vmem(str(a.type)) if any(a.uses) else 0 for a in arguments]
    copies = [2 if math.prod(grid) != 1 and _moves(window) else 1 for window in windows]
    blocks = [n * size for n, size in zip(copies, sizes, strict=False)]
    return _Buffers(prefetched, tuple(blocks), sum(sizes[len(windows) :]))


def _moves(window: str) -> bool:
    return "window_bounds" in window and "synchronous" not in window


def _bytes_in_vmem(type_: str) -> int:
    """A buffer's bytes; 0 if it is in another memory."""
    if not (match := _IN_VMEM.match(type_)):
        return 0
    dims = [int(size) for size in match[1].split("x") if size]
    if len(dims) > 1:
        dims[-1] += -dims[-1] % _LANES
    return math.ceil(math.prod(dims) * int(match[2]) / 8)
