"""EasyDeL's own trainer and Llama, against hand arithmetic.

Runs where EasyDeL is installed (scripts/test_libraries.sh).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.examples import run_example
from tests.support.sinks import ListSink

pytest.importorskip("easydel")

import easydel as ed
from datasets import Dataset

from mfu_jax.integrations.easydel import instrument_trainer

pytestmark = pytest.mark.full

STEPS, EVERY, SAVE_EVERY = 6, 2, 3
BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY, HIDDEN = 8, 16, 32, 2, 64, 48
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 8


class Losses(ed.Trainer):
    """EasyDeL's trainer, which keeps the loss of every step."""

    def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
        self.losses = [*getattr(self, "losses", []), float(metrics.loss)]
        return super().on_step_end(state=state, metrics=metrics, step=step)


def trained(folder: Path, micro_batches: int, adapt: Any) -> tuple[Any, list[float]]:
    config = ed.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=LENGTH,
    )
    model = ed.LlamaForCausalLM(
        config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=ed.Rngs(0)
    )
    tokens = np.arange(STEPS * BATCH * LENGTH).reshape(-1, LENGTH) % VOCABULARY
    data = Dataset.from_dict({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    trainer = Losses(
        arguments=ed.TrainingArguments(
            total_batch_size=BATCH,
            gradient_accumulation_steps=micro_batches,
            max_training_steps=STEPS,
            max_evaluation_steps=1,
            max_length=LENGTH,
            evaluation_steps=EVERY,
            save_steps=SAVE_EVERY,
            do_eval=True,
            num_train_epochs=1,
            use_wandb=False,
            save_directory=str(folder),
        ),
        model=model,
        dataset_train=data,
        dataset_eval=data,
    )
    output = adapt(trainer).train()
    return jax.tree.map(np.asarray, output.state.graphstate), trainer.losses


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_easydels_trainer_is_measured_and_unchanged(tmp_path: Path, micro_batches: int) -> None:
    bare, losses = trained(tmp_path / "bare", micro_batches, lambda trainer: trainer)
    memory, steps = ListSink(), []

    def adapt(trainer: Any) -> Any:
        step_end = trainer.on_step_end

        def keep(**kwargs: Any) -> Any:
            steps.append(trainer.sharded_training_step_function)
            return step_end(**kwargs)

        trainer.on_step_end = keep
        return instrument_trainer(trainer, peak_tflops_per_device=1, sinks=[memory])

    measured, ours = trained(tmp_path / "ours", micro_batches, adapt)
    jax.tree.map(np.testing.assert_array_equal, measured, bare)
    assert ours == losses
    # EasyDeL divides max_training_steps by the micro-batches, and multiplies the batch by them.
    assert len(losses) == STEPS // micro_batches
    assert [record.step for record in memory.records] == list(range(len(losses)))
    assert [record.scalars["learning/loss"] for record in memory.records] == losses
    paused = {
        name: [r.step for r in memory.records if f"goodput/{name}_seconds" in r.scalars]
        for name in ("eval", "checkpoint")
    }
    # Records are written before a checkpoint, whose seconds are in the next one.
    assert paused["eval"] == [step for step in (1, 3) if step < len(losses) - 1]
    assert paused["checkpoint"] == [step for step in (3,) if step < len(losses)]

    # A layer: q and out, k and v; gate, up and down.
    layer = WIDTH * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * HIDDEN
    matmuls = 2 * BATCH * LENGTH * (LAYERS * layer + WIDTH * VOCABULARY)
    # Scores and values over all pairs; convention maxtext has half of them under a causal mask.
    all_pairs = 2 * (2 * BATCH * LENGTH * LENGTH * HEADS * HEAD_WIDTH) * LAYERS
    work, causal = 3 * micro_batches * (matmuls + all_pairs), 3 * micro_batches * all_pairs // 2
    # The rotary angles, [S, 1] @ [1, h/2], are computed in the step: for each micro-batch in the
    # model, and once on every device.
    angles = 2 * LENGTH * HEAD_WIDTH // 2
    flops, devices = steps[0].flops, jax.device_count()
    assert flops.executed.total == work // devices + angles
    assert flops.model.dense == (work + micro_batches * angles) / devices
    assert flops.model.per_device == (work - causal + micro_batches * angles) / devices


def test_the_example(tmp_path: Path) -> None:
    batch, length, width, layers, vocabulary, hidden = 4, 64, 64, 2, 256, 128
    heads, kv_heads, head_width = 4, 2, 16
    layer = width * head_width * (2 * heads + 2 * kv_heads) + 3 * width * hidden
    matmuls = 2 * batch * length * (layers * layer + width * vocabulary)
    causal_pairs = (2 * batch * length * length * heads * head_width) * layers
    angles = 2 * length * head_width // 2
    assert run_example("easydel_sft", tmp_path).flops() == {3 * (matmuls + causal_pairs) + angles}
