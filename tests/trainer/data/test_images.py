"""Images where the data puts them, and configs that cannot have any."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from mfu_jax.layers.families import known_towers

from mfu_jax.errors import UserError
from mfu_jax.flops.executed.counting import executed_flops
from mfu_jax.trainer.config.image_rules import TOWERS
from mfu_jax.trainer.data.batches import make_iterator
from mfu_jax.trainer.step import mesh
from mfu_jax.trainer.step import train_step as step
from tests.support.compilation import only_counted
from tests.support.floats import assert_close_as_float32
from tests.support.jax_versions import FASTER_TO_COMPILE
from tests.support.tiny_models import LENGTH, ROWS, gradient, sized, some_weights


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


def test_both_answers_of_a_pair_follow_the_same_images() -> None:
    c = sized("gemma3-4b", images_per_sequence=3, dataset_type="synthetic", use_dpo=True)
    batch = next(make_iterator(c, split="train", rows_per_process=2 * ROWS, accumulation=1))
    assert batch["images"].shape[:3] == (1, 2 * ROWS, 3)
    assert (batch["images"][0, ::2] == batch["images"][0, 1::2]).all()
    tokens = 3 * (32 // 4 // 4) ** 2
    prompt = tokens + (LENGTH - tokens) // 2
    chosen, rejected = batch["inputs"][0, 0], batch["inputs"][0, 1]
    assert (chosen[:prompt] == rejected[:prompt]).all()
    assert (chosen[prompt:] != rejected[prompt:]).any()
    assert batch["inputs_image"][0, 1].tolist() == [*range(1, tokens + 1), *[0] * (LENGTH - tokens)]
    assert batch["targets_weight"][0, 0].tolist() == [0] * (prompt - 1) + [1] * (
        LENGTH - prompt + 1
    )


ONE_LAYER = {
    "num_decoder_layers": 1,
    "num_hidden_layers_for_vit": 1,
    "freeze_vision_encoder_params": False,
    "override_model_config": True,
}


@pytest.mark.full
def test_devices_that_share_a_sequence_share_its_images() -> None:
    c = sized("gemma3-4b", images_per_sequence=2, dataset_type="synthetic", **ONE_LAYER)
    train, (shapes, _) = gradient(c)
    weights = some_weights(shapes)
    batch = next(make_iterator(c, split="train", rows_per_process=ROWS, accumulation=1))
    losses, flops = [], []
    for devices in (1, 2):
        over = dataclasses.replace(c, context_parallelism=devices)
        grid = mesh.make_mesh(over, jax.devices()[:devices])
        split = {key: rows[0] for key, rows in mesh.put_batch(batch, grid).items()}
        with jax.set_mesh(grid), only_counted():
            program = jax.jit(train).lower(weights, split).compile(FASTER_TO_COMPILE)
        (loss, _), _ = program(weights, split)
        losses.append(float(loss) / (ROWS * LENGTH))
        flops.append(executed_flops(program).total * devices)
    assert flops[0] == flops[1]
    assert_close_as_float32(losses[1], losses[0], terms=ROWS * LENGTH)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("llama3-8b", {}, "gemma3, gemma4, llama4, qwen3, qwen3_moe, not that of"),
        ("qwen3-8b", {}, "patch_size_for_vit=0: it needs"),
        ("qwen3-vl-2b", {"num_position_embeddings_for_vit": 15}, "expected a square"),
        ("qwen3-vl-2b", {"out_hidden_size_for_vit": 32}, "expected emb_dim=64"),
        ("qwen3-vl-2b", {"deepstack_visual_indexes_for_vit": [1, 2]}, "numbers below"),
        ("gemma3-4b", {"images_per_sequence": 32}, "make 128 tokens of each sequence"),
        ("gemma4-31b", {"image_size_for_vit": [24, 28]}, "28 pixels make 7 patches"),
        ("gemma4-31b", {"num_position_embeddings_for_vit": 8}, "at most"),
        ("gemma4-31b", {"image_size_for_vit": [24, 36, 3]}, "or .height, width."),
        ("llama4-17b-16e", {"tile_size_for_vit": 20}, "expected a multiple of 2"),
        ("llama4-17b-16e", {"intermediate_size_for_vit": 64}, "expected 128"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, keys: dict[str, Any], said: str) -> None:
    options = {"images_per_sequence": 1, "override_model_config": True, **keys}
    with pytest.raises(UserError, match=said):
        make_iterator(sized(name, **options), split="train", rows_per_process=2, accumulation=1)


def test_the_config_knows_the_models_that_see() -> None:
    assert known_towers() == sorted(TOWERS)


def test_a_device_of_a_split_sequence_has_whole_images() -> None:
    c = sized("gemma3-4b", images_per_sequence=3, context_parallelism=2)
    with pytest.raises(UserError, match="3 images and tiles, which context=2 does not divide"):
        mesh.make_mesh(c, jax.devices()[:2])
