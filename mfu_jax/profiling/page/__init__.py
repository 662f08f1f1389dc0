"""Profiles as self-contained HTML pages: no network, no server."""

from mfu_jax.profiling.page.document import page
from mfu_jax.profiling.page.two_profiles import page_of_two

__all__ = ["page", "page_of_two"]
