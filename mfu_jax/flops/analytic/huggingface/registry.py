"""The table of Hugging Face families: `model_type` → function that translates its config."""

from __future__ import annotations

from collections.abc import Callable

from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.model_configs.model import ModelConfig

Translate = Callable[[Fields], ModelConfig]
TRANSLATIONS: dict[str, Translate] = {}


def model_type(*names: str) -> Callable[[Translate], Translate]:
    """Registers a function for the `model_type`s that it translates."""

    def register(translate: Translate) -> Translate:
        TRANSLATIONS.update(dict.fromkeys(names, translate))
        return translate

    return register
