"""Blocks of Pallas kernels that overhang their arrays: what lies beyond is no model FLOPs."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mfu_jax.dumps.program import ProgramDump
from mfu_jax.flops.count import KernelRun
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from mfu_jax.instrumentation.counts import count_program, traced_model
from tests.support.pallas_grids import (
    Grid,
    Pipeline,
    absent_device,
    function,
    in_blocks,
    needed,
    on_tpu,
    pipeline_function,
    pretended_tpu,
    ran_inside,
    random_grid,
    tpu_program,
)
from tests.support.small_functions import shape

SEEDS = 300


@pytest.mark.parametrize("first", range(0, SEEDS, 50))
def test_random_grids_need_the_products_inside_their_arrays(first: int) -> None:
    for seed in range(first, first + 50):
        grid = random_grid(random.Random(seed))
        call, arguments = function(grid)
        count = count_model_flops(call, *arguments)
        assert (count.total, count.unaccounted) == (needed(grid), ()), (seed, grid)


@pytest.mark.parametrize("seed", range(6))
def test_executed_flops_are_those_inside_the_arrays_and_whole_blocks_are_stated(seed: int) -> None:
    """By the kernel's body in a TPU's program, which has its blocks and not its arrays."""
    chance = random.Random(seed)
    grid = on_tpu(random_grid(chance), chance)
    call, arguments = function(grid)
    model, kernels = count_model_flops(call, *arguments), pallas_kernel_flops(call, *arguments)
    executed = executed_flops(tpu_program(call, arguments), kernel_flops=kernels)
    assert (executed.total, executed.on_hardware) == (needed(grid), in_blocks(grid)), grid
    ledger = compare_flops(model=model.total, executed=executed, overheads=model.overheads)
    assert (ledger.model, ledger.residual) == (ledger.executed, 0)


PIPELINES = {
    "rows": Pipeline(sizes=(20, 200, 128), blocks=(8, 128, 128)),
    "inner": Pipeline(sizes=(17, 100, 300), blocks=(8, 128, 128), order=(2, 0, 1), repeat=2),
    "mesh": Pipeline(sizes=(45, 200, 150), blocks=(16, 128, 128), cores=1),
    "two cores": Pipeline(sizes=(31, 130, 256), blocks=(8, 128, 128), cores=2),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_inside_a_kernel_needs_what_it_copies(name: str) -> None:
    pipeline = PIPELINES[name]
    call, arguments = pipeline_function(pipeline)
    with pretended_tpu():
        model, kernels = count_model_flops(call, *arguments), pallas_kernel_flops(call, *arguments)
    assert (model.total, model.unaccounted) == (pipeline.needed, ())
    assert sum(model.overhang.values()) == pipeline.in_blocks - pipeline.needed
    executed = executed_flops(tpu_program(call, arguments), kernel_flops=kernels)
    assert (executed.total, executed.on_hardware) == (pipeline.needed, pipeline.in_blocks)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(sizes=(17, 299, 149), blocks=(8, 128, 256), order=(2, 1, 0), cores=2),
        Pipeline(sizes=(9, 74, 846), blocks=(16, 128, 256), cores=2),  # the second one has no rows
    ],
)
def test_cores_that_read_different_halves_of_a_buffer_are_counted_in_full_and_say_so(
    pipeline: Pipeline,
) -> None:
    call, arguments = pipeline_function(pipeline)
    with pretended_tpu():
        count = count_model_flops(call, *arguments)
    assert pipeline.needed <= count.total <= pipeline.in_blocks
    (item,) = count.unaccounted
    assert "how far its blocks overhang their arrays" in item.reason


RUN = {
    "heads": Grid(sizes=(3, 5, 7, 6), blocks=(2, 4, 4, 4)),
    "masked": Grid(sizes=(1, 5, 7, 6), blocks=(1, 8, 4, 4), mask=True, reverse=True),
    "chunks": Grid(sizes=(2, 3, 3, 5), blocks=(1, 2, 2, 8), chunk=2, transposed=True, repeat=2),
    "second": Grid(sizes=(1, 5, 3, 6), blocks=(2, 4, 4, 4), second=5),
    "skipped": Grid(sizes=(1, 5, 7, 6), blocks=(1, 2, 2, 4), skip=True, order=(2, 0, 1)),
}


@pytest.mark.parametrize("name", RUN)
def test_kernels_that_really_run_multiply_as_many_elements_that_are_not_padding(name: str) -> None:
    assert ran_inside(RUN[name]) == needed(RUN[name])


DEPRECATED = pytest.mark.filterwarnings(
    "ignore:jax.experimental.pallas.ops.gpu:DeprecationWarning",
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning",
)


@DEPRECATED
def test_decoding_attention_on_gpu_needs_its_heads_and_not_its_blocks() -> None:
    """Blocks of 16 heads, of which an example has 4: four times as much runs."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return decode_attention.mqa(q, k, v, k_splits=4, block_k=64)

    arguments = shape(3, 4, 64), shape(3, 512, 64), shape(3, 512, 64)
    count = count_model_flops(decode, *arguments)
    assert (count.total, count.unaccounted) == (2 * 2 * 3 * 4 * 512 * 64, ())
    assert count.overhang == {"forward mha_forward/pallas_call": 3 * count.total}
    runs = KernelRun(count.total, 3 * count.total)
    assert pallas_kernel_flops(decode, *arguments) == {"mha_forward": (runs,)}
    with absent_device("NVIDIA H100 80GB HBM3", None, "cuda"):
        program = jax.jit(decode).trace(*arguments).lower(lowering_platforms=("cuda",))
    text = program.as_text("hlo")
    alone = executed_flops(text)
    executed = executed_flops(text, kernel_flops=pallas_kernel_flops(decode, *arguments))
    assert (alone.total, alone.beyond["tiles, stated"]) == (4 * count.total, 0)
    assert (executed.total, executed.on_hardware) == (count.total, alone.total)
    overheads = count.overheads
    ledger = compare_flops(model=count.total, executed=executed, overheads=overheads)
    assert [(row.label, row.flops) for row in ledger.beyond if row.flops] == [
        ("tiles, stated", 3 * count.total)
    ]
    assert (ledger.executed, ledger.residual) == (count.total, 0)
    assert not any(line.flops for line in ledger.lines if "Pallas" in line.label)
    untold = compare_flops(model=count.total, executed=alone, overheads=overheads)
    lines = {line.label: line.flops for line in untold.lines}
    assert lines["Pallas blocks beyond their arrays: attention"] == 3 * count.total
    assert untold.residual == 0


