"""Matmuls that XLA writes as a multiplication and a sum: recorded programs, and texts by hand."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.traced.counting import count_model_flops
from tests.support import program_shared_calls as shared_calls
from tests.support import program_vectors as programs
from tests.support.paths import RECORDED
from tests.support.program_vectors import (
    ATTENTION_FLOPS,
    CRASHES,
    LAYERS,
    PLATFORMS,
    POLICY_FLOPS,
    ROWS,
    TRAINING_FLOPS,
    UNITS,
    VALUE_FLOPS,
    WIDTH,
)
from tests.support.recorded import count

NAMES = [f"{platform}_vectors_{name}" for platform in PLATFORMS for name in programs.PROGRAMS]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CRASHES])
def test_model_is_executed_in_training_and_in_serving(name: str) -> None:
    function, arguments, flops = programs.PROGRAMS[name.rpartition("_")[2]]
    traced, executed = count_model_flops(function, *arguments), count(name)
    assert traced.total == flops == executed.total - executed.duplicated
    assert sum(executed.by_scope.values()) == sum(executed.by_dtype.values()) == executed.total
    assert (traced.forward, traced.backward) == (
        executed.forward - executed.duplicated,
        executed.backward,
    )
    ledger = compare_flops(model=flops, executed=executed)
    assert (ledger.residual, executed.unaccounted) == (0, ())


def test_vector_units_run_what_the_compilers_leave_them() -> None:
    weights = programs.SERVING_FLOPS - ATTENTION_FLOPS - LAYERS * 2 * (2 * programs.KEYS * WIDTH)
    outer_products = 2 * programs.INPUTS * UNITS * 2 + 2 * ROWS * UNITS
    # H100: all but attention of groups; v5e and v6e: half of the four sequences' attention.
    assert count("h100_vectors_serving").vector_matmuls == weights + ATTENTION_FLOPS
    assert count("v5e_vectors_serving").vector_matmuls == weights + ATTENTION_FLOPS // 2
    assert count("v6e_vectors_serving").vector_matmuls == weights + ATTENTION_FLOPS // 2
    assert count("cpu_vectors_serving").vector_matmuls == 0
    # Training: the policy's row and all of the value head; tpu7x and CPU: only outer products.
    for platform in ("v5e", "v6e", "h100"):
        executed = count(f"{platform}_vectors_training")
        assert executed.vector_matmuls == POLICY_FLOPS + 3 * 2 * ROWS * UNITS
        assert executed.by_scope == {"policy": POLICY_FLOPS, "value": VALUE_FLOPS}
    for platform in ("cpu", "tpu7x"):
        assert count(f"{platform}_vectors_training").vector_matmuls == outer_products


def test_the_dtype_is_that_of_the_operands_as_the_program_holds_them() -> None:
    for platform in ("v5e", "v6e", "h100"):
        assert set(count(f"{platform}_vectors_serving").by_dtype) == {"bf16"}


def test_a_layer_that_two_scans_call_counts_all_its_products() -> None:
    """XLA inlines it late and names the products after the call; they counted 0."""
    square, mlp, attention = 2 * 128 * 128, 2 * 128 * 256, 2 * 64 * 128
    by_hand = (2 + 5) * (4 * square + 3 * mlp + 2 * attention)
    assert by_hand == shared_calls.DECODE_FLOPS == 2_523_136
    function, arguments, _ = shared_calls.PROGRAMS["decode"]
    assert count_model_flops(function, *arguments).total == by_hand
    for platform in shared_calls.PLATFORMS:
        executed = count(f"{platform}_shared_calls_decode")
        assert executed.total == executed.forward == by_hand
        assert executed.by_operation == {"forward dot_general": by_hand}
        assert executed.by_dtype == {"bf16": by_hand}
    # On tpu7x, matrix units run them.
    assert count("v5e_shared_calls_decode").vector_matmuls == by_hand
    assert count("v6e_shared_calls_decode").vector_matmuls == by_hand
    assert count("tpu7x_shared_calls_decode").vector_matmuls == 0


def test_ppos_epochs_count_all_products_and_gradients() -> None:
    first, mid, policy, value = 2 * 64 * 128, 2 * 128 * 128, 2 * 128 * 8, 2 * 128
    one_update = 2 * first + 3 * (mid + policy + value)  # observations need no gradient
    by_hand = (4 + 1) * 6 * one_update
    assert by_hand == shared_calls.EPOCHS_FLOPS == 4_139_520
    function, arguments, _ = shared_calls.PROGRAMS["epochs"]
    assert count_model_flops(function, *arguments).total == by_hand
    for platform in shared_calls.PLATFORMS:
        executed = count(f"{platform}_shared_calls_epochs")
        assert executed.total == by_hand
        assert executed.forward == 30 * (first + mid + policy + value)
        assert executed.duplicated == 0


MATVEC = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
%products (w: bf16[8,16], x: bf16[16]) -> f32[8,16] {
  %w = bf16[8,16] parameter(0)
  %x = bf16[16] parameter(1)
  %all = bf16[8,16] broadcast(%x), dimensions={1}
  %w32 = f32[8,16] convert(%w)
  %x32 = f32[8,16] convert(%all)
  ROOT %p = f32[8,16] multiply(%w32, %x32)PRODUCT
}
%sums (p: f32[8,16]) -> f32[8] {
  %p = f32[8,16] parameter(0)
  %split = f32[8,4,4] bitcast(%p)
  %zero = f32[] constant(0)
  %some = f32[8,4] reduce(%split, %zero), dimensions={2}, to_apply=%addSUM
  ROOT %r = f32[8] reduce(%some, %zero), dimensions={1}, to_apply=%addSUM
}
ENTRY %main (w: bf16[8,16], x: bf16[16]) -> f32[8] {
  %w = bf16[8,16] parameter(0)
  %x = bf16[16] parameter(1)
  %f = f32[8,16] fusion(%w, %x), kind=kLoop, calls=%products
  ROOT %g = f32[8] fusion(%f), kind=kInput, calls=%sums
}"""


