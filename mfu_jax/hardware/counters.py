"""What the devices' own counters say while they run: tensor cores, memory, links.

They need no profiler. Each source is read on the monitor's thread; what it does not know is left
out, and why there is no source at all is logged once.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from mfu_jax import names
from mfu_jax.errors import UserError
from mfu_jax.hardware.gpus import Gpus
from mfu_jax.util.optional_deps import require
from mfu_jax.util.yaml_files import read_mapping

_log = logging.getLogger("mfu_jax")

_SILENT = "the counters of GPU %d are not known: %s"
_PERCENT, _MEBIBYTES = 0.01, 2.0**20
_TABLE = read_mapping(Path(__file__).with_name("counters.yml"))
# Metric → its number or name in a source.
_GPM, _DCGM, _TPU = (
    {name: row[source] for name, row in _TABLE.items() if source in row}
    for source in ("gpm", "dcgm", "tpu")
)
_OF_DCGM = {field: name for name, field in _DCGM.items()}
_HBM_USED, _RATE = "hardware/hbm_used", "_per_sec"


def counters_of_jax(
    gpus: Gpus | None, period_seconds: float
) -> GpmCounters | DcgmCounters | TpuCounters | None:
    """The best source for the devices that JAX uses here; None if there is none, logged once.

    Args:
        gpus: the GPUs that JAX uses, if any.
        period_seconds: between two readings.
    """
    try:
        if jax.local_devices()[0].platform == "tpu":
            return TpuCounters()
        if gpus is None:
            return None
        try:
            return GpmCounters(gpus)
        except UserError as error:
            return DcgmCounters(gpus, period_seconds, instead=str(error))
    except UserError as error:
        _log.info("%s", error)
        return None


def combined(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The metrics of a reading: shares are averaged over the devices, bytes added.

    A share outside 0 to 1, or a negative rate, is left out: the counters were reset in between.
    """
    found = defaultdict(list)
    for name, value in values:
        if 0 <= value <= (1 if _combination(name) is statistics.fmean else sys.float_info.max):
            found[name].append(value)
    return {name: _combination(name)(numbers) for name, numbers in found.items()}


def _combination(name: str) -> Callable[[Sequence[float]], float]:
    if name == names.THROTTLE_SCORE:
        return max
    return sum if name.endswith(_RATE) else statistics.fmean


class GpmCounters:
    """NVML's GPU performance monitoring, of Hopper and later: differences of two samples.

    As of every source, `read` gives the name of a metric and its number on one device, since the
    last call, where known, and `close` frees what it holds.

    Raises:
        UserError: a GPU or its driver has none.
    """

    def __init__(self, gpus: Gpus) -> None:
        self._nvml = nvml = gpus.nvml
        self._gpus = gpus.gpus
        try:
            for gpu in self._gpus:
                if not nvml.nvmlGpmQueryDeviceSupport(gpu.handle).isSupportedDevice:
                    raise UserError(f"{nvml.nvmlDeviceGetName(gpu.handle)} has no GPM counters")
                if gpu.is_slice and gpu.instance is None:
                    raise UserError("NVML counts a MIG slice only by its UUID")
            # Of the last reading, and for the next one.
            self._samples = [[nvml.nvmlGpmSampleAlloc() for _ in range(2)] for _ in self._gpus]
        except (nvml.NVMLError, AttributeError) as error:
            raise UserError(f"NVML's GPM counters are not there ({error})") from error
        self._has_last = [False] * len(self._gpus)
        self._is_told = False

    def read(self) -> Iterator[tuple[str, float]]:
        """Nothing from the first call, nor from the one after a failure."""
        for i, gpu in enumerate(self._gpus):
            begin, end = self._samples[i]
            has_last, self._has_last[i] = self._has_last[i], False
            try:
                if gpu.instance is None:
                    self._nvml.nvmlGpmSampleGet(gpu.handle, end)
                else:
                    self._nvml.nvmlGpmMigSampleGet(gpu.handle, gpu.instance, end)
                self._samples[i], self._has_last[i] = [end, begin], True
                if has_last:
                    yield from self._between(begin, end)
            except self._nvml.NVMLError as error:  # lost, or the driver refuses
                _log.log(logging.DEBUG if self._is_told else logging.INFO, _SILENT, i, error)
                self._is_told = True

    def close(self) -> None:
        """See `GpmCounters`."""
        for sample in itertools.chain(*self._samples):
            self._nvml.nvmlGpmSampleFree(sample)

    def _between(self, begin: Any, end: Any) -> Iterator[tuple[str, float]]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_GPM)
        request.sample1, request.sample2 = begin, end
        for i, number in enumerate(_GPM.values()):
            request.metrics[i].metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        for i, name in enumerate(_GPM):
            if request.metrics[i].nvmlReturn == self._nvml.NVML_SUCCESS:
                unit = _MEBIBYTES if name.endswith(_RATE) else _PERCENT
                yield name, unit * request.metrics[i].value


