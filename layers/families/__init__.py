"""One function per `decoder_block`: turns a config into the specs of its layers."""

from . import deepseek, deepseek4, dense, gemma, mixtures, qwen_next
from .registry import ModelSpec, family, known_blocks, model_spec
from .towers import known_towers

__all__ = [
    "ModelSpec",
    "deepseek",
    "deepseek4",
    "dense",
    "family",
    "gemma",
    "known_blocks",
    "known_towers",
    "mixtures",
    "model_spec",
    "qwen_next",
]
