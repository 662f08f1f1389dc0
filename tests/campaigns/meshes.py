"""The step over eight virtual devices against the step of one: every axis alone, and combinations.

    python -m tests.campaigns.meshes [--topology=v5e:2x4] [REGEX]

trains dense layers and experts ten steps on each mesh, and prints the largest difference of a
loss, what the eight devices execute beyond the one, and the ledger's residual. CI runs `SAMPLE`.
With `--topology` (which needs libtpu), larger layers are compiled for eight TPUs instead, and the
lines of their ledgers printed.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import argparse
import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mfu_jax.flops.lengths import Lengths
from mfu_jax.instrumentation.counts import StepFlops, count_program
from mfu_jax.planning.compilation.absent_devices import absent_devices
from mfu_jax.trainer.config import pyconfig
from mfu_jax.trainer.run.run_logger import count_step, model_of
from mfu_jax.trainer.step import mesh, state
from mfu_jax.trainer.step import train_step as step

ROWS, LENGTH, LAYERS = 16, 32, 4
STEPS, STEPS_OF_A_TEST = 10, 3
WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 64, 16, 8, 8, 64
EXPERTS, PER_TOKEN = 8, 2
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
    "fsdp-transposed": {"fsdp": 4, "fsdp_transpose": 2},
    "context": {"context_parallelism": 8},
    "ring": {"context_parallelism": 8, "attention": "ring"},
    "tensor": {"tensor": 8},
    "expert": {"expert": 8},
    "data-tensor": {"data": 4, "tensor": 2},
    "data-expert": {"data": 2, "expert": 4},
    "pipeline": {"pipeline": 4, "num_pipeline_microbatches": 8, "data": 2},
    "fsdp-context-tensor": {"fsdp": 2, "context_parallelism": 2, "tensor": 2},
    "pipeline-fsdp-tensor": {**_PIPELINE, "fsdp": 2, "tensor": 2},
    "data-fsdp-expert": {"data": 2, "fsdp": 2, "expert": 2},
    "pipeline-context-expert": {**_PIPELINE, "context_parallelism": 2, "expert": 2},
}
# Of attention kernels and grouped matmuls: whole tiles.
ON_TPUS = {
    "emb_dim": 1024,
    "mlp_dim": 1024,
    "moe_mlp_dim": 1024,
    "num_query_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_target_length": 1024,
    "attention": "auto",
    "dtype": "bfloat16",
}
SAMPLE = (
    ("dense", "tensor"),
    ("experts", "expert"),
    ("experts", "pipeline-context-expert"),
)
# Compiles in half the time.
FAST = {"xla_backend_optimization_level": 0}


def fits(kind: str, axes: str) -> bool:
    """Whether there is something to split."""
    return kind == "experts" or "expert" not in axes


def config(**keys: object) -> pyconfig.Config:
    """A run of these sizes, unless `keys` say others."""
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


def trained(
    keys: Mapping[str, Any], devices: int, steps: int = STEPS_OF_A_TEST
) -> tuple[list[float], StepFlops]:
    """The losses of some steps, and the counts of the program that gave them."""
    c = config(per_device_batch_size=ROWS / devices, **keys)
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    lowered = step.lower_train_step(c, grid, state.abstract_state(c, grid))
    compiled = lowered.compile(compiler_options=FAST)
    train_state = state.create_state(c, grid)
    losses = []
    for _ in range(steps):
        train_state, metrics = compiled(train_state, mesh.put_batch(batch(), grid))
        losses.append(float(metrics["loss"]))
    return losses, count_step(c, compiled)


@functools.cache
def one_device(kind: str, steps: int = STEPS_OF_A_TEST) -> tuple[list[float], StepFlops]:
    """`trained` on a single device."""
    return trained(KINDS[kind], 1, steps)


def extra(kind: str, axes: str) -> dict[str, int]:
    """FLOPs that a mesh of eight executes beyond one device, all devices together, by hand.

    Training is three products of 2 · rows · contracted · columns for each matmul.
    """
    keys = MESHES[axes]
    stages = keys.get("pipeline", 1)
    model = keys.get("num_pipeline_microbatches", 1) * LAYERS // stages  # turns without a bubble
    projections = 2 * TOKENS * WIDTH * HEAD_DIM * 2 * (HEADS + KV_HEADS)
    attention = 2 * 2 * TOKENS * LENGTH * HEADS * HEAD_DIM
    passed = EXPERTS if kind == "experts" else 1  # CPUs compute all experts for every row
    rows = TOKENS * (PER_TOKEN if kind == "experts" else 1)
    feed_forward = 3 * 2 * rows * WIDTH * HIDDEN * passed
    router = 2 * TOKENS * WIDTH * EXPERTS if kind == "experts" else 0
    layers = 3 * LAYERS * (projections + attention + feed_forward + router)
    bubble = layers * (stages - 1) // model
    # The ring's gradient computes the scores of every part again.
    again = LAYERS * attention // 2 if axes == "ring" else 0
    return {"pipeline bubble": bubble, "rematerialised": again}


def on_tpus(kind: str, axes: str, devices: list[Any]) -> StepFlops:
    """The counts of a step compiled for eight TPUs, experts chosen equally often."""
    keys = {**KINDS[kind], **ON_TPUS, **MESHES[axes]}
    c = mesh.with_mesh_sizes(config(per_device_batch_size=ROWS / len(devices), **keys), devices)
    grid = mesh.make_mesh(c, devices)
    c = state.resolve_attention(c, grid)
    compiled = step.lower_train_step(c, grid, state.abstract_state(c, grid)).compile()
    model, lengths = model_of(c), Lengths.of((), ())
    if kind == "experts":
        shape = dict(grid.shape)
        alike = shape["tensor"] * shape["pipeline"]  # devices that have the same rows
        at_once = c.num_pipeline_microbatches if shape["pipeline"] > 1 else 1
        rows = ROWS * c.max_target_length * PER_TOKEN * alike // len(devices) // at_once
        local = EXPERTS // shape["expert"]
        lengths = Lengths.of([rows * shape["expert"] // EXPERTS] * local, ())
        named = {k: n for k, n in model.overheads.items() if "other devices" not in k}
        model = dataclasses.replace(model, overheads=named)
    return count_program(compiled, model, lengths=lengths)


def main() -> int:
    """Runs all cases whose name matches; 1 if FLOPs are not what is counted by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="")
    parser.add_argument("pattern", nargs="?", default="")
    arguments = parser.parse_args()
    devices: list[Any] = []
    if arguments.topology:
        request = {
            "platform": "tpu",
            "topology": arguments.topology,
            "slices": 1,
            "target_config": "",
        }
        devices = absent_devices(request)
    wrong = 0
    for kind in KINDS:
        for axes in MESHES:
            if fits(kind, axes) and re.search(arguments.pattern, f"{kind} {axes}"):
                if devices:
                    _show_lines(kind, axes, devices)
                else:
                    wrong += not _shown(kind, axes)
    return 1 if wrong else 0


def _show_lines(kind: str, axes: str, devices: list[Any]) -> None:
    ledger = on_tpus(kind, axes, devices).ledger
    lines = ", ".join(f"{line.label} {line.flops:,}" for line in ledger.lines if line.flops)
    print(f"{kind:8} {axes:24} {lines}, residual {ledger.residual:,}; {ledger.notes}", flush=True)


def _shown(kind: str, axes: str) -> bool:
    expected, one = one_device(kind, STEPS)
    losses, flops = trained({**KINDS[kind], **MESHES[axes]}, 8, STEPS)
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    beyond = flops.executed.total * 8 - one.executed.total
    by_hand = sum(extra(kind, axes).values())
    print(
        f"{kind:8} {axes:24} losses off by {off:.1e}, executed beyond one device {beyond:,} "
        f"(by hand {by_hand:,}), residual {flops.ledger.residual:,}",
        flush=True,
    )
    return beyond == by_hand and not flops.ledger.residual


if __name__ == "__main__":
    raise SystemExit(main())
