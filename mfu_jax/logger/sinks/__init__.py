"""Where a step's record goes: console, JSONL, TensorBoard, CSV, or your own sink.

Weights & Biases, MLflow and Prometheus need their own packages, imported on first use.
A sink is a class with a few methods (`Sink`), registered by one decorator::

    @register_sink("mine")
    class MySink(Sink):
        def write(self, record: StepRecord) -> None: ...

One of ours is named in `mfu_jax.logger.sinks.base.OURS` and in `mfu_jax.sinks`; a flag for it is
a field of `mfu_jax.settings.MetricsKeys`, read by `sinks_of` in `mfu_jax.instrumentation.assembly`.
docs/sinks.md has a row for each.
"""
