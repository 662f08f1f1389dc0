"""Logits in tiles: the same losses and gradients, one more run of the head, less memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import losses, mesh, state
from tests.support.compilation import only_counted
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_step import compiled_step, tiny_config

B, S, V, D, TILES = 2, 64, 384, 32, 4
HEAD = 2 * B * S * D * V


def config(**keys: object) -> Config:
    sizes = {"layers": 2, "batch": B, "length": S, "vocab": V, "width": D, "mlp": 64, "heads": 4}
    return tiny_config(**sizes, head_dim=16, **keys)


def batch(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, V, (rows, S + 1), dtype=np.int32)
    place = np.broadcast_to(np.arange(S, dtype=np.int32), (rows, S))
    return {
        "inputs": numbers[:, :-1],
        "inputs_position": place,
        "inputs_segmentation": np.ones((rows, S), np.int32),
        "targets": numbers[:, 1:],
        "targets_weight": (rng.random((rows, S)) < 0.7).astype(np.int32),
    }


def loss_and_gradients(c: Config, devices: int = 1) -> tuple[jax.Array, nnx.State]:
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    rows = batch(int(c.per_device_batch_size * devices))
    with jax.set_mesh(grid):
        graph, weights = nnx.split(state.make_model(c, 0))

        def loss(weights: nnx.State) -> jax.Array:
            return losses.objective(weights, nnx.State({}), (), graph, rows, c)[0]

        value, gradients = jax.jit(jax.value_and_grad(loss))(weights)
    return value, gradients


@pytest.mark.full
def test_losses_and_gradients_are_those_of_all_logits_at_once() -> None:
    keys = {"logits_via_embedding": True}  # a head of its own: below
    whole, wanted = loss_and_gradients(config(**keys))
    tiled, found = loss_and_gradients(config(num_vocab_tiling=TILES, **keys))
    assert_close_as_float32(tiled, whole, terms=B * S)
    for want, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert_close_as_float32(got, want, terms=B * S)


@pytest.mark.full
def test_sequences_that_are_split_over_devices() -> None:
    keys = {"fsdp": 2, "context_parallelism": 2, "tensor": 2, "per_device_batch_size": 0.5}
    whole, wanted = loss_and_gradients(config(**keys), devices=8)
    tiled, found = loss_and_gradients(config(num_vocab_tiling=TILES, **keys), devices=8)
    assert_close_as_float32(tiled, whole, terms=4 * S)
    for want, got in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        assert_close_as_float32(got, want, terms=4 * S)


@pytest.mark.full
def test_the_head_runs_once_more_and_no_logits_of_all_tokens_are_left() -> None:
    programs = {}
    for tiles in (1, TILES):
        c = config(num_vocab_tiling=tiles)
        with only_counted():
            programs[tiles] = compiled_step(c)
    counts = {tiles: executed_flops(program) for tiles, program in programs.items()}
    assert counts[TILES].total - counts[1].total == HEAD
    assert counts[TILES].rematerialized - counts[1].rematerialized == HEAD
    texts = {tiles: program.as_text() or "" for tiles, program in programs.items()}
    assert f"f32[{B},{S},{V}]" in texts[1]
    assert f"f32[{B},{S},{V}]" not in texts[TILES]
    assert f"f32[{B},{S // TILES},{V}]" in texts[TILES]


def test_tiles_divide_a_sequence() -> None:
    with pytest.raises(UserError, match="num_vocab_tiling=3: expected a number that divides"):
        config(num_vocab_tiling=3)
    with pytest.raises(UserError, match="use_dpo=true num_vocab_tiling=2"):
        config(num_vocab_tiling=2, use_dpo=True)
