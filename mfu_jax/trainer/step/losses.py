"""What a step minimises: cross-entropy, plus the losses of experts and further predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mfu_jax.layers.attention.ring_splash import in_halves
from mfu_jax.layers.decoder import Decoder, Outputs
from mfu_jax.layers.sharding import SEQUENCE_AXIS, axis_size
from mfu_jax.layers.stack.stack import mean, total
from mfu_jax.layers.vision.encoder import Images
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.preferences import preference_loss

Batch = dict[str, jax.Array]
# (head's weights, hidden states, targets, their weights) → the summed loss.
_TileLoss = Callable[..., jax.Array]


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
    if config.attention == "ring_splash":
        batch = {key: in_halves(value) for key, value in batch.items()}
    text = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"])
    inputs = (*text, images_of(batch))
    outputs = model.outputs(*inputs)
    shown: dict[str, jax.Array] = {}
    if config.use_dpo:
        with jax.named_scope("reference"):
            before = nnx.merge(graph, reference)(*inputs)
        losses, shown = preference_loss(model.logits(outputs.hidden), before, batch, config)
        loss, count = losses.sum(), jnp.asarray(losses.size, jnp.float32)
    else:
        weights = batch["targets_weight"].astype(jnp.float32)
        loss = _loss(model, outputs.hidden, batch["targets"], weights, config)
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


def images_of(batch: Batch) -> Images | None:
    """The images of a batch, if it has some."""
    return Images(batch["images"], batch["inputs_image"]) if "images" in batch else None


def _loss(
    model: Decoder, hidden: jax.Array, targets: jax.Array, weights: jax.Array, config: Config
) -> jax.Array:
    """Summed cross-entropy of hidden states [batch, sequence, emb_dim], in tiles.

    A tile is a part of every sequence. Its loss and gradients are computed at once, so that the
    logits of all tokens never exist together and none are computed twice; nor does the whole head
    or its gradient exist: each tile gathers and sums its own. With `recompute_logits`, the backward
    pass computes them again instead, as MaxText's does.
    """
    tiles = config.num_vocab_tiling
    graph, head = nnx.split(model.head)

    def of_tile(head: Any, hidden: jax.Array, *targets_and_weights: jax.Array) -> jax.Array:
        logits = model.logits(hidden, nnx.merge(graph, head))
        with jax.named_scope("loss"):
            return _cross_entropy(logits, *targets_and_weights)

    if tiles == 1:
        return of_tile(head, hidden, targets, weights)
    of_tokens = tuple(_in_tiles(array, tiles) for array in (targets, weights))
    if config.recompute_logits:
        return _sum(jax.checkpoint(of_tile), head, _in_tiles(hidden, tiles), of_tokens)
    return _summed(of_tile, head, _in_tiles(hidden, tiles), of_tokens)


def _sum(of_tile: _TileLoss, head: Any, hidden: jax.Array, of_tokens: Any) -> jax.Array:
    """The sum of `of_tile` over the leading dimension of `hidden` and of `of_tokens`."""

    def add(loss: jax.Array, tile: Any) -> tuple[jax.Array, None]:
        return loss + of_tile(head, tile[0], *tile[1]), None

    return jax.lax.scan(add, jnp.zeros(()), (hidden, of_tokens))[0]


def _with_gradients(of_tile: _TileLoss, *primals: Any) -> tuple[jax.Array, Any]:
    """The sum, and its gradients by head and hidden states; None where none is needed."""
    trained = tuple(
        number
        for number, primal in enumerate(primals[:2])
        if any(leaf.perturbed for leaf in jax.tree.leaves(primal, is_leaf=_is_primal))
    )
    head, hidden, of_tokens = jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=_is_primal)
    differentiate = jax.value_and_grad(of_tile, argnums=trained)

    def add(sums: Any, tile: Any) -> tuple[Any, jax.Array | None]:
        loss, gradients = differentiate(head, tile[0], *tile[1])
        found = dict(zip(trained, gradients, strict=True))
        of_head = jax.tree.map(lambda total, one: total + one, sums[1], found.get(0))
        return (sums[0] + loss, of_head), found.get(1)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), head)
    start = (jnp.zeros(()), zeros if 0 in trained else None)
    (loss, of_head), of_hidden = jax.lax.scan(add, start, (hidden, of_tokens))
    if of_head is not None:
        of_head = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), of_head, head)
    return loss, (of_head, of_hidden)


def _scaled(of_tile: _TileLoss, gradients: Any, by: jax.Array) -> tuple[Any, Any, None]:
    return *jax.tree.map(lambda gradient: gradient * by.astype(gradient.dtype), gradients), None


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


_summed = jax.custom_vjp(_sum, nondiff_argnums=(0,))
_summed.defvjp(_with_gradients, _scaled, symbolic_zeros=True)


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
