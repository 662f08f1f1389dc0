"""Peaks of the attached or named accelerator; or measures one.

usage: mfu-jax hardware [NAME] [options]

Without NAME: the attached device and its peaks (imports jax). NAME is a device kind or a chip:
h100, v5p, 'RTX 4090', 'TPU v5 lite'. Peaks are dense, per JAX device, in TFLOP/s.

  --list          every chip in the table
  --calibrate     measures a matmul peak on the attached device, now, and caches it
  dtype=bf16      dtype to measure (default: bf16)
  --export=DIR    the table as JSON and a lookup in plain Python, to copy into other programs
  --json          one JSON object on stdout

example: mfu-jax hardware h100"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu_jax import hardware
from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import Chip
from mfu_jax.hardware.dtypes import DTYPES, dtype_names
from mfu_jax.hardware.peak import Peak
from mfu_jax.util.arguments import parse
from mfu_jax.util.formatting import columns, json_text


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, keys=("dtype", "export"), flags=("--list", "--calibrate", "--json"))
    folder = arguments.values.get("export")
    if len({*arguments.flags - {"--json"}, *arguments.names, *((folder,) if folder else ())}) > 1:
        raise UserError(
            "more than one question at once; expected a name, --list, --calibrate or --export",
            hint="usually a name with a space; put it in quotes, as in mfu-jax hardware 'RTX 4090'",
        )
    dtype = hardware.canonical_dtype(arguments.values.get("dtype", "bf16"))
    answer: Any
    if folder:
        answer = [str(path) for path in _export(folder)]
        text = "\n".join(answer)
    elif "--list" in arguments.flags:
        answer = [_as_json(chip) for chip in hardware.table()]
        text = _table(hardware.table())
    elif arguments.names:
        chip = hardware.named(arguments.names[0])
        answer, text = _as_json(chip), _describe(chip)
    else:
        answer, text = _attached(dtype, measure="--calibrate" in arguments.flags)
    as_json = "--json" in arguments.flags
    print(json_text(answer) if as_json else text)
    return 0


def _attached(dtype: str, measure: bool) -> tuple[dict[str, Any], str]:
    """The attached device: its row in the table, or the peak measured on it."""
    import jax

    device = jax.local_devices()[0]
    head = f"{jax.device_count()} × {device.device_kind} ({device.platform}, jax {jax.__version__})"
    answer: dict[str, Any] = {"device_kind": device.device_kind, "devices": jax.device_count()}
    if measure or device.device_kind == "cpu":
        from mfu_jax.hardware.calibration import calibrate

        peak = calibrate(dtype, device, refresh=measure)
        return {**answer, "peak": _as_json(peak, _OF_PEAK)}, f"{head}\n  peak  {peak}"
    chip = hardware.lookup(device.device_kind, getattr(device, "compute_capability", None))
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    text = f"{head}\n{_describe(chip)}"
    if limit:
        text += f"\n  usable memory     {limit / 2**30:.1f} GiB (bytes_limit of the runtime)"
    return {**answer, "chip": _as_json(chip), "bytes_limit": limit}, text


_OF_PEAK = ("tflops_per_sec", "dtype", "kind", "source")
_OF_CHIP = (
    *("name", "device_kinds", "peak_tflops", "memory_bytes", "usable_memory_bytes"),
    *("memory_bandwidth_bytes_per_sec", "devices_per_chip", "confidence", "unverified"),
    *("note", "sources", "number_sources"),
)


def _as_json(found: Chip | Peak, names: Sequence[str] = _OF_CHIP) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def _describe(chip: Chip) -> str:
    rows = {
        "dense TFLOP/s": _numbers(chip.peak_tflops),
        "they hold at": chip.clock_state,
        "with sparsity": _numbers(chip.sparse_tflops),
        "at boost": _numbers(chip.boost_tflops),
        "float32 matmuls": _float32(chip),
        "memory": f"{_memory(chip)}, {chip.memory_bandwidth_gbps:g} GB/s",
        "devices per chip": f"{chip.devices_per_chip} (all numbers are for one)"
        if chip.devices_per_chip > 1
        else "",
        "device kinds": ", ".join(chip.device_kinds),
        "confidence": chip.confidence,
        "unverified": "; ".join(chip.unverified),
        "arithmetic": chip.arithmetic,
        "note": chip.note,
        "others print": chip.others_print,
    }
    lines = [chip.name, *(f"  {name:<17} {text}" for name, text in rows.items() if text)]
    own = [f"of {k}: {'; '.join(found)}" for k, found in chip.number_sources.items()]
    sources = enumerate([*chip.sources, *own])
    lines += [f"  {'sources' if i == 0 else '':<17} {source}" for i, source in sources]
    return "\n".join(lines)


def _numbers(tflops: Mapping[str, float]) -> str:
    return ", ".join(f"{dtype} {value:g}" for dtype, value in tflops.items())


def _memory(chip: Chip) -> str:
    published, usable = chip.memory_gib, chip.usable_memory_gib
    if usable is None:
        return f"{published:g} GiB"
    if usable > published:  # which is rounded down
        return f"{usable:g} GiB usable ({published:g} published)"
    return f"{published:g} GiB ({usable:g} usable)"


def _float32(chip: Chip) -> str:
    """TFLOP/s of float32 matmuls at JAX's three precisions."""
    try:
        rates = {
            p: chip.peak_flops_per_sec("fp32", p) / 1e12 for p in ("default", "high", "highest")
        }
    except UserError:
        return ""
    return ", ".join(f"{precision} {rate:.4g}" for precision, rate in rates.items())


