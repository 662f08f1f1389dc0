"""What the JAX models of `architecture_models` are made of.

Written from the papers, not from the formulas under test: sizes come from the config, matmuls
from what the model does.

A model is a function of ``w`` (name, shape → array) and tokens ``[B, S]``, and returns a loss.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def softmax_attention(q, k, v, mask=None):
    """q [B,S,H,h], k and v [B,T,K,·]: grouped queries, all pairs computed."""
    groups = q.shape[2] // k.shape[2]
    q = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", q, k)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    out = jnp.einsum("bkgst,btkv->bskgv", jax.nn.softmax(scores), v)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def causal(length):
    return jnp.tril(jnp.ones((length, length), bool))


def gqa(
    s,
    w,
    x,
    name,
    *,
    heads=None,
    kv_heads=None,
    head_dim=None,
    out=None,
    gate=False,
    shared_kv=False,
    kv=None,
    qk_norm=False,
):
    """Multi-head attention; returns the output and its keys and values."""
    heads, kv_heads = heads or s.num_query_heads, kv_heads or s.num_kv_heads
    dim, width = head_dim or s.head_dim, x.shape[-1]
    q = jnp.einsum("bsd,dhe->bshe", x, w(f"{name}/q", width, heads, dim * (1 + gate)))
    if gate:
        q, opened = jnp.split(q, 2, axis=-1)
    if kv is None:
        k = jnp.einsum("bsd,dke->bske", x, w(f"{name}/k", width, kv_heads, dim))
        v = k if shared_kv else jnp.einsum("bsd,dke->bske", x, w(f"{name}/v", width, kv_heads, dim))
        if qk_norm:
            k = rms(k, w(f"{name}/kn", dim))
        kv = (k, v)
    if qk_norm:
        q = rms(q, w(f"{name}/qn", dim))
    y = softmax_attention(q, *kv, causal(x.shape[1]))
    if gate:
        y = y * jax.nn.sigmoid(opened)
    return jnp.einsum("bshe,hed->bsd", y, w(f"{name}/o", heads, dim, out or width)), kv


def attended(s, w, name, x, **sizes):
    """The output of `gqa` alone."""
    return gqa(s, w, x, name, **sizes)[0]


def mla(s, w, x, name, pick=None):
    """Multi-head latent attention; `pick`: query latent → mask of the keys an indexer chose."""
    heads, nope, rope = s.num_query_heads, s.qk_nope_head_dim, s.qk_rope_head_dim
    latent = x
    if s.q_lora_rank:
        latent = rms(x @ w(f"{name}/qa", s.emb_dim, s.q_lora_rank), w(f"{name}/qn", s.q_lora_rank))
    q = jnp.einsum("bsr,rhe->bshe", latent, w(f"{name}/qb", latent.shape[-1], heads, nope + rope))
    kv, k_rope = jnp.split(
        x @ w(f"{name}/kva", s.emb_dim, s.kv_lora_rank + rope), [s.kv_lora_rank], axis=-1
    )
    kv = rms(kv, w(f"{name}/kvn", s.kv_lora_rank))
    kv = jnp.einsum(
        "bsr,rhe->bshe", kv, w(f"{name}/kvb", s.kv_lora_rank, heads, nope + s.v_head_dim)
    )
    k, v = jnp.split(kv, [nope], axis=-1)
    k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], rope))
    mask = causal(x.shape[1])
    if pick is not None:
        mask = mask & pick(latent)
    y = softmax_attention(q, jnp.concatenate([k, k_rope], -1), v, mask)
    return jnp.einsum("bshe,hed->bsd", y, w(f"{name}/o", heads, s.v_head_dim, s.emb_dim))


def indexed_mask(s, w, name, x, latent, keys=None):
    """Top-k of the lightning indexer's scores, as a mask [B,1,1,S,T]."""
    x, latent = jax.lax.stop_gradient(x), jax.lax.stop_gradient(latent)
    q = jnp.einsum(
        "bsr,rhe->bshe",
        latent,
        w(f"{name}/q", latent.shape[-1], s.indexer_n_heads, s.indexer_head_dim),
    )
    if keys is None:
        k = x @ w(f"{name}/k", s.emb_dim, s.indexer_head_dim)
        k = k * w(f"{name}/kn", s.indexer_head_dim) + w(f"{name}/kb", s.indexer_head_dim)
    else:
        k = keys(x)
    head_weights = x @ w(f"{name}/w", s.emb_dim, s.indexer_n_heads)
    scores = jax.nn.relu(jnp.einsum("bshe,bte->bsth", q, k))
    scores = jnp.einsum("bsth,bsh->bst", scores, head_weights)
    kept = min(s.indexer_topk, scores.shape[-1])
    return (scores >= jax.lax.top_k(scores, kept)[0][..., -1:])[:, None, None]


