"""Counts the matmuls of one forward pass of a PyTorch model on the meta device, by module."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from mfu_jax.errors import UserError
from mfu_jax.flops.exact import Number, integral
from mfu_jax.flops.masks import Causal, Mask, PairCounting, TopK
from mfu_jax.flops.pytorch import attention, models


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
        backward: multiply-adds of the backward pass for each of the forward pass: 2 where both
            operands have gradients, less under no_grad or where no loss depends on the result.
    """

    module: str
    kind: str
    calls: int
    macs: int
    mask: Mask | None = None
    length: int = 0
    backward: Number = 2

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
        "training_flops": integral((1 + part.backward) * forward),
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
            with torch.enable_grad(), _named_modules(model, counter), counter:
                counter.follow(model(**inputs))
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


@dataclass(eq=False)
class _Call:
    """One call of a module; `results` are the autograd nodes of its outputs."""

    name: str = ""
    results: list[Any] = field(default_factory=list)


@dataclass
class _Records:
    """Matmuls in the order run: module call, kind, mask, queries, forward and backward macs."""

    found: list[tuple[_Call, str, Mask | None, int, int, int]] = field(default_factory=list)

    def matmuls(self, reached: set[Any]) -> Iterator[Matmul]:
        """Matmuls by module, kind, mask and queries; only calls in `reached` run backward."""
        sums: dict[tuple[str, str, Mask | None, int], list[int]] = {}
        for call, kind, mask, length, forward, backward in self.found:
            name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", call.name) or "model"
            parts = sums.setdefault((name, kind, mask, length), [0, 0, 0])
            needed = not call.name or not reached.isdisjoint(call.results)
            for i, value in enumerate((1, forward, backward if needed else 0)):
                parts[i] += value
        for (name, kind, mask, length), (calls, macs, backward) in sums.items():
            multiple = integral(Fraction(backward, macs)) if macs else 2
            yield Matmul(
                module=name,
                kind=kind,
                calls=calls,
                macs=macs,
                mask=mask,
                length=length,
                backward=multiple,
            )


def _counter(torch: Any, masks: attention.Masks) -> Any:
    """The dispatch mode that sees every operation; its class can only be defined with torch."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.torch = torch
            self.masks = masks
            self.records = _Records()
            self.calls = [_Call()]
            self.reached: set[Any] = set()
            self.blind: set[str] = set()
            self.unused: list[str] = []

        def matmuls(self) -> tuple[Matmul, ...]:
            return tuple(self.records.matmuls(self.reached))

        def follow(self, output: Any) -> None:
            """Collects the nodes that a gradient of the logits, the first result, flows through."""
            first = next((t for t in _tensors(torch, output) if t.grad_fn is not None), None)
            waiting = [] if first is None else [first.grad_fn]
            while waiting:
                node = waiting.pop()
                if node is not None and node not in self.reached:
                    self.reached.add(node)
                    waiting.extend(below for below, _ in node.next_functions)

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
                added = "add" in func._overloadpacket.__name__  # a bias comes first
                gradients = sum(map(self.differentiated, args[added : added + 2]))
                self.matmul("weight" if any(weights) else "attention", macs, gradients)
            return result

        def differentiated(self, *operands: Any) -> bool:
            return torch.is_grad_enabled() and any(part.requires_grad for part in operands)

        def matmul(self, kind: str, macs: int, gradients: int) -> None:
            call = self.calls[-1]
            self.records.found.append((call, kind, None, 0, macs, gradients * macs))
            if kind == "attention":
                self.blind.add(re.sub(r"\d+", "*", call.name))

        def attend(
            self, module: Any, query: Any, key: Any, value: Any, mask: Any, others: Any
        ) -> Any:
            """Scores and values of one attention, ``[B, H, S, h]``; returns ``[B, S, H, v]``."""
            batch, heads, queries, width = query.shape
            kept = self.masks.of(mask, module, queries, key.shape[2])
            indices = others.get("indices")  # of the keys that an indexer selected
            if indices is not None and kept == Causal():
                kept = TopK(indices.shape[-1])
            call = self.calls[-1]
            scores, weighted = batch * heads * width, batch * heads * value.shape[-1]
            q, k, v = map(self.differentiated, (query, key, value))
            backward = scores * (q + k) + weighted * ((q or k) + v)
            self.records.found.append(
                (call, "attention", kept, queries, scores + weighted, backward)
            )
            if isinstance(kept, attention.Rectangle) and not kept.known:
                self.blind.add(re.sub(r"\d+", "*", call.name))
            result = query.new_empty(batch, queries, heads, value.shape[-1])
            for part in _tensors(torch, (query, key, value, mask, others)):
                result = result + part.sum() if part.requires_grad else result  # depends on it
            return result

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
        return counter.attend(module, query, key, value, attention_mask, others), None

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
            counter.calls.append(_Call(name))
            ran.add(name)

        return note

    def leave(module: Any, inputs: Any, outputs: Any) -> None:
        results = counter.calls.pop().results
        results.extend(t.grad_fn for t in _tensors(counter.torch, outputs) if t.grad_fn)

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
