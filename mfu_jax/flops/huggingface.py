"""A Hugging Face ``config.json`` → `ModelShape`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.shape import ModelShape


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a ``config.json`` as it stands.

    Raises:
        UserError: its ``model_type`` is not known; what was recognised is named.
    """
    model_type = config.get("model_type")
    raise UserError(
        f"model_type={model_type!r} is not known; count_model_flops(fn, *args) counts any JAX "
        f"function, and MaxText field names are taken as key: value"
    )
