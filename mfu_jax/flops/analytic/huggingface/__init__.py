"""A Hugging Face ``config.json`` → `ModelShape`, one small function a family.

A family is registered under the `model_type`s that it translates:

    @model_type("llama", "mistral")
    def llama(c: Fields) -> ModelShape: ...

Fields that a config leaves out have their defaults of transformers 5.23.0
(``huggingface_defaults.yml``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.errors import UserError, nearest

# Importing a module registers its families.
from mfu_jax.flops.analytic.huggingface import deepseek_v4 as deepseek_v4
from mfu_jax.flops.analytic.huggingface import dense as dense
from mfu_jax.flops.analytic.huggingface import encoders as encoders
from mfu_jax.flops.analytic.huggingface import gemma as gemma
from mfu_jax.flops.analytic.huggingface import hybrids as hybrids
from mfu_jax.flops.analytic.huggingface import mixtures as mixtures
from mfu_jax.flops.analytic.huggingface import multimodal as multimodal
from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.huggingface.registry import TRANSLATIONS
from mfu_jax.flops.analytic.shapes.hf_decoder import HfDecoderShape
from mfu_jax.flops.analytic.shapes.hf_encoder import HfEncoderShape
from mfu_jax.flops.analytic.shapes.model import ModelShape

# Fields of the step, and of what is trained, that may stand beside the config's own.
_STEP_FIELDS = (
    "model_name",
    "per_device_batch_size",
    "max_target_length",
    "gradient_accumulation_steps",
    "encoder_length",
    "tiles_per_image",
    "packed_document_lengths",
    "packed_document_length",
    "scan_chunk_size",
    "images_per_sequence",
    "audio_frames_per_sequence",
    "image_size_for_vit",
    "freeze_vision_encoder_params",
    "freeze_audio_encoder_params",
    "lora_rank",
    "lora_targets",
    "use_dpo",
)


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a ``config.json`` as it stands.

    Fields of the step (``per_device_batch_size``, ``max_target_length``, …) may stand beside it.

    Raises:
        UserError: there is no ``model_type``, it is not known (what was recognised is named), or
            a field is missing or wrong.

    >>> from_hf_config({"model_type": "gpt2", "n_layer": 2}).num_decoder_layers
    2
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"the config has model_type={model_type!r}; expected the text that every Hugging Face "
            f"config.json has (known: {', '.join(sorted(TRANSLATIONS))})"
        )
    if model_type not in TRANSLATIONS:
        raise UserError(
            f"model_type={model_type[:60]!r} is not known{nearest(model_type[:60], TRANSLATIONS)}"
            f"{_recognised(config)}{_known_part(config)}; no count is guessed: trace the model "
            f"with mfu_jax.count_model_flops(fn, *args), or give its sizes in MaxText's names "
            f"(decoder_block=…, emb_dim=…)"
        )
    fields = Fields(config, model_type)
    shape = _with_head(fields, TRANSLATIONS[model_type](fields))
    step = {name: config[name] for name in _STEP_FIELDS if config.get(name) is not None}
    return shape.replace(**step)


def _with_head(c: Fields, shape: ModelShape) -> ModelShape:
    """The head of the class that ``architectures`` names; encoders have looked at it themselves."""
    names = c.list_of(str, "architectures")
    if not names or isinstance(shape, HfEncoderShape):
        return shape
    if names[0].endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return shape
    if names[0].endswith("Model") and "For" not in names[0] and isinstance(shape, HfDecoderShape):
        return shape.replace(output_head=False)
    return c.fail("architectures", "expected a class with logits over the vocabulary, or none")


# Fields that most configs share: what is told of a config whose model_type is not known.
_COMMON_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
)


def _known_part(config: Mapping[str, Any]) -> str:
    nested = config.get("text_config")
    kind = nested.get("model_type") if isinstance(nested, Mapping) else None
    if not isinstance(kind, str) or kind not in TRANSLATIONS:
        return ""
    return f"; its text_config has the known model_type {kind!r}: give that part to count the text"


def _recognised(config: Mapping[str, Any]) -> str:
    nested = config.get("text_config")
    source = nested if isinstance(nested, Mapping) else config
    found = [
        f"{name}={source[name]}"
        for name in _COMMON_FIELDS
        if isinstance(source.get(name), int) and abs(source[name]) < 2**63
    ]
    return f"; recognised {', '.join(found)}" if found else "; none of its fields were recognised"
