"""FLOPs of a matmul on elements known to be zero, or on results that are never read.

XLA pads matmuls to tiles and convolutions to sizes that a library accepts, and computes ragged and
depthwise products densely. `matmuls` counts what then runs; this is the part that the model does
not need. Padding and cuts written by the user belong to the model.

A TPU program cuts one or two large images into overlapping blocks, the last of which is
partly empty. Devices that share an image exchange its edges; the first and the last receive zeros.
Both multiply more than the model does; how much follows from the model's own convolutions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from mfu_jax.flops.executed.attribution.partly_zero import Real, whole
from mfu_jax.flops.executed.attribution.zeros import Zeros, group_share, is_written_by_user
from mfu_jax.flops.executed.cost_types import MatmulCost
from mfu_jax.flops.executed.formulas import textbook
from mfu_jax.flops.executed.formulas.matmuls import (
    CUDNN_CONVOLUTIONS,
    LIBRARY_DOTS,
    convolution_flops_of,
    result_shape,
)
from mfu_jax.flops.executed.formulas.windows import common
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.dimensions import dot_indices
from mfu_jax.flops.executed.hlo.module import HloComputation, HloInstruction, HloModule
from mfu_jax.flops.executed.hlo.shapes import Shape
from mfu_jax.flops.executed.hlo.uses import Value, only_use
from mfu_jax.flops.lengths import Lengths
from mfu_jax.flops.scopes import read_scope

_ROLES = {"convolution": (0, 1, 2), **CUDNN_CONVOLUTIONS}
_FULL_SVD = "cusolver_gesvd"  # computes full factors, of which JAX may need a part
_SAME_ELEMENTS = frozenset({"copy", "convert", "transpose", "all-reduce"})


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
        shapes = [*(operand.shape for operand in operands), result_shape(instruction)]
        frame = self.dataflow.frame_of(computation)
        arrays = [self.zeros.real_elements(frame, operand) for operand in operands]
        arrays.append(self._read(computation, instruction))
        return _difference(instruction, target, flops, arrays, shapes)

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
        while use := only_use(self.dataflow.module, Value(owner, value)):
            owner, value = use.computation, use.user
            if value.opcode == "slice":
                return not is_written_by_user(value)
            if value.opcode not in _SAME_ELEMENTS and value.opcode != "bitcast":
                return False
        return False

    def _read(self, computation: HloComputation, instruction: HloInstruction) -> Real:
        """The elements of a matmul's result that are read: all, unless its only user cuts it."""
        sizes = result_shape(instruction).dims
        value, is_moved = Value(computation, instruction), False
        while use := only_use(self.dataflow.module, value):
            user = use.user
            if user.opcode == "slice" and not is_moved and not is_written_by_user(user):
                return Real(sizes, user.kept_ranges())
            if user.opcode == "select":
                share = self._kept(use.computation, user)
                return whole(sizes)._replace(share=share or Fraction(1))
            if user.opcode not in _SAME_ELEMENTS:
                break
            is_moved |= user.opcode == "transpose"
            value = Value(use.computation, user)
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
    shapes: Sequence[Shape],
) -> Wasted:
    """The part of `flops` outside `arrays`, the real parts of both operands and the result."""
    if all(array.is_all for array in arrays):
        return Wasted()
    if target == "dot":
        needed = _dot(instruction, arrays)
        if _dot(instruction, [whole(array.sizes) for array in arrays]) != flops:
            return Wasted()
    else:
        roles = _ROLES[target]
        needed = convolution_flops_of(
            instruction, [shapes[i] for i in roles], [arrays[i].dims for i in roles]
        )
    needed = int(needed * min(array.unpadded for array in arrays))
    real = int(needed * min(array.share for array in arrays))
    return Wasted(flops - needed, needed - real)


def _dot(instruction: HloInstruction, arrays: Sequence[Real]) -> int:
    needed = 2
    for index in dot_indices(instruction, [len(array.dims) for array in arrays[:2]]):
        pairs = zip(arrays, index, strict=True)
        parts = [array.dims[dim] for array, dim in pairs if dim is not None]
        needed *= len(functools.reduce(common, parts))
    return needed


BLOCKS = "overlapping blocks of images"
EDGES = "edges of sharded images"

_CONVOLUTION = "conv_general_dilated"
# Opcodes that move parts of an image under the name of its convolution.
_EXCHANGES = ("collective-permute", "collective-permute-start")
# TPUs join arrays by the maximum of both, padded with -inf; integers by the sum, padded with zeros.
_JOINS = ("maximum", "concatenate")
_SUMMED = "pad"


class ImagePieces:
    """Which convolutions of a program run on pieces of their images."""

    def __init__(self, module: HloModule) -> None:
        self._label = EDGES if _names(module, _EXCHANGES) else BLOCKS
        names = _names(module, (*_EXCHANGES, *_JOINS, _SUMMED))
        self._scopes = {read_scope(name).path for name in names}

    def label(self, op_name: str) -> str:
        """The kind of pieces that a matmul of this name runs on; empty for whole images."""
        is_convolution = op_name.endswith(_CONVOLUTION)
        return self._label if is_convolution and read_scope(op_name).path in self._scopes else ""


def _names(module: HloModule, opcodes: tuple[str, ...]) -> set[str]:
    """The convolutions' names that instructions of some opcodes carry."""
    return {
        name
        for opcode in opcodes
        for computation, instruction in module.with_opcode(opcode)
        if _CONVOLUTION in instruction.attribute_text
        and (opcode != _SUMMED or _is_summed(computation, instruction))
        for name in instruction.op_name.split(";")
    }


def _is_summed(computation: HloComputation, pad: HloInstruction) -> bool:
    """Whether a padded array is added to another one."""
    return any(
        user.opcode == "add" and all(computation[name].opcode == "pad" for name in user.operands)
        for user in computation.users.get(pad.name, ())
    )
