"""A matmul peak measured on the real device, for CPUs and for chips that are not in the table.

The number is what a chain of square matmuls reaches on this machine: an honest denominator, but not
a vendor's peak, so its `source` always says "calibrated". It is kept in the user's cache folder
(`$MFU_JAX_CACHE_DIR`, else `$XDG_CACHE_HOME/mfu_jax`, else `~/.cache/mfu_jax`), one file for each
machine, core count, dtype and jax version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mfu_jax.errors import UserError
from mfu_jax.hardware.dtypes import canonical_dtype
from mfu_jax.hardware.peak import Peak
from mfu_jax.storage.files import replace_file

_LOG = logging.getLogger(__name__)

# Small enough for two slow cores, large enough to be limited by arithmetic (at 256 the loop's
# overhead shows: 0.19 TFLOP/s, against 0.42 at 512 and 0.46 at 1024).
_CPU_SIZES = (512, 768, 1024)
_ACCELERATOR_SIZES = (2048, 4096, 8192)

_RUN_SECONDS = 0.01  # a timed run: far longer than dispatch, short enough to fit between other work
_SIZE_SECONDS = 0.6  # time given to each size
_MIN_RUNS = 4
_MODEL_WIDTH = 22  # of a processor in the one line of a log
_BUSY = 0.05  # share of the time spent waiting for a core above which the result is corrected

_JAX_DTYPES: dict[str, Any] = {
    "fp64": jnp.float64,
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
    "fp8": jnp.float8_e4m3fn,
    "int8": jnp.int8,
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a calibrated peak depends on. All fields but `device_count` are the cache key.

    A run and who reads its profile may have different numbers of virtual devices, one machine.
    """

    device_kind: str
    model: str
    usable_cores: float
    device_count: int
    jax_version: str


def machine_of(device: jax.Device) -> Machine:
    """The machine behind `device`; for a CPU its model and the cores that this process may use."""
    on_cpu = device.platform == "cpu"
    return Machine(
        device_kind=device.device_kind,
        model=_cpu_model() if on_cpu else device.device_kind,
        usable_cores=min(_affinity(), _cpu_quota()) if on_cpu else 0,
        device_count=len(device.client.local_devices()) if on_cpu else 1,
        jax_version=jax.__version__,
    )


