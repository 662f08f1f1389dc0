"""Runs as one self-contained HTML page: no network, no server."""

from mfu_jax.runs.page.document import page

__all__ = ["page"]
