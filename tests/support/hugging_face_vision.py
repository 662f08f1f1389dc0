"""Weights of transformers' vision towers → those of a `Decoder`."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

# What stands after a layer's name → the module of ours.
_IN_LAYERS = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.out_proj": "mixer.out",
    "self_attn.o_proj": "mixer.out",
    "mlp.fc1": "feed_forward.wi_0",
    "mlp.fc2": "feed_forward.wo",
    "self_attn.q_norm": "mixer.query_norm",
    "self_attn.k_norm": "mixer.key_norm",
    "mlp.gate_proj": "feed_forward.wi_0",
    "mlp.up_proj": "feed_forward.wi_1",
    "mlp.down_proj": "feed_forward.wo",
    "attn.proj": "mixer.out",
    "mlp.linear_fc1": "feed_forward.wi_0",
    "mlp.linear_fc2": "feed_forward.wo",
    "norm1": "pre_mixer_norm",
    "norm2": "pre_mlp_norm",
    "layer_norm1": "pre_mixer_norm",
    "layer_norm2": "pre_mlp_norm",
    "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "pre_mlp_norm",
}
_POST_NORMS = {
    "post_attention_layernorm": "post_mixer_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_AROUND = {
    "vision_tower.patch_embedder.input_proj": "vision_encoder.patches",
    "embed_vision.embedding_projection": "vision_projector.projection",
    "vision_tower.embeddings.patch_embedding": "vision_encoder.patches",
    "vision_tower.embeddings.position_embedding": "vision_encoder.positions",
    "vision_tower.post_layernorm": "vision_encoder.norm",
    "multi_modal_projector.mm_soft_emb_norm": "vision_projector.norm",
    "vision_model.patch_embedding.linear": "vision_encoder.patches",
    "vision_model.layernorm_pre": "vision_encoder.first_norm",
    "vision_model.layernorm_post": "vision_encoder.norm",
    "vision_model.vision_adapter.mlp.fc1": "vision_encoder.merge.fc1",
    "vision_model.vision_adapter.mlp.fc2": "vision_encoder.merge.fc2",
    "multi_modal_projector.linear_1": "vision_projector.projection",
    "visual.patch_embed.proj": "vision_encoder.patches",
    "visual.pos_embed": "vision_encoder.positions",
}
# Qwen3-VL's mergers → modules of a `SquareProjector`.
_IN_MERGERS = {"norm": "norm", "linear_fc1": "mlp_0", "linear_fc2": "mlp_2"}
# Parameters that are not a module's weight or bias.
_ALONE = {
    "vision_tower.patch_embedder.position_embedding_table": "vision_encoder.positions",
    "vision_tower.std_bias": "vision_encoder.merge.shift",
    "vision_tower.std_scale": "vision_encoder.merge.scale",
    "vision_model.class_embedding": "vision_encoder.class_token",
    "vision_model.positional_embedding_vlm": "vision_encoder.positions",
    "multi_modal_projector.mm_input_projection_weight": "vision_projector.projection.kernel",
}
_CHANNELS = 3
_LAYER = r"(?:vision_\w+\.(?:encoder|model)\.layers|visual\.blocks)\.(\d+)\.(.*)"


def is_of_tower(name: str) -> bool:
    """Whether a weight's name, without ``model.`` in front, is of the tower or its projector."""
    return name.startswith(("vision_", "multi_modal_projector", "embed_vision", "visual."))


def load_of_tower(model: Any, name: str, value: np.ndarray) -> int:
    """Puts a weight in its place; returns how many values it has."""
    if name in _ALONE:
        return _assign(_module(model, _ALONE[name]), value)
    stem, _, kind = name.rpartition(".")
    if merger := re.fullmatch(r"visual\.(?:merger|deepstack_merger_list\.(\d+))\.(\w+)", stem):
        number, part = merger.groups()
        of = model.vision_encoder.deep[int(number)] if number else model.vision_projector
        target = getattr(of, _IN_MERGERS[part])
    elif layer := re.fullmatch(_LAYER, stem):
        place = model.vision_encoder.layers.groups[int(layer[1])][0]
        if layer[2] == "attn.qkv":
            parts = zip(("query", "key", "value"), np.split(value, 3), strict=True)
            return sum(_put(_module(place, f"mixer.{n}"), stem, kind, part) for n, part in parts)
        names = {**_IN_LAYERS, **(_POST_NORMS if hasattr(place, "post_mixer_norm") else {})}
        target = _module(place, names[layer[2].removesuffix(".linear")])
    else:
        target = _module(model, _AROUND[stem])
    return _put(target, stem, kind, value)


def _put(target: Any, stem: str, kind: str, value: np.ndarray) -> int:
    if kind == "bias":
        return _assign(target.bias, value)
    if hasattr(target, "scale"):
        return _assign(target.scale, value)
    if not hasattr(target, "kernel"):
        return _assign(target, value)
    of_pixels = "patch_emb" in stem and "patch_embedder" not in stem
    return _assign(target.kernel, _of_pixels(value) if of_pixels else value.T)


def _of_pixels(value: np.ndarray) -> np.ndarray:
    """[width, channels, (frames,) side, side], perhaps flat → [… side · side · channels, width]."""
    width = len(value)
    channels = value.reshape(width, _CHANNELS, -1)
    return channels.transpose(2, 1, 0).reshape(-1, width)


def _module(of: Any, place: str) -> Any:
    return functools.reduce(getattr, place.split("."), of)


def _assign(parameter: Any, value: np.ndarray) -> int:
    assert parameter.get_value().size == value.size, (parameter.get_value().shape, value.shape)
    parameter.set_value(jnp.asarray(value.reshape(parameter.get_value().shape)))
    return int(value.size)