def dense_mlp(w, name, x, *, hidden, gated):
    width = x.shape[-1]
    h = jax.nn.gelu(x @ w(f"{name}/0", width, hidden))
    if gated:
        h = h * (x @ w(f"{name}/1", width, hidden))
    return h @ w(f"{name}/2", hidden, width)


def experts(s, w, name, x, *, shared=0, shared_gate=False):
    """Routed experts, k for a token on average, and perhaps a shared one."""
    width, hidden, count = x.shape[-1], s.moe_mlp_dim, s.num_experts
    scores = jax.nn.softmax(x @ w(f"{name}/router", width, count))
    weights = (
        w(f"{name}/e0", count, width, hidden),
        w(f"{name}/e1", count, width, hidden),
        w(f"{name}/e2", count, hidden, width),
    )
    evenly = x.shape[0] * x.shape[1] * s.num_experts_per_tok % count == 0
    y = (expert_choice if evenly else token_choice)(x, scores, s.num_experts_per_tok, *weights)
    if shared:
        z = dense_mlp(w, f"{name}/shared", x, hidden=shared, gated=True)
        y = y + (z * jax.nn.sigmoid(x @ w(f"{name}/sg", width, 1)) if shared_gate else z)
    return y


def token_choice(x, scores, k, wi_0, wi_1, wo):
    """Each token gathers the weights of its experts: exactly k of them are computed."""
    probability, chosen = jax.lax.top_k(scores, k)
    h = jax.nn.silu(jnp.einsum("bsd,bskdf->bskf", x, wi_0[chosen]))
    h = h * jnp.einsum("bsd,bskdf->bskf", x, wi_1[chosen])
    return jnp.sum(jnp.einsum("bskf,bskfd->bskd", h, wo[chosen]) * probability[..., None], axis=2)


def expert_choice(x, scores, k, wi_0, wi_1, wo):
    """Each expert takes the B·S·k/E tokens that score highest (arXiv 2202.09368): dense matmuls."""
    tokens, count = x.reshape(-1, x.shape[-1]), scores.shape[-1]
    share = len(tokens) * k // count
    probability, chosen = jax.lax.top_k(scores.reshape(-1, count).T, share)
    taken = tokens[chosen]
    h = jax.nn.silu(jnp.einsum("ecd,edf->ecf", taken, wi_0))
    h = h * jnp.einsum("ecd,edf->ecf", taken, wi_1)
    y = jnp.einsum("ecf,efd->ecd", h, wo) * probability[..., None]
    return jnp.zeros_like(tokens).at[chosen].add(y).reshape(x.shape)


def shifted_convolution(x, kernel):
    """Depthwise and causal: x [B,S,C], kernel [K,C]."""
    size = kernel.shape[0]
    padded = jnp.pad(x, ((0, 0), (size - 1, 0), (0, 0)))
    window = jnp.stack([padded[:, i : i + x.shape[1]] for i in range(size)], axis=2)
    return jnp.einsum("bskc,kc->bsc", window, kernel)


