"""The purposes of a compiled program's matmuls where XLA combines values of several phases."""

from __future__ import annotations

from mfu_jax.flops.executed.counting import executed_flops

# The loss and the evaluation's loss are reduced over devices together, under the loss's op_name.
COMBINED = """HloModule m

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (w: f32[4,4], x: f32[8,4]) -> (f32[4,4], f32[], f32[]) {
  %w = f32[4,4] parameter(0)
  %x = f32[8,4] parameter(1)
  %zero = f32[] constant(0)
  %y = f32[8,4] dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/jvp()/dot_general"}
  %g = f32[4,4] dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/transpose(jvp())/dot_general"}
  %new = f32[4,4] subtract(%w, %g), metadata={op_name="jit(f)/sub"}
  %z = f32[8,4] dot(%x, %new), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot_general"}
  %l = f32[] reduce(%y, %zero), dimensions={0,1}, to_apply=%sum, metadata={op_name="jit(f)/jvp()/reduce_sum"}
  %e = f32[] reduce(%z, %zero), dimensions={0,1}, to_apply=%sum, metadata={op_name="jit(f)/reduce_sum"}
  %both = (f32[], f32[]) all-reduce(%l, %e), replica_groups={}, to_apply=%sum, metadata={op_name="jit(f)/jvp()/reduce_sum"}
  %l2 = f32[] get-tuple-element(%both), index=0
  %e2 = f32[] get-tuple-element(%both), index=1
  ROOT %result = (f32[4,4], f32[], f32[]) tuple(%new, %l2, %e2)
}
"""  # noqa: E501


def test_a_combined_all_reduce_keeps_an_evaluation_apart_from_the_loss() -> None:
    count = executed_flops(COMBINED)
    one = 2 * 8 * 4 * 4
    assert (count.forward, count.backward) == (2 * one, one)
    assert count.evaluation == one


def test_async_collectives_pass_each_value_on() -> None:
    start = COMBINED.replace("(f32[], f32[]) all-reduce(", "(f32[], f32[]) all-reduce-start(")
    done = start.replace("  %l2 =", "  %done = (f32[], f32[]) all-reduce-done(%both)\n  %l2 =")
    done = done.replace("get-tuple-element(%both)", "get-tuple-element(%done)")
    assert executed_flops(done).evaluation == 2 * 8 * 4 * 4
