"""Random Pallas kernels whose blocks overhang their arrays, and the products that they need.

`needed` goes through a grid step by step with arrays of booleans: an element is from inside an
array or not. `ran_inside` really runs the kernel and counts products of elements that are not
padding.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A blocked matmul [heads, rows, inner] · [inner, columns], and its product with another.

    Attributes:
        sizes: heads, rows, columns and inner elements.
        blocks: the same of a block.
        order: the grid's axes (rows, columns, inner), outermost first.
        batch: examples that vmap adds; 0 if none.
        transposed: whether the right operand is stored [columns, inner].
        reverse: whether blocks of rows are visited from the last one.
        repeat: how often each block of columns is visited.
        mask: whether rows beyond the array are replaced by zeros.
        skip: whether a third of the grid's steps is skipped.
        chunk: inner elements of an iteration of a loop in the kernel; 0 for no loop.
        sliced: whether the loop has the whole right operand and slices its own part.
        second: columns of a second product, of the sums in scratch memory; 0 if there is none.
    """

    sizes: tuple[int, int, int, int]
    blocks: tuple[int, int, int, int]
    order: tuple[int, int, int] = (0, 1, 2)
    batch: int = 0
    transposed: bool = False
    reverse: bool = False
    repeat: int = 1
    mask: bool = False
    skip: bool = False
    chunk: int = 0
    sliced: bool = False
    second: int = 0

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """Blocks of heads, rows, columns (with repetitions) and inner elements."""
        h, m, n, k = (
            -(-size // block) for size, block in zip(self.sizes, self.blocks, strict=True)
        )
        return h, m, n * self.repeat, k


def random_grid(chance: random.Random) -> Grid:
    """A grid of which most blocks overhang their arrays."""
    sizes = tuple(chance.randint(1, high) for high in (3, 9, 9, 9))
    blocks = tuple(chance.choice(of) for of in ((1, 1, 2), (2, 4, 8, 16), (2, 4, 8), (2, 4, 8)))
    second = chance.choice((0, 0, 5, 8))
    order = (0, 1, 2) if second else tuple(chance.sample(range(3), 3))
    chunk = chance.choice((0, 0, 2))
    return Grid(
        sizes=sizes,
        blocks=blocks,
        order=order,
        batch=chance.choice((0, 0, 3)),
        transposed=chance.random() < 0.5,
        reverse=chance.random() < 0.3,
        repeat=chance.choice((1, 1, 2)),
        mask=chance.random() < 0.3,
        skip=chance.random() < 0.3 and not second,
        chunk=chunk,
        sliced=bool(chunk) and chance.random() < 0.4,
        second=second,
    )


def _is_skipped(grid: Grid, i: Any, j: Any, k: Any) -> Any:
    return (i + 2 * j + k) % 3 == 0 if grid.skip else False


def needed(grid: Grid) -> int:
    """FLOPs on elements inside the arrays, step by step."""
    heads, rows, columns, inner = (
        [_block(size, block, number) for number in range(-(-size // block))]
        for size, block in zip(grid.sizes, grid.blocks, strict=True)
    )
    total = 0
    for h, i, j in itertools.product(*map(range, grid.steps[:3])):
        row_block = rows[len(rows) - 1 - i if grid.reverse else i]
        a_rows = (heads[h][:, None] & row_block).ravel()
        b_columns = columns[j // grid.repeat]
        sums = np.zeros((a_rows.size, b_columns.size), bool)
        for k, a_inner in enumerate(inner):
            if _is_skipped(grid, i, j, k):
                continue
            a, b = a_rows[:, None] & a_inner, a_inner[:, None] & b_columns
            products = a.astype(float) @ b.astype(float)
            total += int(products.sum())
            sums |= products > 0
        if grid.second:
            total += int(sums.sum()) * grid.second
    return 2 * total * max(1, grid.batch)


def _block(size: int, block: int, number: int) -> np.ndarray:
    return np.arange(number * block, (number + 1) * block) < size


def in_blocks(grid: Grid) -> int:
    """FLOPs of whole blocks, step by step."""
    bh, bm, bn, bk = grid.blocks
    total = 0
    for _, i, j, k in itertools.product(*map(range, grid.steps)):
        total += 0 if _is_skipped(grid, i, j, k) else bh * bm * bn * bk
        total += bh * bm * bn * grid.second if k == grid.steps[3] - 1 else 0
    return 2 * total * max(1, grid.batch)


def on_tpu(grid: Grid, chance: random.Random) -> Grid:
    """The grid with blocks of a size that TPUs take: 8 and 128 times as large."""
    scales = 1, 8, 128, 128
    return replace(
        grid,
        sizes=tuple(n * s - chance.randrange(s) for n, s in zip(grid.sizes, scales, strict=True)),
        blocks=tuple(n * s for n, s in zip(grid.blocks, scales, strict=True)),
        chunk=grid.chunk * 128,
        second=128 if grid.second else 0,
    )


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A matmul [rows, inner] · [inner, columns] by `emit_pipeline`: it copies blocks itself.

    Attributes:
        sizes: rows, columns and inner elements.
        blocks: the same of a block.
        order: the pipeline's axes, outermost first.
        repeat: how often each block of columns is visited.
        cores: of a mesh that shares the rows; 0 for no mesh.
    """

    sizes: tuple[int, int, int]
    blocks: tuple[int, int, int]
    order: tuple[int, int, int] = (0, 1, 2)
    repeat: int = 1
    cores: int = 0

    @property
    def needed(self) -> int:
        """FLOPs on elements inside the arrays."""
        return 2 * math.prod(self.sizes) * self.repeat

    @property
    def in_blocks(self) -> int:
        """FLOPs of whole blocks."""
        return 2 * math.prod(map(_rounded_up, self.sizes, self.blocks)) * self.repeat


def _rounded_up(size: int, block: int) -> int:
    return -(-size // block) * block


def random_pipeline(chance: random.Random) -> Pipeline:
    """A pipeline of which most blocks overhang their arrays."""
    blocks = tuple(chance.choice((1, 2)) * n for n in (8, 128, 128))
    sizes = tuple(chance.randint(1, 4 * block) for block in blocks)
    order = tuple(chance.sample(range(3), 3))
    cores = chance.choice((0, 0, 1, 2))
    return Pipeline(
        sizes=sizes, blocks=blocks, order=order, repeat=chance.choice((1, 2)), cores=cores
    )


def pipeline_function(
    pipeline: Pipeline,
) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The kernel's call and its arguments."""
    (m, n, k), (bm, bn, bk) = pipeline.sizes, pipeline.blocks
    steps = [-(-size // b) for size, b in zip(pipeline.sizes, pipeline.blocks, strict=True)]
    steps[1] *= pipeline.repeat

    def at(*axes: int) -> Callable[..., tuple[Any, ...]]:
        def of_grid(*places: Any) -> tuple[Any, ...]:
            found = [places[pipeline.order.index(axis)] for axis in axes]
            return tuple(
                place // pipeline.repeat if axis == 1 else place
                for axis, place in zip(axes, found, strict=True)
            )

        return of_grid

    def product(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        out_ref[...] += jnp.dot(a_ref[...], b_ref[...])

    def run(*refs: Any) -> None:
        pltpu.emit_pipeline(
            product,
            grid=tuple(steps[axis] for axis in pipeline.order),
            in_specs=[pl.BlockSpec((bm, bk), at(0, 2)), pl.BlockSpec((bk, bn), at(2, 1))],
            out_specs=[pl.BlockSpec((bm, bn), at(0, 1))],
            core_axis_name="core" if pipeline.cores else None,
            dimension_semantics=tuple(
                pltpu.PARALLEL if axis == 0 else pltpu.ARBITRARY for axis in pipeline.order
            ),
        )(*refs)

    out = jax.ShapeDtypeStruct((m, n), jnp.float32)
    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, k), (k, n)))
    if pipeline.cores:
        named = getattr(pltpu, "TensorCoreMesh", None)  # of JAX 0.12
        cores = (
            named(axis_name="core", num_cores=pipeline.cores)
            if named
            else pltpu.create_tensorcore_mesh("core", num_cores=pipeline.cores)
        )
        return pl.kernel(run, out_type=out, mesh=cores), shapes
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(run, out_shape=out, in_specs=[whole] * 2, out_specs=whole), shapes


@contextlib.contextmanager
def pretended_tpu() -> Iterator[None]:
    """Pallas traces and lowers for a TPU that this machine does not have."""
    from jax._src.pallas.mosaic import tpu_info

    device = {"get_device_kind": lambda: "TPU v5e", "get_num_device_cores": lambda: 1}
    with mock.patch.multiple(tpu_info, **device), absent_device("TPU v5e", 1, "tpu"):
        yield


@contextlib.contextmanager
def absent_device(*named: Any) -> Iterator[None]:
    """A mesh of one device (kind, cores, platform), for which JAX 0.12 lowers Pallas kernels."""
    try:
        device = jax.sharding.AbstractDevice(*named)
    except (AttributeError, TypeError):  # before JAX 0.12
        yield
        return
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def tpu_program(call: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """A kernel's program for a TPU, with its body."""
    with pretended_tpu():
        lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",))
    return str(lowered.as_text("hlo"))


Dot = Callable[[Any, Any], Any]


def _kernel(grid: Grid, counting: bool, a_ref: Any, b_ref: Any, *refs: Any) -> None:
    c_ref, (out_ref, sums_ref) = (refs[0] if grid.second else None), refs[-2:]
    ran = jnp.float32(0)

    def dot(a: Any, b: Any) -> Any:
        """The product; if counting, of elements that are not padding (NaN), and their number."""
        nonlocal ran
        if counting:
            a, b = (jnp.where(jnp.isnan(x), 0, x) for x in (a, b))
            ran += jnp.dot((a != 0).astype(jnp.float32), (b != 0).astype(jnp.float32)).sum()
        return jnp.dot(a, b)

    i, j, k = (pl.program_id(1 + grid.order.index(axis)) for axis in range(3))
    _, bm, _, bk = grid.blocks
    row_block = grid.steps[1] - 1 - i if grid.reverse else i

    @pl.when(k == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def part(start: Any, length: int) -> None:
        a = a_ref[:, :, pl.ds(start, length)] if grid.chunk else a_ref[...]
        if grid.mask:
            rows = row_block * bm + jax.lax.broadcasted_iota(jnp.int32, a.shape, 1)
            a = jnp.where(rows < grid.sizes[1], a, 0.0)
        a = a.reshape(-1, a.shape[-1])
        if grid.sliced:
            b = _inner_part(grid, b_ref, k * bk + start, length)
        else:
            b = _inner_part(grid, b_ref, start, length) if grid.chunk else b_ref[...]
        sums_ref[...] += dot(a, b.T if grid.transposed else b)

    def step() -> None:
        if grid.chunk and counting:
            for start in range(0, bk, grid.chunk):
                part(start, grid.chunk)
        elif grid.chunk:
            loop = lambda n, _: part(n * grid.chunk, grid.chunk)  # noqa: E731
            jax.lax.fori_loop(0, bk // grid.chunk, loop, None)
        else:
            part(0, bk)

    if counting or not grid.skip:
        step()
    else:
        pl.when(jnp.logical_not(_is_skipped(grid, i, j, k)))(step)

    def finish() -> None:
        out_ref[...] = dot(sums_ref[...], c_ref[...]).reshape(out_ref.shape)

    if c_ref is not None and not counting:
        pl.when(k == grid.steps[3] - 1)(finish)
    elif c_ref is not None:
        before = ran
        dot(sums_ref[...], c_ref[...])
        ran = jnp.where(k == grid.steps[3] - 1, ran, before)
    if counting:
        is_skipped = _is_skipped(grid, i, j, k)
        out_ref[...] = jnp.full_like(out_ref, jnp.where(is_skipped, 0, ran))


def _inner_part(grid: Grid, ref: Any, start: Any, length: int) -> Any:
    return ref[:, pl.ds(start, length)] if grid.transposed else ref[pl.ds(start, length), :]


def _call(grid: Grid, *arrays: Any, counting: bool = False) -> Any:
    bh, bm, bn, bk = grid.blocks

    def at(position: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """An index map of heads, rows, columns and inner elements."""

        def of_grid(h: Any, *places: Any) -> tuple[Any, ...]:
            i, j, k = (places[grid.order.index(axis)] for axis in range(3))
            i = grid.steps[1] - 1 - i if grid.reverse else i
            return position(h, i, j // grid.repeat, k)

        return of_grid

    b_shape, b_index = (bk, bn), at(lambda h, i, j, k: (0 if grid.sliced else k, j))
    if grid.sliced:
        b_shape = (grid.sizes[3], bn)
    b = pl.BlockSpec(b_shape, b_index)
    if grid.transposed:
        b = pl.BlockSpec(b_shape[::-1], lambda *places: b_index(*places)[::-1])
    specs = [pl.BlockSpec((bh, bm, bk), at(lambda h, i, j, k: (h, i, k))), b]
    if grid.second:
        specs.append(pl.BlockSpec((bn, grid.second), at(lambda h, i, j, k: (j, 0))))
    steps = (grid.steps[0], *(grid.steps[1:][axis] for axis in grid.order))
    block = (1,) * 4 if counting else (1, 1, bh * bm, grid.second or bn)
    out = (*steps,) if counting else (*steps[:2], bh * bm, grid.second or bn)
    places = (lambda *places: places) if counting else (lambda *places: (0, 0, 0, 0))
    return pl.pallas_call(
        partial(_kernel, grid, counting),
        grid=steps,
        in_specs=specs,
        out_specs=pl.BlockSpec(block, places),
        out_shape=jax.ShapeDtypeStruct(out, jnp.float32),
        scratch_shapes=[pltpu.VMEM((bh * bm, bn), jnp.float32)],
        interpret=counting,
    )(*arrays)


def function(grid: Grid) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """The kernel's call and its arguments."""
    call: Callable[..., Any] = partial(_call, grid)
    shapes = list(_shapes(grid))
    if grid.batch:
        call = jax.vmap(call, (0, None, None)[: len(shapes)])
        shapes[0] = (grid.batch, *shapes[0])
    return call, tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


def _shapes(grid: Grid) -> Iterator[tuple[int, ...]]:
    h, m, n, k = grid.sizes
    yield h, m, k
    yield (n, k) if grid.transposed else (k, n)
    if grid.second:
        yield n, grid.second


def ran_inside(grid: Grid) -> int:
    """FLOPs on elements inside the arrays, when the kernel really runs."""
    arrays = [jnp.ones(shape, jnp.float32) for shape in _shapes(grid)]
    return 2 * int(_call(grid, *arrays, counting=True).sum()) * max(1, grid.batch)
