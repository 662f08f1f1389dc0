"""Kernels read from their bodies: without a grid, with any name, on tensor cores."""

from __future__ import annotations

import re
import zlib

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.dumps import ProgramDump
from mfu_jax.flops.executed.counting import counter_of, executed_flops
from mfu_jax.flops.executed.instruction_costs import costs_of
from mfu_jax.flops.executed.kernels import triton
from mfu_jax.flops.executed.kernels.bodies.attributes import mlir_integer, mlir_string
from mfu_jax.flops.executed.kernels.bodies.reader import strings_of
from mfu_jax.flops.executed.kernels.bodies.walk import grid_flops
from mfu_jax.flops.lengths import Lengths
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import count_program, given_model
from tests.support import program_kernel_bodies as programs
from tests.support.jax_versions import (
    VERSION,
    reads_recorded_kernels,
    reads_recorded_tensor_cores,
)
from tests.support.recorded import count, text_of
from tests.support.tensor_core_kernels import BODIES, ONE, hlo_of, kernel


@reads_recorded_kernels
@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_kernels_without_a_grid_run_once_whatever_their_names_are(chip: str) -> None:
    executed = count(f"{chip}_misnamed")
    one = 2 * programs.SIZE**3
    assert executed.kernels == {"TopK": one, "Pin": 3 * one, "threefry2x32_mlp": 2 * one}
    assert executed.total == 6 * one
    assert executed.unaccounted == ()


CALL = """HloModule step
ENTRY main {{
  x = f32[8,16] parameter(0)
  ROOT {name} = f32[8,32] custom-call(x), custom_call_target="{target}"
}}"""


@pytest.mark.parametrize("name", ["TopK", "Pin", "Sharding", "threefry2x32_mlp", "CreateBuffer"])
def test_a_name_makes_no_kernel_free(name: str) -> None:
    (item,) = executed_flops(CALL.format(name=f"{name}.1", target="their_kernel")).unaccounted
    assert item.name == "their_kernel"


@pytest.mark.parametrize("target", ["TopK", "Pin", "Sharding", "cu_threefry2x32_ffi"])
def test_xlas_own_targets_that_multiply_nothing_are_free(target: str) -> None:
    executed = executed_flops(CALL.format(name="custom-call.1", target=target))
    assert (executed.total, executed.unaccounted) == (0, ())


@pytest.mark.parametrize("name", BODIES)
def test_every_warp_group_that_gets_there_multiplies(name: str) -> None:
    body, products = BODIES[name]
    executed = executed_flops(hlo_of(kernel(body)))
    assert executed.total == products * ONE
    assert executed.by_dtype == {"f16": executed.total}
    assert executed.unaccounted == ()


@reads_recorded_tensor_cores
def test_wgmma_in_a_warp_specialised_pipeline_of_clusters() -> None:
    executed = count("h100_wgmma")
    assert executed.total == 2 * programs.M * programs.N * programs.K
    assert executed.by_dtype == {"bf16": executed.total}
    assert executed.unaccounted == ()


@reads_recorded_tensor_cores
def test_wgmma_in_causal_attention() -> None:
    # 64 queries by 64 keys: 1 + 2 + 3 + 4 of 16 blocks, for scores and for values.
    blocks = programs.BATCH * programs.HEADS * 10
    executed = count("h100_wgmma_attention")
    assert executed.total == 2 * blocks * (2 * 64 * 64 * programs.HEAD_DIM)
    assert executed.attention_kernels == executed.total
    assert executed.unaccounted == ()


@reads_recorded_kernels
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("h100_wgmma", ("module = ", "modules = ")),
        ("h100_wgmma", (r"ML\EFR", r"ML\EFS")),
        ("h100_triton", ("grid_x = ", "grid_w = ")),
        ("h100_triton", (r"ML\EFR", r"ML\EFS")),
        ("h100_wgmma", (r"wgmma.mma_async.sync.aligned", r"wgmma.mma_async.sp.sync.aligned")),
        ("h100_wgmma", (r"wgmma.mma_async", r"\FFgmma.mma_async")),  # no UTF-8
    ],
)
def test_a_body_that_cannot_be_read_is_listed(name: str, changed: tuple[str, str]) -> None:
    old, new = changed
    text = text_of(name)
    assert old in text
    executed = executed_flops(text.replace(old, new))
    assert executed.total == 0
    assert all("kernel_flops=" in item.reason for item in executed.unaccounted)
    assert len(executed.unaccounted) == len(re.findall(r"= \S.* custom-call\(", text))


