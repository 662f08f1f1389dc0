"""The table of families: `decoder_block` → the layers of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..stack.block import LayerSpec
from ..vision.encoder import VisionSpec
from .towers import vision_spec


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder: its layers, and what comes before and after them.

    Attributes:
        normalization: a name of `NORMS`.
        learned_positions: rows of the position table; 0: none.
        embedding_scale: factor of the embedding.
        logits_soft_cap: logits l become ``cap · tanh(l / cap)``; 0: no cap.
        streams: residual streams of hyper-connections; 0: a plain residual.
        hyper_head: whether trained weights join the streams; else they are summed.
        per_layer_width: of the layers' own inputs; 0: none.
        vision: the tower for images; None: no images.
    """

    layers: tuple[LayerSpec, ...]
    normalization: str = "rmsnorm"
    learned_positions: int = 0
    embedding_scale: float = 1.0
    logits_soft_cap: float = 0.0
    streams: int = 0
    hyper_head: bool = False
    per_layer_width: int = 0
    vision: VisionSpec | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What the model needs from the attention implementation."""
        return frozenset().union(*(layer.needs for layer in self.layers))


FamilyFunction = TypeVar("FamilyFunction", bound=Callable[..., ModelSpec])
_FAMILIES: dict[str, Callable[..., ModelSpec]] = {}


def family(*blocks: str) -> Callable[[FamilyFunction], FamilyFunction]:
    """Registers a function of the config for the given `decoder_block` names."""

    def register(function: FamilyFunction) -> FamilyFunction:
        _FAMILIES.update(dict.fromkeys(blocks, function))
        return function

    return register


def model_spec(config: Any) -> ModelSpec:
    """The layers of a config.

    Args:
        config: an object with the model's fields in MaxText's names (``configs/base.yml``).
    """
    spec = _FAMILIES[config.decoder_block](config)
    return dataclasses.replace(spec, vision=vision_spec(config))
