"""The decoder: embedding, layers, norm, head, and modules that predict tokens further ahead."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import kernels, ring, ring_splash  # noqa: F401  (registers them)
from .building import Builder, Inputs
from .families import model_spec
from .feed_forward.routers import moved_bias
from .projections.gathered_products import gathers_of
from .projections.linears import Dense, Embed
from .projections.lora import lora, lora_of_tower, trains_only_above_the_embedding
from .projections.quantization import quantization
from .sharding import (
    EDGE_BATCH_AXES,
    IMAGE_AXES,
    SEQUENCE_AXIS,
    WIDTH_AXIS,
    axis_size,
    constrain,
)
from .stack.hyper_connections import HyperHead
from .stack.multi_token_prediction import MultiTokenPrediction
from .stack.per_layer_inputs import PerLayerEmbedding
from .stack.pipeline import Pipeline, schedule_of
from .stack.remat import remat
from .stack.stack import Stack
from .vision.deep_stack import grid_positions
from .vision.encoder import Images, ImageTokens, VisionEncoder, make_projector


class Outputs(NamedTuple):
    """What a decoder returns for training.

    Attributes:
        hidden: the input of the head, [batch, sequence, emb_dim].
        further: the logits of each multi-token-prediction module, for tokens further ahead.
        notes: of the layers, by segment and place (see `stack.Stack`), then those of the modules.
    """

    hidden: jax.Array
    further: list[jax.Array]
    notes: list[list[dict[str, jax.Array]]]


class Decoder(nnx.Module):
    """A causal language model: tokens [batch, sequence] → logits [batch, sequence, vocab_size].

    Args:
        config: an object with the model's fields (see ``configs/base.yml``).
        attention: name of the attention implementation, "auto" already resolved.
        rngs: random numbers for the initial weights.
    """

    def __init__(self, config: Any, *, attention: str, rngs: nnx.Rngs) -> None:
        spec = model_spec(config)
        build = Builder(
            emb_dim=config.emb_dim,
            dtype=jnp.dtype(config.dtype),
            weight_dtype=jnp.dtype(config.weight_dtype),
            normalization=spec.normalization,
            epsilon=config.normalization_layer_epsilon,
            attention=attention,
            rngs=rngs,
            lora=lora(config),
            on_tpu=config.grouped_matmul == "kernel",
            gathers=gathers_of(config),
            whole_gradients=config.norm_gradients == "whole",
            pads_vocabulary=config.logits_columns == "padded",
            saves_rotated=config.remat_after_rope,
            packed=config.dataset_type != "synthetic",
        )
        self.spec = spec
        width = config.emb_dim
        self.token_embedder = Embed(
            build,
            config.vocab_size,
            width,
            row_axis="vocab",
            by_matmul=config.use_iota_embed,
        )
        if spec.learned_positions:
            rows = spec.learned_positions
            self.position_embedder = Embed(build, rows, width, row_axis="position")
        if spec.per_layer_width:
            rows = config.vocab_size_per_layer_input or config.vocab_size
            self.per_layer_embedder = PerLayerEmbedding(
                rows, len(spec.layers), spec.per_layer_width, build
            )
        keys = jax.random.split(rngs.params(), len(spec.layers))
        policy = remat(config)
        of_layers = dataclasses.replace(build, quantization=quantization(config))
        schedule = schedule_of(config, spec.layers)
        self.layers: Stack | Pipeline
        if schedule is None:
            self.layers = Stack(
                spec.layers,
                keys,
                of_layers,
                scan=config.scan_layers,
                remat=policy,
                whole_patterns=config.remat_patterns,
                first_alone=trains_only_above_the_embedding(config),
            )
        else:
            self.layers = Pipeline(spec.layers, keys, of_layers, schedule=schedule, remat=policy)
        if spec.hyper_head:
            self.hyper_head = HyperHead(spec.streams, build)
        if spec.vision is not None:
            self.vision_encoder = VisionEncoder(
                spec.vision,
                dataclasses.replace(build, lora=lora_of_tower(config)),
                scan=config.scan_layers,
                remat=policy,
                first_alone=bool(config.lora_rank or config.frozen),
            )
            self.vision_projector = make_projector(spec.vision, build)
        self.decoder_norm = build.norm()
        self.tied = config.logits_via_embedding
        if not self.tied:
            self.logits_dense = build.dense((width,), (config.vocab_size,), ("embed", "vocab"))
        self.further = nnx.List(
            [
                MultiTokenPrediction(spec.layers[-1], build, remat=policy)
                for _ in range(config.mtp_num_layers)
            ]
        )

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        images: Images | None = None,
    ) -> jax.Array:
        """Logits in float32; tokens and their positions are integers [batch, sequence]."""
        return self.logits(self.outputs(tokens, positions, segment_ids, images).hidden)

    @property
    def head(self) -> Embed | Dense:
        """The layer that makes the logits: with a tied head, the embedding."""
        return self.token_embedder if self.tied else self.logits_dense

    def logits(self, hidden: jax.Array, head: Embed | Dense | None = None) -> jax.Array:
        """[batch, sequence, emb_dim] → [batch, sequence, vocab_size] in float32.

        Args:
            hidden: the head's input.
            head: `self.head` with other weights.
        """
        with jax.named_scope("decoder"):
            return self._logits(hidden, head)

    def outputs(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        images: Images | None = None,
    ) -> Outputs:
        """The head's input and the layers' notes; arguments as for `__call__`."""
        seen = None if images is None else self._seen(images)
        inputs = Inputs(
            tokens=tokens,
            positions=positions,
            segment_ids=segment_ids,
            images=None if seen is None else seen.numbers,
        )
        with jax.named_scope("decoder"):
            x = self._embedded(inputs, seen)
            if seen is not None:
                inputs = dataclasses.replace(
                    inputs, deep=seen.deep_placed(x), grid=self._grid(positions, seen)
                )
            per_layer = None
            if self.spec.per_layer_width:
                with jax.named_scope("per_layer_embedder"):
                    per_layer = self.per_layer_embedder(x, tokens)
            if self.spec.streams:
                x = jnp.repeat(x[:, :, None], self.spec.streams, axis=2)
            x, notes = self.layers(x, inputs, per_layer)
            hidden = constrain(self._joined(x), EDGE_BATCH_AXES, SEQUENCE_AXIS, WIDTH_AXIS)
            further = []
            ahead = hidden
            for number, module in enumerate(self.further, start=1):
                with jax.named_scope(f"mtp_{number}"):
                    shifted = self._embedded(inputs.shifted(number), seen and seen.shifted(number))
                    ahead, normed, noted = module(ahead, shifted, inputs)
                    further.append(self._logits(normed))
                    notes.append([noted])
            with jax.named_scope("decoder_norm"):
                normed = self.decoder_norm(hidden)
            return Outputs(normed, further, notes)

    def loads(self, notes: list[list[dict[str, jax.Array]]]) -> dict[str, jax.Array]:
        """Tokens per expert, by the path of its block, where a router's bias follows the load."""
        own = len(self.layers.segments)
        of_layers = {
            f"layers/groups/{number}/{place}": note
            for number, places in enumerate(notes[:own])
            for place, note in enumerate(places)
        }
        further = {f"further/{i}/block": note for i, (note,) in enumerate(notes[own:])}
        found = of_layers | further
        return {at: note["expert_load"] for at, note in found.items() if "expert_load" in note}

    def _seen(self, images: Images) -> ImageTokens:
        """Encodes the images of a whole batch at once."""
        assert self.spec.vision is not None
        rows, count, *pixels = images.pixels.shape
        whole = constrain(images.pixels.reshape(rows * count, *pixels), IMAGE_AXES)
        with jax.named_scope("vision_encoder"):
            x, deep = self.vision_encoder(whole)
        with jax.named_scope("vision_projector"):
            x = self.vision_projector(x)
        first, *others = (y.reshape(rows, -1, y.shape[-1]) for y in (x, *deep))
        if axis_size(SEQUENCE_AXIS) > 1:  # part of a sequence may have tokens of any image
            first, *others = (constrain(y, EDGE_BATCH_AXES) for y in (first, *others))
        return ImageTokens(
            tokens=first,
            deep=tuple(others),
            places=images.places,
            per_image=self.spec.vision.tokens,
        )

    def _grid(self, positions: jax.Array, seen: ImageTokens) -> jax.Array | None:
        """Positions [batch, sequence] in time, rows and columns, if the model uses them."""
        vision = self.spec.vision
        if vision is None or not vision.grid_positions:
            return None
        return grid_positions(positions, seen.places, vision.token_grid)

    def _embedded(self, inputs: Inputs, seen: ImageTokens | None) -> jax.Array:
        with jax.named_scope("token_embedder"):
            x = self.token_embedder(inputs.tokens)
        if self.spec.embedding_scale != 1:
            x = x * jnp.asarray(self.spec.embedding_scale, x.dtype)
        if seen is not None:
            x = seen.put_into(x)
        if self.spec.learned_positions:
            with jax.named_scope("position_embedder"):
                x = x + self.position_embedder(inputs.positions)
        return constrain(x, EDGE_BATCH_AXES, SEQUENCE_AXIS, WIDTH_AXIS)

    def _joined(self, x: jax.Array) -> jax.Array:
        """Joins [batch, sequence, (streams,) emb_dim] into one stream."""
        if not self.spec.streams:
            return x
        if not self.spec.hyper_head:
            return x.sum(axis=2)
        with jax.named_scope("hyper_head"):
            return self.hyper_head(x)

    def _logits(self, x: jax.Array, head: Embed | Dense | None = None) -> jax.Array:
        head = head or self.head
        with jax.named_scope("logits_dense"):
            logits = head.attend(x) if isinstance(head, Embed) else head(x)
        logits = constrain(logits, EDGE_BATCH_AXES, SEQUENCE_AXIS, "tensor").astype(jnp.float32)
        cap = self.spec.logits_soft_cap
        return cap * jnp.tanh(logits / cap) if cap else logits


def with_moved_biases(params: Any, before: Any, loads: dict[str, jax.Array], rate: float) -> Any:
    """`params` with the routers' choice biases moved from their values in `before`.

    Args:
        params: a decoder's weights after an optimizer step, which must not move these biases.
        before: its weights before the step.
        loads: from `Decoder.loads`.
        rate: see `routers.moved_bias`.
    """
    if not loads:
        return params
    old = dict(nnx.to_flat_state(before))
    new = dict(nnx.to_flat_state(params))
    for path, variable in old.items():
        where = "/".join(str(name) for name in path)
        for place, load in loads.items():
            if where.startswith(f"{place}/") and path[-1] == "choice_bias":
                bias = moved_bias(variable.get_value(), load, rate)
                new[path] = variable.replace(bias)
    return nnx.from_flat_state(new)
