"""The executed count on live CPU compiles, against hand arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.hlo.text import HloParseError
from mfu_jax.flops.ledger import compare_flops
from tests.support.reference_model import Shape, reference_step

# 4 layers, B 2, S 128, D 64, F 256, vocabulary 512, 4 heads of 16, by hand:
#   forward a layer: 4 projections 4·2·B·S·D·D, two attention matmuls 2·2·B·S·S·D, MLP 2·2·B·S·D·F
LAYER = 4 * 2 * 256 * 64 * 64 + 2 * 2 * 2 * 128 * 128 * 64 + 2 * 2 * 256 * 64 * 256
FORWARD = 4 * LAYER + 2 * 256 * 64 * 512
# A checkpointed layer is run again but for its last matmul: nothing needs its result.
REMATERIALISED = 4 * (LAYER - 2 * 256 * 256 * 64)


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_reference_model_to_the_integer(remat: bool) -> None:
    assert 3 * FORWARD == 452_984_832
    step, arguments = reference_step(Shape(remat="full" if remat else "none"))
    count = executed_flops(jax.jit(step).lower(*arguments).compile())
    assert count.forward == FORWARD
    assert count.backward == 2 * FORWARD
    assert count.rematerialized == (REMATERIALISED if remat else 0)
    assert count.total == (553_648_128 if remat else 452_984_832)
    assert sum(count.by_scope.values()) == sum(count.by_dtype.values()) == count.total
    assert not count.unaccounted


@pytest.mark.full
def test_unrolled_reference_model_to_the_integer() -> None:
    step, arguments = reference_step(Shape(scan=False))
    count = executed_flops(jax.jit(step).lower(*arguments).compile())
    assert (count.forward, count.backward) == (FORWARD, 2 * FORWARD)
    assert count.loops_once == count.total


@pytest.mark.full
def test_the_ledger_of_the_scanned_model_has_no_residual() -> None:
    step, arguments = reference_step(Shape(remat="full"))
    compiled = jax.jit(step).lower(*arguments).compile()
    # The maxtext convention takes half of the attention pairs: 4 layers × 2 matmuls × 3 passes.
    masked = 4 * 3 * (2 * 2 * 2 * 128 * 128 * 64) // 2
    ledger = compare_flops(
        model=3 * FORWARD - masked,
        dense=3 * FORWARD,
        executed=executed_flops(compiled),
        xla_reported=compiled.cost_analysis()["flops"],
    )
    expected = [3 * FORWARD - masked, masked, REMATERIALISED, 0, 0]
    assert [line.flops for line in ledger.lines] == expected
    assert ledger.residual == 0
    assert ledger.executed + sum(cause.flops for cause in ledger.causes) == ledger.xla_reported
    assert "rematerialised" in ledger.render()


def test_a_conditional_counts_its_most_expensive_branch_and_says_so() -> None:
    def f(flag: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    count = executed_flops(jax.jit(f).lower(flag, x).compile())
    assert count.total == 2 * 2 * 32**3
    assert [f.times for f in count.flags] == [1]
    assert "131,072" in count.flags[0].text


def test_an_element_of_a_tuple_by_its_number() -> None:
    """As libtpu's dumps of scheduled programs have it: 2 · 2 · 3 · 4 FLOPs."""
    text = """HloModule jit_f
ENTRY %main (t: (f32[], f32[2,3]{1,0}), w: f32[3,4]) -> f32[2,4] {
  %t = (f32[], /*index=1*/f32[2,3]{1,0}) parameter(0)
  %w = f32[3,4] parameter(1)
  ROOT %d = f32[2,4] dot(%t#1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    assert executed_flops(text).total == 48
    with pytest.raises(HloParseError, match="no instruction %t#2"):
        executed_flops(text.replace("%t#1", "%t#2"))


REMAT = """HloModule m
%first (p: f32[8,16], q: f32[16,4]) -> f32[8,4] {
  %p = f32[8,16] parameter(0)
  %q = f32[16,4] parameter(1)
  ROOT %d = f32[8,4] dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%again (p.1: f32[8,16], q.1: f32[16,4]) -> (f32[8,4], f32[8,4]) {
  %p.1 = f32[8,16] parameter(0)
  %q.1 = f32[16,4] parameter(1)
  %e = f32[8,4] dot(%p.1, %q.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %s = f32[8,4] sine(%e)
  ROOT %b = (f32[8,4], f32[8,4]) tuple(%e, %s)
}
ENTRY %main (x: f32[8,16], w: f32[16,4]) -> (f32[8,4], (f32[8,4], f32[8,4])) {
  %x = f32[8,16] parameter(0)
  %w = f32[16,4] parameter(1)
  %fusion.7 = f32[8,4] fusion(%x, %w), kind=kOutput, calls=%first, NAME
  %fusion.7.remat = (f32[8,4], f32[8,4]) fusion(%x, %w), kind=kOutput, calls=%again, NAME
  ROOT %t = (f32[8,4], (f32[8,4], f32[8,4])) tuple(%fusion.7, %fusion.7.remat)
}
""".replace("NAME", 'metadata={op_name="jit(f)/jvp()/dot_general"}')


def test_what_xla_recomputes_with_another_result_is_recomputed_and_no_duplicate() -> None:
    executed = executed_flops(REMAT)
    product = 2 * 8 * 16 * 4
    assert (executed.forward, executed.xla_rematerialized) == (product, product)
    assert executed.duplicated == 0
