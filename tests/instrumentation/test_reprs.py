"""What a notebook or a debugger shows of a step, its counts and a chip."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

import mfu_jax
from mfu_jax.hardware.chips import named


def test_a_step_says_what_it_does_and_where_its_records_go(tmp_path: Path) -> None:
    @jax.jit
    def train_step(x: jax.Array) -> jax.Array:
        return (x @ x).sum()

    step = mfu_jax.instrument(train_step, run_dir=str(tmp_path), peak_tflops_per_device=1.0)
    assert repr(step) == f"<train_step, instrumented: not called yet, in {tmp_path}>"
    step(jnp.ones((4, 4)))
    assert repr(step) == f"<train_step, instrumented: logging, in {tmp_path}>"
    assert repr(step.flops).startswith("StepFlops(model=128, executed=128, ")
    step.close()
    assert "instrumented: closed" in repr(step)
    off = mfu_jax.instrument(train_step, enable_mfu=False)
    assert repr(off) == "<train_step, DisabledStep>"


def test_counts_and_chips_are_short_enough_to_read() -> None:
    count = mfu_jax.count_model_flops(jax.grad(lambda x: (x @ x).sum()), jnp.ones((64, 64)))
    assert repr(count) == "TracedCount(total=1_048_576, backward=1_048_576, weights=1_048_576)"
    shown = repr(named("h100"))
    assert shown.startswith("<Chip H100 SXM: TFLOP/s fp64 33.5, ")
    assert shown.endswith("bf16 989.4, fp8 1978.9, int8 1978.9; 80 GiB at 3350 GB/s>")
