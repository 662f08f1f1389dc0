"""GPT-2 124M compiled for and run on an H100: library calls, copies of slices, precision."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfu_jax.dumps import load
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.instruction_costs import instruction_costs
from mfu_jax.flops.executed.records import MatmulShape, ProgramCosts
from mfu_jax.flops.ledger import compare_flops

DATA = Path(__file__).parents[2] / "data"
TOKENS, WIDTH, HIDDEN = 32 * 1024, 768, 3072
SLICE = TOKENS * WIDTH * 2  # bytes of one layer's activations


@pytest.fixture(scope="module")
def costs() -> ProgramCosts:
    return instruction_costs(load(DATA / "h100_gpt2.mfu"))


def test_a_library_calls_matmul_has_its_shape(costs: ProgramCosts) -> None:
    shapes = [
        record.shape.matmul
        for record in costs.records.values()
        if record.shape.target == "__cublas$lt$matmul" and "mlp/wi_0" in record.scope
    ]
    assert sorted(shapes) == [
        MatmulShape(1, WIDTH, HIDDEN, TOKENS),
        MatmulShape(1, TOKENS, WIDTH, HIDDEN),
        MatmulShape(1, TOKENS, HIDDEN, WIDTH),
    ]


def test_an_asynchronous_update_of_a_slice_moves_the_slice_only(costs: ProgramCosts) -> None:
    """The array of all twelve layers stays where it is."""
    keeps = costs.records["fusion-start.6"]  # one layer's keys
    assert keeps.opcode == "fusion-start"
    assert keeps.hbm_bytes == pytest.approx(2 * SLICE, abs=16)
    assert all(
        record.computation != "fused_dynamic_update_slice.20.clone"
        for record in costs.records.values()
    )


_CALL = """HloModule jit_f

ENTRY %main (a: f32[64,32], b: f32[32,128]) -> f32[64,128] {{
  %a = f32[64,32]{{1,0}} parameter(0)
  %b = f32[32,128]{{1,0}} parameter(1)
  %c = (f32[64,128]{{1,0}}, s8[1024]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{"alpha_real":1,"beta":0,"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},"precision_config":{{"operand_precision":["{0}","{0}"],"algorithm":"ALG_UNSET"}},"epilogue":"DEFAULT"}}}}
  ROOT %out = f32[64,128]{{1,0}} get-tuple-element(%c), index=0
}}
"""  # noqa: E501
_DOT = """HloModule jit_f

ENTRY %main (a: f32[64,32], b: f32[32,128]) -> f32[64,128] {{
  %a = f32[64,32]{{1,0}} parameter(0)
  %b = f32[32,128]{{1,0}} parameter(1)
  ROOT %c = f32[64,128]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{0}
}}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "is_full"),
    [
        (_CALL.format("HIGHEST"), True),
        (_CALL.format("DEFAULT"), False),
        (_DOT.format(", operand_precision={highest,highest}"), True),
        (_DOT.format(""), False),
        (_DOT.format(", algorithm=dot_f32_f32_f32"), True),
        (_DOT.format(", algorithm=dot_tf32_tf32_f32"), False),
    ],
)
def test_precision_that_rules_out_tf32(text: str, is_full: bool) -> None:
    record = instruction_costs(text).records["c"]
    assert record.flops == 2 * 64 * 32 * 128
    assert record.shape.matmul == MatmulShape(1, 64, 128, 32)
    assert record.shape.is_full_float32 is is_full


def test_experts_that_run_on_every_token() -> None:
    """XLA for GPUs computes `ragged_dot` as cuBLAS calls whose other experts' rows are zeros.

    16 experts, 16 layers, 16,384 tokens of which each has two experts; three products, forward,
    twice backward, and again: 12 of 2 · 32,768 · 16 · 1,024 · 1,792 FLOPs a layer, 15/16 on zeros.
    What is computed again is counted as such.
    """
    dump = load(DATA / "h100_experts.mfu")
    executed = executed_flops(dump)
    product = 2 * 32_768 * 16 * 1024 * 1792
    assert executed.expansion == 16 * 9 * product * 15 // 16
    assert dump.model is not None
    model = dump.model.per_device
    ledger = compare_flops(model=model, executed=executed, convention=dump.model.convention)
    masked = [line.flops for line in ledger.lines if line.label == "masked pairs"]
    assert ledger.residual + sum(masked) < executed.total / 1e5  # pairs in the kernels' blocks
