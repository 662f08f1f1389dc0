"""Settles which of several branches is counted if it is unknown which one runs.

The most expensive one is. Of branches with equal FLOPs, that with the most pairs under its masks
is, then that of the wider dtypes; if they are not the same work, they are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from mfu_jax.flops.count import Unaccounted, dtype_bits
from mfu_jax.flops.traced.masks.pairs import KeptPairs
from mfu_jax.flops.traced.work_totals import (
    MatmulKind,
    WorkTotals,
    classify_operands,
    unaccounted,
)

MaskConvention = Literal["exact", "maxtext"]
MODEL_PHASES = ("forward", "evaluation", "backward")


class SettledWork:
    """The work of a function after all of it was followed, when its masks are known.

    Args:
        totals: the work.
        masks: the pairs kept of each score.

    Attributes:
        operands: what the model's matmuls multiply by, in all branches.
        flops: FLOPs by kind of matmul.
        overhang: FLOPs that kernels run beyond their arrays, by kind of matmul.
    """

    def __init__(self, totals: WorkTotals, masks: Mapping[int, KeptPairs]) -> None:
        self.totals = totals
        possible = [m for m in totals.possible() if m.phase in MODEL_PHASES]
        self.operands = classify_operands(possible)
        made_by: dict[int, MatmulKind] = {}
        for matmul in possible:
            for number in matmul.scores:
                made_by.setdefault(number, matmul)
        self._masks = masks
        # A parameter's gradient is also a product of activations, but it has no pairs to mask.
        self._has_pairs = {
            number
            for number, maker in made_by.items()
            if maker.has_input or self.operands[maker] == "activations"
        }
        settled = totals.settled(self._rank)
        self.flops, self.overhang = settled.flops, settled.overhang

    def _rank(self, branch: WorkTotals) -> tuple[int, int]:
        bits = branch.most(lambda matmul, flops: flops * dtype_bits(matmul.dtype))
        return branch.most(self._exact), bits

    def kept_pairs(self, matmul: MatmulKind) -> KeptPairs | None:
        """The pairs that the mask over a matmul's scores keeps; None without a mask."""
        numbers = self._has_pairs.intersection(matmul.scores)
        if numbers and matmul.phase in MODEL_PHASES:
            return matmul.kept or next((self._masks[n] for n in numbers if n in self._masks), None)
        return None

    def _exact(self, matmul: MatmulKind, flops: int) -> int:
        kept = self.kept_pairs(matmul)
        return flops - flops * (kept.of - kept.exact) // kept.of if kept else flops

    def _maxtext(self, matmul: MatmulKind, flops: int) -> int:
        kept = self.kept_pairs(matmul)
        return (
            flops - flops * (2 * kept.of - kept.twice_maxtext) // (2 * kept.of) if kept else flops
        )

    def skipped(self) -> dict[MaskConvention, int]:
        """FLOPs saved by masks. Each convention counts its own most expensive branches."""
        if all(kept is None or kept.saves_nothing for kept in map(self.kept_pairs, self.flops)):
            return {}
        dense = self.flops.total()
        return {
            "exact": dense - self.totals.most(self._exact),
            "maxtext": dense - self.totals.most(self._maxtext),
        }

    def differing_branches(self) -> Counter[Unaccounted]:
        """Branches with equal FLOPs that are not the same work, and how often one of them runs."""
        found: Counter[Unaccounted] = Counter()
        for choice, times in self.totals.all_choices().items():
            branches = [branch.settled(self._rank).flops for branch in choice.branches]
            costs = {branch.total() for branch in branches}
            differences = list(self._differences(branches)) if len(costs) == 1 else []
            if differences:  # branches with different FLOPs are already listed
                reason = (
                    f"the branches cost {costs.pop()} FLOPs each, but not of the same "
                    f"{', '.join(differences)}; which one runs depends on data, or on a loop too "
                    "long to evaluate: the one with the most pairs, then the widest dtypes, was "
                    "counted"
                )
                found[unaccounted(choice.eqn, choice.stack, reason)] += times
        return found

    def _differences(self, branches: list[Counter[MatmulKind]]) -> Iterator[str]:
        aspects: dict[str, Callable[[MatmulKind], str]] = {
            "mask": self._mask,
            "dtype": lambda matmul: matmul.dtype,
            "operands": lambda matmul: self.operands.get(matmul, ""),
            "phase": lambda matmul: matmul.phase,
            "primitive": lambda matmul: matmul.primitive,
        }
        for name, key in aspects.items():
            parts = [split(branch, key) for branch in branches]
            if any(part != parts[0] for part in parts):
                shown = (" and ".join(f"{n} {kind}" for kind, n in p.items()) for p in parts)
                yield f"{name} ({', or '.join(shown)})"

    def _mask(self, matmul: MatmulKind) -> str:
        kept = self.kept_pairs(matmul)
        return f"{kept.label} ({kept.exact} of {kept.of} pairs)" if kept else "without a mask"


def split(flops: Mapping[MatmulKind, int], key: Callable[[MatmulKind], str]) -> dict[str, int]:
    """FLOPs by a property of the matmuls."""
    sums: Counter[str] = Counter()
    for matmul, amount in flops.items():
        sums[key(matmul)] += amount
    return dict(sums)
