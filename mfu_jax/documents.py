"""Packed documents: how many query-key pairs a batch of several documents a row really has.

Public names; where they are defined may change (docs/masks.md).
"""

from mfu_jax.flops.traced.masks.pairs import document_pairs, read_pairs

__all__ = ["document_pairs", "read_pairs"]
