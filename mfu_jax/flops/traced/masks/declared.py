"""`attention_mask`: declares which pairs attention needs, if the trace does not show it.

A declaration is a named scope. Scope names survive differentiation, scan and jit, and thus reach
the jaxpr of the traced function.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Literal, get_args

import jax

from mfu_jax.errors import UserError
from mfu_jax.flops.traced.masks.pairs import Band, KeptPairs, kept_pairs
from mfu_jax.util.attributes import temporarily

MaskKind = Literal["causal", "full", "documents", "causal_documents"]
PACKED = ("documents", "causal_documents")

_KINDS = "|".join(sorted(get_args(MaskKind), reverse=True))  # longer names before their prefixes
_MARKER = re.compile(rf"attention_mask\.({_KINDS})(?:\.(\d+))?")


class _DeclaringThread(threading.local):
    declared = ""


_this_thread = _DeclaringThread()


@contextlib.contextmanager
def attention_mask(kind: MaskKind, *, window: int | None = None) -> Iterator[None]:
    """Tells the traced count which pairs are needed by the attention traced inside it.

    For attention whose mask the trace does not show: a mask that is an argument of the step, or a
    custom kernel. Put it around the attention in the model, or around `count_model_flops`. It also
    works as a decorator.

    Args:
        kind: ``causal``, ``full``, or ``documents`` for several documents packed into a row, whose
            pairs differ from batch to batch; see `document_pairs`. ``causal_documents``: within
            each document, a query sees only the keys up to its own position.
        window: number of keys that a query sees, including its own.

    Raises:
        UserError: the kind is unknown, or the window is not a positive int.

    >>> with attention_mask("causal", window=128):
    ...     pass  # y = my_attention(q, k, v)
    """
    if kind not in get_args(MaskKind):
        raise UserError(
            f"attention_mask got {kind!r}; expected 'causal', 'full', 'documents' or "
            "'causal_documents'",
            hint="a window is a separate argument: attention_mask('causal', window=128)",
        )
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UserError(
            f"attention_mask got window={window!r}; expected a positive int: how many keys a "
            "query sees, itself included",
            hint="leave it out for no window",
        )
    name = f"attention_mask.{kind}" + (f".{window}" if window else "")
    with temporarily(_this_thread, declared=name), jax.named_scope(name):
        yield


def declared_pairs(name_stack: str, queries: int, keys: int) -> KeptPairs | None:
    """What the innermost `attention_mask` in a name stack keeps of queries × keys, or None."""
    matches = _MARKER.findall(name_stack)
    if not matches:
        return None
    kind, window = matches[-1]
    band = Band(0) if kind == "causal" else Band()
    if window:
        band = Band(0 if kind.startswith("causal") else 1 - int(window), int(window) - 1)
    kept = kept_pairs(band, queries, keys)._replace(declared=True)
    return kept._replace(label=kind) if kind in PACKED or band == Band() else kept


def pairs_around(queries: int, keys: int) -> KeptPairs | None:
    """The same of the `attention_mask` around this thread's trace."""
    return declared_pairs(_this_thread.declared, queries, keys)
