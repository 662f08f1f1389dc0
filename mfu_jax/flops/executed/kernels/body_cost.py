"""The cost of a kernel from its body, as far as the body determines it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from fractions import Fraction

from mfu_jax.flops.attention_kernels import kernels_named
from mfu_jax.flops.count import Beyond
from mfu_jax.flops.executed.kernels.bodies.body import KernelBody, ScalarTable, UnknownBodyError
from mfu_jax.flops.executed.kernels.bodies.walk import grid_flops
from mfu_jax.flops.executed.kernels.ragged import of_given_groups, sequence_lengths
from mfu_jax.flops.executed.kernels.ragged_gpu import of_groups_by_triton, of_groups_on_gpu
from mfu_jax.flops.executed.kernels.registry import (
    MOSAIC_GPU,
    TRITON,
    KernelCall,
    KernelCost,
    UnknownCost,
)
from mfu_jax.flops.loss_kernels import loss_kernel, product_flops

_GROUPS = {MOSAIC_GPU: of_groups_on_gpu, TRITON: of_groups_by_triton}


def body_cost(
    call: KernelCall, read: Callable[[], KernelBody], estimate: int | None = None
) -> KernelCost | UnknownCost:
    """FLOPs of one run of a kernel.

    Args:
        call: the custom call.
        read: returns its body.
        estimate: its author's `cost_estimate`.
    """
    body = None
    notes: list[str] = []
    try:
        body = read()
        ran, inside, needed = _flops(call, body, notes)
    except UnknownBodyError as error:
        return UnknownCost(
            reason=str(error),
            dtype=body.dtype if body else call.dtype,
            share_rematerialized=_share_recomputed(body, call),
            estimate=estimate,
        )
    return KernelCost(
        flops=inside,
        rematerialized=int(needed * _share_recomputed(body, call)),
        dtype=body.dtype,
        seen_by_xla=estimate or 0,
        padding=inside - needed,
        note="; ".join(dict.fromkeys(notes)),
        beyond=Beyond(stated=ran - inside),
        grid_steps=max(0, math.prod(body.grid)),
    )


def _flops(call: KernelCall, body: KernelBody, notes: list[str]) -> tuple[int, int, int]:
    """FLOPs of all steps, those inside the arrays as far as shapes tell, and those needed of these.

    Adds assumptions to `notes`.
    """
    first = sum(steps < 0 for steps in body.grid)  # sizes of the grid precede the tables
    groups = _GROUPS.get(call.target, of_given_groups)(call, body)
    notes += [groups.note] if groups.note else []

    def table(index: int) -> ScalarTable:
        if index in groups.tables:
            return groups.tables[index]
        if call.literal(first + index) is None and (found := sequence_lengths(call, index)):
            if found[1]:
                notes.append(found[1])
            return found[0]
        return _scalar_table(call, first + index)

    flops = grid_flops(_with_constant_bounds(call, groups.body), table)
    if loss := loss_kernel(call.name):
        product = product_flops([shape.dims for shape in call.operands])
        inside = min(flops, product * loss.products) if product else flops
        return flops, inside, inside
    inside = flops if groups.inside is None else min(flops, groups.inside)
    return flops, inside, inside if groups.needed is None else min(inside, groups.needed)


def _with_constant_bounds(call: KernelCall, body: KernelBody) -> KernelBody:
    """The body, with the grid sizes filled in that are operands and constants of the program."""
    dynamic = (axis for axis, steps in enumerate(body.grid) if steps < 0)
    found = {axis: call.literal(index) or "" for index, axis in enumerate(dynamic)}
    sizes = {axis: int(text) for axis, text in found.items() if text.isdecimal()}
    if not sizes:
        return body
    grid = tuple(sizes.get(axis, steps) for axis, steps in enumerate(body.grid))
    return dataclasses.replace(body, grid=grid)


def _share_recomputed(body: KernelBody | None, call: KernelCall) -> Fraction:
    """The share of the body's matmuls that an attention kernel recomputes.

    Of several kernels with one name, it takes the first whose matmul count divides the body's.
    """
    if in_scope := call.attention_in_scope:
        return in_scope.share_recomputed
    if loss := loss_kernel(call.name):
        return loss.share_recomputed
    kernels = kernels_named(call.name)
    matmuls = body.matmuls if body else 0
    fitting = [kernel for kernel in kernels if matmuls % len(kernel.products) == 0]
    return (*fitting, *kernels)[0].share_recomputed if kernels else Fraction(0)


def _scalar_table(call: KernelCall, index: int) -> ScalarTable:
    """Dimensions and values, in row-major order, of a constant operand."""
    text = call.literal(index)
    if text is None:
        raise UnknownBodyError("it skips blocks by a table that is not a constant of the program")
    values = tuple(int(v) for v in re.findall(r"-?\d+", text.replace("true", "1")))
    dims = call.operand(index).dims
    if len(values) != math.prod(dims):
        raise UnknownBodyError("it skips blocks by a table that the text leaves out")
    return dims, values
