"""google-tunix's own trainer and Llama 3, against hand arithmetic.

No dependency of the tests: it installs some sixty packages. With `pip install google-tunix pytest`
(0.1.7 was tried) this file runs; without it is skipped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import mfu_jax

pytest.importorskip("tunix")

BATCH, LENGTH, WIDTH, LAYERS, VOCABULARY, HIDDEN = 4, 16, 16, 2, 64, 32
HEADS, KV_HEADS, HEAD_WIDTH = 4, 2, 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of JAX, Flax and optax, about tunix
def test_peft_trainer(capsys: pytest.CaptureFixture[str]) -> None:
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

    trainer = peft_trainer.PeftTrainer(
        llama3.Llama3(config, rngs=nnx.Rngs(0)),
        optax.adamw(1e-3),
        peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=4),
    ).with_gen_model_input_fn(model_inputs)
    train_step, _ = trainer.jit_train_and_eval_step()
    train_step = mfu_jax.instrument(train_step, peak_tflops_per_device=1)
    trainer._jitted_train_step_fn = train_step
    tokens = np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH)
    batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))
    trainer.train([batch] * 4)
    train_step.close()

    # A layer: q and out, k and v; gate, up and down.
    layer = WIDTH * HEAD_WIDTH * (2 * HEADS + 2 * KV_HEADS) + 3 * WIDTH * HIDDEN
    matmuls = 2 * BATCH * LENGTH * (LAYERS * layer + WIDTH * VOCABULARY)
    # Scores and values over all pairs; convention maxtext has half of them under a causal mask.
    all_pairs = 2 * (2 * BATCH * LENGTH * LENGTH * HEADS * HEAD_WIDTH) * LAYERS
    flops = train_step.flops
    assert flops.model.dense == 3 * (matmuls + all_pairs)
    assert flops.executed.total == 3 * (matmuls + all_pairs)
    assert flops.model.per_device == 3 * (matmuls + all_pairs // 2)

    lines = capsys.readouterr().out.splitlines()
    assert [line[:17] for line in lines if line.startswith("completed step: ")] == [
        f"completed step: {step}" for step in range(4)
    ]
