"""The executed count on recorded programs of real compiles: TPU v4 to 7x, H100, CPU.

Expected numbers are hand arithmetic on the shapes (`program_list`, `reference_model`), written out
here where XLA merged or repeated work. `tests/support/record_programs.py` makes the
recordings again.
"""

from __future__ import annotations

import base64

import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.ledger import compare_flops
from tests.support import program_kernels as kernels
from tests.support import program_models as models
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.paths import RECORDED
from tests.support.program_list import PROGRAMS
from tests.support.record_programs import without_paths
from tests.support.recorded import count, index, names, text_of
from tests.support.reference_model import Shape


def test_every_recorded_program_has_its_line_in_the_index() -> None:
    names = sorted(path.name.removesuffix(".hlo.xz") for path in RECORDED.glob("*.hlo.xz"))
    assert list(index()) == names
    lines = (RECORDED / "index.json").read_text().splitlines()
    assert [line.split('"')[1] for line in lines[1:-1]] == names


# XLA's CPU compiler drops the barriers that keep rematerialised work apart and then merges equal
# matmuls. In the unrolled float32 step the attention part of every layer but the last merges with
# the forward pass.
_LAYER = Shape().layer
MERGED = {"cpu_unrolled_full": 3 * (_LAYER["qo"] + _LAYER["kv"] + _LAYER["attention"])}

# Compiling these two crashes libtpu 0.0.42.1.
CRASHES = {"tpu7x_scan_full_mixed", "tpu7x_unrolled_full_mixed"}

MATRIX = [name for name in names(r"\w+?_(scan|unrolled|mesh)_.*") if name not in CRASHES]


@pytest.mark.parametrize("name", MATRIX)
def test_the_matrix_runs_what_its_shapes_say(name: str) -> None:
    program = PROGRAMS[name]
    executed = count(name)
    assert program.flops is not None
    assert executed.total - executed.duplicated == program.flops - MERGED.get(name, 0)
    assert sum(executed.by_scope.values()) == sum(executed.by_dtype.values()) == executed.total
    assert not executed.unaccounted
    assert executed.optimizer == executed.other == 0


@pytest.mark.parametrize("name", names("v5e_patterns_.*"))
def test_what_tpus_write_in_ways_of_their_own(name: str) -> None:
    executed = count(name)
    assert executed.total == PROGRAMS[name].flops
    assert not executed.flags


# Where XLA dropped the op_names of attention matmuls of two layers alike, their phase is a guess.
GUESSED = {"cpu_scan_minimal_mixed", "cpu_unrolled_minimal_mixed"}


@pytest.mark.parametrize("name", [n for n in MATRIX if n not in GUESSED | set(MERGED)])
def test_the_matrix_is_split_into_phases(name: str) -> None:
    program = PROGRAMS[name]
    executed = count(name)
    assert program.flops is not None
    model = program.flops - program.rematerialized
    phases = (executed.forward, executed.backward, executed.rematerialized)
    if not executed.duplicated:
        assert phases == (model // 3, 2 * model // 3, program.rematerialized)
    else:  # work that XLA repeats counts for the phase that it repeats
        assert executed.backward == 2 * model // 3
        assert executed.forward >= model // 3
        assert executed.rematerialized >= program.rematerialized


def test_v6e_computes_logits_and_scores_again_instead_of_storing_them() -> None:
    head = 2 * 2 * 128 * 64 * 512
    scores = 4 * _LAYER["attention"] // 2
    assert count("v6e_scan_none").duplicated == head
    # In bf16 with minimal remat the scores of each layer are computed three times.
    assert count("v6e_scan_minimal_mixed").duplicated == head + 2 * scores


def test_reference_numbers_on_all_platforms() -> None:
    for platform in ("cpu", "v5e", "h100"):
        assert count(f"{platform}_scan_none").total == 452_984_832
        assert count(f"{platform}_scan_full").total == 553_648_128
    assert count("v4_scan_full").total == 553_648_128


@pytest.mark.parametrize("name", ["v5e_mesh_8x1x1", "v5p_llama70b", "cpu_scan_full"])
def test_xla_reported_is_explained_but_for_a_ten_thousandth(name: str) -> None:
    executed = count(name)
    reported = index()[name]["xla_reported_flops"]
    ledger = compare_flops(model=executed.total, executed=executed, xla_reported=reported)
    assert ledger.xla_reported == ledger.executed + sum(cause.flops for cause in ledger.causes)
    assert abs(ledger.causes[-1].flops) < reported / 10_000


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("h100_cublas", "bf16"),
        ("h100_fp8_cublas", "f8e4m3fn"),
        ("h100_fp8", "bf16"),  # Triton's fusion widens the operands before it multiplies
        ("tpu7x_fp8", "f8e4m3fn"),
    ],
)
def test_library_matmuls_by_dtype(name: str, dtype: str) -> None:
    assert count(name).by_dtype == {dtype: 2 * 256 * 512 * 1024}


