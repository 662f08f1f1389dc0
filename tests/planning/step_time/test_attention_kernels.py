"""Attention kernels: their time on a TPU; half of all pairs where the device decides the blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord, InstructionShape
from mfu_jax.planning.step_time.attention_kernels import RunsKernel, half_of_all_pairs
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.targets import parse_target

N, T, S, H = 8, 512, 4096, 128  # one of eight devices has a part of the queries, and all keys
PRODUCT = 2 * N * T * S * H // 2
Q, K = ArrayShape("bf16", (1, N, T, H)), ArrayShape("bf16", (1, N, S, H))
TABLE = ArrayShape("s32", (1, 8, 8))


def on(chips: str) -> Durations:
    return Durations(target=parse_target(topology=chips), efficiencies=Efficiencies())


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
    (duration,) = Durations(target=target, efficiencies=Efficiencies()).of(record)
    assert duration.cause == "kernel"
    cycles = N * T * S / 2 / 636 + N * 8 * 8 * products * 367  # softmax, and 8 × 8 steps a head
    assert duration.seconds == pytest.approx(products * PRODUCT / 197e12 + cycles / 1.5e9)


@pytest.mark.parametrize(("block", "left"), [(2048, 2), (1024, 4), (64, 8 * 8)])
def test_larger_blocks_save_steps_of_the_grid(block: int, left: int) -> None:
    """Of 8 × 8 steps a head; 512 queries are one block, 4,096 keys two or four."""
    record = kernel("splash_mha_dq_segmented_no_residuals", (Q,))
    saved = on("v5e-8").saved_by_blocks(record, block)
    assert saved == pytest.approx(N * (8 * 8 - left) * 3 * 367 / 1.5e9)


def test_what_is_no_splash_kernel_has_no_blocks_to_enlarge() -> None:
    matmul = dataclasses.replace(kernel("dot", (Q,)), op_name="jit(f)/dot_general")
    assert on("v5e-8").saved_by_blocks(matmul, 2048) == 0
    gpus = dataclasses.replace(on("v5e-8"), target=parse_target(hardware="h100", devices=8))
    splash = kernel("splash_mha_dq_segmented_no_residuals", (Q,))
    assert gpus.saved_by_blocks(splash, 2048) == 0


@pytest.mark.parametrize(
    ("chips", "changed"),
    [
        ("tpu7x:2x2x1", {"attention": RunsKernel(skips_backward=True)}),
        ("tpu7x:2x2x1", {"clock": 0.9}),
        ("v5p-8", {}),  # whose second core has no sequence to work on
    ],
)
def test_larger_blocks_save_what_a_plan_with_them_is_shorter_by(
    chips: str, changed: dict[str, Any]
) -> None:
    times = dataclasses.replace(on(chips), **changed)
    flops = 5 * 2 * H * N * T * T * 5 // 8

    def compiled(blocks: int) -> InstructionRecord:
        array = ArrayShape("bf16", (1, N, T, H))
        tables = (ArrayShape("s8", (1, blocks, blocks)),)
        shape = InstructionShape(results=(array,) * 3, operand_arrays=(*tables, *(array,) * 3))
        record = kernel("splash_mha_dkv_no_residuals", (), unaccounted=(), shape=shape)
        return dataclasses.replace(record, kernels=("splash",), flops_by_dtype={"bf16": flops})

    (before,), (after,) = times.of(compiled(8)), times.of(compiled(2))
    saved = times.saved_by_blocks(compiled(8), T // 2)
    assert saved == pytest.approx(before.seconds - after.seconds)
    assert saved > 0.1 * before.seconds


@pytest.mark.parametrize(
    ("chips", "width", "share", "cycles_per_sec"),
    [
        ({"topology": "v6e-8"}, 128, 128 / 256, 1.75e9),  # a matrix unit of 256 × 256
        ({"topology": "v6e-8"}, 64, 64 / 256, 1.75e9),
        ({"topology": "v6e-8"}, 256, 1, 1.75e9),
        ({"topology": "tpu7x:2x2x1"}, 128, 128 / 256, 2.2e9),
        ({"topology": "v5p-8"}, 128, 1, 2 * 1.75e9),  # of 128 × 128; a device is two cores
        ({"topology": "v5p-8"}, 64, 64 / 128, 2 * 1.75e9),
        ({"hardware": "h100"}, 64, 0.4, math.inf),  # the share of other kernels
    ],
)
def test_narrow_heads_leave_a_part_of_the_matrix_unit_idle(
    chips: dict[str, str], width: int, share: float, cycles_per_sec: float
) -> None:
    peak = 10**12
    record = counted("splash_mha_fwd_residuals", width, peak, ())
    target = parse_target(**chips)
    (duration,) = Durations(target=target, efficiencies=Efficiencies(kernel=0.4)).of(record)
    softmax = peak / (2 * 2 * width) / 636 / cycles_per_sec
    matmuls = peak / target.chip.peak_flops_per_sec("bf16") / share
    assert duration.seconds == pytest.approx(matmuls + softmax, rel=0.01)


def counted(
    name: str, width: int, flops: int, steps: tuple[int, ...], fused: bool = False
) -> InstructionRecord:
    """A kernel of 64 heads whose FLOPs are known, with a grid of these steps."""
    array = ArrayShape("bf16", (2, 32, T, width))
    tables = (ArrayShape("s8", (1, *steps)),) * 3 if steps else ()
    results = (array,) * (3 if fused else 1)
    shape = InstructionShape(results=results, operand_arrays=(*tables, *(array,) * 3))
    record = kernel(name, (), unaccounted=(), shape=shape)
    return dataclasses.replace(record, kernels=("splash",), flops_by_dtype={"bf16": flops})


@pytest.mark.parametrize(
    ("fused", "blocks", "steps", "milliseconds"),
    [  # 64 heads of 128 on one v6e: blocks in 2^20 pairs; backward is what both take less forward
        (False, 1, (1, 1), 0.165),
        (False, 1, (1, 2), 0.1965),
        (False, 1, (2, 1), 0.1976),
        (False, 3, (2, 2), 0.5163),
        (False, 4, (1, 1), 0.5723),
        (False, 4, (1, 2), 0.5791),
        (False, 3, (2, 4), 0.6059),
        (True, 1, (1, 1), 0.4776 - 0.165),
        (True, 4, (1, 1), 1.5357 - 0.5163),
        (True, 3, (2, 2), 1.5451 - 0.5163),
        (True, 4, (1, 2), 1.5865 - 0.5163),
    ],
)
def test_published_times_of_the_splash_kernel_alone(
    fused: bool, blocks: int, steps: tuple[int, int], milliseconds: float
) -> None:
    products, name = (5, "splash_mha_dkv_no_residuals") if fused else (2, "splash_mha_fwd")
    record = counted(name, 128, products * 2 * 128 * 64 * blocks * 2**20, steps, fused)
    target = parse_target(topology="v6e-1")
    (duration,) = Durations(target=target, efficiencies=Efficiencies()).of(record)
    assert duration.seconds == pytest.approx(milliseconds / 1e3, rel=0.06)


@pytest.mark.parametrize(
    ("tokens", "width", "milliseconds"),
    [
        (4096, 128, 1.19),
        (32768, 128, 55.05),
        (131_072, 128, 823.43),
        (4096, 256, 1.25),
        (32768, 256, 58.11),
        (131_072, 256, 853.37),
    ],
)
def test_published_times_of_tokamaxs_backward_kernel(
    tokens: int, width: int, milliseconds: float
) -> None:
    """32 heads on a TPU7x, with the best blocks (tokamax, microbenchmarks.pdf)."""
    target = parse_target(topology="tpu7x:2x2x1")
    skips = RunsKernel(skips_backward=True)
    times = Durations(target=target, efficiencies=Efficiencies(), attention=skips)

    def seconds(block: int) -> float:
        array, blocks = ArrayShape("bf16", (1, 32, tokens, width)), tokens // block
        tables = (ArrayShape("s8", (1, blocks, blocks)),) * 3
        shape = InstructionShape(results=(array,) * 3, operand_arrays=(*tables, *(array,) * 3))
        pairs = 32 * blocks * (blocks + 1) // 2 * block**2
        record = kernel("splash_mha_dkv_no_residuals", (), unaccounted=(), shape=shape)
        flops = {"bf16": 5 * 2 * width * pairs}
        record = dataclasses.replace(record, kernels=("splash",), flops_by_dtype=flops)
        (duration,) = times.of(record)
        return duration.seconds

    best = min(map(seconds, (1024, 2048, 4096)))
    assert best == pytest.approx(milliseconds / 1e3, rel=0.06)


def test_a_constant_maximum_leaves_half_of_the_softmax_of_the_forward_kernel_alone() -> None:
    target = parse_target(topology="tpu7x:2x2x1")
    plain = Durations(target=target, efficiencies=Efficiencies())
    constant = dataclasses.replace(plain, attention=RunsKernel(constant_maximum=True))
    pairs = 64 * 4 * 2**20
    for products, fused, saved in ((2, False, 0.52 * pairs / 636 / 2.2e9), (5, True, 0.0)):
        name = "splash_mha_dkv_no_residuals" if fused else "splash_mha_fwd"
        record = counted(name, 128, products * 2 * 128 * pairs, (1, 1), fused)
        (before,), (after,) = plain.of(record), constant.of(record)
        assert before.seconds - after.seconds == pytest.approx(saved)


@pytest.mark.parametrize("fused", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("kept", "visited"), [(10, 10), (16, 16), (7, 16)], ids=str)
def test_tokamaxs_kernel_has_steps_for_the_blocks_that_a_mask_keeps(
    kept: int, visited: int, fused: bool
) -> None:
    """Of 4 × 4 blocks of 1024; to a window, JAX's grid is cut as well."""
    products, name = (5, "splash_mha_dkv_no_residuals") if fused else (2, "splash_mha_fwd")
    target = parse_target(topology="tpu7x:2x2x1")
    plain = Durations(target=target, efficiencies=Efficiencies())
    own = RunsKernel(skips_forward=not fused, skips_backward=fused)
    other = RunsKernel(skips_forward=fused, skips_backward=not fused)
    flops = products * 2 * 128 * 64 * T * T * kept // 16
    record = counted(name, 128, flops, (4, 4), fused)
    before, skipped, as_before = (
        next(dataclasses.replace(plain, attention=runs).of(record)).seconds
        for runs in (RunsKernel(), own, other)
    )
    assert before - skipped == pytest.approx(64 * (16 - visited) * products * 367 / 2.2e9)
    assert as_before == before


