"""Attention in transformers' models: which pairs the masks keep, without computing scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mfu_jax.flops.exact import Number
from mfu_jax.flops.masks import Causal, Chunked, Full, Mask, SlidingWindow

NAME = "mfu_jax_counted"
_PAIRS = 2**24  # pairs of a mask that are evaluated at a time


@dataclass(frozen=True)
class Rectangle(Mask):
    """A mask over queries of one length and keys of another, given by the number of pairs kept.

    Attributes:
        known: False: the mask's values are not known here, and every pair counts.
    """

    queries: int
    keys: int
    count: int
    known: bool = True

    def kept(self, length: int, exact: bool) -> Number:
        return self.count

    def all_pairs(self, length: int) -> int:
        return self.queries * self.keys


def everything(queries: int, keys: int) -> Rectangle:
    """Every pair, because the mask's values are not known."""
    return Rectangle(queries, keys, queries * keys, known=False)


class Masks:
    """The masks that a model creates in one forward pass, by their tensors' storage."""

    def __init__(self, torch: Any, chunk: int) -> None:
        self._torch = torch
        self._chunk = chunk
        self._known: dict[int, tuple[Any, Mask]] = {}

    def make(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        **_: Any,
    ) -> Any:
        """A mask for transformers, ``[B, 1, Q, K]`` without values; its pairs are counted.

        A mask that depends on the tokens keeps all pairs.
        """
        shape = (batch_size, 1, q_length, kv_length)
        made = self._torch.zeros(shape, device="meta", dtype=self._torch.float32)
        offsets = (int(q_offset), int(kv_offset))
        try:
            kept, widest = self._count(mask_function, q_length, kv_length, offsets)
            mask = self._named(q_length, kv_length, kept, widest)
        except (RuntimeError, NotImplementedError):
            mask = everything(q_length, kv_length)
        # The tensor is kept alive so that no other gets its storage's address.
        self._known[made.untyped_storage()._cdata] = (made, mask)
        return made

    def of(self, tensor: Any, module: Any, queries: int, keys: int) -> Mask:
        """The mask of one attention call; `tensor` may be a view of a mask created here."""
        if tensor is not None:
            if found := self._known.get(tensor.untyped_storage()._cdata):
                return found[1]
            return everything(queries, keys)
        if getattr(module, "is_causal", False) and queries == keys:
            return Causal()
        return Full(keys=keys, queries=queries)

    def _count(
        self, function: Any, queries: int, keys: int, offsets: tuple[int, int]
    ) -> tuple[int, int]:
        """The number of pairs that `function` keeps, and the most keys that one query sees."""
        torch = self._torch
        integers = {"dtype": torch.int32, "device": "cpu"}
        zero = torch.zeros((), **integers)
        columns = torch.arange(keys, **integers)[None, :] + offsets[1]
        kept, widest, step = 0, 0, max(_PAIRS // keys, 1)
        for first in range(0, queries, step):
            rows = torch.arange(first, min(first + step, queries), **integers)[:, None]
            seen = function(zero, zero, rows + offsets[0], columns)
            per_query = torch.broadcast_to(seen, (len(rows), keys)).sum(-1)
            kept, widest = kept + int(per_query.sum()), max(widest, int(per_query.max()))
        return kept, widest

    def _named(self, queries: int, keys: int, kept: int, widest: int) -> Mask:
        """The named mask that keeps this many pairs: `maxtext` rounds each in its own way."""
        candidates: list[Mask] = [Causal(), Full()]
        if widest:
            candidates.append(SlidingWindow(widest))
        if self._chunk:
            candidates.append(Chunked(self._chunk))
        if queries == keys:
            for mask in candidates:
                if mask.pairs(queries, "exact") == kept:
                    return mask
        return Rectangle(queries, keys, kept)
