"""`Peak`: the denominator of MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The denominator of MFU and HFU.

    Attributes:
        flops_per_sec: dense FLOP/s of one JAX device.
        dtype: the canonical dtype that was asked for.
        kind: 'flag', 'table' or 'calibrated'.
        source: where the number comes from, in words; after a semicolon, details for JSON alone.
    """

    flops_per_sec: float
    dtype: str
    kind: str
    source: str

    @property
    def tflops_per_sec(self) -> float:
        """The peak in 10¹² FLOP/s."""
        return self.flops_per_sec / 1e12

    def __str__(self) -> str:
        source = self.source.partition("; ")[0]
        return f"{self.tflops_per_sec:.6g} TFLOP/s/device in {self.dtype} ({source})"
