"""Causal attention over packed documents, by several implementations with one signature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ..sharding import BATCH_AXES, SEQUENCE_AXIS, axis_size, constrain

# What a model may need from an implementation beyond causal attention over segments.
WINDOW, SOFT_CAP, SINKS, PICKED, VALUE_DIM, IMAGES, PROBABILITIES, SPLIT, STAGED, WHOLE = (
    "sliding windows",
    "a soft cap of the scores",
    "attention sinks",
    "keys picked by an indexer",
    "values narrower than keys",
    "images whose tokens see each other",
    "probabilities for an indexer's loss",
    "sequences split over devices",
    "packed documents in a pipeline",
    "whole sequences on a device",
)


@dataclass(frozen=True, kw_only=True)
class SplashBlocks:
    """Block sizes of the splash kernel in tokens, capped at the sequence length: speed only.

    Attributes:
        q, kv, kv_compute: forward pass: queries, keys in memory, keys computed at once.
        q_dkv, kv_dkv, kv_dkv_compute: the gradient of keys and values.
        q_dq, kv_dq: the gradient of queries, unless `fused`.
        fused: one kernel for all three gradients.
    """

    q: int = 512
    kv: int = 512
    kv_compute: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512
    kv_dkv_compute: int = 512
    q_dq: int = 512
    kv_dq: int = 512
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionPattern:
    """Which keys a query sees, and how its scores are scaled.

    Attributes:
        window: a query sees the last `window` tokens, itself included; 0: all tokens before it.
        chunk: a query sees only its own chunk of `chunk` tokens; 0: no chunks.
        scale: factor of the scores; None: 1 / √head_dim.
        soft_cap: scores s become ``soft_cap · tanh(s / soft_cap)``; 0: no cap.
        joins_images: tokens of an image see each other, including later ones.
        blocks: block sizes of the splash kernel.
    """

    window: int = 0
    chunk: int = 0
    scale: float | None = None
    soft_cap: float = 0.0
    joins_images: bool = False
    blocks: SplashBlocks = SplashBlocks()

    @property
    def needs(self) -> frozenset[str]:
        """What an implementation must support."""
        wanted = {
            WINDOW: self.window or self.chunk,  # those that have one have both
            SOFT_CAP: self.soft_cap,
            IMAGES: self.joins_images,
        }
        return frozenset(name for name, value in wanted.items() if value)

    def scale_of(self, head_dim: int) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def mask(self, segment_ids: jax.Array, images: jax.Array | None = None) -> jax.Array:
        """Which keys a query sees, [B, S, S].

        Args:
            segment_ids: [B, S].
            images: the image of each token, counted from 1; 0: text; [B, S].
        """
        place = jnp.arange(segment_ids.shape[1])
        seen = self.seen(place, place) & (segment_ids[:, :, None] == segment_ids[:, None, :])
        if not self.joins_images or images is None:
            return seen
        later = place[:, None] < place
        together = (images[:, :, None] == images[:, None]) & (images > 0)[:, None]
        return seen | (later & together)

    def seen(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Positions [S] and [T] in a row → [S, T]: which keys a query sees within one document."""
        distance = queries[:, None] - keys
        seen = distance >= 0
        if self.window:
            seen &= distance < self.window
        if self.chunk:
            seen &= (queries[:, None] // self.chunk) == (keys // self.chunk)
        return seen


CAUSAL = AttentionPattern()


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of an attention implementation.

    Attributes:
        q: queries [B, S, N, h].
        k: keys [B, S, K, h]; N is a multiple of K.
        v: values [B, S, K, v].
        segment_ids: [B, S]; tokens see each other only within a segment.
        pattern: which keys a query sees, and how scores are scaled.
        sinks: a sink logit for each query head, [N].
        picked: the keys that an indexer picked, [B, S, S] of booleans.
        images: the image of each token, counted from 1; 0: text; [B, S].
        packed: whether a row may have several segments.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array
    _: KW_ONLY
    pattern: AttentionPattern = CAUSAL
    sinks: jax.Array | None = None
    picked: jax.Array | None = None
    images: jax.Array | None = None
    packed: bool = True

    @property
    def mask(self) -> jax.Array:
        """Which keys a query sees, [B, S, S]."""
        mask = self.pattern.mask(self.segment_ids, self.images)
        return mask if self.picked is None else mask & self.picked


AttentionOp: TypeAlias = Callable[[AttentionInputs], jax.Array]
"""An implementation; it returns [B, S, N, v]."""

ATTENTION_OPS: dict[str, AttentionOp] = {}
CONTEXT = "context"
"""The name of an implementation's result for `remat`."""
CUDNN_CONTEXT = "cudnn_context"
"""The same of cuDNN's: `remat` saves it with the sums that its backward kernel reads."""
_SUPPORTED: dict[str, frozenset[str]] = {}
_PLATFORMS = {"cudnn_flash": "gpu", "splash": "tpu", "ring_splash": "tpu"}
_FASTEST = {"tpu": "splash", "gpu": "cudnn_flash"}


def register_attention(
    name: str, supports: Collection[str]
) -> Callable[[AttentionOp], AttentionOp]:
    """Registers an implementation under its `attention=` name."""

    def register(op: AttentionOp) -> AttentionOp:
        ATTENTION_OPS[name] = op
        _SUPPORTED[name] = frozenset(supports)
        return op

    return register


def choose_attention(
    name: str,
    *,
    platform: str,
    dtype: str,
    needs: Collection[str] = (),
    cudnn_lacks: Collection[str] = (),
) -> str:
    """The implementation to use; ``auto``: the platform's fastest that supports the model's needs.

    Args:
        name: as in `attention=`.
        platform: of the devices.
        dtype: of the activations.
        needs: what the model needs.
        cudnn_lacks: what cuDNN's does not have on these devices.

    Raises:
        ValueError: `name` is a kernel of another platform, or lacks the dtype or a needed feature.
    """
    if {SPLIT, WHOLE} <= set(needs):
        raise ValueError(
            "a layer of this model needs whole sequences (delta net, compressed attention); "
            "leave context_parallelism at 1 and use fsdp or tensor"
        )
    needs = set(needs) - {WHOLE}
    platform = "gpu" if platform == "cuda" else platform
    if name == "auto":
        fastest = _FASTEST.get(platform, "dot_product")
        lacks_dtype = fastest == "cudnn_flash" and dtype == "float32"
        lacks = lacks_dtype or _lacking(fastest, needs, cudnn_lacks)
        return "dot_product" if lacks else fastest
    needed = _PLATFORMS.get(name, platform)
    if needed != platform:
        raise ValueError(
            f"attention={name} runs on {needed} only, and this is {platform}; "
            "attention=auto takes the fastest that the platform has"
        )
    if name == "cudnn_flash" and dtype == "float32":
        raise ValueError(
            "attention=cudnn_flash needs dtype=bfloat16 or float16; with float32 use "
            "attention=dot_product"
        )
    if lacking := _lacking(name, needs, cudnn_lacks):
        raise ValueError(
            f"attention={name} does not have {', '.join(lacking)}, which the model needs; "
            "attention=auto takes the fastest that does"
        )
    return name


def supports(name: str, needs: Collection[str]) -> bool:
    """Whether an implementation has all that a model needs."""
    return _SUPPORTED[name] >= set(needs)


def _lacking(name: str, needs: Collection[str], cudnn_lacks: Collection[str]) -> list[str]:
    has = _SUPPORTED[name]
    return sorted(set(needs) - (has.difference(cudnn_lacks) if name == "cudnn_flash" else has))


def attended(name: str, x: AttentionInputs) -> jax.Array:
    """The implementation's result, which `remat` saves as `CONTEXT`."""
    context = ATTENTION_OPS[name](x)
    if name in ("splash", "ring_splash"):  # named with the sums that their backward kernel reads
        return context
    return checkpoint_name(context, CUDNN_CONTEXT if name == "cudnn_flash" else CONTEXT)


def with_gathered_keys(x: AttentionInputs) -> AttentionInputs:
    """Where sequences are split over devices, each keeps its queries and gets all keys."""
    if axis_size(SEQUENCE_AXIS) == 1:
        return x
    # Keys and values are computed sharded, then gathered; else every device would compute them all.
    q, k, v = (constrain(y, BATCH_AXES, SEQUENCE_AXIS, "tensor", None) for y in (x.q, x.k, x.v))
    k, v = (constrain(y, BATCH_AXES, None, "tensor", None) for y in (k, v))
    return dataclasses.replace(x, q=q, k=k, v=v)


def over_shards(
    run: Callable[..., jax.Array],
    x: AttentionInputs,
    *more: tuple[Any, Any],
    queries: str | None = None,
    keys: str | None = None,
) -> jax.Array:
    """Runs what XLA cannot partition on each device's batch rows and heads.

    Args:
        more: of what `run` takes besides `x`: its partition specs, its value.
        queries: the mesh axis over which queries are split; `keys`: keys and values.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return run(x)
    split = PartitionSpec(BATCH_AXES, queries, "tensor", None)
    whole = PartitionSpec(BATCH_AXES, keys, "tensor", None)
    segments = PartitionSpec(BATCH_AXES, queries)
    specs = {"q": split, "k": whole, "v": whole, "segment_ids": segments}
    if x.sinks is not None:
        specs["sinks"] = PartitionSpec("tensor")

    def local(arrays: dict[str, Any], *more: Any) -> jax.Array:
        return run(dataclasses.replace(x, **arrays), *more)

    in_specs = (specs, *(of_one for of_one, _ in more))
    on_each = jax.shard_map(local, in_specs=in_specs, out_specs=split, check_vma=False)
    return on_each({name: getattr(x, name) for name in specs}, *(value for _, value in more))


def masked_probabilities(
    q: jax.Array,
    k: jax.Array,
    mask: jax.Array,
    *,
    pattern: AttentionPattern = CAUSAL,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """A softmax over every pair, masked: [B, K, N / K, S, T] in float32.

    Args:
        q: [B, S, N, h].
        k: [B, T, K, h]; may have another length.
        mask: [B, S, T].
        pattern: only its scale and soft cap are used.
        sinks: [N].
    """
    B, S, N, h = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, S, K, N // K, h) * jnp.asarray(pattern.scale_of(h), q.dtype)
    with jax.named_scope("scores"):
        scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k).astype(jnp.float32)
    if pattern.soft_cap:
        scores = pattern.soft_cap * jnp.tanh(scores / pattern.soft_cap)
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    return _softmax(scores, sinks)


def weighted(v: jax.Array, probabilities: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Values [B, T, K, v] weighted by `masked_probabilities` → [B, S, N, v]."""
    B, K, G, S, _ = probabilities.shape
    with jax.named_scope("values"):
        values = jnp.einsum("bkgst,btkv->bskgv", probabilities.astype(dtype), v)
    return values.reshape(B, S, K * G, v.shape[-1])


def attended_with_probabilities(x: AttentionInputs) -> tuple[jax.Array, jax.Array]:
    """The result of `dot_product`, and the probabilities averaged over heads, [B, S, T]."""
    context, found = _attended(x)
    return context, found.mean(axis=(1, 2))


def _attended(x: AttentionInputs) -> tuple[jax.Array, jax.Array]:
    x = with_gathered_keys(x)
    found = masked_probabilities(x.q, x.k, x.mask, pattern=x.pattern, sinks=x.sinks)
    return weighted(x.v, found, x.q.dtype), found


def _softmax(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Over the last dimension of [B, K, G, S, T]; each head's sink takes its share."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    _, K, G, _, _ = scores.shape
    sink = sinks.astype(jnp.float32).reshape(K, G, 1, 1)
    largest = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), sink))
    weights = jnp.exp(scores - largest)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sink - largest))


@register_attention(
    "dot_product",
    supports=(WINDOW, SOFT_CAP, SINKS, PICKED, VALUE_DIM, IMAGES, PROBABILITIES, SPLIT, STAGED),
)
def dot_product(x: AttentionInputs) -> jax.Array:
    """Plain einsums: every pair of positions is computed, then masked."""
    return _attended(x)[0]


@register_attention("jax", supports=(WINDOW, PICKED, IMAGES, SPLIT, STAGED))
def jax_attention(x: AttentionInputs) -> jax.Array:
    """`jax.nn.dot_product_attention`, compiled by XLA."""
    x = with_gathered_keys(x)
    return jax.nn.dot_product_attention(
        x.q, x.k, x.v, mask=x.mask[:, None], scale=x.pattern.scale, implementation="xla"
    )
