"""The loss that trains an indexer: what it is, what it moves, what it costs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.attention.compressed import of_compressed_keys
from mfu_jax.layers.attention.indexer import DENSE, SPARSE, IndexerSpec, divergence
from mfu_jax.layers.attention.latent import LatentAttentionSpec
from mfu_jax.layers.attention.ops import masked_probabilities
from mfu_jax.layers.attention.rope import Rope
from mfu_jax.layers.building import Inputs

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.step.trainable import trained_and_frozen
from tests.support.floats import assert_close_as_float32
from tests.support.tiny_layers import tiny_builder
from tests.support.tiny_models import analytic, gradient, one_period, sized

S, D = 12, 16
SPEC = LatentAttentionSpec(
    heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    nope_dim=4,
    rope_dim=4,
    v_dim=6,
    rope=Rope(timescale=100.0),
    indexer=IndexerSpec(heads=2, head_dim=4, topk=3),
)


class Attended(NamedTuple):
    """What an attention returns, its indexer's loss, and that loss's gradients."""

    result: jax.Array
    loss: jax.Array
    grads: Any


@functools.cache
def attended() -> dict[str, Attended]:
    """Stage → the same weights at work in it."""
    places = jnp.arange(S)[None]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, S, D)), jnp.float32)

    def run(weights: Any, stage: str) -> tuple[jax.Array, jax.Array]:
        spec = dataclasses.replace(
            SPEC, indexer=IndexerSpec(heads=2, head_dim=4, topk=3, loss=stage)
        )
        graph = nnx.graphdef(nnx.eval_shape(lambda: spec.make(tiny_builder(D, epsilon=1e-6))))
        inputs = Inputs(tokens=places, positions=places, segment_ids=jnp.ones((1, S), int))
        result = nnx.merge(graph, weights)(x, inputs)
        assert set(inputs.notes) == ({"indexer_loss"} if stage else set())
        return inputs.notes.get("indexer_loss", jnp.zeros(())), result

    def all_of() -> dict[str, Attended]:
        weights = nnx.state(SPEC.make(tiny_builder(D, epsilon=1e-6)), nnx.Param)
        both = jax.value_and_grad(run, has_aux=True)
        found = {stage: both(weights, stage) for stage in (SPARSE, DENSE, "")}
        return {s: Attended(result, loss, grads) for s, ((loss, result), grads) in found.items()}

    return jax.jit(all_of)()


@pytest.mark.full
def test_the_divergence_is_its_formula() -> None:
    rng = np.random.default_rng(1)
    mask = np.tril(np.ones((4, 4), bool))
    scores = rng.normal(size=(4, 4))
    p = np.where(mask, rng.uniform(0.1, 1, (4, 4)), 0)
    p /= p.sum(-1, keepdims=True)
    want = 0.0
    for t in range(4):
        q = np.exp(scores[t, : t + 1]) / np.exp(scores[t, : t + 1]).sum()
        want += sum(p[t, s] * np.log(p[t, s] / q[s]) for s in range(t + 1)) / 4
    got = divergence(*(jnp.asarray(array)[None] for array in (p, scores, mask)))
    assert_close_as_float32(got, np.float32(want), terms=16)


@pytest.mark.full(keep=["dense"])
@pytest.mark.parametrize("stage", [SPARSE, DENSE])
def test_the_loss_moves_the_indexer_alone(stage: str) -> None:
    grads = nnx.to_flat_state(attended()[stage].grads)
    assert {path[0] for path, grad in grads if grad.get_value().any()} == {"indexer"}


def test_in_the_warm_up_queries_attend_to_all_keys() -> None:
    sparse, dense, without = (attended()[stage] for stage in (SPARSE, DENSE, ""))
    assert_close_as_float32(sparse.result, without.result, terms=64)
    # The first topk queries see no more keys than they may pick.
    assert_close_as_float32(dense.result[:, :3], sparse.result[:, :3], terms=64)
    assert np.abs(dense.result - sparse.result)[:, 3:].max() > 1e-3
    assert dense.loss != sparse.loss


@pytest.mark.full
def test_of_joint_attention_the_share_of_compressed_keys_is_their_own_softmax() -> None:
    rng = np.random.default_rng(2)
    q, k = rng.normal(size=(4, 2, 3)), rng.normal(size=(7, 3))  # of 7 keys, the last 3 compressed
    mask = np.tril(np.ones((4, 7), bool), k=3)  # the first query sees none of them
    args = (jnp.asarray(q)[None], jnp.asarray(k)[None, :, None], jnp.asarray(mask)[None])
    joint = masked_probabilities(*args, sinks=jnp.array([0.3, -1.0]))
    want = np.zeros((4, 3))
    for query, head in np.ndindex(4, 2):
        seen = np.exp(k[4:] @ q[query, head] / np.sqrt(3)) * mask[query, 4:]
        want[query] += seen / max(seen.sum(), 1e-9) / 2
    assert not want[0].any()
    assert want[3].all()
    assert_close_as_float32(of_compressed_keys(joint, 3)[0], want.astype(np.float32), terms=16)


# Stages of V3.2 and V4: what is frozen in the warm-up.
WARM_UP = ("tokens", "attention", "mlp", "moe")
SPARSE_KEYS = {"indexer_sparse_training": True}


@pytest.mark.full(keep=["V3.2 warm-up"])
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("deepseek3.2-671b", SPARSE_KEYS),
        ("deepseek3.2-671b", {"frozen": (*WARM_UP, "logits"), "indexer_sparse_training": False}),
        ("deepseek4-284b", SPARSE_KEYS),
        ("deepseek4-284b", {"frozen": (*WARM_UP, "head")}),
    ],
    ids=["V3.2 sparse", "V3.2 warm-up", "V4 sparse", "V4 warm-up"],
)
def test_its_flops_are_counted(name: str, keys: dict[str, Any]) -> None:
    c = one_period(name, indexer_loss_scaling_factor=0.5, **keys)
    step, arguments = gradient(c)
    traced = count_model_flops(step, *arguments)
    assert traced.total == analytic(c)
    if c.frozen:
        moved, _ = trained_and_frozen(c, arguments[0])
        assert all("indexer" in path for path, _ in nnx.to_flat_state(moved))
    if name == "deepseek4-284b":
        return
    # The scores' gradients: of queries and of keys.
    scores = sum(count for scope, count in traced.by_scope.items() if "indexer/scores" in scope)
    assert (
        scores == c.num_decoder_layers * 3 * 2 * c.indexer_n_heads * c.indexer_head_dim * 2 * 128**2
    )


def test_a_loss_without_an_indexer_that_chooses_is_refused() -> None:
    with pytest.raises(UserError, match="use_indexer=true"):
        sized("deepseek3-671b", indexer_loss_scaling_factor=0.5)
    for name, length in (("deepseek3.2-671b", 16), ("deepseek4-284b", 64)):
        with pytest.raises(UserError, match=r"(?s)indexer_topk=16: .* 16 keys"):
            sized(name, indexer_loss_scaling_factor=0.5, max_target_length=length)
    keys = {"compress_ratios": [0], "num_decoder_layers": 1, "override_model_config": True}
    with pytest.raises(UserError, match="ratio 4"):
        sized("deepseek4-284b", indexer_loss_scaling_factor=0.5, **keys)
