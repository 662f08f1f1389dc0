"""Mixtures of experts: routed experts, dropless or of fixed capacity, and a shared expert."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ..building import Builder, Inputs
from ..projections.grouped_matmuls import grouped_dot, has_tiles
from ..projections.linears import ACTIVATIONS
from ..projections.lora import Adapter
from ..projections.quantization import quantized_dot, quantized_ragged_dot, shard_of
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, WIDTH_AXIS, axis_size, constrain, partition_spec
from .mlp import MlpSpec
from .routers import RouterSpec, Routing
from .row_moves import moved, sum_of_copies

# How `shard_map` receives the experts' weights: split over experts and hidden width, else gathered.
_WEIGHT_SPECS = {
    "wi_0": PartitionSpec("expert", None, "tensor"),
    "wi_1": PartitionSpec("expert", None, "tensor"),
    "wo": PartitionSpec("expert", "tensor", None),
    "wi_0/lora_a": PartitionSpec("expert", None, None),
    "wi_0/lora_b": PartitionSpec("expert", None, "tensor"),
    "wi_1/lora_a": PartitionSpec("expert", None, None),
    "wi_1/lora_b": PartitionSpec("expert", None, "tensor"),
    "wo/lora_a": PartitionSpec("expert", "tensor", None),
    "wo/lora_b": PartitionSpec("expert", None, None),
    "wi_0_bias": PartitionSpec("expert", "tensor"),
    "wi_1_bias": PartitionSpec("expert", "tensor"),
    "wo_bias": PartitionSpec("expert", None),
}


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """Routed experts of hidden width `hidden`, and the shared expert that every token passes.

    Attributes:
        activation: of the gate.
        bias: whether the experts' matrices have biases.
        clamp: GPT-OSS: gate and input are clipped to this, and 1 is added to the input; 0: neither.
        capacity_factor: each expert takes this many times its even share of a sequence and drops
            the tokens beyond; 0: no token is dropped and nothing is padded.
        weigh_inputs: weights scale the experts' inputs instead of their outputs (Llama 4).
        shared: an MLP for every token; `shared_gate`: a sigmoid of the token scales its output.
        whole: fsdp splits the set of experts instead of their width.
    """

    router: RouterSpec
    hidden: int
    activation: str = "silu"
    bias: bool = False
    clamp: float = 0.0
    capacity_factor: float = 0.0
    weigh_inputs: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    whole: bool = False
    scope: str = "moe"
    needs: frozenset[str] = frozenset()

    def make(self, build: Builder) -> Experts:
        """The weights of router and experts."""
        return Experts(self, build)


class Experts(nnx.Module):
    """``Σ weight · expert(x)`` over the chosen experts, plus the shared expert."""

    def __init__(self, spec: ExpertsSpec, build: Builder) -> None:
        E, D, F = spec.router.experts, build.emb_dim, spec.hidden
        experts, width = ("whole_experts", "norm") if spec.whole else ("experts", "embed")
        inwards, outwards = (experts, width, "mlp"), (experts, "mlp", width)
        self.router = spec.router.make(build)
        made = {
            "wi_0": ((E, D, F), inwards),
            "wi_1": ((E, D, F), inwards),
            "wo": ((E, F, D), outwards),
        }
        for name, (shape, axes) in made.items():
            setattr(self, name, build.matrix(shape, shape[1], axes))
        self.lora = build.lora
        if build.lora is not None:
            self.adapters = nnx.Dict(
                {
                    name: Adapter(build.lora, build, shape, axes, in_rank=1, stacked=1)
                    for name, (shape, axes) in made.items()
                    if name in build.lora.targets
                }
            )
        if spec.bias:
            self.wi_0_bias = build.vector((E, F), 0.0, ("experts", "mlp"))
            self.wi_1_bias = build.vector((E, F), 0.0, ("experts", "mlp"))
            self.wo_bias = build.vector((E, D), 0.0, ("experts", "embed"))
        if spec.shared is not None:
            self.shared = spec.shared.make(build)
            if spec.shared_gate:
                self.shared_gate = build.dense((D,), (1,), ("embed", "norm"))
        self.on_tpu = build.on_tpu
        self.spec = spec
        self.dtype = build.dtype
        self.quantization = build.quantization

    def __call__(self, x: jax.Array, inputs: Inputs) -> jax.Array:
        """[batch, sequence, width] → the same."""
        with jax.named_scope("router"):
            routing = self.router(x, inputs)
        with jax.named_scope("experts"):
            y = self.routed(x, routing)
        if self.spec.shared is None:
            return y
        with jax.named_scope("shared"):
            return y + self._shared(x)

    def routed(self, x: jax.Array, routing: Routing) -> jax.Array:
        """The weighted sum of the chosen experts' outputs, [batch, sequence, width]."""
        if self.spec.capacity_factor:
            return self._with_capacity(x, routing)
        return self._dropless(x, routing)

    def _shared(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.shared(x)
        return y * jax.nn.sigmoid(self.shared_gate(x)) if self.spec.shared_gate else y

    def _dropless(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Rows sorted by expert, multiplied group by group; each device sorts its own rows.

        Over the mesh's `expert` axis, a device gathers its neighbours' rows, computes those that go
        to its own experts, and reduce-scatters the results. Over `tensor`, each device has a part
        of the hidden width, and gets a part of the result's width.
        """
        names = ["wi_0", "wi_1", "wo"]
        if self.spec.bias:
            names += ["wi_0_bias", "wi_1_bias", "wo_bias"]
        weights = {name: getattr(self, name)[...].astype(self.dtype) for name in names}
        weights |= self._of_adapters()
        if jax.sharding.get_abstract_mesh().empty:
            return self._sorted_rows(x, routing, weights, first=0, own=self.spec.router.experts)
        rows = PartitionSpec(BATCH_AXES, SEQUENCE_AXIS, None)
        specs = {name: _WEIGHT_SPECS[name] for name in weights}
        shards = self._shards() if self.gathers_narrow else {}
        specs |= shards

        def local(
            x: jax.Array, chosen: tuple[jax.Array, jax.Array], weights: dict[str, jax.Array]
        ) -> jax.Array:
            routing = Routing(*chosen)
            if jax.lax.axis_size("expert") > 1:
                x, routing = jax.lax.all_gather((x, routing), "expert", axis=0, tiled=True)
            own = self.spec.router.experts // jax.lax.axis_size("expert")
            first = jax.lax.axis_index("expert") * own
            if self.spec.bias and jax.lax.axis_size("tensor") > 1:
                is_first = jax.lax.axis_index("tensor") == 0
                weights = {**weights, "wo_bias": weights["wo_bias"] * is_first}
            y = self._sorted_rows(x, routing, weights, first=first, own=own, shards=shards)
            if jax.lax.axis_size("expert") > 1:
                y = jax.lax.psum_scatter(y, "expert", scatter_dimension=0, tiled=True)
            return y

        over_shards = jax.shard_map(
            local,
            in_specs=(rows, (rows, rows), specs),
            out_specs=PartitionSpec(BATCH_AXES, SEQUENCE_AXIS, WIDTH_AXIS),
            check_vma=False,
        )
        y: jax.Array = over_shards(x, (routing.experts, routing.weights), weights)
        return y

    def _of_adapters(self) -> dict[str, jax.Array]:
        """Both matrices of each adapter, keyed by the adapted matrix and the adapter's own name."""
        if self.lora is None:
            return {}
        return {
            f"{name}/{half}": getattr(adapter, half)[...].astype(self.dtype)
            for name, adapter in self.adapters.items()
            for half in ("lora_a", "lora_b")
        }

    @property
    def gathers_narrow(self) -> bool:
        """Whether shards share one rounding, so that weights are gathered in eight bits."""
        return self.quantization is not None and self.quantization.weight_range != "absmax"

    def _shards(self) -> dict[str, PartitionSpec]:
        """How the matrices are stored."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        names = {name: getattr(self, name) for name in ("wi_0", "wi_1", "wo")}
        return {
            name: partition_spec(weight.get_metadata("logical_axes"), weight[...].shape, sizes)
            for name, weight in names.items()
        }

    def _sorted_rows(
        self,
        x: jax.Array,
        routing: Routing,
        weights: dict[str, jax.Array],
        *,
        first: int | jax.Array,
        own: int,
        shards: Mapping[str, PartitionSpec] = MappingProxyType({}),
    ) -> jax.Array:
        """The weighted sum over `own` experts, from number `first` on.

        Args:
            shards: how the matrices in `weights` are split, if they are gathered quantised.
        """
        E, k = own, self.spec.router.per_token
        flat = x.reshape(-1, x.shape[-1])
        expert_of = _by_choice(routing.experts).reshape(-1) - first
        # Rows of other devices' experts are sorted to the end and belong to no group.
        expert_of = jnp.where((expert_of >= 0) & (expert_of < E), expert_of, E)
        weight_of = _by_choice(routing.weights).reshape(-1, 1).astype(x.dtype)
        order = jnp.argsort(expert_of, stable=True)
        reverse = jnp.argsort(order)
        sizes = jnp.zeros(E + 1, jnp.int32).at[expert_of].add(1)[:E]
        rows = moved(k, flat, order, reverse)
        if self.spec.weigh_inputs:
            rows = rows * weight_of[order]
        sorted_experts = expert_of[order]

        def multiply(rows: jax.Array, name: str) -> jax.Array:
            if self.quantization is None:
                product = grouped_dot(rows, weights[name], sizes, on_tpu=self.on_tpu)
            else:
                recipe, fits = self.quantization, has_tiles(rows.shape[0])
                shard = shard_of(shards[name]) if name in shards else None
                product = quantized_ragged_dot(
                    rows, weights[name], sizes, recipe, self.on_tpu and fits, shard
                )
            product = self._adapted(
                product,
                name,
                weights,
                rows,
                lambda x, kernels: grouped_dot(x, kernels, sizes, on_tpu=self.on_tpu),
            )
            if not self.spec.bias:
                return product
            return product + weights[f"{name}_bias"][jnp.minimum(sorted_experts, E - 1)]

        with jax.named_scope("wi_0"):
            gate = _named(multiply(rows, "wi_0"), "mlpwi_0")
        with jax.named_scope("wi_1"):
            up = _named(multiply(rows, "wi_1"), "mlpwi_1")
        with jax.named_scope("wo"):
            out = _summed(multiply(self._activated(gate, up), "wo"))
            out = _named(out, "mlpwo")
        out = jnp.where((sorted_experts < E)[:, None], out, 0)
        back = moved(1, out, reverse, order)
        if not self.spec.weigh_inputs:
            back = back * weight_of
        return sum_of_copies(k, back).reshape(*x.shape[:-1], -1)

    def _with_capacity(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Each expert has slots for its share of a sequence, filled in sequence order."""
        B, S, D = x.shape
        E, k = self.spec.router.experts, self.spec.router.per_token
        capacity = min(math.ceil(self.spec.capacity_factor * S * k / E), S * k)
        expert_of = routing.experts.reshape(B, S * k)
        weights = routing.weights.swapaxes(1, 2).reshape(B, S * k, 1).astype(x.dtype)
        chosen = jax.nn.one_hot(expert_of, E, dtype=jnp.int32)
        place = jnp.take_along_axis(jnp.cumsum(chosen, axis=1), expert_of[..., None], -1)[..., 0]
        is_kept = place <= capacity
        slot = jnp.where(is_kept, expert_of * capacity + place - 1, E * capacity)
        slot = slot.reshape(B, S, k).swapaxes(1, 2).reshape(B, S * k)  # in `moved`'s copy order
        # Which choice of which token has a slot; those without one share a slot past the last.
        free = jnp.full((B, E * capacity + 1), S * k)
        choice = free.at[jnp.arange(B)[:, None], slot].set(jnp.arange(S * k))[:, :-1]
        slots = jax.vmap(functools.partial(moved, k))(x, choice, slot)
        if self.spec.weigh_inputs:
            slots = slots * jax.vmap(functools.partial(moved, 1))(weights, choice, slot)
        slots = constrain(slots.reshape(B, E, capacity, D), BATCH_AXES)
        slots = _at_experts(slots, None)

        adapters = self._of_adapters()

        def multiply(slots: jax.Array, name: str) -> jax.Array:
            product = self._of_each(slots, getattr(self, name)[...].astype(self.dtype))
            product = self._adapted(product, name, adapters, slots, _slot_by_slot)
            return product + self._bias(f"{name}_bias")[:, None] if self.spec.bias else product

        with jax.named_scope("wi_0"):
            gate = _named(_at_experts(multiply(slots, "wi_0"), "tensor"), "mlpwi_0")
        with jax.named_scope("wi_1"):
            up = _named(_at_experts(multiply(slots, "wi_1"), "tensor"), "mlpwi_1")
        with jax.named_scope("wo"):
            out = _at_experts(multiply(self._activated(gate, up), "wo"), WIDTH_AXIS)
            out = _named(out, "mlpwo")
        out = constrain(out, BATCH_AXES, None, None, WIDTH_AXIS).reshape(B, E * capacity, -1)
        back = jax.vmap(functools.partial(moved, 1))(out, slot, choice)
        if not self.spec.weigh_inputs:
            back = back * weights
        y: jax.Array = jax.vmap(functools.partial(sum_of_copies, k))(back)
        return y

    def _of_each(self, slots: jax.Array, kernels: jax.Array) -> jax.Array:
        """[batch, experts, slots, inputs] · [experts, inputs, outputs], expert by expert."""
        if self.quantization is None:
            return _slot_by_slot(slots, kernels)
        recipe = self.quantization
        of_one = jax.vmap(lambda x, kernel: quantized_dot(x, kernel, 1, recipe), (1, 0), 1)
        products: jax.Array = of_one(slots, kernels)
        return products

    def _adapted(
        self,
        product: jax.Array,
        name: str,
        adapters: Mapping[str, jax.Array],
        x: jax.Array,
        multiply: Callable[[jax.Array, jax.Array], jax.Array],
    ) -> jax.Array:
        """`product`, of the experts' matrices `name` with `x`, plus the output of their adapter."""
        if self.lora is None or f"{name}/lora_a" not in adapters:
            return product
        with jax.named_scope("lora_a"):
            low = multiply(x, adapters[f"{name}/lora_a"])
        with jax.named_scope("lora_b"):
            return product + multiply(low, adapters[f"{name}/lora_b"]) * self.lora.scale

    def _bias(self, name: str) -> jax.Array:
        bias: jax.Array = getattr(self, name)[...]
        return bias.astype(self.dtype)

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if not self.spec.clamp:
            return ACTIVATIONS[self.spec.activation](gate) * up
        # GPT-OSS: a swish of slope 1.702, with both factors clipped.
        gate = jnp.minimum(gate, self.spec.clamp)
        up = jnp.clip(up, -self.spec.clamp, self.spec.clamp)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _by_choice(routed: jax.Array) -> jax.Array:
    """[batch, sequence, choices] → [choices, batch · sequence], in `moved`'s order of copies."""
    return routed.reshape(-1, routed.shape[-1]).T


def _at_experts(slots: jax.Array, last: str | None) -> jax.Array:
    """Slots [batch, experts, slots, width] on their experts' devices, in the backward pass, too.

    Left to XLA, gradients arrive with the batch split over `expert`, and it gathers all batches.
    """
    return constrain(slots, ("data", "fsdp"), "expert", SEQUENCE_AXIS, last)


def _slot_by_slot(slots: jax.Array, kernels: jax.Array) -> jax.Array:
    """[batch, experts, slots, inputs] · [experts, inputs, outputs]."""
    if axis_size("expert") > 1:  # XLA in JAX 0.10 partitions the other product wrongly
        return jnp.einsum("becd,edf->becf", slots, kernels)
    # Experts first, as in their matrices: otherwise XLA changes the layout of gathered matrices.
    return jnp.einsum("ebcd,edf->ebcf", slots.swapaxes(0, 1), kernels).swapaxes(0, 1)


def _named(x: jax.Array, name: str) -> jax.Array:
    """Names a tensor for remat, by the MLP's name and the experts' own, as MaxText does."""
    named: jax.Array = checkpoint_name(checkpoint_name(x, name), f"moe_{name}")
    return named


def _summed(rows: jax.Array) -> jax.Array:
    """Rows [rows, width] summed over `tensor`; each device gets a part of the width."""
    if WIDTH_AXIS not in jax.sharding.get_abstract_mesh().axis_names:
        return rows
    if jax.lax.axis_size(WIDTH_AXIS) == 1:
        return rows
    summed: jax.Array = jax.lax.psum_scatter(rows, WIDTH_AXIS, scatter_dimension=1, tiled=True)
    return summed