@pytest.mark.filterwarnings("ignore:.*pallas.ops.gpu.attention is deprecated:DeprecationWarning")
def test_attention_on_gpu_needs_the_width_of_its_heads_and_not_of_its_blocks() -> None:
    """Heads of 80 in blocks of 128: both products, and forward and backward."""
    from jax.experimental.pallas.ops.gpu import attention

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.mha(q, k, v, segment_ids=None, causal=True).astype(jnp.float32).sum()

    qkv = [shape(2, 256, 4, 80, dtype=jnp.bfloat16)] * 3
    count = count_model_flops(jax.value_and_grad(loss, (0, 1, 2)), *qkv)
    product = 2 * 2 * 4 * 256**2 * 80
    assert (count.forward, count.backward) == (2 * product, 4 * product)
    # Of the blocks that run, 48 of 128 columns are padding.
    ran = count.total - count.skipped["exact"]
    assert sum(count.overhang.values()) == ran * 48 // 80


def _product(x_ref: jax.Array, w_ref: jax.Array, out_ref: jax.Array) -> None:
    out_ref[...] = jnp.dot(x_ref[...], w_ref[...])


def _chosen(blocks_ref: jax.Array, *refs: jax.Array) -> None:
    _product(*refs)


@pytest.mark.parametrize("is_constant", [True, False])
def test_blocks_chosen_by_a_table_are_counted_if_it_is_constant_else_in_full(
    is_constant: bool,
) -> None:
    table = np.array([2, 0, 2], np.int32)  # rows 8 and 9 of 10, twice, and rows 0 to 3

    def fn(blocks: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(3,),
            in_specs=[
                pl.BlockSpec((4, 8), lambda i, blocks: (blocks[i], 0)),
                pl.BlockSpec((8, 16), lambda i, blocks: (0, 0)),
            ],
            out_specs=pl.BlockSpec((4, 16), lambda i, blocks: (i, 0)),
        )
        out = jax.ShapeDtypeStruct((12, 16), jnp.float32)
        return pl.pallas_call(_chosen, grid_spec=grid, out_shape=out)(blocks, x, w)

    arguments = shape(10, 8), shape(8, 16)
    if is_constant:
        count = count_model_flops(lambda *arrays: fn(table, *arrays), *arguments)
        assert (count.total, count.unaccounted) == ((2 + 4 + 2) * 2 * 8 * 16, ())
    else:
        count = count_model_flops(fn, shape(3, dtype=jnp.int32), *arguments)
        assert count.total == 12 * 2 * 8 * 16
        (item,) = count.unaccounted
        assert "how far its blocks overhang their arrays" in item.reason


