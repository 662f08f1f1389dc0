"""Attention kernels whose blocks the device decides take the time of half of all pairs."""

from __future__ import annotations

import dataclasses

import pytest

from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord, InstructionShape
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.uncounted_attention import half_of_all_pairs
from mfu_jax.planning.targets import parse_target

N, T, S, H = 8, 512, 4096, 128  # one of eight devices has a part of the queries, and all keys
PRODUCT = 2 * N * T * S * H // 2
Q, K = ArrayShape("bf16", (1, N, T, H)), ArrayShape("bf16", (1, N, S, H))
TABLE = ArrayShape("s32", (1, 8, 8))


def kernel(name: str, results: tuple[ArrayShape, ...], **keys: object) -> InstructionRecord:
    shape = InstructionShape(results=results, operand_arrays=(TABLE, Q, K, K))
    fields = {"unaccounted": ("it skips blocks by a table",), "shape": shape, **keys}
    return InstructionRecord(
        name=f"{name}.3",
        module="m",
        computation="main",
        opcode="custom-call",
        op_name=f"jit(f)/vmap(splash)/{name}/pallas_call",
        runs=2,
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
    name: str, results: tuple[ArrayShape, ...], products: int
) -> None:
    record = kernel(name, results)
    assert half_of_all_pairs(record) == {"bf16": products * PRODUCT}
    target = parse_target(topology="v5e:2x4")  # 197e12 FLOP/s in bf16, by its data sheet
    (duration,) = Durations(target=target, efficiencies=Efficiencies(attention=0.5)).of(record)
    assert duration.cause == "kernel"
    assert duration.seconds == pytest.approx(2 * products * PRODUCT / 197e12)


@pytest.mark.parametrize(
    ("chips", "width", "share"),
    [
        ({"topology": "v6e-8"}, 128, 128 / 256),  # a matrix unit of 256 × 256
        ({"topology": "v6e-8"}, 64, 64 / 256),
        ({"topology": "v6e-8"}, 256, 0.7),
        ({"topology": "v5p-8"}, 128, 0.7),  # of 128 × 128
        ({"topology": "v5p-8"}, 64, 64 / 128),
        ({"hardware": "h100"}, 64, 0.4),
    ],
)
def test_narrow_heads_leave_a_part_of_the_matrix_unit_idle(
    chips: dict[str, str], width: int, share: float
) -> None:
    array = ArrayShape("bf16", (1, N, T, width))
    shape = InstructionShape(results=(array,), operand_arrays=(array,) * 3)
    peak = 10**12
    record = kernel("splash_mha_fwd_residuals", (), unaccounted=(), shape=shape)
    record = dataclasses.replace(record, kernels=("splash",), flops_by_dtype={"bf16": peak})
    target = parse_target(**chips)
    shares = Efficiencies(attention=0.7, kernel=0.4)
    (duration,) = Durations(target=target, efficiencies=shares).of(record)
    assert duration.seconds == pytest.approx(peak / target.chip.peak_flops_per_sec("bf16") / share)


def test_other_kernels_and_counted_ones_are_not_guessed() -> None:
    assert half_of_all_pairs(kernel("my_mlp", (Q,))) == {}
    assert half_of_all_pairs(kernel("splash_mha_fwd_residuals", (Q,), unaccounted=())) == {}
