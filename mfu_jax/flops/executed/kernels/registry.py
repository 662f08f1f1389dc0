"""The table of rules for custom calls, and the `KernelCall` that a rule receives.

A kernel without a rule is listed in the count's `unaccounted`, never counted as 0. Facts about
attention kernels that traced and executed counts share are in `mfu_jax.flops.attention_kernels`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from mfu_jax.flops.attention_kernels import AttentionKernel, kernel_in_scope
from mfu_jax.flops.count import NOTHING_BEYOND, Beyond, dtype_bits
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.lengths import NO_LENGTHS, Lengths


@dataclass(frozen=True, kw_only=True)
class KernelCost:
    """FLOPs of one run of a kernel.

    Attributes:
        flops: all its matmul FLOPs.
        rematerialized: the part that recomputes forward results (a flash attention's backward pass
            recomputes the scores).
        dtype: operand dtype; by default `KernelCall.dtype`.
        seen_by_xla: FLOPs that XLA's own cost analysis reports for the kernel.
        padding: the part that only fills up tiles: rows of other groups, zeros beyond a matrix.
        note: a choice that the reader should know about, shown as a flag.
        beyond: what the hardware runs in addition to `flops`.
        grid_steps: of its grid, if its body was walked.
    """

    flops: int
    rematerialized: int = 0
    dtype: str = ""
    seen_by_xla: int = 0
    padding: int = 0
    note: str = ""
    beyond: Beyond = NOTHING_BEYOND
    grid_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class UnknownCost:
    """A kernel whose cost the program does not contain.

    Attributes:
        reason: why.
        dtype: operand dtype, if known.
        share_rematerialized: the share of its FLOPs that recomputes forward results.
        estimate: its author's `cost_estimate`, the fallback if the user gives no cost.
    """

    reason: str
    dtype: str = ""
    share_rematerialized: Fraction = Fraction(0)
    estimate: int | None = None


@dataclass(frozen=True)
class KernelCall:
    """One custom call, as a cost function sees it.

    Attributes:
        computation: the computation that it is in.
        instruction: the ``custom-call``.
        literal: the value of a constant operand, as HLO text; None for other operands.
        lengths: lengths that the user gave.
    """

    computation: HloComputation
    instruction: HloInstruction
    literal: Callable[[int], str | None] = lambda index: None
    lengths: Lengths = NO_LENGTHS

    @property
    def target(self) -> str:
        """``custom_call_target``."""
        return self.instruction.attribute_string("custom_call_target")

    @cached_property
    def name(self) -> str:
        """The kernel's own name: the part of op_name before ``pallas_call``, or the instruction's.

        >>> kernel_name("jit(f)/jvp(a)/flash_fwd/pallas_call", "flash_fwd.3")
        'flash_fwd'
        """
        if self.target == TRITON and (
            match := _TRITON_NAME.search(self.instruction.attribute_text)
        ):
            return match[1]
        return kernel_name(self.instruction.op_name, self.instruction.name)

    @cached_property
    def operands(self) -> list[Shape]:
        """Shapes of the operands."""
        return self.computation.operand_shapes(self.instruction)

    def operand(self, index: int) -> Shape:
        """Shape of one operand."""
        return self.computation.operand(self.instruction, index).shape

    @cached_property
    def results(self) -> list[Shape]:
        """Shapes of the result's arrays."""
        return list(self.instruction.shape.leaves())

    @cached_property
    def attention_in_scope(self) -> AttentionKernel | None:
        """The row of an attention kernel that only the names and shapes around it tell."""
        operands, results = (tuple(s.dims for s in side) for side in (self.operands, self.results))
        return kernel_in_scope(self.instruction.op_name, operands, results)

    @cached_property
    def config(self) -> dict[str, Any]:
        """``backend_config`` as JSON."""
        return dict(self.instruction.backend_config)

    @property
    def dtype(self) -> str:
        """The widest floating-point dtype of the operands, else the widest of the first two."""
        floats = [s.dtype for s in self.operands if s.dtype.startswith(("f", "bf"))]
        return max(floats or [s.dtype for s in self.operands[:2]], key=dtype_bits, default="")


# Its backend_config is in MLIR's notation, not JSON.
TRITON = "__gpu$xla.gpu.triton"
MOSAIC_GPU = "mosaic_gpu_v2"
MOSAIC_TPU = "tpu_custom_call"
PALLAS_TARGETS = (TRITON, MOSAIC_GPU, MOSAIC_TPU)
_TRITON_NAME = re.compile(r'backend_config=\{.*\bname = "([^"]+)"', re.DOTALL)

# JAX's names for the primitives that run kernels.
_PALLAS = ("pallas_call", "mpmd_map", "core_map")

KernelRule = Callable[[KernelCall], KernelCost | UnknownCost | int]

_RULES: dict[str, KernelRule] = {}


def register_kernel(*names: str) -> Callable[[KernelRule], KernelRule]:
    """Registers a kernel's cost under custom-call targets or kernel names.

    The decorated function takes a `KernelCall` and returns its matmul FLOPs, or a `KernelCost`.
    A later registration replaces an earlier one; a kernel's own name takes precedence over its
    target.
    """

    def register(rule: KernelRule) -> KernelRule:
        for name in names:
            _RULES[name] = rule
        return rule

    return register


def kernel_name(op_name: str, instruction_name: str) -> str:
    """The name that its author gave a kernel, or the instruction's name without its number."""
    parts = op_name.split("/")
    if len(parts) > 1 and parts[-1] in _PALLAS and "(" not in parts[-2]:
        return parts[-2]
    return re.sub(r"(\.\d+)+$", "", instruction_name)


# Targets of XLA and JAX that move, mark or sort data, without matmuls. A kernel's own name, which
# its author chooses, never makes it free.
_FREE = re.compile(
    r"Sharding|SPMD\w*|AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound"
    r"|GatherScatterIndicesBitpacked|TopK|PartialReduce|ApproxTopK|PadToStatic|SliceToDynamic"
    r"|MoveToHost|MoveToDevice|annotate_device_placement|xla\.sdy\.\w+|LayoutConstraint"
    r"|__cub\$\w+|xla\.gpu\.ext\.cub_\w+|__gpu\$TopK|ResizeNearest\w*|NopCustomCall|BarrierStart|BarrierDone"
    r"|xla_ffi_(partitioned_)?python_\w+callback|xla_python_\w+callback|SetBound|GetBound"
    r"|AsyncCollective(Start|Done)|PrepareAsyncCall(Start|Done)|cu_threefry2x32(_ffi)?|X64\w+|CreateBuffer|Pin|Unpin"
    r"|SliceId|ZeroCrop"  # in programs over several TPU slices
    r"|Noop"  # in libtpu 0.0.37
)


def kernel_cost(call: KernelCall) -> KernelCost | UnknownCost:
    """The cost of a custom call, by the rule of its name or its target."""
    rule = _RULES.get(call.name)
    if rule is None and _FREE.fullmatch(call.target):
        return KernelCost(flops=0)
    rule = rule or _RULES.get(call.target)
    if rule is not None:
        cost = rule(call)
        return KernelCost(flops=cost) if isinstance(cost, int) else cost
    return UnknownCost(reason="no cost is known")
