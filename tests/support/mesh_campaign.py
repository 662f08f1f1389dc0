"""The step over eight virtual devices against the step of one: every axis alone, and combinations.

    python -m tests.support.mesh_campaign [REGEX]

trains dense layers and experts ten steps on each mesh, and prints the largest difference of a
loss, what the eight devices execute beyond the one, and the ledger's residual. CI runs `SAMPLE`.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.trainer import mesh, pyconfig, state, step
from mfu_jax.trainer.run_logger import count_step

ROWS, LENGTH, LAYERS, STEPS = 16, 32, 4, 10
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 64, 4, 2, 16, 64
EXPERTS, PER_TOKEN = 4, 2
TOKENS = ROWS * LENGTH
SIZES = {
    "num_decoder_layers": LAYERS,
    "emb_dim": WIDTH,
    "mlp_dim": HIDDEN,
    "num_query_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_target_length": LENGTH,
    "attention": "dot_product",
    "learning_rate": 1e-3,
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "decoder_block": "mixtral",
        "num_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
        "moe_mlp_dim": HIDDEN,
        # A loss of each microbatch, not of the batch: compared without it.
        "load_balance_loss_weight": 0.0,
    },
}
_PIPELINE = {"pipeline": 2, "num_pipeline_microbatches": 4}
MESHES: dict[str, dict[str, Any]] = {
    "data": {"data": 8},
    "fsdp": {"fsdp": 8},
    "context": {"context_parallelism": 8},
    "ring": {"context_parallelism": 8, "attention": "ring"},
    "tensor": {"tensor": 2, "data": 4},
    "expert": {"expert": 4, "data": 2},
    "pipeline": {"pipeline": 4, "num_pipeline_microbatches": 8, "data": 2},
    "fsdp-context-tensor": {"fsdp": 2, "context_parallelism": 2, "tensor": 2},
    "pipeline-fsdp-tensor": {**_PIPELINE, "fsdp": 2, "tensor": 2},
    "data-fsdp-expert": {"data": 2, "fsdp": 2, "expert": 2},
    "pipeline-context-expert": {**_PIPELINE, "context_parallelism": 2, "expert": 2},
}
SAMPLE = (("experts", "pipeline-context-expert"),)
# Compiles in half the time.
_FAST = {"xla_backend_optimization_level": 0}


def fits(kind: str, axes: str) -> bool:
    """Whether there is something to split."""
    return kind == "experts" or "expert" not in axes


def config(**keys: object) -> pyconfig.Config:
    """A run of these sizes."""
    return pyconfig.from_mapping({}, overrides={**SIZES, **keys})


def batch() -> dict[str, np.ndarray]:
    """Two documents in each row, whose border lies in the middle of a device's part."""
    tokens = np.random.default_rng(0).integers(1, 256, (1, ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((1, ROWS, LENGTH), np.int32)
    place = np.arange(LENGTH, dtype=np.int32)
    return {
        "inputs": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "inputs_position": place % 18 * ones,
        "inputs_segmentation": (1 + place // 18) * ones,
        "targets_weight": ones,
    }


def trained(keys: Mapping[str, Any], devices: int) -> tuple[list[float], StepFlops]:
    """The losses of `STEPS` steps, and the counts of the program that gave them."""
    c = config(per_device_batch_size=ROWS / devices, **keys)
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    lowered = step.lower_train_step(c, grid, state.abstract_state(c, grid))
    compiled = lowered.compile(compiler_options=_FAST)
    train_state = state.create_state(c, grid)
    losses = []
    for _ in range(STEPS):
        train_state, metrics = compiled(train_state, mesh.put_batch(batch(), grid))
        losses.append(float(metrics["loss"]))
    return losses, count_step(c, compiled)


@functools.cache
def one_device(kind: str) -> tuple[list[float], StepFlops]:
    """`trained` on a single device."""
    return trained(KINDS[kind], 1)


def extra(kind: str, axes: str) -> dict[str, int]:
    """FLOPs that a mesh of eight executes beyond one device, all devices together, by hand.

    Training is three products of 2 · rows · contracted · columns for each matmul.
    """
    keys = MESHES[axes]
    stages, tensor = keys.get("pipeline", 1), keys.get("tensor", 1)
    model = keys.get("num_pipeline_microbatches", 1) * LAYERS // stages  # turns without a bubble
    turns = model + stages - 1
    projections = 2 * TOKENS * WIDTH * HEAD_DIM * 2 * (HEADS + KV_HEADS)
    attention = 2 * 2 * TOKENS * LENGTH * HEADS * HEAD_DIM
    passed = EXPERTS if kind == "experts" else 1  # CPUs compute all experts for every row
    rows = TOKENS * (PER_TOKEN if kind == "experts" else 1)
    feed_forward = 3 * 2 * rows * WIDTH * HIDDEN * passed
    router = 2 * TOKENS * WIDTH * EXPERTS if kind == "experts" else 0
    layers = 3 * LAYERS * (projections + attention + feed_forward + router)
    bubble = layers * (stages - 1) // model
    # A router is not split over `tensor`: all devices along it compute the same.
    repeated = 3 * LAYERS * router * (tensor - 1) * turns // model
    # The ring's gradient computes the scores of every part again.
    again = LAYERS * attention // 2 if axes == "ring" else 0
    return {"pipeline bubble": bubble, "repeated": repeated, "rematerialised": again}


def main(pattern: str) -> None:
    """Runs all cases whose name matches."""
    for kind in KINDS:
        for axes in MESHES:
            if fits(kind, axes) and re.search(pattern, f"{kind} {axes}"):
                _show(kind, axes)


def _show(kind: str, axes: str) -> None:
    expected, one = one_device(kind)
    losses, flops = trained({**KINDS[kind], **MESHES[axes]}, 8)
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    beyond = flops.executed.total * 8 - one.executed.total
    by_hand = sum(extra(kind, axes).values())
    print(
        f"{kind:8} {axes:24} losses off by {off:.1e}, executed beyond one device {beyond:,} "
        f"(by hand {by_hand:,}), residual {flops.ledger.residual:,}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
