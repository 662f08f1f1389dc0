"""Sinks for services with their own packages, imported when the sink is created."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.logger.records.step_record import RecordError, StepRecord
from mfu_jax.logger.records.summary import Summary
from mfu_jax.logger.sinks.base import Sink, UniqueNames, register_sink
from mfu_jax.storage.addresses import Address, check_path
from mfu_jax.storage.files import replace_file
from mfu_jax.util.optional_deps import require

# MLflow's limits (mlflow/utils/validation.py) on a key, a parameter's or tag's value, a batch.
_MLFLOW_KEY = 250
_MLFLOW_PARAMETER = 6000
_MLFLOW_TAG = 5000
_MLFLOW_METRICS = 1000
_MLFLOW_PARAMETERS = 100

# How often node exporter's file is rewritten; Prometheus scrapes every 15 to 60 s.
_TEXTFILE_SECONDS = 5.0

_WANDB_OWN = ("step/kind", "step/number", "_step", "_runtime", "_timestamp")


@register_sink("wandb")
class WandbSink(Sink):
    """Weights & Biases: scalars by step, set-up as config, totals as the run's summary.

    Without arguments, a run already open in this process is used and left open; its rows have our
    step as ``step/number``.

    Args:
        init: arguments of ``wandb.init``, such as ``project``, ``name``, ``mode="offline"`` (`wandb
            sync` uploads it later), or ``id`` and ``resume="must"`` for a resumed run.

    Raises:
        UserError: the package is missing, or ``wandb.init`` fails.
    """

    def __init__(self, **init: Any) -> None:
        wandb = require("wandb", "the sink 'wandb'", install="'mfu-jax[wandb]'")
        open_run = wandb.run
        use_open = open_run is not None and not init
        self._run = open_run if use_open else _opened("wandb", lambda: wandb.init(**init))
        self._is_ours = self._run is not open_run
        self._exit_code = 0
        self._names = UniqueNames("W&B", reserved=_WANDB_OWN)

    def write(self, record: StepRecord) -> None:
        row: dict[str, Any] = {"step/kind": record.kind}
        row |= {self._names[name]: value for name, value in record.scalars.items()}
        if self._is_ours:
            self._run.log(row, step=record.step, commit=True)
        else:  # its owner counts the steps: these values join the row being filled
            self._run.log(row | {"step/number": record.step}, commit=False)

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self._run.config.update({**values, **texts}, allow_val_change=True)

    def write_summary(self, summary: Summary) -> None:
        self._run.summary.update({f"summary/{k}": v for k, v in summary.to_json().items()})

    def write_failure(self, reason: str) -> None:
        self._exit_code = 1
        self._run.summary["failure"] = reason

    def close(self) -> None:
        if self._is_ours:
            self._run.finish(exit_code=self._exit_code)


@register_sink("mlflow")
class MlflowSink(Sink):
    """MLflow: scalars as metrics, set-up as parameters, texts as artifacts.

    Characters that MLflow rejects in a metric's name become ``_``: ``acc@1`` is ``acc_1``. The run
    ends with the logger, as FAILED if the loop raised. Without arguments, a run already active on
    this thread is used and left open.

    Args:
        start: arguments of ``mlflow.start_run``, such as ``run_name``, or ``run_id`` to resume a
            run.

    Raises:
        UserError: the package is missing, or ``mlflow.start_run`` fails.
    """

    def __init__(self, **start: Any) -> None:
        mlflow = require("mlflow", "the sink 'mlflow'", install="'mfu-jax[mlflow]'")
        self._entities = importlib.import_module("mlflow.entities")
        self._client = _opened("mlflow", mlflow.MlflowClient)
        active = None if start else mlflow.active_run()
        self._is_ours = active is None
        self._status = "FINISHED"
        if active is None:
            active = _opened("mlflow", lambda: mlflow.start_run(**start))
            # Detach it: an active run would get in the way of the caller's own MLflow code.
            mlflow.end_run("RUNNING")
        self._run_id = active.info.run_id
        self._names = UniqueNames("MLflow", _mlflow_name, longest=_MLFLOW_KEY, is_tree=True)

    def write(self, record: StepRecord) -> None:
        milliseconds = int(record.unix_seconds * 1000)
        metrics = [
            self._entities.Metric(self._names[name], value, milliseconds, record.step)
            for name, value in record.scalars.items()
        ]
        self._log("metrics", metrics, _MLFLOW_METRICS)

    def write_setup(self, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        known = self._client.get_run(self._run_id).data.params
        new = []
        for name, value in values.items():
            key, text = self._names[name], str(value)
            if len(text) > _MLFLOW_PARAMETER:
                self.write_text(f"setup/{key}", text)
            elif key in known and known[key] != text:  # parameters are immutable, tags are not
                self._client.set_tag(self._run_id, key, text[:_MLFLOW_TAG])
            else:
                new.append(self._entities.Param(key, text))
        self._log("params", new, _MLFLOW_PARAMETERS)
        for tag, text in texts.items():
            self.write_text(f"setup/{tag}", text)

    def write_text(self, tag: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{tag}.txt")

    def write_failure(self, reason: str) -> None:
        self._status = "FAILED"
        self._client.set_tag(self._run_id, "failure", reason[:_MLFLOW_TAG])

    def close(self) -> None:
        if self._is_ours:
            self._client.set_terminated(self._run_id, self._status)

    def _log(self, kind: str, items: Sequence[Any], most: int) -> None:
        for start in range(0, len(items), most):
            self._client.log_batch(self._run_id, **{kind: items[start : start + most]})


@register_sink("prometheus")
class PrometheusSink(Sink):
    """Prometheus: each metric's last value as a gauge; ``perf/mfu`` is ``mfu_jax_perf_mfu``.

    If two metrics would share a gauge, the second gets a number: ``top_1`` and ``top-1`` are
    ``mfu_jax_top_1`` and ``mfu_jax_top_1_2``; the gauge's help is the metric's own name.

    Args:
        port: where to serve ``/metrics`` until `close`; None: the caller serves it.
        address: of the network interface to bind; by default only this machine can read it.
            "0.0.0.0" or "::" for a Prometheus elsewhere.
        registry: Prometheus registry; a new one by default.
        textfile: a file for node exporter's textfile collector, rewritten every few seconds and at
            the end; its name ends in ``.prom``. With ``port=None`` nothing else is served.

    Attributes:
        port: the port served; a free one if `port` was 0.

    Raises:
        UserError: the package is missing, the port cannot be served, or the file is unusable.
    """

    def __init__(
        self,
        port: int | None = 9400,
        *,
        address: str = "127.0.0.1",
        registry: Any = None,
        textfile: str | os.PathLike[str] = "",
    ) -> None:
        self._client = require(
            "prometheus_client", "the sink 'prometheus'", install="'mfu-jax[prometheus]'"
        )
        self.registry = registry or self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._names = UniqueNames("Prometheus", _prometheus_name, reserved=["step"])
        self._server: Any = None
        self.place = self._textfile = _checked_textfile(textfile)
        self._written_at = float("-inf")
        if port is not None:
            try:
                self._server, self._thread = self._client.start_http_server(
                    port, addr=address, registry=self.registry
                )
                self.port = self._server.server_port
            except (OSError, OverflowError) as error:
                raise UserError(
                    f"{address}:{port} cannot be served "
                    f"({getattr(error, 'strerror', '') or error}); expected a free port",
                    hint="usually another run on this machine uses it; pass another port",
                ) from error

    def write_many(self, records: Sequence[StepRecord]) -> None:
        last = {name: record for record in records for name in record.scalars}
        for name, record in last.items():
            self._gauge(self._names[name], name).set(record.scalars[name])
        self._gauge("step", "step").set(records[-1].step)
        if time.monotonic() - self._written_at >= _TEXTFILE_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._textfile:
            self._written_at = time.monotonic()
            text = self._client.generate_latest(self.registry)
            replace_file(self._textfile, [text])

    def close(self) -> None:
        self.flush()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=1.0)
            self._server = None

    def _gauge(self, name: str, metric: str) -> Any:
        if name not in self._gauges:
            try:
                gauge = self._client.Gauge(f"mfu_jax_{name}", metric, registry=self.registry)
            except ValueError as error:  # the caller's registry already has that name
                raise RecordError(first_line(error)) from error
            self._gauges[name] = gauge
        return self._gauges[name]


def _checked_textfile(textfile: str | os.PathLike[str]) -> Path | None:
    """The file for node exporter, in an existing folder; None if there is none."""
    if not os.fspath(textfile):
        return None
    path = check_path(textfile, "textfile")
    if isinstance(path, Address) or path.suffix != ".prom" or not path.parent.is_dir():
        raise UserError(
            f"textfile={os.fspath(textfile)!r}: expected a name that ends in .prom, in a "
            "folder of this machine; node exporter reads no others",
            hint="usually the folder is missing; make it, and pass it to node_exporter "
            "--collector.textfile.directory",
        )
    return path


def _mlflow_name(name: str) -> str:
    """``acc@1`` → ``acc_1``; as a path, it must be in normal form."""
    parts = re.sub(r"[^a-zA-Z0-9_\-. /:]", "_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)


def _prometheus_name(name: str) -> str:
    return re.sub("[^a-zA-Z0-9_]", "_", name)


def _opened(service: str, start: Callable[[], Any]) -> Any:
    """Returns what a service's `start` returns; whatever it raises becomes a `UserError`."""
    try:
        return start()
    except Exception as error:
        raise UserError(
            f"{service} could not start a run ({first_line(error)}); expected an account and a "
            "server that answers",
            hint="usually no login, or an argument of another version; log in, or leave the "
            "sink out",
        ) from error
