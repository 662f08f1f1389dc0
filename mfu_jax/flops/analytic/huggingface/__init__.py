"""Translates a Hugging Face ``config.json`` to a `ModelConfig`.

A type that differs from others in a few values is a row of ``model_types.yml``. Others have a
function, registered under the `model_type`s that it translates:

    @model_type("bamba")
    def bamba(c: Fields) -> ModelConfig: ...

in the file of its kind (`latent`, `mixtures`, `recurrent`, `gemma`), or in a new one, which is
found.

Fields that a config omits take their defaults from transformers 5.23.0
(``defaults.yml``).

Adding one, in this order: a row of ``model_types.yml``, or a function (`model_type` is in
`common`); into ``defaults.yml`` what ``python -m scripts.hugging_face_defaults NAME`` prints; into
tests/data/hf_defaults.json the real model's counts, which ``python -m
tests.support.count_hugging_face NAME`` prints and the existing tests read; its name in
docs/huggingface.md.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Mapping
from typing import Any

from mfu_jax.errors import UserError, nearest
from mfu_jax.flops.analytic.huggingface.common import TRANSLATIONS
from mfu_jax.flops.analytic.huggingface.fields import Fields, wrappers
from mfu_jax.flops.analytic.huggingface.type_table import ENCODERS
from mfu_jax.flops.analytic.model_configs.group import own_fields
from mfu_jax.flops.analytic.model_configs.model import ModelConfig
from mfu_jax.flops.analytic.model_configs.towers import EncoderConfig
from mfu_jax.flops.analytic.model_configs.training import StepConfig, TrainingConfig

__all__ = ["TRANSLATIONS", "from_hf_config"]

for _module in pkgutil.iter_modules(__path__):  # importing a module registers its families
    importlib.import_module(f"{__name__}.{_module.name}")

# Fields about the step and training that may accompany the config's own.
_STEP_FIELDS = (
    *("model_name", "scan_chunk_size", "image_size_for_vit"),
    *(field.name for group in (StepConfig, TrainingConfig) for field in own_fields(group)),
)


def from_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """Translates an unmodified ``config.json``.

    Fields about the step (``per_device_batch_size``, ``max_target_length``, …) may be included.

    Raises:
        UserError: ``model_type`` is missing or unknown (the message lists the recognised fields),
            or a field is missing or wrong.

    >>> from_hf_config({"model_type": "gpt2", "n_layer": 2}).num_decoder_layers
    2
    """
    return translated(config)[0]


def translated(config: Mapping[str, Any]) -> tuple[ModelConfig, Mapping[str, int]]:
    """The same, and the sizes that the ``config.json`` leaves to its type's defaults."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(
            f"the config has model_type={model_type!r}; expected the text that every Hugging Face "
            f"config.json has, such as 'llama'",
            hint="docs/huggingface.md lists the known ones",
        )
    c = Fields(config, model_type) if model_type in TRANSLATIONS else _text(config)
    model = _with_head(c, TRANSLATIONS[c.model_type](c))
    step = {name: config[name] for name in _STEP_FIELDS if config.get(name) is not None}
    return model.replace(**step), c.left_out


def _text(config: Mapping[str, Any]) -> Fields:
    """The text model in the config of a type that is not known, such as a multimodal wrapper.

    It is in ``text_config`` (of ``thinker_config``); older files have its fields outside, and some
    leave its type out, which is then the wrapper's with ``_text``. Head and ties are the wrapper's.

    Raises:
        UserError: there is no text model of a known type.
    """
    outer, holder, part, path = str(config["model_type"]), config, config, ""
    for name in ("thinker_config", "text_config"):
        if isinstance(nested := part.get(name), Mapping):
            holder, part, path = part, nested, f"{path}{name}."
    own_kind = f"{outer.removesuffix('_mm_model')}_text"
    kind = str(part.get("model_type", own_kind) if path else own_kind)
    if not _is_decoder(kind) or outer.endswith("_assistant"):
        raise UserError(
            f"model_type={outer[:60]!r} is not known{_recognised(part)}; no count is guessed",
            hint=f"{nearest(outer[:60], TRANSLATIONS)}mfu-jax flops config.json --trace counts the "
            "PyTorch model itself, mfu_jax.count_model_flops(fn, *args) any JAX function; or "
            "give its sizes in MaxText's names "
            "(decoder_block=…, emb_dim=…)",
        )
    warnings.warn(
        f"{outer} is counted as its text model, {kind}: images, audio and other parts are not "
        f"counted; --trace lists what else the PyTorch model has",
        stacklevel=5,
    )
    own = {"architectures": config.get("architectures")}
    # The head is the wrapper's (a thinker's), which says whether it is tied, unless it is part of
    # the text model.
    if outer not in wrappers("wrappers_with_inner_head"):
        own["tie_word_embeddings"] = holder.get(
            "tie_word_embeddings", outer in wrappers("tied_wrappers")
        )
    return Fields({**part, **own}, kind, path)


def _is_decoder(kind: str) -> bool:
    """Whether a type is known, and not an encoder, as text models beside an image encoder are."""
    return kind in TRANSLATIONS.keys() - {*ENCODERS, "clip"}


_WITH_HEAD = (
    *("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
    *("ForBlockDiffusion", "ForMaskedLM"),
)


def _with_head(c: Fields, config: ModelConfig) -> ModelConfig:
    """Keeps or drops the head, like the class in ``architectures``; encoders have their own."""
    names = c.list_of(str, "architectures")
    if not names or config.encoder != EncoderConfig():
        return config
    if names[0].endswith(_WITH_HEAD):
        return config
    # Only families that list their layers can be counted without a head.
    if names[0].endswith("Model") and "For" not in names[0] and config.stack.layer_types:
        return config.replace(output_head=False)
    return c.fail("architectures", "expected a class with logits over the vocabulary, or none")


# Fields that most configs share, shown in the message about an unknown model_type.
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


def _recognised(config: Mapping[str, Any]) -> str:
    found = [
        f"{name}={config[name]}"
        for name in _COMMON_FIELDS
        if isinstance(config.get(name), int) and abs(config[name]) < 2**63
    ]
    return f"; recognised {', '.join(found)}" if found else "; none of its fields were recognised"
