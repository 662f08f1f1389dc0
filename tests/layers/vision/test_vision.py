"""Models that see: weights and FLOPs as counted, images where the data puts them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.attention.ops import AttentionPattern

from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.step.trainable import trained_and_frozen
from tests.support.tiny_models import analytic, gradient, sized

TILES = {"gemma3-4b": 0, "gemma4-31b": 0, "llama4-17b-16e": 2, "qwen3-vl-30b-a3b": 0}


@pytest.mark.full
@pytest.mark.parametrize("name", TILES)
def test_a_step_with_images_has_the_weights_and_flops_that_are_counted(name: str) -> None:
    """The tower is frozen; `tests/flops/test_three_counts.py` has those that are trained."""
    c = sized(name, images_per_sequence=2, tiles_per_image=TILES[name])
    train, (weights, batch) = gradient(c)
    traced = count_model_flops(train, weights, batch)
    assert traced.total == analytic(c)
    assert traced.unaccounted == ()
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == count_parameters(c).total
    trained, still = (dict(nnx.to_flat_state(part)) for part in trained_and_frozen(c, weights))
    assert {path[0] for path in still} == {"vision_encoder"}
    assert any(path[0] == "vision_projector" for path in trained)


DECODER = {"layers", "token_embedder", "decoder_norm"}
# Which weights train → the parts of the model that then have trained ones.
TRAINED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "adapters": ({"lora_rank": 3}, {"layers"}),
    "adapters of both": (
        {
            "lora_rank": 3,
            "lora_targets": ["q_proj", "wi", "wo"],
            "freeze_vision_encoder_params": False,
        },
        {"layers", "vision_encoder"},
    ),
    "projector": ({"frozen": ["attention", "mlp", "tokens", "logits"]}, {"vision_projector"}),
    "answers": (
        {"use_dpo": True},
        {*DECODER, "vision_projector"},
    ),
    "the tower's upper parts": (
        {"frozen": ["vision/patches", "tokens", "logits"], "freeze_vision_encoder_params": False},
        {"layers", "vision_encoder", "vision_projector"},
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("what", TRAINED)
def test_what_is_frozen_beside_images_needs_no_gradient(what: str) -> None:
    keys, parts = TRAINED[what]
    c = sized("gemma3-4b", images_per_sequence=2, **keys)
    train, (weights, batch) = gradient(c)
    traced = count_model_flops(train, weights, batch)
    assert traced.total == analytic(c)
    assert traced.unaccounted == ()
    trained, _ = trained_and_frozen(c, weights)
    assert {path[0] for path, _ in nnx.to_flat_state(trained)} == parts


@pytest.mark.full
def test_tokens_of_an_image_see_each_other() -> None:
    images = jnp.array([[0, 1, 1, 1, 2, 0]])
    mask = AttentionPattern(window=2, joins_images=True).mask(jnp.ones((1, 6), int), images)[0]
    assert np.asarray(mask).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
