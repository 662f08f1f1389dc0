"""The standard configs of benchmark runs: dense models, experts, long sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


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

    parameters: float
    batches: tuple[int, ...]
    settings: Mapping[str, Any]
    split_sequences: bool = False
    tuned: tuple[Mapping[str, Any], ...] = ()


def _model(
    name: str,
    parameters: float,
    batches: tuple[int, ...],
    length: int,
    tuned: tuple[Mapping[str, Any], ...] = (),
    **more: Any,
) -> Benchmark:
    """One of the bundled models."""
    keys = {"model_name": name, "max_target_length": length, "remat_policy": "full"}
    return Benchmark(parameters=parameters, batches=batches, settings=keys | more, tuned=tuned)


def _unrolled(batch: int, remat_policy: str, **more: Any) -> Mapping[str, Any]:
    """Scanned layers would copy what they save into stacks."""
    keys = {"per_device_batch_size": batch, "remat_policy": remat_policy, "scan_layers": "false"}
    return keys | more


def _split(benchmark: Benchmark) -> Benchmark:
    """The same with each sequence split over all devices."""
    return replace(benchmark, split_sequences=True)


# Logits in parts: those of 32,768 tokens at once would be the largest array by far.
_LONG: dict[str, Any] = {"num_vocab_tiling": 8}
_SAVED, _MLP_AGAIN = "minimal_with_context", "save_dot_with_context_except_mlp"
_EXPERTS = {
    "decoder_block": "mixtral",
    "vocab_size": 32000,
    "emb_dim": 1024,
    "num_decoder_layers": 16,
    "num_query_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_mlp_dim": 1792,
    "max_target_length": 4096,
    "remat_policy": "full",
}
_TINY = {"max_target_length": 64, "remat_policy": "full"}

BENCHMARKS: Mapping[str, Benchmark] = {
    "tiny": Benchmark(parameters=771e3, batches=(2,), settings=_TINY),
    "tiny-moe": Benchmark(
        parameters=3.38e6,
        batches=(2,),
        settings={
            **_TINY,
            "decoder_block": "mixtral",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_mlp_dim": 512,
        },
    ),
    "tiny-split": _split(
        Benchmark(
            parameters=771e3, batches=(2,), settings={**_TINY, "max_target_length": 512, **_LONG}
        )
    ),
    "gpt2-124m": _model(
        "gpt2-124m",
        124e6,
        (32, 16, 8, 4),
        1024,
        tuple(_unrolled(batch, "none") for batch in (64, 32, 16, 8, 4)),
        remat_policy="minimal",
    ),
    "llama3.2-1b": _model(
        "llama3.2-1b",
        1.24e9,
        (8, 4, 2, 1),
        4096,
        (
            _unrolled(8, _SAVED),
            _unrolled(8, _MLP_AGAIN, **_LONG),
            *(_unrolled(batch, _SAVED) for batch in (4, 2, 1)),
        ),
    ),
    "llama3-8b": _model(
        "llama3-8b",
        8.03e9,
        (4, 2, 1),
        4096,
        (
            _unrolled(2, _MLP_AGAIN, **_LONG),
            _unrolled(1, _SAVED, **_LONG),
            _unrolled(1, "full", **_LONG),
        ),
    ),
    "moe-1.5b": Benchmark(
        parameters=1.49e9,
        batches=(8, 4, 2, 1),
        settings=_EXPERTS,
        tuned=tuple(_unrolled(batch, _SAVED) for batch in (8, 4, 2, 1)),
    ),
    "mixtral-8x7b": _model("mixtral-8x7b", 46.7e9, (4, 2, 1), 4096),
    "llama3.2-1b-32k": _model(
        "llama3.2-1b",
        1.24e9,
        (1,),
        32768,
        tuple(_unrolled(1, policy) for policy in (_SAVED, _MLP_AGAIN, "full")),
        **_LONG,
    ),
    "llama3-8b-32k": _model("llama3-8b", 8.03e9, (1,), 32768, **_LONG),
    "llama3.2-1b-64k-split": _split(_model("llama3.2-1b", 1.24e9, (1,), 65536, **_LONG)),
    "llama3.1-8b-128k-split": _split(_model("llama3.1-8b", 8.03e9, (1,), 131072, **_LONG)),
}
STANDARD = ("gpt2-124m", "llama3.2-1b", "llama3-8b", "moe-1.5b", "llama3.2-1b-32k")
