"""How much VMEM a Pallas TPU kernel needs at least: its blocks and its scratch.

A block that changes from step to step of the grid has two buffers, one of which is being filled;
what the kernel does not use has none. What the compiler adds is not in the kernel's body.
"""

from __future__ import annotations

import functools
import math
import re
from typing import Any, NamedTuple

from mfu_jax.flops.executed.kernels.bodies.reader import integer, integers
from mfu_jax.flops.executed.kernels.pallas_tpu import kernel_function, read_kernel

_IN_VMEM = re.compile(r"memref<((?:\d+x)*)[a-z]+(\d+)\w*, .*memory_space<vmem>")
_LANES = 128  # to which the last of several dimensions is padded


class Buffers(NamedTuple):
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
def buffers(text: str) -> Buffers:
    """The buffers of a kernel.

    Args:
        text: the ``body`` of a ``tpu_custom_call``.

    Raises:
        UnknownBodyError: jaxlib is not installed, or the body is of another version.
    """
    return read_kernel(text, _read_buffers)


def _read_buffers(module: Any) -> Buffers:
    function = kernel_function(module)
    attributes = function.attributes
    grid = integers(attributes["iteration_bounds"]) if "iteration_bounds" in attributes else ()
    prefetched = integer(function, "scalar_prefetch")
    windows = [*map(str, attributes["window_params"])] if "window_params" in attributes else []
    arguments = [*function.regions[0].blocks[0].arguments][len(grid) + prefetched :]
    sizes = [_bytes_in_vmem(str(a.type)) if any(a.uses) else 0 for a in arguments]
    copies = [2 if math.prod(grid) != 1 and _moves(window) else 1 for window in windows]
    blocks = [n * size for n, size in zip(copies, sizes, strict=False)]
    return Buffers(prefetched, tuple(blocks), sum(sizes[len(windows) :]))


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
