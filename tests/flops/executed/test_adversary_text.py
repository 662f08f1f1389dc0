"""HLO text printed in other ways: the same count, or an error; never another number."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.flops.executed.hlo.text import HloParseError
from tests.support.small_functions import shape

LAYERS, B, D, S, H = 3, 4, 8, 5, 2


def layer(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w), None


def scanned(w, x):
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)


ONE = 2 * B * D * D
PROGRAMS = {
    # Forward, backward, and the forward again: the last tanh's gradient needs its result.
    "scan": (jax.grad(scanned), (shape(LAYERS, D, D), shape(B, D)), LAYERS * (2 + 4 + 2) * ONE),
    "branches": (
        lambda i, w, x: jax.lax.switch(i, [lambda: x @ w @ w, lambda: x @ w, lambda: x]),
        (shape(dtype=jnp.int32), shape(D, D), shape(B, D)),
        2 * ONE,
    ),
    "batched": (
        lambda q, k: jnp.einsum("bshd,bthd->bhst", q, k),
        (shape(B, S, H, D), shape(B, S, H, D)),
        2 * B * H * S * S * D,
    ),
    "convolution": (
        lambda x, w: jax.lax.conv_general_dilated(x, w, (2, 1), "VALID"),
        (shape(B, 3, 9, 9), shape(5, 3, 3, 2)),
        2 * B * 5 * (4 * 8) * 3 * (3 * 2),
    ),
}
# What a printer may add or leave out without leaving out what a count needs.
HARMLESS = (
    "print_metadata",
    "print_percent",
    "print_operand_shape",
    "print_control_dependencies",
    "print_program_shape",
    "include_layout_in_shapes",
    "print_large_constants",
    "compact_operands",
)
NEEDED = (
    "print_operand_names",
    "print_ids",
    "print_result_shape",
    "print_extra_attributes",
)


def printed(name):
    fn, args, flops = PROGRAMS[name]
    lowered = jax.jit(fn).lower(*args)
    module = lowered.compile().runtime_executable().hlo_modules()[0]
    return lowered, module, sys.modules[type(module).__module__].HloPrintOptions, flops


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_way_to_print_a_program(name):
    lowered, module, make_options, flops = printed(name)
    assert executed_flops(lowered.as_text("hlo")).total == flops
    assert executed_flops(module.to_string(make_options.short_parsable())).total == flops
    for option in HARMLESS:
        for value in (True, False):
            options = make_options()
            setattr(options, option, value)
            assert executed_flops(module.to_string(options)).total == flops, option


@pytest.mark.parametrize("name", PROGRAMS)
def test_text_without_what_a_count_needs_is_refused(name):
    _, module, make_options, _ = printed(name)
    texts = [module.to_string(make_options.canonical())]
    for option in NEEDED:
        options = make_options()
        setattr(options, option, False)
        texts.append(module.to_string(options))
    for text in texts:
        with pytest.raises(HloParseError):
            executed_flops(text)


def test_a_dimension_that_no_program_has_is_an_error() -> None:
    text = f"HloModule m\nENTRY %e (x: f32[2,{2**63}]) -> f32[2,2] {{\n"
    text += f"  %x = f32[2,{2**63}] parameter(0)\n  ROOT %d = f32[2,2] dot(%x, %x), "
    text += "lhs_contracting_dims={1}, rhs_contracting_dims={1}\n}\n"
    with pytest.raises(HloParseError, match="no 64-bit number"):
        executed_flops(text)