def delta_net(s, w, name, x):
    """Token by token: forget, erase what the key held, write the value, read with the query."""
    hk, hv, dk, dv = (
        s.gdn_num_key_heads,
        s.gdn_num_value_heads,
        s.gdn_key_head_dim,
        s.gdn_value_head_dim,
    )
    keys, values = hk * dk, hv * dv
    qkvz = x @ w(f"{name}/qkvz", s.emb_dim, 2 * keys + 2 * values)
    beta, decay = jnp.split(jax.nn.sigmoid(x @ w(f"{name}/ba", s.emb_dim, 2 * hv)), 2, axis=-1)
    decay = decay * w(f"{name}/a", hv) + w(f"{name}/dt", hv)
    qkv, z = jnp.split(qkvz, [2 * keys + values], axis=-1)
    qkv = shifted_convolution(qkv, w(f"{name}/conv", s.gdn_conv_kernel_dim, 2 * keys + values))
    q, k, v = jnp.split(qkv, [keys, 2 * keys], axis=-1)
    q, k = (jnp.repeat(t.reshape(*t.shape[:2], hk, dk), hv // hk, axis=2) for t in (q, k))
    v = v.reshape(*v.shape[:2], hv, dv)

    def step(state, token):
        q, k, v, beta, decay = token
        state = state * decay[..., None, None]
        held = jnp.einsum("bhkv,bhk->bhv", state, k)
        state = state - jnp.einsum("bhv,bhk->bhkv", held * beta[..., None], k)
        state = state + jnp.einsum("bhv,bhk->bhkv", v * beta[..., None], k)
        return state, jnp.einsum("bhkv,bhk->bhv", state, q)

    over_time = [jnp.moveaxis(t, 1, 0) for t in (q, k, v, beta, decay)]
    _, y = jax.lax.scan(step, jnp.zeros((x.shape[0], hv, dk, dv)), tuple(over_time))
    y = rms(jnp.moveaxis(y, 0, 1), w(f"{name}/n", dv))
    return (y.reshape(z.shape) * jax.nn.silu(z)) @ w(f"{name}/o", values, s.emb_dim)


def hyper_connected(s, w, streams, name, branch):
    """streams [B,S,k,D]: mix them to the branch's input, spread its output, mix the rest."""
    k, width = s.mhc_expansion_rate, s.emb_dim
    flat = streams.reshape(*streams.shape[:2], k * width)
    flat = rms(flat, w(f"{name}/n", k * width))
    mixes = flat @ w(f"{name}/alpha", k * width, 2 * k + k * k) + w(f"{name}/beta", 2 * k + k * k)
    mixes = mixes * jnp.sum(w(f"{name}/scale", 3))
    read, write, keep = jnp.split(mixes, [k, 2 * k], axis=-1)
    out = branch(jnp.einsum("bsk,bskd->bsd", jax.nn.sigmoid(read), streams))
    keep = jax.nn.softmax(keep.reshape(*keep.shape[:2], k, k))
    kept = jnp.einsum("bskm,bskd->bsmd", keep, streams)
    return kept + out[:, :, None] * jax.nn.sigmoid(write)[..., None]


def compressed(s, w, x, name, ratio, dim, overlap):
    """One key for `ratio` tokens: a gated sum of their projections."""
    outputs = (1 + overlap) * dim
    content = x @ w(f"{name}/content", s.emb_dim, outputs)
    gate = x @ w(f"{name}/gate", s.emb_dim, outputs)
    count = x.shape[1] // ratio
    content, gate = (
        t[:, : count * ratio].reshape(-1, count, ratio, outputs) for t in (content, gate)
    )
    gate = jax.nn.softmax(gate + w(f"{name}/positions", ratio, outputs), axis=2)
    keys = jnp.sum(content * gate, axis=2)
    if overlap:
        keys = keys[..., :dim] + jnp.pad(keys[:, :-1, dim:], ((0, 0), (1, 0), (0, 0)))
    return rms(keys, w(f"{name}/n", dim))


def compressed_attention(s, w, x, name, ratio):
    heads, dim = s.num_query_heads, s.head_dim
    latent = rms(x @ w(f"{name}/qa", s.emb_dim, s.q_lora_rank), w(f"{name}/qn", s.q_lora_rank))
    q = jnp.einsum("bsr,rhe->bshe", latent, w(f"{name}/qb", s.q_lora_rank, heads, dim))
    kv = rms(
        jnp.einsum("bsd,dke->bske", x, w(f"{name}/kv", s.emb_dim, s.num_kv_heads, dim)),
        w(f"{name}/kvn", dim),
    )
    length = x.shape[1]
    mask = jnp.broadcast_to(causal(length), (x.shape[0], 1, 1, length, length))
    if ratio:
        pooled = compressed(s, w, x, f"{name}/c", ratio, dim, overlap=ratio == 4)
        kv = jnp.concatenate([kv, jnp.repeat(pooled[:, :, None], s.num_kv_heads, axis=2)], axis=1)
        picked = jnp.ones((x.shape[0], 1, 1, length, pooled.shape[1]), bool)
        if ratio == 4:

            def keys(x):
                return compressed(s, w, x, f"{name}/ic", ratio, s.indexer_head_dim, overlap=True)

            picked = indexed_mask(s, w, f"{name}/i", x, latent, keys=keys)
        mask = jnp.concatenate([mask, picked], axis=-1)
    sinks = w(f"{name}/sinks", heads)
    y = softmax_attention(q, kv, kv, mask) * jnp.exp(sinks)[:, None]
    y = y.reshape(*y.shape[:2], s.o_groups, heads * dim // s.o_groups)
    y = jnp.einsum(
        "bsgi,gio->bsgo", y, w(f"{name}/oa", s.o_groups, heads * dim // s.o_groups, s.o_lora_rank)
    )
    return y.reshape(*y.shape[:2], -1) @ w(f"{name}/ob", s.o_groups * s.o_lora_rank, s.emb_dim)