@pytest.mark.parametrize(
    ("chips", "sequences", "cores"),
    [
        ("v5p-8", (), 1),
        ("v5p-8", (1,), 1),
        ("v5p-8", (2,), 2),
        ("v5p-8", (3,), 3 / 2),  # two on one core, then one on the other
        ("v4-8", (1,), 1),
        ("v5e-4", (1,), 2),  # of one core, as before
        ("tpu7x:2x2x1", (1,), 2),
    ],
)
def test_a_backward_kernel_takes_a_core_for_each_sequence(
    chips: str, sequences: tuple[int, ...], cores: float
) -> None:
    """None of its own dimensions is parallel, but those that `vmap` adds (MaxText's #4755)."""
    times = Durations(target=parse_target(topology=chips), efficiencies=Efficiencies())
    array = ArrayShape("bf16", (*sequences, 4, T, H))
    flops = {"bf16": 10**12}

    def seconds(name: str, runs: RunsKernel) -> float:
        shape = InstructionShape(results=(array,) * 3, operand_arrays=(array,) * 3)
        record = kernel(name, (), unaccounted=(), shape=shape, grid_steps=4)
        record = dataclasses.replace(record, kernels=("splash",), flops_by_dtype=flops)
        (duration,) = dataclasses.replace(times, attention=runs).of(record)
        return duration.seconds

    backward, split = "splash_mha_dkv_no_residuals", RunsKernel(splits_backward=True)
    both = seconds(backward, split)
    assert seconds(backward, RunsKernel()) == pytest.approx(both * 2 / cores, rel=1e-3)
    assert seconds("splash_mha_fwd", split) == seconds("splash_mha_fwd", RunsKernel())


def test_other_kernels_and_counted_ones_are_not_guessed() -> None:
    assert half_of_all_pairs(kernel("my_mlp", (Q,))) == {}
    assert half_of_all_pairs(kernel("splash_mha_fwd_residuals", (Q,), unaccounted=())) == {}
