"""Logits in tiles: the same losses, gradients and FLOPs, less memory."""

from __future__ import annotations

from typing import Any

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
from tests.support.tiny_step import compiled_step, tiny_config, traced_flops

B, S, V, D, TILES = 2, 64, 384, 32, 4
ODD = 257
HEAD = 2 * B * S * D * V


def config(vocab: int = V, **keys: object) -> Config:
    sizes = {"layers": 2, "batch": B, "length": S, "width": D, "mlp": 64, "heads": 4}
    return tiny_config(vocab=vocab, **sizes, head_dim=16, **keys)


def batch(rows: int, vocab: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, vocab, (rows, S + 1), dtype=np.int32)
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
    rows = batch(int(c.per_device_batch_size * devices), c.vocab_size)
    with jax.set_mesh(grid):
        graph, weights = nnx.split(state.make_model(c, 0))

        def loss(weights: nnx.State) -> jax.Array:
            return losses.objective(weights, nnx.State({}), (), graph, rows, c)[0]

        value, gradients = jax.jit(jax.value_and_grad(loss))(weights)
    return value, gradients


@pytest.mark.full
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_are_those_of_all_logits_at_once(recompute: bool) -> None:
    keys = {"logits_via_embedding": True}  # a head of its own: below
    whole, wanted = loss_and_gradients(config(**keys))
    tiles = {"num_vocab_tiling": TILES, "recompute_logits": recompute}
    tiled, found = loss_and_gradients(config(**tiles, **keys))
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
@pytest.mark.parametrize("keys", [{}, {"frozen": ["logits"]}, {"frozen": ["attention", "mlp"]}])
def test_no_product_runs_twice_and_no_logits_of_all_tokens_are_left(keys: dict[str, Any]) -> None:
    programs = {}
    for tiles in (1, TILES):
        c = config(num_vocab_tiling=tiles, logits_via_embedding=False, **keys)
        with only_counted():
            programs[tiles] = compiled_step(c)
        if not keys:
            assert traced_flops(c) == executed_flops(programs[tiles]).total
    counts = {tiles: executed_flops(program) for tiles, program in programs.items()}
    of_phases = [(count.forward, count.backward, count.total) for count in counts.values()]
    assert of_phases[0] == of_phases[1]
    assert [count.rematerialized for count in counts.values()] == [0, 0]
    head = 2 if keys.get("frozen") == ["logits"] else 3
    assert sum(n for name, n in counts[TILES].by_scope.items() if "logits" in name) == head * HEAD
    texts = {tiles: program.as_text() or "" for tiles, program in programs.items()}
    assert f"f32[{B},{S},{V}]" in texts[1]
    assert f"f32[{B},{S},{V}]" not in texts[TILES]
    assert f"f32[{B},{S // TILES},{V}]" in texts[TILES]


@pytest.mark.full
def test_as_in_maxtext_the_backward_pass_may_compute_the_logits_again() -> None:
    keys = {"num_vocab_tiling": TILES, "logits_via_embedding": False}
    with only_counted():
        programs = [
            compiled_step(config(recompute_logits=again, **keys)) for again in (False, True)
        ]
    once, twice = map(executed_flops, programs)
    assert (once.rematerialized, twice.rematerialized) == (0, HEAD)
    assert twice.total - once.total == HEAD
    assert f"f32[{B},{S},{V}]" not in (programs[1].as_text() or "")


@pytest.mark.full
def test_bfloat16_gradients_of_tiles_are_as_near_to_float64_as_those_of_all_logits() -> None:
    keys = {"logits_via_embedding": False, "weight_dtype": "bfloat16"}
    _, exact = loss_and_gradients(config(logits_via_embedding=False))
    errors = {}
    for tiles in (1, TILES):
        _, found = loss_and_gradients(config(num_vocab_tiling=tiles, dtype="bfloat16", **keys))
        errors[tiles] = _relative_error(found["logits_dense"], exact["logits_dense"])
    assert errors[TILES] < 1.5 * errors[1]


def _relative_error(found: Any, exact: Any) -> float:
    (got,), (want,) = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (found, exact)
    )
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.full
@pytest.mark.parametrize("tiles", [1, TILES])
def test_columns_for_tensor_cores_change_no_loss_and_are_counted_as_padding(tiles: int) -> None:
    losses, gradients, counts = {}, {}, {}
    for how in ("exact", "padded"):
        c = config(vocab=ODD, logits_columns=how, num_vocab_tiling=tiles)
        losses[how], gradients[how] = loss_and_gradients(c)
        with only_counted():
            counts[how] = executed_flops(compiled_step(c))
    assert_close_as_float32(losses["padded"], losses["exact"], terms=B * S)
    both = (jax.tree.leaves(gradients[how]) for how in ("padded", "exact"))
    for got, want in zip(*both, strict=True):
        assert_close_as_float32(got, want, terms=B * S)
    more = 3 * 2 * B * S * D * (384 - ODD)
    assert counts["padded"].total - counts["exact"].total == more
    if tiles == 1:  # the padding of a table that a loop reads happens before it, unseen
        assert counts["padded"].padding == more


def test_tiles_divide_a_sequence() -> None:
    with pytest.raises(UserError, match="num_vocab_tiling=3: expected a number that divides"):
        config(num_vocab_tiling=3)
    with pytest.raises(UserError, match="use_dpo=true num_vocab_tiling=2"):
        config(num_vocab_tiling=2, use_dpo=True)
