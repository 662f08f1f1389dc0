"""Counts PyTorch models of transformers: rows of tests/data/hf_defaults.json and hf_variants.json.

    python -m tests.support.count_hugging_face llama mixtral  # default configs, 2 × 1024
    python -m tests.support.count_hugging_face < x.jsonl  # {"model_type": …, "config": …}

Needs torch and transformers. Models are built on the meta device and counted by torch's own
flop_counter, with eager attention (all S² pairs) and only the experts that a token uses. Imports
nothing from mfu_jax: these numbers check it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def main() -> None:
    """Prints one JSON object per line; a model that cannot be counted has an ``error``."""
    names = sys.argv[1:]
    rows = [{"model_type": name, "batch": 2, "seq": 1024} for name in names]
    for row in rows or map(json.loads, sys.stdin):
        try:
            print(json.dumps(counted({"batch": 2, "seq": 24, **row})), flush=True)
        except Exception as error:  # later models may still be counted
            text = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps({**row, "error": text}), flush=True)


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with forward_flops, num_params and class of the real model."""
    config = AutoConfig.for_model(row["model_type"], **row.get("config", {}))
    config.use_cache = False
    with torch.device("meta"):
        model = build(config).eval()
        tokens = torch.ones(row["batch"], row["seq"], dtype=torch.long)
    flops, convolutions, scans = forward_flops(model, tokens)
    return {
        **row,
        "forward_flops": flops,
        "num_params": sum(parameter.numel() for parameter in model.parameters()),
        "class": type(model).__name__,
        **({"convolution_flops": convolutions} if convolutions else {}),
        **({"scan_flops": scans} if scans else {}),
    }


def _any_mask(batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
    """A mask of the right shape: meta tensors have no values."""
    return torch.zeros(batch_size, 1, q_length, kv_length, device="meta", dtype=torch.float32)


masking_utils.AttentionMaskInterface.register("eager", _any_mask)
masking_utils.find_packed_sequence_indices = lambda position_ids: None  # reads values


def build(config: Any) -> Any:
    """Builds the class that AutoModelForCausalLM selects, with eager attention."""
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            return AutoModelForCausalLM.from_config(config, **options)
        except (TypeError, ValueError) as error:
            if "experts" not in str(error):
                raise
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    raise ValueError("no class with a causal language-model head")


def forward_flops(model: Any, tokens: Any) -> tuple[int, int, int]:
    """FLOPs of one forward pass: total, of depthwise convolutions, of chunked scans."""
    counter = _Counter()
    with torch.no_grad(), _scans(model, counter), counter:
        model(input_ids=tokens)
    return counter.total, counter.convolutions, counter.scans


class _Counter(TorchDispatchMode):
    """Sums torch's own formulas over every operation that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.convolutions = self.scans = 0
        self.in_scan = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func._overloadpacket):
            flops = formula(*args, **(kwargs or {}), out_val=result)
            self.total += flops
            projection = func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            self.scans += flops if self.in_scan and not projection else 0
            depthwise = func._overloadpacket == torch.ops.aten.convolution and args[8] > 1
            self.convolutions += flops if depthwise else 0
        return result


@contextmanager
def _scans(model: Any, counter: _Counter) -> Iterator[None]:
    """Tells the counter when a chunked scan runs, in any model."""
    found: list[tuple[Any, str, Any]] = [
        (module, name, value)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("transformers.models.")
        for name, value in list(vars(module).items())
        if re.search("chunk_gated_delta_rule|chunk_kimi_delta|chunk_scan", name) and callable(value)
    ]
    # MiniMax implements its scan in the layer itself.
    kinds: set[Any] = {type(module) for module in model.modules()}
    layers = [kind for kind in kinds if "LightningAttention" in kind.__name__]
    found += [(kind, "forward", kind.forward) for kind in layers]
    for module, name, function in found:
        setattr(module, name, _marked(function, counter))
    try:
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


def _marked(function: Any, counter: _Counter) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        before, counter.in_scan = counter.in_scan, True
        try:
            return function(*args, **kwargs)
        finally:
            counter.in_scan = before

    return run


if __name__ == "__main__":
    main()
