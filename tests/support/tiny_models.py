"""The bundled models at `scale=tiny`: their configs, gradients and analytic FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from mfu_jax.flops.analytic.inputs.sources import as_model_config
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import row_shapes
from mfu_jax.trainer.step import losses, state
from mfu_jax.trainer.step.trainable import trained_and_frozen
from mfu_jax.util.yaml_files import model_names

ROWS, LENGTH = 2, 128
_TRAINED_TOWER = {"images_per_sequence": 1, "freeze_vision_encoder_params": False}
# Decoder block → a pattern of layers once, which compiles faster than twice.
_ONE_PERIOD: dict[str, dict[str, Any]] = {
    "deepseek": {"num_decoder_layers": 2},
    "deepseek4": {
        "num_decoder_layers": 3,
        "compress_ratios": [0, 4, 128],
        "first_num_hash_layers": 1,
    },
    "envy": {"num_decoder_layers": 2},
    "gemma2": {"num_decoder_layers": 1},
    "gemma3": {"num_decoder_layers": 6, **_TRAINED_TOWER},
    "gemma4": {"num_decoder_layers": 6, **_TRAINED_TOWER},
    "gpt_oss": {"num_decoder_layers": 2},
    "llama4": {"num_decoder_layers": 4, **_TRAINED_TOWER},
    "olmo3": {"num_decoder_layers": 4},
    "qwen3_next": {"num_decoder_layers": 4},
    "qwen3_5": {"num_decoder_layers": 4},
}
# Numbers that choose layers; of all others, sizes, a kind has some or none.
_CHOOSING = ("num_experts", "n_routing_groups", "interleave_moe_layer_step")


@functools.cache
def config(name: str, scale: str = "tiny") -> Config:
    """A bundled model, to be trained on sequences that every window and chunk is shorter than."""
    return sized(name, scale)


def sized(name: str, scale: str = "tiny", **keys: Any) -> Config:
    """The same with other keys."""
    sizes = {"per_device_batch_size": ROWS, "max_target_length": LENGTH}
    options = {"model_name": name, "scale": scale, "attention": "dot_product", **sizes}
    return pyconfig.from_mapping({}, overrides={**options, **keys})


@functools.cache
def one_period(name: str, **changes: Any) -> Config:
    """A bundled model with each of its kinds of layers once, and other keys."""
    tiny = config(name)
    keys = dict(_ONE_PERIOD.get(tiny.decoder_block, {}))
    if "-vl-" in name:
        keys |= _TRAINED_TOWER
    if tiny.engram_layers:
        keys["engram_layers"] = [1]
    if tiny.decoder_block == "deepseek" and tiny.q_lora_rank:
        keys["q_lora_rank"] = 32
    if tiny.decoder_block == "deepseek4" or tiny.use_indexer:
        keys |= {"indexer_loss_scaling_factor": 0.5, "indexer_sparse_training": True}
    return sized(name, override_model_config=True, **{**keys, **changes})


def distinct(scale: str = "tiny") -> list[str]:
    """The bundled models without those whose config equals another's."""
    return _first_of_each(scale, lambda _, value: value)


def one_of_each_kind() -> list[str]:
    """Tiny models of which none is another with other sizes."""

    def kind(key: str, value: Any) -> Any:
        is_size = isinstance(value, int | float) and key not in _CHOOSING
        return bool(value) if is_size else value

    return _first_of_each("tiny", kind)


def _first_of_each(scale: str, compared: Callable[[str, Any], Any]) -> list[str]:
    found: dict[tuple[Any, ...], str] = {}
    for name in model_names():
        values = vars(config(name, scale)).items()
        key = tuple(compared(key, value) for key, value in values if key != "model_name")
        found.setdefault(key, name)
    return list(found.values())


def gradient(config: Config) -> tuple[Callable[..., Any], tuple[Any, losses.Batch]]:
    """The loss with its gradient as a function, and the shapes of its arguments."""
    graph, params = nnx.split(nnx.eval_shape(lambda: state.make_model(config, 0)))
    rows = int(config.per_device_batch_size) * (1 + config.use_dpo)
    batch = {
        key: jax.ShapeDtypeStruct((rows, *row.shape), row.dtype)
        for key, row in row_shapes(config).items()
    }

    def step(params: Any, batch: losses.Batch) -> Any:
        differentiate = jax.value_and_grad(losses.objective, has_aux=True)
        trained, frozen = trained_and_frozen(config, params)
        reference = params if config.use_dpo else ()
        return differentiate(trained, frozen, reference, graph, batch, config)

    return step, (params, batch)


def some_weights(shapes: Any) -> Any:
    """Random weights; the initial ones take longer to compile than the step."""
    rng = np.random.default_rng(0)

    def of(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        around = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return (around + rng.normal(size=leaf.shape) / 10).astype(leaf.dtype)

    return jax.tree.map_with_path(of, shapes)


def analytic(config: Config) -> int:
    """Training FLOPs of a step, every attention pair counted, delta nets in chunks."""
    counted = as_model_config(config)
    if _delta_layers(config):
        counted = counted.replace(scan_chunk_size=config.gdn_chunk_size)
    return int(model_flops_per_device(counted, "dense").training) + inverses(config)


def inverses(config: Config) -> int:
    """FLOPs of the delta nets' triangular systems, which the analytic count does not have.

    For each chunk of C tokens and head: one solve with C right-hand sides (C³), and for its
    gradient another (C³) and a product of two matrices (2·C³).
    """
    chunks = int(config.per_device_batch_size) * config.max_target_length // config.gdn_chunk_size
    heads = _delta_layers(config) * config.gdn_num_value_heads
    return 4 * heads * chunks * config.gdn_chunk_size**3


def _delta_layers(config: Config) -> int:
    if config.decoder_block not in ("qwen3_next", "qwen3_5"):
        return 0
    full = config.num_decoder_layers // config.inhomogeneous_layer_cycle_interval
    return config.num_decoder_layers - full
