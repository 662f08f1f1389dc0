"""kauldron: one `with` around train(). Run: python examples/kauldron_train.py [METRICS_FILE]"""

import sys
import tempfile

import flax.linen as nn
import numpy as np
import optax
from kauldron import kd

from mfu_jax.integrations import kauldron


class Linear(nn.Module):
    x: kd.kontext.Key = kd.kontext.REQUIRED

    @nn.compact
    def __call__(self, x):
        return nn.Dense(256, use_bias=False)(x)


data = {"x": np.ones((640, 512), np.float32), "y": np.zeros((640, 256), np.float32)}
trainer = kd.train.Trainer(
    workdir=tempfile.mkdtemp(),
    train_ds=kd.data.InMemoryPipeline(loader=lambda: data, batch_size=64),
    model=Linear(x="batch.x"),
    optimizer=optax.adam(1e-3),
    train_losses={"l2": kd.losses.L2(preds="preds", targets="batch.y")},
    num_train_steps=10,
    log_metrics_every=5,
)
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/kauldron_train.jsonl"
with kauldron.instrumented(metrics_file=metrics_file):
    trainer.train()
