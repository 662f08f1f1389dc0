"""Which primitives have no matmuls, and which equations do any work."""

from __future__ import annotations

from typing import Any

from mfu_jax.flops.attention_kernels import BY_PRIMITIVE
from mfu_jax.flops.traced.jaxprs import MESH_KERNELS, bodies
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.util.jax_internals import Primitive, primitives

# Primitives without matmuls that JAX does not export: data movement, collectives, references.
FREE = {
    "addupdate", "all_gather_invariant", "all_gather_reduced", "bcoo_extract", "bcoo_fromdense",
    "bcoo_sort_indices", "bcoo_sum_duplicates", "bcoo_todense", "bcoo_transpose", "bcsr_extract",
    "bcsr_fromdense", "bcsr_todense", "bitcast_convert_type",
    "broadcast_to", "debug_callback", "debug_print", "dimension_size", "empty", "empty_ref",
    "free_ref", "freeze", "from_edtype", "get", "inspect_sharding", "layout_constraint",
    "lu_pivots_to_permutation", "masked_load", "masked_swap", "mulhi", "multiple_of", "name",
    "new_ref", "num_programs", "optimization_barrier", "pbroadcast", "pin", "platform_index",
    "precv", "preduced", "program_id", "psend", "psum_invariant", "pvary", "random_clone",
    "random_unwrap", "random_wrap", "reciprocal", "reduce_scatter", "reduced_vary_cast_p",
    "reshard", "run_scoped", "scatter-sub", "semaphore_read", "semaphore_signal",
    "semaphore_wait", "shape_assertion", "split", "stack", "swap", "threefry2x32",
    "threefry4x32", "tie", "tile", "to_edtype", "unpin", "unreduced_psum",
    "unreduced_reduce_scatter", "unstack", "vary_unreduced_cast_p",
    "with_memory_space_constraint", "zeros_like",
}  # fmt: skip
FREE |= {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}


def has_work(eqn: Any, memo: dict[int, tuple[Any, bool]]) -> bool:
    """Whether an equation has matmuls, or anything without a known cost.

    Args:
        eqn: the equation.
        memo: what is known about inner jaxprs, by id; it keeps them alive.
    """
    name = eqn.primitive.name
    if name in RULES or name in BY_PRIMITIVE or name == "pallas_call" or name in MESH_KERNELS:
        return True
    inner = bodies(eqn)
    for jaxpr in inner:
        if id(jaxpr) not in memo:
            memo[id(jaxpr)] = jaxpr, any(has_work(each, memo) for each in jaxpr.eqns)
    return any(memo[id(jaxpr)][1] for jaxpr in inner) if inner else name not in FREE
