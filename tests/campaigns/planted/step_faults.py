"""Faults in the step's program that accelerators feel, planted in the reference trainer's step.

Each is a pair of steps: keys of the trainer's config, and changes to its functions during tracing.
The programs are small, because compiling takes a minute: one layer, and sequences so
short that attention needs no kernel. Not scanned: a scan would copy what layers keep.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from mfu_jax.layers.feed_forward.mlp import Mlp
from mfu_jax.layers.projections import linears

Plant = Callable[[], contextlib.AbstractContextManager[object]]

_KEYS = (
    *("dtype=bfloat16", "attention=dot_product", "remat_policy=none", "scan_layers=false"),
    *("num_decoder_layers=1", "emb_dim=1024", "mlp_dim=4096", "vocab_size=2048"),
    *("num_query_heads=8", "num_kv_heads=8", "head_dim=128"),
    *("max_target_length=128", "per_device_batch_size=64"),
)
_LONG = ("max_target_length=2048", "per_device_batch_size=4")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One step of a pair.

    Attributes:
        keys: of the trainer's config, after those of every step.
        plant: entered while the step is traced.
    """

    keys: tuple[str, ...] = ()
    plant: Plant = contextlib.nullcontext

    @property
    def words(self) -> list[str]:
        """All keys, each once: later ones win."""
        found = dict(word.split("=", 1) for word in (*_KEYS, *self.keys))
        return [f"{key}={value}" for key, value in found.items()]


@dataclass(frozen=True, kw_only=True)
class FaultPair:
    """A fault.

    Attributes:
        cause: of the advice expected first; empty: no advice at all.
        faulty: the step with it.
        healthy: the step without.
        share: of a healthy step that does the same work as a step with the fault.
    """

    cause: str
    faulty: Side
    healthy: Side = Side()
    share: float = 1.0


def _in_float32(precision: str) -> Plant:
    """The MLPs, and nothing else, compute in float32: a GPU in TF32 by default."""

    def plant() -> Any:
        make, call = Mlp.__init__, Mlp.__call__

        def init(self: Any, spec: Any, build: Any) -> None:
            make(self, spec, dataclasses.replace(build, dtype=jnp.dtype("float32")))

        def wide(self: Any, x: jax.Array, inputs: Any = None) -> jax.Array:
            with jax.default_matmul_precision(precision):
                return call(self, x.astype(jnp.float32), inputs).astype(x.dtype)

        return mock.patch.multiple(Mlp, __init__=init, __call__=wide)

    return plant


_EXACT, _TF32 = _in_float32("highest"), _in_float32("default")


def _with_barriers() -> Any:
    """Silu op by op: XLA does not fuse across a barrier."""
    barrier = jax.lax.optimization_barrier

    def silu(x: jax.Array) -> jax.Array:
        exponential = barrier(jnp.exp(barrier(-x)))
        return x * barrier(1 / barrier(1 + exponential))

    return mock.patch.dict(linears.ACTIVATIONS, {"silu": silu})


FAULTS: Mapping[str, FaultPair] = {
    "none": FaultPair(cause="", faulty=Side()),
    "float32": FaultPair(cause="float32 matmuls", faulty=Side(plant=_EXACT)),
    "vocabulary": FaultPair(
        cause="padding of odd shapes",
        faulty=Side(keys=("vocab_size=50257",)),
        healthy=Side(keys=("vocab_size=50304",)),
    ),
    "chain": FaultPair(
        cause="unfused elementwise chain",
        faulty=Side(plant=_with_barriers),
    ),
    "remat": FaultPair(
        cause="remat heavier than memory needs", faulty=Side(keys=("remat_policy=full",))
    ),
    "attention": FaultPair(
        cause="attention without a kernel",
        faulty=Side(keys=_LONG),
        healthy=Side(keys=(*_LONG, "attention=splash")),
    ),
    "batch": FaultPair(
        cause="small batch",
        faulty=Side(keys=("per_device_batch_size=8",)),
        share=1 / 8,
    ),
}

# A GPU's steps are larger, as launching a small kernel takes longer than running it, and scanned:
# the gradient of the embedding, fused with an unrolled layer's, takes a third of such a step.
_GPU_KEYS = ("scan_layers=true", "num_decoder_layers=4", "emb_dim=2048", "mlp_dim=8192")
_GPU = (*_GPU_KEYS, "num_query_heads=16", "num_kv_heads=16", "vocab_size=32768")
_GPU_LONG = (*_GPU, *_LONG)
_GPT2 = (*_GPU, "num_decoder_layers=2", "emb_dim=1024", "mlp_dim=4096")

ON_GPU: Mapping[str, FaultPair] = {
    "none": FaultPair(cause="", faulty=Side(keys=_GPU), healthy=Side(keys=_GPU)),
    "none long": FaultPair(
        cause="",
        faulty=Side(keys=(*_GPU_LONG, "attention=cudnn_flash")),
        healthy=Side(keys=(*_GPU_LONG, "attention=cudnn_flash")),
    ),
    "float32": FaultPair(
        cause="float32 matmuls",
        faulty=Side(keys=_GPU, plant=_EXACT),
        healthy=Side(keys=_GPU),
    ),
    "promoted": FaultPair(
        cause="float32 matmuls",
        faulty=Side(keys=_GPU, plant=_TF32),
        healthy=Side(keys=_GPU),
    ),
    "vocabulary": FaultPair(
        cause="padding of odd shapes",
        faulty=Side(keys=(*_GPT2, "vocab_size=50257")),
        healthy=Side(keys=(*_GPT2, "vocab_size=50304")),
    ),
    "chain": FaultPair(
        cause="unfused elementwise chain",
        faulty=Side(keys=_GPU, plant=_with_barriers),
        healthy=Side(keys=_GPU),
    ),
    "remat": FaultPair(
        cause="remat heavier than memory needs",
        faulty=Side(keys=(*_GPU, "remat_policy=full")),
        healthy=Side(keys=_GPU),
    ),
    "attention": FaultPair(
        cause="attention without a kernel",
        faulty=Side(keys=_GPU_LONG),
        healthy=Side(keys=(*_GPU_LONG, "attention=cudnn_flash")),
    ),
    "batch": FaultPair(
        cause="small batch",
        faulty=Side(keys=(*_GPU, "per_device_batch_size=8")),
        healthy=Side(keys=_GPU),
        share=1 / 8,
    ),
}
