"""Writes the table of peaks for programs that do not have mfu_jax: a JSON file and its lookup."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.hardware.chips import Chip, table
from mfu_jax.hardware.dtypes import DTYPES, dtype_names

_LOOKUP = Path(__file__).with_name("peak_lookup.py")
_ABOUT = (
    "TFLOP/s of one JAX device. dense_tflops: by unit, without sparsity; matmul_tflops: what a "
    "matmul of that dtype runs at, by JAX's default precision; sparse_tflops: the vendor's number "
    "with 2:4 sparsity, boost_tflops: at boost clock: neither is a peak to divide by; clock_state: "
    "what sets the clock at which the peaks hold, if it is not the default; sources: of the "
    "chip's numbers but those in unverified"
)


def export_peaks(folder: str) -> list[Path]:
    """Writes accelerator_peaks.json and accelerator_peaks.py into `folder`; returns their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    data = {
        "about": _ABOUT,
        "generated_by": "mfu-jax hardware --export=DIR",
        "dtypes": dtype_names(),
        "chips": [_row(chip) for chip in table()],
    }
    target = Path(folder)
    texts = {
        target / "accelerator_peaks.json": json.dumps(data, indent=1, ensure_ascii=False) + "\n",
        target / "accelerator_peaks.py": _LOOKUP.read_text(encoding="utf-8"),
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--export={folder}: {error}; give a folder that can be written") from None
    return list(texts)


def _row(chip: Chip) -> dict[str, Any]:
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
