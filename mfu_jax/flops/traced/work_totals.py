"""The FLOPs that the interpreter of a jaxpr adds up, by kind of matmul."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mfu_jax.flops.count import Unaccounted
from mfu_jax.flops.scopes import FlopPhase
from mfu_jax.util.jax_internals import user_frames


class MatmulKind(NamedTuple):
    """Matmuls that are counted together; a `WorkTotals` holds the FLOPs of each kind.

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
class WorkTotals:
    """FLOPs by kind of matmul, and how often each piece of unaccounted work runs.

    `kernels`: names of Pallas kernels with the FLOPs that one call executes; None if unknown.
    `overhang`: FLOPs that kernels run beyond their arrays, not in `flops`.
    """

    flops: Counter[MatmulKind] = field(default_factory=Counter)
    unaccounted: Counter[Unaccounted] = field(default_factory=Counter)
    kernels: set[tuple[str, int | None]] = field(default_factory=set)
    overhang: Counter[MatmulKind] = field(default_factory=Counter)

    def add(self, other: WorkTotals, times: int = 1) -> None:
        if not times:
            return
        self.kernels |= other.kernels
        for total, added in ((self.flops, other.flops), (self.overhang, other.overhang)):
            for matmul, flops in added.items():
                total[matmul] += flops * times
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
