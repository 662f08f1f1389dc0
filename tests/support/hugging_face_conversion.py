"""Weights of transformers' models → the weights of a `Decoder` with unrolled layers.

transformers stores a projection as ``[outputs, inputs]``; ours are ``[inputs, outputs]``, with
heads as a dimension of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.support.hugging_face_vision import is_of_tower, load_of_tower

Weights = Mapping[str, np.ndarray]

# What stands after a layer's name → the module of ours.
_PLACES = {
    "self_attn.q_proj": "mixer.query",
    "self_attn.k_proj": "mixer.key",
    "self_attn.v_proj": "mixer.value",
    "self_attn.o_proj": "mixer.out",
    "self_attn.q_norm": "mixer.query_norm",
    "self_attn.k_norm": "mixer.key_norm",
    "self_attn.sinks": "mixer.sinks",
    "self_attn.q_a_proj": "mixer.query_a",
    "self_attn.q_a_layernorm": "mixer.query_norm",
    "self_attn.q_b_proj": "mixer.query_b",
    "self_attn.kv_a_proj_with_mqa": "mixer.kv_a",
    "self_attn.kv_a_layernorm": "mixer.kv_norm",
    "self_attn.kv_b_proj": "mixer.kv_b",
    "linear_attn.in_proj_qkvz": "mixer.in_qkvz",
    "linear_attn.in_proj_ba": "mixer.in_ba",
    "linear_attn.conv1d": "mixer.kernel",
    "linear_attn.A_log": "mixer.log_decay",
    "linear_attn.dt_bias": "mixer.time_bias",
    "linear_attn.norm": "mixer.norm",
    "linear_attn.out_proj": "mixer.out",
    "mlp.gate_proj": "feed_forward.wi_0",
    "mlp.up_proj": "feed_forward.wi_1",
    "mlp.down_proj": "feed_forward.wo",
    "mlp.gate": "feed_forward.router.gate",
    "mlp.gate.e_score_correction_bias": "feed_forward.router.choice_bias",
    "mlp.router": "feed_forward.router.gate",
    "mlp.shared_expert_gate": "feed_forward.shared_gate",
    "layer_scalar": "scale",
    "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "pre_mlp_norm",
}
_SHARED = {
    f"mlp.{name}.{theirs}": f"feed_forward.shared.{ours}"
    for name in ("shared_expert", "shared_experts")
    for theirs, ours in {"gate_proj": "wi_0", "up_proj": "wi_1", "down_proj": "wo"}.items()
}
# Families with norms behind the parts.
_POST_NORMS = {
    "post_attention_layernorm": "post_mixer_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_GPT2 = {
    "ln_1": "pre_mixer_norm",
    "ln_2": "pre_mlp_norm",
    "attn.c_proj": "mixer.out",
    "mlp.c_fc": "feed_forward.wi_0",
    "mlp.c_proj": "feed_forward.wo",
}
_TOP = {
    "model.embed_tokens": "token_embedder.embedding",
    "transformer.wte": "token_embedder.embedding",
    "transformer.wpe": "position_embedder.embedding",
    "model.norm": "decoder_norm",
    "transformer.ln_f": "decoder_norm",
    "lm_head": "logits_dense",
}


def load_weights(model: Any, family: str, weights: Weights) -> None:
    """Puts every weight in its place.

    Raises:
        KeyError: there is no place for one.
        AssertionError: a size differs, or a weight of ours gets no value.
    """
    family, filled = family.removesuffix("_images"), 0
    for name, value in weights.items():
        filled += _load(model, family, name, value)
    assert filled == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def _load(model: Any, family: str, name: str, value: np.ndarray) -> int:
    """How many values of ours a weight of theirs has filled."""
    name = name.replace("model.language_model.", "model.").replace("language_model.", "")
    if is_of_tower(of_tower := name.removeprefix("model.")):
        return load_of_tower(model, of_tower, value)
    stem, _, kind = name.rpartition(".")
    if name.endswith((".weight", ".bias")) and stem in _TOP:
        return _put(model, _TOP[stem], kind, value)
    number, rest = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", name).groups()
    block = model.layers.groups[int(number)][0]
    rest = rest.replace("feed_forward.", "mlp.")
    if ".experts." in rest:
        return _experts(block, rest.rpartition(".")[2], value, family)
    if rest.startswith("attn.c_attn"):
        width = value.shape[-1] // 3
        parts = np.split(value, [width, 2 * width], axis=-1)
        return sum(
            _put(block, f"mixer.{n}", kind, p if p.ndim == 1 else p.T)
            for n, p in zip(("query", "key", "value"), parts, strict=True)
        )
    stem = rest.removesuffix(".weight").removesuffix(".bias")
    places = {**_PLACES, **_SHARED, **(_POST_NORMS if family in _SANDWICHED else {}), **_GPT2}
    if family == "gpt2" and value.ndim == 2:
        value = value.T  # GPT-2 stores [inputs, outputs]
    if stem in _OF_CLASS:
        _module(block, places[stem]).epsilon = _OF_CLASS_EPSILON
    return _put(block, places[stem], kind, _reordered(family, stem, value, model))


# Norms that transformers makes without the config's epsilon.
_OF_CLASS = ("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")
_OF_CLASS_EPSILON = 1e-6
_SANDWICHED = ("gemma2", "gemma3", "gemma4", "olmo3")
# Families whose rotary pairs are neighbours; ours are halves.
_INTERLEAVED = {
    "llama4": {"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 8)},
    # (values of a head, of which the last are rotated)
    "deepseek_v3": {"self_attn.q_b_proj": (12, 4), "self_attn.kv_a_proj_with_mqa": (20, 4)},
}


def _reordered(family: str, stem: str, value: np.ndarray, model: Any) -> np.ndarray:
    if sizes := _INTERLEAVED.get(family, {}).get(stem):
        head, rotated = sizes
        heads = value.reshape(-1, head, value.shape[-1])
        order = [*range(0, rotated, 2), *range(1, rotated, 2)]
        turned = heads[:, head - rotated :][:, order]
        heads = np.concatenate([heads[:, : head - rotated], turned], axis=1)
        return heads.reshape(value.shape)
    if stem == "linear_attn.in_proj_qkvz":
        # Theirs has queries, keys, values and gates of one key head after the other.
        grouped = np.split(value.reshape(2, 40, -1), [8, 16, 28], axis=1)
        return np.concatenate([part.reshape(-1, value.shape[-1]) for part in grouped])
    if stem == "linear_attn.in_proj_ba":
        grouped = np.split(value.reshape(2, 4, -1), 2, axis=1)
        return np.concatenate([part.reshape(-1, value.shape[-1]) for part in grouped])
    return value


def _experts(block: Any, name: str, value: np.ndarray, family: str) -> int:
    """Gate and input of the experts, which transformers stores as one."""
    kind = "_bias" if name.endswith("_bias") else ""
    experts_first = family in ("gpt_oss", "llama4")  # [experts, inputs, outputs]
    if not kind and not experts_first:
        value = value.swapaxes(1, 2)
    if name.startswith("down_proj"):
        return _assign(getattr(block.feed_forward, f"wo{kind}"), value)
    split = (value[..., ::2], value[..., 1::2]) if family == "gpt_oss" else np.split(value, 2, -1)
    return sum(
        _assign(getattr(block.feed_forward, f"wi_{i}{kind}"), part) for i, part in enumerate(split)
    )


def _put(module: Any, place: str, kind: str, value: np.ndarray) -> int:
    target = _module(module, place)
    if hasattr(target, "kernel") and place != "mixer.kernel":
        if kind == "bias":
            return _assign(target.bias, value)
        return _assign(target.kernel, value.T)
    if hasattr(target, "scale"):
        return _assign(target.bias if kind == "bias" else target.scale, value)
    return _assign(target, value.squeeze(1).T if place == "mixer.kernel" else value)


def _module(module: Any, place: str) -> Any:
    return functools.reduce(getattr, place.split("."), module)


def _assign(parameter: Any, value: np.ndarray) -> int:
    assert parameter.get_value().size == value.size, (parameter.get_value().shape, value.shape)
    parameter.set_value(jnp.asarray(value.reshape(parameter.get_value().shape)))
    return int(value.size)
