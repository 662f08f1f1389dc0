"""The work of Pallas kernels in a jaxpr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mfu_jax.flops.attention_kernels import AttentionKernel
from mfu_jax.flops.loss_kernels import LossKernel, loss_kernel, product_flops
from mfu_jax.flops.traced.flow import Flow, Tally, unaccounted
from mfu_jax.flops.traced.known_values import ConstantTable, Known
from mfu_jax.flops.traced.masks.pairs import KeptPairs
from mfu_jax.flops.traced.pallas import PallasCost, mesh_kernel_cost, pallas_cost
from mfu_jax.flops.traced.pallas_attention import (
    attention_kernel,
    first_array,
    mesh_attention_kernel,
    sequence_sizes,
)

if TYPE_CHECKING:
    from mfu_jax.flops.traced.walk import Walker


def mesh_kernel(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """The work of a kernel whose body runs on a mesh."""
    attention = mesh_attention_kernel(eqn, stack)
    known = [_as_operand(flow.known) for flow in flows]
    cost = mesh_kernel_cost(eqn, known, walker.lengths, attention)
    if attention is not None:
        return _attention(walker, eqn, cost, attention, flows, stack, tally)
    return _kernel(walker, eqn, cost, flows, stack, tally)


def _kernel(
    walker: Walker, eqn: Any, cost: PallasCost, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """The work of a kernel's programs, unchanged."""
    is_known = not (cost.unknown or cost.is_estimate)
    tally.kernels.add((cost.name, cost.flops.total() if is_known else None))
    for reason in cost.unknown:
        tally.unaccounted[unaccounted(eqn, stack, f"{cost.name}: {reason}")] += 1
    return walker.add_work(eqn, cost.flops, flows, stack, tally)


def pallas_call(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """The work of a kernel whose body runs on a grid."""
    cost = pallas_cost(eqn, [_as_operand(flow.known) for flow in flows], walker.lengths)
    attention = attention_kernel(eqn)
    if attention is not None:
        return _attention(walker, eqn, cost, attention, flows, stack, tally)
    if (loss := loss_kernel(cost.name)) and not cost.unknown:
        return _loss(walker, eqn, cost, loss, flows, stack, tally)
    return _kernel(walker, eqn, cost, flows, stack, tally)


def _loss(
    walker: Walker,
    eqn: Any,
    cost: PallasCost,
    loss: LossKernel,
    flows: list[Flow],
    stack: str,
    tally: Tally,
) -> list[Flow]:
    """The matmuls of a fused loss, without recomputed logits and block padding."""
    ran, left = cost.flops.total(), cost.flops.copy()
    tally.kernels.add((cost.name, ran))
    left[next(iter(left))] -= int(ran * loss.share_recomputed)  # the logits come first
    product = product_flops([v.aval.shape for v in eqn.invars])
    needed = product * (loss.products - loss.recomputed) if product else left.total()
    flops = {dtype: amount * needed // left.total() for dtype, amount in left.items() if amount}
    return walker.add_work(eqn, flops, flows, stack, tally)


def _attention(
    walker: Walker,
    eqn: Any,
    cost: PallasCost,
    attention: AttentionKernel,
    flows: list[Flow],
    stack: str,
    tally: Tally,
) -> list[Flow]:
    """All pairs of an attention kernel, excluding recomputed scores."""
    tally.kernels.add((cost.name, None if cost.unknown else cost.flops.total()))
    all_pairs = cost.unskipped.total()
    number = walker.scores.new(stack, sequence_sizes(eqn, attention))
    masks = walker.scores.masks
    if number not in masks and cost.flops.total() < all_pairs:
        ran = cost.flops.total()
        masks[number] = KeptPairs("blocks skipped by a kernel", ran, 2 * ran, all_pairs)
    needed, run = len(attention.needed), len(attention.products)
    flops = {dtype: amount * needed // run for dtype, amount in cost.unskipped.items()}
    arrays = flows[first_array(eqn) :]  # after the mask's tables
    return walker.add_work(eqn, flops, arrays, stack, tally, scores=(number,))


def _as_operand(value: Known) -> Known:
    """A known value in the form that kernels take: arrays become tables."""
    if isinstance(value, np.ndarray):
        return ConstantTable(value) if value.ndim else value.item()
    return value.item() if isinstance(value, np.generic) else value