def calibrate(
    dtype: object,
    device: jax.Device | None = None,
    *,
    refresh: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> Peak:
    """The matmul peak of one JAX device in `dtype`, measured now or read from the cache.

    Each of several sizes runs as a chain of dependent matmuls in one jitted loop. After a warm-up
    the best run counts, because other work only ever makes a run slower. Takes two to three
    seconds. If other processes kept this one waiting for cores (Linux reports it), FLOPs per second
    of CPU time × cores replace the best run if they are higher, and `source` says so.

    N virtual CPU devices (`--xla_force_host_platform_device_count`) share the machine: the peak of
    each is the machine's, measured through one of them with all cores, divided by N.

    Args:
        dtype: dtype of the matmul operands, by any of its names in numpy, JAX or HLO.
        device: the device to measure; the first one by default.
        refresh: measure even if the cache has the peak.
        clock: seconds, monotonic; tests inject their own.

    Raises:
        UserError: the dtype cannot be measured here.
    """
    name = canonical_dtype(dtype)
    has_fp64 = jax.config.jax_enable_x64  # type: ignore[attr-defined, unused-ignore]
    if name not in _JAX_DTYPES or (name == "fp64" and not has_fp64):
        raise UserError(
            f"a peak in {name} cannot be measured here; expected one of "
            f"{', '.join(_JAX_DTYPES)} (fp64 with jax_enable_x64)",
            hint="usually a dtype without matmuls in this JAX backend; pass "
            "peak_tflops_per_device=…",
        )
    device = device or jax.local_devices()[0]
    machine = machine_of(device)
    path = cache_path(machine, name)
    record = None if refresh else _read(path, machine, name)
    cached = record is not None
    if record is None:
        record = measure(name, device, clock=clock)
        _write(path, machine, name, record)
    return Peak(
        flops_per_sec=record["flops_per_sec"] / machine.device_count,
        dtype=name,
        kind="calibrated",
        source=_source(record, machine, path if cached else None),
    )


def measure(
    dtype: str,
    device: jax.Device,
    *,
    sizes: Sequence[int] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Best matmul rate over the sizes; the cache is neither read nor written.

    Returns:
        `flops_per_sec` of everything `device` can use, `size` of the best matrices, and `busy`:
        seconds that threads waited for a core, per core and second (0 if unknown).
    """
    sizes = sizes or (_CPU_SIZES if device.platform == "cpu" else _ACCELERATOR_SIZES)
    results = [_measure_size(dtype, device, size, clock) for size in sizes]
    return max(results, key=lambda result: result["flops_per_sec"])


def _measure_size(
    dtype: str, device: jax.Device, n: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Rate of n×n by n×n matmuls, 2·n³ FLOPs each."""
    chain = jax.jit(_chain)
    with jax.default_device(device):
        key_a, key_x = jax.random.split(jax.random.key(0))
        scale = n**-0.5  # keeps the chain's values near 1 for any number of matmuls
        if dtype == "int8":
            a = jax.random.randint(key_a, (n, n), -2, 3, jnp.int8)
            x = jax.random.randint(key_x, (n, n), -2, 3, jnp.int8)
        else:
            a = (jax.random.normal(key_a, (n, n)) * scale).astype(_JAX_DTYPES[dtype])
            x = jax.random.normal(key_x, (n, n)).astype(_JAX_DTYPES[dtype])

    def run(matmuls: int) -> float:
        start = clock()
        chain(a, x, matmuls).block_until_ready()
        return max(clock() - start, 1e-9)

    run(1)  # compiles: the count is an operand, so that one program serves every count
    matmuls = 1
    while (seconds := run(matmuls)) < _RUN_SECONDS / 2 and matmuls < 2**16:
        matmuls = max(matmuls + 1, min(8 * matmuls, math.ceil(matmuls * _RUN_SECONDS / seconds)))
    waited, used, start = _waited_seconds(), time.process_time(), clock()
    runs: list[float] = []
    while len(runs) < _MIN_RUNS or sum(runs) < _SIZE_SECONDS:
        runs.append(run(matmuls))
    flops = matmuls * 2 * n**3
    rate, busy = flops / min(runs), 0.0
    if device.platform == "cpu":
        cores, quota = _affinity(), _cpu_quota()
        by_cpu_time = len(runs) * flops / (time.process_time() - used)
        busy = (_waited_seconds() - waited) / (cores * (clock() - start))
        if quota < cores:  # a short run may use all cores until the quota of its period is spent
            rate = quota * by_cpu_time
        elif busy > _BUSY:
            rate = max(rate, cores * by_cpu_time)
    return {"flops_per_sec": rate, "size": n, "busy": busy}


def _waited_seconds() -> float:
    """Seconds that this process's threads were ready to run but had no core; 0 if unknown."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(path.read_text().split()[1])
    return total / 1e9


def _chain(a: jax.Array, x: jax.Array, matmuls: jax.Array) -> jax.Array:
    """a·(a·(…·x)): each product needs the one before, so none can be dropped, merged or hoisted."""
    accumulate = jnp.int32 if a.dtype == jnp.int8 else None

    def body(_: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dot(a, x, preferred_element_type=accumulate).astype(a.dtype)

    return lax.fori_loop(0, matmuls, body, x)


def _source(record: dict[str, float], machine: Machine, cache: Path | None) -> str:
    where = textwrap.shorten(machine.model, _MODEL_WIDTH, placeholder=" …")
    if machine.usable_cores:
        where += f", {machine.usable_cores:g} core{'s' if machine.usable_cores > 1 else ''}"
    parts = [f"{int(record['size'])}² matmuls on {machine.model}"]
    if machine.device_count > 1:
        parts.append(f"1/{machine.device_count} of the machine per virtual device")
    if record["busy"] > _BUSY:
        parts.append("by CPU time because its threads had to wait for cores")
    if cache is not None:
        parts.append(f"cached in {cache}")
    return f"calibrated on {where}; {', '.join(parts)}"


# The cache: one small JSON file per key, so that concurrent writers never overwrite each other.


def cache_directory() -> Path:
    """Where calibrated peaks are kept."""
    own = os.environ.get("MFU_JAX_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "mfu_jax"


def cache_path(machine: Machine, dtype: str) -> Path:
    """The file that holds this machine's peak in `dtype`."""
    digest = hashlib.sha256(json.dumps(_key(machine, dtype), sort_keys=True).encode()).hexdigest()
    return cache_directory() / f"peak-{dtype}-{digest[:16]}.json"


def _key(machine: Machine, dtype: str) -> dict[str, Any]:
    # version of the method: raising it invalidates older files
    fields = {name: value for name, value in vars(machine).items() if name != "device_count"}
    return {**fields, "dtype": dtype, "method": 1}


def _read(path: Path, machine: Machine, dtype: str) -> dict[str, float] | None:
    """The cached record; None, with a warning, if the file is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        record = {name: float(data[name]) for name in ("flops_per_sec", "size", "busy")}
        sound = (
            record["flops_per_sec"] > 0
            and data["key"] == _key(machine, dtype)
            and all(math.isfinite(value) and value >= 0 for value in record.values())
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        sound = False
    if not sound:
        _LOG.warning("cached peak %s is damaged; measuring again", path)
        return None
    return record


def _write(path: Path, machine: Machine, dtype: str, record: dict[str, float]) -> None:
    content = json.dumps({"key": _key(machine, dtype), **record}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [content.encode()])
    except OSError as error:
        _LOG.warning("the calibrated peak is not cached: %s\nhint: set MFU_JAX_CACHE_DIR", error)


def _affinity() -> int:
    """Cores that this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota() -> float:
    """Cores' worth of time that a container's cgroup grants; infinite without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return math.inf


def _cpu_model() -> str:
    """'model name' of /proc/cpuinfo; elsewhere the platform's name of the processor."""
    try:
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown CPU"