def test_strings_of_bytecode_are_found_without_parsing_it() -> None:
    module = mlir_string(text_of("h100_wgmma"), "module")
    assert module is not None
    assert b"wgmma.mma_async.sync.aligned" in strings_of(module).decode().encode()
    with pytest.raises(ValueError, match=r"not found|without its strings"):
        strings_of(module[:40])


def test_attributes_in_mlirs_notation() -> None:
    tail = r'backend_config={grid_x = 8 : i32, ir = "ML\EFR\5C\22\\n", name = "ir"}'
    assert mlir_string(tail, "ir") == b'ML\xefR\\"\\n'
    assert mlir_string(tail, "name") == b"ir"
    assert mlir_string(tail.replace("5C", "G"), "ir") == b'ML\xefR\\G"\\n'  # no notation of theirs
    assert mlir_integer(tail, "grid_x") == 8
    assert (mlir_string(tail, "module"), mlir_integer(tail, "grid_y")) == (None, None)


@reads_recorded_kernels
def test_cudnns_fp8_attention() -> None:
    batch, length, heads, width = programs.FP8_SHAPE
    matmul = 2 * batch * heads * (length * (length + 1) // 2) * width
    executed = count("h100_cudnn_fp8")
    assert executed.forward == 2 * matmul
    assert executed.backward == 4 * matmul
    assert executed.rematerialized == matmul  # the scores again
    assert set(executed.by_dtype) == {"f8e4m3fn"}
    assert executed.unaccounted == ()


def test_cudnns_attention_with_narrow_values_multiplies_what_einsums_do_below_the_diagonal() -> (
    None
):
    batch, length, heads = programs.NARROW_SHAPE
    q, v = (
        jax.ShapeDtypeStruct((*programs.NARROW_SHAPE, width), jnp.bfloat16)
        for width in (programs.KEY_WIDTH, programs.VALUE_WIDTH)
    )
    gradients = jax.value_and_grad(programs.causal_attention, (1, 2, 3))
    einsums = executed_flops(
        jax.jit(gradients, static_argnums=0).lower("dot_product", q, q, v).compile()
    )
    cudnn = count("h100_cudnn_narrow_values")
    assert cudnn.forward * 2 * length == einsums.forward * (length + 1)
    assert cudnn.backward * 2 * length == einsums.backward * (length + 1)
    scores = 2 * batch * heads * (length * (length + 1) // 2) * programs.KEY_WIDTH
    assert cudnn.rematerialized == scores
    assert cudnn.unaccounted == ()


VISIT = 2 * programs.TILE * programs.WIDTH * programs.HIDDEN  # a tile of rows times one group
TILES = programs.ROWS // programs.TILE


@pytest.mark.full
@reads_recorded_kernels
def test_a_grouped_matmul_is_counted_by_its_cost_estimate_and_says_so() -> None:
    executed = count("v6e_megablox")
    assert (executed.forward, executed.backward) == (TILES * VISIT, 2 * TILES * VISIT)
    assert len(executed.flags) == 3
    assert all("group_sizes=" in flag.text for flag in executed.flags)


@pytest.mark.full(keep=["sizes3", "sizes2", "sizes1", "sizes4"])
@reads_recorded_kernels
@pytest.mark.parametrize(
    "sizes",
    [(128, 128, 128, 128), (100, 200, 0, 212), (1, 1, 1, 509), (0, 0, 512, 0), (7, 0, 0, 0)],
)
def test_given_group_sizes_say_which_tiles_a_grouped_matmul_visits(sizes: tuple[int, ...]) -> None:
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

    _, visits = make_group_metadata(
        group_sizes=jnp.array(sizes),
        m=programs.ROWS,
        tm=programs.TILE,
        start_group=jnp.array(0),
        num_nonzero_groups=programs.GROUPS,
        visit_empty_groups=False,
    )
    executed = executed_flops(text_of("v6e_megablox"), group_sizes=sizes)
    assert executed.total == 3 * int(visits) * VISIT
    rows = 2 * sum(sizes) * programs.WIDTH * programs.HIDDEN
    assert executed.padding == 3 * (int(visits) * VISIT - rows)
    program, given = ProgramDump(text=text_of("v6e_megablox")), Lengths(group_sizes=sizes)
    ledger = count_program(program, given_model(3 * rows), lengths=given).ledger
    assert (ledger.executed, ledger.residual) == (executed.total, 0)
    assert costs_of(counter_of(program, lengths=given)).executed == executed
    assert (executed.flags, executed.unaccounted) == ((), ())


@reads_recorded_kernels
def test_group_sizes_of_other_groups_are_not_used() -> None:
    executed = executed_flops(text_of("v6e_megablox"), group_sizes=(256, 256))
    assert executed.total == 3 * TILES * VISIT
    assert all("the kernel has 4 groups" in flag.text for flag in executed.flags)


@reads_recorded_kernels
def test_xlas_own_ragged_dot_is_a_grouped_matmul() -> None:
    """Eight groups of 64 rows in tiles of 128 rows: eight visits, each of a whole tile."""
    executed = executed_flops(text_of("v5e_moe_ragged"), group_sizes=(64,) * 8)
    assert sum(executed.kernels.values()) == 2 * 8 * (2 * 128 * 128 * 256)
    assert executed.unaccounted == ()


@reads_recorded_kernels
def test_a_matrix_that_ends_within_a_tile_is_multiplied_beyond_it() -> None:
    """[384, 640] in tiles of [256, 256]: 2 × 3 tiles, for four groups of one tile of rows each."""
    executed = executed_flops(text_of("v6e_ragged_tail"), group_sizes=(programs.TILE,) * 4)
    assert executed.on_hardware == 2 * programs.ROWS * 512 * 768
    assert executed.total == 2 * programs.ROWS * 384 * 640
    assert (executed.beyond["tiles, stated"], executed.padding) == (
        executed.on_hardware - executed.total,
        0,
    )


KEYS_AT_ONCE = 4 * programs.PAGE
# Scores and values of the queries that share keys.
BLOCK = 2 * 2 * (programs.QUERY_HEADS // programs.KEY_HEADS) * KEYS_AT_ONCE * 2 * programs.HEAD_DIM


@reads_recorded_kernels
def test_paged_attention_is_bounded_by_its_pages_and_says_so() -> None:
    executed = count("v5e_paged")
    blocks = programs.PAGES_OF_A_SEQUENCE * programs.PAGE // KEYS_AT_ONCE
    assert executed.total == programs.SEQUENCES * programs.KEY_HEADS * blocks * BLOCK
    (flag,) = executed.flags
    assert "upper bound; give sequence_lengths=" in flag.text


@reads_recorded_kernels
def test_paged_attention_runs_the_blocks_that_given_lengths_reach() -> None:
    lengths = (64, 65, 1, 128)
    executed = executed_flops(text_of("v5e_paged"), sequence_lengths=lengths)
    assert executed.total == programs.KEY_HEADS * (1 + 2 + 1 + 2) * BLOCK
    assert (executed.flags, executed.unaccounted) == ((), ())
    (item,) = executed_flops(text_of("v5e_paged"), sequence_lengths=(64,)).unaccounted
    assert "the kernel has 4 sequences" in item.reason


TTIR = b"""module {
  tt.func public @add_kernel(%x: tensor<64x32xf16>, %y: tensor<32x16xf16>) {
    %zero = arith.constant dense<0.0> : tensor<64x16xf32>
    %row = tt.get_program_id x : i32
    %first = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    scf.for %i = %first to %row step %one : i32 {
      %z = tt.dot %x, %y, %zero : tensor<64x32xf16> * tensor<32x16xf16> -> tensor<64x16xf32>
    }
    tt.return
  }
}"""


def message(kernel_call_field: int = 1) -> bytes:
    """What jax-triton stores, as its ``TritonKernelCall.to_proto`` writes it: a grid of 5 × 2."""

    def field(number: int, value: bytes) -> bytes:
        size = len(value)
        return bytes([number << 3 | 2, size & 0x7F | 0x80, size >> 7]) + value

    kernel = field(1, b"add_kernel") + bytes([2 << 3, 4]) + field(5, TTIR)
    call = field(1, kernel) + bytes([2 << 3, 5, 3 << 3, 2])
    return zlib.compress(field(kernel_call_field, call) + field(4, b"add_kernel"))


def hlo_of_jax_triton(config: str, target: str) -> str:
    return f"""HloModule m
ENTRY main {{
  ROOT add.1 = f32[64,16] custom-call(), custom_call_target="{target}", backend_config={config}
}}"""


@pytest.mark.parametrize("target", ["triton_kernel_call", "triton_kernel_call_ffi"])
def test_a_kernel_of_jax_triton(target: str) -> None:
    if target.endswith("ffi"):
        escaped = "".join(f"\\{byte:02X}" for byte in message())
        config = f'{{name = "add_kernel", opaque = "{escaped}"}}'
    else:
        config = '"' + "".join(f"\\{byte:03o}" for byte in message()) + '"'
    executed = executed_flops(hlo_of_jax_triton(config, target))
    assert executed.total == 2 * (0 + 1 + 2 + 3 + 4) * (2 * 64 * 32 * 16)
    assert executed.by_dtype == {"f16": executed.total}
    assert executed.unaccounted == ()


def test_a_kernel_that_triton_chooses_when_it_runs_is_listed() -> None:
    config = '"' + "".join(f"\\{byte:03o}" for byte in message(kernel_call_field=2)) + '"'
    (item,) = executed_flops(hlo_of_jax_triton(config, "triton_kernel_call")).unaccounted
    assert "one of several kernels" in item.reason
    for damaged in ('"abc"', '"\\170\\234"', "{}"):
        text = hlo_of_jax_triton(damaged, "triton_kernel_call")
        assert len(executed_flops(text).unaccounted) == 1


DOT = b"%z = tt.dot %x, %y, %zero : tensor<64x32xf16> * tensor<32x16xf16> -> tensor<64x16xf32>"
WHILE = b"""scf.while (%i = %first) : (i32) -> i32 {
      %goes_on = arith.cmpi slt, %i, %row : i32
      scf.condition(%goes_on) %i : i32
    } do {
    ^bb0(%j: i32):
      DOT
      %next = arith.addi %j, %one : i32
      scf.yield %next : i32
    }"""


def test_a_while_loop_whose_condition_alone_reads_the_position() -> None:
    loop = TTIR[TTIR.index(b"scf.for") : TTIR.index(b"tt.return")]
    ir = TTIR.replace(loop, b"%n = " + WHILE.replace(b"DOT", DOT))
    body = triton.kernel_body(ir, (5, 2, 1))
    assert grid_flops(body, lambda _: ((), ())) == 2 * (0 + 1 + 2 + 3 + 4) * (2 * 64 * 32 * 16)


@pytest.mark.full
@pytest.mark.skipif(VERSION < (0, 10), reason="its signature was another")
def test_jaxs_matmul_for_blackwell_whose_pairs_of_blocks_take_over_the_work_of_others() -> None:
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as blackwell

    m, n, k = 512, 512, 128
    config = blackwell.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=2, collective=True
    )

    def product() -> jax.Array:
        a, b = (jnp.zeros(dims, jnp.float16) for dims in ((m, k), (k, n)))
        return blackwell.matmul_kernel(a, b, config)

    executed, traced = executed_flops(hlo_of(product)), count_model_flops(product)
    assert executed.total == traced.total == 2 * m * n * k
    assert executed.by_dtype == traced.by_dtype == {"f16": executed.total}
    assert executed.unaccounted == traced.unaccounted == ()


def hlo_of_tensor_cores(assembly: str) -> str:
    """A Mosaic GPU kernel of three blocks of eight warps, which all run an instruction."""
    module = f"""module {{
  func.func @kernel() {{
    %one = arith.constant 1 : index
    %blocks = arith.constant 3 : index
    %threads = arith.constant 256 : index
    gpu.launch blocks(%bx, %by, %bz) in (%gx = %blocks, %gy = %one, %gz = %one)
               threads(%tx, %ty, %tz) in (%sx = %threads, %sy = %one, %sz = %one) {{
      llvm.inline_asm has_side_effects asm_dialect = att "{assembly}", "" : () -> ()
      gpu.terminator
    }}
    return
  }}
}}"""
    escaped = module.replace('"', r"\22").replace("\n", r"\0A")
    call = f'custom_call_target="mosaic_gpu_v2", backend_config={{module = "{escaped}"}}'
    return f"HloModule kernel\nENTRY main {{\n  ROOT k.1 = f32[] custom-call(), {call}\n}}"


@reads_recorded_tensor_cores
@pytest.mark.parametrize(
    ("assembly", "flops"),
    [
        # A warp group's 64 × 64 × 16, by two groups; k = 32 of a sparse one has 16 stored.
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 d, a, b;", 2 * 2 * 64 * 64 * 16),
        ("wgmma.mma_async.sp.sync.aligned.m64n64k32.f32.f16.f16 d, a, b;", 2 * 2 * 64 * 64 * 16),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 d, a, b, c;", 8 * 2 * 16 * 8 * 16),
        ("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 d;", 8 * 2 * 16 * 8 * 16),
        (
            "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 d;",
            8 * 2 * 16 * 8 * 16,
        ),
    ],
)
def test_a_sparse_instruction_multiplies_what_is_stored(assembly: str, flops: int) -> None:
    executed = executed_flops(hlo_of_tensor_cores(assembly))
    assert (executed.total, executed.by_dtype) == (3 * flops, {"f16": 3 * flops})
    assert executed.unaccounted == ()


@reads_recorded_tensor_cores
@pytest.mark.parametrize("name", ["mma.other.sync.aligned.m16n8k32", "tcgen05.mma.sp.cta_group::1"])
def test_an_instruction_that_is_not_known_is_listed(name: str) -> None:
    executed = executed_flops(hlo_of_tensor_cores(f"{name}.f16 d;"))
    assert (executed.total, len(executed.unaccounted)) == (0, 1)
