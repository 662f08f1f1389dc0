"""Work that a program hands to the host counts apart from the device's."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops

ONE = 2 * 8 * 8 * 8
# As libtpu and XLA for GPUs write it, and as HLO writes it before that.
CALLS = (
    """%s = ((f32[8,8]), f32[8,8], u32[]) custom-call-start(%d), async_execution_thread="host", \
custom_call_target="HostExecute", called_computations={%host}
  %h = f32[8,8] custom-call-done(%s)""",
    """%s = ((f32[8,8]), f32[8,8], u32[]) async-start(%d), async_execution_thread="host", \
calls=%host
  %h = f32[8,8] async-done(%s)""",
)
TEXT = """HloModule m
%host (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8] parameter(0)
  %a = f32[8,8] dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %b = f32[8,8] dot(%a, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}, execution_thread="host"

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %d = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  CALL
  ROOT %r = f32[8,8] add(%h, %d)
}"""


@pytest.mark.parametrize("call", CALLS)
def test_the_hosts_matmuls_are_not_the_devices(call: str) -> None:
    executed = executed_flops(TEXT.replace("CALL", call))
    assert (executed.total, executed.host, executed.unaccounted) == (ONE, 2 * ONE, ())
    assert executed.by_dtype == {"f32": ONE}
    ledger = compare_flops(model=ONE, executed=executed)
    assert ledger.residual == 0
    assert f"the host runs {2 * ONE:,} FLOPs more" in str(ledger)
