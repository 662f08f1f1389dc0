"""Walks a jaxpr, multiplies loop bodies by their trip counts, and classifies each matmul."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfu_jax.flops.attention_kernels import BY_PRIMITIVE
from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.purposes import Purpose, purposes
from mfu_jax.flops.scopes import read_scope
from mfu_jax.flops.traced.attention_primitives import fused_attention
from mfu_jax.flops.traced.flow import (
    INPUT,
    Flow,
    MatmulKind,
    Origin,
    Score,
    Tally,
    either,
    join,
    of_constant,
    operand_dtype,
)
from mfu_jax.flops.traced.known_values import Known, constant, evaluate, scalar
from mfu_jax.flops.traced.loops import jaxpr_trip_count
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.pairs import Band, KeptPairs
from mfu_jax.flops.traced.masks.scores import Scores, is_batched
from mfu_jax.flops.traced.mosaic_gpu import MESH_KERNELS
from mfu_jax.flops.traced.pallas import (
    PallasCost,
    attention_kernel,
    mesh_kernel_cost,
    pallas_cost,
    sequence_sizes,
)
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.flops.traced.tracing import inner_jaxprs
from mfu_jax.flops.traced.value_graph import value_graph
from mfu_jax.jax_internals import Literal, Primitive, open_jaxpr, primitives, scan_groups

# Primitives that run one jaxpr once, with their own operands and results.
_CALLS = {
    "closed_call",
    "core_call",
    "checkpoint",
    "composite",
    "compute_on",
    "custom_jvp_call",
    "custom_partitioning",
    "custom_vjp_call",
    "custom_vmap_call",
    "eval_jaxpr",
    "jit",
    "linear_call",
    "pjit",
    "remat2",
    "remat_opt",  # custom_vjp's, with optimize_remat
    "run_state",
    "xla_metadata_call",
}

# Primitives without matmuls that JAX does not export: data movement, collectives, references.
_FREE = {
    "addupdate", "all_gather_invariant", "all_gather_reduced", "bitcast_convert_type",
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
_FREE |= {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}


class Walker:
    """Counts jaxprs; a jaxpr that recurs in the same role is walked once."""

    def __init__(self) -> None:
        self.jaxpr: Any = None
        self.saw_checkpoint = False
        self.kernels: dict[str, set[int | None]] = {}  # None: skipped blocks unknown
        self.scores = Scores()
        self.constants: dict[Any, Flow] = {}
        self.known_constants: dict[Any, Known] = {}
        # The value holds the jaxpr, so that its id cannot be reused.
        self._seen: dict[Any, tuple[Any, list[Flow], Tally]] = {}

    def count(self, jaxpr: Any, constants: Mapping[Any, Any]) -> Tally:
        """The work of one run of a whole function, given the constants of all its jaxprs."""
        self.constants = {
            variable: of_constant(constant(value), Origin.INPUT)
            for variable, value in constants.items()
        }
        self.known_constants = {v: flow.known for v, flow in self.constants.items()}
        self.jaxpr = jaxpr
        return self.walk(jaxpr, [INPUT] * len(jaxpr.invars))[1]

    @functools.cached_property
    def purposes(self) -> Mapping[int, Purpose]:
        """What matmuls that are not differentiated are for, by ``id`` of the equation."""
        matmuls = frozenset({"pallas_call", *BY_PRIMITIVE, *RULES})
        return purposes(value_graph(self.jaxpr, matmuls))

    def walk(self, jaxpr: Any, flows: Sequence[Flow], stack: str = "") -> tuple[list[Flow], Tally]:
        """Follows `flows` through an open jaxpr under the name stack `stack`.

        Returns:
            The flows of the jaxpr's results and the work of one run.
        """
        key = (id(jaxpr), tuple(flows), stack)
        if key not in self._seen:
            self._seen[key] = (jaxpr, *self._walk(jaxpr, flows, stack))
        _, out_flows, tally = self._seen[key]
        return out_flows, tally

    def _walk(self, jaxpr: Any, flows: Sequence[Flow], stack: str) -> tuple[list[Flow], Tally]:
        env = {variable: self.constants.get(variable, INPUT) for variable in jaxpr.constvars}
        env.update(zip(jaxpr.invars, flows, strict=True))

        def read(atom: Any) -> Flow:
            if isinstance(atom, Literal):
                return of_constant(scalar(atom.val))
            return env[atom]

        tally = Tally()
        for eqn in jaxpr.eqns:
            own = str(eqn.source_info.name_stack)
            here = f"{stack}/{own}" if stack and own else stack or own
            out_flows = self._equation(eqn, [read(v) for v in eqn.invars], here, tally)
            env.update(zip(eqn.outvars, out_flows, strict=True))
        return [read(v) for v in jaxpr.outvars], tally

    def _equation(self, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> Sequence[Flow]:
        name = eqn.primitive.name
        self.saw_checkpoint |= name in ("checkpoint", "remat2")
        if name in RULES:
            return self._matmul(eqn, flows, stack, tally)
        if name in _DESCENTS:
            return _DESCENTS[name](self, eqn, flows, stack, tally)
        inner = inner_jaxprs(eqn.params)
        if name in _CALLS and len(inner) == 1:
            ((jaxpr, *_),) = inner.values()
            out_flows, body = self.walk(jaxpr, flows, stack)
            tally.add(body)
            if len(out_flows) == len(eqn.outvars):
                return out_flows
            return [join(flows)] * len(eqn.outvars)  # run_state returns its references' values
        everything = join(flows)
        if inner:
            self._unknown_call(eqn, inner, everything, stack, tally)
        elif name not in _FREE:
            tally.unaccounted[
                _unaccounted(eqn, stack, "this primitive has no known cost; add it with "
                             "mfu_jax.flops.traced.rules.register_rule")
            ] += 1  # fmt: skip
        elif len(eqn.outvars) == 1:
            return [self._elementwise(eqn, flows)]
        return [everything] * len(eqn.outvars)

    def _elementwise(self, eqn: Any, flows: list[Flow]) -> Flow:
        """The result of an elementwise equation."""
        result = join(flows, eqn.outvars[0].aval.size)
        self.scores.follow(eqn, flows, result)
        return result._replace(
            known=evaluate(eqn, [flow.known for flow in flows]),
            pattern=mask_patterns.follow(eqn, [flow.pattern for flow in flows]),
        )

    def _matmul(self, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
        flops = {operand_dtype(eqn): RULES[eqn.primitive.name](eqn)}
        return self.add_work(eqn, flops, flows, stack, tally)

    def add_work(
        self,
        eqn: Any,
        flops: Mapping[str, int],
        flows: list[Flow],
        stack: str,
        tally: Tally,
        scores: tuple[int, ...] = (),
    ) -> list[Flow]:
        """Adds the FLOPs (by dtype) of an equation under `stack`; returns its results."""
        phase, scope = read_scope(stack, drop_last=False)
        operands = flows[:2]
        made: frozenset[Score] = frozenset()
        if not scores and eqn.outvars:  # a kernel may write to references only
            scores, made = self.scores.of_matmul(eqn, operands, stack)
        if phase == "forward" and "jvp(" not in stack:
            phase = self.purposes.get(id(eqn), phase)
        for dtype, amount in flops.items():
            matmul = MatmulKind(
                phase=phase,
                scope=scope,
                dtype=dtype,
                primitive=eqn.primitive.name,
                site=eqn.source_info.traceback,
                has_input=any(flow.origin == Origin.INPUT for flow in operands),
                is_batched=is_batched(eqn),
                scores=scores,
            )
            if amount:
                tally.flops[matmul] += amount
        return [Flow(Origin.ACTIVATION, scores=made)] * len(eqn.outvars)

    def _unknown_call(
        self, eqn: Any, inner: dict[str, tuple[Any, ...]], flow: Flow, stack: str, tally: Tally
    ) -> None:
        body = Tally()
        for jaxpr in (j for jaxprs in inner.values() for j in jaxprs):
            body.add(self.walk(jaxpr, [flow] * len(jaxpr.invars), stack)[1])
        if body.flops or body.unaccounted:
            tally.add(body)
            reason = "an unknown primitive holds these; each was counted as if it ran once"
            tally.unaccounted[_unaccounted(eqn, stack, reason)] += 1


def _scan(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    consts, carries = scan_groups(eqn)
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
    length = eqn.params["length"]
    slices = [flow.stacked(length, -1) for flow in flows[consts + carries :]]
    flows = [*flows[: consts + carries], *slices]
    out_flows, body = _loop(walker, jaxpr, flows, consts, carries, stack)
    tally.add(body, length)
    return [*out_flows[:carries], *(flow.stacked(length, 1) for flow in out_flows[carries:])]


def _loop(
    walker: Walker, jaxpr: Any, flows: Sequence[Flow], consts: int, carries: int, stack: str
) -> tuple[list[Flow], Tally]:
    """One run of a loop's body, with flows of the carry that hold in every iteration."""
    carry = list(flows[consts : consts + carries])
    rest = list(flows[consts + carries :])
    while True:
        out_flows, body = walker.walk(jaxpr, [*flows[:consts], *carry, *rest], stack)
        widened = [
            either(before, after) for before, after in zip(carry, out_flows[:carries], strict=True)
        ]
        if widened == carry:
            return out_flows, body
        carry = widened


