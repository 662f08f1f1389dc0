"""google-tunix's own trainer and Llama 3, against hand arithmetic.

Runs where tunix is installed (scripts/test_libraries.sh).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from mfu_jax.integrations.tunix import instrument_trainer
from tests.support.examples import run_example
from tests.support.sinks import ListSink

pytest.importorskip("tunix")
pytestmark = pytest.mark.full

STEPS = 6
BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY, HIDDEN = 4, 16, 16, 2, 64, 32
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 8


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_peft_trainer(micro_batches: int) -> None:
    memory = ListSink()
    from tunix.models.llama3 import model as llama3
    from tunix.sft import peft_trainer, utils

    config = llama3.ModelConfig(
        num_layers=LAYERS,
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
        rope_theta=10_000,
        norm_eps=1e-5,
    )

    def model_inputs(batch: Any) -> dict[str, Any]:
        return {
            "input_tokens": batch.input_tokens,
            "input_mask": batch.input_mask,
            "positions": utils.build_positions_from_mask(batch.input_mask),
            "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
        }

    tokens = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))

    def train(adapt: Any) -> Any:
        trainer = peft_trainer.PeftTrainer(
            llama3.Llama3(config, rngs=nnx.Rngs(0)),
            optax.adamw(1e-3),
            peft_trainer.TrainingConfig(
                eval_every_n_steps=2, max_steps=STEPS, gradient_accumulation_steps=micro_batches
            ),
        ).with_gen_model_input_fn(model_inputs)
        trainer = adapt(trainer)
        trainer.train([batch] * STEPS * micro_batches, [batch])
        return trainer, jax.tree.map(np.asarray, nnx.state(trainer.model))

    _, bare = train(lambda trainer: trainer)
    adapt = functools.partial(instrument_trainer, peak_tflops_per_device=1, sinks=[memory])
    trainer, measured = train(adapt)
    jax.tree.map(np.testing.assert_array_equal, measured, bare)
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    # A layer: q and out, k and v; gate, up and down.
    layer = WIDTH * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * HIDDEN
    matmuls = 2 * BATCH * LENGTH * (LAYERS * layer + WIDTH * VOCABULARY)
    # Scores and values over all pairs; convention maxtext has half of them under a causal mask.
    all_pairs = 2 * (2 * BATCH * LENGTH * LENGTH * HEADS * HEAD_WIDTH) * LAYERS
    flops = train_step.flops
    assert flops.model.dense == flops.executed.total == 3 * (matmuls + all_pairs)
    assert flops.model.per_device == 3 * (matmuls + all_pairs // 2)
    of_a_step = memory.records[-1].scalars["perf/per_device_tflops"] * 1e12
    assert round(of_a_step) == micro_batches * flops.model.per_device
    assert [record.step for record in memory.records] == list(range(STEPS))
    evaluated = [r.step for r in memory.records if "goodput/eval_seconds" in r.scalars]
    assert evaluated == [0, 2, 4]  # before the first step, and after the second and fourth


def test_the_example(tmp_path: Path) -> None:
    batch, length, width, layers, vocabulary, hidden = 4, 64, 64, 2, 256, 128
    heads, kv_heads, head_width = 4, 2, 16
    layer = width * head_width * (2 * heads + 2 * kv_heads) + 3 * width * hidden
    matmuls = 2 * batch * length * (layers * layer + width * vocabulary)
    causal_pairs = (2 * batch * length * length * heads * head_width) * layers
    assert run_example("tunix_sft", tmp_path).flops() == {3 * (matmuls + causal_pairs)}
