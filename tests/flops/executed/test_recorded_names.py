"""Recorded programs for what a count must name: phases, memory pressure, padding, expansion."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.dumps import ProgramDump
from mfu_jax.flops.ledger import REMOVED, THREE_REAL, compare_flops
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.instrumentation.counts import count_program, traced_model
from tests.support.audit_programs import AUDIT
from tests.support.program_models import MODELS
from tests.support.program_names import (
    BATCH,
    PRESSED_LAYERS,
    PRESSED_ROWS,
    PRESSED_WIDTH,
    WIDTH,
    complex_products,
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
