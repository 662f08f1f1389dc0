"""Configs as the trainer resolves them on devices that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.mesh_axes import AXES
from mfu_jax.trainer.step.state import resolve_attention


def resolved_on(
    platform: str, keys: Mapping[str, Any], device_kind: str = "TPU v5"
) -> pyconfig.Config:
    """The config of these keys on one device, with ``dot_product`` attention."""
    config = pyconfig.from_mapping({}, overrides={"attention": "dot_product", **keys})
    grid: Any = SimpleNamespace(
        devices=np.array([SimpleNamespace(platform=platform, device_kind=device_kind)]),
        shape=dict.fromkeys((axis.name for axis in AXES), 1),
    )
    return resolve_attention(config, grid)
