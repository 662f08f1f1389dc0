"""Every bundled text model: its weights are as many, and its FLOPs the same, as counted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mfu_jax.flops.analytic.inputs import as_model_config
from mfu_jax.flops.analytic.parameters import count_parameters
from mfu_jax.flops.analytic.totals import model_flops_per_device
from mfu_jax.flops.traced.counting import count_model_flops
from mfu_jax.trainer import losses, pyconfig, state
from mfu_jax.trainer.data import BATCH_KEYS
from mfu_jax.trainer.pyconfig import Config
from mfu_jax.yaml_files import model_names

ROWS, LENGTH = 2, 128


@functools.cache
def config(name: str, scale: str) -> Config:
    sizes = {"per_device_batch_size": ROWS, "max_target_length": LENGTH}
    options = {"model_name": name, "scale": scale, "attention": "dot_product", **sizes}
    return pyconfig.from_mapping({}, overrides=options)


def one_for_each(scale: str, *keys: str) -> list[str]:
    """The bundled models, one for each combination of values of `keys`; none: of all."""
    found = {}
    for name in model_names():
        values = vars(config(name, scale))
        wanted = keys or [key for key in values if key != "model_name"]
        found.setdefault(tuple(values[key] for key in wanted), name)
    return list(found.values())


@pytest.mark.parametrize("name", one_for_each("full"))
def test_a_model_has_as_many_weights_as_counted(name: str) -> None:
    c = config(name, "full")
    model = nnx.eval_shape(lambda: state.make_model(c, 0))
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert sum(sizes) == count_parameters(c).total


def inverses(c: Config) -> int:
    """FLOPs of the delta nets' triangular systems, which the analytic count has not.

    For each chunk of C tokens and head: one solve with C right-hand sides (C³), and for its
    gradient another (C³) and a product of two matrices (2·C³).
    """
    if c.decoder_block not in ("qwen3_next", "qwen3_5"):
        return 0
    full = c.num_decoder_layers // c.inhomogeneous_layer_cycle_interval
    chunks = ROWS * LENGTH // c.gdn_chunk_size
    heads = (c.num_decoder_layers - full) * c.gdn_num_value_heads
    return 4 * heads * chunks * c.gdn_chunk_size**3


KINDS = (
    "decoder_block",
    "num_experts",
    "use_indexer",
    "engram_layers",
    "interleave_moe_layer_step",
)


@pytest.mark.parametrize("name", one_for_each("tiny", *KINDS))
def test_a_training_step_has_the_flops_that_are_counted(name: str) -> None:
    c = config(name, "tiny")
    graph, params = nnx.split(nnx.eval_shape(lambda: state.make_model(c, 0)))
    batch = dict.fromkeys(BATCH_KEYS, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))

    def step(params: object, batch: losses.Batch) -> object:
        return jax.value_and_grad(losses.objective, has_aux=True)(params, graph, batch, c)

    traced = count_model_flops(step, params, batch)
    counted = as_model_config(c)
    if inverses(c):
        counted = counted.replace(scan_chunk_size=c.gdn_chunk_size)
    assert traced.total == model_flops_per_device(counted, "dense").training + inverses(c)
    assert traced.unaccounted == ()


def test_models_with_further_predictions_have_the_flops_that_are_counted() -> None:
    overrides = {"model_name": "llama3-8b", "scale": "tiny", "mtp_num_layers": 2}
    sizes = {"per_device_batch_size": ROWS, "max_target_length": LENGTH}
    c = pyconfig.from_mapping({}, overrides={**overrides, **sizes, "attention": "dot_product"})
    graph, params = nnx.split(nnx.eval_shape(lambda: state.make_model(c, 0)))
    batch = dict.fromkeys(BATCH_KEYS, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32))
    gradient = jax.value_and_grad(losses.objective, has_aux=True)
    traced = count_model_flops(lambda p, b: gradient(p, graph, b, c), params, batch)
    assert traced.total == model_flops_per_device(c, "dense").training
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count_parameters(c).total