def test_mixture_of_experts() -> None:
    for platform in ("cpu", "v5e", "v5p", "v6e", "tpu7x", "h100"):
        dense, capacity = count(f"{platform}_moe_dense"), count(f"{platform}_moe_capacity")
        assert dense.total == models.MOE_DENSE_FLOPS
        assert capacity.total == models.MOE_CAPACITY_FLOPS
        slots = capacity.by_scope["dispatch"] + capacity.by_scope["combine"]
        assert slots == models.MOE_DISPATCH_FLOPS
    # TPU kernels multiply each row with its expert; CPU and GPU programs with all eight.
    router, rows = models.ROUTER_FLOPS, models.MOE_RAGGED_FLOPS - models.ROUTER_FLOPS
    assert count("v5e_moe_ragged").total == router + rows
    for platform in ("cpu", "h100"):
        assert count(f"{platform}_moe_ragged").total == router + models.EXPERTS * rows


def test_the_ledger_of_a_mixture_names_what_its_dispatch_adds() -> None:
    model = models.MOE_RAGGED_FLOPS  # each token in its two experts
    for platform in ("cpu", "v5e", "h100"):
        executed = count(f"{platform}_moe_capacity")
        slots = {scope: executed.by_scope[scope] for scope in ("dispatch", "combine")}
        ledger = compare_flops(
            model=model,
            executed=executed,
            overheads={"MoE one-hot and dispatch matmuls": sum(slots.values())},
        )
        assert [line.flops for line in ledger.lines if "MoE" in line.label] == [
            models.MOE_DISPATCH_FLOPS
        ]
        assert ledger.residual == 0
        # Of eight experts that all compute every token, six compute it for nothing.
        idle = models.TOKENS * (models.EXPERTS - models.TOP) * models.EXPERT_FLOPS
        ledger = compare_flops(
            model=model,
            executed=count(f"{platform}_moe_dense"),
            overheads={"experts that were not chosen": idle},
        )
        assert ledger.residual == 0


@pytest.mark.full
def test_resnet50_by_its_table() -> None:
    """Only kernel positions on real pixels count; the first layer needs no input gradient."""
    forward = []
    for size, stride, inputs, outputs, pixels in models.resnet_layers():
        pad = size // 2
        steps = (pixels + 2 * pad - size) // stride + 1
        real = sum(
            0 <= step * stride + k - pad < pixels for step in range(steps) for k in range(size)
        )
        forward.append(2 * models.IMAGES * real * real * inputs * outputs)
    forward.append(2 * models.IMAGES * 2048 * 1000)
    assert len(forward) == 53 + 1
    executed = count("cpu_resnet50")
    assert executed.forward == sum(forward)
    assert executed.backward == 2 * sum(forward) - forward[0]
    # cuDNN's forward pass is the same; its backward pass and TPUs compute on padded arrays.
    assert count("h100_resnet50").forward == sum(forward)
    assert count("v5e_resnet50").total > executed.total


PLATFORMS = "cpu|v5e|v5p|v6e|tpu7x|h100"
EXACT = names(rf"({PLATFORMS})_(lstm|loops_(?!data)\w+|branches)")


@pytest.mark.parametrize("name", EXACT)
def test_loops_and_branches(name: str) -> None:
    executed = count(name)
    assert executed.total == PROGRAMS[name].flops
    assert not executed.unaccounted
    assert len(executed.flags) == name.endswith("branches")


def test_a_loop_over_data_is_listed_and_can_be_given_its_count() -> None:
    for platform in PLATFORMS.split("|"):
        name = f"{platform}_loops_data"
        executed = count(name)
        assert [item.name for item in executed.unaccounted] == ["while"]
        assert executed.total == models.ONE
        (loop,) = executed.unaccounted
        assert loop.reason.endswith(f"give trip_counts={{{loop.where!r}: …}}")  # can be copied
        known = executed_flops(text_of(name), trip_counts={loop.where: 9})
        assert (known.total, known.unaccounted) == (9 * models.ONE, ())