def named(op_name: str) -> str:
    """An instruction's metadata."""
    return f', metadata={{op_name="{op_name}"}}' if op_name else ""


@pytest.mark.parametrize(
    ("product", "sums", "flops"),
    [
        ("jit(f)/dot_general", "jit(f)/dot_general", 2 * 8 * 16),
        ("jit(f)/dot_general", "", 2 * 8 * 16),
        ("", "jit(f)/dot_general", 2 * 8 * 16),
        ("multiply.1291", "jit(f)/dot_general", 2 * 8 * 16),  # XLA's own name
        ("jit(f)/mul;jit(f)/ij,j->i/dot_general", "jit(f)/reduce_sum", 2 * 8 * 16),
        ("jit(f)/while/body/closed_call", "jit(f)/while/body/closed_call/dot_general", 2 * 8 * 16),
        ("jit(f)/a/call", "jit(f)/a/call/b/call/dot_general", 2 * 8 * 16),
        ("jit(f)/call_2", "jit(f)/call_20/dot_general", 0),  # another call's
        ("jit(f)/mul", "jit(f)/reduce_sum", 0),
        ("", "jit(f)/reduce_sum", 0),
        ("jit(f)/mul", "jit(f)/dot_general", 0),  # a product of the user's, times ones
    ],
)
def test_a_product_and_its_sum_in_two_stages_count_once(
    product: str, sums: str, flops: int
) -> None:
    text = MATVEC.replace("PRODUCT", named(product)).replace("SUM", named(sums))
    executed = executed_flops(text)
    assert (executed.total, executed.vector_matmuls) == (flops, flops)
    assert executed.by_dtype == ({"bf16": flops} if flops else {})


def test_a_maximum_over_products_is_no_matmul() -> None:
    text = MATVEC.replace("PRODUCT", "").replace("SUM", named("jit(f)/dot_general"))
    assert executed_flops(text.replace("add(%a, %b)", "maximum(%a, %b)")).total == 0


def test_a_product_that_two_fusions_compute_is_duplicated() -> None:
    text = MATVEC.replace("PRODUCT", named("jit(f)/dot_general")).replace("SUM", "")
    again = "  %h = f32[8,16] fusion(%w, %x), kind=kLoop, calls=%again\n  ROOT %g"
    products = text[text.index("%products (") : text.index("%sums (")]
    text = text.replace("%sums (", products.replace("%products (", "%again (") + "%sums (")
    executed = executed_flops(text.replace("  ROOT %g", again))
    assert (executed.total, executed.duplicated) == (2 * 2 * 8 * 16, 2 * 8 * 16)


def test_a_devices_offset_into_a_shard_is_no_matmul() -> None:
    text = """HloModule m
ENTRY %main (i: s32[1]) -> s32[1] {
  %i = s32[1] parameter(0)
  ROOT %p = s32[1] multiply(%i, %i), metadata={op_name="jit(f)/dot_general"}
}"""
    assert executed_flops(text).total == 0


