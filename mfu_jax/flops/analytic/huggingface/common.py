"""Shared by the translations: their table, and the fields that almost every decoder has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig

PLAIN_MLP = ("gelu",)

Translate = Callable[[Fields], ModelConfig]
# `model_type` → the function that translates its config
TRANSLATIONS: dict[str, Translate] = {}


def model_type(*names: str) -> Callable[[Translate], Translate]:
    """Registers a function for the `model_type`s that it translates."""

    def register(translate: Translate) -> Translate:
        TRANSLATIONS.update(dict.fromkeys(names, translate))
        return translate

    return register


def decoder(c: Fields, **changes: Any) -> ModelConfig:
    """A decoder with RMSNorm, rotary positions and a gated MLP, unless overridden by `changes`.

    Attention is latent (MLA) if the model type has its fields.

    Raises:
        UserError: names the field that is missing or wrong.
    """
    layers = c.size("num_hidden_layers")
    attention_bias = c.knows("attention_bias") and c.flag("attention_bias")
    values: dict[str, Any] = {
        "decoder_block": "hf_decoder",
        "vocab_size": c.size("vocab_size"),
        "num_decoder_layers": layers,
        "emb_dim": c.size("hidden_size"),
        "logits_via_embedding": c.flag("tie_word_embeddings", default=True),
        "normalization": "rmsnorm",
        "position_embedding": "rope",
        "attention_bias": attention_bias,
        "attention_output_bias": changes.get("attention_bias", attention_bias),
        "use_bias": c.knows("mlp_bias") and c.flag("mlp_bias"),
        "feed_forward_types": ("dense",) * layers,
        **changes,
    }
    if "num_query_heads" not in values:
        values.update(latent(c) if c.knows("kv_lora_rank") else heads(c))
    if "mlp_dim" not in values:
        values["mlp_dim"] = c.size("intermediate_size")
    if "sliding_window_size" not in values and SLIDING in values.get("layer_types", [SLIDING]):
        values["sliding_window_size"] = c.optional_size("sliding_window")
    if "layer_types" not in values:
        values["layer_types"] = (SLIDING if values["sliding_window_size"] else FULL,) * layers
    return ModelConfig.from_mapping(values)


def encoder(c: Fields, **changes: Any) -> ModelConfig:
    """An encoder, alone or with a decoder: LayerNorm, learned positions, a plain MLP, or `changes`.

    Raises:
        UserError: as `decoder`.
    """
    heads = c.size("num_attention_heads")
    values: dict[str, Any] = {
        "num_decoder_layers": c.size("num_hidden_layers"),
        "emb_dim": c.size("hidden_size"),
        "num_query_heads": heads,
        "num_kv_heads": heads,
        "mlp_activations": PLAIN_MLP,
        "normalization": "layernorm",
        "position_embedding": "learned",
        **changes,
    }
    if "head_dim" not in values:
        values["head_dim"] = c.quotient("hidden_size", "num_attention_heads")
    if "mlp_dim" not in values:
        values["mlp_dim"] = c.size("intermediate_size")
    return ModelConfig.from_mapping(values)


def heads(c: Fields, *, floor: bool = False, derived: bool = False) -> dict[str, int]:
    """Query heads, key/value heads and head width.

    Args:
        floor: whether the model's own code rounds ``hidden_size / num_attention_heads`` down.
        derived: whether it takes this quotient as the head width even if ``head_dim`` is given.
    """
    query_heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", query_heads)
    if query_heads % kv_heads:
        c.fail("num_key_value_heads", f"expected a divisor of num_attention_heads={query_heads}")
    if derived or c.get("head_dim") is None:
        head_dim = c.quotient("hidden_size", "num_attention_heads", floor=floor)
    else:
        head_dim = c.size("head_dim")
    return {"num_query_heads": query_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}


def latent(c: Fields) -> dict[str, Any]:
    """Heads, ranks and widths of MLA."""
    query_heads = c.size("num_attention_heads")
    nope, rope = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim", zero=True)
    if c.has("num_key_value_heads") and query_heads // c.size("num_key_value_heads") != 1:
        c.fail("num_key_value_heads", f"expected num_attention_heads={query_heads}")
    return {
        "attention_type": "mla",
        "num_query_heads": query_heads,
        "num_kv_heads": query_heads,
        "head_dim": nope + rope,
        "q_lora_rank": c.optional_size("q_lora_rank"),
        "kv_lora_rank": c.size("kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": c.size("v_head_dim", c.size("hidden_size") // query_heads),
    }


def equal_heads(c: Fields) -> dict[str, int]:
    """As many key/value heads as query heads, of width ``hidden_size / num_attention_heads``."""
    query_heads = c.size("num_attention_heads")
    width = c.quotient("hidden_size", "num_attention_heads")
    return {"num_query_heads": query_heads, "num_kv_heads": query_heads, "head_dim": width}


def layer_types(
    c: Fields, default: Callable[[int], str], name: str = "layer_types", **renamed: str
) -> list[str]:
    """The list in the file, or else ``default(i)`` for each layer i; with some kinds renamed.

    Raises:
        UserError: its length is not the number of layers.
    """
    layers = c.size("num_hidden_layers")
    given = c.list_of(str, name)
    if given is None:
        given = [default(i) for i in range(layers)]
    return [renamed.get(kind, kind) for kind in checked_length(c, name, given)]


def changed_layers(c: Fields, kinds: list[str], kind: str) -> Fields | None:
    """The config that layers of one kind have by ``per_layer_config``; None if the file has none.

    Raises:
        UserError: it changes other layers, or not each of them in the same way.
    """
    given = c.get("per_layer_config")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        c.fail("per_layer_config", "expected an object")
    numbers = {int(key) if str(key).isdecimal() and len(str(key)) < 7 else -1 for key in given}
    if numbers and numbers != {i for i, each in enumerate(kinds) if each == kind}:
        c.fail("per_layer_config", f"expected the layers with {kind}, or none")
    changes = list(given.values()) or [{}]
    if not isinstance(changes[0], Mapping) or any(each != changes[0] for each in changes):
        c.fail("per_layer_config", "expected the same sizes in each layer")
    return c.with_values(**changes[0])


def has_rope(c: Fields) -> Callable[[int], int]:
    """Which layers have rotary positions: as listed, or all except every n-th."""
    interval, listed = c.size("no_rope_layer_interval", 4), c.list_of(int, "no_rope_layers") or []
    return lambda i: listed[i] if i < len(listed) else (i + 1) % interval


def checked_length(c: Fields, name: str, given: list[Any]) -> list[Any]:
    """`given`, which must have one entry per layer."""
    layers = c.size("num_hidden_layers")
    if len(given) != layers:
        c.fail(name, f"has {len(given)} entries, expected num_hidden_layers={layers}")
    return given


def every(interval: int, last: str, others: str) -> Callable[[int], str]:
    """`last` for every `interval`-th layer (none if `interval` is 0), `others` for the rest."""
    return lambda i: last if interval and (i + 1) % interval == 0 else others


def first_of(interval: int, first: str, others: str) -> Callable[[int], str]:
    """`first` for layer 0 and every `interval`-th after it, `others` for the rest."""
    return lambda i: others if i % interval else first


# Which layers have experts: those from this one on, or from the one in this field; or a rule.
Where = int | str | Callable[[int], bool]


def moe_where(c: Fields, where: Where) -> list[str]:
    """``moe`` or ``dense`` for each layer: as in ``mlp_layer_types``, or else by `where`."""
    first = c.size(where, zero=True) if isinstance(where, str) else where
    is_moe = first if callable(first) else first.__le__
    default = ["moe" if is_moe(i) else "dense" for i in range(c.size("num_hidden_layers"))]
    if not c.knows("mlp_layer_types"):
        return default
    kinds = layer_types(c, default.__getitem__, "mlp_layer_types")
    if wrong := [kind for kind in kinds if kind not in ("dense", "sparse", "moe")]:
        c.fail("mlp_layer_types", f"expected dense or sparse, got {wrong[0]!r}")
    return ["dense" if kind == "dense" else "moe" for kind in kinds]


# What model types call the same: the first name of a row that a type knows is the one it reads.
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_intermediate_size",
    "shared_expert_intermediate_size",
    "share_expert_dim",
    "moe_shared_expert_intermediate_size",
)


def experts(c: Fields, where: Where | None = None) -> dict[str, Any]:
    """Number of experts, number used per token, their hidden width, and the shared experts.

    Args:
        where: the layers that have them; None: not said here.
    """
    count, used = c.named(*_EXPERTS), c.named(*_USED)
    number, chosen = c.size(count), c.size(used)
    if chosen > number:
        c.fail(used, f"expected at most {count}={number}")
    return {
        "num_experts": number,
        "num_experts_per_tok": chosen,
        "moe_mlp_dim": c.size(c.named(*_WIDTH)),
        **({} if where is None else {"feed_forward_types": moe_where(c, where)}),
        **_shared_experts(c),
    }


def _shared_experts(c: Fields) -> dict[str, int]:
    """Shared experts as wide as the routed ones, or one of its own width; none if that is 0."""
    if name := c.named(*_SHARED):
        return {"shared_experts": c.optional_size(name)}
    name = c.named(*_SHARED_WIDTH)
    width = c.optional_size(name) if name else 0
    return {"shared_experts": 1, "shared_expert_dim": width} if width else {}


def needs_trace(c: Fields, name: str, without: Any = None) -> None:
    """Raises a `UserError` if a field has a value other than `without` or null."""
    if c.get(name) not in (None, without):
        c.fail(name, "is not counted by a formula; mfu-jax flops config.json --trace counts it")


def refuse(c: Fields, name: str) -> None:
    """Raises a `UserError` if a field enables a part that is not counted here."""
    if c.flag(name):
        c.fail(
            name, "is not counted from a config; count_model_flops(fn, *args) counts any function"
        )


def per_layer_inputs(c: Fields) -> dict[str, int]:
    """Gemma 3n and 4: layers that share keys and values, and per-layer inputs."""
    shared = c.size("num_kv_shared_layers", 0, zero=True)
    if shared >= c.size("num_hidden_layers"):
        c.fail("num_kv_shared_layers", "expected fewer than num_hidden_layers")
    return {
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": c.optional_size("hidden_size_per_layer_input"),
        "vocab_size_per_layer_input": c.size("vocab_size_per_layer_input", c.size("vocab_size")),
    }


def tied_text(c: Fields, kind: str) -> Fields:
    """The text config of a model whose outer config says whether the head is tied."""
    tied = c.flag("tie_word_embeddings")
    return c.nested("text_config", kind).with_values(tie_word_embeddings=tied)


def image(c: Fields) -> dict[str, Any]:
    """Sizes of an image and of its patches."""
    side, patch = c.size("image_size"), c.size("patch_size")
    if side < patch:
        c.fail("image_size", f"expected patch_size={patch} or more")
    return {
        "image_size_for_vit": side,
        "patch_size_for_vit": patch,
        "num_channels_for_vit": c.size("num_channels"),
    }


def vision_encoder(vision: Fields) -> dict[str, Any]:
    """Sizes of a plain vision transformer."""
    vision.quotient("hidden_size", "num_attention_heads")
    return {
        **image(vision),
        "hidden_size_for_vit": vision.size("hidden_size"),
        "intermediate_size_for_vit": vision.size("intermediate_size"),
        "num_hidden_layers_for_vit": vision.size("num_hidden_layers"),
    }


def audio_channels(audio: Fields, name: str) -> list[int]:
    """Channels of the two convolutions before a conformer."""
    channels = audio.list_of(int, name) or []
    if len(channels) != 2 or min(channels) < 1:
        audio.fail(name, "expected two numbers")
    return channels
