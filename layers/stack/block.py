"""One layer of the decoder: norms, token mixer, feed-forward, residual connections."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..building import Builder, Inputs, PartSpec
from ..normalizations import with_whole_gradient
from ..sharding import BATCH_AXES, IMAGE_AXES, SEQUENCE_AXIS, WIDTH_AXIS, constrain
from .engram import EngramSpec
from .hyper_connections import HyperConnection
from .per_layer_inputs import PerLayerInput

PRE_NORMS = ("pre_mixer", "pre_mlp")
POST_NORMS = ("post_mixer", "post_mlp")
# Norm → its scope, under MaxText's names.
_SCOPES = {
    "pre_mixer": "pre_self_attention_norm",
    "post_mixer": "post_self_attention_norm",
    "pre_mlp": "pre_mlp_norm",
    "post_mlp": "post_mlp_norm",
}


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The composition of a layer; consecutive equal layers are scanned.

    Attributes:
        mixer: attention or another token mixer.
        feed_forward: None: only the mixer.
        norms: of `PRE_NORMS` (before a part) and `POST_NORMS` (before its residual connection).
        parallel: whether both parts read what the mixer's norm gives, and share a residual
            connection (arXiv 2204.02311, section 2); else one comes after the other.
        streams: residual streams of hyper-connections; 0: a plain residual.
        engram: n-gram memory before the mixer.
        per_layer_width: of this layer's own input; 0: none.
        scaled: whether a trained scalar multiplies the layer's result.
        of_images: rows are images, each whole on one device, even where sequences are split.
        shown: whether the layer's result is a note.
        deep: which of the tower's inner layers is added to the result, counted from 1; 0: none.
    """

    mixer: PartSpec
    feed_forward: PartSpec | None = None
    norms: tuple[str, ...] = PRE_NORMS
    parallel: bool = False
    streams: int = 0
    engram: EngramSpec | None = None
    per_layer_width: int = 0
    scaled: bool = False
    of_images: bool = False
    shown: bool = False
    deep: int = 0

    @property
    def stands_alone(self) -> bool:
        """Whether the layer reads nothing from other layers, and leaves nothing for them."""
        shares = getattr(self.mixer, "keeps", "") or getattr(self.mixer, "borrows", "")
        return not (shares or self.per_layer_width or self.deep)

    @property
    def needs(self) -> frozenset[str]:
        """What the layer needs from the attention implementation."""
        return self.mixer.needs


class Block(nnx.Module):
    """``x + mixer(norm(x))``, then ``x + feed_forward(norm(x))``, and the spec's additions.

    In parallel, it is ``x + mixer(y) + feed_forward(y)`` with ``y = norm(x)``.
    """

    def __init__(self, spec: LayerSpec, build: Builder) -> None:
        if spec.engram is not None:
            self.engram = spec.engram.make(build)
        for name in spec.norms:
            setattr(self, f"{name}_norm", build.norm())
        self.mixer = spec.mixer.make(build)
        if spec.feed_forward is not None:
            self.feed_forward = spec.feed_forward.make(build)
        if spec.streams:
            self.mixer_connection = HyperConnection(spec.streams, build)
            self.feed_forward_connection = HyperConnection(spec.streams, build)
        if spec.per_layer_width:
            self.per_layer_input = PerLayerInput(spec.per_layer_width, build)
        if spec.scaled:
            self.scale = build.vector((1,), 1.0, ("norm",))
        self.spec = spec
        self.whole_gradients = build.whole_gradients

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, (streams,) emb_dim] → the same."""
        spec = self.spec
        x = checkpoint_name(x, "decoder_layer_input")
        if spec.engram is not None:
            with jax.named_scope(spec.engram.scope):
                x = self.engram(x, inputs)
        if spec.parallel:
            y = self._split(self._normed("pre_mixer", x))
            x = x + (self._run("mixer", y, inputs) + self._run("feed_forward", y, inputs))
        else:
            x = self._around("mixer", "mixer", x, inputs)
            if spec.feed_forward is not None:
                x = self._around("feed_forward", "mlp", x, inputs)
        if spec.per_layer_width:
            x = self.per_layer_input(x, inputs)
        if spec.scaled:
            x = x * self.scale[...].astype(x.dtype)
        if spec.deep:
            x = x + inputs.deep[spec.deep - 1]
        x = self._split(x)
        if spec.shown:
            inputs.notes["result"] = x
        return x

    def _around(self, part: str, norm: str, x: jax.Array, inputs: Inputs) -> jax.Array:
        """A part between its norms and its residual connection."""

        def branch(y: jax.Array) -> jax.Array:
            y = self._split(self._normed(f"pre_{norm}", y))
            return self._normed(f"post_{norm}", self._run(part, y, inputs))

        if not self.spec.streams:
            return x + branch(x)
        mixed: jax.Array = getattr(self, f"{part}_connection")(x, branch)
        return mixed

    def _run(self, part: str, y: jax.Array, inputs: Inputs) -> jax.Array:
        with jax.named_scope(getattr(self.spec, part).scope):
            return self._split(getattr(self, part)(y, inputs))

    def _normed(self, name: str, y: jax.Array) -> jax.Array:
        if name not in self.spec.norms:
            return y
        with jax.named_scope(_SCOPES[name]):
            normed: jax.Array = getattr(self, f"{name}_norm")(y)
            is_whole = self.whole_gradients and name in PRE_NORMS
            return with_whole_gradient(normed) if is_whole else normed

    def _split(self, x: jax.Array) -> jax.Array:
        """[batch, sequence, (streams,) emb_dim], with a part of the width on each device."""
        if self.spec.of_images:
            return constrain(x, IMAGE_AXES, None, WIDTH_AXIS)
        return constrain(x, BATCH_AXES, SEQUENCE_AXIS, *(None,) * (x.ndim - 3), WIDTH_AXIS)
