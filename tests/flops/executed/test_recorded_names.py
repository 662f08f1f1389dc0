"""Recorded programs for what a count must name: phases, memory pressure, padding, expansion."""

from __future__ import annotations

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.dumps import ProgramDump
from mfu_jax.flops.executed.attribution.padding import BLOCKS, EDGES
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.result import ExecutedCount
from mfu_jax.flops.ledger import compare_flops
from mfu_jax.flops.names import REMOVED, THREE_REAL
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import count_program, traced_model
from tests.support.audit_programs import AUDIT
from tests.support.program_models import MODELS
from tests.support.program_names import (
    BATCH,
    IMAGE,
    IN,
    INTEGERS,
    OUT,
    PRESSED_LAYERS,
    PRESSED_ROWS,
    PRESSED_WIDTH,
    SHARDED_BATCH,
    SHARDS,
    TALL,
    TAPS,
    WIDTH,
    complex_products,
    convolution_of_integers,
    convolution_of_lines,
)
from tests.support.recorded import count, text_of

CHIPS = ("v5e", "v6e", "tpu7x", "h100")


@pytest.mark.parametrize("chip", CHIPS)
def test_phases_follow_the_dataflow_and_not_the_names_of_layers(chip: str) -> None:
    executed = count(f"{chip}_phases")
    one, square = 2 * BATCH * WIDTH * WIDTH, 2 * WIDTH**3
    assert executed.evaluation == 2 * one
    assert executed.forward == 2 * one + executed.evaluation
    assert executed.backward == 3 * one
    assert executed.optimizer == 2 * 2 * square  # two weights, two products each
    assert executed.total == executed.forward + executed.backward + executed.optimizer


@pytest.mark.parametrize("chip", PRESSED_LAYERS)
def test_what_xla_recomputes_to_save_memory_is_a_line_of_its_own(chip: str) -> None:
    executed = count(f"{chip}_memory")
    layers, one = PRESSED_LAYERS[chip], 2 * PRESSED_ROWS[chip] * PRESSED_WIDTH**2
    model = layers * one + (2 * layers - 1) * one
    assert executed.forward == layers * one
    assert executed.backward == (2 * layers - 1) * one
    recomputed = len(re.findall(r"\.remat\d* = ", text_of(f"{chip}_memory")))
    assert executed.xla_rematerialized == recomputed * one > 0
    assert executed.rematerialized == executed.duplicated == 0
    ledger = compare_flops(model=model, executed=executed)
    assert ledger.residual == 0
    labels = {line.label: line.flops for line in ledger.lines}
    assert labels["recomputed by XLA to save memory"] == recomputed * one


@pytest.mark.parametrize("name", ["strided_valid", "strided_grouped", "strided_dilated"])
def test_padded_convolutions_on_h100_have_no_residual(name: str) -> None:
    executed, audit = count(f"h100_{name}"), AUDIT[f"convolution_{name}"]
    model = audit.forward + audit.backward
    assert executed.total == model + executed.padding
    assert executed.padding > 0
    assert compare_flops(model=model, executed=executed).residual == 0


@pytest.mark.parametrize(("chip", "dense"), [("h100", 3), ("v5e", 1)])
def test_ragged_products_that_are_computed_densely(chip: str, dense: int) -> None:
    """On H100 all three products, on v5e the weights' gradient, for each of four groups."""
    executed, audit = count(f"{chip}_ragged_training"), AUDIT["ragged_training"]
    assert executed.expansion == dense * (4 - 1) * audit.forward
    ledger = compare_flops(model=audit.forward + audit.backward, executed=executed)
    assert ledger.residual == 0


def test_an_fft_by_matmuls_has_a_line() -> None:
    """64 rows of 64 points, 5·N·log₂N each; a TPU multiplies them by three tables instead."""
    function, arguments, _ = MODELS["fft"]
    model = count_model_flops(function, *arguments)
    product, fft = 2 * 64 * 64 * 64, 64 * 5 * 64 * 6
    assert model.total == fft + product
    ledger = compare_flops(
        model=model.total, executed=count("v5e_fft"), operations=model.by_operation
    )
    lines = [(line.label, line.flops) for line in ledger.lines]
    assert ("FFT by matmuls", 3 * product - fft) in lines
    assert ledger.residual == 0


def test_an_fft_of_one_axis_after_the_other_is_no_matmul() -> None:
    """Of 32 × 64 real points, a GPU transforms all 33 columns of the half spectrum, then rows."""
    executed = executed_flops("""HloModule m

ENTRY %main (x: c64[4,32,33]) -> f32[4,32,64] {
  %x = c64[4,32,33] parameter(0)
  %t = c64[4,33,32] transpose(%x), dimensions={0,2,1}
  %c = c64[4,33,32] fft(%t), fft_type=IFFT, fft_length={32}, metadata={op_name="jit(f)/fft"}
  %u = c64[4,32,33] transpose(%c), dimensions={0,2,1}
  ROOT %r = f32[4,32,64] fft(%u), fft_type=IRFFT, fft_length={64}, metadata={op_name="jit(f)/fft"}
}
""")
    model = count_model_flops(jnp.fft.irfft2, jax.ShapeDtypeStruct((4, 32, 33), jnp.complex64))
    assert model.total == 4 * 5 * 32 * 64 * 11 // 2
    ledger = compare_flops(model=model, executed=executed)
    beyond = 4 * 33 * 5 * 32 * 5 + 4 * 32 * 5 * 64 * 6 // 2 - model.total
    lines = {line.label: line.flops for line in ledger.lines if line.flops}
    assert lines == {"model": model.total, "FFT of one axis after the other": beyond}
    assert ledger.residual == 0


