"""The trainer's step of a small dense model, whose sizes a test chooses and counts with."""

from __future__ import annotations

from typing import Any

import jax

from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step


def tiny_config(
    *, layers: int, batch: int, length: int, vocab: int, width: int, mlp: int, heads: int,
    head_dim: int, **keys: Any,
) -> Config:  # fmt: skip
    """A run on made-up tokens, with attention written out; `keys` are the trainer's own."""
    sizes = {
        "num_decoder_layers": layers,
        "per_device_batch_size": batch,
        "max_target_length": length,
        "vocab_size": vocab,
        "emb_dim": width,
        "mlp_dim": mlp,
        "num_query_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "dataset_type": "synthetic",
        "attention": "dot_product",
    }
    return pyconfig.from_mapping({}, overrides={**sizes, **keys})


def compiled_step(config: Config, devices: int = 1) -> jax.stages.Compiled:
    """Its train step for some of the test's devices."""
    grid = mesh.make_mesh(config, jax.devices()[:devices])
    return step.compile_train_step(config, grid, state.abstract_state(config, grid))


def traced_flops(config: Config) -> int:
    """FLOPs of its train step by the jaxpr."""
    grid = mesh.make_mesh(config, jax.devices()[:1])
    batch = step.abstract_batch(config, grid, config.gradient_accumulation_steps)
    train_step = step.make_train_step(config)
    count = count_model_flops(train_step, state.abstract_state(config, grid), batch)
    assert count.unaccounted == ()
    return count.total
