"""CLU: MFU beside your other metrics. Run: python examples/clu_loop.py [METRICS_FILE]"""

import sys

import jax
import jax.numpy as jnp
from clu import metric_writers

import mfu_jax
from mfu_jax.integrations.clu import ReportMfu
from mfu_jax.sinks import make_sink

WIDTH, STEPS = 512, 20
metrics_file = sys.argv[1] if len(sys.argv) > 1 else "runs/clu_loop.jsonl"
report_mfu = ReportMfu(metric_writers.LoggingWriter(), every_steps=5)
# sinks= replaces the console and the file, so they are named again.
sinks = [make_sink("console"), make_sink("jsonl", metrics_file), report_mfu.sink]


@jax.jit
def train_step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    return w - gradient, {"loss": loss}


train_step = mfu_jax.instrument(train_step, sinks=sinks)
w, x = jnp.zeros((WIDTH, WIDTH)), jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
for step in range(1, STEPS + 1):
    w, metrics = train_step(w, x)
    report_mfu(step)
train_step.close()
