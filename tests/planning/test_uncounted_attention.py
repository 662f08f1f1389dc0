"""Attention kernels whose blocks the device decides take the time of half of all pairs."""

from __future__ import annotations

import pytest

from mfu_jax.flops.executed.instruction_costs import InstructionRecord
from mfu_jax.flops.executed.instruction_shapes import Array, InstructionShape
from mfu_jax.planning.durations import Durations, Efficiencies
from mfu_jax.planning.targets import parse_target
from mfu_jax.planning.uncounted_attention import half_of_all_pairs

N, T, S, H = 8, 512, 4096, 128  # one of eight devices has a part of the queries, and all keys
PRODUCT = 2 * N * T * S * H // 2
Q, K = Array("bf16", (1, N, T, H)), Array("bf16", (1, N, S, H))
TABLE = Array("s32", (1, 8, 8))


def kernel(name: str, results: tuple[Array, ...], **keys: object) -> InstructionRecord:
    fields = {"unaccounted": ("it skips blocks by a table",), **keys}
    return InstructionRecord(
        name=f"{name}.3",
        module="m",
        computation="main",
        opcode="custom-call",
        op_name=f"jit(f)/vmap(splash)/{name}/pallas_call",
        runs=2,
        shape=InstructionShape(results=results, operand_arrays=(TABLE, Q, K, K)),
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "results", "products"),
    [
        ("splash_mha_fwd_segmented_residuals", (Q,), 2),
        ("splash_mha_dkv_segmented_no_residuals", (K, K), 4),
        ("splash_mha_dkv_segmented_no_residuals", (Q, K, K), 5),
        ("splash_mha_dq_segmented_no_residuals", (Q,), 3),
    ],
)
def test_each_product_of_a_kernel_over_half_of_the_pairs(
    name: str, results: tuple[Array, ...], products: int
) -> None:
    record = kernel(name, results)
    assert half_of_all_pairs(record) == {"bf16": products * PRODUCT}
    target = parse_target(topology="v5e:2x4")  # 197e12 FLOP/s in bf16, by its data sheet
    (duration,) = Durations(target=target, efficiencies=Efficiencies(kernel=0.5)).of(record)
    assert duration.cause == "kernel"
    assert duration.seconds == pytest.approx(2 * products * PRODUCT / 197e12)


def test_other_kernels_and_counted_ones_are_not_guessed() -> None:
    assert half_of_all_pairs(kernel("my_mlp", (Q,))) == {}
    assert half_of_all_pairs(kernel("splash_mha_fwd_residuals", (Q,), unaccounted=())) == {}
