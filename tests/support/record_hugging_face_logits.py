"""Records the logits of tiny models of transformers, for `tests/layers/test_hugging_face.py`.

    python -m tests.support.record_hugging_face_logits      # wants torch and transformers, no JAX

Writes ``tests/data/hugging_face_logits.npz``: for each family the names and shapes of its weights,
tokens, logits in float32, and of models that see images (bytes) and their tokens' places. Weights
are those of `named_weight`.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.hugging_face_weights import named_weight

OUT = Path(__file__).parents[1] / "data" / "hugging_face_logits.npz"
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BY_KIND = {"full_attention": ROPE, "sliding_attention": ROPE}
# family → (class of transformers, its config beside COMMON)
FAMILIES = {
    "llama": ("Llama", {"num_hidden_layers": 2}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 2}),
    "gemma2": (
        "Gemma2",
        {"num_hidden_layers": 2, "sliding_window": 8, "query_pre_attn_scalar": 12}
        | {"tie_word_embeddings": True},
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 12}
        | {"tie_word_embeddings": True},
    ),
    "gemma4": (
        "Gemma4",
        {
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "rope_parameters": BY_KIND,
        },
    ),
    "olmo3": ("Olmo3", {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": BY_KIND}),
    "gpt2": (
        "GPT2",
        {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 24, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "Mixtral",
        {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": ROPE},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 2,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": ROPE,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],
            "rope_parameters": ROPE,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 20,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "num_key_value_heads": 4,
            "rope_parameters": ROPE,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 20,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
    ),
}


# How positions are stretched → the rotary parameters of a Llama of one layer, and its longest
# sequence; those of the test have 24 tokens.
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 1.5, 4.0, 9.0]}
STRETCHED: dict[str, tuple[dict[str, Any], int]] = {
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 16}, 64),
    "dynamic": ({"factor": 2.0}, 16),
    "longrope_long": ({**FACTORS, "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    "longrope_short": ({**FACTORS, "factor": 4.0, "original_max_position_embeddings": 32}, 128),
}
for _name, (_parameters, _longest) in STRETCHED.items():
    _rope = {"rope_type": _name.partition("_")[0], "rope_theta": 10000.0, **_parameters}
    _settings = {"num_hidden_layers": 1, "max_position_embeddings": _longest}
    FAMILIES[_name] = ("Llama", _settings | {"rope_parameters": _rope})

# Stands in the text for a token of an image.
IMAGE = 63
TOWER = {"patch_size": 4, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
# family of models that see → (class of transformers, the tower's config, the config beside both)
SEEING = {
    "gemma3": (
        "Gemma3",
        {"image_size": 32, "intermediate_size": 48},
        {"mm_tokens_per_image": 4, "tie_word_embeddings": True},
    ),
    "gemma4": (
        "Gemma4",
        {"intermediate_size": 48, "head_dim": 8, "num_key_value_heads": 4, "standardize": True}
        | {"position_embedding_size": 16},
        {"tie_word_embeddings": True},
    ),
    "llama4": (
        "Llama4",
        {"image_size": 16, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5}
        | {"projector_input_dim": 40, "projector_output_dim": 40, "vision_output_dim": 40},
        {},
    ),
    "qwen3": (
        "Qwen3VL",
        {"intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 9}
        | {"deepstack_visual_indexes": [0, 1]},
        {},
    ),
}
# What the text of a model that sees has beside that of `FAMILIES`.
SEEING_TEXT = {"qwen3": {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}}}
IMAGE_SIDE = 16
# Height and width of images that are no squares.
SIDES = {"gemma4": [12, 48]}
# Two images of four tokens.
PLACES = (0, *range(1, 5), 0, *range(5, 9), *(0,) * 14)


def with_images(family: str) -> dict[str, Any]:
    """Shapes of the weights, tokens, logits, pixels [1, 2, side, side, 3] and places [1, 24]."""
    import torch
    import transformers

    name, tower, own = SEEING[family]
    implementations = ("attn_implementation", "experts_implementation")
    text = {**COMMON, **FAMILIES[family][1], **SEEING_TEXT.get(family, {})}
    text = {k: v for k, v in text.items() if k not in implementations}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=TOWER | tower,
        **{"image_token_id" if family in ("gemma4", "qwen3") else "image_token_index": IMAGE},
        **own,
        **dict.fromkeys(implementations, "eager"),
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    rng = np.random.default_rng(0)
    places = np.array([PLACES], np.int32)
    tokens = np.where(places, IMAGE, rng.integers(1, 60, places.shape))
    sides = SIDES.get(family) or [tower.get("image_size", IMAGE_SIDE)] * 2
    pixels = rng.integers(0, 256, (1, 2, *sides, 3), np.uint8)
    shapes = {}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if "vision_tower.head" in key or (
                key == "lm_head.weight" and own.get("tie_word_embeddings")
            ):
                continue
            shapes[key] = tuple(tensor.shape)
            tensor.copy_(torch.from_numpy(named_weight(key, shapes[key])))
        logits = model(
            torch.from_numpy(tokens),
            attention_mask=torch.ones(tokens.shape, dtype=torch.int64),
            **_seen(family, pixels[0], torch.from_numpy((places > 0).astype(np.int64))),
        ).logits.numpy()
    return {
        "shapes": np.array(json.dumps(shapes)),
        "tokens": tokens.astype(np.int32),
        "logits": logits.astype(np.float32),
        "pixels": pixels,
        "places": places,
    }


def _seen(family: str, pixels: np.ndarray, is_image: Any) -> dict[str, Any]:
    """What a model takes for images [images, height, width, 3] of bytes."""
    import torch

    values = torch.from_numpy(pixels).float() / 255
    if family == "qwen3":
        return {**_squares(2 * values - 1), "mm_token_type_ids": is_image}
    if family != "gemma4":
        kinds = {"token_type_ids": is_image} if family == "gemma3" else {}
        return {"pixel_values": 2 * values.permute(0, 3, 1, 2) - 1, **kinds}
    count, height, width, _ = pixels.shape
    rows, columns, side = height // 4, width // 4, TOWER["patch_size"]
    patches = values.reshape(count, rows, side, columns, side, 3).transpose(2, 3)
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
    return {
        "pixel_values": patches.reshape(count, rows * columns, -1),
        "image_position_ids": places.expand(count, -1, -1),
        "mm_token_type_ids": is_image,
    }


def _squares(values: Any) -> dict[str, Any]:
    """Patches of two equal frames, 2 × 2 of them after each other, and each image's grid."""
    import torch

    count, height, width, channels = values.shape
    side = TOWER["patch_size"]
    rows, columns = height // side, width // side
    cut = values.reshape(count, rows // 2, 2, side, columns // 2, 2, side, channels)
    patches = cut.permute(0, 1, 4, 2, 5, 7, 3, 6).unsqueeze(6).expand(*(-1,) * 6, 2, -1, -1)
    grid = torch.tensor([[1, rows, columns]] * count)
    return {"pixel_values": patches.reshape(count * rows * columns, -1), "image_grid_thw": grid}


def logits_of(family: str) -> tuple[dict[str, tuple[int, ...]], np.ndarray, np.ndarray]:
    """Shapes of the weights, tokens [1, 24] and logits [1, 24, 64]."""
    import torch
    import transformers

    name, own = FAMILIES[family]
    suffix = "TextConfig" if name in ("Gemma3", "Gemma4", "Llama4") else "Config"
    model_class = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    settings = {**COMMON, **own}
    if name in ("GPT2", "DeepseekV3"):
        del settings["head_dim"]
    config = getattr(transformers, f"{name}{suffix}")(**settings)
    model = getattr(transformers, model_class)(config).eval()
    shapes = {}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key == "lm_head.weight" and settings["tie_word_embeddings"]:
                continue
            shapes[key] = tuple(tensor.shape)
            tensor.copy_(torch.from_numpy(named_weight(key, shapes[key])))
        tokens = np.random.default_rng(0).integers(1, 64, (1, 24))
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    return shapes, tokens, logits


def main() -> None:
    arrays = {}
    for family in FAMILIES:
        shapes, tokens, logits = logits_of(family)
        arrays[f"{family}/shapes"] = np.array(json.dumps(shapes))
        arrays[f"{family}/tokens"] = tokens.astype(np.int32)
        arrays[f"{family}/logits"] = logits.astype(np.float32)
        print(family, float(np.abs(logits).max()))
    for family in SEEING:
        found = with_images(family)
        arrays |= {f"{family}_images/{key}": value for key, value in found.items()}
        print(family, "with images", float(np.abs(found["logits"]).max()))
    arrays["transformers"] = np.array(importlib.metadata.version("transformers"))
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
