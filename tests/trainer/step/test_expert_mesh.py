"""Experts over a mesh: eight devices give the losses of one, dropless and with a capacity."""

import functools

import jax
import numpy as np
import pytest

from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step
from tests.support.floats import assert_close_as_float32

ROWS, LENGTH = 8, 32


def config(**keys: object) -> pyconfig.Config:
    sizes = {
        "model_name": "mixtral-8x7b",
        "scale": "tiny",
        "attention": "dot_product",
        "max_target_length": LENGTH,
        "learning_rate": 1e-2,
        # Two, so that `tensor` can split them.
        "num_kv_heads": 2,
        "override_model_config": True,
    }
    return pyconfig.from_mapping({}, overrides={**sizes, **keys})


def losses(c: pyconfig.Config, devices: int) -> list[float]:
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    train_step = step.compile_train_step(c, grid, state.abstract_state(c, grid))
    train_state = state.create_state(c, grid)
    tokens = np.random.default_rng(0).integers(1, 256, (1, ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((1, ROWS, LENGTH), np.int32)
    batch = {
        "inputs": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "inputs_position": np.arange(LENGTH, dtype=np.int32) * ones,
        "inputs_segmentation": ones,
        "targets_weight": ones,
    }
    out = []
    for _ in range(3):
        train_state, metrics = train_step(train_state, mesh.put_batch(batch, grid))
        out += [float(metrics["loss"]), float(metrics["moe_lb_loss"])]
    return out


@functools.cache
def losses_of_one_device(capacity: float, by_matmul: bool) -> list[float]:
    keys = {"capacity_factor": capacity, "slots_by_matmul": by_matmul}
    return losses(config(per_device_batch_size=ROWS, **keys), 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("capacity", "by_matmul", "whole", "expert", "transposed"),
    [
        (-1.0, False, True, 2, 1),
        (-1.0, False, True, 1, 2),
        (1.5, False, False, 2, 1),
        (1.5, True, False, 2, 1),
        (1.5, False, False, 1, 2),
    ],
    ids=[
        "dropless",
        "dropless in two parts",
        "capacity",
        "capacity, by matmuls, gradients summed whole",
        "capacity, whole experts",
    ],
)
def test_a_mesh_of_eight_gives_the_losses_of_one_device(
    capacity: float, by_matmul: bool, whole: bool, expert: int, transposed: int
) -> None:
    fsdp = {"fsdp": 4 // expert // transposed, "fsdp_transpose": transposed}
    axes = {**fsdp, "expert": expert, "tensor": 2, "shard_exp_on_fsdp": whole}
    slots = {"capacity_factor": capacity, "slots_by_matmul": by_matmul}
    slots["whole_expert_gradients"] = slots["whole_routing"] = by_matmul
    eight = losses(config(per_device_batch_size=1, **slots, **axes), 8)
    one = losses_of_one_device(capacity, by_matmul)
    assert_close_as_float32(eight, one, terms=64 * ROWS * LENGTH)
