"""The small transformer step that all platforms are compared on, and its FLOPs by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes and choices of the step. B is the batch of one optimizer step over all devices."""

    B: int = 2
    S: int = 128
    D: int = 64
    F: int = 256
    V: int = 512
    H: int = 4
    K: int = 4
    L: int = 4
    scan: bool = True
    remat: Literal["none", "minimal", "full"] = "none"
    tied: bool = False
    accumulation: int = 1
    dtype: str = "float32"
    attention: Literal["dot", "flash", "splash", "cudnn"] = "dot"

    @property
    def layer(self) -> dict[str, int]:
        """Forward FLOPs of one layer's matmuls: 2 · rows · contracted · columns each."""
        T, D, kv = self.B * self.S, self.D, self.K * (self.D // self.H)
        return {
            "qo": 2 * (2 * T * D * D),
            "kv": 2 * (2 * T * D * kv),
            "attention": 2 * (2 * self.B * self.S * self.S * D),
            "wi": 2 * T * D * self.F,
            "wo": 2 * T * self.F * D,
        }

    @property
    def forward(self) -> int:
        """Forward FLOPs of one step over all devices, every attention pair counted."""
        head = 2 * self.B * self.S * self.D * self.V
        return self.L * sum(self.layer.values()) + head

    @property
    def rematerialized(self) -> int:
        """What jax.checkpoint runs again.

        Full: a layer but for its last matmul, whose result nothing needs. Minimal saves the
        results of matmuls without batch dimensions, so the two attention matmuls are left.
        """
        layer = self.layer
        again = {
            "none": 0,
            "minimal": layer["attention"],
            "full": sum(layer.values()) - layer["wo"],
        }
        return self.L * again[self.remat]


_POLICIES: dict[str, Any] = {
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def reference_step(
    shape: Shape, mesh: Mesh | None = None
) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """An SGD step of a causal transformer, and the shapes (and shardings) of its arguments.

    Args:
        shape: the sizes.
        mesh: axes data, fsdp, tensor; one device where None.
    """
    B, S, D, F, V, H, K, L = (getattr(shape, n) for n in "BSDFVHKL")
    head_dim, dtype = D // H, jnp.dtype(shape.dtype)
    batch = ("data", "fsdp")

    def lay(x: jax.Array, *axes: Any) -> jax.Array:
        if mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if shape.attention == "cudnn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        k, v = (jnp.repeat(a, H // K, axis=2) for a in (k, v))
        if shape.attention in ("flash", "splash"):
            return _kernel_attention(shape, mesh, q, k, v)
        scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32)
        scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e9)
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1).astype(dtype), v)

    def block(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        rows = x.shape[0]
        with jax.named_scope("attention"):
            q = lay((x @ p["q"]).reshape(rows, S, H, head_dim), batch, None, "tensor", None)
            k = lay((x @ p["k"]).reshape(rows, S, K, head_dim), batch, None, "tensor", None)
            v = lay((x @ p["v"]).reshape(rows, S, K, head_dim), batch, None, "tensor", None)
            x = lay(x + attend(q, k, v).reshape(rows, S, D) @ p["o"], batch, None, None)
        with jax.named_scope("mlp"):
            hidden = lay(jax.nn.gelu(x @ p["wi"]), batch, None, "tensor")
            return lay(x + hidden @ p["wo"], batch, None, None)

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("layers"):
            if shape.remat == "none":
                return block(x, p)
            return jax.checkpoint(block, policy=_POLICIES[shape.remat])(x, p)

    def loss(p: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x = lay(p["embedding"].astype(dtype)[tokens], batch, None, None)
        layers = jax.tree.map(lambda a: a.astype(dtype), p["layers"])
        if shape.scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, layers)
        else:
            for i in range(L):
                x = layer(x, jax.tree.map(lambda a, i=i: a[i], layers))
        with jax.named_scope("head"):
            head = p["embedding"].T if shape.tied else p["head"]
            logits = lay((x @ head.astype(dtype)).astype(jnp.float32), batch, None, "tensor")
        picked = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(tokens, V), -1)
        return -jnp.mean(picked)

    def gradient(p: dict[str, Any], tokens: jax.Array) -> Any:
        if shape.accumulation == 1:
            return jax.value_and_grad(loss)(p, tokens)
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p))
        parts = tokens.reshape(shape.accumulation, -1, S)
        return jax.lax.scan(
            lambda sums, part: (
                jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(p, part)),
                None,
            ),
            zeros,
            lay(parts, None, batch, None),
        )[0]

    def step(p: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], jax.Array]:
        value, grads = gradient(p, tokens)
        with jax.named_scope("optimizer"):
            return jax.tree.map(lambda a, g: a - 0.1 * g.astype(a.dtype), p, grads), value

    def of(dims: tuple[int, ...], *axes: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

    kv = K * head_dim
    weights = {
        "embedding": of((V, D), "tensor", "fsdp"),
        "layers": {
            "q": of((L, D, D), None, "fsdp", "tensor"),
            "k": of((L, D, kv), None, "fsdp", "tensor"),
            "v": of((L, D, kv), None, "fsdp", "tensor"),
            "o": of((L, D, D), None, "tensor", "fsdp"),
            "wi": of((L, D, F), None, "fsdp", "tensor"),
            "wo": of((L, F, D), None, "tensor", "fsdp"),
        },
    }
    if not shape.tied:
        weights["head"] = of((D, V), "fsdp", "tensor")
    return step, (weights, of((B, S), batch, None, dtype=jnp.int32))


def _kernel_attention(
    shape: Shape, mesh: Mesh | None, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """The flash or splash attention kernel that JAX bundles for TPUs, on every device's heads."""
    S = shape.S
    if shape.attention == "flash":
        from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return flash_attention(q, k, v, causal=True)
    else:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as kernel,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_mask as masks,
        )

        forward = ("block_q", "block_kv", "block_kv_compute")
        backward = ("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
        names = (*forward, *backward, "block_q_dq", "block_kv_dq")
        sizes = kernel.BlockSizes(**dict.fromkeys(names, 128))

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            mask = masks.MultiHeadMask([masks.CausalMask((S, S))] * q.shape[1])
            one = kernel.make_splash_mha_single_device(mask, block_sizes=sizes)
            return jax.vmap(one)(q, k, v)

    q, k, v = (a.transpose(0, 2, 1, 3) for a in (q, k, v))
    if mesh is not None:
        spec = PartitionSpec(("data", "fsdp"), "tensor", None, None)
        attend = jax.shard_map(
            attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False
        )
    return attend(q, k, v).transpose(0, 2, 1, 3)
