"""What a GPU multiplies beyond the mathematics, beside an H100's own counters.

tests/data/h100_counters.yaml has what Nsight Compute counted; the programs are those of
`program_silicon`, compiled for an H100.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import yaml

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.formulas.tiles import (
    beyond_library_tile,
    library_tile,
    pairs_in_blocks,
)
from mfu_jax.flops.ledger import compare_flops
from tests.support.paths import DATA
from tests.support.recorded import count

# Program → how its row in the file begins.
ROWS = {
    "mlp": "mlp bf16",
    "mlp_float32": "mlp float32, default",
    "mlp_highest": "mlp float32, precision highest",
    "fp8": "fp8 (e4m3)",
    "odd": "a single matmul",
    "attention": "cuDNN flash attention, causal",
    "attention_full": "the same, forward, not causal",
    "decode": "decode: 8 scanned",
    "ragged": "ragged_dot",
    "pallas": "Pallas Triton attention",
    "convolutions": "three 3 x 3 convolutions",
    "depthwise": "depthwise 3 x 3",
}
# cuBLAS chose a tile of 144 for one of five matmuls, and one of 176: its kernels' names say so.
# FFMA units: each of the five products runs 2·m·n·(k + 1), one multiply-add more per result, as in
# α·AB + β·C; the depthwise convolution computes 66 rows (or columns) for 64 and nine window
# positions of each, whether in tiles that make 66 or at padded positions, which is not stated.
FURTHER = {
    "mlp": 2 * 4096 * (57 * 144 - 8192) * 2048,
    "fp8": 2 * 4096 * (24 * 176 - 4096) * 4096,
    "mlp_highest": 2 * (2 * 4096 * 8192 + 4096 * 2048 + 2 * 2048 * 8192),
    "depthwise": 2 * 16 * (66 - 64) * 64 * 256 * 9,
}


def counters(name: str) -> dict[str, Any]:
    rows = yaml.safe_load((DATA / "h100_counters.yaml").read_text())
    (row,) = (row for row in rows if row.get("program", "").startswith(ROWS[name]))
    return dict(row)


@pytest.mark.parametrize("name", ROWS)
def test_executed_and_its_rows_are_what_the_counters_saw(name: str) -> None:
    row, executed = counters(name), count(f"h100_silicon_{name}")
    assert executed.total == row["executed"]
    ledger = compare_flops(model=executed.total, executed=executed)
    beyond = sum(line.flops for line in ledger.beyond)
    assert beyond == executed.on_hardware - executed.total
    assert executed.total + beyond + FURTHER.get(name, 0) == row.get("tensor", row.get("ffma"))


@pytest.mark.parametrize(
    ("name", "model", "ratio", "rows"),
    [
        # Half of all pairs of 2,048: (n + 1) / n of it in n blocks of 128. Seven products.
        (
            "attention",
            7 * 2 * 4 * 16 * 128 * 2048**2 // 2,
            1.0625,
            {"tiles, assumed": 7 * 2 * 4 * 16 * 128 * (16 * 128 * 127 // 2)},
        ),
        (
            "odd",
            2 * 4000 * 1111 * 777,
            1.3993,
            {"tiles, stated": 2 * (4096 * 1152 * 1024 - 4000 * 1111 * 777)},
        ),
        ("decode", 8 * 2 * 4096**2, 8.0, {"tiles, stated": 7 * 8 * 2 * 4096**2}),
        (
            "convolutions",
            157_894_574_080,
            1.0483,
            {
                # 56 outputs see 3 · 56 − 2 elements in each direction: forward and kernel's
                # gradient. 28 outputs: the same, and the input's gradient. Strided, XLA pads them,
                # and the input's gradient has (3 · 28 + 2)² positions for 57 × 57 inputs.
                "window positions on padding": 2 * 2 * 32 * 64 * 128 * (168**2 - 166**2)
                + 3 * 2 * 32 * 256 * 256 * (84**2 - 82**2)
                + 2 * 32 * 128 * 256 * (86**2 - 84**2),
                # Its rows in 1,024s: 29², 29 · 28 and 28² of 32 images, with 4, 2 and 1 positions.
                # The kernel's gradient has 9 · 128 columns in 256s.
                "tiles, assumed": 2
                * 128
                * 256
                * (4 * 27 * 1024 + 4 * 26 * 1024 + 25 * 1024 - 32 * 86**2)
                + 2 * 32 * 28**2 * 256 * (1280 - 1152),
            },
        ),
    ],
)
def test_the_table_of_counters_comes_out_of_the_ledgers_rows(
    name: str, model: int, ratio: float, rows: dict[str, int]
) -> None:
    executed = count(f"h100_silicon_{name}")
    ledger = compare_flops(model=model, executed=executed)
    assert {line.label: line.flops for line in ledger.beyond if line.flops} == rows
    assert round((ledger.executed + sum(rows.values())) / model, 4) == ratio


def test_rows_of_zero_are_in_json_only() -> None:
    ledger = compare_flops(model=1, executed=count("h100_silicon_odd"))
    text, html = str(ledger), ledger._repr_html_()
    for shown in (text, html):
        assert "beyond it: tiles, stated" in shown
        assert "tiles, assumed" not in shown
    lines = json.loads(json.dumps(ledger.to_json()))["beyond"]
    assert [line["label"] for line in lines] == [
        "tiles, stated",
        "tiles, assumed",
        "window positions on padding",
    ]
    assert [line["flops"] for line in lines] == [2_757_700_416, 0, 0]


def test_scores_that_cudnn_computes_again_are_not_checkpoints() -> None:
    """Of seven products, the backward pass computes the scores a second time."""
    executed = count("h100_silicon_attention")
    assert executed.rematerialized == executed.recomputed_in_kernels == executed.total // 7
    ledger = compare_flops(model=executed.total, executed=executed)
    (line,) = (line for line in ledger.lines if line.label == "rematerialised")
    assert line.note == "forward work that attention kernels do again in their backward pass"
    both = count("h100_layers_cudnn")
    assert 0 < both.recomputed_in_kernels < both.rematerialized
    (line,) = (
        line
        for line in compare_flops(model=1, executed=both).lines
        if line.label == "rematerialised"
    )
    again = f"by kernels {both.recomputed_in_kernels:,}"
    assert line.note == f"forward work done again by jax.checkpoint; {again}"


_FUSED = """HloModule m

