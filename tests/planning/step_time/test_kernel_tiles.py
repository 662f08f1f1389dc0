"""A run's tiles against arithmetic: whole tiles, and those that two groups share twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfu_jax.flops.executed.records import ArrayShape, InstructionRecord, InstructionShape
from mfu_jax.flops.scopes import FlopPhase
from mfu_jax.planning.measured_runs import read_run
from mfu_jax.planning.step_time.durations import Durations, Efficiencies
from mfu_jax.planning.step_time.grouped_matmuls import tiles_of_run, visited_share
from mfu_jax.planning.targets import parse_target

ROWS, GROUPS, EMBED, MLP = 294_912, 64, 2048, 1408  # deepseek2-16b, 24 sequences of 2048
FLOPS = 2 * ROWS * EMBED * MLP


def kernel(
    matrix: str = "wi_0",
    phase: FlopPhase = "forward",
    *,
    of_matrices: bool = False,
    mlp: int = MLP,
) -> InstructionRecord:
    """One of this project's, in tiles of 128 rows."""
    steps = ROWS // 128 + GROUPS - 1
    lists = [ArrayShape("s32", (size,)) for size in (1, GROUPS + 1, steps, steps, 1)]
    inwards, matrices = ArrayShape("bf16", (ROWS, EMBED)), ArrayShape("bf16", (GROUPS, EMBED, mlp))
    outwards = ArrayShape("bf16", (ROWS, mlp))
    read, made = (outwards, matrices) if of_matrices else (matrices, outwards)
    return InstructionRecord(
        name="kernel.1",
        module="m",
        computation="main",
        opcode="custom-call",
        op_name=f"jit(f)/moe/experts/{matrix}/pallas_call",
        phase=phase,
        runs=1,
        flops_by_dtype={"bf16": FLOPS},
        shape=InstructionShape(operand_arrays=(*lists, inwards, read), results=(made,)),
    )


def test_maxtexts_default_tiles_do_not_divide_deepseeks_hidden_width() -> None:
    """512 rows; 2048 is two tiles of 1024, and 1408 is multiplied as 2048."""
    tiles = tiles_of_run({}, EMBED)
    assert tiles
    share = tiles.visited_share(kernel())
    assert share == pytest.approx((576 + 63) / 576 * 2048 / 1408)
    target = parse_target(topology="v5p:2x2x1")  # 459e12 FLOP/s in bf16, by its data sheet
    shares = Efficiencies(grouped_matmul=0.5)
    (duration,) = Durations(target=target, efficiencies=shares, tiles=tiles).of(kernel())
    assert duration.seconds == pytest.approx(FLOPS * share / 459e12 / 0.5)


@pytest.mark.parametrize("keys", [None, {"tile_embed_dim": "2048", "tile_mlp_dim": "704"}])
def test_tiles_take_whole_matrix_units(keys: dict[str, str] | None) -> None:
    """Gemma 4 26B's 704 are multiplied as 768 by units of 256 × 256, as they are by 128 × 128."""
    tiles = tiles_of_run(keys, EMBED) if keys else None
    share = tiles.visited_share if tiles else visited_share
    rows = share(kernel(mlp=704))
    assert rows
    assert share(kernel(mlp=704), 256) == pytest.approx(rows * 768 / 704)
    target, shares = parse_target(topology="tpu7x:2x2x1"), Efficiencies(grouped_matmul=0.5)
    (duration,) = Durations(target=target, efficiencies=shares).of(kernel(mlp=704))
    assert visited_share(kernel(mlp=704), 256) == pytest.approx(_own_rows() * 768 / 704)
    filled = FLOPS * _own_rows() * 768 / 704
    assert duration.seconds == pytest.approx(filled / 1153.5e12 * 0.892 / 0.5)


