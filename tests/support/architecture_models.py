"""Straightforward JAX models of every family, to be counted by tracing.

A model is a function of sizes (MaxText's flat names), ``w`` (name, shape → array) and tokens
``[B, S]``, and returns a loss.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from mfu_jax.flops.traced.counting import count_model_flops
from tests.support.architecture_parts import (
    attended,
    compressed_attention,
    delta_net,
    dense_mlp,
    experts,
    gqa,
    hyper_connected,
    indexed_mask,
    mla,
    rms,
    shifted_convolution,
)


def training_step(model, config, *, trained=lambda name: True):
    """Loss and gradient for one batch, and the shapes of their arguments.

    Args:
        model: as above.
        config: the `ModelConfig` with its sizes.
        trained: which weights to train, by name.
    """
    s = SimpleNamespace(**config.flat())
    tokens = jax.ShapeDtypeStruct((s.per_device_batch_size, s.max_target_length), "int32")
    found = {}

    def discover(tokens):
        def weight(name, *size):
            found[name] = jax.ShapeDtypeStruct(size, "float32")
            return jnp.zeros(size)

        return model(s, weight, tokens)

    jax.eval_shape(discover, tokens)
    train = {n: v for n, v in found.items() if trained(n)}
    frozen = {n: v for n, v in found.items() if n not in train}

    def loss(train, frozen, tokens):
        return model(s, lambda name, *size: {**frozen, **train}[name], tokens)

    return jax.value_and_grad(loss), (train, frozen, tokens)


def trace_training(model, config, *, trained=lambda name: True):
    """The traced count of `training_step`."""
    step, arguments = training_step(model, config, trained=trained)
    return count_model_flops(step, *arguments)


def logits_loss(s, w, x, name="head"):
    """The output head and a loss without matmuls."""
    if s.logits_via_embedding:
        logits = jnp.einsum("bsd,vd->bsv", x, w("tokens", s.vocab_size, s.emb_dim))
    else:
        logits = x @ w(name, s.emb_dim, s.vocab_size)
    return jnp.sum(jax.nn.log_softmax(logits)[..., 0])


def decoder(s, w, tokens, block, last=None):
    """Embedding, ``x = block(x, i)`` for every layer, norm, head, and MTP modules."""
    table = w("tokens", s.vocab_size, s.emb_dim)
    x = table[tokens]
    for i in range(s.num_decoder_layers):
        x = block(x, i)
    hidden = x
    loss = logits_loss(s, w, rms(x, w("final_norm", s.emb_dim)))
    for i in range(s.mtp_num_layers):
        joined = jnp.concatenate(
            [
                rms(hidden, w(f"mtp{i}/n0", s.emb_dim)),
                rms(table[tokens], w(f"mtp{i}/n1", s.emb_dim)),
            ],
            axis=-1,
        )
        hidden = block(joined @ w(f"mtp{i}/p", 2 * s.emb_dim, s.emb_dim), s.num_decoder_layers + i)
        loss = loss + logits_loss(s, w, rms(hidden, w(f"mtp{i}/n2", s.emb_dim)))
    return loss


def layer(s, w, i, attend, forward):
    """Pre-norm attention and MLP, each with its residual connection."""

    def block(x):
        x = x + attend(rms(x, w(f"{i}/n0", s.emb_dim)))
        return x + forward(rms(x, w(f"{i}/n1", s.emb_dim)))

    return block


def feed_forward(s, w, name, dense=False):
    if dense or s.num_experts == 1:
        return partial(dense_mlp, w, name, hidden=s.mlp_dim, gated=len(s.mlp_activations) > 1)
    shared = s.shared_experts * s.moe_mlp_dim
    return partial(experts, s, w, name, shared=shared)


def uniform(s, w, tokens):
    """llama, mistral, gemma, GPT, qwen, olmo3, gpt_oss, gemma3: they differ in masks and norms."""

    def block(x, i):
        attend = partial(attended, s, w, f"{i}/a")
        return layer(s, w, i, attend, feed_forward(s, w, f"{i}/m"))(x)

    return decoder(s, w, tokens, block)


def gemma2(s, w, tokens):
    """Two layers for each that is counted."""

    def block(x, i):
        for half in "ab":
            name = f"{i}{half}"
            attend = partial(attended, s, w, f"{name}/a")
            x = layer(s, w, name, attend, feed_forward(s, w, f"{name}/m"))(x)
        return x

    return decoder(s, w, tokens, block)


def interleaved_experts(s, w, tokens):
    """llama4, envy: experts in every n-th layer."""

    def block(x, i):
        dense = (i + 1) % s.interleave_moe_layer_step != 0
        attend = partial(attended, s, w, f"{i}/a")
        return layer(s, w, i, attend, feed_forward(s, w, f"{i}/m", dense=dense))(x)

    return decoder(s, w, tokens, block)


def deepseek(s, w, tokens):
    """Latent attention, perhaps with an indexer, hyper-connections, or n-gram memory."""
    streams = s.mhc_expansion_rate

    def attend(y, i):
        y = rms(y, w(f"{i}/n0", s.emb_dim))
        pick = None
        if s.use_indexer:
            pick = partial(indexed_mask, s, w, f"{i}/i", y)
        return mla(s, w, y, f"{i}/a", pick)

    def forward(y, i):
        dense = i < s.first_num_dense_layers
        return feed_forward(s, w, f"{i}/m", dense)(rms(y, w(f"{i}/n1", s.emb_dim)))

    def engram(x, i):
        orders = s.engram_max_ngram_size - 1
        memory = s.engram_num_heads * s.engram_head_dim * orders
        rows = w(f"{i}/g/table", 97, memory)[tokens % 97]
        k = (rows @ w(f"{i}/g/k", memory, streams * s.emb_dim)).reshape(x.shape)
        v = (rows @ w(f"{i}/g/v", memory, s.emb_dim))[:, :, None]
        opened = jax.nn.sigmoid(jnp.einsum("bsgd,bsgd->bsg", k, x))[..., None]
        mixed = (opened * v).reshape(*x.shape[:2], -1)
        kernel = w(f"{i}/g/c", s.engram_kernel_size, streams * s.emb_dim)
        return x + shifted_convolution(mixed, kernel).reshape(x.shape)

    def block(x, i):
        if streams == 1:
            if i in s.engram_layers:
                x = engram(x[:, :, None], i)[:, :, 0]
            x = x + attend(x, i)
            return x + forward(x, i)
        if i == 0:
            x = jnp.repeat(x[:, :, None], streams, axis=2)
        if i in s.engram_layers:
            x = engram(x, i)
        x = hyper_connected(s, w, x, f"{i}/h0", lambda y: attend(y, i))
        x = hyper_connected(s, w, x, f"{i}/h1", lambda y: forward(y, i))
        return jnp.sum(x, axis=2) if i == s.num_decoder_layers - 1 else x

    return decoder(s, w, tokens, block)


def deepseek4(s, w, tokens):
    """Compressed attention by layer, experts, hyper-connections, a head that joins the streams."""
    streams = s.mhc_expansion_rate

    def block(x, i):
        if i == 0:
            x = jnp.repeat(x[:, :, None], streams, axis=2)

        def attend(y):
            y = rms(y, w(f"{i}/n0", s.emb_dim))
            return compressed_attention(s, w, y, f"{i}/a", s.compress_ratios[i])

        x = hyper_connected(s, w, x, f"{i}/h0", attend)
        x = hyper_connected(s, w, x, f"{i}/h1", feed_forward(s, w, f"{i}/m"))
        if i < s.num_decoder_layers - 1:
            return x
        flat = x.reshape(*x.shape[:2], -1)
        joined = jax.nn.sigmoid(flat @ w("join", flat.shape[-1], streams))
        return jnp.sum(x * joined[..., None], axis=2)

    return decoder(s, w, tokens, block)


def qwen3_custom_moe(s, w, tokens):
    """Attention ends in a narrower latent, on which the experts work."""

    def block(x, i):
        y = rms(x, w(f"{i}/n0", s.emb_dim))
        y, _ = gqa(s, w, y, f"{i}/a", out=s.attention_output_dim)
        y = experts(s, w, f"{i}/m", rms(y, w(f"{i}/n1", s.attention_output_dim)))
        return x + y @ w(f"{i}/up", s.moe_expert_input_dim, s.emb_dim)

    return decoder(s, w, tokens, block)


def qwen3_next(s, w, tokens):
    """Delta nets, and gated attention in every n-th layer; a gated shared expert."""

    def block(x, i):
        if (i + 1) % s.inhomogeneous_layer_cycle_interval:
            attend = partial(delta_net, s, w, f"{i}/d")
        else:
            attend = partial(attended, s, w, f"{i}/a", gate=True, qk_norm=True)
        shared = s.shared_experts * s.moe_mlp_dim
        forward = partial(experts, s, w, f"{i}/m", shared=shared, shared_gate=True)
        return layer(s, w, i, attend, forward)(x)

    return decoder(s, w, tokens, block)


def gemma4(s, w, tokens):
    """Global layers have heads of their own, whose keys are their values."""

    def block(x, i):
        wide = {"heads": s.num_query_heads}
        if (i + 1) % 6 == 0:
            wide |= {"kv_heads": s.global_num_kv_heads, "head_dim": s.global_head_dim}
            wide |= {"shared_kv": s.share_kv_projections}
        attend = partial(attended, s, w, f"{i}/a", **wide)
        forward = feed_forward(s, w, f"{i}/m")
        if s.num_experts > 1:
            forward = partial(experts, s, w, f"{i}/m", shared=s.mlp_dim)
        return layer(s, w, i, attend, forward)(x)

    return decoder(s, w, tokens, block)


def gemma4_small(s, w, tokens):
    """The last layers take keys and values of the last layer of their kind that made its own."""
    first_shared = s.num_decoder_layers - s.num_kv_shared_layers
    ple, made, inputs = s.hidden_size_per_layer_input, {}, []
    interval = 5 if s.use_double_wide_mlp else 6  # E2B has both

    def block(x, i):
        if i == 0:
            outputs = s.num_decoder_layers * ple
            own = w("ple_tokens", s.vocab_size, outputs)[tokens]
            own = own + x @ w("ple_projection", s.emb_dim, outputs)
            inputs.extend(jnp.split(own, s.num_decoder_layers, axis=-1))
        is_global = (i + 1) % interval == 0
        borrowed = i >= first_shared
        hidden = s.mlp_dim * (2 if borrowed and s.use_double_wide_mlp else 1)
        forward = partial(dense_mlp, w, f"{i}/m", hidden=hidden, gated=len(s.mlp_activations) > 1)
        sizes = {"head_dim": s.global_head_dim} if is_global else {}

        def attend(y):
            kv = made[is_global] if borrowed else None
            y, made[is_global] = gqa(s, w, y, f"{i}/a", kv=kv, **sizes)
            return y

        x = layer(s, w, i, attend, forward)(x)
        gated = jax.nn.gelu(x @ w(f"{i}/pg", s.emb_dim, ple)) * inputs[i]
        return x + gated @ w(f"{i}/pp", ple, s.emb_dim)

    return decoder(s, w, tokens, block)
