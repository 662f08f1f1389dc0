"""What libtpu 0.0.52 writes: calls around what a SparseCore runs, and sums as matmuls."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.counting import executed_flops

# A gather of Qwen3-235B on 64 TPU7x, as libtpu 0.0.52 writes it, with fewer operands.
TEXT = """HloModule m, num_partitions=4
%called (p: bf16[1,32]) -> bf16[4,32] {
  %p = bf16[1,32] parameter(0)
  ROOT %all-gather.1 = bf16[4,32] all-gather(%p), channel_id=1, replica_groups=mesh['a'=4] {'a'}, \
dimensions={0}, use_global_device_ids=true
}, execution_thread="sparsecore"

%async (q: bf16[1,32]) -> bf16[4,32] {
  %q = bf16[1,32] parameter(0)
  ROOT %call = bf16[4,32] custom-call(%q), custom_call_target="TARGET", \
called_computations={%called}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[1,32]) -> bf16[4,32] {
  %x = bf16[1,32] parameter(0)
  %s = ((bf16[1,32]), bf16[4,32], u32[]) async-start(%x), \
async_execution_thread="sparsecore", calls=%async
  ROOT %d = bf16[4,32] async-done(%s)
}"""


@pytest.mark.parametrize("target", ["TODO(b/522284627)", "TODO(b/1)"])
def test_what_a_sparsecore_runs_counts_and_its_call_is_no_unknown_kernel(target: str) -> None:
    executed = executed_flops(TEXT.replace("TARGET", target))
    assert (executed.total, executed.unaccounted) == (0, ())
    found = [(c.kind, c.bytes, c.group_size, c.times) for c in executed.collectives]
    assert found == [("all-gather", 4 * 32 * 2, 4, 1)]


def test_a_call_to_nothing_is_free_and_a_users_kernel_is_not() -> None:
    """Noop: libtpu 0.0.37 writes dozens into a step with experts."""
    unknown = {
        target: [item.name for item in executed_flops(TEXT.replace("TARGET", target)).unaccounted]
        for target in ("Noop", "mine")
    }
    assert unknown == {"Noop": [], "mine": ["mine"]}


def test_a_sum_over_windows_written_as_a_matmul_is_none() -> None:
    """`cumsum` of experts' row counts, as libtpu 0.0.52 writes it; others of the same sizes."""
    text = """HloModule m
ENTRY %main (x: NUMBERS[12,128], mask: MASK[128,128]) -> NUMBERS[12,128] {
  %x = NUMBERS[12,128] parameter(0)
  %mask = MASK[128,128] parameter(1)
  ROOT %c = NUMBERS[12,128] convolution(%x, %mask), dim_labels=bf_io->bf, \
metadata={op_name="jit(f)/reduce-window.4"}
}"""
    whole = 2 * 12 * 128 * 128
    for numbers, mask, flops in (
        ("s32", "pred", 0),
        ("s32", "s32", whole),
        ("bf16", "pred", whole),  # a one-hot product
    ):
        step = text.replace("NUMBERS", numbers).replace("MASK", mask)
        assert executed_flops(step).total == flops
