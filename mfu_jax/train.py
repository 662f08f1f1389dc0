"""Trains the reference model and logs TFLOP/s, MFU and HFU of every step.

    python -m mfu_jax.train configs/base.yml run_name=demo steps=50 key=value …

Without a file it trains ``configs/demo.yml``. ``configs/base.yml`` lists every key.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax

from mfu_jax.errors import UserError
from mfu_jax.logger.non_finite import NON_FINITE_EXIT_CODE, NonFiniteLossError
from mfu_jax.logger.timing.compile_events import CompileLog
from mfu_jax.trainer.checkpoint import Checkpointer, StopRequest
from mfu_jax.trainer.data import make_iterator
from mfu_jax.trainer.mesh import (
    initialize_distributed,
    make_mesh,
    put_batch,
    rows_per_process,
)
from mfu_jax.trainer.pyconfig import Config, load
from mfu_jax.trainer.run_logger import (
    count_step,
    find_step_peaks,
    lock_run,
    make_run_logger,
    make_run_sinks,
    settings_of,
)
from mfu_jax.trainer.state import TrainState, abstract_state, create_state, resolve_attention
from mfu_jax.trainer.step import compile_eval_step, compile_train_step

SIGTERM_EXIT_CODE = 143


def train(config: Config, stop: StopRequest) -> None:
    """Trains until `config.steps` optimizer steps are done, or a stop is requested.

    Raises:
        UserError: the config does not fit the machine, the data or the checkpoint.
        NonFiniteLossError: the loss became NaN or infinite.
    """
    compile_log = CompileLog()
    mesh = make_mesh(config)
    config = resolve_attention(config, mesh)
    peaks = find_step_peaks(config)
    data = _data(config, mesh, "train", config.gradient_accumulation_steps)
    shapes = abstract_state(config, mesh)
    with lock_run(config), Checkpointer(config) as checkpoints:
        state = checkpoints.restore(shapes, data) or create_state(config, mesh)
        start_step = int(state.step)
        if start_step >= config.steps:
            why = f"the checkpoint of {config.run_name!r} has {start_step} steps"
            print(f"nothing to do: {why if start_step else 'steps=0'}")
            return
        settings = settings_of(config, start_step)
        sinks = make_run_sinks(config, settings)
        evaluate = _evaluator(config, mesh, shapes)
        train_step = compile_train_step(config, mesh, shapes)
        flops = count_step(config, train_step)
        with make_run_logger(
            config,
            settings,
            flops=flops,
            state=state,
            peaks=peaks,
            sinks=sinks,
            compile_log=compile_log,
        ) as logger:
            for step in range(start_step, config.steps):
                with logger.waiting("data"):
                    batch = put_batch(next(data), mesh)
                state, metrics = train_step(state, batch)
                logger.record(step, metrics)

                done = step + 1
                if config.eval_interval and done % config.eval_interval == 0:
                    with logger.pause("eval"):
                        logger.record_eval(step, evaluate(state))
                stopping = stop.agreed(step)
                if checkpoints.due(done) or stopping or done == config.steps:
                    with logger.pause("checkpoint"):
                        checkpoints.save(done, state, data)
                if stopping:
                    break
        if jax.process_index() == 0:
            print(flops.ledger.render())


def _data(config: Config, mesh: jax.sharding.Mesh, split: str, accumulation: int) -> Any:
    return make_iterator(
        config,
        split=split,
        rows_per_process=rows_per_process(config, mesh),
        accumulation=accumulation,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one training job; returns 0, 2 (wrong input), 3 (NaN or Inf loss) or 143 (SIGTERM)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help", "help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        config = load(arguments)
        initialize_distributed(config)
        with StopRequest() as stop:
            train(config, stop)
    except UserError as error:
        print(f"mfu_jax.train: {error}", file=sys.stderr)
        return 2
    except NonFiniteLossError as error:
        print(f"mfu_jax.train: {error}", file=sys.stderr)
        return NON_FINITE_EXIT_CODE
    except KeyboardInterrupt:
        return 130
    _say_where(config)
    return SIGTERM_EXIT_CODE if stop.received else 0


def _say_where(config: Config) -> None:
    if jax.process_index() != 0:
        return
    if config.metrics_path is not None:
        print(f"metrics:     {config.metrics_path}")
    if config.tensorboard_path is not None:
        print(f"TensorBoard: tensorboard --logdir {config.tensorboard_path}")
    if config.enable_checkpointing:
        print(f"checkpoints: {config.run_directory / 'checkpoints'}")


if __name__ == "__main__":
    raise SystemExit(main())
