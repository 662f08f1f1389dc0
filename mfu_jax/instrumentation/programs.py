"""The programs of one step: which of them a call ran, and the count of each in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.outputs import Selection
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.instrumentation.signatures import Signature, SignatureTable
from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog


class StepProgram(NamedTuple):
    """What one program of a step costs, and how metrics are read from its output."""

    analysis: ProgramAnalysis
    selection: Selection


class StepPrograms:
    """Tells which program a call ran, if possible without looking at its arguments.

    A call that compiled something ran a new program. Any other call ran the last program again if
    only one is known; only if several are known do the arguments decide.

    Args:
        compile_log: reports compilations.
        has_earlier_programs: the step was compiled before it was instrumented, so a call can run
            a program whose compilation nobody saw.

    Attributes:
        current: the program that ran last.
        is_ambiguous: a call may have run a program other than `current`.
        compile_count: compilations on the thread that called the step last.
    """

    def __init__(self, compile_log: CompileLog, *, has_earlier_programs: bool) -> None:
        self.current: StepProgram | None = None
        self.is_ambiguous = True
        self.compile_count = 0
        self._known: SignatureTable[StepProgram] = SignatureTable(whole=has_earlier_programs)
        self._signature: Signature | None = None
        self._thread_id = threading.get_ident()
        self._counting: list[threading.Thread] = []
        self._compile_log = compile_log
        compile_log.subscribe(self._on_compile)

    def begin_call(self) -> int:
        """Call it on the same thread before the step; returns `compile_count`."""
        self._thread_id = threading.get_ident()
        return self.compile_count

    def look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Makes the program of these arguments the current one; False if unknown."""
        known = None if self.current is None else self._known.find(args, kwargs)
        if known is not None:
            self.current = known
        return known is not None

    def add(self, signature: Signature, program: StepProgram) -> list[str] | None:
        """Adds the program that has just run for the first time.

        Returns:
            What changed since the program before it was added; None for the first program.
        """
        before, self._signature = self._signature, signature
        self.current = program
        self._known.add(signature, program)
        self.is_ambiguous = self._known.is_ambiguous
        return None if before is None else before.differences(signature)

    def count(self, program: ProgramAnalysis, name: str, then: Callable[[StepFlops], None]) -> None:
        """Counts a program on its own thread, then calls `then` there with the count."""

        def run() -> None:
            flops = program.count()
            if flops is not None:
                then(flops)

        thread = threading.Thread(target=run, name=f"mfu_jax count {name}")
        self._counting = [t for t in self._counting if t.is_alive()] + [thread]
        thread.start()

    def close(self, timeout: float) -> None:
        """Waits for the counts, `timeout` seconds for each at most; stops watching compilations."""
        for thread in self._counting:
            thread.join(timeout)
        self._compile_log.unsubscribe(self._on_compile)

    def _on_compile(self, event: CompileEvent) -> None:
        if event.stage == "compile" and event.thread_id == self._thread_id:
            self.compile_count += 1