class DcgmCounters:
    """DCGM's profiling fields, of Volta and later, by the Python binding that comes with DCGM.

    Args:
        gpus: the GPUs that JAX uses.
        period_seconds: over which DCGM averages.
        instead: why NVML does not have them.

    Raises:
        UserError: no binding, no host engine, or not these GPUs.
    """

    def __init__(self, gpus: Gpus, period_seconds: float, instead: str) -> None:
        try:
            module = importlib.import_module("DcgmReader")
            self._reader = module.DcgmReader(
                fieldIds=list(_OF_DCGM),
                updateFrequency=round(1e6 * period_seconds),  # µs
                fieldGroupName=f"mfu_jax_{os.getpid()}_{id(self)}",  # it deletes one of its name
            )
            self._reader.GetLatestGpuValuesAsFieldIdDict()  # connects
            own = {str(gpus.nvml.nvmlDeviceGetUUID(g.handle)) for g in gpus.gpus if not g.is_slice}
            ids = self._reader.m_gpuIdToUUId.items()
            self._ids = [number for number, uuid in ids if str(uuid) in own]
            if not self._ids:
                raise LookupError("it has none of these GPUs; is nv-hostengine running?")
        except Exception as error:  # DCGM has its own errors
            raise UserError(
                f"no hardware counters: {instead}, and DCGM says {error!r}; expected a Hopper "
                "GPU or later, or DCGM",
                hint="usually its Python binding is not on the path; set "
                "PYTHONPATH=/usr/share/datacenter-gpu-manager-4/bindings/python3",
            ) from error

    def read(self) -> Iterator[tuple[str, float]]:
        """See `GpmCounters`."""
        values = self._reader.GetLatestGpuValuesAsFieldIdDict()
        for number in self._ids:
            for field, value in values.get(number, {}).items():
                yield _OF_DCGM[field], float(value)

    def close(self) -> None:
        """See `GpmCounters`."""
        self._reader.Shutdown()


class TpuCounters:
    """libtpu's own metrics, of the TPUs of this host.

    Raises:
        UserError: libtpu has none.
    """

    def __init__(self) -> None:
        sdk = require("libtpu.sdk", "the counters of TPUs", install="'jax[tpu]'")
        try:
            self._monitoring = sdk.tpumonitoring
        except AttributeError as error:
            raise UserError(
                f"libtpu has no counters ({error}); expected its sdk to have tpumonitoring",
                hint="usually an old one; run pip install --upgrade 'jax[tpu]'",
            ) from error

    def read(self) -> Iterator[tuple[str, float]]:
        """Of devices, cores or chips."""
        for name, metric in _TPU.items():
            yield from ((name, _PERCENT * number) for number in self._numbers(metric))
        used, total = (self._numbers(f"hbm_capacity_{what}") for what in ("usage", "total"))
        if used and sum(total) > 0:
            yield _HBM_USED, sum(used) / sum(total)
        for score in self._numbers("tpu_throttle_score", _score):
            yield names.THROTTLE_SCORE, score

    def close(self) -> None:
        """See `GpmCounters`."""

    def _numbers(self, metric: str, parse: Callable[[str], float] = float) -> list[float]:
        """libtpu's answer, one number for each device, core or chip; empty if not known."""
        try:
            return [parse(str(text)) for text in self._monitoring.get_metric(metric).data()]
        except Exception as error:  # a RuntimeError: not of this TPU or version; others are its own
            _log.debug("libtpu does not tell %s: %r", metric, error)
            return []


def _score(text: str) -> float:
    """Of ``ID-SCORE``; 1 to 10 for 10 to 100%."""
    return float(text.rpartition("-")[2])
