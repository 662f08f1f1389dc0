"""Reads the equations of a jaxpr: their operands' dtype, and the jaxprs that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mfu_jax.util.jax_internals import Literal, open_jaxpr, scan_groups

ValueT = TypeVar("ValueT")

_SHORT_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}

# Primitives that run one jaxpr once, on their own operands, with their own results.
CALLS = {
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
    "remat_opt",  # from custom_vjp with optimize_remat
    "run_state",
    "xla_metadata_call",
}

# These run a kernel's body once per position of their mesh.
MESH_KERNELS = frozenset({"core_map", "mpmd_map"})


def short_dtype(dtype: Any) -> str:
    """HLO's name for a dtype.

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


def operand_dtype(eqn: Any) -> str:
    """The dtype of the wider operand; the left one's if both are equally wide."""
    dtypes = [v.aval.dtype for v in eqn.invars[:2] if hasattr(v.aval, "dtype")]
    return short_dtype(max(dtypes, key=lambda dtype: dtype.itemsize))


def interpret(
    jaxpr: Any,
    given: Mapping[Any, ValueT],
    fixed: Callable[[Any], ValueT],
    equation: Callable[[Any, list[ValueT]], Sequence[ValueT]],
) -> list[ValueT]:
    """The values of an open jaxpr's results.

    Args:
        jaxpr: the open jaxpr.
        given: values of its inputs.
        fixed: the value of a literal or, if it is not given, of a constant.
        equation: the values of an equation's results, from those of its operands.
    """
    known = dict(given)

    def read(atom: Any) -> ValueT:
        return fixed(atom) if isinstance(atom, Literal) or atom not in known else known[atom]

    for eqn in jaxpr.eqns:
        results = equation(eqn, [read(v) for v in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def stack_below(stack: str, eqn: Any) -> str:
    """The name stack of an equation inside a jaxpr that runs under `stack`."""
    own = str(eqn.source_info.name_stack)
    return f"{stack}/{own}" if stack and own else stack or own


def inner_jaxprs(params: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The (opened) jaxprs in a primitive's parameters, by parameter name."""
    found = {}
    for name, value in params.items():
        values = value if isinstance(value, tuple | list) else (value,)
        jaxprs = tuple(j for j in map(open_jaxpr, values) if j is not None)
        if jaxprs:
            found[name] = jaxprs
    return found


def bodies(eqn: Any) -> list[Any]:
    """All (opened) jaxprs in an equation's parameters."""
    return [jaxpr for jaxprs in inner_jaxprs(eqn.params).values() for jaxpr in jaxprs]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and those inside them."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from equations(inner)


def is_call(eqn: Any) -> bool:
    """Whether an equation runs one jaxpr once, on its own operands, with its own results."""
    inner = inner_jaxprs(eqn.params) if eqn.primitive.name in CALLS else {}
    return [len(jaxprs) for jaxprs in inner.values()] == [1]


class Scan(NamedTuple):
    """The parts of a `scan` equation."""

    body: Any
    consts: int
    carries: int
    length: int
    reverse: bool


class While(NamedTuple):
    """The parts of a `while` equation; its operands: both groups of constants, then the carry."""

    condition: Any
    body: Any
    cond_consts: int
    body_consts: int

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The condition's constants, the body's constants, and the carry."""
        start = self.cond_consts + self.body_consts
        consts = operands[: self.cond_consts], operands[self.cond_consts : start]
        return list(consts[0]), list(consts[1]), list(operands[start:])


class Branches(NamedTuple):
    """The branches of a `cond` equation."""

    branches: tuple[Any, ...]


class InlinedCall(NamedTuple):
    """The jaxpr that an equation runs once."""

    jaxpr: Any


class Shards(NamedTuple):
    """The jaxpr that each device of a `shard_map` runs."""

    jaxpr: Any


Inner = Branches | InlinedCall | Scan | Shards | While


def inner_of(eqn: Any) -> Inner | None:
    """What an equation runs, if that can be evaluated; else None."""
    name = eqn.primitive.name
    if name == "cond":
        return Branches(inner_jaxprs(eqn.params)["branches"])
    if name == "scan":
        return scan_of(eqn)
    if name == "while":
        return while_of(eqn)
    if name == "shard_map":
        ((jaxpr,),) = inner_jaxprs(eqn.params).values()
        return Shards(jaxpr)
    if is_call(eqn):
        ((jaxpr,),) = inner_jaxprs(eqn.params).values()
        # `run_state` takes references, and returns their contents.
        is_function = len(jaxpr.outvars) == len(eqn.outvars)
        is_inlined = is_function and len(jaxpr.invars) == len(eqn.invars)
        return InlinedCall(jaxpr) if is_inlined else None
    return None


def scan_of(eqn: Any) -> Scan:
    """The parts of a `scan` equation."""
    (body,) = inner_jaxprs(eqn.params)["jaxpr"]
    return Scan(body, *scan_groups(eqn), eqn.params["length"], eqn.params["reverse"])


def while_of(eqn: Any) -> While:
    """The parts of a `while` equation."""
    inner = inner_jaxprs(eqn.params)
    (condition,), (body,) = inner["cond_jaxpr"], inner["body_jaxpr"]
    return While(condition, body, eqn.params["cond_nconsts"], eqn.params["body_nconsts"])


def first_array(eqn: Any) -> int:
    """The index of a kernel's first array, after its grid's bounds and tables."""
    mapping = eqn.params.get("grid_mapping")
    if mapping is None:  # it runs on a mesh
        return 0
    return int(mapping.num_dynamic_grid_bounds + mapping.num_index_operands)
