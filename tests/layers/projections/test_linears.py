"""The embedding's gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mfu_jax.layers.projections import linears


@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_gpus_add_the_gradients_of_rows_in_float32(weight_dtype: Any) -> None:
    ids = jnp.zeros(4096, jnp.int32)
    table = jnp.ones((4, 8), weight_dtype)

    def summed(table: jax.Array) -> jax.Array:
        return linears._looked_up(table, ids, jnp.bfloat16).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(summed)).trace(table)
    for platform, dtype in (("cuda", "f32"), ("tpu", "bf16"), ("cpu", "bf16")):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        scatter = text[text.index('"stablehlo.scatter"') :]
        added = scatter[scatter.index("}) : (") :].splitlines()[0]
        assert added.startswith(f"}}) : (tensor<4x8x{dtype}>"), platform


def test_a_row_that_is_read_often_gets_the_whole_sum() -> None:
    # In bfloat16, 256 + 1 is 256 again.
    rows = jax.jit(jax.grad(lambda t: linears._looked_up(t, jnp.zeros(4096, int), t.dtype).sum()))
    assert rows(jnp.ones((2, 4)))[:, 0].tolist() == [4096, 0]
