"""Counts the matmuls of one forward pass of a PyTorch model on the meta device, by module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import Causal, Mask, PairCounting, TopK
from mfu_jax.flops.pytorch import attention, models

# A weight matmul has two gradients, and so has an attention matmul.
_TRAINING = 3


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """Matmuls of one module, or of the same module in every layer.

    Attributes:
        module: its name in the model; ``*`` stands for a layer's number.
        kind: ``weight`` if an operand depends on weights alone, else ``attention``.
        calls: number of calls counted together.
        macs: multiply-adds of one sequence, or per pair if there is a mask.
        mask: the pairs of an attention; None: everything that runs is counted.
        length: number of queries.
    """

    module: str
    kind: str
    calls: int
    macs: int
    mask: Mask | None = None
    length: int = 0

    def forward_flops(self, counting: PairCounting) -> Number:
        """FLOPs of one sequence's forward pass."""
        if self.mask is None:
            return 2 * self.macs
        return integral(2 * self.macs * self.mask.pairs(self.length, counting))


@dataclass(frozen=True, kw_only=True)
class PyTorchCount:
    """The matmuls of one sequence in a model.

    Attributes:
        model_class: the transformers class.
        parameters: number of weights; `embedding`: those in lookup tables.
        matmuls: in order of first execution.
        notes: what was assumed.
    """

    model_class: str
    parameters: int
    embedding: int
    matmuls: tuple[Matmul, ...]
    notes: tuple[str, ...]

    def rows(self, sequences: Number, counting: PairCounting) -> list[dict[str, Any]]:
        """Rows of `mfu-jax flops`: FLOPs of `sequences` by kind of module."""
        return [
            _row(part, integral(part.forward_flops(counting) * sequences)) for part in self.matmuls
        ]


def _row(part: Matmul, forward: Number) -> dict[str, Any]:
    layer, _, component = part.module.rpartition(".*.")
    return {
        "layer": f"{layer}.*" if layer else "model",
        "component": component,
        "kind": part.kind,
        "repeats": part.calls,
        "forward_flops": forward,
        "training_flops": _TRAINING * forward,
    }


def count_pytorch_model(config: Mapping[str, Any], length: int) -> PyTorchCount:
    """Builds the model of a ``config.json`` on the meta device and counts one sequence.

    Args:
        config: the file's content.
        length: tokens of the sequence, and of an encoder-decoder's source sequence.

    Raises:
        UserError: torch or transformers is missing, the model is remote code, it cannot be built,
            or its code depends on values.
    """
    torch, _ = models.imported()
    chunk = _chunk_size(config)
    counter = _counter(torch, attention.Masks(torch, chunk))
    with _as_attention(counter):
        model = models.build(config, attention.NAME)
        tokens = torch.ones(1, length, dtype=torch.long, device="meta")
        inputs = {"input_ids": tokens}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens
        try:
            with torch.no_grad(), _named_modules(model, counter), counter:
                model(**inputs)
        except UserError:
            raise
        except Exception as error:
            raise models.cannot_run(str(config.get("model_type")), error) from error
    return PyTorchCount(
        model_class=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=_table_size(torch, model),
        matmuls=counter.matmuls(),
        notes=tuple(_notes(model, counter)),
    )


