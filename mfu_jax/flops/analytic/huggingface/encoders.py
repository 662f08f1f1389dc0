"""Encoders and encoder-decoders: BERT, ModernBERT, EuroBERT, ViT, CLIP, T5, Whisper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.flops.analytic.huggingface.common import (
    PLAIN_MLP,
    decoder,
    equal_heads,
    first_of,
    image,
    layer_types,
    model_type,
    vision_encoder,
)
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.layers import FULL, SLIDING
from mfu_jax.flops.analytic.model_configs.model import ModelConfig


def _class_heads(c: Fields, heads: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The heads of the class named in ``architectures``; of the first one if it names none."""
    name = next(iter(c.list_of(str, "architectures") or heads))
    if name not in heads:
        c.fail("architectures", f"expected one of {', '.join(heads)}")
    return heads[name]


def _num_labels(c: Fields) -> int:
    """Number of classes: that of id2label, else num_labels, else transformers' default, 2."""
    labels = c.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else c.size("num_labels", 2)


def _encoder(c: Fields, block: str, **changes: Any) -> ModelConfig:
    heads = c.size("num_attention_heads")
    values: dict[str, Any] = {
        "decoder_block": block,
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


# A class's name without its prefix → its heads.
_TEXT_CLASSES = {
    "ForMaskedLM": ("mlm",),
    "Model": ("pooler",),
    "ForTokenClassification": ("token_classifier",),
    "ForQuestionAnswering": ("token_classifier",),
}
_BERT_CLASSES = {
    **_TEXT_CLASSES,
    "LMHeadModel": ("mlm",),
    "ForPreTraining": ("pooler", "mlm", "next_sentence"),
    "ForNextSentencePrediction": ("pooler", "next_sentence"),
    "ForSequenceClassification": ("pooler", "classifier"),
}
_ROBERTA_PREFIX = {
    "roberta": "Roberta",
    "camembert": "Camembert",
    "xlm-roberta": "XLMRoberta",
    "data2vec-text": "Data2VecText",
}


@model_type("roberta", "camembert", "xlm-roberta", "data2vec-text")
def roberta(c: Fields) -> ModelConfig:
    """Like bert; its sequence classifier has a different head, which is not counted here."""
    classes = {**_TEXT_CLASSES, "ForCausalLM": ("mlm",)}
    return _bert(c, classes, _ROBERTA_PREFIX[c.model_type])


@model_type("bert")
def bert(c: Fields) -> ModelConfig:
    """Post-norm encoder; masked-language-model head if ``architectures`` names no class."""
    return _bert(c, _BERT_CLASSES, "Bert")


def _bert(c: Fields, heads: Mapping[str, tuple[str, ...]], prefix: str) -> ModelConfig:
    classes = {f"{prefix}{name}": of_class for name, of_class in heads.items()}
    for unsupported in ("add_cross_attention", "is_decoder"):
        if c.flag(unsupported):
            c.fail(unsupported, "only the encoder is counted from a config")
    return _encoder(
        c,
        "hf_bert",
        vocab_size=c.size("vocab_size"),
        logits_via_embedding=c.flag("tie_word_embeddings", default=True),
        trainable_position_size=c.size("max_position_embeddings"),
        token_types=c.size("type_vocab_size"),
        output_heads=_class_heads(c, classes),
        num_labels=_num_labels(c),
    )


@model_type("eurobert")
def eurobert(c: Fields) -> ModelConfig:
    """Llama's layers without a causal mask."""
    return decoder(c, bidirectional=True, head_bias=c.flag("mlp_bias"))


@model_type("modernbert", "modernbert-decoder")
def modernbert(c: Fields) -> ModelConfig:
    """Windows of half `local_attention`, the encoder's to both sides.

    The first norm of the first layer follows the embedding instead.
    """
    both_ways = c.model_type == "modernbert"
    interval = c.size("global_attn_every_n_layers", 3)
    return decoder(
        c,
        normalization="layernorm" if c.flag("norm_bias") else "rmsnorm",  # as many weights
        bidirectional=both_ways,
        sliding_window_size=c.optional_size("local_attention") // 2 + both_ways,  # with itself
        layer_types=layer_types(c, first_of(interval, FULL, SLIDING)),
        head_transform=True,
        head_bias=c.flag("decoder_bias"),
        further_vectors=c.size("hidden_size") * c.flag("classifier_bias"),
        **equal_heads(c),
    )


_VIT_CLASSES = {
    "ViTForImageClassification": ("classifier",),
    "ViTModel": ("pooler",),
}


@model_type("vit")
def vit(c: Fields) -> ModelConfig:
    """Image classifier if ``architectures`` names no class; a sequence is one image."""
    labels, sizes = _num_labels(c), image(c)
    side = sizes["image_size_for_vit"] // sizes["patch_size_for_vit"]
    return _encoder(
        c,
        "hf_vit",
        vocab_size=labels,
        max_target_length=side * side + 1,
        attention_bias=c.flag("qkv_bias", default=True),
        output_heads=_class_heads(c, _VIT_CLASSES),
        num_labels=labels,
        pooled_width=c.size("pooler_output_size", c.size("hidden_size")),
        **sizes,
    )


@model_type("clip")
def clip(c: Fields) -> ModelConfig:
    """Text and vision encoders with their projections; one image per text."""
    text = _clip_part(c, "text")
    vision = _clip_part(c, "vision")
    return _encoder(
        text,
        "hf_clip",
        vocab_size=text.size("vocab_size"),
        trainable_position_size=text.size("max_position_embeddings"),
        projection_width=c.size("projection_dim"),
        images_per_sequence=1,
        **vision_encoder(vision),
    )


def _clip_part(c: Fields, name: str) -> Fields:
    """Older files also have ``text_config_dict``, which then replaces ``text_config``."""
    older = f"{name}_config_dict"
    return c.nested(older if c.has(older) else f"{name}_config", f"clip_{name}_model")


_T5_CLASSES = {
    "ForConditionalGeneration": ("logits",),
    "WithLMHeadModel": ("logits",),
    "Model": ("none",),
    "EncoderModel": ("encoder",),
}


@model_type("t5", "mt5", "umt5")
def t5(c: Fields) -> ModelConfig:
    """Encoder and decoder, equally long if encoder_length is not given.

    transformers ties the head to the embedding regardless of ``tie_word_embeddings`` (which there
    determines a scale).
    """
    heads = c.size("num_heads")
    gated = c.text("feed_forward_proj").startswith("gated")
    classes = {f"{c.model_type.upper()}{name}": of_class for name, of_class in _T5_CLASSES.items()}
    return _encoder(
        c,
        "hf_t5",
        vocab_size=c.size("vocab_size"),
        num_encoder_layers=c.size("num_layers"),
        num_decoder_layers=c.size("num_decoder_layers", c.size("num_layers")),
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=c.size("d_kv"),
        mlp_dim=c.size("d_ff"),
        mlp_activations=("gelu", "linear") if gated else PLAIN_MLP,
        normalization="rmsnorm",
        logits_via_embedding=True,
        position_buckets=c.size("relative_attention_num_buckets"),
        positions_in_every_layer=c.model_type == "umt5",
        output_heads=_class_heads(c, classes),
    )


_WHISPER_CLASSES = {
    "WhisperForConditionalGeneration": ("logits",),
    "WhisperModel": ("none",),
}


@model_type("whisper")
def whisper(c: Fields) -> ModelConfig:
    """Audio encoder of fixed length (max_source_positions) and text decoder."""
    heads = c.size("decoder_attention_heads")
    c.quotient("d_model", "encoder_attention_heads")
    return _encoder(
        c,
        "hf_whisper",
        vocab_size=c.size("vocab_size"),
        num_encoder_layers=c.size("encoder_layers"),
        num_decoder_layers=c.size("decoder_layers"),
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=c.quotient("d_model", "decoder_attention_heads"),
        mlp_dim=c.size("decoder_ffn_dim"),
        encoder_mlp_dim=c.size("encoder_ffn_dim"),
        encoder_length=c.size("max_source_positions"),
        trainable_position_size=c.size("max_target_positions"),
        audio_bins=c.size("num_mel_bins"),
        logits_via_embedding=c.flag("tie_word_embeddings", default=True),
        output_heads=_class_heads(c, _WHISPER_CLASSES),
    )
