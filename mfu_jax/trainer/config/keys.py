"""The trainer's keys: ``configs/base.yml`` has them with their defaults, keys.yml what they may be.

Adding one: a line there, with a default of its type, and here if that does not say all.
Imports no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from mfu_jax.util.yaml_files import CONFIG_FOLDER, read_mapping

# Types that a default does not show.
_KINDS = {
    **dict.fromkeys(("rope_short_factor", "rope_long_factor"), tuple[float, ...]),
    **dict.fromkeys(("compress_ratios", "engram_layers"), tuple[int, ...]),
    **dict.fromkeys(("engram_vocab_bases", "deepstack_visual_indexes_for_vit"), tuple[int, ...]),
    "image_size_for_vit": int | tuple[int, ...],
}
_WORDS: Any = Literal


@functools.cache
def base_defaults() -> Mapping[str, Any]:
    """The keys and defaults of ``configs/base.yml``."""
    return read_mapping(CONFIG_FOLDER / "base.yml")


@functools.cache
def key_rules() -> Mapping[str, Any]:
    """The words and ranges of keys.yml."""
    return read_mapping(Path(__file__).with_name("keys.yml"))


# A layer's tensors that have a key of their own: whether they are kept for the backward pass.
REMAT_NAMES: tuple[str, ...] = tuple(key_rules()["tensors"])
REMAT_KEYS = ("remat_policy", "remat_save_names", *REMAT_NAMES)


def key_kinds(without: Collection[str]) -> dict[str, Any]:
    """The type of every key, but for those whose types are declared elsewhere."""
    words = {**key_rules()["words"], **dict.fromkeys(REMAT_NAMES, ("remat", "device", "offload"))}
    kinds = {key: _WORDS[tuple(allowed)] for key, allowed in words.items()} | _KINDS
    return {
        key: kinds.get(key, tuple[str, ...] if isinstance(default, list) else type(default))
        for key, default in base_defaults().items()
        if key not in without
    }
