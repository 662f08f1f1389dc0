"""The whole training job: one loop from top to bottom, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mfu_jax.errors import UserError, two_lines
from mfu_jax.logger.records.non_finite import (
    NON_FINITE_EXIT_CODE,
    NonFiniteLossError,
)
from mfu_jax.logger.run_log.run_log import RunLog
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.trainer.config.pyconfig import Config
from mfu_jax.trainer.data.batches import make_iterator
from mfu_jax.trainer.run.checkpoint import CHECKPOINT_EXIT_CODE, Checkpointer, CheckpointError
from mfu_jax.trainer.run.job import Job
from mfu_jax.trainer.run.run_logger import (
    count_step,
    find_step_peaks,
    lock_run,
    make_run_logger,
    make_run_sinks,
    opened_run_log,
    settings_of,
    step_profile,
)
from mfu_jax.trainer.run.stopping import INTERRUPT_EXIT_CODE, StopRequest
from mfu_jax.trainer.step.mesh import (
    make_mesh,
    own_share,
    put_batch,
    rows_per_process,
    with_mesh_sizes,
)
from mfu_jax.trainer.step.state import (
    TrainState,
    abstract_state,
    check_memory,
    create_state,
    resolve_attention,
)
from mfu_jax.trainer.step.train_step import compile_eval_step, compile_train_step
from mfu_jax.util.formatting import counted


def train(
    config: Config,
    stop: StopRequest,
    job: Job,
    compile_log: CompileLog,
    run_log: RunLog,
) -> None:
    """Trains until `config.steps` optimizer steps are done, or a stop is requested.

    Raises:
        UserError: the config does not fit the machine, the data or the checkpoint.
        NonFiniteLossError: the loss became NaN or infinite.
        CheckpointError: the last checkpoint, or with ``on_checkpoint_error=stop`` any, is missing.
    """
    config = with_mesh_sizes(config)
    mesh = make_mesh(config)
    check_memory(config, jax.local_devices())
    config = resolve_attention(config, mesh)
    peaks = find_step_peaks(config)
    data = _data(config, mesh, "train", config.gradient_accumulation_steps)
    shapes = abstract_state(config, mesh)
    with lock_run(config), Checkpointer(config, run_log) as checkpoints, frozen_gc() as freeze:
        with run_log.span("restore"):
            state = checkpoints.restore(shapes, data)
        state = state or create_state(config, mesh)
        start_step = int(state.step)
        if start_step >= config.steps:
            why = f"the checkpoint of {config.run_name!r} has {counted(start_step, 'step')}"
            print(f"nothing to do: {why if start_step else 'steps=0'}")
            return
        settings = settings_of(config, start_step)
        sinks = make_run_sinks(config, settings)
        evaluate = _evaluator(config, mesh, shapes)
        train_step = compile_train_step(config, mesh, shapes)
        flops = count_step(config, train_step)
        freeze()  # before the logger, whose first step would take longer
        run_logger = make_run_logger(
            config,
            settings,
            flops=flops,
            state=state,
            peaks=peaks,
            sinks=sinks,
            compile_log=compile_log,
            run_log=run_log,
        )
        tracing = step_profile(settings, train_step, flops, peaks)
        with run_logger as logger, job.flushing(logger.flush), tracing:
            for step in range(start_step, config.steps):
                with logger.waiting("data"):
                    batch = put_batch(next(data), mesh)
                with tracing.step(step, logger):
                    state, metrics = train_step(state, batch)
                logger.record(step, metrics)
                done = step + 1
                tracing.after(step, logger, is_last=done == config.steps)
                if config.eval_interval and done % config.eval_interval == 0:
                    with logger.pause("eval"):
                        logger.record_eval(step, evaluate(state))
                checkpoints.check()
                stopping = stop.agreed(step)
                if checkpoints.due(done) or stopping or done == config.steps:
                    with logger.pause("checkpoint"):
                        checkpoints.save(done, state, data)
                if stopping:
                    break


def _data(config: Config, mesh: jax.sharding.Mesh, split: str, accumulation: int) -> Any:
    share = own_share(mesh)
    return make_iterator(
        config,
        split=split,
        rows_per_process=rows_per_process(config, mesh),
        accumulation=accumulation,
        share=share.place,
        shares=share.shares,
    )


def _evaluator(config: Config, mesh: jax.sharding.Mesh, shapes: TrainState) -> Any:
    """A function from the state to the mean loss over the first `eval_steps` held-out batches."""
    if not config.eval_interval:
        return None
    data = _data(config, mesh, "eval", 1)
    beginning = data.get_state()
    eval_step = compile_eval_step(config, mesh, shapes)

    def evaluate(state: TrainState) -> dict[str, float]:
        data.set_state(beginning)
        sums = [eval_step(state, put_batch(next(data), mesh)) for _ in range(config.eval_steps)]
        tokens = sum(float(weight) for _, weight in sums)
        return {"avg_loss": sum(float(loss) for loss, _ in sums) / tokens, "total_weights": tokens}

    return evaluate


def run(config: Config, run_log: RunLog | None) -> int:
    """Runs one training job and returns its exit code.

    If another process of the job dies, this one ends without returning.

    Args:
        config: of the job.
        run_log: of this process; None: its number is known only after it has joined the others.
    """
    job = Job()
    try:
        job.join(config)
        compile_log = CompileLog()
        with StopRequest() as stop, opened_run_log(config, run_log, stop, compile_log) as kept:
            train(config, stop, job, compile_log, kept)
            job.leave()
    except KeyboardInterrupt:
        return job.fail(INTERRUPT_EXIT_CODE, "SIGINT")
    except Exception as error:
        code = _exit_code(error)
        job.await_verdict(error)
        if code is None:
            traceback.print_exc()
            return job.fail(1, f"{type(error).__name__}: {error}")
        print(two_lines("mfu_jax.train", error), file=sys.stderr)
        return job.fail(code, str(error))
    _say_where(config)
    return stop.exit_code


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error reported in one line; None: the error needs a traceback."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, NonFiniteLossError):
        return NON_FINITE_EXIT_CODE
    return CHECKPOINT_EXIT_CODE if isinstance(error, CheckpointError) else None


@contextlib.contextmanager
def frozen_gc() -> Iterator[Callable[[], None]]:
    """Yields a function; once called, the garbage collector skips all objects that exist by then.

    JAX and the compiled step are about half a million objects. Scanning all of them takes 0.1 to
    0.3 s, several times per run, during which no thread of the process runs.
    """

    def freeze() -> None:
        gc.collect()  # present garbage would otherwise stay until the end
        gc.freeze()

    try:
        yield freeze
    finally:
        gc.unfreeze()


def _say_where(config: Config) -> None:
    if jax.process_index() != 0:
        return
    if config.metrics_path is not None:
        print(f"metrics:     {config.metrics_path}")
    if config.tensorboard_path is not None:
        print(f"TensorBoard: tensorboard --logdir {config.tensorboard_path}")
    if config.enable_checkpointing:
        print(f"checkpoints: {config.run_directory / 'checkpoints'}")
