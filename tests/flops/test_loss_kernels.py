"""Fused losses: the model's products, the logits again, and what fills up blocks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mfu_jax.dumps import ProgramDump
from mfu_jax.flops.loss_kernels import loss_kernel, product_flops
from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from mfu_jax.instrumentation.counts import count_program, given_model
from tests.support import program_tokamax as programs
from tests.support.jax_versions import reads_recorded_kernels
from tests.support.recorded import count, text_of
from tests.support.small_functions import shape

PRODUCT = 2 * programs.TOKENS * programs.INPUTS * programs.VOCABULARY
# In blocks of 512 inputs and 1,024 entries of the vocabulary.
IN_BLOCKS = 2 * programs.TOKENS * 512 * 3072


@reads_recorded_kernels
def test_the_backward_pass_computes_the_logits_again() -> None:
    executed = count("v6e_tokamax_loss")
    assert executed.total == 4 * PRODUCT
    assert executed.forward == PRODUCT
    assert executed.rematerialized == PRODUCT
    assert executed.beyond["tiles, stated"] == 4 * (IN_BLOCKS - PRODUCT)
    assert executed.padding == 0
    assert executed.unaccounted == ()


@reads_recorded_kernels
def test_its_ledger_has_no_residual() -> None:
    program = ProgramDump(text=text_of("v6e_tokamax_loss"))
    ledger = count_program(program, given_model(3 * PRODUCT)).ledger
    assert (ledger.executed, ledger.residual) == (4 * PRODUCT, 0)


TOKENS, WIDTH, WORDS, BLOCK = 16, 8, 24, 16


def loss_backward(x: jax.Array, w: jax.Array) -> Any:
    """One block of 16 inputs by 32 words: logits, and two gradients."""

    def kernel(x_ref: Any, w_ref: Any, dx_ref: Any, dw_ref: Any) -> None:
        logits = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)
        dx_ref[...] = jnp.dot(logits, w_ref[...].T.astype(jnp.float32))
        dw_ref[...] = jnp.dot(x_ref[...].T.astype(jnp.float32), logits)

    inputs = pl.BlockSpec((TOKENS, BLOCK), lambda i: (0, 0))
    matrix = pl.BlockSpec((BLOCK, 2 * BLOCK), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        name="linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu",
        grid=(1,),
        in_specs=[inputs, matrix],
        out_specs=[inputs, matrix],
        out_shape=[shape(TOKENS, WIDTH), shape(WIDTH, WORDS)],
    )(x, w)


def test_the_model_needs_two_gradients_of_the_matrices_as_they_are() -> None:
    arguments = [shape(*dims, dtype=jnp.bfloat16) for dims in ((TOKENS, WIDTH), (WIDTH, WORDS))]
    traced = count_model_flops(loss_backward, *arguments)
    assert traced.total == 2 * (2 * TOKENS * WIDTH * WORDS)
    assert traced.by_dtype == {"f32": traced.total}
    (runs,) = pallas_kernel_flops(loss_backward, *arguments).values()
    assert isinstance(runs, tuple)
    (run,) = runs
    assert run.flops == 3 * (2 * TOKENS * WIDTH * WORDS)
    assert sum(run) == 3 * (2 * TOKENS * BLOCK * 2 * BLOCK)


def test_other_kernels_and_operands_have_no_row() -> None:
    assert loss_kernel("softmax_cross_entropy_loss") is None
    assert product_flops([(8, 4), (8, 16)]) is None