%gemm (a: bf16[3,100,40], b: bf16[3,40,70]) -> bf16[3,100,70] {{
  %a = bf16[3,100,40]{{2,1,0}} parameter(0)
  %b = bf16[3,40,70]{{2,1,0}} parameter(1)
  {0}
  ROOT %d = bf16[3,100,70]{{2,1,0}} dot({1}, %b), lhs_batch_dims={{0}}, rhs_batch_dims={{0}}, lhs_contracting_dims={{2}}, rhs_contracting_dims={{1}}
}}

%inner (p: bf16[3,100,40]) -> bf16[3,100,40] {{
  %p = bf16[3,100,40]{{2,1,0}} parameter(0)
  ROOT %n = bf16[3,100,40]{{2,1,0}} negate(%p)
}}

ENTRY %main (x: bf16[3,100,40], y: bf16[3,40,70]) -> bf16[3,100,70] {{
  %x = bf16[3,100,40]{{2,1,0}} parameter(0)
  %y = bf16[3,40,70]{{2,1,0}} parameter(1)
  ROOT %f = bf16[3,100,70]{{2,1,0}} fusion(%x, %y), kind=kCustom, calls=%gemm, backend_config={{"fusion_backend_config":{2}}}
}}
"""  # noqa: E501
_BLOCKS = '"block_level_fusion_config":{{"output_tiles":[{{"sizes":[{0}]}}]}}'
_NESTED = '{{"kind":"__triton_nested_gemm_fusion",' + _BLOCKS + "}}"
_INNER = (
    "%i = bf16[3,100,40]{{2,1,0}} fusion(%a), kind=kCustom, calls=%inner, "
    'backend_config={{"fusion_backend_config":' + _NESTED + "}}"
)


@pytest.mark.parametrize(
    ("inner", "operand", "config", "products"),
    [
        # Older XLA: three numbers, or a nested fusion that states the contracted tile.
        (
            "",
            "%a",
            '{"kind":"__triton_gemm","triton_gemm_config":'
            '{"block_m":"64","block_n":"32","block_k":"16","split_k":"1"}}',
            3 * 128 * 96 * 48,
        ),
        (
            _INNER.format('"1","64","32"'),
            "%i",
            _NESTED.format('"1","64","32"'),
            3 * 128 * 96 * 64,
        ),
        ("", "%a", _NESTED.format('"2","64","32"'), 4 * 128 * 96 * 40),
        ("", "%a", _NESTED.format('"64","32"'), 3 * 100 * 70 * 40),  # of another rank
        ("", "%a", '{"kind":"__triton"}', 3 * 100 * 70 * 40),
    ],
)
def test_ways_to_state_a_tile(inner: str, operand: str, config: str, products: int) -> None:
    executed = executed_flops(_FUSED.format(inner, operand, config))
    assert executed.total == 2 * 3 * 100 * 70 * 40
    assert executed.on_hardware == 2 * products


def test_blocks_of_attention_by_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(60):
        queries, keys = rng.randint(1, 600), rng.randint(1, 600)
        left, right = rng.choice([-1, rng.randint(0, 300)]), rng.choice([-1, 0, rng.randint(0, 99)])
        touched = {
            (q // 128, k // 128)
            for q, k in itertools.product(range(queries), range(keys))
            if (left < 0 or k >= q - left) and (right < 0 or k <= q + right)
        }
        assert pairs_in_blocks(queries, keys, left, right) == len(touched) * 128**2


@pytest.mark.parametrize(
    ("kernel", "tile"),
    [
        ("nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNT", (144, 128, 64)),
        ("nvjet_sm90_tss_176x128_64x5_2x1_v_bz_coopA_TNT", (176, 128, 64)),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_stage3_cublas", (128, 64, 64)),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", None),
        ("loop_add_fusion", None),
    ],
)
def test_tiles_in_names_of_kernels(kernel: str, tile: tuple[int, int, int] | None) -> None:
    assert library_tile(kernel) == tile


def test_a_librarys_tile_has_the_results_minor_dimension_first() -> None:
    kernel = "nvjet_sm90_tst_144x128_64x6_2x1_v_bz_TNT"
    assert beyond_library_tile(kernel, (1, 4096, 8192, 2048), False) == FURTHER["mlp"]
    assert beyond_library_tile(kernel, (1, 8192, 4096, 2048), True) == FURTHER["mlp"]
    assert beyond_library_tile("a_fusion", (1, 4096, 8192, 2048), False) == 0
    split = "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_splitK_NTN"  # in unknown parts of k
    assert beyond_library_tile(split, (1, 192, 100, 100), False) == 0
    assert beyond_library_tile(split, (1, 192, 100, 128), False) == 2 * 192 * 92 * 128
