"""Walks a jaxpr, multiplies loop bodies by their trip counts, and says what each matmul is for."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core import Primitive, primitives

from mfu_jax.flops import _jax_internals
from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.jaxpr_rules import RULES
from mfu_jax.flops.scopes import Phase, read_scope

# Primitives that hold one jaxpr and run it once, with their own operands and results.
_CALLS = {
    "closed_call",
    "core_call",
    "checkpoint",
    "composite",
    "compute_on",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "jit",
    "pjit",
    "remat2",
    "run_state",
    "xla_metadata_call",
}

# Beside the primitives that JAX exports: data movement, collectives, random bits, references.
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

_SHORT_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}


def short_dtype(dtype: Any) -> str:
    """HLO's name of a dtype.

    >>> import jax.numpy as jnp
    >>> [short_dtype(d) for d in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8, jnp.complex64)]
    ['bf16', 'f8e4m3fn', 's8', 'c64']
    """
    name = getattr(dtype, "name", None) or dtype.__name__
    if name == "bool":
        return "pred"
    for long, short in _SHORT_DTYPES.items():
        if name.startswith(long):
            return short + name.removeprefix(long).replace("_", "")
    return str(name)


class Origin(enum.IntEnum):
    """What a value was computed from; of several, the greatest counts."""

    CONSTANT = 0
    INPUT = 1  # parameters and inputs of the model, cast, reshaped, scaled
    ACTIVATION = 2  # the result of some matmul


class Flow(NamedTuple):
    """What is known of a value from where it came.

    Attributes:
        origin: what it was computed from.
        gradient: it was computed from the result of a backward pass.
        known: its value, where that is a scalar known while tracing.
    """

    origin: Origin = Origin.CONSTANT
    gradient: bool = False
    known: int | float | None = None


INPUT = Flow(Origin.INPUT)


def join(flows: Iterable[Flow]) -> Flow:
    """What is known of a value that was computed from values of these flows."""
    flows = tuple(flows)
    return Flow(
        origin=max((flow.origin for flow in flows), default=Origin.CONSTANT),
        gradient=any(flow.gradient for flow in flows),
    )


def either(a: Flow, b: Flow) -> Flow:
    """What is known of a value that is one of the two."""
    return join((a, b))._replace(known=a.known if a.known == b.known else None)


class Matmul(NamedTuple):
    """One sort of work; a `Tally` says how many FLOPs of each sort there are.

    Attributes:
        site: the line of the user's code that it came from, its gradients included.
        has_input: one operand is a parameter (or an input of the model).
        is_batched: it is a stack of products, with a batch dimension in both operands.
    """

    phase: Phase
    scope: str
    dtype: str
    primitive: str
    site: Any
    has_input: bool
    is_batched: bool


@dataclass
class Tally:
    """FLOPs by sort of work, and what has no known count with how often it runs."""

    flops: Counter[Matmul] = field(default_factory=Counter)
    unaccounted: Counter[Unaccounted] = field(default_factory=Counter)

    def add(self, other: Tally, times: int = 1) -> None:
        for matmul, flops in other.flops.items():
            self.flops[matmul] += flops * times
        for item, count in other.unaccounted.items():
            self.unaccounted[item] += count * times

    @property
    def total(self) -> int:
        return sum(self.flops.values())


class Walker:
    """Counts jaxprs; a jaxpr that occurs again in the same role is walked once."""

    def __init__(self) -> None:
        self.saw_checkpoint = False
        # The jaxpr is kept in the value, so that its id cannot come to mean another one.
        self._seen: dict[Any, tuple[Any, list[Flow], Tally]] = {}

    def walk(self, jaxpr: Any, flows: Sequence[Flow], stack: str = "") -> tuple[list[Flow], Tally]:
        """Follows `flows` through an open jaxpr that stands under the name stack `stack`.

        Returns:
            The flows of the jaxpr's results and the work of one run.
        """
        key = (id(jaxpr), tuple(flows), stack)
        if key not in self._seen:
            self._seen[key] = (jaxpr, *self._walk(jaxpr, flows, stack))
        _, out_flows, tally = self._seen[key]
        return out_flows, tally

    def _walk(self, jaxpr: Any, flows: Sequence[Flow], stack: str) -> tuple[list[Flow], Tally]:
        env: dict[Any, Flow] = dict.fromkeys(jaxpr.constvars, INPUT)
        env.update(zip(jaxpr.invars, flows, strict=True))

        def read(atom: Any) -> Flow:
            if isinstance(atom, JaxprLiteral):
                return Flow(known=_scalar(atom.val))
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
        inner = _jax_internals.inner_jaxprs(eqn.params)
        if name in _CALLS and len(inner) == 1:
            ((jaxpr, *_),) = inner.values()
            out_flows, body = self.walk(jaxpr, flows, stack)
            tally.add(body)
            return out_flows
        everything = join(flows)
        if inner:
            self._unknown_call(eqn, inner, everything, stack, tally)
        elif name not in _FREE:
            tally.unaccounted[
                _unaccounted(eqn, stack, "this primitive has no known cost; teach it with "
                             "mfu_jax.flops.jaxpr_rules.register_rule")
            ] += 1  # fmt: skip
        elif name in _ARITHMETIC and all(flow.known is not None for flow in flows):
            return [everything._replace(known=_ARITHMETIC[name](*(f.known for f in flows)))]
        return [everything] * len(eqn.outvars)

    def _matmul(self, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
        flops = RULES[eqn.primitive.name](eqn)
        phase, scope = read_scope(stack, drop_last=False)
        everything = join(flows)
        if phase == "forward" and "jvp(" not in stack and everything.gradient:
            phase = "optimizer"  # it needs a gradient and is not differentiated itself
        matmul = Matmul(
            phase=phase,
            scope=scope,
            dtype=_operand_dtype(eqn),
            primitive=eqn.primitive.name,
            site=eqn.source_info.traceback,
            has_input=any(flow.origin == Origin.INPUT for flow in flows[:2]),
            is_batched=_is_batched(eqn),
        )
        if flops:
            tally.flops[matmul] += flops
        gradient = everything.gradient or phase in ("backward", "rematerialized")
        return [Flow(Origin.ACTIVATION, gradient)] * len(eqn.outvars)

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
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    (jaxpr,) = _jax_internals.inner_jaxprs(eqn.params)["jaxpr"]
    out_flows, body = _loop(walker, jaxpr, flows, consts, carries, stack)
    tally.add(body, eqn.params["length"])
    return out_flows


def _loop(
    walker: Walker, jaxpr: Any, flows: Sequence[Flow], consts: int, carries: int, stack: str
) -> tuple[list[Flow], Tally]:
    """One run of a loop's body, with what its carry is in every iteration."""
    carry = list(flows[consts : consts + carries])
    rest = list(flows[consts + carries :])
    while True:
        out_flows, body = walker.walk(jaxpr, [*flows[:consts], *carry, *rest], stack)
        widened = [either(a, b) for a, b in zip(carry, out_flows[:carries], strict=True)]
        if widened == carry:
            return out_flows, body
        carry = widened


