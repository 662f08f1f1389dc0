"""Keras on JAX: one callback. Run: KERAS_BACKEND=jax python examples/keras_fit.py [METRICS_FILE]"""

import sys

import keras
import numpy as np

from mfu_jax.integrations.keras import MfuCallback

model = keras.Sequential(
    [keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)]
)
model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=(4096, 64)).astype("float32")

metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/keras_fit.jsonl"
model.fit(
    *(x, x.sum(axis=1)),
    batch_size=512,
    epochs=2,
    verbose=0,
    callbacks=[MfuCallback(metrics_file=metrics_file)],
)
