"""Dense peak TFLOP/s of accelerators, from accelerator_peaks.json beside this file.

Both files are written by ``mfu-jax hardware --export=DIR`` and need nothing but Python.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def table() -> dict[str, Any]:
    """Everything in accelerator_peaks.json."""
    text = Path(__file__).with_name("accelerator_peaks.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


def find(kind: str) -> list[dict[str, Any]]:
    """The chips that a JAX device_kind, torch.cuda.get_device_name() or a name may mean."""
    wanted, chips = {kind.lower(), f"nvidia {kind}".lower()}, table()["chips"]
    exact = [chip for chip in chips if not wanted.isdisjoint(_names(chip))]
    if exact or " MIG " in kind:
        return exact
    return [chip for chip in chips if chip["pattern"] and re.fullmatch(chip["pattern"], kind)]


def _names(chip: dict[str, Any]) -> list[str]:
    return [name.lower() for name in (chip["name"], *chip["aliases"], *chip["device_kinds"])]


def peak_tflops(kind: str, dtype: str = "bf16") -> float:
    """Dense TFLOP/s of one JAX device for matmuls whose operands have this dtype.

    Raises:
        LookupError: the chip or its peak is not known, or several chips have that name.
    """
    chips, canonical = find(kind), table()["dtypes"].get(dtype.strip().lower())
    if len(chips) != 1:
        names = ", ".join(chip["name"] for chip in chips) or "none that is known"
        raise LookupError(f"{kind!r} may be {names}; measure its peak or give the number")
    if canonical not in chips[0]["matmul_tflops"]:
        listed = ", ".join(chips[0]["matmul_tflops"])
        raise LookupError(f"{chips[0]['name']} has no listed {dtype} peak; it lists {listed}")
    return float(chips[0]["matmul_tflops"][canonical])
