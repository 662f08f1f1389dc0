"""Every bundled text model has as many weights as counted, and trains at `scale=tiny`.

Its FLOPs are in `tests/flops/test_three_counts.py`.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import split_row
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from mfu_jax.util.yaml_files import model_names
from tests.support.compilation import only_counted
from tests.support.jax_versions import FASTER_TO_COMPILE, has_nnx_list
from tests.support.tiny_models import (
    LENGTH,
    ROWS,
    analytic,
    config,
    distinct,
    gradient,
    one_of_each_kind,
    one_period,
    sized,
    some_weights,
)

STEPS = 5


@pytest.mark.full(
    keep=[
        "mistral-7b",
        "gpt3-52k",
        "gemma-7b",
        "llama3-70b",
        "qwen3-omni-30b-a3b",
        "qwen3-14b",
        "qwen3-32b",
        "llama3-8b",
        "llama3.2-1b",
        "qwen2.5-14b",
        "qwen3-1.7b",
        "gpt3-6b",
    ]
)
@pytest.mark.parametrize("name", distinct("full"))
def test_a_model_has_as_many_weights_as_counted(name: str) -> None:
    c = config(name, "full")
    model = nnx.eval_shape(lambda: state.make_model(c, 0))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == count_parameters(c).total


@pytest.mark.full(
    keep=[
        "gpt3-52k",
        "llama3.2-1b",
        "mistral-7b",
        "llama2-70b",
        "qwen3-4b",
        "qwen3-14b",
        "gemma-7b",
        "mixtral-8x22b",
        "qwen2.5-1.5b",
        "qwen3-0.6b",
        "gemma-2b",
        "llama2-13b",
    ]
)
@has_nnx_list
@pytest.mark.parametrize("name", distinct())
def test_a_model_scaled_down_builds_into_the_step_that_is_counted(name: str) -> None:
    """All layers of `mfu-jax train model_name=… scale=tiny`; `test_three_counts` runs each kind."""
    c = sized(name)
    grid, shapes = shapes_of(c)
    train_step, batch = step.make_train_step(c), step.abstract_batch(c, grid, 1)
    count = count_model_flops(train_step, shapes, batch)
    assert (count.total, count.unaccounted) == (analytic(c), ())


@pytest.mark.full
@has_nnx_list
@pytest.mark.parametrize("name", [n for n in distinct() if n not in one_of_each_kind()])
def test_other_sizes_of_a_kind_are_trained(name: str) -> None:
    c = one_period(name, learning_rate=0.003, warmup_steps_fraction=0.0)
    grid, shapes = shapes_of(c)
    with only_counted():
        train_step = step.lower_train_step(c, grid, shapes).compile(FASTER_TO_COMPILE)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    now = state.TrainState(zeros.step, some_weights(shapes.params), zeros.opt_state)
    tokens = np.random.default_rng(0).integers(1, 256, (ROWS, LENGTH + 1))
    rows = [split_row(row) for row in tokens]
    batch = {key: np.stack([row[key] for row in rows])[None] for key in rows[0]}
    losses = []
    for _ in range(STEPS):
        now, metrics = train_step(now, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] < np.inf


def test_a_model_that_is_left_out_is_one_of_these_but_for_its_name() -> None:
    def sizes(name: str) -> dict[str, object]:
        return {**vars(config(name)), "model_name": ""}

    found = [sizes(name) for name in distinct()]
    assert len(model_names()) >= 79
    assert [name for name in model_names() if sizes(name) not in found] == []


def shapes_of(c: Config) -> tuple[Mesh, state.TrainState]:
    """One device, and the shapes of a model's state on it."""
    grid = mesh.make_mesh(c, jax.devices()[:1])
    return grid, state.abstract_state(c, grid)


@pytest.mark.full
def test_models_with_further_predictions_have_the_flops_that_are_counted() -> None:
    c = sized("llama3-8b", mtp_num_layers=2)
    differentiate, (params, batch) = gradient(c)
    assert count_model_flops(differentiate, params, batch).total == analytic(c)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count_parameters(c).total
