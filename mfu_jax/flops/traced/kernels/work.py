"""The model FLOPs of Pallas kernels, without recomputed products and block padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfu_jax.flops.attention_kernels import AttentionKernel
from mfu_jax.flops.count import KernelRun
from mfu_jax.flops.lengths import Lengths
from mfu_jax.flops.loss_kernels import LossKernel, loss_kernel, product_flops
from mfu_jax.flops.traced.integers.known_values import ConstantTable, Known
from mfu_jax.flops.traced.jaxprs import MESH_KERNELS, first_array
from mfu_jax.flops.traced.kernels.attention import (
    attention_kernel,
    mesh_attention_kernel,
    sequence_sizes,
)
from mfu_jax.flops.traced.kernels.pallas import (
    PallasCost,
    TripCount,
    mesh_kernel_cost,
    pallas_cost,
)
from mfu_jax.flops.traced.masks.pairs import KeptPairs


class KernelWork(NamedTuple):
    """The work of one call of a kernel.

    Attributes:
        name: the kernel's name, as shown by its custom call in HLO.
        run: FLOPs that the call executes, and those beyond its arrays; None if unknown.
        flops: FLOPs that the model needs, by dtype; of attention, over all pairs.
        unknown: what could not be determined.
        sizes: numbers of queries and keys, if it is attention.
        kept: the pairs whose blocks attention does not skip, if it skips any.
        first_array: index of its first operand after tables.
        overhang: FLOPs that it runs beyond its arrays, besides recomputation.
    """

    name: str
    run: KernelRun | None
    flops: Mapping[str, int]
    unknown: tuple[str, ...] = ()
    sizes: tuple[int, int] | None = None
    kept: KeptPairs | None = None
    first_array: int = 0
    overhang: int = 0


def kernel_work(
    eqn: Any, known: Sequence[Known], stack: str, lengths: Lengths, trip_count: TripCount
) -> KernelWork:
    """The work of a kernel whose body runs on a grid (`pallas_call`) or on a mesh.

    Args:
        eqn: the equation.
        known: known values of its operands.
        stack: the name stack around it.
        lengths: lengths given by the user.
        trip_count: iterations of a while loop, given its operands.
    """
    operands = [_as_operand(value) for value in known]
    if eqn.primitive.name in MESH_KERNELS:
        attention = mesh_attention_kernel(eqn, stack)
        cost = mesh_kernel_cost(eqn, operands, lengths, trip_count, attention)
        return _attention(eqn, cost, attention) if attention else _unchanged(cost)
    cost, attention = pallas_cost(eqn, operands, lengths, trip_count), attention_kernel(eqn)
    if attention is not None:
        return _attention(eqn, cost, attention)
    if (loss := loss_kernel(cost.name)) and not cost.unknown:
        return _loss(eqn, cost, loss)
    return _unchanged(cost)


def _unchanged(cost: PallasCost) -> KernelWork:
    is_known = not (cost.unknown or cost.is_estimate)
    return KernelWork(
        cost.name,
        _run(cost) if is_known else None,
        cost.needed,
        unknown=cost.unknown + cost.bounds,
        overhang=cost.flops.total() - cost.needed.total(),
    )


def _run(cost: PallasCost) -> KernelRun:
    inside = cost.needed.total()
    return KernelRun(inside, cost.flops.total() - inside)


def _loss(eqn: Any, cost: PallasCost, loss: LossKernel) -> KernelWork:
    """The matmuls of a fused loss, without recomputed logits and block padding."""
    ran, left = cost.flops.total(), cost.flops.copy()
    left[next(iter(left))] -= int(ran * loss.share_recomputed)  # the logits come first
    product = product_flops([v.aval.shape for v in eqn.invars])
    needed = product * (loss.products - loss.recomputed) if product else left.total()
    flops = {dtype: amount * needed // left.total() for dtype, amount in left.items() if amount}
    return KernelWork(cost.name, _run(cost), flops)


def _attention(eqn: Any, cost: PallasCost, attention: AttentionKernel) -> KernelWork:
    """All pairs of an attention kernel, excluding recomputed scores."""
    ran, all_pairs = cost.needed.total(), cost.unskipped.total()
    kept = KeptPairs("blocks skipped by a kernel", ran, 2 * ran, all_pairs)
    needed, products = len(attention.needed), len(attention.products)
    return KernelWork(
        cost.name,
        None if cost.unknown else _run(cost),
        {dtype: amount * needed // products for dtype, amount in cost.unskipped.items()},
        unknown=cost.bounds,
        sizes=sequence_sizes(eqn, attention),
        kept=kept if ran < all_pairs else None,
        first_array=first_array(eqn),
        overhang=(cost.flops.total() - ran) * needed // products,
    )


def _as_operand(value: Known) -> Known:
    """A known value in the form that kernels take: arrays become tables."""
    if isinstance(value, np.ndarray):
        return ConstantTable(value) if value.ndim else value.item()
    return value.item() if isinstance(value, np.generic) else value
