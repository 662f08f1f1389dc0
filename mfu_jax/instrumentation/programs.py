"""The programs of one step: determines which one a call ran; counts each in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from mfu_jax.instrumentation.counts import StepFlops
from mfu_jax.instrumentation.outputs import Selection
from mfu_jax.instrumentation.program_analysis import ProgramAnalysis
from mfu_jax.instrumentation.signatures import Signature, SignatureTable
from mfu_jax.logger.timing.compile_events import CompileEvent, CompileLog
from mfu_jax.util.failsafe import Boundary


class StepProgram(NamedTuple):
    """The analysis of one program of a step, and how metrics are read from its output.

    Attributes:
        analysis: its cost; None if the analysis failed.
        selection: which outputs are metrics.
    """

    analysis: ProgramAnalysis | None
    selection: Selection


class BeforeCall(NamedTuple):
    """What was known before a call.

    Attributes:
        compile_count: number of compilations on its thread.
        added: number of known programs.
    """

    compile_count: int
    added: int


class StepPrograms:
    """Determines which program a call ran, if possible without looking at its arguments.

    A call that compiled something ran a new program. Any other call repeated the last program if
    only one is known; only if several are known do the arguments decide.

    Args:
        compile_log: reports compilations.
        boundary: where failures are reported.
        has_earlier_programs: the step was compiled before it was instrumented, so a call can run
            a program whose compilation was not observed.

    Attributes:
        is_ambiguous: a call may have run a program other than the last one.
        functions: JAX's names of what was compiled in calls of the step.
        added: number of known programs.
        lock: held during the analysis of a new program, so that only one of several calls does it.
    """

    def __init__(
        self, compile_log: CompileLog, boundary: Boundary, *, has_earlier_programs: bool
    ) -> None:
        self.is_ambiguous = True
        self.functions: set[str] = set()
        self.added = 0
        self.lock = threading.RLock()
        self._boundary = boundary
        self._known: SignatureTable[StepProgram] = SignatureTable(whole=has_earlier_programs)
        self._signature: Signature | None = None
        self._compile_counts: dict[int, int] = {}  # by ids of threads that have called the step
        self._counting: list[threading.Thread] = []
        self._compile_log = compile_log
        compile_log.subscribe(self._on_compile)

    def begin_call(self) -> BeforeCall:
        """Called on the same thread just before the step."""
        return BeforeCall(self._compile_counts.setdefault(threading.get_ident(), 0), self.added)

    def has_compiled(self, before: BeforeCall) -> bool:
        """Whether the call on this thread has compiled something."""
        return self._compile_counts.get(threading.get_ident(), 0) != before.compile_count

    def look_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepProgram | None:
        """The program of these arguments; None if unknown."""
        return self._known.find(args, kwargs)

    def known(self, signature: Signature) -> StepProgram | None:
        """The program of this signature; None if unknown."""
        return self._known.get(signature)

    def add(self, signature: Signature, program: StepProgram) -> list[str] | None:
        """Adds the program that has just run for the first time.

        Returns:
            What changed since the program before it was added; None for the first program.
        """
        self.added += 1
        before, self._signature = self._signature, signature
        self._known.add(signature, program)
        self.is_ambiguous = self._known.is_ambiguous
        if before is None:
            return None
        analysis = program.analysis
        numbers_are_traced = analysis is not None and analysis.takes_all_leaves
        return before.differences(signature, numbers_are_traced=numbers_are_traced)

    def count(self, program: ProgramAnalysis, name: str, then: Callable[[StepFlops], None]) -> None:
        """Counts a program on its own thread, then calls `then` there with the count."""
        thread = self._boundary.thread(
            f"mfu_jax count {name}",
            f"HFU of {name} is not known",
            _count,
            program,
            then,
            daemon=False,  # a count that runs when the interpreter ends would abort it
        )
        program.counted_on(thread)
        self._counting = [t for t in self._counting if t.is_alive()] + [thread]
        thread.start()

    def close(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for each count; stops observing compilations."""
        for thread in self._counting:
            thread.join(timeout)
        self._compile_log.unsubscribe(self._on_compile)

    def _on_compile(self, event: CompileEvent) -> None:
        if event.stage == "compile" and event.thread_id in self._compile_counts:
            self._compile_counts[event.thread_id] += 1
            self.functions.add(event.function)


def _count(program: ProgramAnalysis, then: Callable[[StepFlops], None]) -> None:
    flops = program.count()
    if flops is not None:
        then(flops)
