"""Sinks for services with their own packages, which are imported when the sink is made."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Mapping
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.logger.sinks.base import Sink, StepRecord, register_sink
from mfu_jax.logger.summary import Summary


@register_sink("wandb")
class WandbSink(Sink):
    """Weights & Biases: scalars by step, set-up as config, totals as the run's summary.

    Args:
        init: arguments of ``wandb.init``, such as ``project``, ``name``, ``mode="offline"``, or
            ``id`` and ``resume="must"`` for a resumed run.
    """

    def __init__(self, **init: Any) -> None:
        self._run = _package("wandb").init(**init)

    def write(self, record: StepRecord) -> None:
        self._run.log(
            dict(record.scalars) | {"step/kind": record.kind}, step=record.step, commit=True
        )

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._run.config.update({**values, **texts}, allow_val_change=True)

    def write_summary(self, summary: Summary) -> None:
        self._run.summary.update({f"summary/{k}": v for k, v in summary.to_json().items()})

    def close(self) -> None:
        self._run.finish()


@register_sink("mlflow")
class MlflowSink(Sink):
    """MLflow: scalars as metrics, set-up as parameters, texts as artifacts.

    Args:
        start: arguments of ``mlflow.start_run``, such as ``run_name``, or ``run_id`` for a resumed
            run.
    """

    def __init__(self, **start: Any) -> None:
        self._mlflow = _package("mlflow", "mlflow-skinny")
        self._run_id = self._mlflow.start_run(**start).info.run_id

    def write(self, record: StepRecord) -> None:
        self._mlflow.log_metrics(dict(record.scalars), step=record.step, run_id=self._run_id)

    def write_text(self, tag: str, text: str) -> None:
        self._mlflow.log_text(text, f"{tag}.txt", run_id=self._run_id)

    def close(self) -> None:
        self._mlflow.MlflowClient().set_terminated(self._run_id)


@register_sink("prometheus")
class PrometheusSink(Sink):
    """Prometheus: each metric's last value as a gauge, ``perf/mfu`` as ``mfu_jax_perf_mfu``.

    Args:
        port: where to serve ``/metrics``; None: the caller serves it.
        registry: Prometheus registry; a new one by default.
    """

    def __init__(self, port: int | None = 9400, *, registry: Any = None) -> None:
        self._client = _package("prometheus_client", "prometheus-client")
        self.registry = registry or self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        if port is not None:
            try:
                self._client.start_http_server(port, registry=self.registry)
            except OSError as error:
                raise UserError(
                    f"port {port} cannot be served ({error.strerror or error}); expected a free "
                    f"port; usually another run on this machine uses it; pass another port"
                ) from error

    def write(self, record: StepRecord) -> None:
        for name, value in {"step": record.step, **record.scalars}.items():
            if name not in self._gauges:
                gauge = f"mfu_jax_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
                self._gauges[name] = self._client.Gauge(gauge, name, registry=self.registry)
            self._gauges[name].set(value if math.isfinite(value) else math.nan)


def _package(name: str, install: str | None = None) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"the sink needs the package {name!r}, which is not installed; expected it alongside "
            f"mfu_jax; usually because the default install leaves it out; run pip install "
            f"{install or name}"
        ) from error
