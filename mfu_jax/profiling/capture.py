"""`mfu_jax.profile`: a device trace and the program that ran, in one folder."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import jax

from mfu_jax.dumps.recording import dump
from mfu_jax.errors import UserError
from mfu_jax.flops.traced.counting import count_model_flops, pallas_kernel_flops
from mfu_jax.storage.trace_folders import dump_path, make_sessions, move_to_sessions, own_folder
from mfu_jax.util.failsafe import failsafe


@contextlib.contextmanager
def profile(
    folder: str | os.PathLike[str], step: Any = None, /, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Traces the devices inside the ``with`` block, for ``mfu-jax profile FOLDER``.

    On entry and on exit it waits for every live array: keep a reference to the last output, or
    the trace ends before the steps do. Then it writes the program of `step` beside the trace, with
    its model FLOPs and its mesh. Without `step`, the trace's own copy of each program is used, and
    model FLOPs are those of the program's forward and backward pass.

    Args:
        folder: a local folder; the trace becomes a new session in its ``plugins/profile/``, with
            the traces of all processes of the job if they share the folder.
        step: the jitted step, or the result of ``.lower(…).compile()``.
        *args: the step's arguments, donated or not, unless `step` is compiled.
        **kwargs: the same by name.

    Raises:
        UserError: `step` is not jitted, or takes other arguments; or the folder cannot be written.

    >>> with mfu_jax.profile("traces", step, state, batch):  # doctest: +SKIP
    ...     for _ in range(5):
    ...         state, loss = step(state, batch)
    """
    if step is not None and not (hasattr(step, "lower") or hasattr(step, "as_text")):
        raise UserError(
            f"profile of {step!r}: expected a jitted step, or a compiled one",
            hint="usually jax.jit is missing; pass jax.jit(step) and its arguments, or leave "
            "it out",
        )
    if step is not None and not hasattr(step, "as_text"):
        _check_arguments(step, args, kwargs)
    process, is_alone = jax.process_index(), jax.process_count() == 1
    _wait_for_devices()  # work started before, such as initialisation, is not the step's
    own = os.fspath(folder) if is_alone else os.fspath(own_folder(folder, process))
    try:
        make_sessions(own)  # the profiler makes them when it stops, and stays on if that fails
        jax.profiler.start_trace(own)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"a trace to {os.fspath(folder)!r} does not start ({error})",
            hint="usually another profiler runs, or the folder cannot be written",
        ) from None
    try:
        yield
    finally:
        _wait_for_devices()
        with failsafe("there is no device trace"):
            jax.profiler.stop_trace()
        if not is_alone:
            with failsafe("this process' trace is not beside the others'"):
                move_to_sessions(folder, process)
        if step is not None:
            missing = "the program is not beside the trace, model FLOPs are the program's own"
            with failsafe(missing):
                _dump(folder, step, args, kwargs)


def _check_arguments(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(step).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(
            f"profile of {getattr(step, '__name__', step)}: {error}",
            hint="pass the arguments that the loop calls it with after the step, or leave it out",
        ) from None
    except ValueError:  # no signature to check
        return


def _wait_for_devices() -> None:
    """Waits for work in flight, which would otherwise be cut off when the trace ends."""
    for array in jax.live_arrays():
        with contextlib.suppress(jax.errors.JaxRuntimeError, RuntimeError):  # deleted, or failed
            array.block_until_ready()


def _dump(
    folder: str | os.PathLike[str], step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if jax.process_index() != 0:
        return
    name = getattr(step, "__name__", "step")
    if hasattr(step, "as_text"):
        dump(step, dump_path(folder, name))
        return
    compiled = step.lower(*args, **kwargs).compile()
    on_cpu = jax.default_backend() == "cpu"  # CPUs run no kernels as custom calls
    dump(
        compiled,
        dump_path(folder, name),
        model=count_model_flops(step, *args, **kwargs),
        kernel_flops=None if on_cpu else pallas_kernel_flops(step, *args, **kwargs),
    )
