"""An interrupt during the logger's own wait, kept until the loop can handle it."""

from __future__ import annotations

import threading

from mfu_jax.util.failsafe import is_interrupt


class KeptInterrupt:
    """Ctrl-C, or another exception raised by a signal, while the loop waited inside the logger.

    Raised at once, it would lose the step being recorded; raised from an instrumented call, it
    would lose the call's outputs, and the state donated for them.

    Attributes:
        kept: the exception, and the id of the thread it is for; None if there is none.
    """

    def __init__(self) -> None:
        self.kept: tuple[BaseException, int] | None = None

    def keep(self, error: BaseException) -> bool:
        """Keeps `error` for this thread; False if it is not an interrupt."""
        if not is_interrupt(error):
            return False
        self.kept = error, threading.get_ident()
        return True

    def throw(self) -> None:
        """Raises what was kept for this thread, if anything was."""
        if self.kept is not None and self.kept[1] == threading.get_ident():
            error, self.kept = self.kept[0], None
            raise error
