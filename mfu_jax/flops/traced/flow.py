"""Properties of values tracked by the walk over a jaxpr, and the FLOPs it adds up."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.scopes import FlopPhase
from mfu_jax.flops.traced.known_values import Known
from mfu_jax.flops.traced.masks import patterns as mask_patterns
from mfu_jax.flops.traced.masks.patterns import Pattern
from mfu_jax.util.jax_internals import user_frames

_SHORT_DTYPES = {"bfloat": "bf", "float": "f", "uint": "u", "int": "s", "complex": "c"}


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


class Origin(enum.IntEnum):
    """What a value was computed from; if several apply, the greatest wins."""

    CONSTANT = 0
    INPUT = 1  # parameters and inputs of the model, cast, reshaped, scaled
    ACTIVATION = 2  # the result of some matmul


class Score(NamedTuple):
    """A product of two activations, whose elements may be query-key pairs under a mask."""

    number: int
    size: int


class Flow(NamedTuple):
    """What is known about a value from how it was computed.

    Attributes:
        origin: what it was computed from.
        known: its value, if known while tracing (see `known_values`) and it decides how often
            something runs.
        pattern: its elements as a function of their position (see `masks.patterns`).
        scores: the scores that its elements correspond to one to one.
    """

    origin: Origin = Origin.CONSTANT
    known: Known = None
    pattern: Pattern | None = None
    scores: frozenset[Score] = frozenset()

    def without_value(self) -> Flow:
        """The same flow without `known`."""
        return self if self.known is None else self._replace(known=None)

    def stacked(self, times: int, dims: int) -> Flow:
        """The flow of `times` such values stacked (`dims` = 1), or of one slice of a stack (−1)."""
        pattern = self.pattern and self.pattern.moved(
            lambda dim: dim + dims if dim + dims >= 0 else None
        )
        scores = (
            Score(score.number, score.size * times if dims > 0 else score.size // times)
            for score in self.scores
        )
        return self._replace(known=None, pattern=pattern, scores=frozenset(scores))


INPUT = Flow(Origin.INPUT)


def of_constant(value: Known, origin: Origin = Origin.CONSTANT) -> Flow:
    """The flow of a literal, or of a constant array in the traced function."""
    return Flow(origin, known=value, pattern=mask_patterns.of_constant(value))


def join(flows: Iterable[Flow], size: int | None = None) -> Flow:
    """What is known about a value of `size` elements computed from values of these flows."""
    flows = tuple(flows)
    return Flow(
        origin=max((flow.origin for flow in flows), default=Origin.CONSTANT),
        scores=frozenset(s for flow in flows for s in flow.scores if s.size == size),
    )


def either(a: Flow, b: Flow) -> Flow:
    """What is known about a value that is one of two."""
    if a == b:
        return a
    return join((a, b))


class MatmulKind(NamedTuple):
    """Matmuls that are counted together; a `Tally` holds the FLOPs of each kind.

    Attributes:
        phase: forward, backward, rematerialized, evaluation, optimizer or other.
        scope: path of named scopes.
        dtype: the wider operand's, in HLO's spelling.
        primitive: the JAX primitive.
        site: the line of user code it came from; its gradients share the line.
        has_input: whether one operand is a parameter (or an input of the model).
        is_batched: whether both operands have a batch dimension.
        scores: numbers of the `Score`s that it computes or uses.
    """

    phase: FlopPhase
    scope: str
    dtype: str
    primitive: str
    site: Any
    has_input: bool
    is_batched: bool
    scores: tuple[int, ...] = ()


@dataclass
class Tally:
    """FLOPs by kind of matmul, and how often each piece of unaccounted work runs.

    `kernels`: names of Pallas kernels with the FLOPs that one call executes; None if unknown.
    """

    flops: Counter[MatmulKind] = field(default_factory=Counter)
    unaccounted: Counter[Unaccounted] = field(default_factory=Counter)
    kernels: set[tuple[str, int | None]] = field(default_factory=set)

    def add(self, other: Tally, times: int = 1) -> None:
        if not times:
            return
        self.kernels |= other.kernels
        for matmul, flops in other.flops.items():
            self.flops[matmul] += flops * times
        for item, count in other.unaccounted.items():
            self.unaccounted[item] += count * times

    @property
    def total(self) -> int:
        return sum(self.flops.values())


_FORWARD = ("forward", "evaluation")
Operands = Literal["weights", "activations"]


def classify_operands(matmuls: Iterable[MatmulKind]) -> dict[MatmulKind, Operands]:
    """Whether each matmul multiplies by a parameter (or is the gradient of one that does).

    A forward matmul does if one operand is not an activation. Its gradient is two matmuls: the
    activation's still multiplies by the parameter; the parameter's multiplies only activations,
    but comes from the same line of code.
    """
    matmuls = list(matmuls)
    input_sites = {m.site for m in matmuls if m.has_input and m.site is not None}
    by_frames: dict[Any, set[bool]] = {}
    for m in matmuls:
        if m.phase in _FORWARD:
            frames = user_frames(m.site)
            by_frames.setdefault(frames, set()).add(m.site in input_sites or m.has_input)

    def is_weights(m: MatmulKind) -> bool:
        if m.has_input or m.site in input_sites:
            return True
        if m.phase in _FORWARD:
            return False
        forward = by_frames.get(user_frames(m.site), set())
        return forward == {True} or (forward != {False} and not m.is_batched)

    return {m: "weights" if is_weights(m) else "activations" for m in matmuls}


def unaccounted(eqn: Any, stack: str, reason: str) -> Unaccounted:
    """An `Unaccounted` entry: why an equation cannot be counted, with its shapes."""
    results = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.outvars)
    operands = ", ".join(v.aval.str_short(short_dtypes=True) for v in eqn.invars)
    return Unaccounted(
        name=eqn.primitive.name, where=stack, shapes=f"({operands}) -> ({results})", reason=reason
    )
