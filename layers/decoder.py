"""The decoder: embedding, blocks (scanned or unrolled, with or without remat), norm, head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attentions import Attention
from .embeddings import Embed
from .linears import Dense, Mlp
from .normalizations import NORMS
from .sharding import BATCH_AXES, constrain

# Blocks with LayerNorm and learned positions; all others have RMSNorm and RoPE.
_GPT_BLOCKS = ("gpt2", "gpt3")


def normalization(config: Any) -> str:
    """`config.normalization`, with "auto" resolved by `config.decoder_block`."""
    if config.normalization != "auto":
        return str(config.normalization)
    return "layernorm" if config.decoder_block in _GPT_BLOCKS else "rmsnorm"


def position_embedding(config: Any) -> str:
    """`config.position_embedding`, with "auto" resolved by `config.decoder_block`."""
    if config.position_embedding != "auto":
        return str(config.position_embedding)
    return "learned" if config.decoder_block in _GPT_BLOCKS else "rope"


def _use_bias(config: Any) -> bool:
    return bool(config.use_bias or config.decoder_block == "gpt3")


def _dtypes(config: Any) -> dict[str, jnp.dtype]:
    return {"dtype": jnp.dtype(config.dtype), "weight_dtype": jnp.dtype(config.weight_dtype)}


def _norm(config: Any) -> nnx.Module:
    return NORMS[normalization(config)](
        config.emb_dim,
        epsilon=config.normalization_layer_epsilon,
        weight_dtype=jnp.dtype(config.weight_dtype),
    )


class DecoderLayer(nnx.Module):
    """A pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: Any, *, attention: str, rngs: nnx.Rngs) -> None:
        rope = config.rope_max_timescale if position_embedding(config) == "rope" else None
        options: dict[str, Any] = {"use_bias": _use_bias(config), "rngs": rngs, **_dtypes(config)}
        self.pre_self_attention_norm = _norm(config)
        self.self_attention = Attention(
            emb_dim=config.emb_dim,
            num_query_heads=config.num_query_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_max_timescale=rope,
            attention=attention,
            **options,
        )
        self.pre_mlp_norm = _norm(config)
        self.mlp = Mlp(config.emb_dim, config.mlp_dim, config.mlp_activations, **options)

    def __call__(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        """[batch, sequence, emb_dim] → the same."""
        with jax.named_scope("pre_self_attention_norm"):
            normed = self.pre_self_attention_norm(x)
        with jax.named_scope("self_attention"):
            x = x + self.self_attention(normed, positions, segment_ids)
        with jax.named_scope("pre_mlp_norm"):
            normed = self.pre_mlp_norm(x)
        with jax.named_scope("mlp"):
            x = x + self.mlp(normed)
        return constrain(x, BATCH_AXES, None, None)


class Decoder(nnx.Module):
    """A causal language model: tokens [batch, sequence] → logits [batch, sequence, vocab_size].

    Args:
        config: an object with the model's fields (see ``configs/base.yml``).
        attention: name of the attention implementation, "auto" already resolved.
        rngs: for the initial weights.
    """

    def __init__(self, config: Any, *, attention: str, rngs: nnx.Rngs) -> None:
        table: dict[str, Any] = {"rngs": rngs, **_dtypes(config)}
        self.token_embedder = Embed(config.vocab_size, config.emb_dim, row_axis="vocab", **table)
        self.learned_positions = position_embedding(config) == "learned"
        if self.learned_positions:
            rows = config.trainable_position_size or config.max_target_length
            self.position_embedder = Embed(rows, config.emb_dim, row_axis="position", **table)
        self.scan_layers = config.scan_layers
        self.remat_policy = config.remat_policy
        self.remat_save_names = config.remat_save_names
        # One key per layer, so that scanned and unrolled layers start from the same weights.
        keys = jax.random.split(rngs.params(), config.num_decoder_layers)

        def make_layer(key: jax.Array) -> DecoderLayer:
            return DecoderLayer(config, attention=attention, rngs=nnx.Rngs(params=key))

        self.layers: Any
        if config.scan_layers:
            self.layers = _stacked(make_layer, keys)
        else:
            self.layers = nnx.List([make_layer(key) for key in keys])
        self.decoder_norm = _norm(config)
        self.tied = config.logits_via_embedding
        if not self.tied:
            self.logits_dense = Dense(
                (config.emb_dim,),
                (config.vocab_size,),
                logical_axes=("embed", "vocab"),
                use_bias=False,
                **table,
            )

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Logits in float32; all inputs are [batch, sequence] of integers."""
        with jax.named_scope("decoder"):
            with jax.named_scope("token_embedder"):
                x = self.token_embedder(tokens)
            if self.learned_positions:
                with jax.named_scope("position_embedder"):
                    x = x + self.position_embedder(positions)
            x = constrain(x, BATCH_AXES, None, None)
            x = self._blocks(x, positions, segment_ids)
            with jax.named_scope("decoder_norm"):
                x = self.decoder_norm(x)
            with jax.named_scope("logits_dense"):
                logits = self.token_embedder.attend(x) if self.tied else self.logits_dense(x)
            return constrain(logits, BATCH_AXES, None, "tensor").astype(jnp.float32)

    def _blocks(self, x: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
        def block(x: jax.Array, graphdef: Any, weights: Any) -> jax.Array:
            return nnx.merge(graphdef, weights)(x, positions, segment_ids)

        if not self.scan_layers:
            for i, layer in enumerate(self.layers):
                graphdef, weights = nnx.split(layer)
                with jax.named_scope(f"layers_{i}"):
                    run = self._remat(lambda x, w, graphdef=graphdef: block(x, graphdef, w))
                    x = run(x, weights)
            return x

        graphdef, stacked = nnx.split(self.layers)
        # Inside a scan, XLA cannot merge the recomputation with the forward pass anyway.
        run = self._remat(lambda x, w: block(x, graphdef, w), prevent_cse=False)

        def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            with jax.named_scope("layers"):
                return run(x, weights), None

        return jax.lax.scan(body, x, stacked)[0]

    def _remat(self, block: Callable[..., jax.Array], **options: Any) -> Callable[..., jax.Array]:
        """Wraps a block in `jax.checkpoint` according to `remat_policy`."""
        policies = {
            "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            "full": jax.checkpoint_policies.nothing_saveable,
            "names": jax.checkpoint_policies.save_only_these_names(*self.remat_save_names),
        }
        if self.remat_policy == "none":
            return block
        return jax.checkpoint(block, policy=policies[self.remat_policy], **options)


def _stacked(make: Callable[[jax.Array], nnx.Module], keys: jax.Array) -> nnx.Module:
    """One layer per key, stacked: every weight has a leading dimension of that size."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(keys[0])))
    return nnx.merge(graphdef, jax.vmap(lambda key: nnx.state(make(key)))(keys))
