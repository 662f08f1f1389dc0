"""What fused kernels keep for their backward pass."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention
from mfu_jax.layers.attention.kernels import _by_blocks, _Uniform
from mfu_jax.layers.attention.ops import CONTEXT, AttentionInputs, attended
from mfu_jax.layers.stack.remat import TENSORS, remat


@pytest.mark.parametrize(
    ("policy", "is_saved"), [("full", False), ("minimal", False), ("minimal_with_context", True)]
)
@pytest.mark.parametrize("name", ["cudnn_flash", "splash"])
def test_with_a_context_its_softmax_sums_are_saved_so_that_no_kernel_runs_again(
    name: str, policy: str, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92000)
    segments = jnp.ones((2, 256), jnp.int32)

    def layer(q: jax.Array) -> jax.Array:
        return jnp.sin(attended(name, AttentionInputs(q, q, q, segments, packed=False)))

    wrapped = remat(SimpleNamespace(remat_policy=policy, attention=name))(layer)
    q = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    kept = jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(wrapped, q)[1], q))
    sums = [leaf for leaf in kept if (leaf.size, leaf.dtype) == (2 * 4 * 256, jnp.float32)]
    contexts = [leaf for leaf in kept if leaf.size == q.size]
    assert len(sums) == is_saved
    assert len(contexts) == 1 + is_saved  # the queries are the layer's input


def kept_by(layer: Any, **keys: Any) -> list[Any]:
    """What a layer's policy keeps of [2, 256, 4, 128] for the backward pass."""
    q = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.bfloat16)
    wrapped = remat(SimpleNamespace(attention="cudnn_flash", **keys))(layer)
    return jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(wrapped, q)[1], q))


def test_other_blocks_contexts_are_saved_beside_cudnns() -> None:
    """Such as those of delta nets and images, in a model whose attention is cuDNN's."""

    def layer(x: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.exp(jnp.sin(x)), CONTEXT))

    assert len(kept_by(layer, remat_policy="full")) == 1  # the input
    assert len(kept_by(layer, remat_policy="minimal_with_context")) == 2


def test_cudnns_context_is_offloaded_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 92000)
    places = dict.fromkeys(TENSORS, "remat")
    segments = jnp.ones((2, 256), jnp.int32)

    def layer(q: jax.Array) -> jax.Array:
        return jnp.sin(attended("cudnn_flash", AttentionInputs(q, q, q, segments, packed=False)))

    none = kept_by(layer, remat_policy="custom", **{**places, "decoder_layer_input": "offload"})
    context = kept_by(layer, remat_policy="custom", **{**places, "context": "offload"})
    assert len(context) == len(none) + 1


@pytest.mark.parametrize("left", [None, 0, 1, 5, 16, 31, 95, 200])
def test_blocks_of_a_mask_are_those_of_jaxs_and_full_and_empty_ones_are_not_compared(
    left: int | None,
) -> None:
    size = 96
    kind = splash_attention.CausalMask if left is None else splash_attention.LocalMask
    of = ((size, size),) if left is None else ((size, size), (left, 0), 0)
    ours, theirs = _by_blocks(kind)(*of), kind(*of)
    assert ours == _by_blocks(kind)(*of)  # JAX joins the heads whose masks are equal
    for rows, columns in itertools.product((1, 8, 32, 96), repeat=2):
        for i, j in itertools.product(range(0, size, rows), range(0, size, columns)):
            index = slice(i, i + rows), slice(j, j + columns)
            found, wanted = ours[index], theirs[index]
            np.testing.assert_array_equal(found, wanted)
            assert (found.any(), found.all()) == (wanted.any(), wanted.all())
    assert isinstance(ours[:1, 2:4], _Uniform)
