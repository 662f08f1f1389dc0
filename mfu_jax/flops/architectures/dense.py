"""Decoders whose layers are all alike: attention and a dense MLP under a causal mask."""

from __future__ import annotations

from mfu_jax.flops import matmuls
from mfu_jax.flops.architectures.registry import architecture
from mfu_jax.flops.components import Component, Layer, Model
from mfu_jax.flops.masks import Causal
from mfu_jax.flops.shape import ModelShape


@architecture("default", "llama2", "mistral", "gemma", "gpt2", "gpt3")
def dense_decoder(shape: ModelShape) -> Model:
    """Embedding, L × (attention, MLP), head: llama, mistral, gemma, GPT."""
    block = (
        *matmuls.attention(
            shape.emb_dim, shape.num_query_heads, shape.num_kv_heads, shape.head_dim, Causal()
        ),
        *matmuls.mlp(shape.emb_dim, shape.mlp_dim, gated=shape.gated_mlp),
    )
    return decoder(
        shape, (Layer(name="layers", components=block, repeats=shape.num_decoder_layers),)
    )


def decoder(shape: ModelShape, layers: tuple[Layer, ...]) -> Model:
    """`layers` between the embedding and the output head."""
    embedding: tuple[Component, ...] = (matmuls.table("tokens", shape.vocab_size, shape.emb_dim),)
    output = (matmuls.head(shape.vocab_size, shape.emb_dim, tied=shape.logits_via_embedding),)
    return Model(
        layers=(
            Layer(name="embedding", components=embedding),
            *layers,
            Layer(name="head", components=output),
        )
    )