def test_ffts_and_factorisations_are_counted_by_the_textbook() -> None:
    rows = 64
    fft = rows * 5 * rows * (rows.bit_length() - 1)  # complex, of a power of 2
    for platform in ("cpu", "h100"):
        assert count(f"{platform}_fft").total == fft + models.ONE
    # A TPU's FFT of 64 complex rows is matmuls: three of 64 × 64 × 64 (Gauss), and then ours.
    assert count("v5e_fft").total == 4 * models.ONE
    for platform in PLATFORMS.split("|"):
        executed = count(f"{platform}_cholesky")
        assert executed.total == rows**3 // 3 + models.ONE
        assert executed.unaccounted == ()


@reads_recorded_kernels
def test_llama_70b_on_512_chips_to_the_last_flop() -> None:
    shape, chips = kernels.LLAMA_70B, 512
    executed = count("v5p_llama70b")
    layer = dict(shape.layer)
    blocks = shape.S // 128
    # Causal flash attention in blocks of 128: 1 + … + 64 of 64² blocks.
    layer["attention"] = layer["attention"] * (blocks + 1) // (2 * blocks)
    head = 2 * shape.B * shape.S * shape.D * shape.V
    forward = (shape.L * sum(layer.values()) + head) // chips
    assert executed.forward == forward
    assert executed.backward == 2 * forward
    # Again: every layer but for its last matmul, and in the attention's backward pass three of
    # seven matmuls, each half of the forward's two.
    again = shape.L * (sum(layer.values()) - layer["wo"] + 3 * layer["attention"] // 2) // chips
    assert executed.rematerialized == again
    reported = index()["v5p_llama70b"]["xla_reported_flops"]
    exact_pairs = 3 * shape.L * shape.layer["attention"] * (shape.S + 1) // (2 * shape.S) // chips
    dense = 3 * shape.forward // chips
    masked = 3 * shape.L * shape.layer["attention"] // chips - exact_pairs
    ledger = compare_flops(
        model=dense - masked,
        convention="exact",
        attention=exact_pairs,
        executed=executed,
        xla_reported=reported,
    )
    assert ledger.residual == 0
    assert executed.total == 9_134_399_006_179_328
    assert reported < executed.total / 40


def test_collectives_of_a_sharded_step() -> None:
    executed = count("v5p_llama70b")
    shape = kernels.LLAMA_70B
    # The MLP's weights are split over 512 chips; each layer puts them together (XLA writes these
    # all-gathers as all-reduces) for forward, forward again and backward, and sums a gradient.
    whole = 2 * shape.D * shape.F
    large = [c for c in executed.collectives if c.bytes == whole]
    assert sum(c.times for c in large) == 2 * 3 * shape.L
    assert {c.group_size for c in large} == {512}
    weights = shape.L * 2 * shape.D * shape.F
    assert executed.hbm_bytes > 3 * 2 * weights  # read at least forward, again, and backward


def test_collectives_of_every_mesh_know_their_group() -> None:
    for name in names(r"\w+_mesh_.*"):
        executed = count(name)
        assert executed.collectives
        devices = 1
        for size in name.rpartition("_")[2].split("x"):
            devices *= int(size)
        assert all(1 <= c.group_size <= devices for c in executed.collectives)


@pytest.mark.parametrize("platform", ["v5e", "v5p", "v6e", "h100"])
def test_a_collective_that_is_spread_over_several_fusions_counts_once(platform: str) -> None:
    """v5e's program holds each all-gather once, and again in all fusions that it goes on behind."""
    gathers = [c for c in count(f"{platform}_mesh_1x8x1").collectives if c.kind == "all-gather"]
    layer = 2 * (4 * 64 * 64 + 2 * 64 * 256)  # bytes of q, k, v, o, wi and wo
    head, tokens = 2 * 64 * 512, 4 * 8 * 128
    # All weights of a layer for the forward pass and again for the backward pass.
    assert sum(c.bytes * c.times for c in gathers) == 2 * 4 * layer + head + tokens


def test_recorded_programs_hold_no_path_of_the_machine_that_compiled_them() -> None:
    body = base64.b64encode(b"ML\0/home/me/kernels/mine.py\0end").decode()
    text = f'"/home/me/step.py" ir = "ML\\00/home/me/mine.py\\00" "body":"{body}"'
    clean = without_paths(text)
    assert '"step.py"' in clean
    assert len(clean) == len(text) - len("/home/me/")
    assert b"/home" not in base64.b64decode(clean.rpartition('":"')[2].rstrip('"'))
    assert "/home" not in clean
