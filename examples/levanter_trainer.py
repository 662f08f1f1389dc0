"""levanter's Trainer. Run: python examples/levanter_trainer.py [METRICS_FILE]"""

import sys
import tempfile
from pathlib import Path

import haliax as hax
import jax
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

from mfu_jax.integrations.levanter import instrument_trainer

BATCH, IN, OUT, STEPS = hax.Axis("batch", 64), hax.Axis("in", 512), hax.Axis("out", 256), 10
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/levanter_trainer.jsonl"


def loss_fn(model, batch, *, key=None):
    return hax.mean(model(batch) ** 2).scalar(), {}


folder = tempfile.mkdtemp()
config = TrainerConfig(
    id="example",
    num_train_steps=STEPS,
    train_batch_size=BATCH.size,
    tracker=NoopConfig(),
    require_accelerator=False,
    log_dir=Path(folder),
    checkpointer=CheckpointerConfig(base_path=folder),
)
batches = [
    hax.random.normal(key, (BATCH, IN)) for key in jax.random.split(jax.random.key(0), STEPS)
]
with Trainer(config, optax.adam(1e-3), loss_fn) as trainer:
    instrument_trainer(trainer, metrics_file=metrics_file)
    state = trainer.initial_state(
        jax.random.key(1), model_init=lambda: hax.nn.Linear.init(IN, OUT, key=jax.random.key(2))
    )
    trainer.train(state, batches)