def _chunk_size(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    source = nested if isinstance(nested, Mapping) else config
    size = source.get("attention_chunk_size")
    return size if isinstance(size, int) else 0


def _table_size(torch: Any, model: Any) -> int:
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(weight.numel() for weight in tables)


def _notes(model: Any, counter: Any) -> Iterator[str]:
    yield f"counted from {type(model).__name__} of PyTorch, run on the meta device"
    if counter.blind:
        yield (
            f"matmuls of two activations in {', '.join(sorted(counter.blind))} count as they run, "
            f"masked or not"
        )
    if counter.unused:
        yield f"text only: {', '.join(counter.unused)} did not run"


@dataclass
class _Records:
    """Matmuls by module, kind, mask and number of queries."""

    found: dict[tuple[str, str, Mask | None, int], list[int]] = field(default_factory=dict)

    def add(self, module: str, kind: str, macs: int, mask: Mask | None, length: int) -> None:
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", module) or "model"
        sums = self.found.setdefault((name, kind, mask, length), [0, 0])
        sums[0] += 1
        sums[1] += macs


def _counter(torch: Any, masks: attention.Masks) -> Any:
    """The dispatch mode that sees every operation; its class can only be defined with torch."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.masks = masks
            self.records = _Records()
            self.modules: list[str] = []
            self.blind: set[str] = set()
            self.unused: list[str] = []

        def matmuls(self) -> tuple[Matmul, ...]:
            return tuple(
                Matmul(module=name, kind=kind, calls=calls, macs=macs, mask=mask, length=length)
                for (name, kind, mask, length), (calls, macs) in self.records.found.items()
            )

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = list(_tensors(torch, (args, kwargs)))
            weights = [_is_weight(torch, tensor) for tensor in tensors]
            if tensors and all(weights) and not _looks_up(func, tensors[0]):
                for made in _tensors(torch, result):
                    made.of_weights = True
            if formula := flop_registry.get(func._overloadpacket):
                macs = formula(*args, **(kwargs or {}), out_val=result) // 2
                self.matmul("weight" if any(weights) else "attention", macs)
            return result

        def matmul(self, kind: str, macs: int) -> None:
            module = self.modules[-1] if self.modules else ""
            self.records.add(module, kind, macs, None, 0)
            if kind == "attention":
                self.blind.add(re.sub(r"\d+", "*", module))

        def attend(
            self, module: Any, query: Any, key: Any, value: Any, mask: Any, indices: Any
        ) -> Any:
            """Scores and values of one attention, ``[B, H, S, h]``; returns ``[B, S, H, v]``."""
            batch, heads, queries, width = query.shape
            kept = self.masks.of(mask, module, queries, key.shape[2])
            if indices is not None and kept == Causal():
                kept = TopK(indices.shape[-1])
            name = self.modules[-1] if self.modules else ""
            macs = batch * heads * (width + value.shape[-1])
            self.records.add(name, "attention", macs, kept, queries)
            if isinstance(kept, attention.Rectangle) and not kept.known:
                self.blind.add(re.sub(r"\d+", "*", name))
            return query.new_empty(batch, queries, heads, value.shape[-1])

    return Counter()


def _tensors(torch: Any, values: Any) -> Iterator[Any]:
    """Every float tensor in nested arguments: indices select weights without changing them."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        yield from _tensors(torch, tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(torch, value)


def _is_weight(torch: Any, tensor: Any) -> bool:
    """Whether it is a parameter, or computed from parameters alone."""
    return isinstance(tensor, torch.nn.Parameter) or getattr(tensor, "of_weights", False)


# A matrix row looked up per token is an activation; a matrix looked up per expert is a weight.
_LOOKUPS = ("embedding", "index", "index_select", "gather")


def _looks_up(func: Any, table: Any) -> bool:
    return func._overloadpacket.__name__ in _LOOKUPS and table.dim() <= 2


@contextmanager
def _as_attention(counter: Any) -> Iterator[None]:
    """Registers the counter as an attention function of transformers."""
    from transformers import masking_utils, modeling_utils

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **others: Any
    ) -> tuple[Any, None]:
        indices = others.get("indices")  # indices of the keys that an indexer selected
        return counter.attend(module, query, key, value, attention_mask, indices), None

    functions = modeling_utils.AttentionInterface._global_mapping
    masks = masking_utils.AttentionMaskInterface._global_mapping
    eager, packed = masks["eager"], masking_utils.find_packed_sequence_indices
    modeling_utils.AttentionInterface.register(attention.NAME, attend)
    masking_utils.AttentionMaskInterface.register(attention.NAME, counter.masks.make)
    masking_utils.AttentionMaskInterface.register("eager", counter.masks.make)
    # It reads position ids, which have no values here; nothing is packed.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        del functions[attention.NAME], masks[attention.NAME]
        masks["eager"] = eager
        masking_utils.find_packed_sequence_indices = packed


@contextmanager
def _named_modules(model: Any, counter: Any) -> Iterator[None]:
    """Tells the counter which module is running, and at the end which towers did not run."""
    hooks, ran = [], set()

    def enter(name: str) -> Any:
        def note(*_: Any) -> None:
            counter.modules.append(name)
            ran.add(name)

        return note

    def leave(*_: Any) -> None:
        counter.modules.pop()

    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    counter.unused = [
        name
        for name, module in model.named_modules()
        if name not in ran
        and hasattr(module, "config")
        and any(True for _ in module.parameters())
        and not any(other.startswith(f"{name}.") for other in ran)
    ]
