"""Which pairs of query and key an attention mask keeps, and how to tell when JAX does not show it.

A count is ``dense`` unless said otherwise: every pair. Of masks that are seen in the traced
function, or told by `attention_mask`, a `TracedCount` also knows the FLOPs that they save.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from mfu_jax.errors import UserError
from mfu_jax.flops.masks import Causal, Mask, SlidingWindow

MaskKind = Literal["causal", "full", "documents", "causal_documents"]
PACKED = ("documents", "causal_documents")

# Scope names in here survive differentiation, scan and jit, and reach the traced function's jaxpr.
_KINDS = "|".join(sorted(get_args(MaskKind), reverse=True))  # a longer name before its beginning
_MARKER = re.compile(rf"attention_mask\.({_KINDS})(?:\.(\d+))?")
_this_thread = threading.local()


class Band(NamedTuple):
    """Keeps the pairs with low ≤ i − j ≤ high; None is no bound. i indexes the queries.

    >>> Band(0, None).pairs(4, 4)  # causal: 1 + 2 + 3 + 4
    10
    >>> Band(0, 1).pairs(4, 4)  # a window of 2: 1 + 2 + 2 + 2
    7
    """

    low: int | None = None
    high: int | None = None

    def __and__(self, other: Band) -> Band:
        lows = [b for b in (self.low, other.low) if b is not None]
        highs = [b for b in (self.high, other.high) if b is not None]
        return Band(max(lows, default=None), min(highs, default=None))

    def pairs(self, queries: int, keys: int) -> int:
        """How many pairs are kept, one by one."""
        low = 1 - keys if self.low is None else max(self.low, 1 - keys)
        high = queries - 1 if self.high is None else min(self.high, queries - 1)
        return max(0, _pairs_up_to(high, queries, keys) - _pairs_up_to(low - 1, queries, keys))

    def twice_maxtext_pairs(self, queries: int, keys: int) -> int:
        """Twice the pairs as MaxText counts them: S²/2 causal, S·W − W²/2 in a window of W."""
        bounds = sorted(abs(b) for b in self if b is not None)
        mask: Mask | None = None
        if queries == keys and 0 in bounds:
            mask = Causal() if len(bounds) == 1 else SlidingWindow(bounds[-1] + 1)
        return int(2 * mask.pairs(queries, "maxtext")) if mask else 2 * self.pairs(queries, keys)

    def label(self) -> str:
        """``causal``, ``window 128``, or the bounds."""
        if None in self and 0 in self:
            return "causal"
        if 0 in self and None not in self:
            return f"window {max(abs(b) for b in self if b is not None) + 1}"
        return f"{self.low} ≤ query − key ≤ {self.high}"


def _pairs_up_to(bound: int, queries: int, keys: int) -> int:
    """Pairs with i − j ≤ bound: the diagonals −(keys − 1) … bound."""
    total = queries * keys
    if bound >= queries - 1:
        return total
    if bound < 0:
        # i ≤ j + bound: mirrored, the pairs with j − i ≥ −bound
        return total - _pairs_up_to(-bound - 1, keys, queries)
    # Those left out have i ≥ j + bound + 1: queries − 1 − bound of them for j = 0, and so on.
    most = queries - 1 - bound
    fewest = max(0, most - keys)
    return total - (most * (most + 1) - fewest * (fewest + 1)) // 2


@contextlib.contextmanager
def attention_mask(kind: MaskKind, *, window: int | None = None) -> Iterator[None]:
    """Tells the traced count which pairs the attention that is traced in here really needs.

    For attention whose mask cannot be seen: an array that the step is given, a kernel of one's own.
    Put it around the attention in the model, or around `count_model_flops`. Also a decorator.

    Args:
        kind: ``causal``, ``full``, or ``documents``: several of them packed in a row, whose pairs
            each batch has others of; see `document_pairs`. ``causal_documents``: and in each of
            them a query sees the keys up to its own.
        window: how many keys a query sees, itself included.

    Raises:
        UserError: an unknown kind, or a window that is no positive int.

    >>> with attention_mask("causal", window=128):
    ...     pass  # y = my_attention(q, k, v)
    """
    if kind not in get_args(MaskKind):
        raise UserError(
            f"attention_mask got {kind!r}; expected 'causal', 'full', 'documents' or "
            "'causal_documents'; usually a window, which is given apart: "
            "attention_mask('causal', window=128)"
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(
            f"attention_mask got window={window!r}; expected a positive int: how many keys a query "
            "sees, itself included; leave it out for no window"
        )
    name = f"attention_mask.{kind}" + (f".{window}" if window else "")
    before = getattr(_this_thread, "told", None)
    _this_thread.told = name
    try:
        with jax.named_scope(name):
            yield
    finally:
        _this_thread.told = before


class KeptPairs(NamedTuple):
    """How many pairs of a product of scores a mask keeps.

    Attributes:
        label: the mask, in words.
        exact: pairs, counted one by one.
        twice_maxtext: twice the pairs by MaxText's formula (S²/2 may be no whole number).
        of: all pairs.
        told: by `attention_mask`, which is believed rather than what is seen.
    """

    label: str
    exact: int
    twice_maxtext: int
    of: int
    told: bool = False


def kept_pairs(band: Band, queries: int, keys: int) -> KeptPairs:
    """What a mask that was recognised keeps of queries × keys."""
    low, high = band
    band = Band(
        low if low is not None and low > 1 - keys else None,
        high if high is not None and high < queries - 1 else None,
    )
    twice_maxtext = band.twice_maxtext_pairs(queries, keys)
    return KeptPairs(band.label(), band.pairs(queries, keys), twice_maxtext, queries * keys)


class Told(NamedTuple):
    """What `attention_mask` said."""

    kind: MaskKind
    band: Band

    def kept(self, queries: int, keys: int) -> KeptPairs:
        """The pairs of queries × keys that are needed by what was said."""
        kept = kept_pairs(self.band, queries, keys)._replace(told=True)
        is_plain = self.kind in PACKED or self.band == Band()
        return kept._replace(label=self.kind) if is_plain else kept


def told_mask(name_stack: str) -> Told | None:
    """What the innermost `attention_mask` in a name stack said."""
    matches = _MARKER.findall(name_stack)
    if not matches:
        return None
    kind, window = matches[-1]
    if not window:
        return Told(kind, Band(0) if kind == "causal" else Band())
    return Told(kind, Band(0 if kind.startswith("causal") else 1 - int(window), int(window) - 1))


def told_around() -> Told | None:
    """What the `attention_mask` said that this thread is in."""
    return told_mask(getattr(_this_thread, "told", None) or "")


_LIMB = 4096


def document_pairs(
    segment_ids: Any, *, padding_id: int | None = 0, causal: bool = False
) -> jax.Array:
    """The attention pairs of the documents packed into a batch, computed on the device.

    ΣL² over their lengths L; ΣL(L + 1)/2 where attention is causal in each of them.

    Nothing waits for the result: read it with `read_pairs` one step later.

    Args:
        segment_ids: [..., S] ints, equal for the positions of one document, which lie side by side.
        padding_id: the id of positions that hold no token, None if there are none.
        causal: a query sees the keys of its document up to its own.

    Returns:
        A small int32 array for `read_pairs`; the sum itself may not fit 32 bits.

    >>> read_pairs(document_pairs(np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])))
    49
    >>> read_pairs(document_pairs(np.array([[1, 1, 1, 2, 2, 0]]), causal=True))
    9
    """
    ids = jnp.asarray(segment_ids).reshape(-1, np.shape(segment_ids)[-1])

    def of_row(row: jax.Array) -> jax.Array:
        starts = jnp.concatenate([jnp.zeros(1, bool), row[1:] != row[:-1]])
        if causal:
            positions = jnp.arange(row.size)
            keys = positions - jax.lax.cummax(jnp.where(starts, positions, 0)) + 1
        else:
            document = jnp.cumsum(starts)
            keys = jnp.bincount(document, length=row.size)[document]
        if padding_id is not None:
            keys = jnp.where(row == padding_id, 0, keys)
        # Σ over queries of the keys that they see, in two parts that cannot overflow.
        return jnp.stack([jnp.sum(keys // _LIMB), jnp.sum(keys % _LIMB)])

    return jax.vmap(of_row)(ids)


def read_pairs(pairs: jax.Array) -> int:
    """The sum that `document_pairs` computed, as an int; waits until it is there."""
    high, low = np.asarray(pairs, dtype=object).sum(axis=0)
    return int(high) * _LIMB + int(low)