def test_complex_products_are_four_real_ones_or_three_and_the_ledger_says_so() -> None:
    real = 2 * BATCH * WIDTH * WIDTH
    shapes = [jax.ShapeDtypeStruct((n, WIDTH), jnp.complex64) for n in (WIDTH, BATCH)]
    model = traced_model(complex_products, tuple(shapes), {}, devices=1)
    assert model.complex_products == model.per_device == 2 * 4 * real
    for chip, products in (("h100", 4), ("v5e", 3)):
        ledger = count_program(ProgramDump(text=text_of(f"{chip}_complex")), model).ledger
        labels = {line.label: line.flops for line in ledger.lines}
        assert ledger.executed == 2 * products * real
        assert labels.get(THREE_REAL, 0) == -ledger.removed == -2 * (4 - products) * real
        assert REMOVED not in labels
        assert ledger.residual == 0


def _model_of_lines(batch: int) -> int:
    """Both ends of a line read one tap less; forward and both gradients multiply the same pairs."""
    return 3 * batch * (2 * IN * OUT) * (TAPS * IMAGE - (TAPS - 1))


@pytest.mark.parametrize(
    ("name", "batch", "positions", "label"),
    [
        # Eight blocks of 13 cover a line of 96: each output reads all three taps.
        ("v5e_image_in_blocks", 1, 8 * 13, BLOCKS),
        # The edges that the first and the last device receive are zeros, as any other edge to them.
        ("v5e_image_sharded", SHARDED_BATCH, IMAGE // SHARDS, EDGES),
    ],
)
def test_convolutions_on_pieces_of_images_have_a_line(
    name: str, batch: int, positions: int, label: str
) -> None:
    devices = SHARDS if label == EDGES else 1
    shapes = [
        jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((TAPS, IN, OUT), (batch, IMAGE, IN))
    ]
    model = count_model_flops(convolution_of_lines, *shapes)
    assert model.total == _model_of_lines(batch)
    executed = count(name)
    assert executed.total == 3 * batch * (2 * IN * OUT) * TAPS * positions
    share = {key: Fraction(n, devices) for key, n in model.by_operation.items()}
    ledger = compare_flops(
        model=Fraction(model.total, devices), executed=executed, is_whole=True, operations=share
    )
    lines = {line.label: line.flops for line in ledger.lines}
    assert lines[label] == executed.total - model.total // devices > 0
    assert ledger.residual == 0


def test_a_convolution_of_integers_in_blocks_has_the_same_line() -> None:
    """Rows of 64 in eight blocks of 9, each output of which reads three columns."""
    model = count_model_flops(convolution_of_integers, *INTEGERS)
    product = 2 * 3 * 32
    assert model.total == product * (3 * 64 - 2) ** 2
    executed = count("v5e_image_int8")
    assert executed.total == product * (3 * 64 - 2) * (3 * 8 * 9)
    ledger = compare_flops(model=model, executed=executed)
    lines = {line.label: line.flops for line in ledger.lines if line.flops}
    assert lines == {"model": model.total, BLOCKS: executed.total - model.total}
    assert ledger.residual == 0


def test_a_surplus_that_pieces_of_images_do_not_explain_stays_a_residual() -> None:
    operations = {"forward conv_general_dilated": 100, "forward dot_general": 50}
    executed = ExecutedCount(
        forward=180,
        by_operation={"forward conv_general_dilated": 120, "forward dot_general": 60},
        in_pieces={BLOCKS: {"forward conv_general_dilated": 70}},
    )
    ledger = compare_flops(model=150, executed=executed, is_whole=True, operations=operations)
    assert {line.label: line.flops for line in ledger.lines}[BLOCKS] == 20
    assert ledger.residual == 10


@pytest.mark.parametrize("chip", ["v5e", "h100"])
def test_a_thin_svd_counts_by_the_textbook_on_every_chip(chip: str) -> None:
    """A TPU iterates until it converges; cuSOLVER makes all columns of U, which a slice drops."""
    m, n = TALL
    thin, full = 14 * m * n**2 + 8 * n**3, 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
    executed = count(f"{chip}_svd")
    assert executed.unaccounted == ()
    assert executed.padding == (full - thin if chip == "h100" else 0)
    assert executed.total == thin + executed.padding
    assert executed.kernels == {"svd": executed.total}
    assert compare_flops(model=thin, executed=executed).residual == 0
