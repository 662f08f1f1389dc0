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
from ..projections.quantization import Quantization, quantized_dot, quantized_ragged_dot, shards_of
from ..sharding import BATCH_AXES, SEQUENCE_AXIS, WIDTH_AXIS, constrain, partition_spec
from .mlp import MlpSpec
from .routers import RouterSpec, Routing
from .row_moves import moved, sum_of_copies

_MATRICES = ("wi_0", "wi_1", "wo")
# How `shard_map` receives the experts' weights: split over experts and hidden width, else gathered.
_INS_AND_OUTS = {"wi_0": (None, "tensor"), "wi_1": (None, "tensor"), "wo": ("tensor", None)}
_WEIGHT_SPECS = {
    f"{name}{part}": PartitionSpec("expert", *axes)
    for name, (ins, outs) in _INS_AND_OUTS.items()
    for part, axes in {
        "": (ins, outs),
        "/lora_a": (ins, None),
        "/lora_b": (None, outs),
        "_bias": (outs,),
    }.items()
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
        slots_by_matmul: rows move to and from the slots by matmuls with one-hot matrices, as in
            MaxText's step, instead of gathers.
        whole_routing: with them, each device scatters the weights of all devices' rows.
        whole_gradients: gradients of the matrices of experts with slots are summed over devices
            whole and then cut, instead of scattered, as XLA does in MaxText's fp8 step on GPUs.
        weigh_inputs: weights scale the experts' inputs instead of their outputs (Llama 4).
        shared: an MLP for every token; `shared_gate`: a sigmoid of the token scales its output.
        whole: fsdp splits the set of experts instead of their width, and fsdp_transpose the inputs
            of each.
    """

    router: RouterSpec
    hidden: int
    activation: str = "silu"
    bias: bool = False
    clamp: float = 0.0
    capacity_factor: float = 0.0
    slots_by_matmul: bool = False
    whole_routing: bool = False
    whole_gradients: bool = False
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
        experts, ins, hidden, outs = (
            ("whole_experts", "whole_width", "whole_mlp", "norm")
            if spec.whole
            else ("experts", "embed", "mlp", "embed")
        )
        self.router = spec.router.make(build)
        first = ((E, D, F), (experts, ins, "mlp"))
        made = {"wi_0": first, "wi_1": first, "wo": ((E, F, D), (experts, hidden, outs))}
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
        weights = self._weights()
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

    def _weights(self) -> dict[str, jax.Array]:
        """Matrices, biases, and both matrices of each adapter, by name."""
        biases = [f"{name}_bias" for name in _MATRICES] if self.spec.bias else []
        found = {name: getattr(self, name) for name in (*_MATRICES, *biases)}
        for name, adapter in self.adapters.items() if self.lora else ():
            found |= {f"{name}/lora_a": adapter.lora_a, f"{name}/lora_b": adapter.lora_b}
        return {name: weight[...].astype(self.dtype) for name, weight in found.items()}

    @property
    def gathers_narrow(self) -> bool:
        """Whether shards share one rounding, so that weights are gathered in eight bits."""
        return self.quantization is not None and self.quantization.weight_range != "absmax"

    def _shards(self) -> dict[str, PartitionSpec]:
        """How the matrices are stored."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        names = {name: getattr(self, name) for name in _MATRICES}
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
        rows = moved(k, False, flat, order, reverse)
        if self.spec.weigh_inputs:
            rows = rows * weight_of[order]
        sorted_experts = expert_of[order]

        def plain(rows: jax.Array, kernels: jax.Array) -> jax.Array:
            return grouped_dot(rows, kernels, sizes, on_tpu=self.on_tpu)

        def multiply(rows: jax.Array, name: str) -> jax.Array:
            if self.quantization is None:
                return plain(rows, weights[name])
            recipe, on_tpu = self.quantization, self.on_tpu and has_tiles(rows.shape[0])
            parts = shards_of(shards[name]) if name in shards else ()
            return quantized_ragged_dot(rows, weights[name], sizes, recipe, on_tpu, parts)

        def placed(product: jax.Array, name: str) -> jax.Array:
            if self.spec.bias:
                product += weights[f"{name}_bias"][jnp.minimum(sorted_experts, E - 1)]
            if self.spec.router.experts > E:
                product = jnp.where((sorted_experts < E)[:, None], product, 0)
            return _summed(product) if name == "wo" else product

        out = self._mlp(rows, weights, multiply, plain, placed)
        back = moved(1, False, out, reverse, order)
        if not self.spec.weigh_inputs:
            back = back * weight_of
        return sum_of_copies(k, back).reshape(*x.shape[:-1], -1)

    def _with_capacity(self, x: jax.Array, routing: Routing) -> jax.Array:
        """Each expert has slots for its share of a sequence, filled in sequence order."""
        S, E, k = x.shape[1], self.spec.router.experts, self.spec.router.per_token
        capacity = min(math.ceil(self.spec.capacity_factor * S * k / E), S * k)
        chosen = jax.nn.one_hot(routing.experts, E, dtype=jnp.int32)
        place = jnp.cumsum(chosen.reshape(-1, S * k, E), axis=1).reshape(chosen.shape)
        move = self._by_matmuls if self.spec.slots_by_matmul else self._by_gathers
        return move(x, routing, chosen, place, capacity)

    def _by_gathers(
        self, x: jax.Array, routing: Routing, chosen: jax.Array, place: jax.Array, capacity: int
    ) -> jax.Array:
        """Experts of a capacity, whose slots are gathered.

        Args:
            chosen: 1 where a choice is the expert, else 0: [batch, sequence, choices, experts].
            place: how many choices the expert has by then, of the same shape.
            capacity: slots of an expert for a sequence.
        """
        B, S, D = x.shape
        E, k = self.spec.router.experts, self.spec.router.per_token
        expert_of = routing.experts.reshape(B, S * k)
        shares = routing.weights.swapaxes(1, 2).reshape(B, S * k, 1).astype(x.dtype)
        of_choice = jnp.take_along_axis(place.reshape(B, S * k, E), expert_of[..., None], -1)[
            ..., 0
        ]
        is_kept = of_choice <= capacity
        slot = jnp.where(is_kept, expert_of * capacity + of_choice - 1, E * capacity)
        slot = slot.reshape(B, S, k).swapaxes(1, 2).reshape(B, S * k)  # in `moved`'s copy order
        # Which choice of which token has a slot; those without one share a slot past the last.
        free = jnp.full((B, E * capacity + 1), S * k)
        choice = free.at[jnp.arange(B)[:, None], slot].set(jnp.arange(S * k))[:, :-1]
        slots = jax.vmap(functools.partial(moved, k, True))(x, choice, slot)
        if self.spec.weigh_inputs:
            slots = slots * jax.vmap(functools.partial(moved, 1, True))(shares, choice, slot)
        slots = constrain(slots.reshape(B, E, capacity, D), BATCH_AXES)
        out = self._of_slots(slots.swapaxes(0, 1)).swapaxes(0, 1)
        out = constrain(out, BATCH_AXES, None, None, WIDTH_AXIS).reshape(B, E * capacity, -1)
        back = jax.vmap(functools.partial(moved, 1, True))(out, slot, choice)
        if not self.spec.weigh_inputs:
            back = back * shares
        y: jax.Array = jax.vmap(functools.partial(sum_of_copies, k))(back)
        return y

    def _by_matmuls(
        self, x: jax.Array, routing: Routing, chosen: jax.Array, place: jax.Array, capacity: int
    ) -> jax.Array:
        """The same by matmuls with masks, in the operations of MaxText's `dense_matmul`.

        They decide what the compiler keeps at once: masks, and slots in several orders.
        """
        B, S, _ = x.shape
        kept = chosen * (place <= capacity)
        slot = jax.nn.one_hot((kept * place).sum(2), capacity + 1, dtype=x.dtype)
        row = jnp.arange(B)[:, None, None]
        if self.spec.whole_routing:
            row = constrain(row, BATCH_AXES)  # hides from XLA that each device has rows of its own
        of_expert = jnp.zeros((B, S, self.spec.router.experts), x.dtype)
        place_of = (row, jnp.arange(S)[:, None], routing.experts)
        of_expert = of_expert.at[place_of].set(routing.weights.astype(x.dtype))
        share = ((of_expert * kept.sum(2))[..., None] * slot)[..., 1:]
        slot, share = (
            constrain(mask, BATCH_AXES) for mask in ((share != 0).astype(x.dtype), share)
        )
        there, back = (share, slot) if self.spec.weigh_inputs else (slot, share)
        with jax.named_scope("dispatch"):
            slots = _to_slots(x, there, self.quantization)
        out = self._of_slots(slots)
        with jax.named_scope("combine"):
            return _from_slots(out, back, self.quantization)

    def _of_slots(self, slots: jax.Array) -> jax.Array:
        """The experts' outputs for their slots: [experts, batch, slots, width] → the same."""
        slots = _at_experts(slots, None)
        weights = self._weights()
        if self.spec.whole_gradients and not jax.sharding.get_abstract_mesh().empty:
            weights |= {name: _summed_whole(weights[name], name) for name in _MATRICES}

        def placed(product: jax.Array, name: str) -> jax.Array:
            if self.spec.bias:
                product += weights[f"{name}_bias"][:, None, None]
            return _at_experts(product, WIDTH_AXIS if name == "wo" else "tensor")

        of_each = functools.partial(self._of_each, weights)
        return self._mlp(slots, weights, of_each, _slot_by_slot, placed)

    def _of_each(self, weights: Mapping[str, jax.Array], x: jax.Array, name: str) -> jax.Array:
        """Slots [experts, batch, slots, inputs] with the matrices of a name, expert by expert."""
        if self.quantization is None:
            return _slot_by_slot(x, weights[name])
        recipe = self.quantization
        of_one = jax.vmap(lambda x, kernel: quantized_dot(x, kernel, 1, recipe))
        products: jax.Array = of_one(x, weights[name])
        return products

    def _mlp(
        self,
        x: jax.Array,
        weights: Mapping[str, jax.Array],
        multiply: Callable[[jax.Array, str], jax.Array],
        plain: Callable[[jax.Array, jax.Array], jax.Array],
        placed: Callable[[jax.Array, str], jax.Array],
    ) -> jax.Array:
        """All experts' outputs, in the order of their inputs `x`: by rows or by slots.

        Args:
            multiply: `x` with the matrices of a name.
            plain: with the matrices of an adapter, which are not quantised.
            placed: adds the bias, and puts the product where it belongs.
        """

        def named(name: str, inputs: Callable[[], jax.Array]) -> jax.Array:
            with jax.named_scope(name):
                x = inputs()
                product = multiply(x, name)
                if self.lora and f"{name}/lora_a" in weights:
                    with jax.named_scope("lora_a"):
                        low = plain(x, weights[f"{name}/lora_a"])
                    with jax.named_scope("lora_b"):
                        product += plain(low, weights[f"{name}/lora_b"]) * self.lora.scale
                # For remat: the MLP's name, then the experts' own, as MaxText does.
                saved = checkpoint_name(placed(product, name), f"mlp{name}")
                out: jax.Array = checkpoint_name(saved, f"moe_mlp{name}")
                return out

        gate, up = (named(name, lambda: x) for name in ("wi_0", "wi_1"))
        return named("wo", lambda: self._activated(gate, up))

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
    """Slots [experts, batch, slots, width] on their experts' devices, in the backward pass, too.

    Left to XLA, gradients arrive with the batch split over `expert`, and it gathers all batches.
    """
    return constrain(slots, "expert", ("data", "fsdp", "fsdp_transpose"), SEQUENCE_AXIS, last)


def _to_slots(x: jax.Array, mask: jax.Array, recipe: Quantization | None) -> jax.Array:
    """[batch, sequence, width] by [batch, sequence, experts, slots], each expert's slots first."""
    if recipe is None:
        return jnp.einsum("bsd,bsec->ebcd", x, mask)
    of_one = jax.vmap(lambda x, mask: quantized_dot(x.T, mask, 1, recipe))
    slots: jax.Array = of_one(x, mask)
    return slots.transpose(2, 0, 3, 1)


def _from_slots(slots: jax.Array, mask: jax.Array, recipe: Quantization | None) -> jax.Array:
    """[experts, batch, slots, width] by [batch, sequence, experts, slots], back in sequences."""
    if recipe is None:
        return jnp.einsum("ebcd,bsec->bsd", slots, mask)
    of_one = jax.vmap(lambda slots, mask: quantized_dot(slots, mask, 2, recipe).T)
    y: jax.Array = of_one(slots.transpose(1, 3, 0, 2), mask.transpose(0, 2, 3, 1))
    return y


# [experts, batch, slots, inputs] · [experts, inputs, outputs].
_slot_by_slot = functools.partial(jnp.einsum, "ebcd,edf->ebcf")


def _summed(rows: jax.Array) -> jax.Array:
    """Rows [rows, width] summed over `tensor`; each device gets a part of the width."""
    if WIDTH_AXIS not in jax.sharding.get_abstract_mesh().axis_names:
        return rows
    if jax.lax.axis_size(WIDTH_AXIS) == 1:
        return rows
    summed: jax.Array = jax.lax.psum_scatter(rows, WIDTH_AXIS, scatter_dimension=1, tiled=True)
    return summed


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed_whole(weight: jax.Array, name: str) -> jax.Array:
    """The weight of a name; its gradient is an all-reduce that XLA cannot make a reduce-scatter."""
    return weight


def _summed_whole_backward(name: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    whole = jax.lax.with_sharding_constraint(gradient, _WEIGHT_SPECS[name])
    return (jax.lax.optimization_barrier(whole),)


_summed_whole.defvjp(lambda weight, name: (weight, None), _summed_whole_backward)
