"""Rematerialisation policies, in MaxText's names: which tensors of a layer are kept, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..attention.ops import CONTEXT, CUDNN_CONTEXT

# The tensors that layers name, under MaxText's names where it has them.
_ATTENTION = ("query_proj", "key_proj", "value_proj", "qkv_proj")
_LATENT = ("query_wa_proj", "kv_wa_proj")
_MLP_IN = ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
_MLP_OUT = ("mlpwo", "moe_mlpwo")
_PROJECTIONS = (*_ATTENTION, *_LATENT, "out_proj")
TENSORS = ("decoder_layer_input", CONTEXT, *_PROJECTIONS, *_MLP_IN, *_MLP_OUT)

# Policy → the tensors kept on the device; all others are recomputed.
_SAVED = {
    "full": (),
    "minimal": (*_PROJECTIONS, *_MLP_IN, *_MLP_OUT),
    "minimal_with_context": (*_PROJECTIONS, *_MLP_IN, *_MLP_OUT, CONTEXT),
    "minimal_flash": (*_PROJECTIONS, *_MLP_IN, *_MLP_OUT, CONTEXT),
    "save_dot_with_context_except_mlp": (*_PROJECTIONS, CONTEXT),
    "save_dot_except_mlpwi": (*_PROJECTIONS, *_MLP_OUT),
    "save_dot_except_mlp": _PROJECTIONS,
    "save_qkv_proj": (*_ATTENTION, *_LATENT),
    "save_out_proj": ("out_proj",),
}
# Policy → the tensors offloaded to the host's memory.
_OFFLOADED = {
    "qkv_proj_offloaded": (*_ATTENTION, *_LATENT),
    "minimal_offloaded": (*_PROJECTIONS, *_MLP_IN, *_MLP_OUT),
}
POLICIES = ("auto", "none", *_SAVED, *_OFFLOADED, "names", "custom")


def remat(config: Any) -> Callable[..., Callable[..., Any]]:
    """Wraps a layer's function in `jax.checkpoint` according to `config.remat_policy`."""
    if config.remat_policy == "none":
        return lambda layer, **options: layer
    policy = _kept(*_places(config))
    return lambda layer, **options: jax.checkpoint(layer, policy=policy, **options)


def computes_again(config: Any, tensor: str) -> bool:
    """Whether the backward pass recomputes a tensor of `TENSORS`."""
    if config.remat_policy == "none":
        return False
    saved, offloaded = _places(config)
    return tensor not in (*saved, *offloaded)


def _places(config: Any) -> tuple[Sequence[str], Sequence[str]]:
    """The tensors kept on the device, and those offloaded to the host."""
    name = config.remat_policy
    if name in _OFFLOADED:
        return (), _OFFLOADED[name]
    if name == "custom":
        placed = {tensor: getattr(config, tensor) for tensor in TENSORS}
        saved = [tensor for tensor, place in placed.items() if place == "device"]
        return saved, [tensor for tensor, place in placed.items() if place == "offload"]
    return config.remat_save_names if name == "names" else _SAVED[name], ()


def _kept(saved: Sequence[str], offloaded: Sequence[str]) -> Callable[..., Any]:
    """The policy.

    cuDNN's backward kernel also reads sums without a name: a saved context alone would not save its
    forward kernel from running again. Other blocks of such a model have contexts by name, too.
    """
    if not offloaded:
        names: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(*saved)
        if CONTEXT in saved:
            names = jax.checkpoint_policies.save_from_both_policies(names, _of_cudnn)
        return names
    on_device, to_host = (
        [*names, *[CUDNN_CONTEXT] * (CONTEXT in names)] for names in (saved, offloaded)
    )
    both: Callable[..., Any] = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=on_device,
        names_which_can_be_offloaded=to_host,
        offload_src="device",
        offload_dst="pinned_host",
    )
    return both


def _of_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether an operation is cuDNN's forward attention, which gives both."""
    return str(primitive) == "dot_product_attention_fwd_wrapper"
