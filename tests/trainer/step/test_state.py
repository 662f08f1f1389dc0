"""Which kernels `auto` and a name stand for on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from mfu_jax.errors import UserError
from mfu_jax.trainer.config.pyconfig import load
from mfu_jax.trainer.step.state import resolve_attention

LATER = "cudnn_flash" if jax.__version_info__ >= (0, 8, 3) else "dot_product"


def resolved(capability: str | None, stages: int = 1, **keys: Any) -> str:
    """A model's attention on GPUs; DeepSeek-V3's by default."""
    of_all = {"model_name": "deepseek3-671b", "dtype": "bfloat16", "remat_policy": "full", **keys}
    device = SimpleNamespace(platform="gpu", device_kind="A GPU", compute_capability=capability)
    shape = {"context": 1, "pipeline": stages}
    grid: Any = SimpleNamespace(devices=np.array([device] * stages), shape=shape)
    config = load([f"{key}={value}" for key, value in of_all.items()])
    return resolve_attention(config, grid).attention


@pytest.mark.parametrize(
    ("capability", "dataset", "attention"),
    [
        ("9.0", "synthetic", "cudnn_flash"),
        ("10.0", "synthetic", LATER),
        ("9.0", "text", "dot_product"),  # a mask keeps documents apart
        ("8.0", "synthetic", "dot_product"),
        ("gfx942", "synthetic", "dot_product"),
        (None, "synthetic", "dot_product"),
    ],
)
def test_latent_attention_is_cudnns_from_hopper_on_without_a_mask(
    capability: str | None, dataset: str, attention: str
) -> None:
    assert resolved(capability, dataset_type=dataset) == attention


def test_cudnn_is_refused_where_it_does_not_have_it() -> None:
    with pytest.raises(UserError, match="does not have values narrower than keys"):
        resolved("8.0", dataset_type="synthetic", attention="cudnn_flash")


@pytest.mark.parametrize(
    ("stages", "dataset", "chunk", "attention"),
    [
        (1, "text", 0, "cudnn_flash"),
        (2, "synthetic", 0, "cudnn_flash"),
        (2, "text", 0, "dot_product"),  # JAX cannot map a mask over the stages
        (2, "synthetic", 64, "dot_product"),
    ],
)
def test_a_pipeline_whose_rows_have_masks_is_not_cudnns(
    stages: int, dataset: str, chunk: int, attention: str
) -> None:
    keys = {"model_name": "llama2-7b", "dataset_type": dataset, "chunk_attn_window_size": chunk}
    assert resolved("9.0", stages, pipeline=stages, **keys) == attention
