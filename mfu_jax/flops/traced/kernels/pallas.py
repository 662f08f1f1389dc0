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
from mfu_jax.flops.traced.jaxprs import (
    MESH_KERNELS,
    While,
    bodies,
    equations,
    inner_jaxprs,
    interpret,
    operand_dtype,
    while_of,
)
from mfu_jax.flops.traced.kernels.attention import attention_kernel, flops_of_all_pairs, pallas_name
from mfu_jax.flops.traced.kernels.mosaic_gpu import (
    INSTRUCTIONS,
    instruction_flops,
    meshes,
)
from mfu_jax.flops.traced.kernels.overhang import (
    FILL,
    InArrays,
    Scratch,
    Slot,
    bare,
    block_inside,
    copies,
    copies_parts,
    follow,
    is_fill,
    is_same,
    may_overhang,
    product,
    reads,
    reads_beyond,
    stores,
    union,
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
_OVERHANG = "how far its blocks overhang their arrays: what lies beyond is counted"


@dataclass(frozen=True, kw_only=True)
class PallasCost:
    """Matmul FLOPs of one call of a kernel.

    Attributes:
        name: the kernel's name, as shown by its custom call in HLO.
        flops: FLOPs that its programs run, excluding skipped blocks, by dtype.
        needed: those on elements inside the arrays, which blocks may overhang.
        unskipped: of attention, `needed` including skipped blocks.
        unknown: what could not be determined.
        bounds: what was counted in full because it is not known.
        is_estimate: whether the FLOPs come from its author's `cost_estimate`.
    """

    name: str
    flops: Counter[str]
    needed: Counter[str]
    unskipped: Counter[str]
    unknown: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
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
    mapping, name, kernel = eqn.params["grid_mapping"], pallas_name(eqn), attention_kernel(eqn)
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
    for run in (exact, unskipped) if kernel else (exact,):
        run.walk(jaxpr, run.references(eqn, refs), programs)
    if None in bounds or (exact.unknown and is_grouped(eqn)):
        if (estimate := eqn.params.get("cost_estimate")) is not None:
            share, wrong = share_of_rows(eqn, lengths)
            flops = flops_of_all_pairs(eqn, kernel) if kernel else int(estimate.flops * share)
            return _estimated(name, exact.flops, flops, wrong)
        exact.unknown.add("the grid's size depends on data: one program was counted")
    if exact.unknown and (grouped := grouped_on_gpu(eqn, lengths)):
        return _estimated(name, exact.flops, *grouped)
    all_pairs = unskipped.needed
    if kernel and (bounds or "splash" in name):
        # The grid may cover only a mask's blocks; the body appears twice, masked and unmasked.
        all_pairs = _of_first_dtype(all_pairs, flops_of_all_pairs(eqn, kernel))
    return _counted(name, exact, all_pairs)


def _counted(name: str, run: _KernelPrograms, unskipped: Counter[str]) -> PallasCost:
    return PallasCost(
        name=name,
        flops=run.flops,
        needed=run.needed,
        unskipped=unskipped,
        unknown=tuple(sorted(run.unknown)),
        bounds=tuple(sorted(run.bounds if run.flops else ())),
    )


def _estimated(name: str, counted: Counter[str], flops: int, wrong: str) -> PallasCost:
    known = _of_first_dtype(counted, flops)
    unknown = (wrong,) if wrong else ()
    return PallasCost(
        name=name, flops=known, needed=known, unskipped=known, unknown=unknown, is_estimate=True
    )


def _of_first_dtype(counted: Counter[str], flops: int) -> Counter[str]:
    return Counter(dict.fromkeys(list(counted)[:1], flops))


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
    exact, unskipped = (_KernelPrograms((), (), trip_count, skips=skips) for skips in (True, False))
    for jaxpr, mesh in zip(bodies(eqn), meshes(eqn.params), strict=True):
        grid = tuple(mesh.values())
        for total in (exact, unskipped) if attention else (exact,):
            axes = tuple(range(len(grid)))
            run = _KernelPrograms(grid, axes, trip_count, skips=total.skips)
            run.named = {name: run.position(axis) for axis, name in enumerate(mesh)}
            run.overhangs = copies_parts(jaxpr)
            run.scoped(jaxpr, operands, np.ones(grid, np.int64))
            total.accept(run)
    name, all_pairs = str(eqn.params.get("name") or "kernel"), unskipped.needed
    if attention:
        all_pairs = _of_first_dtype(all_pairs, flops_of_all_pairs(eqn, attention))
    if exact.unknown and (grouped := grouped_on_gpu(eqn, lengths)):
        return _estimated(name, exact.needed, *grouped)
    return _counted(name, exact, all_pairs)


@dataclass
class _KernelPrograms:
    """All programs of a grid, run at once on their known integers."""

    grid: tuple[int, ...]
    axes: tuple[int, ...]
    trip_count: TripCount
    skips: bool = True
    named: dict[Any, Known] = field(default_factory=dict)  # positions along the axes of a mesh
    flops: Counter[str] = field(default_factory=Counter)
    needed: Counter[str] = field(default_factory=Counter)  # of `flops`, inside the arrays
    unknown: set[str] = field(default_factory=set)
    bounds: set[str] = field(default_factory=set)
    overhangs: bool = False  # whether any block overhangs its array
    memory: list[Scratch] = field(default_factory=list)

    def attempt(self) -> _KernelPrograms:
        """A run that counts from 0."""
        return dataclasses.replace(
            self, flops=Counter(), needed=Counter(), unknown=set(), bounds=set()
        )

    def accept(self, attempt: _KernelPrograms) -> None:
        """Adds what an attempt counted."""
        self.flops += attempt.flops
        self.needed += attempt.needed
        self.unknown |= attempt.unknown
        self.bounds |= attempt.bounds

    def references(self, eqn: Any, refs: Sequence[Known]) -> list[Known]:
        """The kernel's references, with how much of a block is inside its array if not all."""
        mapping, variables = eqn.params["grid_mapping"], eqn.params["jaxpr"].invars
        first, refs = mapping.num_index_operands, list(refs)
        blocks = {
            first + number: block
            for number, block in enumerate(mapping.block_mappings)
            if may_overhang(block)
        }
        self.overhangs = 0 not in self.grid and (bool(blocks) or copies_parts(eqn.params["jaxpr"]))
        if not self.overhangs:
            return refs
        positions = [self.position(axis) for axis in range(len(self.grid))]
        for number, block in blocks.items():
            index_map = block.index_map_jaxpr.jaxpr
            known = dict(zip(index_map.invars, [*positions, *refs[:first]], strict=False))
            starts = self.attempt()._walk(index_map, known, np.ones(self.grid, np.int64))
            refs[number] = block_inside(block, bare(starts), variables[number].aval.shape)
        inputs = len(refs) - mapping.num_scratch_operands
        return [*refs[:inputs], *self._allocate(variables[inputs:])]

    def _allocate(self, variables: Sequence[Any], is_private: bool = False) -> list[Scratch]:
        """Memory of the kernel, one for each variable that refers to it."""
        allocated = [Scratch(is_private) for _ in variables]
        self.memory += allocated
        return allocated

    def _stored(self) -> list[tuple[Scratch, Known, dict[Slot, Known]]]:
        """The kernel's memory and what is stored there."""
        return [(scratch, scratch.stored, dict(scratch.slots)) for scratch in self.memory]

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
        given = {**dict.fromkeys((*jaxpr.constvars, *jaxpr.invars)), **known}

        def fixed(literal: Literal) -> Known:
            value = scalar(literal.val)
            return FILL if value is None else value

        return interpret(jaxpr, given, fixed, lambda eqn, on: self._equation(eqn, on, times))

    def _equation(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        name = eqn.primitive.name
        nothing = [None] * len(eqn.outvars)
        if name in RULES:
            return self._matmul(eqn, known, times)
        if name in INSTRUCTIONS:
            dtype, flops = instruction_flops(eqn)
            flops *= int(self._issued(eqn, times).sum())
            self.flops[dtype] += flops
            self.needed[dtype] += flops
            self.bounds |= {_OVERHANG} if self.overhangs else set()
            return nothing
        if name == "program_id":
            return [self.position(self.axes[eqn.params["axis"]])]
        if name == "axis_index":
            return [self.named.get(eqn.params["axis_name"])]
        if name == "num_programs":
            return [self.grid[self.axes[eqn.params["axis"]]]]
        if name == "get" and isinstance(known[0], ConstantTable):
            return [_look_up(eqn, known[0], bare(known[1:]))]
        if name in ("get", "masked_load"):
            return [reads(eqn, known)]
        if name in ("swap", "masked_swap", "addupdate"):
            stores(eqn, known, times)
            return nothing
        if name == "dma_start" and self.overhangs:
            copies(eqn, known, times)
            return nothing
        if name == "copy_gmem_to_smem":  # what is multiplied of it is not followed
            self.bounds |= {_OVERHANG} if reads_beyond(eqn, known, times) else set()
            return nothing
        if name == "cond":
            return self._cond(eqn, known, times)
        if name == "scan":
            return self._scan(eqn, known, times)
        if name == "while":
            return self._while(eqn, known, times)
        if name in MESH_KERNELS:
            self._warps(eqn, known, times)
            return nothing
        if not (inner := bodies(eqn)):
            value = evaluate(eqn, bare(known)) if len(nothing) == 1 else None
            return follow(eqn, known) if value is None else [value]
        results: Sequence[Known] = nothing
        for jaxpr in inner:
            if name == "run_scoped" and self.overhangs:
                inside = dict(zip(jaxpr.constvars, known, strict=True))
                own = self._allocate(jaxpr.invars, is_private=True)
                inside |= dict(zip(jaxpr.invars, own, strict=True))
                results = self._walk(jaxpr, inside, times)
                continue
            results = self.scoped(jaxpr, known, times)
        return results if len(results) == len(nothing) else nothing

    def _matmul(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        dtype, flops = operand_dtype(eqn), RULES[eqn.primitive.name](eqn)
        inside = product(eqn, known, flops, times)
        self.flops[dtype] += flops * int(times.sum())
        self.needed[dtype] += inside.needed
        if inside.is_bound:
            self.bounds.add(_OVERHANG)
        return inside.result

    def _issued(self, eqn: Any, times: np.ndarray) -> np.ndarray:
        """Runs of an instruction; the first of two blocks issues a collective one for both."""
        axis = eqn.params.get("collective_axis")
        first = self.named.get(axis) if axis is not None else None
        return times if first is None else 2 * times * (np.asarray(first) == 0)

    def _warps(self, eqn: Any, known: list[Known], times: np.ndarray) -> None:
        """Runs a body inside the kernel for each warp of a group."""
        outside = self.named
        for jaxpr, mesh in zip(bodies(eqn), meshes(eqn.params), strict=True):
            for place in np.ndindex(*mesh.values()):
                self.named = {**outside, **dict(zip(mesh, place, strict=True))}
                self.scoped(jaxpr, known, times)
        self.named = outside

    def _cond(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        branches = inner_jaxprs(eqn.params)["branches"]
        index, *operands = known
        (index,) = bare([index])
        nothing = [None] * len(eqn.outvars)
        if index is None or not self.skips:
            tried, found = [], []
            for branch in branches:
                attempt = self.attempt()
                found.append(attempt.walk(branch, operands, times))
                tried.append(attempt)
            costliest = max(tried, key=lambda run: (run.flops.total(), run.needed.total()))
            self.accept(costliest)
            if self.skips and len({attempt.flops.total() for attempt in tried}) > 1:
                self.unknown.add("which blocks a condition skips: none were")
            return [union(cases) for cases in zip(*found, strict=True)] if eqn.outvars else nothing
        chosen = np.clip(np.asarray(index).astype(np.int64), 0, len(branches) - 1)
        results = [
            self.walk(branch, operands, times * (chosen == number))
            for number, branch in enumerate(branches)
        ]
        return [_chosen(chosen, cases) for cases in zip(*results, strict=True)] or nothing

    def _scan(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        (jaxpr,) = inner_jaxprs(eqn.params)["jaxpr"]
        consts, carries = scan_groups(eqn)
        length = eqn.params["length"]
        fixed, initial = known[:consts], known[consts : consts + carries]
        slices: list[Known] = [None] * (len(jaxpr.invars) - consts - carries)

        def once(run: _KernelPrograms, carry: Sequence[Known]) -> list[Known]:
            return run.walk(jaxpr, [*fixed, *carry, *slices], times * length)

        def unrolled() -> Sequence[Known] | None:
            carry = initial
            for _ in range(length):
                carry = self.walk(jaxpr, [*fixed, *carry, *slices], times)[:carries]
            return carry

        may_unroll = length <= _LONGEST_UNROLLED
        carry = self._loop(jaxpr, initial, once, unrolled if may_unroll else lambda: None)
        return [*carry, *[None] * (len(eqn.outvars) - carries)]

    def _loop(
        self,
        body: Any,
        initial: Sequence[Known],
        once: Callable[[_KernelPrograms, Sequence[Known]], list[Known]],
        unrolled: Callable[[], Sequence[Known] | None],
    ) -> Sequence[Known]:
        """What a loop carries at its end; iteration by iteration only where that may matter.

        Args:
            body: the loop's body.
            initial: what it carries at first.
            once: walks the body for all iterations, given what it carries in any of them.
            unrolled: walks all iterations; None if that is not possible.
        """
        if _decides(body) and (carried := unrolled()) is not None:
            return carried
        if not self.overhangs:
            once(self, [None] * len(initial))
            return [None] * len(initial)
        at_start = self._stored()
        attempt, carry = self._steady(initial, once)
        if attempt.bounds:
            at_end = self._stored()
            _restore(at_start)
            if (carried := unrolled()) is not None:
                return carried
            _restore(at_end)
        self.accept(attempt)
        return carry

    def _steady(
        self,
        initial: Sequence[Known],
        body: Callable[[_KernelPrograms, Sequence[Known]], list[Known]],
    ) -> tuple[_KernelPrograms, list[Known]]:
        """A run of a loop's body on what it carries in any iteration, and that at its end.

        Args:
            initial: the values carried at first; their integers are not followed.
            body: walks the body and returns what it carries on, first of its results.
        """
        carry = [FILL if is_fill(value) else None for value in initial]
        carry = [v if isinstance(v, InArrays) else c for v, c in zip(initial, carry, strict=True)]
        while True:
            attempt = self.attempt()
            after = body(attempt, carry)[: len(carry)]
            joined = [union(values) for values in zip(carry, after, strict=True)]
            if all(map(is_same, joined, carry)):
                return attempt, carry
            carry = joined

    def _while(self, eqn: Any, known: list[Known], times: np.ndarray) -> Sequence[Known]:
        loop = while_of(eqn)
        _, fixed, initial = loop.split(known)
        trips = self.trip_count(loop, bare(known))
        if trips is not None and not self.skips:
            trips = np.max(trips)  # an upper bound: the maximum over all grid steps

        def once(run: _KernelPrograms, carry: Sequence[Known]) -> list[Known]:
            before = run.flops.total()
            after = run.walk(loop.body, [*fixed, *carry], times * (1 if trips is None else trips))
            if trips is None and run.flops.total() > before:
                run.unknown.add("how often a loop runs: its body was counted once")
            return after

        return self._loop(loop.body, initial, once, lambda: self._iterations(loop, known, times))

    def _iterations(
        self, loop: While, known: list[Known], times: np.ndarray
    ) -> Sequence[Known] | None:
        """Runs every iteration of a loop; None if it is too long or its condition is unknown."""
        attempt = self.attempt()
        fixed, consts, carry = loop.split(known)
        runs: Any = np.True_
        for _ in range(_LONGEST_UNROLLED):
            (holds,) = bare(attempt.walk(loop.condition, [*fixed, *carry], times * 0))
            if holds is None:
                return None
            runs = runs & holds if self.skips else np.any(runs & holds)
            if not np.any(runs):
                self.accept(attempt)
                return carry
            after = attempt.walk(loop.body, [*consts, *carry], times * runs)
            carry = [_after(runs, *values) for values in zip(after, carry, strict=True)]
        return None


def _restore(before: Sequence[tuple[Scratch, Known, dict[Slot, Known]]]) -> None:
    """Undoes the stores of an attempt that is not accepted."""
    for scratch, stored, slots in before:
        scratch.stored, scratch.slots = stored, slots


def _after(runs: Any, new: Known, old: Known) -> Known:
    """A loop's value after an iteration that only some programs run."""
    if np.all(runs) or not any(isinstance(value, InArrays) for value in (new, old)):
        return where(runs, new, old)
    return union([new, old])


def _chosen(chosen: np.ndarray, cases: Sequence[Known]) -> Known:
    """The results of a condition's branches in the programs that choose them."""
    taken = [case for number, case in enumerate(cases) if np.any(chosen == number)]
    if any(case is None or isinstance(case, InArrays | Scratch | ConstantTable) for case in cases):
        return union(taken)
    return np.choose(chosen, np.broadcast_arrays(*cases))


def _decides(jaxpr: Any) -> bool:
    """Whether a jaxpr has a condition or while loop, which may depend on a counter."""
    return any(eqn.primitive.name in ("cond", "while") for eqn in equations(jaxpr))


def _look_up(eqn: Any, table: ConstantTable, indices: Sequence[Known]) -> Known:
    """Elements of a constant table at known positions, if single elements are read."""
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
