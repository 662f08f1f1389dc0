"""Matmuls that run in several passes on parts of their precision: counted once, and named."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.counting import executed_flops

FLOPS = 2 * 8 * 16 * 4

DOT = """HloModule m
ENTRY %main (x: f32[8,16], y: f32[16,4]) -> f32[8,4] {
  %x = f32[8,16] parameter(0)
  %y = f32[16,4] parameter(1)
  ROOT %d = f32[8,4] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, ATTRIBUTE
}"""
TPU = """HloModule m
ENTRY %main (x: TYPE[8,16], y: TYPE[16,4]) -> TYPE[8,4] {
  %x = TYPE[8,16]{1,0:T(8,128)} parameter(0)
  %y = TYPE[16,4]{1,0:T(8,128)} parameter(1)
  ROOT %d = TYPE[8,4]{1,0:T(8,128)} convolution(%x, %y), dim_labels=bf_io->bf, ATTRIBUTE
}"""


@pytest.mark.parametrize(
    ("attribute", "passes"),
    [
        ("algorithm=dot_bf16_bf16_f32_x3", "bf16_x3"),
        ("algorithm=dot_bf16_bf16_f32_x6", "bf16_x6"),
        ("algorithm=dot_bf16_bf16_f32_x9", "bf16_x9"),
        ("algorithm=dot_tf32_tf32_f32_x3", "tf32_x3"),
        ("algorithm=dot_tf32_tf32_f32", ""),
        ("operand_precision={highest,highest}", ""),  # of a CPU or GPU: a float32 unit
    ],
)
def test_a_dot_algorithm_says_its_passes(attribute: str, passes: str) -> None:
    executed = executed_flops(DOT.replace("ATTRIBUTE", attribute))
    assert executed.total == FLOPS
    assert executed.hardware_passes == ({passes: FLOPS} if passes else {})


@pytest.mark.parametrize(
    ("dtype", "precision", "passes"),
    [
        ("f32", "highest", "bf16_x6"),
        ("f32", "high", "bf16_x3"),
        ("f32", "default", ""),
        ("bf16", "highest", ""),
    ],
)
def test_a_tpu_multiplies_float32_in_passes_of_bf16(
    dtype: str, precision: str, passes: str
) -> None:
    attribute = f"operand_precision={{{precision},{precision}}}"
    executed = executed_flops(TPU.replace("TYPE", dtype).replace("ATTRIBUTE", attribute))
    assert executed.total == FLOPS
    assert executed.hardware_passes == ({passes: FLOPS} if passes else {})


def test_a_matrix_vector_product_in_three_passes_counts_once() -> None:
    """As XLA writes bf16_x3 for H100: high · low, low · high and high · high, added and summed."""
    text = """HloModule m
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
ENTRY %main (h: bf16[8,16], l: bf16[8,16], v: bf16[16], w: bf16[16]) -> f32[8] {
  %h = bf16[8,16] parameter(0)
  %l = bf16[8,16] parameter(1)
  %v = bf16[16] parameter(2)
  %w = bf16[16] parameter(3)
  %vs = bf16[8,16] broadcast(%v), dimensions={1}
  %ws = bf16[8,16] broadcast(%w), dimensions={1}
  %low = bf16[8,16] multiply(%l, %vs)
  %cross = bf16[8,16] multiply(%h, %ws)
  %high = bf16[8,16] multiply(%h, %vs)
  %some = bf16[8,16] add(%low, %cross)
  %all = bf16[8,16] add(%some, %high), metadata={op_name="jit(f)/dot_general"}
  %wide = f32[8,16] convert(%all)
  %zero = f32[] constant(0)
  ROOT %r = f32[8] reduce(%wide, %zero), dimensions={1}, to_apply=%add, NAME
}"""
    executed = executed_flops(text.replace("NAME", 'metadata={op_name="jit(f)/dot_general"}'))
    assert executed.total == executed.vector_matmuls == 2 * 8 * 16
    assert executed.hardware_passes == {"bf16_x3": 2 * 8 * 16}