def _while(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    inner = inner_jaxprs(eqn.params)
    (condition,), (body_jaxpr,) = inner["cond_jaxpr"], inner["body_jaxpr"]
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carries = len(flows) - cond_consts - body_consts
    out_flows, body = _loop(walker, body_jaxpr, flows[cond_consts:], body_consts, carries, stack)
    _, test = walker.walk(condition, [*flows[:cond_consts], *out_flows], stack)
    known = [flow.known for flow in flows]
    consts = walker.known_constants
    trips = jaxpr_trip_count(condition, body_jaxpr, known, cond_consts, body_consts, consts)
    runs = 1 if trips is None else trips
    tally.add(body, runs)
    tally.add(test, runs + 1)
    if trips is None and (body.flops or test.flops or body.unaccounted or test.unaccounted):
        reason = (
            "a while loop whose trip count depends on data: its body was counted once; use scan "
            "or fori_loop with a static bound, or add the other iterations yourself"
        )
        tally.unaccounted[_unaccounted(eqn, stack, reason)] += 1
    return out_flows


def _mesh_kernel(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    cost = mesh_kernel_cost(eqn, [flow.known for flow in flows])
    return _kernel(walker, eqn, cost, flows, stack, tally)


def _kernel(
    walker: Walker, eqn: Any, cost: PallasCost, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """A kernel's programs, as they are."""
    is_known = not (cost.unknown or cost.is_estimate)
    walker.kernels.setdefault(cost.name, set()).add(cost.flops.total() if is_known else None)
    for reason in cost.unknown:
        tally.unaccounted[_unaccounted(eqn, stack, f"{cost.name}: {reason}")] += 1
    return walker.add_work(eqn, cost.flops, flows, stack, tally)


def _pallas_call(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """The kernel's programs; for an attention kernel all pairs, without recomputed scores."""
    cost = pallas_cost(eqn, [flow.known for flow in flows])
    attention = attention_kernel(eqn)
    if attention is None:
        return _kernel(walker, eqn, cost, flows, stack, tally)
    walker.kernels.setdefault(cost.name, set()).add(None if cost.unknown else cost.flops.total())
    all_pairs = cost.unskipped.total()
    number = walker.scores.new(stack, sequence_sizes(eqn, attention))
    masks = walker.scores.masks
    if number not in masks and cost.flops.total() < all_pairs:
        ran = cost.flops.total()
        masks[number] = KeptPairs("blocks skipped by a kernel", ran, 2 * ran, all_pairs)
    needed, run = len(attention.needed), len(attention.products)
    flops = {dtype: amount * needed // run for dtype, amount in cost.unskipped.items()}
    arrays = flows[eqn.params["grid_mapping"].num_index_operands :]  # after a mask's tables
    return walker.add_work(eqn, flops, arrays, stack, tally, scores=(number,))


def _cond(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    branches = inner_jaxprs(eqn.params)["branches"]
    index, *operands = flows
    if isinstance(index.known, int):
        branches = (branches[min(max(index.known, 0), len(branches) - 1)],)
    runs = [walker.walk(branch, operands, stack) for branch in branches]
    totals = [body.total for _, body in runs]
    costliest = max((body for _, body in runs), key=lambda body: body.total)
    unknown: Counter[Unaccounted] = Counter()
    for _, body in runs:  # any of them may have unaccounted work
        unknown |= body.unaccounted
    tally.add(Tally(costliest.flops, unknown))
    if len(set(totals)) > 1:
        reason = (
            f"the branches cost {', '.join(map(str, totals))} FLOPs; which one runs depends on "
            "data, the most expensive one was counted"
        )
        tally.unaccounted[_unaccounted(eqn, stack, reason)] += 1
    out_flows = runs[0][0]
    for other, _ in runs[1:]:
        out_flows = [either(a, b) for a, b in zip(out_flows, other, strict=True)]
    return out_flows


def _shard_map(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    """The body is one device's; all devices along the manual axes run it."""
    (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
    shape = eqn.params["mesh"].shape
    axes = eqn.params[next(name for name in eqn.params if name.endswith("manual_axes"))]
    out_flows, body = walker.walk(jaxpr, flows, stack)
    tally.add(body, math.prod(shape[axis] for axis in axes))
    return out_flows


def _fused_attention(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    attention = fused_attention(eqn)
    number = walker.scores.new(stack, attention.sizes)
    if attention.band != Band():
        walker.scores.mask(number, attention.band, *attention.sizes)
    flops = {operand_dtype(eqn): attention.flops}
    return walker.add_work(eqn, flops, flows, stack, tally, scores=(number,))


def _linear_solve(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """`jax.lax.custom_linear_solve` runs its solver; its other functions are for gradients."""
    solve = open_jaxpr(eqn.params["jaxprs"].solve)
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = flows[start : start + lengths.solve]
    b = flows[start + lengths.solve + lengths.transpose_solve :]
    out_flows, body = walker.walk(solve, [*consts, *b], stack)
    tally.add(body)
    return out_flows


_Descent = Callable[[Walker, Any, list[Flow], str, Tally], list[Flow]]
_DESCENTS: dict[str, _Descent] = {
    **dict.fromkeys(BY_PRIMITIVE, _fused_attention),
    **dict.fromkeys(MESH_KERNELS, _mesh_kernel),
    "cond": _cond,
    "linear_solve": _linear_solve,
    "pallas_call": _pallas_call,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}


def _unaccounted(eqn: Any, stack: str, reason: str) -> Unaccounted:
    results = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.outvars)
    operands = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.invars)
    return Unaccounted(
        name=eqn.primitive.name, where=stack, shapes=f"({operands}) -> ({results})", reason=reason
    )
