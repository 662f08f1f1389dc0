"""`mfu_jax.tune`: the fastest settings of any step, each tried in a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mfu_jax.errors import UserError, first_line
from mfu_jax.planning.tune.attached_devices import attached
from mfu_jax.planning.tune.evidence import Trial, TrialLog, unmeasured
from mfu_jax.planning.tune.result import TuneResult
from mfu_jax.planning.tune.running import Tuning
from mfu_jax.planning.tune.running import tune as search
from mfu_jax.planning.tune.space import Point, SearchAxis, Space, seconds_of
from mfu_jax.util.child_process import last_line

_ROUNDS, _WARMUP = 3, 2
_EXIT_SECONDS = 30.0  # for a child to end that has answered, whatever threads it has

MakeStep = Callable[..., tuple[Any, ...]]


def tune(
    make_step: MakeStep,
    settings: Mapping[str, Sequence[Any]],
    *,
    start: Mapping[str, Any] | None = None,
    items: Callable[..., float] | None = None,
    budget: str | float = "10min",
    steps: int = 6,
    runs: int | None = None,
    in_process: bool = False,
    evidence: str | Path | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda line: None,
) -> TuneResult:
    """Finds the fastest settings of your own step, with fewer runs than there are combinations.

    Args:
        make_step: called with one value of each setting by name; returns the step and its
            arguments: ``(step, state, batch)``. The step is called with them; if its result, or
            the first of its results, is shaped like the first argument, it replaces it, as a
            donated state has to be.
        settings: name → the values to choose from.
        start: where to begin, name → value; default: the first value of each.
        items: called as `make_step`; what a step processes, such as tokens, if that depends on the
            settings. The speed is items, else steps, per second.
        budget: no run starts that would end later: ``10min``, ``2h``, or seconds.
        steps: measured steps of a run, after two for compiling and warming up. They run in three
            rounds without waiting in between; the median round counts.
        runs: at most so many; None: until none is expected to be faster.
        in_process: runs in this process, for functions that a child process cannot import (of a
            notebook, or nested ones). Memory of earlier runs may then remain, and a crash is yours.
        evidence: file that keeps the runs: the same call goes on from there. None: none is kept.
        seed: of ties.
        progress: called with a line for each run.

    Returns:
        The result: `settings` is the fastest combination, `rows` has every run, with
        ``step_time_seconds`` and ``memory_peak_bytes`` of a device. ``print`` shows all of it.

    Raises:
        UserError: there is nothing to choose, or a child process cannot import `make_step`.

    Running out of memory and crashes are results, too: the search avoids such settings. Child
    processes are spawned, so a script needs ``if __name__ == "__main__":`` around the call.

    >>> import jax, jax.numpy as jnp
    >>> def make_step(size, unroll):
    ...     return jax.jit(lambda x: x @ x), jnp.ones((size, size))
    >>> result = tune(make_step, {"size": [8, 512], "unroll": [1, 2]}, in_process=True)
    >>> result.settings["size"]
    8
    """
    if unknown := sorted({*(start or {})} - {*settings}):
        raise UserError(f"start={start!r}: {unknown[0]!r} is none of the settings")
    space = Space([_axis(name, values, start or {}) for name, values in settings.items()])
    if steps < 1:
        raise UserError(f"steps={steps}; expected 1 or more")
    if not in_process:
        _check_importable(make_step)

    def run(point: Point, seconds: float) -> Trial:
        chosen = space.settings(point)
        if in_process:
            trial = _tried(make_step, chosen, steps)
        else:
            trial = _tried_in_child(make_step, chosen, steps, seconds)
        took = trial.step_time_seconds
        rate = items(**chosen) / took if items and took else None
        return dataclasses.replace(trial, tokens_per_sec_per_chip=rate)

    path = None if evidence is None else Path(evidence)
    about = _about(make_step, in_process) if path else {}
    with contextlib.closing(TrialLog(path, about)) as kept:
        return search(
            Tuning(
                target=getattr(make_step, "__name__", "step"),
                space=space,
                flags=lambda point: [f"{k}={v!r}" for k, v in space.settings(point).items()],
                unit="items/s" if items else "steps/s",
                run=run,
                budget_seconds=seconds_of(budget) if isinstance(budget, str) else budget,
                most_runs=runs,
                steps=steps + _WARMUP,
                seed=seed,
            ),
            kept,
            progress,
        )


def _about(make_step: MakeStep, in_process: bool) -> dict[str, str]:
    """What all trials have in common. Devices that child processes need are not opened here."""
    import jax

    local = jax.local_devices if in_process else None
    devices = f"{len(local())} × {local()[0].device_kind}" if local else str(attached())
    return {"step": _named(make_step), "jax": jax.__version__, "devices": devices}


def _axis(name: str, values: Sequence[Any], start: Mapping[str, Any]) -> SearchAxis:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(
            f"settings[{name!r}] = {values!r}: expected a list of values",
            hint=f"usually a single value without brackets; pass [{values!r}]",
        )
    values = list(values)
    if not values or (name in start and start[name] not in values):
        raise UserError(
            f"settings[{name!r}] = {values}: expected values, with start[{name!r}] among them"
        )
    if len({*map(str, values)}) < len(values):
        raise UserError(f"settings[{name!r}] = {values}: expected values that differ as text")
    return SearchAxis(
        name=name,
        choices={str(value): {name: value} for value in values},
        start=values.index(start[name]) if name in start else 0,
    )


def _named(make_step: MakeStep) -> str:
    """Where it is defined; of a partial, with its arguments."""
    if isinstance(make_step, functools.partial):
        return f"{_named(make_step.func)} of {make_step.args} {make_step.keywords}"
    named = make_step if hasattr(make_step, "__qualname__") else type(make_step)
    return f"{named.__module__}.{named.__qualname__}"


def _check_importable(make_step: MakeStep) -> None:
    name = _named(make_step)
    is_typed_in = name.startswith("__main__.") and not hasattr(sys.modules["__main__"], "__file__")
    if "<locals>" in name or "<lambda>" in name or is_typed_in:
        raise UserError(
            f"{name} cannot be imported by a child process; expected a function of a module",
            hint="move it to the top of a file, or pass in_process=True",
        )


def _tried(make_step: MakeStep, settings: Mapping[str, Any], steps: int) -> Trial:
    try:
        return _measure(make_step, settings, steps)
    except Exception as error:  # whatever the step raises is an answer
        return unmeasured(f"{type(error).__name__}: {first_line(error)}")


def _tried_in_child(
    make_step: MakeStep, settings: Mapping[str, Any], steps: int, seconds: float
) -> Trial:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(prefix="mfu-jax-tune-") as log, mine:
        child = context.Process(
            target=_child, args=(theirs, log.name, make_step, dict(settings), steps), daemon=True
        )
        child.start()
        theirs.close()
        is_over = mine.poll(min(seconds, 1e6))
        trial: Trial | None = None
        if is_over:
            with contextlib.suppress(EOFError):  # it has crashed
                trial = mine.recv()
            child.join(_EXIT_SECONDS)
        child.kill()
        child.join()
        said = Path(log.name).read_text(encoding="utf-8", errors="replace")
    if trial is not None:
        return trial
    if not is_over:
        return unmeasured(f"not finished after {seconds:.0f} s")
    if child.exitcode == -signal.SIGKILL:
        return unmeasured("out of memory: killed")
    return unmeasured(": ".join(filter(None, [f"exit code {child.exitcode}", last_line(said)])))


def _child(
    answer: Connection, log: str, make_step: MakeStep, settings: dict[str, Any], steps: int
) -> None:
    """Runs in the child process; a crash's last line is in `log`."""
    os.dup2(os.open(log, os.O_WRONLY), 2)
    answer.send(_tried(make_step, settings, steps))


