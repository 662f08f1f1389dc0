"""Where a step's record goes: console, JSONL, TensorBoard, CSV, or your own sink.

Weights & Biases, MLflow and Prometheus need their own packages, imported on first use.
A sink is a class with a few methods (`Sink`), registered by one decorator::

    @register_sink("mine")
    class MySink(Sink):
        def write(self, record: StepRecord) -> None: ...

One of ours also has a line in `mfu_jax.logger.sinks.base.OURS`; a flag for it is a field of
`mfu_jax.settings`, read in `mfu_jax.instrumentation.assembly`.
"""