@pytest.mark.parametrize("share", [1 / 4, 1 / 16])
def test_a_kernel_ends_after_its_own_rows(share: float) -> None:
    """With experts over devices it is given all rows: `without_skipped_rows` leaves it its own."""
    record, tiles = kernel(), tiles_of_run({}, EMBED)
    own = replace(record, flops_by_dtype={"bf16": round(FLOPS * share)})
    times = Durations(
        target=parse_target(topology="tpu7x:2x2x1"), efficiencies=Efficiencies(), tiles=tiles
    )
    (whole,), (part,) = times.of(record), times.of(own)
    assert part.seconds == pytest.approx(share * whole.seconds, rel=1e-6)


def _own_rows() -> float:
    """Rows that the program's kernel multiplies, in tiles of 128, over those that it has."""
    return (ROWS // 128 + GROUPS - 1) * 128 / ROWS


def _seconds_of_experts(tile: tuple[int, int, int]) -> float:
    """A step's grouped kernels in Hy3-295B on 64 TPU7x, 12 sequences, in tiles of megablox."""
    keys = dict(
        zip(("tile_batch_seq", "tile_embed_dim", "tile_mlp_dim"), map(str, tile), strict=True)
    )
    rows, groups, embed, mlp, layers = 12 * 4096 * 8, 192, 4096, 1536, 79
    times = Durations(
        target=parse_target(topology="tpu7x:4x4x4"),
        efficiencies=Efficiencies(),
        tiles=tiles_of_run(keys, embed),
    )
    steps = rows // 512 + groups - 1
    lists = [ArrayShape("s32", (size,)) for size in (1, groups + 1, steps, steps, 1)]
    seconds = 0.0
    for matrix, (wide, narrow) in {"wi": (embed, mlp), "wo": (mlp, embed)}.items():
        matrices = ArrayShape("bf16", (groups, wide, narrow))
        inwards, outwards = ArrayShape("bf16", (rows, wide)), ArrayShape("bf16", (rows, narrow))
        kinds: tuple[tuple[FlopPhase, int, list[ArrayShape], ArrayShape], ...] = (
            ("forward", 2, [inwards, matrices], outwards),  # and again
            ("backward", 1, [outwards, matrices], inwards),
            ("backward", 1, [inwards, outwards], matrices),
        )
        for phase, runs, read, made in kinds:
            record = replace(
                kernel(f"{matrix}_0" if matrix == "wi" else "wo", phase),
                flops_by_dtype={"bf16": 2 * rows * embed * mlp},
                shape=InstructionShape(operand_arrays=(*lists, *read), results=(made,)),
            )
            (duration,) = times.of(record)
            seconds += layers * runs * (2 if matrix == "wi" else 1) * duration.seconds
    return seconds


@pytest.mark.parametrize(
    ("tile", "step"),
    [
        ((256, 2048, 1536), 20.61 * 662.3 / 625.9),
        ((1024, 2048, 1536), 20.61 * 662.3 / 648.4),
        ((512, 1024, 1536), 20.61 * 662.3 / 629.4),
        ((512, 1024, 1024), 25.99),  # MaxText's defaults
    ],
)
def test_a_steps_tiles_cost_what_they_did_in_published_steps(
    tile: tuple[int, int, int], step: float
) -> None:
    """Steps that differ in megablox's tiles alone (gpu-tpu-pedia, TUNING-v7.md, 3.4.6).

    The fastest takes 20.61 s and 662.3 TFLOP/s a chip. By the rows and columns that tiles waste
    alone, the first would be faster and MaxText's defaults 2.2 s slower.
    """
    longer = _seconds_of_experts(tile) - _seconds_of_experts((512, 2048, 1536))
    assert longer == pytest.approx(step - 20.61, abs=0.3)


def test_each_matrix_and_pass_has_tiles_of_its_own() -> None:
    keys = {
        "wi_tile_dlhs_batch_seq": "256",
        "wi_tile_drhs_mlp_dim": "1408",
        "wo_tile_fwd_embed_dim": "768",
    }
    tiles = tiles_of_run(keys, EMBED)
    assert tiles
    rows = (576 + 63) / 576
    backward = tiles.visited_share(kernel(phase="backward"))
    assert backward == pytest.approx((1152 + 63) / 1152 * 2048 / 1408)
    gradient = tiles.visited_share(kernel(phase="backward", of_matrices=True))
    assert gradient == pytest.approx(rows)
    again = tiles.visited_share(kernel("wo", "rematerialized"))
    assert again == pytest.approx(rows * 2304 / 2048 * 2048 / 1408)  # three tiles of 768


def test_older_runs_have_one_tile_for_all_passes() -> None:
    tiles = tiles_of_run({"tile_batch_seq": "128", "tile_weight_dim": "128"}, EMBED)
    assert tiles
    assert tiles.visited_share(kernel()) == pytest.approx((2304 + 63) / 2304)


def test_other_instructions_have_none() -> None:
    tiles = tiles_of_run({}, EMBED)
    assert tiles
    other = InstructionRecord(name="f", module="m", computation="main", opcode="fusion")
    assert tiles.visited_share(other) is None


@pytest.mark.parametrize(
    ("model", "flags", "has_tiles"),
    [
        ("mixtral-8x7b", {}, True),
        ("llama2-7b", {}, False),
        ("mixtral-8x7b", {"sparse_matmul": False, "capacity_factor": 1.25}, False),
        ("mixtral-8x7b", {"megablox": False}, True),  # XLA's kernel, in the same tiles
        ("mixtral-8x7b", {"use_tokamax_gmm": True}, False),
        ("mixtral-8x7b", {"use_tokamax_gmm": True, "wi_tile_fwd_batch_seq": 128}, True),
    ],
)
def test_runs_of_experts_without_slots_have_tiles(
    model: str, flags: dict[str, object], has_tiles: bool
) -> None:
    run = {
        "model_name": model,
        "per_device_batch_size": 1,
        "max_target_length": 4096,
        "hardware": "v5p",
        "topology": "2x2x1",
        "other_flags": flags,
    }
    assert (read_run(run).tiles is not None) == has_tiles
    assert read_run(run).has_tokamax_experts == ("use_tokamax_gmm" in flags)


@pytest.mark.parametrize(
    ("dtype", "sequences", "clock", "published"),
    [
        ("f8e4m3fn", 7, 1.0, 85.5 / 24 * 192 / 189),
        ("bf16", 12, 0.892, 0.362 * 23.54),
    ],
)
def test_tokamaxs_kernels_take_as_long_as_in_published_profiles(
    dtype: str, sequences: int, clock: float, published: float
) -> None:
    """Hy3-295B on 64 TPU7x (gpu-tpu-pedia, TUNING-v7.md): in fp8 at p-state 7, 189 of 192 experts
    take 85.5 of 282.3 s of a host's eight devices in three steps (3.4.7 and 3.4.10); in bfloat16
    at the default clock, experts take 36.2% of a step of 23.54 s (2.7).
    """
    rows, groups, embed, mlp, layers = sequences * 4096 * 8, 192, 4096, 1536, 79
    steps = rows // 512 + groups - 1
    lists = [ArrayShape("s32", (size,)) for size in (1, groups + 1, steps, steps, 1)]
    arrays = [ArrayShape(dtype, (rows, embed)), ArrayShape(dtype, (groups, embed, mlp))]
    record = InstructionRecord(
        name="kernel.1",
        module="m",
        computation="main",
        opcode="custom-call",
        op_name="jit(f)/moe/experts/wi_0/pallas_call",
        runs=1,
        flops_by_dtype={dtype: 2 * rows * embed * mlp},
        shape=InstructionShape(operand_arrays=(*lists, *arrays)),
    )
    tiles = tiles_of_run({"tile_embed_dim": "2048", "tile_mlp_dim": "1536"}, embed)
    target = parse_target(topology="tpu7x:4x4x4")
    shares = Efficiencies()
    times = Durations(target=target, efficiencies=shares, tiles=tiles, has_tokamax_experts=True)
    (duration,) = replace(times, clock=clock).of(record)
    passes = 3 * 4  # three matrices: forward, again, and both gradients
    assert layers * passes * duration.seconds == pytest.approx(published, rel=0.06)
