"""The standard configs of benchmark runs, those of configs.yml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfu_jax.util.yaml_files import read_mapping


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One standard config.

    Attributes:
        parameters: as published; they decide whether the training state fits.
        batches: sequences per device, tried in order until one fits; with `split_sequences`,
            of all devices.
        settings: the trainer's keys.
        split_sequences: whether each sequence is split over all devices.
        tuned: keys tried in order on GPUs, instead of `batches`: the fastest by plans for an H100
            (scripts/results/reference_step.json), then those that need less memory.
    """

    parameters: int
    batches: Sequence[int]
    settings: Mapping[str, Any]
    split_sequences: bool = False
    tuned: Sequence[Mapping[str, Any]] = ()


BENCHMARKS: Mapping[str, Benchmark] = {
    name: Benchmark(**fields)
    for name, fields in read_mapping(Path(__file__).with_suffix(".yml")).items()
}
STANDARD = ("gpt2-124m", "llama3.2-1b", "llama3-8b", "moe-1.5b", "llama3.2-1b-32k")
