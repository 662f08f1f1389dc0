"""Known zeros in front of and behind a matmul, in programs written by hand."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfu_jax.flops.executed.attribution.padding import WasteFinder
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.hlo.dataflow import Dataflow
from mfu_jax.flops.executed.hlo.parsing import parse_hlo
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.lengths import NO_LENGTHS
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.compilation import only_counted

M, N, K = 8, 960, 100


def count(body: str, parameters: str, before: str = "HloModule m") -> ExecutedCount:
    body = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return executed_flops(f"{before}\nENTRY %main {parameters} {{\n{body}\n}}\n")


DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
OPERANDS = """
    %x = f32[8,100] parameter(0)
    %w = f32[100,960] parameter(1)
    %zero = f32[] constant(0)
    %one = f32[] constant(1)
"""
SIGNATURE = "(x: f32[8,100], w: f32[100,960]) -> f32[8,1024]"


def test_a_width_padded_from_960_to_1024_and_cut_again() -> None:
    for cut in ("", "\n    ROOT %y = f32[8,960] slice(%d), slice={[0:8], [0:960]}"):
        body = f"""
    %p = f32[100,1024] pad(%w, %zero), padding=0_0x0_64
    {"" if cut else "ROOT "}%d = f32[8,1024] dot(%x, %p), {DOT}"""
        executed = count(OPERANDS + body + cut, SIGNATURE)
        assert executed.total == 2 * M * 1024 * K
        assert executed.padding == 2 * M * (1024 - N) * K


def test_rows_of_other_groups_in_the_result_of_a_ragged_product_are_its_dense_expansion() -> None:
    """A TPU multiplies 12 rows by all of 3 groups' matrices, and keeps each row of its own group.

    A select with a name is the user's own, whose product belongs to the model.
    """
    body = """
    %rows = f32[12,4] parameter(0)
    %w = f32[3,4,5] parameter(1)
    %starts = s32[3] parameter(2)
    %ends = s32[3] parameter(3)
    %zero = f32[] constant(0)
    %zeros = f32[3,12,5] broadcast(%zero), dimensions={}
    %copies = f32[3,12,4] broadcast(%rows), dimensions={1,2}
    %row = s32[3,12] iota(), iota_dimension=1
    %first = s32[3,12] broadcast(%starts), dimensions={0}
    %last = s32[3,12] broadcast(%ends), dimensions={0}
    %after = pred[3,12] compare(%first, %row), direction=LE
    %before = pred[3,12] compare(%row, %last), direction=LT
    %own = pred[3,12] and(%after, %before)
    %mask = pred[3,12,5] broadcast(%own), dimensions={0,1}
    %d = f32[3,12,5] dot(%copies, %w), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general"}
    ROOT %s = f32[3,12,5] select(%mask, %d, %zeros)"""  # noqa: E501
    signature = "(r: f32[12,4], w: f32[3,4,5], a: s32[3], b: s32[3]) -> f32[3,12,5]"
    executed, dense = count(body, signature), 3 * 2 * 12 * 4 * 5
    assert (executed.total, executed.expansion) == (dense, dense * 2 // 3)
    users = body.replace(
        "select(%mask, %d, %zeros)",
        'select(%mask, %d, %zeros), metadata={op_name="jit(f)/select_n"}',
    )
    assert count(users, signature).expansion == 0


def test_results_that_are_cut_off_are_padding_too() -> None:
    body = f"""
    %d = f32[8,960] dot(%x, %w), {DOT}
    ROOT %y = f32[8,900] slice(%d), slice={{[0:8], [0:900]}}"""
    assert count(OPERANDS + body, SIGNATURE).padding == 2 * M * 60 * K


def test_a_padded_contraction_that_is_split_in_two() -> None:
    body = """
    %px = f32[8,128] pad(%x, %zero), padding=0_0x0_28
    %pw = f32[128,960] pad(%w, %zero), padding=0_28x0_0
    %sx = f32[8,2,64] reshape(%px)
    %sw = f32[2,64,960] reshape(%pw)
    ROOT %d = f32[2,8,960] dot(%sx, %sw), lhs_batch_dims={1}, rhs_batch_dims={0}, """
    body += "lhs_contracting_dims={2}, rhs_contracting_dims={1}"
    executed = count(OPERANDS + body, SIGNATURE)
    assert executed.total == 2 * M * N * 128
    assert executed.padding == 2 * M * N * 28


def test_padding_with_another_value_is_work() -> None:
    body = f"""
    %p = f32[100,1024] pad(%w, %one), padding=0_0x0_64
    ROOT %d = f32[8,1024] dot(%x, %p), {DOT}"""
    assert count(OPERANDS + body, SIGNATURE).padding == 0


def test_results_that_something_else_reads_too_are_needed() -> None:
    body = f"""
    %d = f32[8,960] dot(%x, %w), {DOT}
    %y = f32[8,900] slice(%d), slice={{[0:8], [0:900]}}
    ROOT %both = (f32[8,900], f32[8,960]) tuple(%y, %d)"""
    assert count(OPERANDS + body, SIGNATURE).padding == 0


LOOP = """HloModule m
%condition (s: (f32[8,960], s32[])) -> pred[] {
  %s = (f32[8,960], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=1
  %end = s32[] constant(5)
  ROOT %on = pred[] compare(%i, %end), direction=LT
}
%body (s: (f32[8,960], s32[])) -> (f32[8,960], s32[]) {
  %s = (f32[8,960], s32[]) parameter(0)
  %h = f32[8,960] get-tuple-element(%s), index=0
  %i = s32[] get-tuple-element(%s), index=1
  %c = f32[8,900] slice(%h), slice={[0:8], [0:900]}
  %zero = f32[] constant(0)
  %wide = f32[8,960] pad(%c, %zero), padding=0_0x0_60
  ROOT %t = (f32[8,960], s32[]) tuple(%wide, %i)
}"""


def test_what_only_a_loops_body_cuts_is_the_loops_result_without_iterations() -> None:
    body = f"""
    %i = s32[] parameter(2)
    %d = f32[8,960] dot(%x, %w), {DOT}
    %start = (f32[8,960], s32[]) tuple(%d, %i)
    %loop = (f32[8,960], s32[]) while(%start), condition=%condition, body=%body
    ROOT %y = f32[8,960] get-tuple-element(%loop), index=0"""
    signature = "(x: f32[8,100], w: f32[100,960], i: s32[]) -> f32[8,960]"
    assert count(OPERANDS + body, signature, LOOP).padding == 0


def test_masks_that_the_user_wrote_are_the_models() -> None:
    """XLA's own masks have no op_name."""
    for metadata, is_expansion in (("", True), (', metadata={op_name="jit(f)/x"}', False)):
        body = f"""
    %x = f32[8,4] parameter(0)
    %w = f32[3] parameter(1)
    %zero = f32[] constant(0)
    %rows = s32[4,3] iota(), iota_dimension=0
    %columns = s32[4,3] iota(), iota_dimension=1
    %same = pred[4,3] compare(%rows, %columns), direction=EQ
    %wide = f32[4,3] broadcast(%w), dimensions={{1}}
    %zeros = f32[4,3] broadcast(%zero), dimensions={{}}
    %kernel = f32[4,3] select(%same, %wide, %zeros){metadata}
    ROOT %d = f32[8,3] dot(%x, %kernel), {DOT}"""
        executed = count(body, "(x: f32[8,4], w: f32[3]) -> f32[8,3]")
        assert executed.total == 2 * M * 4 * 3
        assert executed.expansion == (2 * M * (4 - 1) * 3 if is_expansion else 0)


def test_padded_indices_of_a_gather_are_no_sign_of_waste() -> None:
    pad = "pad(%i, %zero), padding=0_3, metadata={op_name="
    signs = {}
    for name in ("jit(f)/gather", "jit(f)/dot_general"):
        module = parse_hlo(
            "HloModule m\nENTRY %main (i: s32[5]) -> s32[8] {\n"
            "  %i = s32[5] parameter(0)\n  %zero = s32[] constant(0)\n"
            f'  ROOT %p = s32[8] {pad}"{name}"}}\n}}\n'
        )
        signs[name] = WasteFinder(Dataflow(module), NO_LENGTHS).opcodes
    assert signs == {"jit(f)/gather": set(), "jit(f)/dot_general": {"pad"}}


def test_groups_of_a_ragged_product_whose_cotangent_is_one_number_repeated() -> None:
    rows, groups, width = 64, 4, 32

    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, w, sizes).sum()

    arguments = (
        jax.ShapeDtypeStruct((rows, width), jnp.float32),
        jax.ShapeDtypeStruct((groups, width, width), jnp.float32),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )
    executed = executed_flops(jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile())
    # Both gradients; CPUs multiply all rows by all groups.
    assert executed.total - executed.expansion == 2 * (2 * rows * width * width)


