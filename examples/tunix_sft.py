"""google-tunix: a tiny Llama 3, fine-tuned. Run: python examples/tunix_sft.py [METRICS_FILE]"""

import sys

import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer, utils

from mfu_jax.integrations.tunix import instrument_trainer

SIZES = {"num_layers": 2, "embed_dim": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/tunix_sft.jsonl"

config = llama3.ModelConfig(
    **SIZES, vocab_size=256, hidden_dim=128, rope_theta=10_000, norm_eps=1e-5
)
trainer = peft_trainer.PeftTrainer(
    llama3.Llama3(config, rngs=nnx.Rngs(0)),
    optax.adamw(1e-3),
    peft_trainer.TrainingConfig(eval_every_n_steps=5, max_steps=10),
).with_gen_model_input_fn(
    lambda batch: {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }
)
tokens = np.arange(256, dtype=np.int32).reshape(4, 64)
batch = peft_trainer.TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))

instrument_trainer(trainer, metrics_file=metrics_file)
trainer.train([batch] * 10, [batch])
