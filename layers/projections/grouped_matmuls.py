"""Grouped matmuls for dropless experts: each group of rows times its own matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

_TILE = 512  # largest block of the kernel, in rows and in columns
_ROWS, _FEW_ROWS, _ROW_BYTES = 256, 128, 8192
_LANES = 128
_OF_MATRICES = 3  # dimensions
_TILES_OF_A_GROUP = 4  # minimum, where there are enough rows


def grouped_dot(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, on_tpu: bool, interpret: bool = False
) -> jax.Array:
    """``ragged_dot``; on TPUs, by kernels as in megablox, which takes no eight bits.

    XLA has a kernel for the product alone, and none on TPU7x from libtpu 0.0.45 on, where it
    multiplies every row by every matrix.

    Args:
        rows: [rows, in], sorted by group.
        kernels: [groups, in, out].
        sizes: rows of each group.
        on_tpu: whether the program is for TPUs.
        interpret: whether the kernel is interpreted, without a TPU.

    Returns:
        [rows, out]; rows past the last group are 0, on TPUs as they were in memory.
    """
    if not on_tpu or not _tile(rows.shape[0]):
        return jax.lax.ragged_dot(rows, kernels, sizes)
    return _grouped_dot(interpret, rows, kernels, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(
    interpret: bool, rows: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> jax.Array:
    return grouped_product(rows, kernels, sizes, rows.dtype, interpret=interpret)


_Saved = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    interpret: bool, rows: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _grouped_dot(interpret, rows, kernels, sizes), (rows, kernels, sizes)


def _backward(interpret: bool, saved: _Saved, dy: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, sizes = saved
    drows = gradient_of_rows(dy, kernels, sizes, dy.dtype, interpret=interpret)
    dkernels = gradient_of_matrices(rows, dy, sizes, kernels.dtype, interpret=interpret)
    return drows, dkernels, None


_grouped_dot.defvjp(_forward, _backward)


def gradient_of_rows(
    dy: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    scales: tuple[jax.Array, ...] = (),
    *,
    interpret: bool = False,
) -> jax.Array:
    """dy [rows, out] and kernels [groups, in, out] in groups → [rows, in] in `dtype`; on TPUs."""
    drows = grouped_product(dy, kernels, sizes, dtype, scales, transposed=True, interpret=interpret)
    is_in_group = jax.lax.broadcasted_iota(jnp.int32, drows.shape, 0) < sizes.sum()
    return jnp.where(is_in_group, drows, 0)


def grouped_product(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    scales: tuple[jax.Array, ...] = (),
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Rows [rows, in] times their groups' kernels [groups, in, out] → [rows, out]; on TPUs.

    Rows past the last group are as they were in memory.

    Args:
        dtype: of the result.
        scales: of rows [rows, 1] or columns [1, out], or of all [1, 1]; the kernel multiplies its
            sums by them, as MaxText's do (qwix.pallas.dot_general in its megablox, tokamax's).
        transposed: the kernels are [groups, out, in], and are read as they are.
    """
    multiply = partial(_times, dtype=dtype, transposed=transposed, interpret=interpret)
    made: jax.Array = sequential_vmap(multiply)(rows, kernels, sizes, *scales)
    return made


