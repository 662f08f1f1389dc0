"""Runs as one HTML page that needs nothing else: no network, no server."""

from mfu_jax.runs.page.document import page

__all__ = ["page"]