_DTYPES = ("bf16", "fp16", "fp8", "tf32", "fp32")


def _table(chips: Sequence[Chip]) -> str:
    """One line per chip: the peaks that training uses, memory, bandwidth, device kinds."""
    numbers = [f"{name:>7}" for name in (*_DTYPES, "GiB", "GB/s")]
    header = ["chip", *numbers, "device kinds"]
    return "\n".join(columns([header, *map(_row, chips)], f"<{'>' * len(numbers)}<"))


def _row(chip: Chip) -> list[str]:
    peaks = (chip.peak_tflops.get(dtype) for dtype in _DTYPES)
    return [
        chip.name,
        *("-" if peak is None else f"{peak:g}" for peak in peaks),
        f"{chip.memory_gib:g}",
        f"{chip.memory_bandwidth_gbps:g}",
        ", ".join(chip.device_kinds),
    ]


_ABOUT = (
    "TFLOP/s of one JAX device. dense_tflops: by unit, without sparsity; matmul_tflops: what a "
    "matmul of that dtype runs at, by JAX's default precision; sparse_tflops: the vendor's number "
    "with 2:4 sparsity, boost_tflops: at boost clock: neither is a peak to divide by; clock_state: "
    "what sets the clock at which the peaks hold, if it is not the default; number_sources: of a "
    "dtype's peak or of a field; sources: of the numbers that it lacks, but those in unverified"
)


def _export(folder: str) -> list[Path]:
    """Writes accelerator_peaks.json and accelerator_peaks.py into `folder`; returns their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    data = {
        "about": _ABOUT,
        "generated_by": "mfu-jax hardware --export=DIR",
        "dtypes": dtype_names(),
        "chips": [_exported(chip) for chip in hardware.table()],
    }
    target = Path(folder)
    lookup = Path(hardware.__file__).with_name("peak_lookup.py")
    texts = {
        target / "accelerator_peaks.json": json.dumps(data, indent=1, ensure_ascii=False) + "\n",
        target / "accelerator_peaks.py": lookup.read_text(encoding="utf-8"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--export={folder}: {error}",
            hint="give a folder that can be written",
        ) from None
    return list(texts)


def _exported(chip: Chip) -> dict[str, Any]:
    fields = dataclasses.asdict(chip)
    dense = fields.pop("peak_tflops")
    return {**fields, "dense_tflops": dense, "matmul_tflops": _matmuls(chip)}


def _matmuls(chip: Chip) -> dict[str, float]:
    found = {}
    for dtype in DTYPES:
        try:
            found[dtype] = chip.peak_flops_per_sec(dtype) / 1e12
        except UserError:
            continue
    return found
