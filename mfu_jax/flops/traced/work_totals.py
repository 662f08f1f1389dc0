"""The FLOPs that the interpreter of a jaxpr adds up, by kind of matmul."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from mfu_jax.flops.count import KernelRun, Unaccounted
from mfu_jax.flops.scopes import FlopPhase
from mfu_jax.flops.traced.masks.pairs import KeptPairs
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
        kept: the pairs that it needs of the masked scores that it uses.
    """

    phase: FlopPhase
    scope: str
    dtype: str
    primitive: str
    site: Any
    has_input: bool
    is_batched: bool
    scores: tuple[int, ...] = ()
    kept: KeptPairs | None = None


@dataclass
class WorkTotals:
    """FLOPs by kind of matmul, and how often each piece of unaccounted work runs.

    `kernels`: names of Pallas kernels with the FLOPs of one call; None if unknown.
    `overhang`: FLOPs that kernels run beyond their arrays, not in `flops`.
    `choices`: how often one of several branches runs without it being known which one.
    """

    flops: Counter[MatmulKind] = field(default_factory=Counter)
    unaccounted: Counter[Unaccounted] = field(default_factory=Counter)
    kernels: set[tuple[str, KernelRun | None]] = field(default_factory=set)
    overhang: Counter[MatmulKind] = field(default_factory=Counter)
    choices: Counter[Choice] = field(default_factory=Counter)

    def add(self, other: WorkTotals, times: int = 1) -> None:
        if not times:
            return
        self.kernels |= other.kernels
        for total, added in ((self.flops, other.flops), (self.overhang, other.overhang)):
            for matmul, flops in added.items():
                total[matmul] += flops * times
        for item, count in other.unaccounted.items():
            self.unaccounted[item] += count * times
        for choice, count in other.choices.items():
            self.choices[choice] += count * times

    @property
    def total(self) -> int:
        """All FLOPs, with the most expensive branch of each choice."""
        chosen = (times * choice.total for choice, times in self.choices.items())
        return sum(self.flops.values()) + sum(chosen)

    def possible(self) -> Iterator[MatmulKind]:
        """The kinds of matmuls that may run, in all branches."""
        yield from self.flops
        for choice in self.choices:
            for branch in choice.branches:
                yield from branch.possible()

    def all_choices(self) -> Counter[Choice]:
        """How often each choice may be made, including those in branches that may not run."""
        found = self.choices.copy()
        for choice, times in self.choices.items():
            for branch in choice.branches:
                for inner, inner_times in branch.all_choices().items():
                    found[inner] = max(found[inner], times * inner_times)
        return found

    def most(self, cost: Callable[[MatmulKind, int], int]) -> int:
        """The highest cost, given that of so many FLOPs of a kind."""
        own = sum([cost(matmul, flops) for matmul, flops in self.flops.items()])
        for choice, times in self.choices.items():
            own += times * max(branch.most(cost) for branch in choice.branches)
        return own

    def taken(self, rank: Callable[[WorkTotals], Any]) -> Iterator[tuple[WorkTotals, int]]:
        """This work and the most expensive branch of each choice, and how often each runs.

        Args:
            rank: of a branch, where several are the most expensive; the first one wins a tie.
        """
        yield self, 1
        for choice, times in self.choices.items():
            branch = max(choice.branches, key=lambda branch: (branch.total, rank(branch)))
            for work, inner_times in branch.taken(rank):
                yield work, times * inner_times

    def settled(self, rank: Callable[[WorkTotals], Any]) -> WorkTotals:
        """The `flops` and `overhang` of the work that is `taken`."""
        total = WorkTotals()
        for work, times in self.taken(rank):
            total.add(WorkTotals(work.flops, overhang=work.overhang), times)
        return total


@dataclass(frozen=True, eq=False)
class Choice:
    """Branches of which one runs, but which one is unknown.

    Attributes:
        branches: the work of each.
        eqn: the ``cond``.
        stack: the name stack around it.
    """

    branches: tuple[WorkTotals, ...]
    eqn: Any
    stack: str

    @functools.cached_property
    def total(self) -> int:
        """FLOPs of the most expensive branch."""
        return max(branch.total for branch in self.branches)


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
