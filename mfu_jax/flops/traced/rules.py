"""Matmul FLOPs of JAX primitives, one short rule each.

A rule takes the equation and returns its FLOPs as an int: twice the multiply-adds. Add the cost
of your own primitive in the same way:

    @register_rule("my_matmul")
    def _(eqn) -> int:
        (m, k), (_, n) = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        return 2 * m * n * k

Linear algebra is in `linalg`, control flow in `control_flow`, primitives without FLOPs in
`primitive_kinds`, integers in `integers.arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

FlopRule = Callable[[Any], int]

RULES: dict[str, FlopRule] = {}


def register_rule(*primitives: str) -> Callable[[FlopRule], FlopRule]:
    """Registers the decorated function as the cost of these primitives in every traced count.

    Args:
        primitives: names, as in `eqn.primitive.name`.

    >>> @register_rule("my_matmul")
    ... def cost_of_my_matmul(eqn):
    ...     (m, k), (_, n) = (v.aval.shape for v in eqn.invars)
    ...     return 2 * m * n * k
    >>> del RULES["my_matmul"]
    """

    def register(rule: FlopRule) -> FlopRule:
        for name in primitives:
            RULES[name] = rule
        return rule

    return register


def _per_pair(eqn: Any) -> int:
    """FLOPs of a multiply-add: 2, or 8 if complex (four real products and four sums)."""
    return 8 if eqn.outvars[0].aval.dtype.kind == "c" else 2


@register_rule("dot_general", "scaled_dot", "bcoo_dot_general_sampled")
def dot_general(eqn: Any) -> int:
    """2 · elements of the result · contracted elements; 8 instead of 2 for complex numbers.

    A sampled product has only the elements that a sparse array stores.
    """
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    contractions = math.prod(lhs[d] for d in contracted)
    return _per_pair(eqn) * math.prod(eqn.outvars[0].aval.shape) * contractions


@register_rule("scaled_matmul", "scaled_matmul_wrapper")
def scaled_matmul(eqn: Any) -> int:
    """Block-scaled [B, M, K] × [B, N, K]: 2·B·M·N·K; the scales cost nothing."""
    return 2 * math.prod(eqn.outvars[0].aval.shape) * int(eqn.invars[0].aval.shape[-1])


@register_rule("ragged_dot_general", "ragged_dot")
def ragged_dot(eqn: Any) -> int:
    """Each row is multiplied by only one group's matrix, so the group dimension costs nothing.

    Rows in no group (padding at the end) are counted, because their number depends on data; the
    walk excludes them if the user gave the group sizes.
    """
    lhs, rhs = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_contracted), (_, rhs_batch) = numbers.dot_dimension_numbers
    shared = {*rhs_contracted, *rhs_batch, *numbers.rhs_group_dimensions}
    rhs_free = math.prod(size for d, size in enumerate(rhs) if d not in shared)
    return _per_pair(eqn) * math.prod(lhs) * rhs_free


@register_rule("bcoo_dot_general", "bcsr_dot_general")
def sparse_dot(eqn: Any) -> int:
    """A sparse [.., k] times a dense array: 2 · stored elements · dense elements per stored one."""
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    stored, rhs = eqn.invars[0].aval.shape, eqn.invars[-1].aval.shape
    free = math.prod(size for d, size in enumerate(rhs) if d not in (*contracted, *batch))
    return _per_pair(eqn) * math.prod(stored) * free


@register_rule("conv_general_dilated")
def convolution(eqn: Any) -> int:
    """2 · batch · output features · input features per group · pairs of real positions.

    Padding and the holes of dilation are zeros that need no multiplication. The forward convolution
    and its two gradients use the same pairs of output and kernel positions, so they cost the same.
    """
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = (v.aval.shape for v in (eqn.invars[0], eqn.invars[1], eqn.outvars[0]))
    pairs = math.prod(
        real_pairs(
            inputs=lhs[lhs_d],
            kernel=rhs[rhs_d],
            outputs=out[out_d],
            stride=stride,
            low_padding=padding[0],
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
        )
        for lhs_d, rhs_d, out_d, stride, padding, input_dilation, kernel_dilation in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            eqn.params["window_strides"],
            eqn.params["padding"],
            eqn.params["lhs_dilation"],
            eqn.params["rhs_dilation"],
            strict=True,
        )
    )
    # With batch groups, an output feature sees one group of the batch, which the result's batch
    # size already reflects; with feature groups, the kernel has the inputs of only one group.
    out_batch, out_features = (out[d] for d in numbers.out_spec[:2])
    in_features = rhs[numbers.rhs_spec[1]]
    return _per_pair(eqn) * out_batch * out_features * in_features * pairs


def real_pairs(
    *,
    inputs: int,
    kernel: int,
    outputs: int,
    stride: int = 1,
    low_padding: int = 0,
    input_dilation: int = 1,
    kernel_dilation: int = 1,
) -> int:
    """Pairs of output and kernel positions along one axis that read an element of the input.

    Output o and kernel position k read position o·stride + k·kernel_dilation − low_padding of the
    dilated input, whose elements are at the multiples of input_dilation up to
    (inputs − 1)·input_dilation.

    >>> real_pairs(inputs=5, kernel=3, outputs=5, low_padding=1)  # "SAME": 3·5 minus the two ends
    13
    """
    starts = stride * np.arange(outputs) - low_padding
    offsets = kernel_dilation * np.arange(kernel)
    total = 0
    for rest in range(input_dilation if inputs else 0):  # of a start; its offsets make it whole
        some = starts[starts % input_dilation == rest]
        lowest = -offsets[(offsets + rest) % input_dilation == 0]
        highest = lowest + (inputs - 1) * input_dilation
        found = np.searchsorted(some, highest, "right") - np.searchsorted(some, lowest)
        total += int(found.sum())
    return total


def batch_of(shape: Sequence[int]) -> int:
    """The number of matrices in a stack.

    >>> batch_of((7, 5, 3, 3))
    35
    """
    return math.prod(shape[:-2])