def _measure(make_step: MakeStep, settings: Mapping[str, Any], steps: int) -> Trial:
    """Median seconds of a step, and peak bytes of a device, if known."""
    import jax

    step, *args = make_step(**settings)
    peak = 0
    if hasattr(step, "lower"):
        with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
            memory = step.lower(*args).compile().memory_analysis()
            peak = int(getattr(memory, "peak_memory_in_bytes", 0))

    def seconds_of_each(count: int) -> float:
        result = None
        began = time.perf_counter()
        for _ in range(count):
            result = step(*args)
            _feed_back(args, result)
        jax.block_until_ready(result)
        return (time.perf_counter() - began) / count

    seconds_of_each(_WARMUP)
    rounds = [seconds_of_each(math.ceil(steps / _ROUNDS)) for _ in range(_ROUNDS)]
    stats = jax.local_devices()[0].memory_stats() or {}
    return Trial(
        by="run",
        source="measured",
        fits=True,
        memory_peak_bytes=stats.get("peak_bytes_in_use", peak) or None,
        step_time_seconds=statistics.median(rounds),
    )


def _feed_back(args: list[Any], result: Any) -> None:
    """Puts the new state in the place of the old one, which may have been donated."""
    for found in (result, result[0] if isinstance(result, tuple) and result else None):
        if args and _shapes(found) == _shapes(args[0]):
            args[0] = found
            return


def _shapes(tree: Any) -> Any:
    import jax

    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
