"""One tiny model of every family of the reference model: the gradient of its loss, as a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mfu_jax.trainer.config.pyconfig import Config
from tests.support import tiny_models

PLATFORMS = ("v5e", "h100")
# Program → the bundled model.
MODELS = {
    "deepseek2": "deepseek2-16b",
    "deepseek3": "deepseek3-671b",
    "deepseek32": "deepseek3.2-671b",
    "deepseek4": "deepseek4-284b",
    "deepseek_engram": "deepseek-custom",
    "envy": "envy-switch-base",
    "gemma": "gemma-2b",
    "gemma2": "gemma2-9b",
    "gemma3": "gemma3-12b",
    "gemma4": "gemma4-31b",
    "gemma4_moe": "gemma4-26b",
    "gemma4_small": "gemma4-e2b",
    "gpt2": "gpt2-124m",
    "gpt3": "gpt3-6b",
    "gpt_oss": "gpt-oss-20b",
    "llama2": "llama3-8b",
    "llama4": "llama4-17b-16e",
    "mistral": "mistral-7b",
    "mixtral": "mixtral-8x7b",
    "olmo3": "olmo3-7b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-vl-2b",
    "qwen3_custom_moe": "qwen3-custom-30b-a3b",
    "qwen3_moe": "qwen3-30b-a3b",
    "qwen3_next": "qwen3-next-80b-a3b",
}
# XLA does not compile an H100's attention of Llama 4's 17 tokens, nor of Gemma 4's 54 patches.
_SQUARE = {"image_size_for_vit": (48, 48)}
_ON_H100: dict[str, dict[str, Any]] = {
    "llama4": {"images_per_sequence": 0},
    "gemma4": _SQUARE,
    "gemma4_moe": _SQUARE,
}
_LATENT_QUERIES = ("deepseek3", "deepseek32", "deepseek_engram")


def config_of(program: str, platform: str) -> Config:
    """The model of a program."""
    changes = dict(_ON_H100.get(program, {})) if platform == "h100" else {}
    if platform == "h100" and program in _LATENT_QUERIES:
        # XLA's Triton fusions refuse heads of width 16 + 8.
        changes["qk_rope_head_dim"] = 16
    return tiny_models.one_period(MODELS[program], **changes)


def step_of(program: str, platform: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that a program is compiled from, and the shapes of its arguments."""
    return tiny_models.gradient(config_of(program, platform))