def _times(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *scales: jax.Array,
    dtype: jnp.dtype,
    transposed: bool,
    interpret: bool,
) -> jax.Array:
    """megablox's grid and tables: for a tile of the result's columns, each visit of a tile of rows
    by a group, and for that all tiles of `in`.
    """
    from jax.experimental import pallas as pl

    (count, into), groups, contracted = rows.shape, kernels.shape[0], int(transposed)
    out = kernels.shape[2 - contracted]
    m, k, n = _tiling(rows, into, out, groups=groups)
    if not transposed:  # as in XLA's own kernel; two of each block fit in any TPU's VMEM
        m = min(m, _ROWS)
        k = _largest_part(into, _ROW_BYTES // rows.dtype.itemsize) or k
    steps, rest = pl.cdiv(into, k), into % k
    exact = _exact(rows.dtype)

    def kernel(starts, group_of, tile_of, _, rows, matrix, *more):  # type: ignore[no-untyped-def]
        *scales, product, sums = more
        visit, step = pl.program_id(1), pl.program_id(2)

        def inside(tile: jax.Array, axis: int) -> jax.Array:
            """The last tile without what lies past the array."""
            place = step * k + jax.lax.broadcasted_iota(jnp.int32, tile.shape, axis)
            return jnp.where(place < into, tile, jnp.zeros_like(tile)) if rest else tile

        @pl.when(step == 0)
        def begin() -> None:
            sums[...] = jnp.zeros_like(sums)

        pair = inside(rows[...], 1), inside(matrix[...], contracted)
        sums[...] += jax.lax.dot_general(*pair, (((1,), (contracted,)), ((), ())), None, exact)

        @pl.when(step == steps - 1)
        def end() -> None:
            is_own = _own_rows(starts, group_of, tile_of, visit, sums.shape, m)
            made = math.prod((scale[...] for scale in scales), start=sums[...])
            kept = product[...].astype(made.dtype)  # of the groups before
            product[...] = jnp.where(is_own, made, kept).astype(dtype)

    def block(scale: jax.Array) -> Any:
        tall, wide = (int(size > 1) for size in scale.shape)
        shape = m if tall else 1, n if wide else 1
        return pl.BlockSpec(shape, lambda j, v, i, _, g, t, f: (t[v] * tall, j * wide))

    of_kernels = pl.BlockSpec((None, k, n), lambda j, v, i, _, g, t, f: (g[v], i, j))
    if transposed:
        of_kernels = pl.BlockSpec((None, n, k), lambda j, v, i, _, g, t, f: (g[v], j, i))
    of_rows = pl.BlockSpec((m, k), lambda j, v, i, _, g, t, f: (t[v], i))
    return _grouped_call(
        kernel,
        sizes,
        (rows, kernels, *(scale.astype(jnp.float32) for scale in scales)),
        [of_rows, of_kernels, *map(block, scales)],
        jax.ShapeDtypeStruct((count, out), dtype),
        pl.BlockSpec((m, n), lambda j, v, i, _, g, t, f: (t[v], j)),
        grid=(pl.cdiv(out, n), None, steps),
        tile=m,
        interpret=interpret,
        name="gmm_of_transposed" if transposed else "gmm",
    )


def gradient_of_matrices(
    rows: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    dtype: jnp.dtype,
    scale: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Rows [rows, in] and dy [rows, out] in groups → [groups, in, out] in `dtype`; on TPUs.

    Args:
        scale: of the columns of `dy`, [1, out]; None: all 1.
    """
    scale = jnp.ones((1, dy.shape[1])) if scale is None else scale
    multiply = partial(_transposed_times, dtype=dtype, interpret=interpret)
    made: jax.Array = sequential_vmap(multiply)(rows, dy, sizes, scale.astype(jnp.float32))
    return made


def _transposed_times(
    rows: jax.Array,
    dy: jax.Array,
    sizes: jax.Array,
    scale: jax.Array,
    *,
    dtype: jnp.dtype,
    interpret: bool,
) -> jax.Array:
    """The same grid and tables: for a tile of the matrices, all visits, each group's in a row."""
    from jax.experimental import pallas as pl

    into, out = rows.shape[1], dy.shape[1]
    m, k, n = _tiling(rows, into, out, groups=sizes.shape[0])
    exact = _exact(rows.dtype)

    def kernel(starts, group_of, tile_of, _, rows, dy, scale, dkernels, sums):  # type: ignore[no-untyped-def]
        visit, visits = pl.program_id(2), pl.num_programs(2)
        group = group_of[visit]

        def own(tile: jax.Array) -> jax.Array:
            is_own = _own_rows(starts, group_of, tile_of, visit, tile.shape, m)
            return jnp.where(is_own, tile, jnp.zeros_like(tile))

        @pl.when((visit == 0) | (group_of[jnp.maximum(visit, 1) - 1] != group))
        def begin() -> None:
            sums[...] = jnp.zeros_like(sums)

        sums[...] += jax.lax.dot_general(
            own(rows[...]), own(dy[...]), (((0,), (0,)), ((), ())), None, exact
        )

        @pl.when((visit == visits - 1) | (group_of[jnp.minimum(visit + 1, visits - 1)] != group))
        def end() -> None:
            dkernels[...] = (sums[...] * scale[...]).astype(dtype)

    return _grouped_call(
        kernel,
        sizes,
        (rows, dy, scale),
        [
            pl.BlockSpec((m, k), lambda j, i, v, _, g, t, f: (t[v], i)),
            pl.BlockSpec((m, n), lambda j, i, v, _, g, t, f: (t[v], j)),
            pl.BlockSpec((1, n), lambda j, i, v, _, g, t, f: (0, j)),
        ],
        jax.ShapeDtypeStruct((sizes.shape[0], into, out), dtype),
        pl.BlockSpec((None, k, n), lambda j, i, v, _, g, t, f: (g[v], i, j)),
        grid=(pl.cdiv(out, n), pl.cdiv(into, k), None),
        tile=m,
        interpret=interpret,
        name="tgmm",
    )


def _grouped_call(
    kernel: Callable[..., None],
    sizes: jax.Array,
    operands: tuple[jax.Array, ...],
    blocks: list[Any],
    result: jax.ShapeDtypeStruct,
    block: Any,
    *,
    grid: tuple[int | None, ...],
    tile: int,
    interpret: bool,
    name: str,
) -> jax.Array:
    """Calls a kernel with megablox's tables: its first groups' rows, each visit's group and tile.

    Args:
        operands: the first has the rows.
        blocks: of the operands; `block`: of the result.
        grid: None stands for the visits of a tile of rows by a group.
        tile: its rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    (rows, width), first = operands[0].shape, jnp.zeros(1, jnp.int32)
    tables, visits = make_group_metadata(
        group_sizes=sizes,
        m=rows,
        tm=tile,
        start_group=first[0],
        num_nonzero_groups=sizes.shape[0],
        visit_empty_groups=len(result.shape) == _OF_MATRICES,
    )
    sums = tuple(size for size in block.block_shape if size)
    call = pl.pallas_call(
        kernel,
        result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=tuple(visits if size is None else size for size in grid),
            in_specs=blocks,
            out_specs=block,
            scratch_shapes=[pltpu.VMEM(sums, _exact(operands[0].dtype))],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * width * result.shape[-1],
            bytes_accessed=sum(x.nbytes for x in operands)
            + math.prod(result.shape) * result.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name=name,
    )
    made: jax.Array = call(*tables, first, *operands)
    return made


def _exact(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which products of this one are summed."""
    return jnp.dtype("int32" if jnp.issubdtype(dtype, jnp.integer) else "float32")


def _own_rows(
    starts: Any, group_of: Any, tile_of: Any, visit: jax.Array, shape: tuple[int, ...], tile: int
) -> jax.Array:
    """Which rows of a tile belong to the group that visits it."""
    row = tile_of[visit] * tile + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    group = group_of[visit]
    return (starts[group] <= row) & (row < starts[group + 1])


def _tiling(rows: jax.Array, *widths: int, groups: int) -> tuple[int, ...]:
    """Tiles of a kernel's rows and of its matrices' widths."""
    # Tiles shorter than groups: a tile that two groups share is multiplied twice.
    few = rows.shape[0] // (_TILES_OF_A_GROUP * groups)
    return (_tile(rows.shape[0], max(few, _FEW_ROWS)), *map(_columns, widths))


def _columns(width: int) -> int:
    """Columns of a block: whole lanes, as few blocks as possible, as even as possible."""
    even = -(-width // -(-width // _TILE))
    return -(-even // _LANES) * _LANES


def _largest_part(size: int, most: int) -> int:
    """The largest divisor of `size` that is a multiple of the lanes, up to `most`; 0: none."""
    return max((n for n in range(_LANES, most + 1, _LANES) if size % n == 0), default=0)


def has_tiles(rows: int) -> bool:
    """Whether the kernel can split this number of rows."""
    return _tile(rows) > 0


def _tile(rows: int, most: int = _TILE) -> int:
    """Rows of a block, which must divide all rows; 0 if the kernel cannot split them."""
    tiles = [tile for tile in (_TILE, _ROWS, _FEW_ROWS) if rows % tile == 0]
    return next((tile for tile in tiles if tile <= most), tiles[-1] if tiles else 0)
