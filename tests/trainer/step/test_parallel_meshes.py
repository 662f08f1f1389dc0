"""The step over eight devices: the losses of one, and its FLOPs but for named lines."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from mfu_jax.trainer.config.mesh_axes import AXES
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import losses, mesh, state
from tests.campaigns.meshes import (
    KINDS,
    MESHES,
    SAMPLE,
    STEPS_OF_A_TEST,
    TOKENS,
    extra,
    one_device,
    trained,
)
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_step import tiny_config


@pytest.mark.full
@pytest.mark.parametrize(("kind", "axes"), SAMPLE)
def test_a_mesh_trains_as_one_device(kind: str, axes: str) -> None:
    losses, flops = trained({**KINDS[kind], **MESHES[axes]}, 8)
    expected, of_one = one_device(kind)
    assert_close_as_float32(losses, expected, terms=STEPS_OF_A_TEST * TOKENS)
    more = extra(kind, axes)
    assert flops.executed.total * 8 == of_one.executed.total + sum(more.values())
    bubble = sum(line.flops for line in flops.ledger.lines if line.label == "pipeline bubble")
    assert bubble > 0 or "pipeline" not in axes
    assert flops.ledger.residual == of_one.ledger.residual == 0


RING = {"context_parallelism": 2, "context_parallel_strategy": "ring"}
LENGTH_OF_RING = 512  # halves of 128 tokens, a block of the kernel
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 32,
    "decoder_block": "mixtral",
}
CHUNKS = EXPERTS | {"decoder_block": "llama4", "chunk_attn_window_size": 256}


def in_ring(**keys: Any) -> Config:
    sizes = {"layers": 2, "length": LENGTH_OF_RING, "vocab": 64, "width": 32, "mlp": 32, "heads": 2}
    return tiny_config(batch=1, head_dim=128, **sizes, **keys)


def loss_and_gradients(c: Config, devices: int) -> tuple[jax.Array, nnx.State]:
    numbers = np.random.default_rng(0).integers(0, 64, (1, LENGTH_OF_RING + 1), dtype=np.int32)
    place = np.arange(LENGTH_OF_RING, dtype=np.int32)[None]
    rows = {
        "inputs": numbers[:, :-1],
        "inputs_position": place % 300,
        "inputs_segmentation": 1 + place // 300,
        "targets": numbers[:, 1:],
        "targets_weight": (place % 7 > 0).astype(np.int32),
    }
    with jax.set_mesh(mesh.make_mesh(c, jax.devices()[:devices])):
        graph, weights = nnx.split(state.make_model(c, 0))

        def loss(weights: nnx.State) -> jax.Array:
            return losses.objective(weights, nnx.State({}), (), graph, rows, c)[0]

        return jax.jit(jax.value_and_grad(loss))(weights)


@pytest.mark.full
def test_a_ring_of_splash_kernels_trains_as_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel

    interpreted = functools.partial(kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernel, "make_splash_mha", interpreted)
    wanted = loss_and_gradients(in_ring(), 1)
    for tiles in (1, 2):
        c = in_ring(num_vocab_tiling=tiles, **RING).replace(attention="ring_splash")
        assert_close_as_float32(loss_and_gradients(c, 2), wanted, terms=LENGTH_OF_RING * 64)


@pytest.mark.parametrize(
    ("platform", "keys", "chosen"),
    [
        ("tpu", {}, "ring_splash"),
        ("cpu", {}, "ring"),
        ("tpu", {"max_target_length": 384}, "ring"),  # halves of 96
        ("tpu", {"mtp_num_layers": 1}, "ring"),  # which reads the next token
        ("tpu", EXPERTS, "ring_splash"),
        ("tpu", EXPERTS | {"capacity_factor": 1.25}, "ring"),  # slots go to the first tokens
        ("tpu", CHUNKS, "ring"),
        ("tpu", {"context_parallel_strategy": "all_gather"}, "splash"),
    ],
)
def test_a_ring_is_of_splash_kernels_where_tokens_may_be_in_any_order(
    platform: str, keys: dict[str, Any], chosen: str
) -> None:
    c = in_ring(**RING).replace(attention="auto", **keys)
    device = SimpleNamespace(platform=platform, device_kind="TPU v5")
    shape = {axis.name: 1 for axis in AXES} | {"context": 2}
    grid: Any = SimpleNamespace(devices=np.array([device] * 2), shape=shape)
    assert state.resolve_attention(c, grid).attention == chosen
