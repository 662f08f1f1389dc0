"""An interrupt of the logger's own wait, kept until the loop can take it."""

from __future__ import annotations

import threading

from mfu_jax.boundary import is_interrupt


class KeptInterrupt:
    """Ctrl-C, or what else a signal raised, while the loop waited inside the logger.

    Raised at once, it would cost the step being recorded; raised out of an instrumented call, its
    outputs, and the state that was donated for them.

    Attributes:
        kept: it, and the thread that it is for.
    """

    def __init__(self) -> None:
        self.kept: tuple[BaseException, int] | None = None

    def keep(self, error: BaseException) -> bool:
        """Keeps it for this thread; False if it is no interrupt."""
        if not is_interrupt(error):
            return False
        self.kept = error, threading.get_ident()
        return True

    def throw(self) -> None:
        """Raises what was kept for this thread, if anything was."""
        if self.kept is not None and self.kept[1] == threading.get_ident():
            error, self.kept = self.kept[0], None
            raise error