def _while(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    inner = _jax_internals.inner_jaxprs(eqn.params)
    (condition,), (body_jaxpr,) = inner["cond_jaxpr"], inner["body_jaxpr"]
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    initial = flows[cond_consts + body_consts :]
    out_flows, body = _loop(
        walker, body_jaxpr, flows[cond_consts:], body_consts, len(initial), stack
    )
    _, test = walker.walk(condition, [*flows[:cond_consts], *out_flows], stack)
    trips = static_trip_count(condition, body_jaxpr, flows, cond_consts, body_consts)
    if trips is not None:
        tally.add(body, trips)
        tally.add(test, trips + 1)
    elif body.flops or test.flops or body.unaccounted or test.unaccounted:
        tally.add(body)
        tally.add(test)
        reason = (
            "a while loop whose trip count depends on data: its body was counted once; use scan "
            "or fori_loop with a static bound, or add the other iterations yourself"
        )
        tally.unaccounted[_unaccounted(eqn, stack, reason)] += 1
    return out_flows


_TESTS: dict[str, Callable[[float], bool]] = {
    "lt": lambda distance: distance < 0,
    "le": lambda distance: distance <= 0,
    "gt": lambda distance: distance > 0,
    "ge": lambda distance: distance >= 0,
}


def static_trip_count(
    condition: Any, body: Any, flows: Sequence[Flow], cond_consts: int, body_consts: int
) -> int | None:
    """How often a `while` runs, where its condition compares a counter with a known bound.

    Args:
        condition: the open jaxpr (constants, carry) → bool.
        body: the open jaxpr (constants, carry) → carry.
        flows: of condition constants, body constants, initial carry.
    """
    carry_flows = flows[cond_consts + body_consts :]
    carry_in, carry_out = body.invars[body_consts:], body.outvars
    test = next((e for e in condition.eqns if condition.outvars[0] in e.outvars), None)
    if test is None or test.primitive.name not in _TESTS:
        return None
    starts: list[float] = []
    steps: list[float] = []
    for atom in test.invars:
        start: float | None
        step: float | None
        if isinstance(atom, JaxprLiteral):
            start, step = _scalar(atom.val), 0
        elif atom in condition.invars[:cond_consts]:
            start, step = flows[condition.invars.index(atom)].known, 0
        elif atom in condition.invars:
            i = condition.invars.index(atom) - cond_consts
            start, step = carry_flows[i].known, _step(body, carry_in[i], carry_out[i])
        else:
            return None
        if start is None or step is None:
            return None
        starts.append(start)
        steps.append(step)
    # The distance (a − b) changes by the same amount in every iteration.
    distance, change = starts[0] - starts[1], steps[0] - steps[1]
    name = test.primitive.name
    if not _TESTS[name](distance):
        return 0
    if change == 0 or (change > 0) != (name in ("lt", "le")):
        return None  # it never gets to its bound
    trips = -(distance // change) if name in ("lt", "gt") else -distance // change + 1
    return int(trips)


def _step(body: Any, carry_in: Any, carry_out: Any) -> float | None:
    """By how much the body changes this scalar of its carry, if by a constant."""
    if carry_in is carry_out:
        return 0
    for eqn in body.eqns:
        if carry_out in eqn.outvars and eqn.primitive.name in ("add", "sub"):
            a, b = eqn.invars
            if a is carry_in and isinstance(b, JaxprLiteral):
                amount = _scalar(b.val)
                return -amount if amount is not None and eqn.primitive.name == "sub" else amount
            if b is carry_in and isinstance(a, JaxprLiteral) and eqn.primitive.name == "add":
                return _scalar(a.val)
    return None


def _cond(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    branches = _jax_internals.inner_jaxprs(eqn.params)["branches"]
    index, *operands = flows
    if isinstance(index.known, int):
        branches = (branches[min(max(index.known, 0), len(branches) - 1)],)
    runs = [walker.walk(branch, operands, stack) for branch in branches]
    totals = [body.total for _, body in runs]
    tally.add(max((body for _, body in runs), key=lambda body: body.total))
    if len(set(totals)) > 1:
        reason = (
            f"the branches cost {', '.join(map(str, totals))} FLOPs; which one runs depends on "
            "data, the dearest was counted"
        )
        tally.unaccounted[_unaccounted(eqn, stack, reason)] += 1
    out_flows = runs[0][0]
    for other, _ in runs[1:]:
        out_flows = [either(a, b) for a, b in zip(out_flows, other, strict=True)]
    return out_flows


def _shard_map(walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally) -> list[Flow]:
    """The body is one device's; the devices along the manual axes all run it."""
    (jaxpr,) = _jax_internals.inner_jaxprs(eqn.params)["jaxpr"]
    shape = eqn.params["mesh"].shape
    out_flows, body = walker.walk(jaxpr, flows, stack)
    tally.add(body, math.prod(shape[axis] for axis in eqn.params["manual_axes"]))
    return out_flows


def _linear_solve(
    walker: Walker, eqn: Any, flows: list[Flow], stack: str, tally: Tally
) -> list[Flow]:
    """`jax.lax.custom_linear_solve` runs its solver; the other functions serve differentiation."""
    solve = _jax_internals.open_jaxpr(eqn.params["jaxprs"].solve)
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    consts = flows[start : start + lengths.solve]
    b = flows[start + lengths.solve + lengths.transpose_solve :]
    out_flows, body = walker.walk(solve, [*consts, *b], stack)
    tally.add(body)
    return out_flows


_Descent = Callable[[Walker, Any, list[Flow], str, Tally], list[Flow]]
_DESCENTS: dict[str, _Descent] = {
    "cond": _cond,
    "linear_solve": _linear_solve,
    "custom_linear_solve": _linear_solve,
    "scan": _scan,
    "shard_map": _shard_map,
    "while": _while,
}

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "convert_element_type": lambda a: a,
    "copy": lambda a: a,
}


def _scalar(value: Any) -> int | float | None:
    if getattr(value, "shape", ()) != ():
        return None
    try:
        value = value.item() if hasattr(value, "item") else value
    except Exception:  # an abstract or a sharded value: not known
        return None
    return value if isinstance(value, int | float) else None


def _operand_dtype(eqn: Any) -> str:
    """The wider operand's dtype, the left one's where both are as wide."""
    dtypes = [v.aval.dtype for v in eqn.invars[:2] if hasattr(v.aval, "dtype")]
    return short_dtype(max(dtypes, key=lambda dtype: dtype.itemsize))


def _is_batched(eqn: Any) -> bool:
    numbers = eqn.params.get("dimension_numbers")
    return eqn.primitive.name == "dot_general" and bool(numbers[1][0])


def _unaccounted(eqn: Any, stack: str, reason: str) -> Unaccounted:
    results = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.outvars)
    operands = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.invars)
    return Unaccounted(
        name=eqn.primitive.name, where=stack, shapes=f"({operands}) -> ({results})", reason=reason
    )


Operands = Literal["weights", "activations"]


def sort_operands(matmuls: Iterable[Matmul]) -> dict[Matmul, Operands]:
    """Whether each matmul meets a parameter (or is the gradient of one that does).

    A forward matmul does if one operand is no activation. Of the two matmuls that a forward one
    has as its gradient, that of the activation still meets the parameter; that of the parameter
    meets activations only, but came from the same line of code.
    """
    matmuls = list(matmuls)
    input_sites = {m.site for m in matmuls if m.has_input and m.site is not None}
    by_frames: dict[Any, set[bool]] = {}
    for m in matmuls:
        if m.phase == "forward":
            frames = _jax_internals.user_frames(m.site)
            by_frames.setdefault(frames, set()).add(m.site in input_sites or m.has_input)

    def is_weights(m: Matmul) -> bool:
        if m.has_input or m.site in input_sites:
            return True
        if m.phase == "forward":
            return False
        forward = by_frames.get(_jax_internals.user_frames(m.site), set())
        return forward == {True} or (forward != {False} and not m.is_batched)

    return {m: "weights" if is_weights(m) else "activations" for m in matmuls}
