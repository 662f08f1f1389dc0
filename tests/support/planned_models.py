"""Models whose memory and step time are formulas: what a search should find is known."""

import random
from dataclasses import dataclass

from mfu_jax.planning.tune.evidence import Trial

GIB = 2**30
LIMIT = 32 * GIB
POLICIES = ("none", "minimal", "full")
EXECUTED = {"none": 3.0, "minimal": 3.2, "full": 4.0}  # forward passes


@dataclass(frozen=True)
class Model:
    """Memory is fixed + batch × activations; time is fixed + batch × (matmuls + the rest)."""

    state_gib: float
    fixed_gib: float
    activations_gib: dict[str, float]
    fixed_seconds: float
    matmul_seconds: float  # of a forward pass of one sequence
    other_seconds: float

    @classmethod
    def random(cls, rng: random.Random) -> "Model":
        full = rng.uniform(0.2, 4)
        minimal = full * rng.uniform(1.5, 4)
        return cls(
            state_gib=rng.uniform(2, 12),
            fixed_gib=rng.uniform(0.5, 8),
            activations_gib={
                "full": full,
                "minimal": minimal,
                "none": minimal * rng.uniform(1.2, 3),
            },
            fixed_seconds=rng.uniform(0, 0.3),
            matmul_seconds=rng.uniform(0.1, 0.3),
            other_seconds=rng.uniform(0, 0.3),
        )

    def peak(self, policy: str, batch: float) -> int:
        held = self.state_gib + self.fixed_gib + batch * self.activations_gib[policy]
        return round(held * GIB)

    def matmuls(self, policy: str, batch: float) -> float:
        return batch * EXECUTED[policy] * self.matmul_seconds

    def seconds(self, policy: str, batch: float) -> float:
        return self.fixed_seconds + self.matmuls(policy, batch) + batch * self.other_seconds

    def trial(self, policy: str, batch: float) -> Trial:
        seconds, peak = self.seconds(policy, batch), self.peak(policy, batch)
        fits = peak <= LIMIT
        return Trial(
            by="plan",
            source="planned",
            fits=fits,
            memory_peak_bytes=peak,
            step_time_seconds=seconds if fits else None,
            tokens_per_sec_per_chip=1000 * batch / seconds if fits else None,
        )
