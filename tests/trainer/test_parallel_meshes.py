"""The step over eight devices: the losses of one, and its FLOPs but for named lines."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.trainer import mesh, pyconfig, state, step
from mfu_jax.trainer.run_logger import count_step
from tests.support.floats import assert_close_as_float32

ROWS, LENGTH, LAYERS, STEPS = 16, 32, 4, 10
WIDTH, HIDDEN, EXPERTS, PER_TOKEN = 64, 64, 4, 2
TOKENS = ROWS * LENGTH
SIZES = {
    "num_decoder_layers": LAYERS,
    "emb_dim": WIDTH,
    "mlp_dim": HIDDEN,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_target_length": LENGTH,
    "attention": "dot_product",
    "learning_rate": 1e-3,
}
DENSE: dict[str, Any] = {}
MOE = {
    "decoder_block": "mixtral",
    "num_experts": EXPERTS,
    "num_experts_per_tok": PER_TOKEN,
    "moe_mlp_dim": HIDDEN,
    "capacity_factor": 2.0,
    "load_balance_loss_weight": 0.0,
}
# Without LLVM's optimisations: half the time to compile.
FAST = {"xla_backend_optimization_level": 0}


def config(**keys: object) -> pyconfig.Config:
    return pyconfig.from_mapping({}, overrides={**SIZES, **keys})


def batch() -> dict[str, np.ndarray]:
    """Two documents in each row."""
    tokens = np.random.default_rng(0).integers(1, 256, (1, ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((1, ROWS, LENGTH), np.int32)
    place = np.arange(LENGTH, dtype=np.int32)
    return {
        "inputs": tokens[..., :-1],
        "targets": tokens[..., 1:],
        "inputs_position": place % 20 * ones,
        "inputs_segmentation": (1 + place // 20) * ones,
        "targets_weight": ones,
    }


def trained(c: pyconfig.Config, devices: int) -> tuple[list[float], StepFlops]:
    """The losses, and the counts of the program that gave them."""
    grid = mesh.make_mesh(c, jax.devices()[:devices])
    lowered = step.lower_train_step(c, grid, state.abstract_state(c, grid))
    compiled = lowered.compile(compiler_options=FAST)
    train_state = state.create_state(c, grid)
    losses = []
    for _ in range(STEPS):
        train_state, metrics = compiled(train_state, mesh.put_batch(batch(), grid))
        losses.append(float(metrics["loss"]))
    return losses, count_step(c, compiled)


@functools.cache
def one_device(kind: str) -> tuple[list[float], int]:
    losses, flops = trained(config(per_device_batch_size=ROWS, **KINDS[kind]), 1)
    return losses, flops.executed.total


KINDS = {"dense": DENSE, "experts": MOE}

# Forward and backward FLOPs: three products of 2·rows·contracted·columns.
LAYER = 3 * (
    2 * TOKENS * WIDTH * (64 + 2 * 32 + 64)  # queries, keys and values, output
    + 2 * 2 * ROWS * LENGTH * LENGTH * 64  # scores and values
    + 3 * 2 * TOKENS * WIDTH * HIDDEN
)


def bubble(stages: int, microbatches: int) -> int:
    """What stages do on zeros, on all devices: each passes - 1 layers' share too often."""
    return LAYER * LAYERS * (stages - 1) // microbatches


@pytest.mark.parametrize(
    ("kind", "axes", "more"),
    [
        ("dense", {"context_parallelism": 8}, 0),
        ("dense", {"fsdp": 2, "context_parallelism": 2, "tensor": 2}, 0),
        (
            "dense",
            {"pipeline": 2, "num_pipeline_microbatches": 4, "fsdp": 2, "tensor": 2},
            bubble(2, 4 * 2),
        ),
    ],
)
def test_a_mesh_trains_as_one_device(kind: str, axes: dict[str, int], more: int) -> None:
    losses, flops = trained(config(per_device_batch_size=ROWS / 8, **axes, **KINDS[kind]), 8)
    expected, of_one = one_device(kind)
    assert_close_as_float32(losses, expected, terms=STEPS * TOKENS)
    assert flops.executed.total * 8 == of_one + more
    named = {line.label: line.flops * 8 for line in flops.ledger.lines}
    assert named.get("pipeline bubble", 0) == more
    assert flops.ledger.residual == 0