def in_shards(function: Callable[..., Any], *shapes: tuple[int, int]) -> ExecutedCount:
    """The count of a function whose constraint splits an array over four devices, unevenly."""
    arguments = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=_at()) for s in shapes)
    with only_counted():
        return executed_flops(jax.jit(function).lower(*arguments).compile())


def _at(*axes: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec(*axes))


def _rows(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, _at("x", None))
    return jnp.sum(jnp.tanh(x @ w))


def _columns(x: jax.Array, w: jax.Array) -> jax.Array:
    y = jax.lax.with_sharding_constraint(x @ w, _at(None, "x"))
    return jnp.sum(jnp.tanh(y) @ w.T)


def test_the_last_of_uneven_shards_is_padding() -> None:
    """Ten rows on four devices: three each, of which the last device has one."""
    rows = in_shards(_rows, (10, 64), (64, 32))
    assert (rows.total, rows.padding) == (2 * 3 * 64 * 32, 2 * 2 * 64 * 32 // 4)


def test_gradients_over_uneven_shards_mask_what_lies_beyond() -> None:
    both = in_shards(jax.grad(_rows, 1), (10, 64), (64, 32))
    assert (both.total, both.padding) == (2 * 2 * 3 * 64 * 32, 2 * 2 * 2 * 64 * 32 // 4)
    columns = in_shards(_columns, (8, 64), (64, 30))  # eight, eight, eight, six
    assert (columns.total, columns.padding) == (2 * 2 * 8 * 64 * 8, 2 * 2 * 8 * 64 * 2 // 4)


@pytest.mark.parametrize(
    ("rows", "columns", "padding"),
    [((0, 3), (0, 4), 2 * 2 * 4 * 32 // 4), ((0, 1), (0, 8), 0), ((1, 3), (0, 8), 0)],
)
def test_of_a_part_of_the_rows_it_is_not_known_how_many_lie_beyond(
    rows: tuple[int, int], columns: tuple[int, int], padding: int
) -> None:
    """Ten rows on four devices: the first of each shard's three is there on all of them."""
    height, width = rows[1] - rows[0], columns[1] - columns[0]
    body = f"""
    %x = f32[10,8] parameter(0)
    %w = f32[{width},32] parameter(1)
    %zero = f32[] constant(0)
    %first = s32[] constant(0)
    %p = f32[12,8] pad(%x, %zero), padding=0_2x0_0
    %device = u32[] partition-id()
    %starts = s32[4] constant({{0,3,6,9}})
    %one = s32[1] dynamic-slice(%starts, %device), dynamic_slice_sizes={{1}}
    %start = s32[] reshape(%one)
    %s = f32[3,8] dynamic-slice(%p, %start, %first), dynamic_slice_sizes={{3,8}}
    %t = f32[3,8] tanh(%s)
    %c = f32[{height},{width}] slice(%t), slice={{[{rows[0]}:{rows[1]}], [0:{width}]}}
    ROOT %d = f32[{height},32] dot(%c, %w), {DOT}"""
    signature = f"(x: f32[10,8], w: f32[{width},32]) -> f32[{height},32]"
    assert count(body, signature, "HloModule m, num_partitions=4").padding == padding


def test_a_users_own_mask_over_shards_belongs_to_the_model() -> None:
    def masked(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) + 3 * jax.lax.axis_index("x")
        return jnp.where(rows < 10, x, 0.0) @ w

    split = PartitionSpec("x", None)
    mesh = _at().mesh
    function = jax.shard_map(masked, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split)
    assert in_shards(function, (12, 64), (64, 32)).padding == 0


def _layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, _at("x", None))
    for weight in weights:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = jax.nn.gelu(x @ weight)
    return jnp.sum(x)


def _attention(x: jax.Array, w: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, _at("x", None, None))
    q, k = jnp.split(jnp.einsum("bsd,dhk->bshk", x, w), 2, axis=2)
    scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k))
    return jnp.sum(jnp.einsum("bhst,bthk->bshk", scores, k))


@pytest.mark.parametrize(
    ("function", "shapes", "rows", "ran"),
    [
        (_layers, ([(64, 128), (128, 64), (64, 32)], (10, 64)), 10, 12),
        (jax.grad(_layers), ([(64, 128), (128, 64), (64, 32)], (10, 64)), 10, 12),
        (_attention, ((6, 16, 32), (32, 4, 8)), 6, 8),
        (jax.grad(_attention), ((6, 16, 32), (32, 4, 8)), 6, 8),
    ],
)
def test_what_follows_from_rows_beyond_the_end_stays_beyond_it(
    function: Callable[..., Any], shapes: Any, rows: int, ran: int
) -> None:
    """Through activations, norms, attention, and the gradients of all of them."""
    arguments = jax.tree.map(
        lambda dims: jax.ShapeDtypeStruct(dims, jnp.float32, sharding=_at()),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple) and isinstance(shape[0], int),
    )
    with only_counted():
        # results that are whole: JAX 0.12 has no words for XLA's own choice of how to split them
        program = jax.jit(function, out_shardings=_at()).lower(*arguments).compile()
        executed = executed_flops(program)
    assert executed.padding * ran == executed.total * (ran - rows) > 0
    ledger = compare_flops(
        model=count_model_flops(function, *arguments), executed=executed, devices=4
    )
    assert ledger.residual == 0
