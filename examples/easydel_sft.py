"""EasyDeL: a tiny Llama, trained. Run: python examples/easydel_sft.py [METRICS_FILE]"""

import sys
import tempfile

import easydel as ed
import jax.numpy as jnp
import numpy as np
from datasets import Dataset

from mfu_jax.integrations.easydel import instrument_trainer

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/easydel_sft.jsonl"

config = ed.LlamaConfig(vocab_size=256, max_position_embeddings=64, **SIZES, **HEADS)
model = ed.LlamaForCausalLM(
    config=config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=ed.Rngs(0)
)
tokens = np.arange(40 * 64).reshape(40, 64) % 256
data = Dataset.from_dict({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
trainer = ed.Trainer(
    arguments=ed.TrainingArguments(
        total_batch_size=4,
        max_training_steps=10,
        max_length=64,
        num_train_epochs=1,
        use_wandb=False,
        save_directory=tempfile.mkdtemp(),
    ),
    model=model,
    dataset_train=data,
)
instrument_trainer(trainer, metrics_file=metrics_file)
trainer.train()
