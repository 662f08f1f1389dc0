"""The table of Hugging Face families: `model_type` → function that translates its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mfu_jax.flops.analytic.huggingface.fields import Fields
from mfu_jax.flops.analytic.shapes.model import ModelShape

Translate = Callable[[Fields], ModelShape]
Family = TypeVar("Family", bound=Translate)
TRANSLATIONS: dict[str, Translate] = {}


def model_type(*names: str) -> Callable[[Family], Family]:
    """Registers a function for the `model_type`s that it translates."""

    def register(translate: Family) -> Family:
        TRANSLATIONS.update(dict.fromkeys(names, translate))
        return translate

    return register
