"""What a step minimises: cross-entropy, plus the losses of experts and further predictions."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mfu_jax.layers.decoder import Decoder, Outputs
from mfu_jax.layers.sharding import SEQUENCE_AXIS, axis_size
from mfu_jax.layers.stack.stack import mean, total
from mfu_jax.layers.vision.encoder import Images
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.preferences import preference_loss

Batch = dict[str, jax.Array]


class LossParts(NamedTuple):
    """Sums over one micro-batch's target tokens (with DPO, over its pairs); they can be added.

    Attributes:
        loss: cross-entropy.
        weights: the number of target tokens.
        further: losses added to it, by metric name, each times `weights`.
        loads: tokens per expert, by the path of its router (see `Decoder.loads`).
        shown: further metrics, not minimised, each times `weights`.
    """

    loss: jax.Array
    weights: jax.Array
    further: dict[str, jax.Array]
    loads: dict[str, jax.Array]
    shown: dict[str, jax.Array]


def objective(
    trained: Any, frozen: Any, reference: Any, graph: Any, batch: Batch, config: Config
) -> tuple[jax.Array, LossParts]:
    """The sum that a step minimises, and its parts.

    Args:
        trained, frozen: the model's weights, from `trained_and_frozen`.
        reference: the weights of DPO's reference model; without DPO, nothing.
        graph: the model without weights.
        batch: [batch, sequence].
    """
    model = nnx.merge(graph, trained, frozen)
    text = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    inputs = (*text, _images(batch))
    outputs = model.outputs(*inputs)
    shown: dict[str, jax.Array] = {}
    if config.use_dpo:
        with jax.named_scope("reference"):
            before = nnx.merge(graph, reference)(*inputs)
        losses, shown = preference_loss(model.logits(outputs.hidden), before, batch, config)
        loss, count = losses.sum(), jnp.asarray(losses.size, jnp.float32)
    else:
        weights = batch["targets_weight"].astype(jnp.float32)
        loss = _loss(model, outputs.hidden, batch["targets"], weights, config.num_vocab_tiling)
        count = weights.sum()
    with jax.named_scope("loss"):
        further = _further(outputs, batch, count, config)
        parts = LossParts(loss, count, further, model.loads(outputs.notes), shown)
        return sum(further.values(), loss), parts


def _further(
    outputs: Outputs, batch: Batch, count: jax.Array, config: Config
) -> dict[str, jax.Array]:
    """See `LossParts`."""
    found = {}
    if _has(outputs, "balance_loss"):
        found["moe_lb_loss"] = total(outputs.notes, "balance_loss")
    if _has(outputs, "indexer_loss"):
        of_layers = mean(outputs.notes, "indexer_loss")
        found["indexer_loss"] = config.indexer_loss_scaling_factor * of_layers
    if outputs.further:
        found["mtp_loss"] = config.mtp_loss_scaling_factor * _loss_ahead(outputs.further, batch)
    return {name: value * count for name, value in found.items()}


def _images(batch: Batch) -> Images | None:
    return Images(batch["images"], batch["inputs_image"]) if "images" in batch else None


def _loss(
    model: Decoder, hidden: jax.Array, targets: jax.Array, weights: jax.Array, tiles: int
) -> jax.Array:
    """Summed cross-entropy of hidden states [batch, sequence, emb_dim], in `tiles` tiles.

    A tile is a part of every sequence. Its logits are computed separately, and recomputed in the
    backward pass, so that those of all tokens never exist at once; nor does the whole head or its
    gradient: each tile gathers and sums its own.
    """

    def of_tile(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        logits = model.logits(hidden)
        with jax.named_scope("loss"):
            return _cross_entropy(logits, targets, weights)

    if tiles == 1:
        return of_tile(hidden, targets, weights)
    again = jax.checkpoint(of_tile)

    def add(loss: jax.Array, tile: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        return loss + again(*tile), None

    in_tiles = tuple(_in_tiles(array, tiles) for array in (hidden, targets, weights))
    return jax.lax.scan(add, jnp.zeros(()), in_tiles)[0]


def _in_tiles(array: jax.Array, tiles: int) -> jax.Array:
    """[batch, sequence, …] → [tiles, batch, sequence / tiles, …], each with all devices' tokens."""
    parts = axis_size(SEQUENCE_AXIS)
    batch, length, *rest = array.shape
    split = array.reshape(batch, parts, tiles, length // (parts * tiles), *rest)
    return jnp.moveaxis(split, 2, 0).reshape(tiles, batch, length // tiles, *rest)


def _cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Avoids a gather of the targets' logits, which would keep a float32 copy of bfloat16 ones."""
    vocabulary = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    of_target = jnp.where(vocabulary == targets[..., None], logits, 0).sum(-1)
    return ((jax.nn.logsumexp(logits, axis=-1) - of_target) * weights).sum()


def _loss_ahead(further: list[jax.Array], batch: Batch) -> jax.Array:
    """The modules' mean cross-entropies, averaged; the n-th predicts n tokens further."""
    losses = []
    for number, logits in enumerate(further, start=1):
        targets, weights, segments = (
            jnp.pad(batch[key][:, number:], ((0, 0), (0, number)))
            for key in ("targets", "targets_weight", "inputs_segmentation")
        )
        counted = (weights * (segments == batch["inputs_segmentation"])).astype(jnp.float32)
        summed = _cross_entropy(logits, targets, counted)
        losses.append(summed / jnp.maximum(counted.sum(), 1))
    return sum(losses, jnp.zeros(())) / len(losses)


def _has(outputs: Outputs, name: str) -> bool:
    return any(name in note for places in outputs.notes for note in places)
