"""Attention kernels of recorded programs: the blocks and pairs that their masks keep."""

from __future__ import annotations

from fractions import Fraction

import pytest

from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.traced.counting import pallas_kernel_flops
from tests.support import program_kernels as kernels
from tests.support.jax_versions import reads_recorded_kernels, reads_recorded_triton
from tests.support.recorded import count, index, text_of
from tests.support.reference_model import Shape

# Attention kernels. One forward matmul over all pairs, both of the forward pass twice that.
PAIRS = kernels.BATCH * kernels.HEADS * kernels.LENGTH**2
DENSE = 2 * (2 * PAIRS * kernels.HEAD_DIM)

# (blocks that run, of all blocks): causal in blocks of 128: 1 + … + 8 of 64; in blocks of 256:
# 1 + … + 4 of 16; a window of 256 keys in blocks of 256: two blocks a row, but one in the first;
# the diagonal: one block a row.
BLOCKS = {
    "v5e_flash_causal": (36, 64),
    "v5e_flash_full": (64, 64),
    "v5e_splash_causal": (10, 16),
    "v5e_splash_diagonal": (4, 16),
    "v5e_splash_fused": (10, 16),
    "v5e_splash_mqa": (10, 16),
    "v5e_splash_window": (7, 16),
}


@reads_recorded_kernels
@pytest.mark.parametrize("name", BLOCKS)
def test_tpu_attention_kernels_run_the_blocks_that_their_mask_keeps(name: str) -> None:
    run, of = BLOCKS[name]
    forward = DENSE * run // of
    executed = count(name)
    # Backward in one kernel: S again, dP, dV, dK, dQ. In two: S and dP are computed by each.
    again = forward // 2 if name.endswith("fused") else 3 * forward // 2
    assert executed.forward == forward
    assert executed.backward == 2 * forward
    assert executed.rematerialized == again
    assert executed.attention_kernels == 3 * forward
    assert not executed.unaccounted


@reads_recorded_kernels
@pytest.mark.parametrize(
    ("name", "steps"),
    [("v5e_splash_causal", 16), ("v5e_splash_window", 8), ("v5e_splash_diagonal", 4)],
)
def test_a_record_has_the_steps_of_a_kernels_grid(name: str, steps: int) -> None:
    """Of 4 × 4 blocks, JAX leaves the columns of blocks that a row of them has at most."""
    records = instruction_costs(text_of(name)).records.values()
    found = {record.grid_steps for record in records if record.kernels}
    assert found == {kernels.BATCH * kernels.HEADS * steps}


@reads_recorded_kernels
def test_devices_that_skip_different_blocks_count_their_mean() -> None:
    executed = count("v5e_splash_context")
    # Of 8 rows of blocks, each device has two, which keep 1 + 2, 3 + 4, 5 + 6 or 7 + 8 of them.
    block = 2 * (2 * kernels.HEADS * 128 * 128 * kernels.HEAD_DIM)  # Q·Kᵀ and P·V, forward
    assert executed.forward == block * (3 + 7 + 11 + 15) // 4
    assert executed.backward == 2 * executed.forward
    assert executed.rematerialized == executed.forward // 2
    assert not executed.unaccounted
    forward, backward = (flag.text for flag in executed.flags)
    assert f"{3 * block:,} to {15 * block:,} FLOPs" in forward
    assert "mean of 8 devices" in forward
    assert f"{3 * block * 5 // 2:,} to {15 * block * 5 // 2:,} FLOPs" in backward


@reads_recorded_kernels
def test_xla_sees_only_an_estimate_of_flash_and_nothing_of_splash_attention() -> None:
    flash, splash = count("v5e_flash_causal"), count("v5e_splash_causal")
    assert flash.kernels_xla == 4_328_521_728  # the author's estimate: forward only, not masked
    assert splash.kernels_xla == 0
    reported = index()["v5e_splash_causal"]["xla_reported_flops"]
    assert reported == splash.elementwise_once


L = kernels.LENGTH
KEPT = {
    "h100_cudnn_full": L * L,
    "h100_cudnn_causal": L * (L + 1) // 2,
    "h100_cudnn_mqa": L * (L + 1) // 2,
    "h100_cudnn_window": sum(min(i + 1, kernels.WINDOW) for i in range(L)),
}


@pytest.mark.parametrize("name", KEPT)
def test_cudnn_attention_computes_the_pairs_that_its_mask_keeps(name: str) -> None:
    matmul = 2 * kernels.BATCH * kernels.HEADS * KEPT[name] * kernels.HEAD_DIM
    executed = count(name)
    assert (executed.forward, executed.backward, executed.rematerialized) == (
        2 * matmul,
        4 * matmul,
        matmul,
    )
    assert executed.by_dtype == {"bf16": 7 * matmul}


@pytest.mark.parametrize(
    ("name", "kept", "again"),
    [
        # Blocks of 128 of 512 tokens: 1 + … + 4 of 16; S and dP twice in the backward pass.
        pytest.param("v5e_layers_splash", Fraction(10, 16), 3, marks=reads_recorded_kernels),
        pytest.param("v5e_layers_flash", Fraction(10, 16), 3, marks=reads_recorded_kernels),
        # 512 · 513 / 2 of 512² pairs; S again.
        ("h100_layers_cudnn", Fraction(513, 1024), 1),
    ],
)
def test_attention_kernels_in_scanned_layers_with_full_remat(
    name: str, kept: Fraction, again: int
) -> None:
    shape = Shape(B=8, S=512, D=256)
    layer = {**shape.layer, "attention": int(shape.layer["attention"] * kept)}
    head = 2 * 8 * 512 * 256 * 512
    devices = 8 if name == "v5e_layers_flash" else 1
    executed = count(name)
    assert executed.forward * devices == 4 * sum(layer.values()) + head
    # Splash attention sums o · do with an einsum, 2 FLOPs an element; flash with a plain sum.
    beside = 4 * 2 * 8 * 512 * 256 if name == "v5e_layers_splash" else 0
    assert executed.vector_matmuls == beside
    assert executed.backward == 2 * executed.forward + beside
    # A layer but for its last matmul, and the kernels' own, each half of the forward's two.
    own = again * layer["attention"] // 2
    assert executed.rematerialized * devices == 4 * (sum(layer.values()) - layer["wo"] + own)
    assert executed.attention_kernels * devices == 4 * 3 * layer["attention"] + beside
    assert set(executed.by_dtype) == {"bf16"}
    assert not executed.unaccounted


@reads_recorded_triton
@pytest.mark.filterwarnings("ignore:.*pallas.ops.gpu.attention is deprecated:DeprecationWarning")
def test_triton_kernels_run_the_blocks_that_their_mask_keeps() -> None:
    executed = count("h100_triton")
    assert executed.unaccounted == ()
    # Blocks of 128 queries by 128 keys, causal: 36 of 64; backward's blocks of 32 by 32 for each
    # gradient: 32 · 33 / 2 of 32²; S and dP for both, dV and dK, dQ.
    backward = 7 * DENSE // 2 * 33 // 64
    assert (executed.forward, executed.total) == (DENSE * 36 // 64, executed.forward + backward)
    assert executed.rematerialized == backward * 3 // 7
    assert executed.by_dtype == {"bf16": executed.total}
    _, arguments, _ = kernels.KERNELS["h100"]["triton"]
    traced = pallas_kernel_flops(kernels.triton, *arguments)
    assert {**executed.kernels, "mha_preprocess_backward": 0} == traced
