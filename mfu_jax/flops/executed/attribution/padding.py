"""FLOPs of a matmul on elements known to be zero, or on results that are never read.

XLA pads matmuls to tiles and convolutions to sizes that a library accepts, and computes ragged and
depthwise products densely. `matmuls` counts what then runs; this is the part that the model does
not need. Padding and cuts written by the user belong to the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.flops.executed.attribution.partly_zero import Real, whole
from mfu_jax.flops.executed.attribution.zeros import Zeros, group_share, is_written_by_user
from mfu_jax.flops.executed.costs.types import MatmulCost
from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.formulas.matmuls import CUDNN_CONVOLUTIONS, LIBRARY_DOTS, result_shape
from mfu_jax.flops.executed.formulas.windows import parse_window
from mfu_jax.flops.executed.hlo.dataflow import MAX_DEPTH, Dataflow
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.lengths import Lengths

_MOST_PAIRS = 4_000_000  # of output and kernel positions that are checked one by one
_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)$")
_ROLES = {"convolution": (0, 1, 2), **CUDNN_CONVOLUTIONS}
_FULL_SVD = "cusolver_gesvd"  # computes full factors, of which JAX may need a part
_SAME_ELEMENTS = frozenset({"get-tuple-element", "copy", "convert", "transpose", "all-reduce"})


class Wasted(NamedTuple):
    """FLOPs that the model does not need.

    Attributes:
        padding: FLOPs on zeros of explicit padding, and for results that are cut off.
        expansion: FLOPs on the other zeros of ragged or depthwise products computed densely.
    """

    padding: int = 0
    expansion: int = 0


class WasteFinder:
    """Finds what a program's matmuls spend on zeros.

    Attributes:
        opcodes: opcodes that make zeros or cut off results in this program: few programs have any,
            and searching at every matmul takes time.
    """

    def __init__(self, dataflow: Dataflow, lengths: Lengths) -> None:
        self.dataflow = dataflow
        self.zeros = Zeros(dataflow, lengths)
        self.opcodes: set[str] = set()
        module = dataflow.module
        for opcode, is_a_sign in _MAKE_ZEROS.items():
            if any(is_a_sign(*place) for place in module.with_opcode(opcode)):
                self.opcodes.add(opcode)
        if {"select", "and"} <= module.indexed.keys():  # rows between two bounds: those of a group
            self.opcodes.add("select")

    def wasted(self, computation: HloComputation, matmul: MatmulCost) -> Wasted:
        """The FLOPs of a matmul spent on known zeros, or on rows that a kernel cuts off."""
        if matmul.padding or not self.opcodes:
            return Wasted(matmul.padding)
        instruction, flops = matmul.instruction, matmul.flops
        target = instruction.opcode
        if target.startswith("custom-call"):
            target = instruction.attribute_string("custom_call_target")
        if target.startswith(_FULL_SVD):
            return Wasted(self._cut_factor(computation, instruction, flops))
        if target in LIBRARY_DOTS:
            target = "dot"
        if target != "dot" and target not in _ROLES:
            return Wasted()
        operands = [computation.operand(instruction, i) for i in (0, 1)]
        frame = self.dataflow.frame_of(computation)
        arrays = [self.zeros.real_elements(frame, operand) for operand in operands]
        arrays.append(self._read(computation, instruction))
        return _difference(instruction, target, flops, arrays)

    def _cut_factor(self, computation: HloComputation, svd: HloInstruction, flops: int) -> int:
        """FLOPs on columns of a singular factor that the primitive's own slice drops."""
        m, n = sorted(computation.operand(svd, 0).shape.dims[-2:], reverse=True)
        shapes = [shape.dims[-2:] for shape in svd.shape.elements]
        users = computation.users.get(svd.name, ())
        factors = [u for u in users if shapes[u.integers("index")[0]] == (m, m) != (n, n)]
        if len(factors) != 1 or not self._is_cut(computation, factors[0]):
            return 0
        thin = textbook.svd(m, n, values_only=False, full=False)
        return flops - thin * math.prod(computation.operand(svd, 0).shape.dims[:-2])

    def _is_cut(self, owner: HloComputation, value: HloInstruction) -> bool:
        """Whether a value's only reader is a slice that the user did not write."""
        while (place := _only_user(self.dataflow.module, owner, value)) is not None:
            owner, value = place
            if value.opcode == "slice":
                return not is_written_by_user(value)
            if value.opcode not in _SAME_ELEMENTS and value.opcode != "bitcast":
                return False
        return False

    def _read(self, computation: HloComputation, instruction: HloInstruction) -> Real:
        """The elements of a matmul's result that are read: all, unless its only user cuts it."""
        sizes = result_shape(instruction).dims
        value, owner, is_moved = instruction, computation, False
        while (place := _only_user(self.dataflow.module, owner, value)) is not None:
            owner, user = place
            if user.opcode == "slice" and not is_moved and not is_written_by_user(user):
                return Real(sizes, user.kept_ranges())
            if user.opcode == "select":
                share = self._kept(owner, user)
                return whole(sizes)._replace(share=share or Fraction(1))
            if user.opcode not in _SAME_ELEMENTS:
                break
            is_moved |= user.opcode == "transpose"
            value = user
        return whole(sizes)

    def _kept(self, owner: HloComputation, select: HloInstruction) -> Fraction | None:
        """The share of results that a select keeps: one group's, in what is computed densely."""
        frame = self.dataflow.frame_in_fusions(owner)
        if not self.zeros.is_zero(frame, owner.operand(select, 2)):
            return None
        return group_share(owner, select) or self.zeros.share_of_rows(frame, select)


