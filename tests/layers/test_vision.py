"""Models that see: weights and FLOPs as counted, images where the data puts them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mfu_jax.layers.attention_ops import Pattern
from mfu_jax.layers.families import known_towers

from mfu_jax.errors import UserError
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer import mesh, step
from mfu_jax.trainer.data import make_iterator
from mfu_jax.trainer.model_keys import SEEING_BLOCKS
from mfu_jax.trainer.trainable import trained_and_frozen
from tests.support.tiny_models import LENGTH, ROWS, analytic, gradient, sized

TILES = {"gemma3-4b": 0, "llama4-17b-16e": 2}


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", TILES)
def test_a_step_with_images_has_the_weights_and_flops_that_are_counted(
    name: str, frozen: bool
) -> None:
    tiles = {"tiles_per_image": TILES[name]}
    c = sized(name, images_per_sequence=2, freeze_vision_encoder_params=frozen, **tiles)
    train, (weights, batch) = gradient(c)
    traced = count_model_flops(train, weights, batch)
    assert traced.total == analytic(c)
    assert traced.unaccounted == ()
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == count_parameters(c).total
    trained, still = (dict(nnx.to_flat_state(part)) for part in trained_and_frozen(c, weights))
    assert {path[0] for path in still} == ({"vision_encoder"} if frozen else set())
    assert any(path[0] == "vision_projector" for path in trained)


def test_rows_begin_with_images_of_which_the_last_token_predicts_text() -> None:
    c = sized("gemma3-4b", images_per_sequence=3, dataset_type="synthetic")
    batch = next(make_iterator(c, split="train", rows_per_process=ROWS, accumulation=1))
    tokens = 3 * (32 // 4 // 4) ** 2  # patches of 4 pixels, of which 4 × 4 become a token
    want = [*range(1, tokens + 1), *[0] * (LENGTH - tokens)]
    assert batch["inputs_image"][0].tolist() == [want, want]
    assert batch["targets_weight"][0, 0].tolist() == [0] * (tokens - 1) + [1] * (
        LENGTH - tokens + 1
    )
    assert batch["inputs_segmentation"].max() == 1
    assert len(np.unique(batch["images"])) == 256
    assert (batch["images"][0, 0] != batch["images"][0, 1]).any()
    grid = mesh.make_mesh(c, jax.devices()[:1])
    shapes = step.abstract_batch(c, grid, 1)
    assert {key: (rows.shape, rows.dtype) for key, rows in batch.items()} == {
        key: (leaf.shape, leaf.dtype) for key, leaf in shapes.items()
    }


def test_tokens_of_an_image_see_each_other() -> None:
    images = jnp.array([[0, 1, 1, 1, 2, 0]])
    mask = Pattern(window=2, joins_images=True).mask(jnp.ones((1, 6), int), images)[0]
    assert np.asarray(mask).astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("llama3-8b", {}, "gemma3 and llama4"),
        ("qwen3-vl-2b", {}, "not that of decoder_block=qwen3"),
        ("gemma3-4b", {"lora_rank": 4}, "with lora_rank"),
        ("gemma3-4b", {"images_per_sequence": 32}, "makes 128 tokens of each sequence"),
        ("llama4-17b-16e", {"tile_size_for_vit": 20}, "expected a multiple of 2"),
        ("llama4-17b-16e", {"intermediate_size_for_vit": 64}, "expected 128"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, keys: dict[str, Any], said: str) -> None:
    options = {"images_per_sequence": 1, "override_model_config": True, **keys}
    with pytest.raises(UserError, match=said):
        make_iterator(sized(name, **options), split="train", rows_per_process=2, accumulation=1)


def test_the_config_knows_the_models_that_see() -> None:
    assert known_towers() == sorted(SEEING_BLOCKS)