OUTER = """HloModule m
%products (x: f32[8], y: f32[16]) -> f32[8,16] {
  %x = f32[8] parameter(0)
  %y = f32[16] parameter(1)
  %rows = f32[8,16] broadcast(%x), dimensions={0}ROWS
  %columns = f32[8,16] broadcast(%y), dimensions={COLUMN}
  ROOT %p = f32[8,16] multiply(%rows, %columns)PRODUCT
}
ENTRY %main (x: f32[8], y: f32[16]) -> f32[8,16] {
  %x = f32[8] parameter(0)
  %y = f32[16] parameter(1)
  ROOT %f = f32[8,16] fusion(%x, %y), kind=kLoop, calls=%products
}"""


@pytest.mark.parametrize(
    ("rows", "product", "flops"),
    [
        ("jit(f)/dot_general", "jit(f)/add_any", 2 * 8 * 16),  # XLA merged a·cᵀ + b·cᵀ
        ("jit(f)/call/dot_general", "jit(f)/call", 2 * 8 * 16),
        (
            "jit(f)/dot_general",
            "jit(f)/mul",
            0,
        ),  # the user's, of a broadcast merged with a matmul's
        ("jit(f)/broadcast_in_dim", "jit(f)/add_any", 0),
    ],
)
def test_an_outer_product_is_known_by_what_it_multiplies(
    rows: str, product: str, flops: int
) -> None:
    text = OUTER.replace("ROWS", named(rows)).replace("PRODUCT", named(product))
    executed = executed_flops(text.replace("COLUMN", "1"))
    assert (executed.total, executed.vector_matmuls) == (flops, flops)


def test_a_factor_of_a_matmuls_operand_is_no_outer_product() -> None:
    text = OUTER.replace("ROWS", named("jit(f)/dot_general")).replace("PRODUCT", "")
    text = text.replace("y: f32[16]", "y: f32[]").replace("%y = f32[16]", "%y = f32[]")
    assert executed_flops(text.replace("COLUMN", "")).total == 0


def test_a_product_whose_dimensions_are_common_to_both_operands_is_not_outer() -> None:
    text = OUTER.replace("ROWS", named("jit(f)/dot_general")).replace("PRODUCT", "")
    text = text.replace("y: f32[16]", "y: f32[8]").replace("%y = f32[16]", "%y = f32[8]")
    assert executed_flops(text.replace("COLUMN", "0")).total == 0


FACTOR = """HloModule m
ENTRY %main (x: f32[4,8], y: f32[4], dot: f32[8,6]) -> (f32[4,8], f32[4,6]) {
  %x = f32[4,8] parameter(0)
  %y = f32[4] parameter(1)
  %w = f32[8,6] parameter(2)
  %half = f32[] constant(0.5)
  %halves = f32[4] broadcast(%half), dimensions={}
  %scaled = f32[4] multiply(%y, %halves), metadata={op_name="jit(f)/outer/dot_general"}
  %rows = f32[4,8] broadcast(%scaled), dimensions={0}
  %all = f32[4,8] broadcast(%half), dimensions={}
  %less = f32[4,8] multiply(%x, %all), metadata={op_name="jit(f)/dot_general"}
  %product = f32[4,8] multiply(%x, %rows), metadata={op_name="jit(f)/outer/dot_general"}
  %dot = f32[4,6] dot(%less, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/dot_general"}
  ROOT %results = (f32[4,8], f32[4,6]) tuple(%product, %dot)
}"""


def test_a_factor_of_the_result_that_xla_moves_to_an_operand_is_no_matmul() -> None:
    executed = executed_flops(FACTOR)
    assert (executed.vector_matmuls, executed.total) == (2 * 4 * 8, 2 * 4 * 8 + 2 * 4 * 8 * 6)


@pytest.mark.parametrize("platform", ["cpu", "v5e", "v6e", "tpu7x"])
def test_xlas_report_of_products_and_sums_is_explained_to_the_flop(platform: str) -> None:
    name = f"{platform}_vectors_training"
    reported = json.loads((RECORDED / "index.json").read_text())[name]["xla_reported_flops"]
    executed = count(name)
    ledger = compare_flops(model=TRAINING_FLOPS, executed=executed, xla_reported=reported)
    assert ledger.causes[-1].flops == 0


def test_elementwise_excludes_the_products() -> None:
    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("i,j->ij", a, b)

    compiled = jax.jit(outer).lower(jnp.ones(32), jnp.ones(48)).compile()
    executed = executed_flops(compiled)
    assert executed.vector_matmuls == executed.total == 2 * 32 * 48
    assert (executed.vector_xla, executed.elementwise) == (32 * 48, 0)  # nothing is added up
    ledger = compare_flops(model=2 * 32 * 48, executed=executed)
    assert "of which matmuls run on vector units" in str(ledger)
    assert ledger.residual == 0
