"""FLOPs of a Pallas kernel: its body, once per program of its grid.

Conditions on the grid position (blocks that a causal kernel skips) and on constant tables
(splash attention's block mask) are evaluated for all programs at once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mfu_jax.flops.attention_kernels import AttentionKernel
from mfu_jax.flops.lengths import Lengths
from mfu_jax.flops.traced.integers.arithmetic import evaluate, where
from mfu_jax.flops.traced.integers.known_values import ConstantTable, Known, scalar
from mfu_jax.flops.traced.jaxprs import MESH_KERNELS, While, inner_jaxprs, operand_dtype, while_of
from mfu_jax.flops.traced.kernels.attention import attention_kernel, flops_of_all_pairs, pallas_name
from mfu_jax.flops.traced.kernels.mosaic_gpu import (
    INSTRUCTIONS,
    instruction_flops,
    meshes,
)
from mfu_jax.flops.traced.kernels.ragged import (
    grouped_on_gpu,
    is_grouped,
    paged_lengths,
    share_of_rows,
)
from mfu_jax.flops.traced.rules import RULES
from mfu_jax.util.jax_internals import Literal, scan_groups

TripCount = Callable[[While, Sequence[Known]], Known]

# Loops are unrolled if a condition may depend on their counter, up to this length to bound
# the time.
_LONGEST_UNROLLED = 4096


@dataclass(frozen=True, kw_only=True)
class PallasCost:
    """Matmul FLOPs of one call of a kernel.

    Attributes:
        name: the kernel's name, as shown by its custom call in HLO.
        flops: FLOPs that its programs run, excluding skipped blocks, by dtype.
        unskipped: the same including skipped blocks.
        unknown: what could not be determined.
        is_estimate: whether the FLOPs come from its author's `cost_estimate`.
    """

    name: str
    flops: Counter[str]
    unskipped: Counter[str]
    unknown: tuple[str, ...] = ()
    is_estimate: bool = False


def pallas_cost(
    eqn: Any, operands: Sequence[Known], lengths: Lengths, trip_count: TripCount
) -> PallasCost:
    """Counts a `pallas_call`.

    Args:
        eqn: the equation.
        operands: known values of its operands; a `ConstantTable` for a constant.
        lengths: lengths given by the user.
        trip_count: iterations of a while loop, given its operands.
    """
    mapping, name = eqn.params["grid_mapping"], pallas_name(eqn)
    first = mapping.num_dynamic_grid_bounds
    bounds = [None if is_grouped(eqn) else bound for bound in operands[:first]]
    grid = _grid(mapping.grid, bounds)
    jaxpr = eqn.params["jaxpr"]
    tables: list[Known] = list(operands[first : first + mapping.num_index_operands])
    refs = [*tables, *[None] * (len(jaxpr.invars) - len(tables))]
    programs = np.ones(grid, np.int64)
    # The kernel does not see the grid dimensions that vmap added.
    axes = tuple(d for d in range(len(grid)) if d not in mapping.vmapped_dims)
    exact = _KernelPrograms(grid, axes, trip_count)
    unskipped = _KernelPrograms(grid, axes, trip_count, skips=False)
    if tables and tables[0] is None:
        refs[0], note = paged_lengths(eqn, name, lengths)
        exact.unknown.update([note] if note else [])
    for run in (exact, unskipped):
        run.walk(jaxpr, refs, programs)
    if None in bounds or (exact.unknown and is_grouped(eqn)):
        if (estimate := eqn.params.get("cost_estimate")) is not None:
            share, wrong = share_of_rows(eqn, lengths)
            flops = Counter(dict.fromkeys(list(exact.flops)[:1], int(estimate.flops * share)))
            kernel = attention_kernel(eqn)
            return _estimated(name, _all_pairs(eqn, kernel, flops) if kernel else flops, wrong)
        exact.unknown.add("the grid's size depends on data: one program was counted")
    if exact.unknown and (grouped := grouped_on_gpu(eqn, lengths)):
        return _of_rows(name, exact.flops, *grouped)
    all_pairs, kernel = unskipped.flops, attention_kernel(eqn)
    if kernel and (bounds or "splash" in name):
        # The grid may cover only a mask's blocks; the body appears twice, masked and unmasked.
        all_pairs = _all_pairs(eqn, kernel, all_pairs)
    return PallasCost(
        name=name, flops=exact.flops, unskipped=all_pairs, unknown=tuple(sorted(exact.unknown))
    )


def _estimated(name: str, flops: Counter[str], wrong: str) -> PallasCost:
    unknown = (wrong,) if wrong else ()
    return PallasCost(name=name, flops=flops, unskipped=flops, unknown=unknown, is_estimate=True)


def _of_rows(name: str, counted: Counter[str], flops: int, wrong: str) -> PallasCost:
    return _estimated(name, Counter(dict.fromkeys(list(counted)[:1], flops)), wrong)


def _all_pairs(eqn: Any, kernel: AttentionKernel, counted: Counter[str]) -> Counter[str]:
    return Counter(dict.fromkeys(list(counted)[:1], flops_of_all_pairs(eqn, kernel)))


def _grid(sizes: Sequence[Any], bounds: Sequence[Known]) -> tuple[int, ...]:
    """Steps along each axis of the grid; 1 if the bound is unknown."""
    known = iter(bounds)
    steps = (size if isinstance(size, int) else next(known) for size in sizes)
    return tuple(1 if n is None else int(n) for n in steps)


def mesh_kernel_cost(
    eqn: Any,
    operands: Sequence[Known],
    lengths: Lengths,
    trip_count: TripCount,
    attention: AttentionKernel | None = None,
) -> PallasCost:
    """Counts a kernel that runs on a mesh: of blocks and warp groups (Mosaic GPU), or of cores.

    Args:
        eqn: the equation.
        operands: known values of its operands.
        lengths: lengths given by the user.
        trip_count: iterations of a while loop, given its operands.
        attention: which attention kernel it is; None if it is not one.
    """
    exact: Counter[str] = Counter()
    unskipped: Counter[str] = Counter()
    unknown: set[str] = set()
    bodies = [jaxpr for jaxprs in inner_jaxprs(eqn.params).values() for jaxpr in jaxprs]
    for jaxpr, mesh in zip(bodies, meshes(eqn.params), strict=True):
        grid = tuple(mesh.values())
        for skips, total in ((True, exact), (False, unskipped)):
            run = _KernelPrograms(grid, tuple(range(len(grid))), trip_count, skips=skips)
            run.named = {name: run.position(axis) for axis, name in enumerate(mesh)}
            run.scoped(jaxpr, operands, np.ones(grid, np.int64))
            total.update(run.flops)
            unknown |= run.unknown if skips else set()
    name = str(eqn.params.get("name") or "kernel")
    if unknown and (grouped := grouped_on_gpu(eqn, lengths)):
        return _of_rows(name, exact, *grouped)
    return PallasCost(
        name=name,
        flops=exact,
        unskipped=_all_pairs(eqn, attention, unskipped) if attention else unskipped,
        unknown=tuple(sorted(unknown)),
    )


@dataclass
class _KernelPrograms:
    """All programs of a grid, run at once on their known integers."""

    grid: tuple[int, ...]
    axes: tuple[int, ...]
    trip_count: TripCount
    skips: bool = True
    named: dict[Any, Known] = field(default_factory=dict)  # positions along the axes of a mesh
    flops: Counter[str] = field(default_factory=Counter)
    unknown: set[str] = field(default_factory=set)

    def position(self, axis: int) -> np.ndarray:
        """Each program's position along an axis of the grid."""
        return np.arange(self.grid[axis]).reshape(
            [-1 if d == axis else 1 for d in range(len(self.grid))]
        )

    def walk(self, jaxpr: Any, known: Sequence[Known], times: np.ndarray) -> list[Known]:
        """Runs a jaxpr `times` (an array over the grid); returns its known results."""
        return self._walk(jaxpr, dict(zip(jaxpr.invars, known, strict=True)), times)

    def scoped(self, jaxpr: Any, known: Sequence[Known], times: np.ndarray) -> list[Known]:
        """Runs the body of `run_scoped` and the like, which takes additional references.

        The operands are bound to its constants if it has any, else to its first arguments.
        """
        operands = jaxpr.constvars or jaxpr.invars
        return self._walk(jaxpr, dict(zip(operands, known, strict=False)), times)

    def _walk(self, jaxpr: Any, known: dict[Any, Known], times: np.ndarray) -> list[Known]:
        env = {**dict.fromkeys((*jaxpr.constvars, *jaxpr.invars)), **known}

        def read(atom: Any) -> Known:
            return scalar(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            results = self._equation(eqn, [read(v) for v in eqn.invars], times)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        name = eqn.primitive.name
        nothing = [None] * len(eqn.outvars)
        if name in RULES:
            self.flops[operand_dtype(eqn)] += RULES[name](eqn) * int(times.sum())
            return nothing
        if name in INSTRUCTIONS:
            dtype, flops = instruction_flops(eqn)
            self.flops[dtype] += flops * int(self._issued(eqn, times).sum())
            return nothing
        if name == "program_id":
            return [self.position(self.axes[eqn.params["axis"]])]
        if name == "axis_index":
            return [self.named.get(eqn.params["axis_name"])]
        if name == "num_programs":
            return [self.grid[self.axes[eqn.params["axis"]]]]
        if name == "get" and isinstance(known[0], ConstantTable):
            return [_look_up(eqn, known)]
        if name == "cond":
            return self._cond(eqn, known, times)
        if name == "scan":
            return self._scan(eqn, known, times)
        if name == "while":
            return self._while(eqn, known, times)
        if name in MESH_KERNELS:
            self._warps(eqn, known, times)
            return nothing
        inner = [j for jaxprs in inner_jaxprs(eqn.params).values() for j in jaxprs]
        if not inner:
            return [evaluate(eqn, known)] if len(nothing) == 1 else nothing
        results: Sequence[Known] = nothing
        for jaxpr in inner:
            results = self.scoped(jaxpr, known, times)
        return results if len(results) == len(nothing) else nothing

    def _issued(self, eqn: Any, times: np.ndarray) -> np.ndarray:
        """Runs of an instruction; the first of two blocks issues a collective one for both."""
        axis = eqn.params.get("collective_axis")
        first = self.named.get(axis) if axis is not None else None
        return times if first is None else 2 * times * (np.asarray(first) == 0)

    def _warps(self, eqn: Any, known: list[Known], times: np.ndarray) -> None:
        """Runs a body inside the kernel for each warp of a group."""
        bodies = [jaxpr for jaxprs in inner_jaxprs(eqn.params).values() for jaxpr in jaxprs]
        outside = self.named
        for jaxpr, mesh in zip(bodies, meshes(eqn.params), strict=True):
            for place in np.ndindex(*mesh.values()):
                self.named = {**outside, **dict(zip(mesh, place, strict=True))}
                self.scoped(jaxpr, known, times)
        self.named = outside

    def _cond(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        branches = inner_jaxprs(eqn.params)["branches"]
        index, *operands = known
        nothing = [None] * len(eqn.outvars)
        if index is None or not self.skips:
            tried = []
            for branch in branches:
                attempt = dataclasses.replace(self, flops=Counter(), unknown=set())
                attempt.walk(branch, operands, times)
                tried.append(attempt)
            costliest = max(tried, key=lambda attempt: attempt.flops.total())
            self.flops += costliest.flops
            self.unknown |= costliest.unknown
            if self.skips and len({attempt.flops.total() for attempt in tried}) > 1:
                self.unknown.add("which blocks a condition skips: none were")
            return nothing
        chosen = np.clip(np.asarray(index).astype(np.int64), 0, len(branches) - 1)
        results = [
            self.walk(branch, operands, times * (chosen == number))
            for number, branch in enumerate(branches)
        ]
        return [
            None if any(case is None or isinstance(case, ConstantTable) for case in cases)
            else np.choose(chosen, np.broadcast_arrays(*cases))
            for cases in zip(*results, strict=True)
        ] if eqn.outvars else nothing  # fmt: skip

    def _scan(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
        consts, carries = scan_groups(eqn)
        length = eqn.params["length"]
        results: Sequence[Known] = [None] * len(eqn.outvars)
        fixed = known[:consts]
        if _decides(jaxpr) and length <= _LONGEST_UNROLLED:
            carry = known[consts : consts + carries]
            slices: list[Known] = [None] * (len(jaxpr.invars) - consts - carries)
            for _ in range(length):
                carry = self.walk(jaxpr, [*fixed, *carry, *slices], times)[:carries]
            return [*carry, *results[carries:]]
        self.walk(jaxpr, [*fixed, *[None] * (len(jaxpr.invars) - consts)], times * length)
        return results

    def _while(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        loop = while_of(eqn)
        carried = self._iterations(loop, known, times) if _decides(loop.body) else None
        if carried is not None:
            return carried
        body, body_consts = loop.body, loop.body_consts
        trips = self.trip_count(loop, known)
        if trips is not None and not self.skips:
            trips = np.max(trips)  # an upper bound: the maximum over all grid steps
        before = self.flops.total()
        carry = [None] * (len(body.invars) - body_consts)
        self.walk(body, [*loop.split(known)[1], *carry], times * (1 if trips is None else trips))
        if trips is None and self.flops.total() > before:
            self.unknown.add("how often a loop runs: its body was counted once")
        return [None] * len(eqn.outvars)

    def _iterations(
        self, loop: While, known: list[Known], times: np.ndarray
    ) -> Sequence[Known] | None:
        """Runs every iteration of a loop; None if it is too long or its condition is unknown."""
        attempt = dataclasses.replace(self, flops=Counter(), unknown=set())
        fixed, consts, carry = loop.split(known)
        runs: Any = np.True_
        for _ in range(_LONGEST_UNROLLED):
            (holds,) = attempt.walk(loop.condition, [*fixed, *carry], times * 0)
            if holds is None:
                return None
            runs = runs & holds if self.skips else np.any(runs & holds)
            if not np.any(runs):
                self.flops += attempt.flops
                self.unknown |= attempt.unknown
                return carry
            after = attempt.walk(loop.body, [*consts, *carry], times * runs)
            carry = [where(runs, new, old) for new, old in zip(after, carry, strict=True)]
        return None


def _decides(jaxpr: Any) -> bool:
    """Whether a jaxpr has a condition or while loop, which may depend on a counter."""
    return any(
        eqn.primitive.name in ("cond", "while")
        or any(_decides(j) for js in inner_jaxprs(eqn.params).values() for j in js)
        for eqn in jaxpr.eqns
    )


def _look_up(eqn: Any, known: list[Known]) -> Known:
    """Elements of a constant table at known positions, if single elements are read."""
    table, *indices = known
    structure = eqn.params["tree"]
    if eqn.outvars[0].aval.shape != () or any(i is None for i in indices):
        return None
    indexers = jax.tree.unflatten(structure, indices)
    positions = [i for indexer in indexers for i in getattr(indexer, "indices", ())]
    if len(positions) != table.values.ndim or any(hasattr(p, "start") for p in positions):
        return None
    inside = [
        np.clip(position, 0, size - 1)
        for position, size in zip(positions, table.values.shape, strict=True)
    ]
    return table.values[tuple(np.broadcast_arrays(*inside))].astype(np.int64)