def _is_xlas_own(_: HloComputation, moved: HloInstruction) -> bool:
    """Whether a pad or slice was not written by the user and is not of a gather's indices."""
    return not is_written_by_user(moved) and not _is_of_indices(moved)


def _is_of_indices(moved: HloInstruction) -> bool:
    is_list = len(moved.shape.dims) == 1 and moved.shape.dtype[0] in "su"
    return is_list and moved.op_name.endswith("/gather")


def _keeps_a_group(computation: HloComputation, select: HloInstruction) -> bool:
    return group_share(computation, select) is not None


# Opcodes that may make zeros or cut off results, and tests of whether they do.
_MAKE_ZEROS = {"pad": _is_xlas_own, "slice": _is_xlas_own, "select": _keeps_a_group}


def _difference(
    instruction: HloInstruction,
    target: str,
    flops: int,
    arrays: Sequence[Real],
) -> Wasted:
    """The part of `flops` outside `arrays`, the real parts of both operands and the result."""
    if all(array.is_all for array in arrays):
        return Wasted()
    everything = [whole(array.sizes) for array in arrays]
    needed, counted = (
        _dot(instruction, reals) if target == "dot" else
        _convolution(instruction, [reals[i] for i in _ROLES[target]])
        for reals in (arrays, everything)
    )  # fmt: skip
    if needed is None or counted != flops:
        return Wasted()
    needed = int(needed * min(array.unpadded for array in arrays))
    real = int(needed * min(array.share for array in arrays))
    return Wasted(flops - needed, needed - real)


def _dot(instruction: HloInstruction, arrays: Sequence[Real]) -> int | None:
    lhs, rhs, result = (array.dims for array in arrays)
    batch, contracted = (
        list(zip(_dims(instruction, f"lhs_{kind}"), _dims(instruction, f"rhs_{kind}"), strict=True))
        for kind in ("batch", "contracting")
    )
    used = [{pair[side] for pair in (*batch, *contracted)} for side in (0, 1)]
    operands = [[lhs[left], rhs[right]] for left, right in batch]
    operands += [[r] for d, r in enumerate(lhs) if d not in used[0]]
    operands += [[r] for d, r in enumerate(rhs) if d not in used[1]]
    sizes = [_common([*of, out]) for of, out in zip(operands, result, strict=True)]
    sizes += [_common([lhs[left], rhs[right]]) for left, right in contracted]
    return 2 * math.prod(sizes)


def _dims(instruction: HloInstruction, name: str) -> tuple[int, ...]:
    """Dimensions of an operand, which a library call has in its config."""
    if instruction.opcode == "dot":
        return instruction.integers(f"{name}_dims")
    listed = re.search(rf'"{name}_dimensions":\[([^]]*)\]', instruction.attribute("backend_config"))
    return tuple(map(int, re.findall(r"\d+", listed[1]))) if listed else ()


def _common(ranges: Sequence[range]) -> int:
    """Number of positions that all ranges share."""
    smallest = min(ranges, key=len)
    others = [r for r in ranges if r != smallest]
    return sum(all(p in r for r in others) for p in smallest) if others else len(smallest)


def _convolution(instruction: HloInstruction, arrays: Sequence[Real]) -> int | None:
    labels = _LABELS.match(instruction.attribute("dim_labels"))
    if labels is None:
        return None
    base, kernel, output = (
        dict(zip(names, array.dims, strict=True))
        for names, array in zip(labels.groups(), arrays, strict=True)
    )
    groups = [instruction.integers(f"{kind}_group_count") for kind in ("feature", "batch")]
    is_grouped = any(count and count[0] > 1 for count in groups)
    inputs = [kernel["i"]] if is_grouped else [kernel["i"], base["f"]]
    batch = [output["b"]] if is_grouped else [output["b"], base["b"]]
    reversals = re.search(r"rhs_reversal=([\dx]+)", instruction.attribute("window"))
    turned = reversals[1].split("x") if reversals else []
    positions = 1
    for i, window in enumerate(parse_window(instruction)):
        taps, outs, real = kernel[str(i)], output[str(i)], base[str(i)]
        if len(taps) * len(outs) > _MOST_PAIRS:
            return None
        if i < len(turned) and turned[i] == "1":
            taps = range(window.size - 1 - taps[-1], window.size - taps[0], taps.step)
        positions *= sum(
            at % window.base_dilation == 0 and at // window.base_dilation in real
            for out in outs
            for tap in taps
            for at in (out * window.stride + tap * window.window_dilation - window.pad_low,)
        )
    features = _common([kernel["o"], output["f"]])
    return 2 * _common(batch) * features * _common(inputs) * positions


def _only_user(
    module: HloModule, owner: HloComputation, value: HloInstruction
) -> tuple[HloComputation, HloInstruction] | None:
    """The only instruction that uses a value, inside or outside fusions; None if not one."""
    for _ in range(MAX_DEPTH):
        if value is owner.root:
            caller = module.caller(owner.name)
            if caller is None or caller[1].opcode != "fusion":
                return None
            owner, value = caller
            continue
        users = owner.users.get(value.name, [])
        if len(users) != 1:
            return None
        if users[0].opcode != "fusion":
            return owner, users[0]
        number = users[0].operands.index(value.name)
        owner = module[users[0].callees[0]]
        if number not in owner.parameters:
            return None
        value = owner.parameters[number]
    return None
