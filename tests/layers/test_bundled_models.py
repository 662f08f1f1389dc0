"""Every bundled text model has as many weights as counted.

Its FLOPs are in `tests/flops/test_three_counts.py`.
"""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer import state
from tests.support.tiny_models import analytic, config, distinct, gradient, sized


@pytest.mark.parametrize("name", distinct("full"))
def test_a_model_has_as_many_weights_as_counted(name: str) -> None:
    c = config(name, "full")
    model = nnx.eval_shape(lambda: state.make_model(c, 0))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == count_parameters(c).total


def test_models_with_further_predictions_have_the_flops_that_are_counted() -> None:
    c = sized("llama3-8b", mtp_num_layers=2)
    step, (params, batch) = gradient(c)
    assert count_model_flops(step, params, batch).total == analytic(c)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count_parameters(c).total