def _in_blocks_of_four(x: jax.Array, w: jax.Array) -> jax.Array:
    return pl.pallas_call(
        _product,
        grid=(2, 2),
        in_specs=[
            pl.BlockSpec((4, 8), lambda i, j: (i, 0)),
            pl.BlockSpec((8, 4), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((4, 4), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((5, 7), jnp.float32),
        interpret=True,
        name="matmul",
    )(x, w)


def test_the_ledger_explains_what_runs_beyond_the_arrays() -> None:
    """8 · 8 elements of [5, 7] run, in a program that really multiplies whole blocks."""
    arguments = shape(5, 8), shape(8, 7)
    model = count_model_flops(_in_blocks_of_four, *arguments)
    program = jax.jit(_in_blocks_of_four).lower(*arguments).compile()
    ledger = compare_flops(model=model, executed=executed_flops(program))
    lines = {line.label: line.flops for line in ledger.lines}
    assert (ledger.model, ledger.executed) == (2 * 5 * 7 * 8, 2 * 8 * 8 * 8)
    assert lines["Pallas blocks beyond their arrays"] == 2 * (8 * 8 - 5 * 7) * 8
    assert ledger.residual == 0


_DECODE = """HloModule step
ENTRY main {
  q = f32[3,4,64] parameter(0)
  k = f32[3,4,128,64] parameter(1)
  v = f32[3,4,128,64] parameter(2)
  ROOT o = f32[3,4,4,64] custom-call(q, k, v), custom_call_target="kernel", metadata={op_name="jit(decode)/vmap(mha_forward)/mha_forward/pallas_call"}
}"""  # noqa: E501


@DEPRECATED
@pytest.mark.parametrize("convention", ["dense", "maxtext"])
def test_masked_pairs_are_not_what_attention_runs_beyond_its_arrays(convention: str) -> None:
    from jax.experimental.pallas.ops.gpu import decode_attention

    def decode(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return decode_attention.mqa(q, k, v, k_splits=4, block_k=64)

    arguments = shape(3, 4, 64), shape(3, 512, 64), shape(3, 512, 64)
    model = traced_model(decode, arguments, {}, devices=1, convention=convention)
    ran = 4 * int(model.per_device)
    flops = count_program(ProgramDump(text=_DECODE), model, kernel_flops={"mha_forward": ran})
    lines = {line.label: line.flops for line in flops.ledger.lines}
    assert flops.executed.attention_kernels == ran
    assert lines["Pallas blocks beyond their arrays: attention"] == 3 * model.per_device
    assert (lines["masked pairs"], flops.ledger.residual) == (0, 0)


def _copied(x_ref: jax.Array, w_ref: jax.Array, out_ref: jax.Array) -> None:
    out_ref[...] = jnp.dot(x_ref[...][::-1], w_ref[...])


@pytest.mark.parametrize(
    ("body", "rows", "steps", "needed_rows", "is_bound"),
    [
        (_product, pl.Element(4), 3, 4 + 4 + 2, False),  # rows 0 to 3, 3 to 6, 6 to 7
        (_product, pl.Element(4, (1, 2)), 3, 3 + 4 + 3, False),  # −1 to 2, 2 to 5, 5 to 8
        (_copied, 4, 2, 8, True),  # what is inside is no longer at the beginning
        (_product, 5, 0, 0, False),  # no program
    ],
)
def test_other_blocks(body: Any, rows: Any, steps: int, needed_rows: int, is_bound: bool) -> None:
    """Eight rows (six, reversed) in blocks of four; an `Element` block begins at any row."""
    length = 6 if body is _copied else 8

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        place = (lambda i: (3 * i, 0)) if isinstance(rows, pl.Element) else (lambda i: (i, 0))
        block = rows if isinstance(rows, int) else 4
        width = pl.Element(8) if isinstance(rows, pl.Element) else 8
        return pl.pallas_call(
            body,
            grid=(steps,),
            in_specs=[pl.BlockSpec((rows, width), place), pl.BlockSpec((8, 16), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((block, 16), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((max(1, steps) * block, 16), jnp.float32),
        )(x, w)

    count = count_model_flops(fn, shape(length, 8), shape(8, 16))
    assert count.total == needed_rows * 2 * 8 * 16
    assert bool(count.unaccounted) == is_bound
